"""Tests what the fields of requests do, beside those that OpenAI's client sends."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from examples.attend import causal_attend
from examples.checkpoint import load_model
from examples.server.api import CHAT, COMPLETION, IGNORED, NEUTRAL, read_chat, read_completion
from examples.server.chat import ChatTemplate
from examples.server.fields import ApiError
from tests.http_server import BLOCK_SIZE, GOOD, HELLO, NUM_BLOCKS, PROMPT
from tests.model_folders import short_tiny


@pytest.fixture(scope="module")
def expected(running):
    """The text that follows PROMPT."""
    return complete(running)["choices"][0]["text"]


def test_tokenize_and_detokenize(running):
    def ask(path, **content):
        answer = running.post(f"/{path}", json=content)
        assert answer.status_code == 200, answer.text
        return answer.json()

    text = "naïve 漢"
    answer = ask("tokenize", model="tiny", prompt=text, return_token_strs=True)
    assert answer["tokens"] == list(text.encode())
    assert (answer["count"], answer["max_model_len"]) == (len(text.encode()), NUM_BLOCKS * BLOCK_SIZE)
    assert answer["token_strs"][:2] == ["n", "a"]
    assert ask("detokenize", tokens=[*answer["tokens"], 256]) == {"prompt": text + "<|endoftext|>"}
    chat = ask("tokenize", messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    assert bytes(chat["tokens"]).decode() == "user: Hi\n"


def test_the_version_and_the_model_s_length(running):
    assert running.get("/version").json() == {"version": paged_jax.__version__}
    (card,) = running.get("/v1/models").json()["data"]
    assert card["max_model_len"] == NUM_BLOCKS * BLOCK_SIZE


@pytest.mark.parametrize("is_chat", [False, True])
def test_null_is_as_good_as_no_field(is_chat):
    read, known, given = (
        (read_chat, CHAT, {"messages": [{"role": "user", "content": "Hi"}]})
        if is_chat
        else (read_completion, COMPLETION, {"prompt": "Hi"})
    )
    given |= {"model": "tiny", "max_tokens": 5}
    expected = read(given, ["tiny"])
    for name in sorted((known | NEUTRAL.keys() | IGNORED) - given.keys()):
        assert read(given | {name: None}, ["tiny"]) == expected, name
    assert expected.wanted.params["max_tokens"] == 5
    if is_chat:
        both = read(given | {"max_completion_tokens": 7}, ["tiny"])
        assert both.wanted.params["max_tokens"] == 7


BOUNDS = {
    "n": (1, 128, 1),
    "temperature": (0, 2, 0.01),
    "top_p": (0.01, 1, 0.01),
    "top_k": (-1, 2**31 - 1, 1),
    "min_p": (0, 1, 0.01),
    "presence_penalty": (-2, 2, 0.01),
    "frequency_penalty": (-2, 2, 0.01),
    "repetition_penalty": (1e-6, 1e6, 1e-6),
    "seed": (-(2**63), 2**63 - 1, 1),
    "max_tokens": (0, 2**31 - 1, 1),
    "min_tokens": (0, 2**31 - 1, 1),
    "logprobs": (0, 5, 1),
    "top_logprobs": (0, 20, 1),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_field_may_have_its_bounds_and_nothing_beyond(name):
    is_chat = name == "top_logprobs"
    read = read_chat if is_chat else read_completion
    given = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True} if is_chat else {"prompt": "Hi"}
    least, most, more = BOUNDS[name]
    for value in (least, most):
        read(given | {"model": "tiny", name: value}, ["tiny"])
    for value in (least - more, most + more):
        with pytest.raises(ApiError, match=name):
            read(given | {"model": "tiny", name: value}, ["tiny"])


def test_a_request_may_have_sixteen_stops():
    stops = [f"stop {i}" for i in range(17)]
    given = {"model": "tiny", "prompt": "Hi", "stop": stops[:16]}
    assert read_completion(given, ["tiny"]).wanted.params["stop"] == tuple(stops[:16])
    with pytest.raises(ApiError, match="stop must hold at most 16 texts, got 17"):
        read_completion(given | {"stop": stops}, ["tiny"])


def complete(running, **fields):
    """The answer to a request for a greedy completion of PROMPT, some fields changed."""
    content = {"model": "tiny", "prompt": PROMPT, "max_tokens": 32, "temperature": 0} | fields
    answer = running.post("/v1/completions", json=content)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(running, path="completions", **fields):
    """The objects of a streamed answer."""
    content = {"model": "tiny", "temperature": 0, "stream": True} | fields
    text = running.post(f"/v1/{path}", json=content).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_what_ends_a_text(running, expected, monkeypatch):
    byte = expected[9].encode()[0]
    end = expected.index(chr(byte))
    for fields, text in (
        ({"stop_token_ids": [byte]}, expected[:end]),
        ({"stop_token_ids": [byte], "include_stop_str_in_output": True}, expected[: end + 1]),
        ({"stop": [chr(byte)], "include_stop_str_in_output": True}, expected[: end + 1]),
    ):
        (choice,) = complete(running, **fields)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    model = dataclasses.replace(running.server._model, eos_token_ids=(byte,))
    monkeypatch.setattr(running.server, "_model", model)
    assert complete(running)["choices"][0]["text"] == expected[:end]
    assert complete(running, ignore_eos=True)["choices"][0]["text"] == expected
    (choice,) = complete(running, ignore_eos=True, stop_token_ids=[byte])["choices"]
    assert choice["text"] == expected[:end]


def test_fields_that_change_nothing(running, expected, caplog, monkeypatch):
    monkeypatch.setattr("examples.server.api._warned", set())
    for _ in range(2):
        fields = {"user": "me", "metadata": {}, "min_p": 0, "presence_penalty": 0, "repetition_penalty": 1}
        assert complete(running, top_k=-1, logit_bias={}, **fields)["choices"][0]["text"] == expected
    warnings = sorted(record.getMessage().split()[2] for record in caplog.records if record.name.startswith("paged_"))
    assert warnings == ["metadata", "user"], "each once"


@pytest.mark.parametrize("stream", [False, True])
def test_no_new_tokens(running, stream):
    if stream:
        usage = {"stream_options": {"include_usage": True}}
        events = events_of(running, prompt="abc", max_tokens=0, echo=True, **usage)
        text, finish = "".join(e["choices"][0]["text"] for e in events[:-1]), events[-2]["choices"][0]["finish_reason"]
        usage = events[-1]["usage"]
    else:
        answer = complete(running, prompt="abc", max_tokens=0, echo=True)
        (choice,) = answer["choices"]
        text, finish, usage = choice["text"], choice["finish_reason"], answer["usage"]
    assert (text, finish) == ("abc", "length")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)


def test_the_usage_tells_of_cached_tokens(running):
    prompt = "a prompt that no other test has " * 3
    for expected in (0, len(prompt) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE * (len(prompt) % BLOCK_SIZE == 0)):
        usage = complete(running, prompt=prompt, max_tokens=1)["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": expected}
        running.wait_until_idle()
    assert expected > 0


def test_an_echo_is_the_prompt_as_it_was_sent(running):
    prompt = "e\u0301<|endoftext|>x"
    assert complete(running, prompt=prompt, max_tokens=0, echo=True)["choices"][0]["text"] == prompt
    ids = [*b"ab", 256, *b"c"]
    assert complete(running, prompt=ids, max_tokens=0, echo=True)["choices"][0]["text"] == "ab<|endoftext|>c"


@pytest.fixture(scope="module")
def logprobs_of():
    """The model's log-probabilities for every token after each token of a list, without a cache."""
    decoder, config, *_ = load_model(short_tiny(), jnp.float32)

    @jax.jit
    def logits(token_ids):
        positions = jnp.arange(64, dtype=jnp.int32)
        hidden, _ = decoder(token_ids, positions, (None,) * config.num_layers, causal_attend())
        return jax.nn.log_softmax(decoder.logits(hidden))

    def logprobs_of(token_ids):
        padded = np.zeros(64, np.int32)
        padded[: len(token_ids)] = token_ids
        return np.asarray(logits(padded))[: len(token_ids)]

    return logprobs_of


