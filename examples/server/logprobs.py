"""The log-probabilities of /v1/completions: lists with an entry for each token, and where each token's text begins."""

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

from examples.server.tokens import TokenTexts

_NEARBY = 4  # characters


class Scored(NamedTuple):
    """A token, its log-probability and the most likely tokens at its place; no others are known for a first token."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class TextOffsets:
    """Says where in a text the texts of its tokens begin, one token after the other.

    Tokens that are parts of one character begin where the character does.

    Args:
        tokens: the texts of tokens.
        start: where the first token begins.
        hides_special_tokens: whether special tokens are no part of the text.
    """

    def __init__(self, tokens: TokenTexts, start: int, hides_special_tokens: bool):
        self._tokens, self._next, self._hides = tokens, start, hides_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, token_id: int) -> int:
        """Returns the offset of the next token, in characters."""
        offset = self._next
        if not (self._hides and self._tokens.is_hidden(token_id)):
            self._next += len(self._decoder.decode(self._tokens.bytes(token_id)))
        return offset


def prompt_offsets(tokens: TokenTexts, text: str, token_ids: Sequence[int]) -> list[int]:
    """Says where in a prompt's text the texts of its tokens begin, in characters.

    The tokenizer may have added special tokens and changed characters, so that a token's text is looked for nearby.

    Args:
        tokens: the texts of tokens.
        text: the prompt as it was sent.
        token_ids: its tokens.
    """
    offsets, after, nearby = [], 0, _NEARBY
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token_id in token_ids:
        piece = decoder.decode(tokens.bytes(token_id))
        if not text.startswith(piece, after) and piece.startswith(" ") and text.startswith(piece[1:], after):
            piece = piece[1:]  # the space is one that the tokenizer puts before a text
        found = text.find(piece, after, after + len(piece) + nearby)
        offsets.append(after if found < 0 else found)
        after = after if found < 0 else found + len(piece)
        nearby = nearby + _NEARBY if found < 0 else _NEARBY if piece else nearby
    return offsets


def completion_logprobs(scored: Sequence[Scored], tokens: TokenTexts, offsets: Sequence[int]) -> dict[str, Any]:
    """Makes the object `logprobs` of a choice."""
    return {
        "tokens": [tokens.name(item.token_id) for item in scored],
        "token_logprobs": [item.logprob for item in scored],
        "top_logprobs": [_candidates(item, tokens) for item in scored],
        "text_offset": list(offsets),
    }


def _candidates(item: Scored, tokens: TokenTexts) -> dict[str, float] | None:
    """The log-probabilities of the most likely tokens and of the token itself, by their names."""
    if item.logprob is None:
        return None
    found: dict[str, float] = {}
    pairs = item.top if item.token_id in dict(item.top) else (*item.top, (item.token_id, item.logprob))
    for token_id, logprob in pairs:
        name = tokens.name(token_id)
        # Two tokens may have one text. The less likely one is named by its number, so that none is lost.
        found[f"token_id:{token_id}" if name in found else name] = logprob
    return found
