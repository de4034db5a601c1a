"""Tests the limits of the HTTP server: too many clients, too large bodies and texts, and incomplete requests."""

import asyncio
import re
import threading
import time

import httpx
import pytest

from examples.server import http
from examples.server.app import Server
from examples.server.responses import EventStream
from examples.server.worker import EngineFailed
from tests.http_server import (
    BLOCK_SIZE,
    GOOD,
    HELLO,
    JSON,
    NUM_BLOCKS,
    PROMPT,
    http_request,
    received,
    received_soon,
    wait_for,
)


def test_too_many_prompts_are_refused_before_they_are_tokenized(running, monkeypatch):
    monkeypatch.setattr(Server, "_encode", None)
    answer = httpx.post(f"{running.url}/v1/completions", json=GOOD | {"prompt": ["x"] * 103, "n": 2})
    assert answer.status_code == 400
    assert "206 texts are asked for at once; the server takes 204" in answer.json()["error"]["message"]
    monkeypatch.setattr(running.worker, "_unfinished", 204)
    assert httpx.post(f"{running.url}/v1/completions", json=GOOD).status_code == 429
    chat = {"model": "tiny", "messages": HELLO}
    assert httpx.post(f"{running.url}/v1/chat/completions", json=chat).status_code == 429


def test_a_body_that_is_too_long(running, monkeypatch):
    monkeypatch.setattr(running.server._bodies, "most_bytes", 1000)
    answer = httpx.post(f"{running.url}/v1/completions", content=b" " * 1001, headers=JSON)
    assert answer.status_code == 413
    assert "longer than 1000 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_blocks(running, stream):
    content = GOOD | {"max_tokens": 300, "n": 3, "stream": stream}
    before = running.engine._num_output_tokens
    connection = running.connect(http_request("/v1/completions", content))
    if stream:
        assert b"200 OK" in connection.recv(1000)
    wait_for(lambda: running.engine.has_work)
    connection.close()
    running.wait_until_idle()
    assert running.engine._num_output_tokens - before < 3 * 300, "the request ran to its end"


@pytest.mark.parametrize("how", ["ends", "client goes", "engine fails", "server ends", "sending fails"])
def test_a_stream_is_closed_once_however_it_ends(how):
    closed, sent = [], []

    async def chunks():
        yield {"chunk": 1}
        if how == "engine fails":
            raise EngineFailed
        if how != "ends":
            await asyncio.sleep(20)

    async def receive():
        if how != "client goes":
            await asyncio.sleep(20)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if how == "sending fails" and message["type"] == "http.response.body":
            raise OSError

    async def go():
        stream = EventStream(chunks(), lambda: closed.append(True))
        task = asyncio.create_task(stream({}, receive, send))
        if how == "server ends":
            while len(sent) < 2:
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task], timeout=10)
        if how == "sending fails":
            with pytest.raises(OSError):  # noqa: PT011
                task.result()
        else:
            task.result()

    asyncio.run(go())
    assert closed == [True]
    bodies = b"".join(message.get("body", b"") for message in sent)
    has_end = how not in ("client goes", "sending fails")
    assert bodies.endswith(b"data: [DONE]\n\n") == has_end
    assert (b'"error"' in bodies) == (how in ("engine fails", "server ends"))


def test_half_requests_harm_nobody(running):
    whole = http_request("/v1/completions", GOOD)
    halves = [running.connect(whole[:size]) for size in (0, 1, 20, 60, len(whole) - 5)]
    halves.append(running.connect(b"\x00\xff nonsense\r\n\r\n"))
    assert httpx.post(f"{running.url}/v1/completions", json=GOOD).status_code == 200
    for half in halves:
        half.close()
    assert httpx.post(f"{running.url}/v1/completions", json=GOOD).status_code == 200


def test_200_clients_at_once(running):
    """There are more clients than seats and blocks. All get answers, and equal requests get equal ones."""

    async def everyone():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=running.url, timeout=120, limits=limits) as client:
            contents = [GOOD | {"prompt": PROMPT * (i % 5 + 1), "max_tokens": 4, "temperature": 0} for i in range(200)]
            return await asyncio.gather(*(client.post("/v1/completions", json=content) for content in contents))

    answers = asyncio.run(everyone())
    assert [answer.status_code for answer in answers] == [200] * 200
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert all(texts[i] == texts[i % 5] for i in range(200))
    running.wait_until_idle()


