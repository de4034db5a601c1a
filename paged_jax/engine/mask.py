"""Masks: before each draw a sample's mask says which tokens are allowed. A grammar is a mask.

The host reads a step's tokens while the device already runs the next step's model. It then passes each newest token to
its sample's mask, which fills in the tokens that may follow, and starts the program that draws them. So the step waits
for masks only if they take longer than the model.
"""

import abc
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from paged_jax.engine.adjust import num_words
from paged_jax.engine.sequence import Sequence


class MaskState(Protocol):
    """The state of a mask for one sample. Only one thread at a time calls it.

    An error that it raises ends its sample, with the finish reason "error"; all other samples go on.

    Example:
      Every token must be larger than the one before it, and below 8.

      >>> import numpy as np
      >>> class Rising:
      ...     first = 0
      ...     def fill(self, allowed):
      ...         for token_id in range(self.first, 8):
      ...             allowed[token_id // 32] |= np.uint32(1 << token_id % 32)
      ...     def advance(self, token_id):
      ...         self.first = token_id + 1
      >>> state, allowed = Rising(), np.zeros(1, np.uint32)
      >>> state.advance(5)
      >>> state.fill(allowed)
      >>> bin(allowed[0])
      '0b11000000'
    """

    def fill(self, allowed: np.ndarray, /) -> None:
        """Sets the bits of the tokens that may come next.

        Where none is set, the sample has ended, with the finish reason "stop". To end a sample by one of its stop
        tokens, allow that token.

        Args:
          allowed: u32 [ceil(vocab_size / 32)], zeros; bit t % 32 of word t // 32 stands for token t.
        """
        ...

    def advance(self, token_id: int, /) -> None:
        """Takes the drawn token, which `fill` allowed. The engine may skip this call after a sample's last token.

        Args:
          token_id: the token.
        """
        ...


class TokenMask(Protocol):
    """The type of `SamplingParams.mask`: it makes a separate state for each sample.

    Example:
      >>> class Even:
      ...     def fill(self, allowed):
      ...         allowed[:] = 0x55555555
      ...     def advance(self, token_id):
      ...         pass
      >>> class EvenTokens:
      ...     def start(self):
      ...         return Even()
      >>> from paged_jax.engine import SamplingParams
      >>> SamplingParams(max_tokens=8, mask=EvenTokens()).max_tokens
      8
    """

    def start(self) -> MaskState:
        """The state of a sample that has no token yet."""
        ...


class SharedMask(abc.ABC):
    """The mask of a request that several processes compute: one of them has the mask, and sends its results."""

    @abc.abstractmethod
    def start(self) -> MaskState:
        """The state of a sample that has no token yet."""

    @abc.abstractmethod
    def exchange(self, allowed: np.ndarray, error: str | None) -> tuple[np.ndarray, str | None]:
        """Sends to the other processes the allowed tokens and the mask's error, or receives both.

        The processes call this in the same order, as they make the same calls in the same order.
        """


class MaskedSample:
    """The mask of one sample; it catches the mask's errors for the engine.

    Args:
      mask: the request's mask.
      vocab_size: how many tokens the model has.

    Attributes:
      error: what the mask raised, in words, or None.
    """

    def __init__(self, mask: TokenMask, vocab_size: int):
        self._mask, self._vocab_size = mask, vocab_size
        self._state: MaskState | None = None
        self._allowed: np.ndarray | None = None
        self.error: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether no token may come, or the mask has raised."""
        return not self.allowed().any()

    def allowed(self) -> np.ndarray:
        """Which tokens may come next, as `MaskState.fill` gives them; none after an error."""
        if self._allowed is None:
            self._allowed = np.zeros(num_words(self._vocab_size), np.uint32)
            self._try(lambda state: state.fill(self._allowed))
            if self.error is not None:
                self._allowed[:] = 0
            elif self._vocab_size % 32:
                self._allowed[-1] &= np.uint32((1 << self._vocab_size % 32) - 1)
            if isinstance(self._mask, SharedMask):
                self._allowed, self.error = self._mask.exchange(self._allowed, self.error)
        return self._allowed

    def advance(self, token_id: int) -> None:
        """Takes the sample's next token."""
        self._allowed = None
        self._try(lambda state: state.advance(token_id))

    def _try(self, call: Any) -> None:
        if self.error is not None:
            return
        try:
            if self._state is None:
                self._state = self._mask.start()
            call(self._state)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"


def gather_masks(sequences: Iterable[Sequence], num_rows: int, vocab_size: int) -> np.ndarray:
    """Says which tokens each row of a step may draw.

    Args:
      sequences: those for which the step draws, once the tokens of the step before are read. A row whose sequence has
        ended may draw anything, which nobody reads.
      num_rows: rows of the program that draws.
      vocab_size: how many tokens the model has.

    Returns:
      u32 [num_rows, ceil(vocab_size / 32)].
    """
    masks = np.full((num_rows, num_words(vocab_size)), 2**32 - 1, np.uint32)
    for row, sequence in enumerate(sequences):
        if sequence.mask is not None and sequence.finish_reason is None and not sequence.mask.has_ended:
            masks[row] = sequence.mask.allowed()
    return masks
