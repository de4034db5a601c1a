"""The log-probabilities of /v1/completions: lists with an entry for each token, and where each token's text begins."""

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

from examples.server.tokens import TokenTexts


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


def completion_logprobs(scored: Sequence[Scored], tokens: TokenTexts, offsets: TextOffsets) -> dict[str, Any]:
    """Makes the object `logprobs` of a choice."""
    return {
        "tokens": [tokens.name(item.token_id) for item in scored],
        "token_logprobs": [item.logprob for item in scored],
        "top_logprobs": [_candidates(item, tokens) for item in scored],
        "text_offset": [offsets.take(item.token_id) for item in scored],
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
