"""Compares errors, headers and the answers of all routes with written ones, and that each field reaches the engine."""

import asyncio
import dataclasses
import re
import time
from types import SimpleNamespace

import httpx
import pytest

import paged_jax
from examples.server.api import NEUTRAL, read_chat, read_completion, sampling_params
from examples.server.app import LEAST_MAX_BODY, MAX_BODY, Model, Server
from examples.server.chat import ChatTemplate
from examples.server.fields import ApiError
from examples.server.middleware import Access
from examples.server.responses import Bodies
from examples.server.worker import Worker
from paged_jax.engine import Delta, SamplingParams
from tests.test_serve_whole import HELLO, TOKENIZER, TOOLS, A, B, F, Scripted, ask

GOOD = {"model": "m", "prompt": "a"}
ANY = Access(origins=("*",))
CHAT = {"model": "m", "messages": HELLO}
LONG = "the prompt has 100 tokens; at most 90 fit"
FEW = {"max_tokens": 5, "min_tokens": 6}
CALLING = {"role": "assistant", "content": None, "tool_calls": [F]}
ERRORS = [
    ("completions", GOOD | {"x" * 99: 1}, 400, 'unrecognized field: "' + "x" * 59 + "...", "x" * 64, None),
    ("completions", GOOD | {"model": "n"}, 404, 'the model "n" does not exist', "model", "model_not_found"),
    ("completions", GOOD | {"suffix": "x"}, 400, "suffix is not supported", "suffix", None),
    (
        "completions",
        GOOD | {"best_of": 1, "n": 2},
        400,
        "best_of must be n: the server returns every sample",
        "best_of",
        None,
    ),
    ("completions", GOOD | {"prompt": "a." * 50}, 400, LONG, None, "context_length_exceeded"),
    ("completions", GOOD | {"prompt": ["a", "a." * 50]}, 400, LONG, None, "context_length_exceeded"),
    ("completions", GOOD | {"n": 8}, 400, "8 texts are asked for at once; the server takes 7", None, None),
    ("completions", GOOD | {"prompt": [400]}, 400, "prompt must hold tokens in [0, 399]", "prompt", None),
    (
        "completions",
        GOOD | {"stop_token_ids": [2**31]},
        400,
        "stop_token_ids must be a list of token ids, got [2147483648]",
        "stop_token_ids",
        None,
    ),
    ("chat/completions", CHAT | FEW, 400, "min_tokens must be at most max_tokens = 5, got 6", None, None),
    (
        "chat/completions",
        CHAT | {"tools": TOOLS},
        400,
        "tools need a server that was started with --tool-call-parser",
        "tools",
        None,
    ),
    (
        "chat/completions",
        CHAT | {"continue_final_message": True, "messages": [*HELLO, CALLING]},
        400,
        "continue_final_message needs a last message with a text",
        "continue_final_message",
        None,
    ),
    ("../tokenize", GOOD | {"model": "n"}, 404, 'the model "n" does not exist', "model", "model_not_found"),
    ("../detokenize", {"model": "n", "tokens": [A]}, 404, 'the model "n" does not exist', "model", "model_not_found"),
    ("../detokenize", {"model": "m"}, 400, "tokens must be a list of token ids", "tokens", None),
]


def test_errors_in_full():
    requests = [(f"/v1/{path}".replace("/v1/..", ""), content) for path, content, *_ in ERRORS]
    answers = ask(Scripted(), *requests, access=ANY)
    for answer, (path, content, status, message, param, code) in zip(answers, ERRORS, strict=True):
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        assert (answer.status_code, answer.json()) == (status, {"error": error}), (path, content)
        assert answer.headers["content-type"] == "application/json"


