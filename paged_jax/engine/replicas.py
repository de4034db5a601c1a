"""Several copies of a model that share the requests: data parallelism.

Each copy is an engine with its own weights, its own pool, and GPUs of its own. A request goes to the engine that has
the fewest unfinished samples, and stays there. Steps of different engines run at the same time, each in a thread, so
that no engine ever waits for another one's step. If an engine's step fails, that engine's requests are lost, and the
others go on.

    add_request, cancel ──► calls ──► thread: the calls, then Engine.step ──┐
                        ├─► calls ──► thread: the calls, then Engine.step ──┼──► step, as soon as one of them is done
                        └─► calls ──► thread: the calls, then Engine.step ──┘
"""

import collections.abc
import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any, override

from paged_jax.engine.base import BaseEngine, RunningRequests
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Delta, SamplingParams, Seeds
from paged_jax.engine.stats import Stats


class ReplicaFailed(RuntimeError):
    """Raised by `Replicas.step` if an engine's step has failed. The other engines' requests go on.

    Attributes:
      request_ids: the requests that are lost.

    Example:
      >>> from paged_jax.engine import ReplicaFailed
      >>> ReplicaFailed("engine 1 has failed", (3, 4)).request_ids
      (3, 4)
    """

    def __init__(self, message: str, request_ids: tuple[int, ...]):
        super().__init__(message, request_ids)
        self.message, self.request_ids = message, request_ids

    def __str__(self) -> str:
        return self.message


@dataclasses.dataclass(eq=False)
class _Replica:
    """An engine, and the state that the thread which calls `Replicas` keeps of it.

    Attributes:
      engine: the engine; while a step runs, only that step's thread calls it, except for `check`.
      calls: calls to make before the engine's next step.
      num_added: how many requests this engine was given: the id that it gives the next one.
      request_ids: for each unfinished request of this engine, by its id there, the id that it has in `Replicas`.
      num_unfinished: samples that are unfinished.
      running: the step that runs, or whose tokens were not taken yet.
      stats: the engine's statistics after its last step.
      is_lost: whether the engine failed and could not be reset, so that it gets no more requests.
    """

    engine: Engine
    calls: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    num_added: int = 0
    request_ids: dict[int, int] = dataclasses.field(default_factory=dict)
    num_unfinished: int = 0
    running: concurrent.futures.Future[list[Delta]] | None = None
    stats: Stats | None = None
    is_lost: bool = False

    def advance(self, calls: list[Callable[[], object]]) -> list[Delta]:
        """Makes the calls and runs a step. This runs in the thread."""
        for call in calls:
            call()
        deltas = self.engine.step()
        self.stats = self.engine.stats()
        return deltas

    @property
    def error(self) -> BaseException | None:
        """The error of the last step, if the step has ended and its error is not reported yet."""
        return self.running.exception() if self.running is not None and self.running.done() else None

    @property
    def is_idle(self) -> bool:
        """Whether no step runs and no error waits to be reported."""
        return (self.running is None or self.running.done()) and self.error is None and not self.is_lost

    def settle(self) -> None:
        """Makes all calls, on an engine that is idle, and counts anew."""
        calls, self.calls = self.calls, []
        for call in calls:
            call()
        self.stats = self.engine.stats()


@dataclasses.dataclass(eq=False)
class _Placed:
    """The engine that runs an unfinished request, the request's id there, and its number of unfinished samples."""

    replica: _Replica
    local_id: int
    num_unfinished: int


