"""Runs an engine in a thread of its own, takes requests to it from an event loop, and brings the tokens back.

    event loop    submit ──► inbox ──┐                          ┌──► the ticket's queue ──► handler
    thread                           └──► engine.step ──► deltas ┘

The thread takes everything from its inbox and then runs a step of the engine, again and again. If the engine has no
work, the thread waits for its inbox.
"""

import asyncio
import dataclasses
import queue
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from paged_jax import engine


class TooManyAtOnce(ValueError):
    """Raised when one request asks for more texts than the server ever takes."""


class Overloaded(Exception):
    """Raised when as many requests wait as the server accepts."""


class EngineFailed(Exception):
    """Raised when the engine failed while it worked on a request."""


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

    Attributes:
        is_failing: whether the last step failed.
    """

    def __init__(self, the_engine: engine.BaseEngine, max_queued: int):
        self._engine = the_engine
        self._max_unfinished = the_engine.max_num_seqs + max_queued
        self._unfinished = 0  # samples; only the event loop changes it
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}  # only the thread touches it
        self._is_stopping = self.is_failing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its present step; unfinished requests are lost."""
        self._inbox.put(self._stop)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def check_room(self, num_samples: int) -> None:
        """Raises if the server cannot take so many more samples now.

        Raises:
            TooManyAtOnce: it never can.
            Overloaded: too many requests wait.
        """
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

    async def stats(self) -> engine.Stats:
        """Returns the engine's statistics, taken between two steps."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def answer(stats):
            if not future.done():
                future.set_result(stats)

        self._inbox.put(lambda: _call(loop, answer, self._engine.stats()))
        return await future

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._take_inbox()
                if self._engine.has_work and not self._is_stopping:
                    self._send(self._engine.step())
                    self.is_failing = False
            except Exception:
                traceback.print_exc(file=sys.stderr)
                self.is_failing = True
                self._fail(self._tickets.values())
                self._tickets.clear()
                self._engine.reset()

    def _take_inbox(self) -> None:
        """Does everything in the inbox; if the engine has no work, waits until there is some."""
        try:
            while not self._is_stopping:
                self._inbox.get(block=not self._engine.has_work)()
        except queue.Empty:
            return

    def _stop(self) -> None:
        self._is_stopping = True

    def _add(self, tickets: list[Ticket]) -> None:
        try:
            for ticket in tickets:
                ticket.request_id = self._engine.add_request(ticket.prompt, ticket.params)
                self._tickets[ticket.request_id] = ticket
        except Exception:
            self._fail([ticket for ticket in tickets if ticket.request_id is None])
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
            ticket = self._tickets[request_id]
            _call(ticket.loop, self._deliver, ticket, some)
        for request_id in [request_id for request_id in news if not self._engine.is_unfinished(request_id)]:
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