def test_errors_that_are_the_server_s():
    """A client learns whether, and when, it may try again."""
    access = Access(origins=("http://y",))

    def error(message, kind, code=None):
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}

    (answer,) = ask(Scripted(), ("/v1/completions", GOOD), refusal="it sleeps", access=access)
    assert (answer.status_code, answer.json()) == (503, error("it sleeps", "server_error"))
    health, metrics = ask(Scripted(), ("/health",), ("/metrics",), refusal="it sleeps", access=access)
    assert (health.status_code, health.json()) == (503, {"status": "failing", "reason": "it sleeps"})
    assert metrics.status_code == 200
    assert "paged_jax_is_well 0.0" in metrics.text
    (answer,) = ask(
        Scripted([Delta(0, 0, (), "", (), "error", "it is broken")]), ("/v1/completions", GOOD), access=access
    )
    assert (answer.status_code, answer.json()) == (
        500,
        error("the answer cannot go on: it is broken", "server_error"),
    )
    worker = Worker(Scripted(), 0)
    worker._unfinished = 4
    server = Server(worker, Model(("m",), TOKENIZER, ChatTemplate(), (), 400, 100))
    worker._refusal = lambda: None

    async def go():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app()), base_url="http://x") as client:
            return await client.post("/v1/completions", json=GOOD), await client.get("/v1/completions")

    full, wrong = asyncio.run(go())
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")
    assert full.json() == error("too many requests wait; try again later", "requests", "queue_full")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json() == error("Method Not Allowed", "invalid_request_error")


def test_routes_without_an_engine_s_work():
    began = int(time.time())
    listed, one, none, version, health, tokenized, chat, detokenized = ask(
        Scripted(),
        ("/v1/models",),
        ("/v1/models/other",),
        ("/v1/models/a/b",),
        ("/version",),
        ("/health",),
        ("/tokenize", {"prompt": "ab", "return_token_strs": True}),
        ("/tokenize", {"messages": HELLO, "model": "other"}),
        ("/detokenize", {"tokens": [A, 3, B]}),
        access=Access(origins=("http://y",)),
    )
    cards = {card["id"]: card for card in listed.json()["data"]}
    assert (listed.json()["object"], list(cards)) == ("list", ["m", "other"])
    for name, card in cards.items():
        assert began <= card.pop("created") <= time.time()
        assert card == {"id": name, "object": "model", "owned_by": "paged_jax", "max_model_len": 100}
    assert one.json()["id"] == "other"
    message = {"message": 'the model "a/b" does not exist', "type": "invalid_request_error", "param": None}
    assert (none.status_code, none.json()) == (404, {"error": message | {"code": "model_not_found"}})
    assert version.json() == {"version": paged_jax.__version__}
    assert health.json() == {"status": "ok"}
    assert tokenized.json() == {"count": 2, "max_model_len": 100, "tokens": [A, B], "token_strs": ["a", "b"]}
    assert chat.json()["tokens"] == TOKENIZER.encode("user: a\nassistant:").ids
    assert detokenized.json() == {"prompt": "a<|im_end|>b"}
    for answer in (listed, version, tokenized):
        assert answer.headers["access-control-allow-origin"] == "http://y"
        assert answer.headers["access-control-expose-headers"] == "x-request-id"
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


def test_requests_are_counted_by_route_and_status():
    deltas = [[Delta(i, 0, (A,), "a", (), "stop", 2)] for i in range(2)]
    *_, metrics = ask(
        Scripted(*deltas),
        ("/v1/completions", GOOD),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"n": 0}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [999]}),
        ("/metrics",),
        access=ANY,
    )
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = dict(line.rsplit(" ", 1) for line in metrics.text.splitlines() if line[0] != "#")
    counts = {key: float(value) for key, value in values.items() if key.startswith("paged_jax_http_requests_total")}
    assert counts == {
        f'paged_jax_http_requests_total{{route="{route}",status="{status}"}}': 1
        for route, status in [
            ("completions", 200),
            ("chat", 200),
            ("chat", 400),
            ("tokenize", 200),
            ("detokenize", 400),
        ]
    }
    assert (values["paged_jax_request_seconds_count"], values["paged_jax_first_token_seconds_count"]) == ("2.0", "2.0")
    assert values["paged_jax_is_well"] == "1.0"


FIELDS = {
    "n": 3,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "seed": 11,
    "stop": ["x", "y"],
    "stop_token_ids": [5, 6],
    "min_tokens": 4,
    "max_tokens": 9,
    "presence_penalty": -0.5,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.25,
    "logit_bias": {"3": -100, "123456789": 2, "4": None},
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "priority": -7,
}
PARAMS = SamplingParams(
    max_tokens=9,
    n=3,
    temperature=0.5,
    top_k=7,
    top_p=0.25,
    min_p=0.125,
    repetition_penalty=1.25,
    presence_penalty=-0.5,
    frequency_penalty=1.5,
    logit_bias=((3, -100.0), (123456789, 2.0)),
    min_tokens=4,
    priority=-7,
    seed=11,
    stop_token_ids=(5, 6, 2),
    stop=("x", "y"),
    include_stop=True,
    skip_special_tokens=False,
)


