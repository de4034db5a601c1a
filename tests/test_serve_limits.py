"""Tests the limits of the HTTP server: too many clients, too large bodies and texts, and incomplete requests."""

import asyncio
import dataclasses
import http.client
import re
import select
import threading

import httpx
import pytest

from examples.server import http as server_http
from examples.server.app import Server
from examples.server.responses import EventStream
from examples.server.worker import EngineFailed
from tests.conftest import PATIENCE
from tests.http_server import (
    BLOCK_SIZE,
    GOOD,
    HELLO,
    JSON,
    NUM_BLOCKS,
    PROMPT,
    http_request,
    received,
    wait_for,
)


@pytest.fixture
def connect(running):
    """`running.connect`, whose connections are closed when the test ends, however it ends."""
    yield running.connect
    running.disconnect()


def test_too_many_prompts_are_refused_before_they_are_tokenized(running, monkeypatch):
    monkeypatch.setattr(Server, "_encode", None)
    answer = running.post("/v1/completions", json=GOOD | {"prompt": ["x"] * 103, "n": 2})
    assert answer.status_code == 400
    assert "206 texts are asked for at once; the server takes 204" in answer.json()["error"]["message"]
    monkeypatch.setattr(running.worker, "_unfinished", 204)
    assert running.post("/v1/completions", json=GOOD).status_code == 429
    chat = {"model": "tiny", "messages": HELLO}
    assert running.post("/v1/chat/completions", json=chat).status_code == 429


def test_a_body_that_is_too_long(running, monkeypatch):
    monkeypatch.setattr(running.server._bodies, "most_bytes", 1000)
    answer = running.post("/v1/completions", content=b" " * 1001, headers=JSON)
    assert answer.status_code == 413
    assert "longer than 1000 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_blocks(running, connect, stream):
    content = GOOD | {"max_tokens": 300, "n": 3, "stream": stream}
    before = running.engine._num_output_tokens
    with running.held():
        connection = connect(http_request("/v1/completions", content))
        if stream:
            assert b"200 OK" in connection.recv(1000)
        wait_for(lambda: running.worker._unfinished == 3)
        connection.close()
        wait_for(lambda: running.worker._unfinished == 0)
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
            await asyncio.Event().wait()  # for ever

    async def receive():
        if how != "client goes":
            await asyncio.Event().wait()
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
        await asyncio.wait([task], timeout=PATIENCE)
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


def test_half_requests_harm_nobody(running, connect):
    whole = http_request("/v1/completions", GOOD)
    halves = [connect(whole[:size]) for size in (0, 1, 20, 60, len(whole) - 5)]
    halves.append(connect(b"\x00\xff nonsense\r\n\r\n"))
    assert running.post("/v1/completions", json=GOOD).status_code == 200
    for half in halves:
        half.close()
    assert running.post("/v1/completions", json=GOOD).status_code == 200


@pytest.mark.slow_on_cpu
def test_200_clients_at_once(running):
    """There are more clients than seats and blocks. All get answers, and equal requests get equal ones."""

    async def everyone():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=running.url, timeout=5 * PATIENCE, limits=limits) as client:
            contents = [GOOD | {"prompt": PROMPT * (i % 5 + 1), "max_tokens": 4, "temperature": 0} for i in range(200)]
            return await asyncio.gather(*(client.post("/v1/completions", json=content) for content in contents))

    answers = asyncio.run(everyone())
    assert [answer.status_code for answer in answers] == [200] * 200
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert all(texts[i] == texts[i % 5] for i in range(200))
    running.wait_until_idle()


def test_a_full_queue_answers_429(running, connect, monkeypatch):
    monkeypatch.setattr(running.worker, "_max_unfinished", 2)
    with running.held():
        busy = connect(http_request("/v1/completions", GOOD | {"max_tokens": 20, "n": 2, "stream": True}))
        assert b"200 OK" in busy.recv(1000)
        answer = running.post("/v1/completions", json=GOOD)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "queue_full"
        busy.close()
    running.wait_until_idle()
    assert running.post("/v1/completions", json=GOOD).status_code == 200


def test_texts_that_are_too_long_whatever_they_mean_are_not_tokenized(running, monkeypatch):
    longest = len("<|endoftext|>") * NUM_BLOCKS * BLOCK_SIZE
    calls = []
    monkeypatch.setattr(Server, "_echo", lambda *_: calls.append(1))
    for path, field in (("completions", "prompt"), ("chat/completions", "messages")):
        for size, number in ((longest + 1, "characters"), (longest, "tokens")):
            text = "x" * (size if path == "completions" or number == "characters" else longest - 20)
            content = {"model": "tiny", field: text if field == "prompt" else [{"role": "user", "content": text}]}
            answer = running.post(f"/v1/{path}", json=content)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert re.fullmatch(rf".* has \d+ {number}; at most \d+ (can )?fit", error["message"])
            assert error["code"] == "context_length_exceeded"


