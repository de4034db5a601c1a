"""Tests the server's worker over a made-up engine, whose steps the tests let through one by one."""

import asyncio
import queue

import pytest

from examples.server.worker import EngineFailed, Overloaded, Worker
from paged_jax.engine import Delta, SamplingParams

PARAMS = SamplingParams(max_tokens=1)


class MadeUpEngine:
    """Finishes all its requests in a step, once the test has put something into `outcomes`: None, or an error."""

    def __init__(self):
        self.max_num_seqs = 1
        self.outcomes, self.refuses = queue.Queue(), False
        self.reset()

    def reset(self):
        self.next_id, self.requests = 0, {}

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
        if (error := self.outcomes.get(timeout=20)) is not None:
            raise error
        done, self.requests = self.requests, {}
        return [
            Delta(request_id, i, (7,), finish_reason="stop") for request_id in done for i in range(done[request_id].n)
        ]


def run(story, max_queued=0):
    """Runs the coroutine function `story(engine, worker)` while the worker's thread runs."""
    engine = MadeUpEngine()
    worker = Worker(engine, max_queued)
    worker.start()

    async def whole_story():
        await asyncio.wait_for(story(engine, worker), 20)
        await asyncio.to_thread(worker.stop)

    asyncio.run(whole_story())
    assert worker._unfinished == 0
    return engine


async def read(ticket):
    return [delta async for delta in ticket.deltas()]


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
