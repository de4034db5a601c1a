"""Tests that a stream of text is the text that decoding all tokens gives, whatever the tokenizer, and its stops."""

import numpy as np
import pytest

from paged_jax.engine import TextStream
from tests.real_tokenizers import TOKENIZERS, random_text

BROKEN = "\N{REPLACEMENT CHARACTER}"


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids, /):
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", ["plain", "naïve — ünï", "漢字 🙂 end", ""])
def test_text_comes_in_whole_characters(text):
    stream = TextStream(Bytes(), list("prompt é".encode()), ())
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.flush() == text
    assert all(BROKEN not in piece for piece in pieces)
    assert [piece for piece in pieces if piece] == list(text)


def test_an_unfinished_character_is_flushed_as_what_it_is():
    stream = TextStream(Bytes(), [], ())
    assert [stream.push(byte) for byte in "aé".encode()[:-1]] == ["a", ""]
    assert [stream.flush(), stream.flush()] == [BROKEN, ""]


@pytest.mark.parametrize(("byte", "shown"), [(0x80, BROKEN), (0, "")])
def test_the_work_for_a_token_is_bounded(byte, shown):
    """This holds even if thousands of tokens in a row end inside a character, or are special and show nothing."""
    lengths = []

    class Counting(Bytes):
        def decode(self, ids, /):
            lengths.append(len(ids))
            return super().decode(ids).replace("\0", "")

    stream = TextStream(Counting(), list(b"prompt"))
    pieces = [stream.push(byte) for _ in range(1000)] + [stream.push(ord("a")), stream.flush()]
    assert "".join(pieces) == shown * 1000 + "a"
    assert max(lengths) < 200


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ("two",), "one "),
        ("aaab", ("aab",), "a"),
        ("abcabd", ("abd", "zz"), "abc"),
        ("abc", ("bcd",), None),
        ("x\nUser: y", ("\nUser:", "User"), "x\n"),  # the first stop text that is complete
    ],
)
def test_stop_texts(text, stop, expected):
    stream, so_far = TextStream(Bytes(), [], stop), ""
    for byte in text.encode():
        so_far += stream.push(byte)
        if stream.stopped_by:
            break
        assert (text if expected is None else expected).startswith(so_far)
    so_far += stream.flush()
    assert so_far == (text if expected is None else expected)
    assert (stream.stopped_by in stop) == (expected is not None)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def streamed(tokenizer, prompt, token_ids, **options):
    stream = TextStream(tokenizer, prompt, **options)
    return [*map(stream.push, token_ids), stream.flush()]


def text_after(tokenizer, prompt, whole):
    """The text of all tokens, without the beginning that it shares with the text of the prompt alone."""
    for size in range(len(prompt), -1, -1):
        if whole.startswith(shown := tokenizer.decode(prompt[:size])):
            return whole[len(shown) :]
    raise AssertionError


def check_random_texts(tokenizer, seed, count):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        if rng.random() < 0.5:
            ids = tokenizer.encode(random_text(rng)).ids
            size = int(rng.integers(0, len(ids) + 1))
            prompt, ids = ids[:size], ids[size:]
        else:  # a prompt that ends with a character, and text of the same kinds after it
            prompt = tokenizer.encode(random_text(rng)).ids
            ids = tokenizer.encode(random_text(rng), add_special_tokens=False).ids
        expected = text_after(tokenizer, prompt, tokenizer.decode(prompt + ids))
        assert "".join(streamed(tokenizer, prompt, ids)) == expected, (prompt, ids)


@pytest.mark.parametrize("seed", range(2))
def test_random_texts(tokenizer, seed):
    check_random_texts(tokenizer, seed, 150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 4))
def test_many_random_texts(tokenizer, seed):
    check_random_texts(tokenizer, seed, 400)


def test_prompts_that_end_in_characters_made_of_bytes():
    """A context that began inside one of them would make every byte after it a replacement character."""
    tokenizer = TOKENIZERS["byte_fallback"]()
    prompt = tokenizer.encode("say 漢字🙂").ids
    ids = tokenizer.encode("한국", add_special_tokens=False).ids[1:]
    assert streamed(tokenizer, prompt, ids) == ["", "", "한", "", "", "국", ""]
    assert "".join(streamed(tokenizer, prompt[:-2], prompt[-2:] + ids)) == "🙂한국"
    assert "".join(streamed(tokenizer, prompt[-2:-1], ids)) == BROKEN * 6, "decoding all of it gives no more"


def test_bytes_that_are_no_text_harm_only_themselves():
    """Decoding everything would show the characters before them, which are given out already, as broken ones too."""
    tokenizer = TOKENIZERS["byte_fallback"]()
    prompt, ids = tokenizer.encode("漢").ids, tokenizer.encode("字cat", add_special_tokens=False).ids[1:]
    broken = tokenizer.token_to_id("<0xFF>")
    assert "".join(streamed(tokenizer, prompt, [*ids[:3], broken, *ids[3:]])) == "字" + BROKEN + "cat"
    assert "".join(streamed(tokenizer, prompt, [*ids, *ids[:2]])) == "字cat" + BROKEN * 2, "the end is half a character"
    assert "".join(streamed(tokenizer, prompt, ids[:5][:3] + ids[:2])) == "字" + BROKEN * 2


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace"])
def test_spaces_after_special_tokens(name):
    """A tokenizer does not show the space of a text's first token; after special tokens alone, that is the output's."""
    tokenizer = TOKENIZERS[name]()
    end, cat = tokenizer.token_to_id("<|im_end|>"), tokenizer.encode("cat", add_special_tokens=False).ids
    assert "".join(streamed(tokenizer, [end] * 9, cat)) == "cat"
    assert "".join(streamed(tokenizer, cat + [end] * 9, cat)) == " cat"
    assert "".join(streamed(tokenizer, cat, [*cat, end, *cat])) == " cat cat"


