"""Tests how the HTTP server ends: it answers what it has begun with, or says to clients that it cannot."""

import json
import signal

import pytest

from tests.http_server import GOOD, Process, http_request, received, wait_for


@pytest.fixture
def start(tmp_path):
    """Starts a server in a process, with more options."""
    started = []

    def start(*options, **more):
        started.append(server := Process(tmp_path / "stderr", *options, **more))
        server.wait_until_it_serves()
        return server

    yield start
    for server in started:
        server.close()


GREEDY_ALONE = """
from paged_jax.engine.sampling import Kind
Kind.all_of = lambda *_: [Kind.GREEDY]
"""  # the other programs that draw tokens take half of the time in which a server starts


def test_sigterm_drains(start):
    """The server answers a request that runs when the signal comes, and then exits with 0."""
    server = start(patch=GREEDY_ALONE, is_held=True)
    connection = server.ask(stream=True)
    assert connection.recv(20).startswith(b"HTTP/1.1 200")
    server.signal(signal.SIGTERM)
    server.wait_until_it_ends()
    server.release()
    events = [line for line in received(connection).splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] in ("length", "stop")
    server.wait()


NOTHING_COMPILED = """
import time
from paged_jax.engine import Engine
from paged_jax.engine.runner import Runner
def compile(self, *_):
    self.vocab_size, self._adjustments = 257, None
    return {}
Runner._compile, Runner._warm_up = compile, lambda self: None
"""  # for servers whose steps run no program

NO_TOKENS = f"""{NOTHING_COMPILED}
Engine.step = lambda self: time.sleep(0.1) or []
"""


@pytest.mark.parametrize("how", [pytest.param("time is up", marks=pytest.mark.slow), signal.SIGTERM])
def test_requests_that_do_not_end_in_time_are_told(start, how):
    """When time is up or a second signal comes, clients get errors in OpenAI's words, and the server exits with 0."""
    server = start("--drain-seconds", "1" if how == "time is up" else "600", patch=NO_TOKENS)
    half = server.connect(http_request("/v1/completions", GOOD)[:-1])
    wholes = [server.ask() for _ in range(4)]
    streams = [server.ask(stream=True) for _ in range(4)]
    assert all(stream.recv(13) == b"HTTP/1.1 200 " for stream in streams)
    server.signal(signal.SIGTERM)
    if how != "time is up":
        server.wait_until_it_ends()
        server.signal(how)
    ends = [received(stream) for stream in streams]
    assert all("shuts down" in end and end.rstrip().endswith("data: [DONE]\n\n\r\n0") for end in ends)
    answers = [received(whole) for whole in wholes]
    assert {answer.split()[1] for answer in answers} == {"503"}
    assert json.loads(received(half).split("\r\n\r\n")[1])["error"]["type"] == "server_error"
    server.wait()


STUCK = f"""{NOTHING_COMPILED}
Engine.step = lambda self: time.sleep(10**6)
serve.Worker.stats.__defaults__ = serve.Worker.stop.__defaults__ = (0.1,)
"""


@pytest.mark.parametrize("num_signals", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_that_never_ends(start, num_signals):
    """A balancer sees it, clients are told, and signals end the process."""
    server = start("--step-seconds", "0.1", "--drain-seconds", "600" if num_signals == 2 else "1", patch=STUCK)
    assert server.get("/health").status_code == 200
    waiting = server.ask()
    wait_for(lambda: server.get("/health").status_code == 503)
    assert "present step has not ended" in server.get("/health").json()["reason"]
    answer = server.post("/v1/completions", json=GOOD)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert "paged_jax_is_well 0.0" in server.get("/metrics").text
    server.signal(signal.SIGTERM)
    if num_signals == 2:
        server.wait_until_it_ends()
        server.signal(signal.SIGTERM)
    assert "shuts down" in received(waiting)
    server.wait(code=1)
    assert server.errors.splitlines()[-1] == "serve: a step of the engine does not end; the process ends without it"


@pytest.mark.slow
def test_a_third_signal_ends_the_process_whatever_it_does(start):
    server = start("--drain-seconds", "600", patch=STUCK + "serve.Worker.stop = lambda self: time.sleep(10**6)")
    waiting = server.ask(stream=True)
    assert waiting.recv(13) == b"HTTP/1.1 200 "
    server.signal(signal.SIGTERM)
    server.wait_until_it_ends()
    server.signal(signal.SIGTERM)
    assert "shuts down" in received(waiting)
    server.signal(signal.SIGTERM)
    server.wait(code=-signal.SIGTERM)


BROKEN = f"""{NOTHING_COMPILED}
def fail(self, *_):
    raise MemoryError("no memory at all")
def step(self):
    Engine.reset = fail
    fail(self)
Engine.step = step
"""


def test_an_engine_that_cannot_be_reset_ends_the_process(start):
    """Whoever starts servers then starts another one; the requests that wait are answered first."""
    server = start(patch=BROKEN, is_held=True)
    wholes = [server.ask() for _ in range(3)]
    assert server.ask(stream=True).recv(13) == b"HTTP/1.1 200 "
    server.release()
    answers = [received(whole) for whole in wholes]
    assert {answer.split()[1] for answer in answers} <= {"500", "503"}
    assert all(json.loads(a.split("\r\n\r\n")[1])["error"]["type"] == "server_error" for a in answers)
    server.wait(code=1)
    assert server.errors.splitlines()[-1] == "serve: the engine failed and cannot be reset: no memory at all"
