"""Compares whole answers, streamed and not, with written ones, over an engine that follows a script."""

import asyncio
import dataclasses
import json
import re
import time

import httpx

from examples.server.app import Model, Server
from examples.server.chat import ChatTemplate
from examples.server.middleware import Access
from examples.server.worker import Worker
from paged_jax.engine import Delta, SamplingParams, Stats, TokenLogprob
from tests.real_tokenizers import TOKENIZERS
from tests.test_serve_worker import MadeUpEngine

TOKENIZER = TOKENIZERS["byte_level"]()
A, B, C = TOKENIZER.encode("a.b.c", add_special_tokens=False).ids[::2]
HELLO = [{"role": "user", "content": "a"}]
STATS = Stats(**{field.name: 0 for field in dataclasses.fields(Stats)} | {"pools": ()})
TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]


class Scripted(MadeUpEngine):
    """Gives the deltas of its script, a list in each step."""

    def __init__(self, *script):
        super().__init__()
        self.max_num_seqs, self.script, self.asked = 4, list(script), []

    def add_request(self, prompt, params):
        self.asked.append((list(prompt), params))
        return super().add_request(prompt, params)

    def check(self, prompt, params):
        if len(prompt) > 90:
            raise ValueError(f"the prompt has {len(prompt)} tokens; at most 90 fit")

    def stats(self):
        return STATS

    def step(self):
        deltas = self.script.pop(0)
        for delta in deltas:
            if delta.finish_reason is not None:
                params = self.requests.pop(delta.request_id)
                if params.n > 1:
                    self.requests[delta.request_id] = dataclasses.replace(params, n=params.n - 1)
        return deltas


def ask(engine, *requests, access=Access(), refusal=None, **model):  # noqa: B008 (immutable)
    """The responses to requests, one after the other: each a path and perhaps a content, with which it is posted."""
    model = Model(("m", "other"), TOKENIZER, ChatTemplate(), (2,), 400, 100, **model)
    worker = Worker(engine, 3)
    if refusal is not None:
        worker._refusal = lambda: refusal
    server = Server(worker, model, access)
    worker.start()

    async def go():
        transport = httpx.ASGITransport(server.app())
        async with httpx.AsyncClient(
            transport=transport, base_url="http://x", headers={"origin": "http://y"}
        ) as client:
            return [
                await (client.post(path, json=content[0]) if content else client.get(path))
                for path, *content in requests
            ]

    answers = asyncio.run(go())
    worker.stop()
    return answers


def ask_one(engine, path, content, **model):
    """The answer to a request for "other", or the chunks of a streamed one, without what differs in each answer."""
    began = int(time.time())
    (answer,) = ask(engine, (path, {"model": "other"} | content), access=Access(origins=("*",)), **model)
    assert answer.status_code == 200, answer.text
    if not content.get("stream"):
        assert answer.headers["content-type"] == "application/json"
        found = [answer.json()]
    else:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        *events, done, end = answer.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        found = [json.loads(event.removeprefix("data: ")) for event in events]
    kind = "chatcmpl" if "chat" in path else "cmpl"
    assert len({item["id"] for item in found}) == 1
    for item in found:
        assert re.fullmatch(kind + "-[0-9a-f]{32}", item.pop("id"))
        assert began <= item.pop("created") <= time.time()
        assert item.pop("model") == "m", "its own name"
        for choice in item["choices"]:
            for call in choice.get("message", choice.get("delta", {})).get("tool_calls", ()):
                assert re.fullmatch("call_[0-9a-f]{24}", call.pop("id"))
    return found if content.get("stream") else found[0]


def scored(token_id, logprob, *top):
    return (TokenLogprob(token_id, logprob, top),)


