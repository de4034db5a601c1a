"""Speculative decoding: guesses the next tokens of sequences, so that one step can give several tokens of each.

A step gives a sequence's last token and its draft, the guessed tokens, to the model as one row, and draws a token after
each of them. The first drawn token always counts; a later one counts only if all drafted tokens before it equal the
drawn ones. Each draw depends on the seed and the position alone, so a request gets the same tokens with and without
drafts. `Engine._read` then shortens the sequence to the tokens that count.

Drafts have two costs: the plan needs the tokens of the step before it, so the device waits for the host; and the step
computes more tokens. The speculator therefore guesses for every sequence, compares each guess with the tokens that
come, even if no step verified it, and averages how many were right. Where guesses are wrong, no step has drafts, and
the engine reads one step late as it does without speculation.
"""

import collections.abc
import dataclasses
from typing import NamedTuple, Protocol

from paged_jax.engine.config import EngineConfig
from paged_jax.engine.sequence import Sequence

_WEIGHT = 0.3  # of the last guess in the average
_LEAST_GAIN = 0.5  # expected gain in tokens per row from which on the device waits for the host
_PAUSE = 4  # steps
# Time of a verifying step / time of a decode step: Llama-3-8B on an H200 has 1.15 (5 tokens) to 1.26 (80 tokens).
_VERIFYING = 1.25

type Key = tuple[int, int]


class DraftRow(NamedTuple):
    """A sample whose next tokens are to be guessed.

    Attributes:
      key: the sample's request id and its index.
      tokens: its prompt and all tokens after it that are known. The list is the engine's own: do not change it.
      most: how many tokens to guess at most.

    Example:
      >>> from paged_jax.engine import DraftRow
      >>> DraftRow(key=(0, 0), tokens=[5, 6, 5], most=2).most
      2
    """

    key: Key
    tokens: list[int]
    most: int


class Proposer(Protocol):
    """Guesses tokens: by looking them up in a text, with a small model, or with another head of the same model.

    A wrong guess costs time, and never changes a token. In several processes each must guess the same.

    Example:
      One that expects the last token to come again:

      >>> class Again:
      ...     def propose(self, rows):
      ...         return [row.tokens[-1:] * row.most for row in rows]
      ...     def forget(self, key):
      ...         pass
      >>> from paged_jax.engine import DraftRow
      >>> Again().propose([DraftRow((0, 0), [1, 2], 3)])
      [[2, 2, 2]]
    """

    def propose(self, rows: list[DraftRow], /) -> list[list[int]]:
        """Gives for each row up to `most` tokens that may come next; an empty list for no guess."""
        ...

    def forget(self, key: Key, /) -> None:
        """Forgets a sample that has ended, or that begins again with other tokens."""
        ...


class PromptLookup:
    """Finds the previous occurrence of a text's last tokens, and guesses that the same tokens follow again.

    That is right where texts repeat their prompt or themselves: in edits, summaries, answers with quotations, code.

    Args:
      longest, shortest: how many last tokens are looked for: first the longest, and if they are not found, fewer.

    Example:
      >>> from paged_jax.engine import DraftRow, PromptLookup
      >>> PromptLookup().propose([DraftRow((0, 0), [7, 8, 9, 4, 5, 7, 8], 3)])
      [[9, 4, 5]]
    """

    def __init__(self, longest: int = 3, shortest: int = 2):
        if not 1 <= shortest <= longest:
            raise ValueError(f"longest and shortest must be 1 or more, longest first, got {longest}, {shortest}")
        self._sizes = range(longest, shortest - 1, -1)
        self._indices: dict[Key, _Index] = {}

    def propose(self, rows: list[DraftRow], /) -> list[list[int]]:
        """Gives for each row the tokens that followed the previous occurrence of its last tokens."""
        return [self._indices.setdefault(key, _Index(self._sizes)).find(tokens, most) for key, tokens, most in rows]

    def forget(self, key: Key, /) -> None:
        """Drops the index of a sample's text."""
        self._indices.pop(key, None)


class _Index:
    """Finds the previous occurrence of the last tokens of a growing text."""

    def __init__(self, sizes: range):
        self._ends: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self._num_read = 0  # how many tokens, counted from the first, have been the end of an n-gram

    def find(self, tokens: list[int], most: int) -> list[int]:
        """Returns `most` tokens from the previous occurrence on, repeated where the text ends; or an empty list."""
        # The n-gram at the end of the text has no token after it yet, and is not entered.
        for size, ends in self._ends.items():
            for end in range(max(self._num_read, size - 1) + 1, len(tokens)):
                ends[tuple(tokens[end - size : end])] = end
        self._num_read = max(len(tokens) - 1, 0)
        for size, ends in self._ends.items():
            end = ends.get(tuple(tokens[-size:]))
            if end is not None:
                known = tokens[end : end + most]
                while len(known) < most:
                    known += known[: most - len(known)]
                return known
        return []


