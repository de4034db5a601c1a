"""Tests the server's worker over a made-up engine, whose steps the tests let through one by one."""

import asyncio
import contextlib
import inspect
import queue
import threading
from types import SimpleNamespace

import pytest

from examples.server.worker import EngineFailed, Overloaded, Unavailable, Worker
from paged_jax.engine import Delta, ReplicaFailed, SamplingParams
from tests.conftest import PATIENCE

PARAMS = SamplingParams(max_tokens=1)


class MadeUpEngine:
    """Finishes all its requests in a step, once the test has put something into `outcomes`: None, or an error."""

    def __init__(self):
        self.max_num_seqs = 1
        self.outcomes, self.refuses, self.reset_error = queue.Queue(), False, None
        self.num_resets = self.num_begun = 0  # and steps that have begun
        self.reset()

    has_failed = False

    def reset(self):
        self.has_failed = False
        if self.reset_error is not None:
            raise self.reset_error
        self.num_resets += 1
        self.next_id, self.requests = 0, {}

    def stats(self):
        return f"after {self.num_resets} resets"

    def check(self, prompt, params):
        pass

    def add_request(self, prompt, params):
        if self.refuses:
            raise RuntimeError("not this one")
        self.next_id += 1
        self.requests[self.next_id - 1] = params
        return self.next_id - 1

    def cancel(self, request_id):
        del self.requests[request_id]

    @property
    def has_work(self):
        return bool(self.requests)

    def is_unfinished(self, request_id):
        return request_id in self.requests

    def step(self):
        self.num_begun += 1
        if (error := self.outcomes.get(timeout=PATIENCE)) is not None:
            raise error
        done, self.requests = self.requests, {}
        return [
            Delta(request_id, i, (7,), finish_reason="stop") for request_id in done for i in range(done[request_id].n)
        ]


def run(story, max_queued=0, **options):
    """Runs the coroutine function `story(engine, worker)` while the worker's thread runs."""
    engine = MadeUpEngine()
    worker = Worker(engine, max_queued, **{"probe_seconds": 100, **options})
    worker.start()

    async def whole_story():
        try:
            await asyncio.wait_for(story(engine, worker), PATIENCE)
        except BaseException:  # the thread may wait for an outcome
            engine.outcomes.put(None)
            raise
        finally:
            await asyncio.to_thread(worker.stop, PATIENCE)

    asyncio.run(whole_story())
    assert not worker.is_alive
    assert worker._unfinished == 0
    assert not worker._tickets, "a ticket of a finished request stays for ever"
    return engine


async def until(is_done):
    """Waits until `is_done()`; the story has a limit."""
    while not is_done():
        await asyncio.sleep(0.005)


async def read(ticket):
    return [delta async for delta in ticket.deltas()]


async def fail_a_request(engine, worker):
    (ticket,) = worker.submit([([1], PARAMS)])
    engine.outcomes.put(RuntimeError("out of luck"))
    with pytest.raises(EngineFailed):
        await read(ticket)
    worker.close(ticket)


def test_closing_a_request_that_failed_leaves_the_next_one_alone(capfd):
    """After an error the engine counts its requests from 0 again, so that two requests have one id."""

    async def story(engine, worker):
        (failed,) = worker.submit([([1], PARAMS)])
        engine.outcomes.put(RuntimeError("out of luck"))
        with pytest.raises(EngineFailed):
            await read(failed)
        (other,) = worker.submit([([1], PARAMS)])
        worker.close(failed)
        engine.outcomes.put(None)
        assert len(await read(other)) == 1
        worker.close(other)

    run(story, max_queued=1)
    assert "out of luck" in capfd.readouterr().err


def test_a_request_that_the_engine_cannot_add_fails(capfd):
    async def story(engine, worker):
        engine.refuses = True
        for ticket in (tickets := worker.submit([([1], PARAMS), ([2], PARAMS)])):
            with pytest.raises(EngineFailed):
                await read(ticket)
        for ticket in tickets:
            worker.close(ticket)

    run(story, max_queued=1)
    assert "not this one" in capfd.readouterr().err