def test_a_completion_with_an_echo_and_log_probabilities():
    engine = Scripted(
        [Delta(0, i, (B,), "b", scored(B, -0.5, (B, -0.5)), num_cached_tokens=0) for i in range(2)]
        + [
            Delta(1, 0, (A,), "a", scored(A, -0.25, (C, -0.125)), None, None, 1, scored(B, -2.0, (A, -1.0))),
            Delta(1, 1, (C,), "c", scored(C, -4.0, (A, -3.0)), "stop", 2),
        ],
        [Delta(0, i, (C,), "c", scored(C, -8.0, (C, -8.0)), "length") for i in range(2)]
        + [Delta(1, 0, (), "", finish_reason="stop")],
    )
    content = {"prompt": ["a", [B, B]], "n": 2, "echo": True, "logprobs": 1, "best_of": 2}
    first = {
        "logprobs": {
            "tokens": ["a", "b", "c"],
            "token_logprobs": [None, -0.5, -8.0],
            "top_logprobs": [None, {"b": -0.5}, {"c": -8.0}],
            "text_offset": [0, 1, 2],
        },
        "finish_reason": "length",
        "text": "abc",
    }

    def other(token, logprob, top):
        return {
            "logprobs": {
                "tokens": ["b", "b", token],
                "token_logprobs": [None, -2.0, logprob],
                "top_logprobs": [None, {"a": -1.0, "b": -2.0}, top],
                "text_offset": [0, 1, 2],
            },
            "finish_reason": "stop",
            "text": f"bb{token}",
        }

    assert ask_one(engine, "/v1/completions", content) == {
        "object": "text_completion",
        "choices": [
            {"index": 0} | first,
            {"index": 1} | first,
            {"index": 2} | other("a", -0.25, {"c": -0.125, "a": -0.25}),
            {"index": 3} | other("c", -4.0, {"a": -3.0, "c": -4.0}),
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    params = SamplingParams(16, 2, 1.0, stop_token_ids=(2,), logprobs=1, prompt_logprobs=1)
    assert engine.asked == [([A], params), ([B, B], params)]


def usage(prompt, completion, cached=0):
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion} | details


def test_a_streamed_completion():
    """The echo comes before the texts; the usage counts as the tokens come."""
    deltas = [Delta(0, 1, (B,), "b"), Delta(0, 0, (A,), ""), Delta(0, 0, (C,), "ac", (), "stop", 2)]
    engine = Scripted(deltas, [Delta(0, 1, (C,), "c", (), "length")])
    options = {"include_usage": True, "continuous_usage_stats": True}
    content = {"prompt": "ab", "n": 2, "echo": True, "stream": True, "stream_options": options}
    chunks = [(0, "ab", None, 0), (1, "ab", None, 0), (1, "b", None, 1), (0, "", None, 2), (0, "ac", "stop", 3)]
    assert ask_one(engine, "/v1/completions", content) == [
        {
            "object": "text_completion",
            "choices": [{"index": index, "logprobs": None, "finish_reason": reason, "text": text}],
            "usage": usage(2, count),
        }
        for index, text, reason, count in [*chunks, (1, "c", "length", 4)]
    ] + [{"object": "text_completion", "choices": [], "usage": usage(2, 4)}]


CALLS = (
    'Hm <tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>',
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
)
F = {"type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
G = {"type": "function", "function": {"name": "g", "arguments": "{}"}}


def chat_script():
    """Two choices: the first calls two functions, the second is cut off after a call."""
    return Scripted(
        [Delta(0, 0, (A,), CALLS[0], scored(A, -0.5, (B, -0.25)), num_cached_tokens=1)],
        [Delta(0, 1, (A,), "Yes", scored(A, -1.0)), Delta(0, 0, (B,), CALLS[1], scored(B, -2.0), "stop")],
        [Delta(0, 1, (C,), CALLS[1], scored(C, -3.0)), Delta(0, 1, (C,), "", scored(C, -4.0), "length")],
    )


def told(token_id, logprob, *top):
    token = TOKENIZER.decode([token_id])
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": list(top)}


FIRST = told(A, -0.5, {"token": "b", "logprob": -0.25, "bytes": [98]})
CHAT = {"messages": HELLO, "n": 2, "tools": TOOLS, "logprobs": True, "top_logprobs": 1, "max_tokens": 3}


def test_a_chat_with_calls():
    engine = chat_script()
    assert ask_one(engine, "/v1/chat/completions", CHAT, tool_format="hermes") == {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "logprobs": {"content": [FIRST, told(B, -2.0)], "refusal": None},
                "finish_reason": "tool_calls",
                "message": {"role": "assistant", "content": "Hm", "refusal": None, "tool_calls": [F, G]},
            },
            {
                "index": 1,
                "logprobs": {"content": [told(A, -1.0), told(C, -3.0), told(C, -4.0)], "refusal": None},
                "finish_reason": "length",
                "message": {"role": "assistant", "content": "Yes", "refusal": None, "tool_calls": [G]},
            },
        ],
        "usage": usage(len(TOKENIZER.encode("user: a\nassistant:").ids), 5, 1),
    }
    ((_, params),) = engine.asked
    assert params == SamplingParams(3, 2, 1.0, stop_token_ids=(2,), logprobs=1)


def test_a_streamed_chat_with_calls():
    content = CHAT | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}}

    def chunk(index, delta, logprobs=None, reason=None):
        logprobs = None if logprobs is None else {"content": [logprobs], "refusal": None}
        choice = {"index": index, "logprobs": logprobs, "finish_reason": reason, "delta": delta}
        return {"object": "chat.completion.chunk", "choices": [choice], "usage": None}

    opening = {"role": "assistant", "content": ""}
    assert ask_one(chat_script(), "/v1/chat/completions", content, tool_format="hermes") == [
        chunk(0, opening),
        chunk(1, opening),
        chunk(0, {"content": "Hm", "tool_calls": [{"index": 0} | F]}, FIRST),
        chunk(1, {"content": "Yes"}, told(A, -1.0)),
        chunk(0, {"tool_calls": [{"index": 1} | G]}, told(B, -2.0), "tool_calls"),
        chunk(1, {"tool_calls": [{"index": 0} | G]}, told(C, -3.0)),
        chunk(1, {"content": ""}, told(C, -4.0), "length"),
        {
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": usage(len(TOKENIZER.encode("user: a\nassistant:").ids), 5, 1),
        },
    ]


def test_a_chat_without_text():
    engine = Scripted([Delta(0, 0, (2,), "", (), "stop", 2)])
    answer = ask_one(engine, "/v1/chat/completions", {"messages": HELLO})
    message = {"role": "assistant", "content": "", "refusal": None}
    assert answer["choices"] == [{"index": 0, "logprobs": None, "finish_reason": "stop", "message": message}]