@dataclasses.dataclass
class _Guess:
    """A sequence's present guess, and how good its guesses were.

    Attributes:
      tokens: those guessed tokens that have not come yet.
      num_right: right guesses in a row, since the last wrong one.
      expected: how many tokens of a guess are right, on average.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    num_right: int = 0
    expected: float = 0.0

    def close(self) -> None:
        """Takes the number of right tokens into the average."""
        self.expected += _WEIGHT * (self.num_right - self.expected)
        self.num_right = 0


class Speculator:
    """Decides which sequences get a draft in which step.

    Args:
      config: the engine's config.
      proposer: guesses the tokens.
    """

    def __init__(self, config: EngineConfig, proposer: Proposer):
        self._config, self._proposer = config, proposer
        self._guesses: dict[Sequence, _Guess] = {}
        self._num_paused = 0

    def is_promising(self, running: list[Sequence]) -> bool:
        """Whether drafts will probably gain more than the device loses while it waits for the host."""
        if self._num_paused:
            self._num_paused -= 1
            return False
        return self._gains_enough(running)

    def _gains_enough(self, sequences: list[Sequence]) -> bool:
        expected = sum(self._guesses[s].expected for s in sequences if s in self._guesses)
        return expected >= max(_LEAST_GAIN * len(sequences), _LEAST_GAIN)

    def pause(self) -> None:
        """Lets the next steps do without drafts, because there was no room for promising ones."""
        self._num_paused = _PAUSE

    def guess(self, running: list[Sequence]) -> None:
        """Guesses for sequences without a pending guess, only to learn whether guesses are right."""
        decoding = [s for s in running if s.has_drawn and not s.is_exhausted and not s.params.is_adjusted]
        self._propose([s for s in decoding if not self._guesses.setdefault(s, _Guess()).tokens])

    def draft(self, sequences: list[Sequence]) -> dict[Sequence, list[int]]:
        """Gives drafts for a step in which each of these sequences has one token. All their tokens are known.

        Args:
          sequences: the rows of the step.

        Returns:
          The drafts of some of the sequences; none if a step without drafts gives more tokens in its time.
        """
        if not self._gains_enough(sequences):
            return {}
        self._propose(sequences)
        hopeful = [s for s in sequences if self._guesses[s].tokens and self._guesses[s].expected > 0]
        hopeful.sort(key=lambda s: (-self._guesses[s].expected, s.arrival))
        num_rows, best = len(sequences), {}
        most = num_rows / self._seconds(next(size for size in self._config.decode_rows if size >= num_rows))
        for size in self._config.verify_tokens:
            drafts, room, gain = {}, size - num_rows, 0.0
            for sequence in hopeful:
                if room <= 0:
                    break
                guess = self._guesses[sequence]
                drafts[sequence] = guess.tokens[:room]
                room -= len(drafts[sequence])
                gain += min(guess.expected, len(drafts[sequence]))
            value = (num_rows + gain) / (_VERIFYING * self._seconds(size))
            if drafts and value > most:
                best, most = drafts, value
        if hopeful and not best:
            self.pause()
        return best

    def see(self, sequence: Sequence, token_id: int) -> None:
        """Compares a drawn token with what was guessed."""
        guess = self._guesses.get(sequence)
        if guess is None or not guess.tokens:
            return
        if guess.tokens[0] != token_id:
            guess.tokens = []
            guess.close()
            return
        guess.tokens = guess.tokens[1:]
        guess.num_right += 1
        if guess.num_right >= self._config.max_draft_tokens:
            guess.close()

    def forget(self, sequences: collections.abc.Iterable[Sequence]) -> None:
        """Forgets sequences that have ended or begin again."""
        for sequence in sequences:
            if self._guesses.pop(sequence, None) is not None:
                self._proposer.forget(sequence.arrival)

    def forget_finished(self) -> None:
        """Forgets all sequences that have ended."""
        self.forget([sequence for sequence in self._guesses if sequence.finish_reason is not None])

    def forget_all(self) -> None:
        """Forgets all sequences."""
        self.forget(list(self._guesses))

    def _propose(self, sequences: list[Sequence]) -> None:
        rows = []
        for sequence in sequences:
            # A step may draw no more tokens than the sequence can have; it draws one more than the draft has.
            most = min(self._config.max_draft_tokens, sequence.max_total - len(sequence.tokens) - 1)
            rows.append(DraftRow(sequence.arrival, sequence.tokens, max(most, 0)))
        for sequence, row, tokens in zip(sequences, rows, self._proposer.propose(rows), strict=True):
            guess = self._guesses.setdefault(sequence, _Guess())
            guess.tokens = list(tokens[: row.most])
            if not guess.tokens:
                guess.close()

    def _seconds(self, num_tokens: int) -> float:
        """The time of a step of this many tokens, in units of the time that reading the weights takes."""
        return max(num_tokens / self._config.free_tokens_per_step, 1.0)