def test_a_client_that_reads_slowly_does_not_count_once_its_text_is_finished():
    async def story(engine, worker):
        (slow,) = worker.submit([([1], SamplingParams(n=2))])
        with pytest.raises(Overloaded):
            worker.submit([([1], PARAMS)])
        engine.outcomes.put(None)
        while worker._unfinished:
            await asyncio.sleep(0.01)
        (other,) = worker.submit([([1], PARAMS)])
        assert [delta.index for delta in await read(slow)] == [0, 1]
        worker.close(slow)
        assert worker._unfinished == 1
        worker.close(other)  # as its client hangs up
        engine.outcomes.put(None)  # the step that was waited for while the request was cancelled

    run(story, max_queued=1)


def test_after_a_failure_the_engine_is_tried_until_it_serves(capfd):
    """A balancer sends no request to a server that is not well, so that the server must find out by itself."""

    async def story(engine, worker):
        assert worker.trouble is None
        engine.outcomes.put(RuntimeError("out of luck"))
        (ticket,) = worker.submit([([1], PARAMS)])
        with pytest.raises(EngineFailed):
            await read(ticket)
        worker.close(ticket)
        await until(lambda: engine.requests)  # the worker's own
        assert worker.trouble == "the last step failed"
        engine.outcomes.put(RuntimeError("again"))
        await until(lambda: engine.num_resets == 3 and engine.requests)
        assert worker.trouble == "the last step failed"
        engine.outcomes.put(None)
        await until(lambda: worker.trouble is None)
        await asyncio.sleep(0.1)
        assert not engine.requests, "an engine that is well is not tried"
        (ticket,) = worker.submit([([1], PARAMS)])
        engine.outcomes.put(None)
        assert len(await read(ticket)) == 1
        worker.close(ticket)

    run(story, probe_seconds=0.02)
    assert "out of luck" in capfd.readouterr().err


def test_pauses_between_tries_grow_and_begin_anew(capfd):
    engine = MadeUpEngine()
    worker = Worker(engine, 0, probe_seconds=1)
    pauses = []
    for _ in range(7):
        worker._recover()
        pauses.append(worker._pause)
    assert pauses == [2, 4, 8, 16, 30, 30, 30]
    engine.requests = {0: PARAMS}
    engine.outcomes.put(None)
    worker._step()
    assert (worker._pause, worker.trouble) == (1, "the engine's thread does not run")


def test_tokens_of_a_request_show_that_the_engine_is_well(capfd):
    async def story(engine, worker):
        for outcome in (RuntimeError("out of luck"), None):
            (ticket,) = worker.submit([([1], PARAMS)])
            engine.outcomes.put(outcome)
            with contextlib.nullcontext() if outcome is None else pytest.raises(EngineFailed):
                await read(ticket)
            assert (worker.trouble is None) == (outcome is None)
            worker.close(ticket)

    run(story)


def test_a_step_without_tokens_shows_nothing(capfd, monkeypatch):
    """The first step after a reset is only launched; the next one reads its tokens, or fails."""

    async def story(engine, worker):
        await fail_a_request(engine, worker)
        steps = []
        monkeypatch.setattr(engine, "step", lambda: steps.append(1) or engine.outcomes.get(timeout=PATIENCE) or [])
        (ticket,) = worker.submit([([1], PARAMS)])
        engine.outcomes.put(None)
        await until(lambda: len(steps) > 1)
        assert worker.trouble == "the last step failed"
        monkeypatch.undo()
        engine.outcomes.put(None)
        engine.outcomes.put(None)
        await read(ticket)
        worker.close(ticket)

    run(story)


def test_of_several_engines_one_may_fail(capfd):
    """Only its requests are lost; `Replicas` has reset it."""

    async def story(engine, worker):
        lost, other = worker.submit([([1], PARAMS), ([2], PARAMS)])
        await until(lambda: len(engine.requests) == 2)
        engine.outcomes.put(ReplicaFailed("one of them has failed", (lost.request_id, 99)))
        with pytest.raises(EngineFailed):
            await read(lost)
        worker.close(lost)
        assert worker.trouble is None
        del engine.requests[lost.request_id]
        engine.outcomes.put(None)
        assert len(await read(other)) == 1
        worker.close(other)

    assert run(story, max_queued=1).num_resets == 1
    assert "one of them has failed" in capfd.readouterr().err


