"""Tests how the HTTP server ends: it answers what it has begun with, or says to clients that it cannot."""

import json
import signal
import socket
import time

import pytest

from tests.http_server import GOOD, Process, http_request, received


@pytest.fixture
def start(tmp_path):
    """Starts a server in a process, with more options."""
    started = []

    def start(*options):
        started.append(Process(tmp_path / "stderr", *options))
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


@pytest.mark.parametrize("how", ["time is up", signal.SIGTERM])
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
