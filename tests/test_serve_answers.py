"""Tests the objects of answers without a model: log-probabilities over real tokenizers, offsets, usage, NaN."""

import json
import math

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from examples.server.answers import Answer
from examples.server.api import read_chat, read_completion
from examples.server.fields import ApiError
from examples.server.logprobs import TextOffsets, prompt_offsets
from examples.server.responses import json_response
from examples.server.tokens import TokenTexts, longest_token
from paged_jax.engine import Delta, TextStream, TokenLogprob
from tests.real_tokenizers import SPECIAL, TOKENIZERS, random_text


def answer_of(tokenizer, deltas, is_chat=False, prompts=((1, 2),), echoes=(), **fields):
    """The answer to a request that got these deltas, one list for each choice."""
    asked = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}]} | fields
    del asked["prompt" if is_chat else "messages"]
    wanted = (read_chat if is_chat else read_completion)(asked, ["m"]).wanted
    return Answer(is_chat, "m", TokenTexts(tokenizer), wanted, prompts, echoes).whole(deltas)


def delta_of(token_id, logprob=-1.0, top=(), **fields):
    return Delta(0, 0, (token_id,), logprobs=(TokenLogprob(token_id, logprob, top),), **fields)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def test_names_offsets_and_bytes_are_those_of_the_text(tokenizer):
    """Joined, the bytes of the tokens are the text; each token begins where its offset says."""
    rng, tokens = np.random.default_rng(0), TokenTexts(tokenizer)
    before = tokenizer.encode("cat", add_special_tokens=False).ids
    for _ in range(100):
        ids = tokenizer.encode(random_text(rng), add_special_tokens=False).ids
        stream = TextStream(tokenizer, before)
        text = "".join(map(stream.push, ids)) + stream.flush()
        offsets = TextOffsets(tokens, 0, hides_special_tokens=True)
        joined = b""
        for token_id in ids:
            at = offsets.take(token_id)
            assert at == len(joined.decode(errors="ignore"))
            joined += b"" if tokens.is_hidden(token_id) else tokens.bytes(token_id)
            name = tokens.name(token_id)
            assert tokens.is_hidden(token_id) or name.startswith("bytes:") or text.startswith(name, at)
        assert joined.decode() == text


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_parts_of_characters_are_named_by_their_bytes(name):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode("漢", add_special_tokens=False).ids[-3:]
    deltas = [delta_of(token_id, text=text) for token_id, text in zip(ids, ["", "", "漢"], strict=True)]
    (choice,) = answer_of(tokenizer, [deltas], logprobs=0)["choices"]
    assert choice["logprobs"]["tokens"] == ["bytes:\\xe6", "bytes:\\xbc", "bytes:\\xa2"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0]
    (choice,) = answer_of(tokenizer, [deltas], is_chat=True, logprobs=True)["choices"]
    assert [item["bytes"] for item in choice["logprobs"]["content"]] == [[0xE6], [0xBC], [0xA2]]


def test_bytes_of_whole_tokens():
    tokenizer = TOKENIZERS["byte_level"]()
    tokens = TokenTexts(tokenizer)
    for name in ("<|im_end|>", "Ġcat"):
        token_id = tokenizer.token_to_id(name)
        assert tokens.bytes(token_id) == name.replace("Ġ", " ").encode()
        assert tokens.is_hidden(token_id) == (name in SPECIAL)


def test_a_token_that_is_a_replacement_character_is_one():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "\ufffd": 1}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    assert TokenTexts(tokenizer).bytes(1) == "\ufffd".encode()


def test_the_drawn_token_is_among_the_candidates():
    tokenizer = TOKENIZERS["byte_fallback"]()
    cat, the = (tokenizer.encode(word, add_special_tokens=False).ids[-1] for word in ("cat ", "the "))
    drawn = delta_of(cat, -3.0, ((the, -0.5),))
    names = TokenTexts(tokenizer).name(cat), TokenTexts(tokenizer).name(the)
    (choice,) = answer_of(tokenizer, [[drawn]], logprobs=1)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{names[1]: -0.5, names[0]: -3.0}]
    (choice,) = answer_of(tokenizer, [[drawn._replace(logprobs=(TokenLogprob(cat, -3.0),))]], logprobs=0)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{names[0]: -3.0}]
    likely = delta_of(the, -0.5, ((the, -0.5),))
    (choice,) = answer_of(tokenizer, [[likely]], logprobs=1)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{names[1]: -0.5}]


def test_candidates_with_one_text_are_all_told():
    """A byte and the character that it is are two tokens in SentencePiece's vocabularies."""
    tokenizer = TOKENIZERS["byte_fallback"]()
    letter, byte = tokenizer.token_to_id("a"), tokenizer.token_to_id("<0x61>")
    top = ((letter, -0.5), (byte, -2.0))
    (choice,) = answer_of(tokenizer, [[delta_of(byte, -2.0, top)]], logprobs=2)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.5, f"token_id:{byte}": -2.0}]


