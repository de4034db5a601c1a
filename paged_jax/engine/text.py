"""Turns a sample's tokens into text as they are drawn, and finds the stop texts that end the sample."""

import collections.abc
import functools
from typing import Any

from paged_jax.engine.request import Tokenizer

_CONTEXT = 5  # tokens of the prompt that are decoded along with the first output tokens
_CHARACTER = 4  # the most bytes, and so the most tokens, of a character
_MOST_PENDING = 64  # most tokens that wait for the rest of a character; more of them are bytes that are no text
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what tokenizers give for the bytes of an unfinished character


class TextStream:
    """Gives out the text of one sample piece by piece, never half a character and never a part of a stop text.

    The text of a token may depend on its neighbours. So the stream decodes the last few tokens without and with the new
    one: what the second text has beyond the first is new. All pieces together are the text that decoding all tokens at
    once gives, except where tokens are bytes that are no text. Some tokenizers then show neighbouring characters as
    broken, too, which the stream has given out already.

    Args:
      tokenizer: decodes token ids.
      prompt: token ids of the prompt. If it ends inside a character, the stream begins with this character.
      stop: texts that end the sample. Special tokens, which are not shown, are found too.
      skip_special_tokens: whether special tokens are left out of the text.
      include_stop: whether the stop text belongs to the text.
      min_tokens: in the text of this many first tokens no stop text is looked for.

    Example:
      Token ids are letters here, and "!" ends the sample.

      >>> from paged_jax.engine import TextStream
      >>> class Letters:
      ...     def decode(self, ids, skip_special_tokens=True):
      ...         return "".join(map(chr, ids))
      >>> stream = TextStream(Letters(), prompt=[72], stop=["!"])
      >>> [stream.push(ord(letter)) for letter in "i!"], stream.flush()
      (['i', ''], '')
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: collections.abc.Sequence[int],
        stop: collections.abc.Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ):
        self._decode = _decoder(tokenizer, skip_special_tokens)
        self._stop, self._include_stop = tuple(stop), include_stop
        self._hidden_stops = _hidden_tokens(tokenizer, self._decode, self._stop)
        self._num_until_stops = min_tokens
        self._ids, self._num_read, self._reads = _context(self._decode, list(prompt))
        self._held = ""  # text that may begin a stop text
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """Adds a token.

        Returns:
          The new text that can be given out; `stopped_by` is set once a stop text is complete.
        """
        self._num_until_stops -= 1
        if token_id in self._hidden_stops and self._num_until_stops < 0:
            stop = self._hidden_stops[token_id]
            text = self.flush()  # which may complete another stop text
            if self.stopped_by is None:
                self.stopped_by = stop
                text += stop if self._include_stop else ""
            return text
        self._ids.append(token_id)
        new = self._unread()
        num_pending = len(self._ids) - self._num_read
        if not new:  # a special token, for example
            if num_pending > _MOST_PENDING:
                del self._ids[self._num_read]
            return ""
        if new.endswith(_BROKEN) and num_pending < _MOST_PENDING:
            return ""  # the token ends inside a character
        self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids)
        self._reads = (self._decode(self._ids),)
        return self._release(new)

    def flush(self) -> str:
        """Returns the text held back so far, as the sample has ended; broken bytes become replacement characters."""
        if self.stopped_by is not None:
            return ""
        text = self._release(self._unread())
        self._num_read, self._reads = len(self._ids), (self._decode(self._ids),)
        held, self._held = self._held, ""
        return text + held

    def _unread(self) -> str:
        """The text of the tokens that was not read yet."""
        whole = self._decode(self._ids)
        for read in self._reads:
            if whole.startswith(read):
                return whole[len(read) :]
        # The new bytes are no text, and the tokenizer shows the characters before them as broken together with them.
        return self._decode(self._ids[self._num_read :])

    def _release(self, new: str) -> str:
        text = self._held + new
        if self._num_until_stops >= 0:
            return text
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            at, self.stopped_by = min(found)
            self._held = ""
            return text[: at + len(self.stopped_by) if self._include_stop else at]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _decoder(tokenizer: Tokenizer, skip_special_tokens: bool) -> collections.abc.Callable[[list[int]], str]:
    decode: Any = tokenizer.decode
    return decode if skip_special_tokens else functools.partial(decode, skip_special_tokens=False)


def _hidden_tokens(
    tokenizer: Tokenizer, decode: collections.abc.Callable[[list[int]], str], texts: collections.abc.Iterable[str]
) -> dict[int, str]:
    """Finds, by token id, the texts that are tokens which decoding hides."""
    token_to_id = getattr(tokenizer, "token_to_id", None)
    if token_to_id is None:
        return {}
    ids = {token_to_id(text): text for text in texts}
    return {token_id: text for token_id, text in ids.items() if token_id is not None and not decode([token_id])}


def _context(
    decode: collections.abc.Callable[[list[int]], str], prompt: list[int]
) -> tuple[list[int], int, tuple[str, ...]]:
    """Chooses the last tokens of a prompt, so that their text begins and ends with a whole character.

    Returns:
      The tokens; how many of them were read (the others begin a character that is not whole yet); and the texts that
      may count as read: the text of all tokens, and the text of the tokens read. Once the character is whole, the
      whole text begins with at least one of them; the first one that it begins with counts.
    """
    size = _CONTEXT
    while size < len(prompt) and not decode(prompt[-size:]):  # special tokens; the text before them matters
        size *= 2
    first = max(len(prompt) - size, 0)
    starts = range(first, max(first - _CHARACTER, 0), -1)
    ends = range(len(prompt), max(len(prompt) - _CHARACTER, -1), -1)
    for start, end in [*((start, end) for end in ends for start in starts), *((0, end) for end in ends)]:
        text = decode(prompt[start:end])
        if (text or start == 0) and not text.startswith(_BROKEN) and not text.endswith(_BROKEN):
            return prompt[start:], end - start, (decode(prompt[start:]), text)
    return prompt[first:], len(prompt) - first, (decode(prompt[first:]),)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
