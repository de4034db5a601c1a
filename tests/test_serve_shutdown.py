"""Tests how the HTTP server ends: it answers what it has begun with, or says to clients that it cannot."""

import json
import signal
import socket
import time

import httpx
import pytest

from tests.http_server import GOOD, Process, http_request, received, wait_for


@pytest.fixture
def start(tmp_path):
    """Starts a server in a process, with more options."""
    started = []

    def start(*options, patch=""):
        started.append(Process(tmp_path / "stderr", *options, patch=patch))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.wait()


def test_sigterm_drains(start):
    """The server answers a request that runs when the signal comes, and then exits with 0."""
    server = start()
    connection = server.ask(stream=True)
    assert connection.recv(20).startswith(b"HTTP/1.1 200")
    server.process.send_signal(signal.SIGTERM)
    events = [line for line in received(connection).splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] in ("length", "stop")
    server.wait(60)


@pytest.mark.parametrize("how", [pytest.param("time is up", marks=pytest.mark.slow), signal.SIGTERM])
def test_requests_that_do_not_end_in_time_are_told(start, how):
    """When time is up or a second signal comes, clients get errors in OpenAI's words, and the server exits with 0."""
    server = start("--drain-seconds", "1" if how == "time is up" else "600")
    half = socket.create_connection(("127.0.0.1", server.port), 60)
    half.sendall(http_request("/v1/completions", GOOD)[:-1])
    wholes = [server.ask() for _ in range(40)]
    streams = [server.ask(stream=True) for _ in range(40)]  # once these have begun, the server has all the others
    assert all(stream.recv(13) == b"HTTP/1.1 200 " for stream in streams)
    server.process.send_signal(signal.SIGTERM)
    if how != "time is up":
        time.sleep(0.3)
        server.process.send_signal(how)
    ends = [received(stream) for stream in streams]
    assert all(end.rstrip().endswith("data: [DONE]\n\n\r\n0") for end in ends)
    assert sum("shuts down" in end for end in ends) > 10
    answers = [received(whole) for whole in wholes]
    assert {answer.split()[1] for answer in answers} <= {"200", "503"}
    assert sum(answer.split()[1] == "503" for answer in answers) > 10
    assert json.loads(received(half).split("\r\n\r\n")[1])["error"]["type"] == "server_error"
    server.wait(20)


NOTHING_COMPILED = """
from paged_jax.engine.runner import Runner
def compile(self, *_):
    self.vocab_size, self._adjustments = 257, None
    return {}
Runner._compile, Runner._warm_up = compile, lambda self: None
"""  # for servers that never run a step

STUCK = f"""{NOTHING_COMPILED}
import time
from paged_jax.engine import Engine
Engine.step = lambda self: time.sleep(10**6)
"""


@pytest.mark.parametrize("num_signals", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_that_never_ends(start, num_signals):
    """A balancer sees it, clients are told, and signals end the process."""
    server = start("--step-seconds", "0.5", "--drain-seconds", "600" if num_signals == 2 else "1", patch=STUCK)
    health = server.url.removesuffix("/v1") + "/health"
    assert httpx.get(health).status_code == 200
    waiting = server.ask()
    wait_for(lambda: httpx.get(health).status_code == 503)
    assert "present step has not ended" in httpx.get(health).json()["reason"]
    answer = httpx.post(f"{server.url}/completions", json=GOOD)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert "paged_jax_is_well 0.0" in httpx.get(health.replace("health", "metrics")).text
    for _ in range(num_signals):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    assert "shuts down" in received(waiting)
    server.wait(20, code=1)
    assert server.errors.splitlines()[-1] == "serve: a step of the engine does not end; the process ends without it"


@pytest.mark.slow
def test_a_third_signal_ends_the_process_whatever_it_does(start):
    server = start("--drain-seconds", "600", patch=STUCK + "serve.Worker.stop = lambda self: time.sleep(10**6)")
    with server.ask():
        for _ in range(3):
            time.sleep(0.5)
            server.process.send_signal(signal.SIGTERM)
        server.wait(10, code=-signal.SIGTERM)


BROKEN = f"""{NOTHING_COMPILED}
from paged_jax.engine import Engine
def fail(self, *_):
    raise MemoryError("no memory at all")
def step(self):
    Engine.reset = fail
    fail(self)
Engine.step = step
"""


def test_an_engine_that_cannot_be_reset_ends_the_process(start):
    """Whoever starts servers then starts another one; the requests that wait are answered first."""
    server = start(patch=BROKEN)
    answers = [received(connection) for connection in [server.ask() for _ in range(3)]]
    assert {answer.split()[1] for answer in answers} <= {"500", "503"}
    assert all(json.loads(a.split("\r\n\r\n")[1])["error"]["type"] == "server_error" for a in answers)
    server.wait(20, code=1)
    assert server.errors.splitlines()[-1] == "serve: the engine failed and cannot be reset: no memory at all"