class Replicas(BaseEngine):
    """Runs requests over several engines, each with a copy of the same model on GPUs of its own.

    It is used like an `Engine`, and gives the same tokens: a sample depends on its seed and never on where it runs.
    Which engine a request goes to depends on when others finish. Python plans the steps of all engines one at a time:
    where steps are so short that plans fill their time, run a process for each copy instead.

    If an engine fails, `step` raises `ReplicaFailed`, which names the requests that are lost. That engine is reset and
    gets requests again; if its reset raises, it gets none until `reset` here succeeds.

    Args:
      engines: at least one. The caller must not use them any more.
      seed: as for `Engine`.
      step_timeout_seconds: how long `reset` waits for steps that run.

    Example:
      Two copies of a model that continues a token by the next number.

      >>> import jax
      >>> from paged_jax import PagedKVCache
      >>> from paged_jax.engine import Engine, EngineConfig, Replicas, SamplingParams
      >>> def step(weights, caches, batch):
      ...     return jax.nn.one_hot(batch.token_ids[batch.logit_rows] + 1, 16), caches
      >>> def make():
      ...     caches = (PagedKVCache.create(num_blocks=8, block_size=4, num_kv_heads=1, head_size=8),)
      ...     return Engine(step, {}, caches, EngineConfig(max_model_len=16, max_num_seqs=2, max_tokens_per_step=8))
      >>> engine = Replicas([make(), make()])
      >>> results = engine.generate([[1], [5]], SamplingParams(max_tokens=2))
      >>> [completion.token_ids for (completion,) in results]
      [(2, 3), (6, 7)]
    """

    def __init__(
        self,
        engines: collections.abc.Sequence[Engine],
        *,
        seed: int | None = None,
        step_timeout_seconds: float = 60.0,
    ):
        if not engines:
            raise ValueError("Replicas needs at least one engine, got none")
        self._seeds, self._step_timeout_seconds = Seeds(seed), step_timeout_seconds
        self._replicas = [_Replica(engine) for engine in engines]
        self._threads = concurrent.futures.ThreadPoolExecutor(len(engines), thread_name_prefix="replica")
        self._placed: dict[int, _Placed] = {}
        self.reset()  # so that each engine counts its requests from 0

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
        """Does what `Engine.reset` does, in each engine, as soon as the steps that run are done.

        Raises:
          ValueError: the config differs in a field that decides what is compiled.
          TimeoutError: a step does not end.
        """
        for replica in self._replicas:
            replica.engine.check_config(config)
        with self._changing("reset"):
            self._wait_for_steps()
            for replica in self._replicas:
                replica.engine.reset(config)
            self._replicas = [_Replica(replica.engine, stats=replica.engine.stats()) for replica in self._replicas]
            self._placed.clear()
            self._seeds.restart()
            self._next_id = 0

    def _wait_for_steps(self) -> None:
        running = {replica.running for replica in self._replicas if replica.running is not None}
        if concurrent.futures.wait(running, self._step_timeout_seconds).not_done:
            raise TimeoutError(f"the step of an engine has not ended for {self._step_timeout_seconds} s")

    @override
    def update_weights(self, weights: Any, *, running: RunningRequests = "continue") -> None:
        """Does what `Engine.update_weights` does, in each engine, as soon as the steps that run are done.

        Raises:
          ValueError: as in `Engine.update_weights`, or there are more or fewer weights than engines.
          TimeoutError: a step does not end; nothing has changed then.
        """
        if not isinstance(weights, list | tuple) or len(weights) != len(self._replicas):
            raise ValueError(f"Replicas take a list of weights, one for each of its {len(self._replicas)} engines")
        for index, (replica, some) in enumerate(zip(self._replicas, weights, strict=True)):
            try:
                replica.engine.check_update(some, running)
            except ValueError as error:
                raise ValueError(f"replica {index}: {error}") from None
        self._check_alive()
        self._wait_for_steps()
        with self._changing("update_weights"):
            for replica, some in zip(self._replicas, weights, strict=True):
                if replica.is_idle:
                    replica.settle()
                replica.engine.replace_weights(some, running)

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
        with self._changing("add_request"):
            request_id, self._next_id = self._next_id, self._next_id + 1
            seeded = self._seeds.give(params, request_id)
            replica = min(
                (replica for replica in self._replicas if not replica.is_lost),
                key=lambda replica: replica.num_unfinished,
            )
            local_id, replica.num_added = replica.num_added, replica.num_added + 1
            replica.request_ids[local_id] = request_id
            self._placed[request_id] = _Placed(replica, local_id, params.n)
            replica.num_unfinished += params.n
            replica.calls.append(lambda: replica.engine.add_request(prompt, seeded))
            return request_id

    @override
    def step(self) -> list[Delta]:
        """Starts a step in every engine that has work and runs none, then waits until any engine's step is done.

        Returns:
          A `Delta` for each sample that has a new token.

        Raises:
          ReplicaFailed: an engine's step has failed; no token of the other engines is lost.
          EngineFailed: an earlier call has failed, or no engine is left.
        """
        with self._changing("step"):
            for replica in self._replicas:
                if replica.running is None and not replica.is_lost and (replica.calls or replica.engine.has_work):
                    calls, replica.calls = replica.calls, []
                    replica.running = self._threads.submit(replica.advance, calls)
        if not any(replica.error for replica in self._replicas):
            # Nothing changes here, so that Ctrl-C does no harm.
            running = {replica.running for replica in self._replicas if replica.running is not None}
            concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
        with self._changing("step"):
            done = [replica for replica in self._replicas if replica.running is not None and replica.running.done()]
            deltas = [delta for replica in done if not replica.error for delta in self._take(replica)]
            if deltas:
                return deltas  # what failed is still there for the next call
            failure = next((self._lose(replica) for replica in done if replica.error), None)
        if failure is not None:
            if all(replica.is_lost for replica in self._replicas):
                self._failure = str(failure)
            raise failure
        return deltas

    @override
    def is_unfinished(self, request_id: int) -> bool:
        return request_id in self._placed

    @override
    def cancel(self, request_id: int) -> bool:
        """Does what `Engine.cancel` does. The engine frees the blocks at its next step, or when `stats` is called."""
        with self._changing("cancel"):
            placed = self._placed.pop(request_id, None)
            if placed is None:
                return False
            replica, local_id = placed.replica, placed.local_id
            del replica.request_ids[local_id]
            replica.num_unfinished -= placed.num_unfinished
            replica.calls.append(lambda: replica.engine.cancel(local_id))
            return True

    @override
    def stats(self) -> Stats:
        """The statistics of all engines together. An engine whose step runs gives those from before that step."""
        with self._changing("stats"):
            for replica in self._replicas:
                if replica.is_idle:
                    replica.settle()
        return Stats.join([replica.stats for replica in self._replicas if replica.stats is not None])

    def _take(self, replica: _Replica) -> list[Delta]:
        """Takes the tokens of a finished step, and drops tokens of requests that were cancelled meanwhile."""
        running, replica.running = replica.running, None
        assert running is not None
        deltas = []
        for delta in running.result():
            request_id = replica.request_ids.get(delta.request_id)
            if request_id is None:
                continue
            if delta.finish_reason is not None:
                placed = self._placed[request_id]
                replica.num_unfinished -= 1
                placed.num_unfinished -= 1
                if not placed.num_unfinished:
                    del self._placed[request_id], replica.request_ids[delta.request_id]
            deltas.append(delta._replace(request_id=request_id))
        return deltas

    def _lose(self, replica: _Replica) -> ReplicaFailed:
        """Forgets the requests of an engine that failed, and resets the engine."""
        error, lost = replica.error, tuple(replica.request_ids.values())
        for request_id in lost:
            del self._placed[request_id]
        fresh, index = _Replica(replica.engine, stats=replica.stats), self._replicas.index(replica)
        try:
            fresh.engine.reset()
        except Exception:
            fresh.is_lost = True
        self._replicas[index] = fresh
        end = ", and so has its reset: it gets no more requests" if fresh.is_lost else ""
        failure = ReplicaFailed(f"replica {index} has failed, {type(error).__name__}: {error}{end}", lost)
        failure.__cause__ = error
        return failure
