"""Runs an engine in a thread of its own, takes requests to it from an event loop, and brings the tokens back.

    event loop    submit ──► inbox ──┐                          ┌──► the ticket's queue ──► handler
    thread                           └──► engine.step ──► deltas ┘

The thread takes everything from its inbox and then runs a step of the engine, again and again. If the engine has no
work, the thread waits for its inbox.

After a step that failed, the thread resets the engine and tries it with a request of its own, again and again, until it
gets a token; a balancer that watches /health may send no other requests until then. If the engine cannot be reset, all
requests fail from then on. Nothing can end a step that never returns, but `Worker.trouble` tells of it.
"""

import asyncio
import contextlib
import dataclasses
import queue
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from paged_jax import engine

_PROBE = engine.SamplingParams(max_tokens=1)
_LONGEST_PAUSE = 30.0  # seconds between two probes of an engine that goes on failing


class TooManyAtOnce(ValueError):
    """Raised when one request asks for more texts than the server ever takes."""


class Overloaded(Exception):
    """Raised when as many requests wait as the server accepts."""


class EngineFailed(Exception):
    """Raised when the engine failed while it worked on a request."""


class Unavailable(Exception):
    """Raised when the engine cannot take requests, and says why."""


@dataclasses.dataclass(eq=False)
class Ticket:
    """A submitted request. Only the event loop changes `num_unfinished`, and only the thread `request_id`.

    Attributes:
        prompt, params: what is asked for.
        loop: the event loop that submitted the request.
        num_unfinished: samples whose last delta has not come yet; 0 once the request is closed.
        news: lists of new deltas, and at most one error.
        request_id: the engine's id; None until the thread has added the request.
    """

    prompt: Sequence[int]
    params: engine.SamplingParams
    loop: asyncio.AbstractEventLoop
    num_unfinished: int
    news: asyncio.Queue = dataclasses.field(default_factory=asyncio.Queue)
    request_id: int | None = None

    async def deltas(self) -> AsyncIterator[engine.Delta]:
        """Yields the deltas of all samples until all of them are finished.

        Raises:
            EngineFailed: the engine failed; the request is lost.
        """
        while self.num_unfinished or not self.news.empty():
            news = await self.news.get()
            if isinstance(news, Exception):
                raise news
            for delta in news:
                yield delta