@pytest.mark.parametrize("is_chat", [False, True])
def test_log_probabilities_that_json_cannot_hold(is_chat):
    """A forbidden token has the logarithm of 0; NaN is a failure of the model, and no answer."""
    tokenizer = TOKENIZERS["byte_level"]()
    fields = {"logprobs": True, "top_logprobs": 1} if is_chat else {"logprobs": 1}
    answer = answer_of(tokenizer, [[delta_of(7, -math.inf, ((8, -math.inf),))]], is_chat, **fields)
    text = json.dumps(answer, allow_nan=False)
    assert text.count("-9999.0") == (2 if is_chat else 3)
    for bad in (delta_of(7, math.nan), delta_of(7, -1.0, ((8, math.nan),))):
        with pytest.raises(ApiError, match="no number") as raised:
            answer_of(tokenizer, [[bad]], is_chat, **fields)
        assert raised.value.status == 500
        assert raised.value.body["error"]["type"] == "server_error"


def test_nothing_sends_nan_as_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_response({"x": math.nan})


def test_usage_and_offsets_of_several_choices():
    tokenizer = TOKENIZERS["byte_level"]()
    a, b = tokenizer.encode("ab").ids
    choices = [[delta_of(a, text="a"), delta_of(b, text="b", finish_reason="length")], [delta_of(b, text="b")]]
    choices = [*choices, [delta._replace(num_cached_tokens=16) for delta in choices[0]], choices[1]]
    choices[0] = [delta._replace(num_cached_tokens=1) for delta in choices[0]]
    answer = answer_of(tokenizer, choices, prompts=[[1, 2], [3]], echoes=["xyz", ""], n=2, logprobs=0)
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 1 + 16},
    }
    assert [choice["text"] for choice in answer["choices"]] == ["xyzab", "xyzb", "ab", "b"]
    assert [c["logprobs"]["text_offset"] for c in answer["choices"]] == [[3, 4], [3], [0, 1], [0]]


@pytest.mark.parametrize("is_shown", [False, True])
def test_special_tokens_move_offsets_where_they_are_shown(is_shown):
    tokenizer = TOKENIZERS["byte_level"]()
    ids = [tokenizer.token_to_id("<|im_end|>"), *tokenizer.encode("a").ids]
    deltas = [delta_of(token_id, finish_reason="length") for token_id in ids]
    (choice,) = answer_of(tokenizer, [deltas], logprobs=0, skip_special_tokens=not is_shown)["choices"]
    assert choice["logprobs"]["text_offset"] == [0, len("<|im_end|>") if is_shown else 0]


def test_an_answer_without_output():
    tokenizer = TOKENIZERS["byte_level"]()
    deltas = [delta_of(7, text="x", finish_reason="stop")]
    answer = answer_of(tokenizer, [deltas], echoes=["the prompt"], max_tokens=0, logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("the prompt", "length", None)
    assert answer["usage"]["completion_tokens"] == 0
    (choice,) = answer_of(tokenizer, [deltas], is_chat=True)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("x", "stop"), "no limit is no limit of 0"


@pytest.mark.parametrize("add_special_tokens", [False, True])
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "metaspace"])
def test_offsets_in_prompts(name, add_special_tokens):
    """Each token begins where its text stands, whatever the tokenizer puts before the prompt."""
    tokenizer = TOKENIZERS[name]()
    rng, tokens = np.random.default_rng(1), TokenTexts(tokenizer)
    for text in [random_text(rng) for _ in range(50)] + ["the cat", " the cat", "e\u0301 cat"]:
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        offsets = prompt_offsets(tokens, text, ids)
        assert offsets == sorted(offsets)
        for token_id, at in zip(ids, offsets, strict=True):
            name = tokens.name(token_id)
            is_found = text.startswith((name, name.removeprefix(" ")), at)
            assert is_found or name.startswith("bytes:") or tokens.is_hidden(token_id), (text, name, at)
    ids = tokenizer.encode("the cat sat", add_special_tokens=False).ids
    words = [at for token_id, at in zip(ids, prompt_offsets(tokens, "the cat sat", ids), strict=True)]
    assert words[0] == 0


def test_offsets_where_the_tokenizer_changes_the_text():
    tokenizer = TOKENIZERS["byte_level"]()
    tokenizer.normalizer = normalizers.NFC()
    text = "e\u0301" * 3 + "cat"
    ids = tokenizer.encode(text).ids
    offsets = prompt_offsets(TokenTexts(tokenizer), text, ids)
    cat = tokenizer.encode("cat").ids
    assert ids[-len(cat) :] == cat
    assert offsets[-len(cat)] == 6
    assert offsets == sorted(offsets)


def test_the_longest_token(tokenizer):
    assert longest_token(tokenizer) >= max(len(TokenTexts(tokenizer).text(i)) for i in range(30, 60))