def test_a_full_queue_answers_429(running, monkeypatch):
    monkeypatch.setattr(running.worker, "_max_unfinished", 2)
    busy = running.connect(http_request("/v1/completions", GOOD | {"max_tokens": 380, "n": 2, "stream": True}))
    assert b"200 OK" in busy.recv(1000)
    answer = httpx.post(f"{running.url}/v1/completions", json=GOOD)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "queue_full"
    busy.close()
    running.wait_until_idle()
    assert httpx.post(f"{running.url}/v1/completions", json=GOOD).status_code == 200


def test_texts_that_are_too_long_whatever_they_mean_are_not_tokenized(running, monkeypatch):
    longest = len("<|endoftext|>") * NUM_BLOCKS * BLOCK_SIZE
    calls = []
    monkeypatch.setattr(Server, "_echo", lambda *_: calls.append(1))
    for path, field in (("completions", "prompt"), ("chat/completions", "messages")):
        for size, number in ((longest + 1, "characters"), (longest, "tokens")):
            text = "x" * (size if path == "completions" or number == "characters" else longest - 20)
            content = {"model": "tiny", field: text if field == "prompt" else [{"role": "user", "content": text}]}
            answer = httpx.post(f"{running.url}/v1/{path}", json=content)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert re.fullmatch(rf".* has \d+ {number}; at most \d+ (can )?fit", error["message"])
            assert error["code"] == "context_length_exceeded"


def test_a_long_text_does_not_stop_the_others(running, monkeypatch):
    """Its tokens are made in another thread, by a call that lets the event loop run meanwhile."""
    monkeypatch.setattr(running.server, "_most_characters", 10**9)
    monkeypatch.setattr(running.server._bodies, "most_bytes", 10**9)
    started, longest, done = time.monotonic(), 0.0, threading.Event()

    def ask():
        answers.append(httpx.post(f"{running.url}/tokenize", json={"prompt": "hello world " * 150_000}, timeout=60))
        done.set()

    answers, thread = [], threading.Thread(target=ask)
    thread.start()
    while not done.is_set():
        began = time.monotonic()
        assert httpx.get(f"{running.url}/health", timeout=60).status_code == 200
        longest = max(longest, time.monotonic() - began)
    thread.join()
    assert answers[0].json()["count"] == 12 * 150_000
    assert longest < 0.4 * (time.monotonic() - started)


def test_bodies_that_do_not_come(running, monkeypatch):
    monkeypatch.setattr(running.server._bodies, "seconds", 0.2)
    half = running.connect(http_request("/v1/completions", GOOD)[:-1])
    assert "408" in (text := received(half))
    assert "did not come within 0.2 seconds" in text
    assert "connection: close" in text
    monkeypatch.setattr(running.server._bodies, "seconds", 60)
    monkeypatch.setattr(running.server._bodies, "most_bytes_together", 1000)
    body = GOOD | {"prompt": "x" * 800}
    halves = [running.connect(http_request("/v1/completions", body)[:-1]) for _ in range(2)]
    assert any("too many long bodies" in received_soon(half) for half in halves)
    for half in halves:
        half.close()
    wait_for(lambda: running.server._bodies._num_bytes == 0)
    assert httpx.post(f"{running.url}/v1/completions", json=GOOD).status_code == 200


def test_heads_that_do_not_come(running, monkeypatch):
    """A silent client is cut off at first and after an answer, but never during a long answer."""
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.3)
    whole = http_request("/v1/completions", GOOD)
    assert received(running.connect(b"")) == received(running.connect(whole[:20])) == ""
    second = running.connect(whole)
    assert b"200 OK" in second.recv(20)
    second.sendall(whole[:20])
    assert received(second).count("HTTP/1.1") == 0
    slow = running.connect(http_request("/v1/completions", GOOD | {"max_tokens": 300, "temperature": 0}))
    assert '"completion_tokens": 300' in received(slow)
    running.wait_until_idle()