class Worker:
    """Runs the engine's thread.

    Args:
        the_engine: the engine; from now on only the thread calls it, except for its method `check`.
        max_queued: how many samples may wait while `max_num_seqs` others run.
        step_seconds: how long the thread may be busy, with a step for example, before it counts as stuck.
        probe_seconds: how long to wait after a failure before the engine is tried; after more of them longer.
        on_broken: called in the thread once the engine can never be used again.
    """

    def __init__(
        self,
        the_engine: engine.BaseEngine,
        max_queued: int,
        *,
        step_seconds: float = 120.0,
        probe_seconds: float = 1.0,
        on_broken: Callable[[], None] = lambda: None,
    ):
        self.on_broken = on_broken
        self._engine = the_engine
        self._max_unfinished = the_engine.max_num_seqs + max_queued
        self._step_seconds, self._first_pause = step_seconds, probe_seconds
        self._unfinished = 0  # samples; only the event loop changes it
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}  # only the thread touches it
        self._stats: engine.Stats | None = None
        self._is_stopping = self._is_failing = False
        self._broken: str | None = None
        self._busy_since: float | None = None  # None while the thread waits for its inbox
        self._pause, self._next_probe, self._probe = probe_seconds, 0.0, None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, seconds: float = 5.0) -> None:
        """Ends the thread after its present step; unfinished requests are lost. It waits for `seconds` at most."""
        self._inbox.put(self._stop)
        self._thread.join(seconds)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def trouble(self) -> str | None:
        """Why the engine cannot be relied on at present, or None if it can."""
        return self._refusal() or ("the last step failed" if self._is_failing else None)

    @property
    def broken(self) -> str | None:
        """Why the engine can never be used again, or None if it can."""
        return self._broken

    def _refusal(self) -> str | None:
        """Why requests are refused, or None. After a step that failed they are taken: the engine may serve again."""
        if self._broken is not None:
            return self._broken
        if not self.is_alive:
            return "the engine's thread does not run"
        busy_since = self._busy_since
        if busy_since is not None and (seconds := time.monotonic() - busy_since) > self._step_seconds:
            return f"the engine's present step has not ended after {seconds:.0f} s"
        return None

    def check_room(self, num_samples: int) -> None:
        """Raises if the server cannot take this many more samples now.

        Raises:
            Unavailable: the engine is stuck or broken.
            TooManyAtOnce: it never can.
            Overloaded: too many requests wait.
        """
        if (refusal := self._refusal()) is not None:
            raise Unavailable(refusal)
        if num_samples > self._max_unfinished:
            raise TooManyAtOnce(f"{num_samples} texts are asked for at once; the server takes {self._max_unfinished}")
        if self._unfinished + num_samples > self._max_unfinished:
            raise Overloaded

    def submit(self, requests: Sequence[tuple[Sequence[int], engine.SamplingParams]]) -> list[Ticket]:
        """Submits requests, all or none. It must be called from the event loop.

        Args:
            requests: the prompt and the parameters of each request.

        Returns:
            A ticket for each request. The caller must `close` each of them.

        Raises:
            ValueError: a request can never be served; the error says why.
            Unavailable: the engine is stuck or broken.
            Overloaded: too many requests wait.
        """
        for prompt, params in requests:
            self._engine.check(prompt, params)
        num_samples = sum(params.n for _, params in requests)
        self.check_room(num_samples)
        self._unfinished += num_samples
        loop = asyncio.get_running_loop()
        tickets = [Ticket(prompt, params, loop, params.n) for prompt, params in requests]
        self._inbox.put(lambda: self._add(tickets))
        return tickets

    def close(self, ticket: Ticket) -> None:
        """Ends a request, finished or not. It must be called from the event loop."""
        if ticket.num_unfinished:
            self._unfinished -= ticket.num_unfinished
            ticket.num_unfinished = 0
            self._inbox.put(lambda: self._cancel(ticket))

    async def stats(self, seconds: float = 1.0) -> engine.Stats | None:
        """Returns the engine's statistics, taken between two steps; the last known ones if that takes too long."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def tell() -> None:
            self._stats = self._engine.stats() if self._broken is None else self._stats
            _call(loop, lambda: future.done() or future.set_result(None))

        self._inbox.put(tell)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(future, seconds)
        return self._stats

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                try:
                    self._take_inbox()
                    self._step()
                except engine.ReplicaFailed as error:
                    self._lose(error)
                except Exception:
                    self._recover()
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            self._broken = f"the engine failed and cannot be reset: {error}"
            self._fail(self._tickets.values())
            self._tickets.clear()
            self.on_broken()
            while not self._is_stopping:  # what waits for the thread gets an answer
                self._take_inbox()

    def _take_inbox(self) -> None:
        """Does everything in the inbox; if the engine has no work, waits until there is some, or a probe is due."""
        try:
            while not self._is_stopping:
                self._busy_since = time.monotonic()
                has_work = self._broken is None and self._engine.has_work
                pause = max(self._next_probe - time.monotonic(), 0) if self._is_due() else None
                if not has_work:
                    self._busy_since = None
                message = self._inbox.get(block=not has_work, timeout=None if has_work else pause)
                self._busy_since = time.monotonic()
                message()
        except queue.Empty:
            self._busy_since = time.monotonic()

    def _step(self) -> None:
        """Runs a step, if there is work or a probe is due. Tokens prove that the engine works."""
        if self._is_stopping:
            return
        if self._is_due() and time.monotonic() >= self._next_probe:
            self._probe = self._engine.add_request([0], _PROBE)
        if self._engine.has_work and (deltas := self._engine.step()):
            self._is_failing, self._pause, self._probe = False, self._first_pause, None
            self._send(deltas)

    def _is_due(self) -> bool:
        """Whether the engine is to be tried after a pause."""
        return self._is_failing and self._broken is None and self._probe is None

    def _lose(self, error: engine.ReplicaFailed) -> None:
        """Fails the requests of one engine, which has been reset if it can be; the others go on."""
        if self._engine.has_failed:  # none is left
            self._recover()
            return
        traceback.print_exc(file=sys.stderr)
        self._fail([self._tickets.pop(id_) for id_ in error.request_ids if id_ in self._tickets])

    def _recover(self) -> None:
        traceback.print_exc(file=sys.stderr)
        self._is_failing, self._probe = True, None
        self._next_probe = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._fail(self._tickets.values())
        self._tickets.clear()
        self._engine.reset()

    def _stop(self) -> None:
        self._is_stopping = True

    def _add(self, tickets: list[Ticket]) -> None:
        try:
            for ticket in tickets:
                if self._broken is not None:
                    raise EngineFailed(self._broken)
                ticket.request_id = self._engine.add_request(ticket.prompt, ticket.params)
                self._tickets[ticket.request_id] = ticket
        except Exception:
            self._fail([ticket for ticket in tickets if ticket.request_id is None])
            if self._broken is None:
                raise

    def _cancel(self, ticket: Ticket) -> None:
        # After a failure the engine counts anew, so that another request may have this one's id.
        if ticket.request_id is not None and self._tickets.get(ticket.request_id) is ticket:
            del self._tickets[ticket.request_id]
            self._engine.cancel(ticket.request_id)

    def _deliver(self, ticket: Ticket, deltas: list[engine.Delta]) -> None:
        """Hands deltas to the ticket's reader, on the event loop. A finished sample no longer counts as unfinished."""
        if ticket.num_unfinished:
            num_finished = sum(delta.finish_reason is not None for delta in deltas)
            ticket.num_unfinished -= num_finished
            self._unfinished -= num_finished
            ticket.news.put_nowait(deltas)

    def _send(self, deltas: list[engine.Delta]) -> None:
        news: dict[int, list] = {}
        for delta in deltas:
            news.setdefault(delta.request_id, []).append(delta)
        for request_id, some in news.items():
            if (ticket := self._tickets.get(request_id)) is None:
                continue  # a probe
            _call(ticket.loop, self._deliver, ticket, some)
            if not self._engine.is_unfinished(request_id):
                del self._tickets[request_id]

    @staticmethod
    def _fail(tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            _call(ticket.loop, ticket.news.put_nowait, EngineFailed("the engine failed"))


def _call(loop: asyncio.AbstractEventLoop, function: Callable, *arguments) -> None:
    """Calls a function on an event loop, unless the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return