def test_every_field_reaches_the_engine():
    completion = read_completion(GOOD | FIELDS | {"logprobs": 3}, ["m"]).wanted
    chat = read_chat(CHAT | FIELDS | {"logprobs": True, "top_logprobs": 20}, ["m"]).wanted
    assert sampling_params(completion, (2,)) == dataclasses.replace(PARAMS, logprobs=3)
    assert sampling_params(chat, (2,)) == dataclasses.replace(PARAMS, logprobs=20)
    assert sampling_params(read_completion(GOOD | {"stop": "x"}, ["m"]).wanted, ()) == SamplingParams(
        16, temperature=1.0, stop=("x",)
    )
    assert sampling_params(read_chat(CHAT | {"logprobs": True}, ["m"]).wanted, ()) == SamplingParams(
        temperature=1.0, logprobs=0
    )
    temperatures = [read_completion(GOOD | {"temperature": t}, ["m"]).wanted.params["temperature"] for t in (0, 1, 2)]
    assert temperatures == [0, 1, 2]
    assert all(type(temperature) is float for temperature in temperatures)


@pytest.mark.parametrize("name", NEUTRAL)
def test_fields_that_are_not_supported_may_ask_for_nothing(name):
    nothing = {
        "suffix": ["", None],
        "tools": [[], None],
        "tool_choice": ["none", "auto", None],
        "parallel_tool_calls": [True, False, None],
        "functions": [[], None],
        "function_call": ["none", "auto", None],
        "modalities": [["text"], None],
        "use_beam_search": [False, None],
        "spaces_between_special_tokens": [True, None],
    }.get(name, [None])
    texts = "", "x", "none", "auto", "required"
    for value in (None, True, False, *texts, [], ["text"], ["audio"], {}, {"a": 1}, 0.5, 100):
        if any(type(value) is type(other) and value == other for other in nothing):
            read_completion(GOOD | {name: value}, ["m"])
        else:
            with pytest.raises(ApiError, match=f"{name} is not supported") as raised:
                read_completion(GOOD | {name: value}, ["m"])
            assert raised.value.body["error"]["param"] == name


def test_calls_that_are_sent_back_keep_what_they_have():
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": f'{{"x": {i}}}'}} for i in "12"
    ]
    (message,) = read_chat(
        CHAT | {"messages": [{"role": "assistant", "content": None, "tool_calls": calls, "name": "n"}]}, ["m"]
    ).conversation.messages
    read = [call | {"function": {"name": "f", "arguments": {"x": i}}} for i, call in enumerate(calls, start=1)]
    assert message == {"role": "assistant", "content": None, "tool_calls": read, "name": "n"}


@pytest.mark.parametrize(("most", "together", "status"), [(5, 5, None), (4, 9, 413), (9, 4, 503)])
def test_a_body_of_five_bytes(most, together, status):
    async def stream():
        for piece in (b"ab", b"", b"cde"):
            yield piece

    bodies = Bodies(most, together)
    if status is None:
        assert asyncio.run(bodies.read(SimpleNamespace(stream=stream))) == b"abcde"
    else:
        with pytest.raises(ApiError) as raised:
            asyncio.run(bodies.read(SimpleNamespace(stream=stream)))
        assert (raised.value.status, raised.value.headers) == (status, {"connection": "close"})
    assert bodies._num_bytes == 0


def test_how_long_a_body_may_be():
    """A mebibyte beside twelve bytes for each character that a text may have, and 16 MiB at most."""
    for most_tokens, expected in ((10, LEAST_MAX_BODY + 12 * 10 * 10), (10**6, 16 << 20)):
        model = Model(("m",), TOKENIZER, ChatTemplate(), (), 400, most_tokens)
        bodies = Server(Worker(Scripted(), 0), model)._bodies
        assert (bodies.most_bytes, bodies.most_bytes_together, bodies.seconds) == (expected, 256 << 20, 60)
    assert (LEAST_MAX_BODY, MAX_BODY) == (1 << 20, 16 << 20)