@pytest.mark.parametrize(
    "end", [["</s>"] * 9, ["<0xE6>", "<0xBC>", "<0xA2>"] * 5, ["<0xE6>", "<0xBC>", "<0xA2>", "<0xE6>"]]
)
def test_the_context_of_a_prompt_is_short(end):
    """This holds for a long prompt that ends with special tokens or inside a character; decoding all of it is slow."""
    tokenizer, lengths = TOKENIZERS["byte_fallback"](), []

    class Counting:
        def decode(self, ids, /):
            lengths.append(len(ids))
            return tokenizer.decode(ids)

    cat = tokenizer.encode("cat", add_special_tokens=False).ids
    stream = TextStream(Counting(), cat * 1000 + [tokenizer.token_to_id(token) for token in end])
    assert "".join(map(stream.push, cat)) == " cat"
    assert max(lengths) <= 21


def test_replacement_characters_can_be_in_a_text():
    """They look like half a character until the next token comes."""
    for name in ("byte_level", "byte_fallback"):
        tokenizer = TOKENIZERS[name]()
        prompt = tokenizer.encode("a" + BROKEN).ids
        for text in ("b" + BROKEN + "c", BROKEN, "漢" + BROKEN):
            ids = [i for i in tokenizer.encode(text, add_special_tokens=False).ids if tokenizer.id_to_token(i) != "▁"]
            assert "".join(streamed(tokenizer, tokenizer.encode("a").ids, ids)) == text
            if name == "byte_level":
                assert "".join(streamed(tokenizer, prompt, ids)) == text


def test_a_stop_text_that_is_a_special_token(tokenizer):
    cat = tokenizer.encode(" cat", add_special_tokens=False).ids
    end = tokenizer.token_to_id("<|im_end|>")
    stream = TextStream(tokenizer, cat, ("<|im_end|>", " the"))
    text = "".join(map(stream.push, cat))
    assert stream.stopped_by is None
    text += stream.push(end)
    assert stream.stopped_by == "<|im_end|>"
    assert text + stream.flush() == tokenizer.decode(cat + cat)[len(tokenizer.decode(cat)) :]


def test_text_that_is_held_back_comes_before_a_special_stop():
    tokenizer = TOKENIZERS["byte_level"]()
    stream = TextStream(tokenizer, [], ("<|im_end|>", "catalogue"))
    assert "".join(map(stream.push, tokenizer.encode("cat").ids)) == ""
    assert stream.push(tokenizer.token_to_id("<|im_end|>")) == "cat"
    assert (stream.stopped_by, stream.flush()) == ("<|im_end|>", "")


def test_a_token_that_looks_like_the_stop_text_in_the_vocabulary_is_another():
    """In a byte-level vocabulary the token of a space is called Ġ."""
    tokenizer = TOKENIZERS["byte_level"]()
    assert "".join(streamed(tokenizer, [], tokenizer.encode("a b").ids, stop=("Ġ",))) == "a b"


def test_special_tokens_can_be_shown(tokenizer):
    cat, end = tokenizer.encode("cat", add_special_tokens=False).ids, tokenizer.token_to_id("<|im_end|>")
    ids = [*cat, end, *cat]
    shown = tokenizer.decode(cat + ids, skip_special_tokens=False)[len(tokenizer.decode(cat)) :]
    assert "<|im_end|>" in shown
    assert "".join(streamed(tokenizer, cat, ids, skip_special_tokens=False)) == shown
    stream = TextStream(tokenizer, cat, ("<|im_end|>",), skip_special_tokens=False)
    text = "".join(map(stream.push, [*cat, end]))
    assert stream.stopped_by == "<|im_end|>"
    assert text.strip() == "cat"


def test_stop_texts_can_be_part_of_the_text():
    tokenizer = TOKENIZERS["byte_level"]()
    ids = tokenizer.encode("the cat sat").ids
    for stop, expected in (("at s", "the cat s"), ("zzz", "the cat sat")):
        assert "".join(streamed(tokenizer, [], ids, stop=(stop,), include_stop=True)) == expected
    end = tokenizer.token_to_id("<|im_end|>")
    stream = TextStream(tokenizer, [], ("<|im_end|>",), include_stop=True)
    assert stream.push(ids[0]) + stream.push(end) + stream.flush() == tokenizer.decode(ids[:1]) + "<|im_end|>"


def test_stop_texts_before_the_least_number_of_tokens_do_not_stop():
    tokenizer = TOKENIZERS["byte_level"]()
    ids = tokenizer.encode("ab" * 4).ids
    assert len(ids) == 8
    stream = TextStream(tokenizer, [], ("b", "<|im_end|>"), min_tokens=4)
    text = "".join(map(stream.push, [*ids[:3], tokenizer.token_to_id("<|im_end|>")]))
    assert (stream.stopped_by, text) == (None, "aba")
    assert (stream.push(ids[3]), stream.stopped_by) == ("", "b")
    stream = TextStream(tokenizer, [], ("<|im_end|>",), min_tokens=1)
    assert (stream.push(ids[0]), stream.stopped_by) == ("a", None)
    assert (stream.push(tokenizer.token_to_id("<|im_end|>")), stream.stopped_by) == ("", "<|im_end|>")


def test_of_several_stop_texts_in_a_token_the_first_ends_the_text():
    tokenizer = TOKENIZERS["byte_level"]()
    (cat,) = tokenizer.encode(" cat").ids
    for stop in (("t", "a"), ("a", "t")):
        stream = TextStream(tokenizer, [], stop)
        assert (stream.push(cat), stream.stopped_by, stream.flush()) == (" c", "a", "")