def test_if_no_engine_is_left_all_are_reset(capfd):
    async def story(engine, worker):
        (ticket,) = worker.submit([([1], PARAMS)])
        await until(lambda: engine.requests)
        engine.has_failed = True
        engine.outcomes.put(ReplicaFailed("the last one has failed", ()))
        with pytest.raises(EngineFailed):
            await read(ticket)
        worker.close(ticket)
        assert worker.trouble == "the last step failed"

    assert run(story).num_resets == 2


def test_an_engine_that_cannot_be_reset_fails_every_request(capfd):
    broken = threading.Event()

    async def story(engine, worker):
        stats = await worker.stats(PATIENCE)
        engine.reset_error = MemoryError("no memory at all")
        (running,) = worker.submit([([1], PARAMS)])
        await until(lambda: engine.requests)
        (waiting,) = worker.submit([([2], PARAMS)])  # it lies in the inbox while the step fails
        engine.outcomes.put(RuntimeError("out of luck"))
        for ticket in (running, waiting):
            with pytest.raises(EngineFailed):
                await read(ticket)
            worker.close(ticket)
        assert broken.is_set()
        assert worker.broken == worker.trouble == "the engine failed and cannot be reset: no memory at all"
        with pytest.raises(Unavailable, match="no memory at all"):
            worker.submit([([3], PARAMS)])
        assert await worker.stats(PATIENCE) == stats == "after 1 resets"
        assert worker.is_alive

    run(story, max_queued=1, on_broken=broken.set)
    error = capfd.readouterr().err
    assert "out of luck" in error
    assert "no memory at all" in error


@pytest.fixture
def clock(monkeypatch):
    """The worker's clock, which stands still unless the test sets it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("examples.server.worker.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_step_that_does_not_end_is_told_of(capfd, clock):
    async def story(engine, worker):
        first = await worker.stats(PATIENCE)
        assert first == "after 1 resets"
        (ticket,) = worker.submit([([1], PARAMS)])
        await until(lambda: engine.num_begun)
        clock.now = 7.0
        assert worker.trouble is None
        clock.now = 7.6
        assert worker.trouble == "the engine's present step has not ended after 8 s"
        with pytest.raises(Unavailable, match="has not ended"):
            worker.submit([([1], PARAMS)])
        assert await worker.stats(0.05) == first, "what is known is told"
        await asyncio.to_thread(worker.stop, 0.05)
        assert worker.is_alive
        engine.outcomes.put(None)  # it ends after all
        assert len(await read(ticket)) == 1
        worker.close(ticket)

    run(story, max_queued=1, step_seconds=7)


def test_an_idle_engine_is_well(clock):
    async def story(engine, worker):
        await worker.stats(PATIENCE)
        await until(lambda: worker._busy_since is None)
        clock.now = 8.0
        assert worker.trouble is None
        assert await worker.stats(PATIENCE) == "after 1 resets"

    run(story, step_seconds=7)


def test_the_worker_s_own_requests(capfd):
    """A probe wants one token, and comes after the pause, whatever else wakes the thread."""

    async def story(engine, worker):
        await fail_a_request(engine, worker)
        for _ in range(3):
            await worker.stats()
        assert not engine.requests, "100 s have not passed"
        worker._next_probe = 0.0
        await worker.stats(0.01)  # wakes the thread
        await until(lambda: engine.requests)
        assert list(engine.requests.values()) == [PARAMS]
        engine.outcomes.put(None)
        await until(lambda: worker.trouble is None)

    run(story)


def test_how_long_the_worker_waits_by_default():
    defaults = {name: p.default for name, p in inspect.signature(Worker).parameters.items() if p.kind == p.KEYWORD_ONLY}
    assert (defaults["step_seconds"], defaults["probe_seconds"], defaults["on_broken"]()) == (120, 1, None)
    assert inspect.signature(Worker.stop).parameters["seconds"].default == 5
    assert inspect.signature(Worker.stats).parameters["seconds"].default == 1