def test_loglikelihoods_as_lm_eval_asks_for_them(running, logprobs_of):
    """It sends contexts with continuations as tokens, and one new token, which it leaves out."""
    pairs = [
        ("The assert statement ", "is"),
        ("In Python, a list ", "of é"),
        ("x", " = 1"),
        ("In Python, a list ", "can"),
    ]
    prompts = [list((context + continuation).encode()) for context, continuation in pairs]
    for prompts_at_once in (prompts, prompts[:1]):
        answer = complete(
            running, prompt=prompts_at_once, max_tokens=1, logprobs=1, echo=True, seed=1234, add_special_tokens=False
        )
        for (context, continuation), ids, choice in zip(pairs, prompts, answer["choices"], strict=False):
            start, expected = len(context.encode()), logprobs_of(ids)
            found = choice["logprobs"]["token_logprobs"][start:-1]
            wanted = expected[np.arange(start - 1, len(ids) - 1), ids[start:]]
            np.testing.assert_allclose(found, wanted, atol=1e-4)
            tops = choice["logprobs"]["top_logprobs"][start:-1]
            is_greedy = [logprob == max(top.values()) for logprob, top in zip(found, tops, strict=True)]
            assert is_greedy == (expected[start - 1 : -1].argmax(1) == ids[start:]).tolist()
            assert choice["text"].startswith(context + continuation)
    running.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_an_echo_with_log_probabilities(running, expected, stream, max_tokens):
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": max_tokens, "n": 2}
    choices = [{"text": "", "logprobs": {}} for _ in range(2)]
    objects = events_of(running, **fields) if stream else [complete(running, **fields)]
    for choice in [choice for content in objects for choice in content["choices"]]:
        choices[choice["index"]]["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            choices[choice["index"]]["logprobs"].setdefault(name, []).extend(values)
    for choice in choices:
        text, logprobs = PROMPT + expected[:max_tokens], choice["logprobs"]
        assert choice["text"] == text
        assert logprobs["tokens"] == list(text)
        assert logprobs["text_offset"] == list(range(len(text)))
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert all(logprob < 0 for logprob in logprobs["token_logprobs"][1:])
        assert [list(top) for top in logprobs["top_logprobs"][1:]] == [[token] for token in text[1:]]
    (choice,) = complete(running, **fields | {"prompt": "x", "n": 1})["choices"]
    assert len(choice["logprobs"]["tokens"]) == 1 + max_tokens


def test_a_last_message_is_gone_on_with(running):
    messages = [{"role": "user", "content": "What is a list?"}, {"role": "assistant", "content": "A list is "}]
    content = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = running.post("/v1/chat/completions", json=content | {"continue_final_message": True}).json()
    text = complete(running, prompt="user: What is a list?\nassistant: A list is ", max_tokens=8)["choices"][0]["text"]
    assert answer["choices"][0]["message"]["content"] == text


def test_tool_calls_may_stand_in_for_a_message_s_text(running, monkeypatch):
    source = (
        "{% for m in messages %}"
        "{{ m.tool_calls[0].function.arguments | tojson if m.tool_calls else m.content }}{% endfor %}"
    )
    model = dataclasses.replace(running.server._model, template=ChatTemplate(source))
    monkeypatch.setattr(running.server, "_model", model)
    messages = []
    for arguments in ('{"x": 77}', ""):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "88"}]
    answer = running.post("/tokenize", json={"messages": messages}).json()
    assert bytes(answer["tokens"]).decode() == '{"x": 77}88{}88'


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_streamed_usage_counts_tokens_that_bring_no_text(running, path):
    """The beginning of the text is held back, since it may begin a stop text."""
    fields = {"prompt": PROMPT} if path == "completions" else {"messages": HELLO}
    fields |= {"max_tokens": 8}
    plain = events_of(running, path, **fields)
    text = "".join(e["choices"][0].get("text") or e["choices"][0].get("delta", {}).get("content", "") for e in plain)
    assert len(text) == 8
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = events_of(running, path, stop=[text[:5] + "@"], **fields, **options)
    assert len(events) - 1 == len(plain) if path == "completions" else len(events) - 1 < len(plain)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[-1] == 8
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    events = events_of(running, path, stop=[text[3:]], **fields)
    assert events[-1]["choices"][0]["finish_reason"] == "stop", "also where the last token brings no text"
    assert counts == sorted(counts)
    for usage in ({"include_usage": False}, {}, {"include_obfuscation": True}):
        assert all("usage" not in event for event in events_of(running, path, stream_options=usage, **fields))


@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_no_numbers_are_no_answer(running, monkeypatch, stream):
    real = running.engine.step

    def step():
        return [
            delta._replace(logprobs=tuple(dataclasses.replace(item, logprob=float("nan")) for item in delta.logprobs))
            for delta in real()
        ]

    monkeypatch.setattr(running.engine, "step", step)
    if stream:
        error = events_of(running, prompt="x", max_tokens=2, logprobs=1)[-1]["error"]
    else:
        answer = running.post("/v1/completions", json=GOOD | {"logprobs": 1})
        assert answer.status_code == 500
        error = answer.json()["error"]
    assert (error["type"], "no number" in error["message"]) == ("server_error", True)
    running.wait_until_idle()
