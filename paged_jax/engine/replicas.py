"""Several copies of a model that share the requests: data parallelism.

Each copy is an engine with its own weights, its own pool, and GPUs of its own. A request goes to the engine that has
the fewest unfinished samples, and stays there. Steps of different engines run at the same time, each in a thread, so
that no engine ever waits for another one's step.

    add_request, cancel ──► calls ──► thread: the calls, then Engine.step ──┐
                        ├─► calls ──► thread: the calls, then Engine.step ──┼──► step, as soon as one of them is done
                        └─► calls ──► thread: the calls, then Engine.step ──┘
"""

import collections.abc
import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import override

from paged_jax.engine.base import BaseEngine
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Delta, SamplingParams
from paged_jax.engine.stats import Stats


@dataclasses.dataclass
class _Replica:
    """An engine, and what the thread that calls `Replicas` knows of it.

    Attributes:
      engine: the engine; while a step runs, only that step's thread calls it, but for `check`.
      calls: calls that the engine is to get before its next step.
      request_ids: for each request that this engine was given, the id that it has in `Replicas`. The engine itself
        counts its requests from 0.
      num_unfinished: samples that are unfinished.
      running: the step that runs, or whose tokens were not taken yet.
    """

    engine: Engine
    calls: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    request_ids: list[int] = dataclasses.field(default_factory=list)
    num_unfinished: int = 0
    running: concurrent.futures.Future[list[Delta]] | None = None

    def advance(self, calls: list[Callable[[], object]]) -> list[Delta]:
        """Makes the calls and runs a step. This runs in the thread."""
        for call in calls:
            call()
        return self.engine.step()

    def wait(self) -> None:
        """Waits until no step runs."""
        if self.running is not None:
            concurrent.futures.wait([self.running])

    def settle(self) -> None:
        """Waits until no step runs, and makes all calls."""
        self.wait()
        calls, self.calls = self.calls, []
        for call in calls:
            call()


@dataclasses.dataclass
class _Placed:
    """Where an unfinished request runs, the id that it has there, and how many of its samples are unfinished."""

    replica: _Replica
    local_id: int
    num_unfinished: int


class Replicas(BaseEngine):
    """Runs requests over several engines, each with a copy of the same model on GPUs of its own.

    It is used like an `Engine`, and gives the same tokens: a sample depends on its seed and never on where it runs.
    Which engine a request goes to depends on when others finish. Python plans the steps of all engines one at a time:
    where steps are so short that plans fill their time, run a process for each copy instead.

    Args:
      engines: at least one. The caller must not use them any more.

    Example:
      >>> engine = Replicas([make_engine(mesh) for mesh in meshes])
      >>> (completions,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    """

    def __init__(self, engines: collections.abc.Sequence[Engine]):
        if not engines:
            raise ValueError("Replicas needs at least one engine, got none")
        for engine in engines:
            engine.reset()  # so that it counts its requests from 0
        self._replicas = [_Replica(engine) for engine in engines]
        self._threads = concurrent.futures.ThreadPoolExecutor(len(engines), thread_name_prefix="replica")
        self._placed: dict[int, _Placed] = {}
        self._next_id = 0

    @property
    @override
    def max_num_seqs(self) -> int:
        """How many sequences can run at the same time, in all engines together."""
        return sum(replica.engine.max_num_seqs for replica in self._replicas)

    @property
    @override
    def has_work(self) -> bool:
        return bool(self._placed)

    @override
    def reset(self, config: EngineConfig | None = None) -> None:
        """Does what `Engine.reset` does, in each engine, as soon as the steps that run are done."""
        for replica in self._replicas:
            replica.wait()
            replica.engine.reset(config)
        self._replicas = [_Replica(replica.engine) for replica in self._replicas]
        self._placed.clear()
        self._next_id = 0

    @override
    def check(self, prompt: collections.abc.Sequence[int], params: SamplingParams) -> int:
        """Does what `Engine.check` does: a request must fit into every engine."""
        return min(replica.engine.check(prompt, params) for replica in self._replicas)

    @override
    def add_request(
        self,
        prompt: collections.abc.Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008 (immutable)
    ) -> int:
        """Does what `Engine.add_request` does, in the engine with the fewest unfinished samples."""
        self.check(prompt, params)
        prompt = tuple(prompt)  # the caller may change a list before the engine sees it
        request_id, self._next_id = self._next_id, self._next_id + 1
        seeded = dataclasses.replace(params, seed=request_id if params.seed is None else params.seed)
        replica = min(self._replicas, key=lambda replica: replica.num_unfinished)
        replica.calls.append(lambda: replica.engine.add_request(prompt, seeded))
        self._placed[request_id] = _Placed(replica, len(replica.request_ids), params.n)
        replica.request_ids.append(request_id)
        replica.num_unfinished += params.n
        return request_id

    @override
    def step(self) -> list[Delta]:
        """Starts a step in every engine that has work and runs none, then waits until any engine's step is done.

        Returns:
          A `Delta` for each sample that has a new token.
        """
        for replica in self._replicas:
            if replica.running is None and (replica.calls or replica.engine.has_work):
                calls, replica.calls = replica.calls, []
                replica.running = self._threads.submit(replica.advance, calls)
        steps = {replica.running: replica for replica in self._replicas if replica.running is not None}
        done, _ = concurrent.futures.wait(steps, return_when=concurrent.futures.FIRST_COMPLETED)
        return [delta for running in done for delta in self._take(steps[running])]

    @override
    def is_unfinished(self, request_id: int) -> bool:
        return request_id in self._placed

    @override
    def cancel(self, request_id: int) -> bool:
        """Does what `Engine.cancel` does. The engine frees the blocks at its next step, or when `stats` is called."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return False
        placed.replica.num_unfinished -= placed.num_unfinished
        placed.replica.calls.append(lambda: placed.replica.engine.cancel(placed.local_id))
        return True

    @override
    def stats(self) -> Stats:
        """The statistics of all engines together, as soon as the steps that run are done."""
        for replica in self._replicas:
            replica.settle()
        return Stats.join([replica.engine.stats() for replica in self._replicas])

    def _take(self, replica: _Replica) -> list[Delta]:
        """Takes the tokens of a step that is done, but for those of requests that were cancelled meanwhile."""
        running, replica.running = replica.running, None
        assert running is not None
        deltas = []
        for delta in running.result():
            request_id = replica.request_ids[delta.request_id]
            placed = self._placed.get(request_id)
            if placed is None:
                continue
            if delta.finish_reason is not None:
                replica.num_unfinished -= 1
                placed.num_unfinished -= 1
                if not placed.num_unfinished:
                    del self._placed[request_id]
            deltas.append(delta._replace(request_id=request_id))
        return deltas
