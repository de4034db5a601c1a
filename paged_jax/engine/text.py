"""Turns a sample's tokens into text as they are drawn, and finds the stop texts that end the sample."""

import collections.abc

from paged_jax.engine.request import Tokenizer

_CONTEXT = 5  # tokens of the prompt that are decoded along with the first output tokens
_MOST_PENDING = 64  # tokens that may wait for the rest of a character; more than that are bytes that are no text
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what tokenizers give for the bytes of an unfinished character


class TextStream:
    """Gives out the text of one sample piece by piece, never half a character and never a part of a stop text.

    The text of a token may depend on its neighbours. So the stream decodes the last few tokens without and with the new
    one: what the second text has beyond the first is new.

    Args:
      tokenizer: decodes token ids.
      prompt: token ids of the prompt.
      stop: texts that end the sample.

    Example:
      >>> stream = TextStream(tokenizer, prompt)
      >>> text = "".join(stream.push(token_id) for token_id in token_ids) + stream.flush()
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: collections.abc.Sequence[int], stop: collections.abc.Sequence[str] = ()
    ):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids = list(prompt[-_CONTEXT:])
        self._num_read = len(self._ids)
        self._read = tokenizer.decode(self._ids)
        self._held = ""  # text that may begin a stop text
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """Adds a token.

        Returns:
          The new text that can be given out; `stopped_by` is set once a stop text is complete.
        """
        self._ids.append(token_id)
        whole = self._tokenizer.decode(self._ids)
        new = whole[len(self._read) :]
        num_pending = len(self._ids) - self._num_read
        if not new:  # a special token, for example
            if num_pending > _MOST_PENDING:
                del self._ids[self._num_read]
            return ""
        if new.endswith(_BROKEN) and num_pending < _MOST_PENDING:
            return ""  # the token ends inside a character
        self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids)
        self._read = self._tokenizer.decode(self._ids)
        return self._release(new)

    def flush(self) -> str:
        """Returns the text held back so far, as the sample has ended; broken bytes become replacement characters."""
        if self.stopped_by is not None:
            return ""
        whole = self._tokenizer.decode(self._ids)
        text = self._release(whole[len(self._read) :])
        self._read = whole
        held, self._held = self._held, ""
        return text + held

    def _release(self, new: str) -> str:
        text = self._held + new
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            at, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
