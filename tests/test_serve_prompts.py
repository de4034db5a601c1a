"""Tests which tokens the engine gets of a request, over a tokenizer that adds BOS and a made-up engine."""

import asyncio

import httpx
import pytest
from tokenizers import AddedToken

from examples.server.app import Model, Server
from examples.server.chat import ChatTemplate
from examples.server.worker import Worker
from tests.real_tokenizers import TOKENIZERS
from tests.test_serve_worker import MadeUpEngine

BOS = 1
OWN = ChatTemplate("{{ bos_token }}[{{ messages[0].content }}]", {"bos_token": "<s>"})


class Noting(MadeUpEngine):
    """Notes what it is asked for."""

    def add_request(self, prompt, params):
        self.asked = list(prompt), params
        self.outcomes.put(None)
        return super().add_request(prompt, params)


def asked(path, template=None, eos_token_ids=(2,), tokenizer=None, tool_format=None, **content):
    """The prompt and the parameters that the engine gets of a request."""
    tokenizer, template = tokenizer or TOKENIZERS["byte_fallback"](), template or ChatTemplate()
    model = Model(("m", "another"), tokenizer, template, eos_token_ids, 400, 100, tool_format=tool_format)
    worker = Worker(the_engine := Noting(), 0)
    server = Server(worker, model)
    worker.start()

    async def go():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app()), base_url="http://x") as client:
            return await client.post(path, json={"model": "another"} | content)

    answer = asyncio.run(go())
    worker.stop()
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", "m") == "m"
    return the_engine.asked if path.startswith("/v1") else answer.json()["tokens"]


def ids_of(text):
    return TOKENIZERS["byte_fallback"]().encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(("fields", "bos"), [({}, [BOS]), ({"add_special_tokens": False}, [])])
def test_prompts_begin_with_bos(fields, bos):
    assert asked("/v1/completions", prompt="the cat", **fields)[0] == bos + ids_of("the cat")
    assert asked("/tokenize", prompt="the cat", **fields) == bos + ids_of("the cat")


@pytest.mark.parametrize(
    ("template", "fields", "text", "bos"),
    [
        (None, {}, "user: cat\nassistant:", [BOS]),
        (None, {"add_special_tokens": False}, "user: cat\nassistant:", []),
        (OWN, {}, "<s>[cat]", []),
        (OWN, {"add_special_tokens": True}, "<s>[cat]", [BOS]),
    ],
)
def test_chats_begin_with_one_bos(template, fields, text, bos):
    """A template has its own; without one there is the tokenizer's."""
    messages = [{"role": "user", "content": "cat"}]
    assert asked("/v1/chat/completions", template, messages=messages, **fields)[0] == bos + ids_of(text)
    assert asked("/tokenize", template, messages=messages, **fields) == bos + ids_of(text)
    assert ids_of("<s>[cat]")[0] == BOS


def test_a_message_may_come_in_parts():
    parts = [{"type": "text", "text": "the c"}, {"type": "text", "text": "at"}]
    assert asked("/tokenize", OWN, messages=[{"role": "user", "content": parts}]) == ids_of("<s>[the cat]")


def test_parameters():
    params = asked(
        "/v1/completions", prompt="x", seed=-1, stop_token_ids=[7], top_k=-1, max_tokens=9, n=1, temperature=0.5
    )[1]
    assert (params.seed, params.stop_token_ids, params.top_k, params.max_tokens) == (2**64 - 1, (7, 2), 0, 9)
    assert (params.temperature, params.skip_special_tokens, params.include_stop) == (0.5, True, False)
    params = asked("/v1/completions", prompt="x", ignore_eos=True, skip_special_tokens=False, top_k=3)[1]
    assert (params.max_tokens, params.stop_token_ids, params.top_k, params.skip_special_tokens) == (16, (), 3, False)
    messages = [{"role": "user", "content": "cat"}]
    params = asked("/v1/chat/completions", messages=messages, max_tokens=3, max_completion_tokens=5)[1]
    assert params.max_tokens == 5
    params = asked("/v1/chat/completions", messages=messages, include_stop_str_in_output=True, stop="x")[1]
    assert (params.max_tokens, params.include_stop, params.stop, params.seed) == (None, True, ("x",), None)


@pytest.mark.parametrize("special", [False, True])
def test_special_tokens_around_calls_are_seen(special):
    """The parser finds calls in the text, which hides special tokens otherwise."""
    tokenizer, messages = TOKENIZERS["byte_fallback"](), [{"role": "user", "content": "cat"}]
    tokenizer.add_tokens([AddedToken(tag, special=special) for tag in ("<tool_call>", "</tool_call>")])
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    for content, is_hidden in ((tools, not special), ({}, True)):
        given = {"tokenizer": tokenizer, "tool_format": "hermes", "messages": messages} | content
        assert asked("/v1/chat/completions", **given)[1].skip_special_tokens == is_hidden
