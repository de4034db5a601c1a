"""Tests the HTTP server with OpenAI's own client and with raw sockets, and with requests that are wrong."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from examples.attend import causal_attend
from examples.checkpoint import load_model
from examples.server.chat import ChatTemplate
from tests.http_server import BLOCK_SIZE, GOOD, HELLO, JSON, NUM_BLOCKS, PROMPT
from tests.model_folders import short_tiny


@pytest.fixture
def client(running):
    with running.openai() as client:
        yield client
    running.wait_until_idle()


@pytest.fixture(scope="module")
def tiny():
    return load_model(short_tiny(), jnp.float32)


@pytest.fixture(scope="module")
def expected(tiny):
    """The text of 32 greedy tokens after PROMPT, computed by the model without a cache."""
    decoder, config, tokenizer, _ = tiny

    @jax.jit
    def next_token(token_ids, num_tokens):
        positions = jnp.arange(64, dtype=jnp.int32)
        hidden, _ = decoder(token_ids, positions, (None,) * config.num_layers, causal_attend())
        return jnp.argmax(decoder.logits(hidden[num_tokens - 1][None]))

    prompt = tokenizer.encode(PROMPT).ids
    ids = list(prompt)
    for _ in range(32):
        padded = np.zeros(64, np.int32)
        padded[: len(ids)] = ids
        ids.append(int(next_token(padded, np.int32(len(ids)))))
    return tokenizer.decode(ids[len(prompt) :])


def test_completion(client, expected):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=32, temperature=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected, "length")
    assert answer.usage.completion_tokens == 32
    assert answer.usage.total_tokens == 32 + answer.usage.prompt_tokens


def test_streamed_completion_is_the_whole_one(client, expected):
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=32, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 32
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])


def test_many_prompts_samples_and_log_probabilities(client):
    answer = client.completions.create(
        model="tiny", prompt=[PROMPT, "In Python"], n=2, max_tokens=6, temperature=1.0, seed=3, logprobs=2, echo=False
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text != answer.choices[1].text
    for choice in answer.choices:
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 6
        assert "".join(logprobs.tokens) == choice.text
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
            assert len(top) in (2, 3)
            assert top[token] == logprob <= max(top.values()) <= 0
        assert logprobs.text_offset[-1] == len("".join(logprobs.tokens[:-1]))
    again = client.completions.create(model="tiny", prompt=PROMPT, n=2, max_tokens=6, temperature=1.0, seed=3)
    assert [c.text for c in again.choices] == [c.text for c in answer.choices[:2]]


def test_stop_echo_and_token_prompts(client, expected):
    stop = expected[10:13]
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=32, temperature=0, stop=[stop, "@@"], echo=True
    )
    assert answer.choices[0].text == PROMPT + expected[: expected.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    ids = list(PROMPT.encode())  # the tiny model's tokens are bytes
    tokens = client.completions.create(model="tiny", prompt=[ids, ids], max_tokens=2, temperature=0)
    assert len(tokens.choices) == 2


def test_chat(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a list?"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert answer.usage.completion_tokens == 8
    prompt = "system: Be brief.\nuser: What is a list?\nassistant:"
    plain = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
    assert plain.choices[0].text == choice.message.content
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=8, temperature=0, stream=True,
        logprobs=True, top_logprobs=3,
        stop=[choice.message.content + "\0"],  # so that all text is held back until the last token
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    told = [item for chunk in chunks if chunk.choices[0].logprobs for item in chunk.choices[0].logprobs.content]
    assert len(told) == 8
    assert all(len(item.top_logprobs) == 3 and item.top_logprobs[0].logprob >= item.logprob for item in told)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_health_and_metrics(running):
    assert running.get("/health").json() == {"status": "ok"}
    assert running.post("/v1/completions", json=GOOD | {"max_tokens": 2}).status_code == 200
    metrics = running.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    blocks = sum(float(values[f"paged_jax_{kind}_blocks"]) for kind in ("free", "cached", "held"))
    assert blocks == NUM_BLOCKS
    assert float(values["paged_jax_compiled"]) > 0
    assert float(values["paged_jax_output_tokens_total"]) > 0
    assert float(values["paged_jax_first_token_seconds_count"]) > 0
    assert float(values["paged_jax_between_tokens_seconds_count"]) > 0
    assert float(values["paged_jax_is_well"]) == 1


@pytest.mark.parametrize(
    ("path", "content", "status", "word"),
    [
        ("completions", b"{", 400, "not valid JSON"),
        ("completions", b"\xff\xfe", 400, "not valid JSON"),
        ("completions", b"[" * 100_000, 400, "not valid JSON"),
        ("completions", b"[]", 400, "must be a JSON object"),
        ("completions", {"prompt": "x"}, 400, "model must be a text"),
        ("completions", GOOD | {"model": "other"}, 404, "does not exist"),
        ("completions", {"model": "tiny"}, 400, "prompt must be"),
        ("completions", GOOD | {"prompt": []}, 400, "prompt must be"),
        ("completions", GOOD | {"prompt": {"a": 1}}, 400, "prompt must be"),
        ("completions", GOOD | {"prompt": ["x", 3]}, 400, "prompt must be"),
        ("completions", GOOD | {"prompt": ""}, 400, "at least one token"),
        ("completions", GOOD | {"prompt": "\ud800"}, 400, "not valid Unicode"),
        ("completions", GOOD | {"prompt": [257]}, 400, r"tokens in \[0, 256\]"),
        ("completions", GOOD | {"prompt": [-1]}, 400, r"tokens in \[0, 256\]"),
        ("completions", GOOD | {"prompt": "x" * (NUM_BLOCKS * BLOCK_SIZE + 1)}, 400, "at most 384 fit"),
        ("completions", GOOD | {"max_tokens": 385}, 400, "at most 384 new tokens"),
        ("completions", GOOD | {"max_tokens": -1}, 400, "max_tokens must be in"),
        ("completions", GOOD | {"max_tokens": 1.5}, 400, "max_tokens must be an integer"),
        ("completions", GOOD | {"max_tokens": True}, 400, "max_tokens must be an integer"),
        ("completions", GOOD | {"max_tokens": 10**30}, 400, "max_tokens must be in"),
        ("completions", GOOD | {"n": 0}, 400, "n must be in"),
        ("completions", GOOD | {"n": 5}, 400, "n must be at most max_num_seqs = 4"),
        ("completions", GOOD | {"n": "2"}, 400, "n must be an integer"),
        ("completions", GOOD | {"temperature": -1}, 400, "temperature must be in"),
        ("completions", GOOD | {"temperature": "hot"}, 400, "temperature must be a finite number"),
        ("completions", b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400, "finite number"),
        ("completions", GOOD | {"top_p": 0}, 400, "top_p must be above 0"),
        ("completions", GOOD | {"stop": [""]}, 400, "stop must be"),
        ("completions", GOOD | {"stop": ["a"] * 17}, 400, "at most 16"),
        ("completions", GOOD | {"stream": "yes"}, 400, "stream must be true or false"),
        ("completions", GOOD | {"stream_options": {}}, 400, "needs stream"),
        ("completions", GOOD | {"stream": True, "stream_options": {"usage": 1}}, 400, 'of stream_options: "usage"'),
        ("completions", GOOD | {"stream": True, "stream_options": []}, 400, "stream_options must be an object"),
        ("completions", GOOD | {"top_k": -2}, 400, "top_k must be in"),
        ("completions", GOOD | {"stop_token_ids": [-1]}, 400, "stop_token_ids must be a list of token ids"),
        ("completions", GOOD | {"stop_token_ids": 3}, 400, "stop_token_ids must be a list of token ids"),
        ("completions", GOOD | {"ignore_eos": 1}, 400, "ignore_eos must be true or false"),
        ("completions", GOOD | {"logit_bias": {"x": 1}}, 400, "logit_bias must have token ids"),
        ("completions", GOOD | {"response_format": {"type": "xml"}}, 400, "response_format.type must be text"),
        ("completions", GOOD | {"messages": []}, 400, "unrecognized field"),
        ("completions", GOOD | {"seed": 2**63}, 400, "seed must be in"),
        ("completions", GOOD | {"seed": True}, 400, "seed must be an integer"),
        ("completions", GOOD | {"logprobs": 6}, 400, "logprobs must be in"),
        ("completions", GOOD | {"best_of": 3}, 400, "best_of must be n"),
        ("completions", GOOD | {"presence_penalty": 3}, 400, "presence_penalty must be in"),
        ("completions", GOOD | {"no_such": 1}, 400, "unrecognized field"),
        ("completions", GOOD | {"prompt": ["x"] * 205}, 400, "the server takes 204"),
        ("chat/completions", {"model": "tiny"}, 400, "messages must be"),
        ("chat/completions", {"model": "tiny", "messages": []}, 400, "messages must be"),
        ("chat/completions", {"model": "tiny", "messages": ["Hi"]}, 400, r"messages\[0\] must be"),
        ("chat/completions", {"model": "tiny", "messages": [{"role": "user"}]}, 400, "content must be a text"),
        ("chat/completions", {"model": "tiny", "messages": HELLO, "top_logprobs": 2}, 400, "needs logprobs"),
        ("chat/completions", {"model": "tiny", "messages": HELLO, "logprobs": 1}, 400, "logprobs must be true"),
        ("chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": None}]}, 400, "must be a text"),
        (
            "chat/completions",
            {"model": "tiny", "messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
            400,
            "needs add_generation_prompt to be false",
        ),
        ("chat/completions", {"model": "tiny", "messages": HELLO, "chat_template_kwargs": 1}, 400, "must be an object"),
        (
            "chat/completions",
            {"model": "tiny", "messages": HELLO, "chat_template_kwargs": {"messages": 1}},
            400,
            "cannot have messages",
        ),
        ("../tokenize", {"model": "other", "prompt": "x"}, 404, "does not exist"),
        ("../tokenize", {}, 400, "prompt must be a text"),
        ("../detokenize", {}, 400, "tokens must be a list"),
        ("../detokenize", {"tokens": [257]}, 400, r"tokens in \[0, 256\]"),
        ("no_such_route", GOOD, 404, "Not Found"),
        ("models", GOOD, 405, "Method Not Allowed"),
    ],
)
def test_what_is_wrong_is_told_in_openais_words(running, path, content, status, word):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    answer = running.post(f"/v1/{path}", content=body, headers=JSON)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    assert error["type"] == "invalid_request_error"
    assert re.search(word, error["message"]), error["message"]
    assert running.worker.is_alive
    running.wait_until_idle()


def test_a_template_may_bring_text_that_is_not_unicode(running, monkeypatch):
    template = ChatTemplate("{{ messages[0].name }}")
    monkeypatch.setattr(running.server, "_model", dataclasses.replace(running.server._model, template=template))
    chat = {"model": "tiny", "messages": [HELLO[0] | {"name": "\ud800"}]}
    answer = running.post("/v1/chat/completions", content=json.dumps(chat), headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


def test_an_engine_that_fails_goes_on_with_the_next_request(running, monkeypatch, capfd):
    def fail():
        monkeypatch.undo()
        raise RuntimeError("out of luck")

    monkeypatch.setattr(running.engine, "step", fail)
    answer = running.post("/v1/completions", json=GOOD)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "luck" not in answer.text
    assert "out of luck" in capfd.readouterr().err
    assert running.post("/v1/completions", json=GOOD).status_code == 200
    assert running.get("/health").status_code == 200