class HeldTokenizer:
    """Has the one call that the server encodes texts with, and holds it until `may_go` is set."""

    def __init__(self, tokenizer):
        self.tokenizer, self.is_called, self.may_go = tokenizer, threading.Event(), threading.Event()

    def encode_batch_fast(self, texts, **options):
        self.is_called.set()
        assert self.may_go.wait(PATIENCE)
        return self.tokenizer.encode_batch_fast(texts, **options)


def test_a_long_text_does_not_stop_the_others(running, monkeypatch):
    """Its tokens are made in another thread."""
    tokenizer = HeldTokenizer(running.server._model.tokenizer)
    monkeypatch.setattr(running.server, "_model", dataclasses.replace(running.server._model, tokenizer=tokenizer))
    answers = []
    thread = threading.Thread(target=lambda: answers.append(running.post("/tokenize", json={"prompt": "hello"})))
    thread.start()
    try:
        assert tokenizer.is_called.wait(PATIENCE)
        assert running.get("/health").status_code == 200
        assert not answers
    finally:
        tokenizer.may_go.set()
        thread.join()
    assert answers[0].json()["count"] == 5


def test_the_call_that_makes_tokens_lets_other_threads_run(running):
    """Python's global lock is free while it runs: another thread counts milliseconds meanwhile."""
    text, num_ticks, is_over = "hello world " * 20_000, 0, threading.Event()

    def tick():
        nonlocal num_ticks
        while not is_over.wait(0.001):
            num_ticks += 1

    def ticks_of_a_call():
        before = num_ticks
        running.server._model.tokenizer.encode_batch_fast([text])
        return num_ticks - before

    thread = threading.Thread(target=tick)
    thread.start()
    # If the call kept the lock, the thread could tick before and after it. A busy machine may leave no core to tick on.
    assert any(ticks_of_a_call() > 2 for _ in range(20))
    is_over.set()
    thread.join()


def test_bodies_that_do_not_come(running, connect, monkeypatch):
    monkeypatch.setattr(running.server._bodies, "seconds", 0.05)
    half = connect(http_request("/v1/completions", GOOD)[:-1])
    assert "408" in (text := received(half))
    assert "did not come within 0.05 seconds" in text
    assert "connection: close" in text
    monkeypatch.setattr(running.server._bodies, "seconds", 10 * PATIENCE)
    monkeypatch.setattr(running.server._bodies, "most_bytes_together", 1000)
    body = GOOD | {"prompt": "x" * 800}
    halves = [connect(http_request("/v1/completions", body)[:-1]) for _ in range(2)]
    answered, _, _ = select.select(halves, [], [], PATIENCE)
    assert "too many long bodies" in received(*answered)
    running.disconnect()
    wait_for(lambda: running.server._bodies._num_bytes == 0)
    assert running.post("/v1/completions", json=GOOD).status_code == 200


def is_cut_off(connection, part=b""):
    """Whether the server closes a connection, on which a part of a request comes, without an answer."""
    try:
        connection.sendall(part)
        return received(connection) == ""
    except ConnectionError:  # it was closed before the part came
        return True


def test_heads_that_do_not_come(connect, monkeypatch):
    """A silent client is cut off at first and after an answer."""
    whole = http_request("/v1/completions", GOOD)
    second = connect(whole)
    answer = http.client.HTTPResponse(second)
    answer.begin()
    assert answer.status == 200
    assert answer.read()
    monkeypatch.setattr(server_http, "HEAD_SECONDS", 0.05)
    assert is_cut_off(second, whole[:20])
    assert is_cut_off(connect(b""))
    assert is_cut_off(connect(b""), whole[:20])


def test_the_time_for_heads_does_not_run_during_an_answer(running, connect):
    with running.held():
        slow = connect(http_request("/v1/completions", GOOD | {"max_tokens": 3, "temperature": 0}))
        wait_for(lambda: running.worker._unfinished == 1 == len(running.http.server_state.connections))
        (protocol,) = running.http.server_state.connections
        assert protocol._deadline is None
    answer = http.client.HTTPResponse(slow)
    answer.begin()
    assert '"completion_tokens": 3' in answer.read().decode()
    running.wait_until_idle()
