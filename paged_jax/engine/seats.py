"""The numbers of all sequences that have a seat, in NumPy arrays by seat.

A step usually gives each running sequence one token. With the numbers in arrays, the scheduler plans such a step with a
few operations on all rows, and looks at single sequences only where something else happens: one of them joins, leaves,
fills a block or computes a prompt.
"""

import bisect
import enum

import numpy as np

from paged_jax.engine.sequence import Sequence

# How tokens are drawn, in the order of the fields of `Draws` (batch.py), in the bits in which they travel.
PARAMS = "temperature", "top_k", "top_p", "seed_high", "seed_low", "index"


class Need(enum.IntEnum):
    """The bits for what a sequence needs of a step that draws a token for it, beside the most likely token."""

    RANDOM = 1
    LOGPROBS = 2
    ADJUSTED = 4
    MASK = 8
    TOP = 16

    @staticmethod
    def of(sequence: Sequence) -> int:
        """The needs of a sequence."""
        params = sequence.params
        is_drawn, is_cut = params.temperature > 0, params.top_k > 0 or params.top_p < 1
        has_logprobs, has_mask = params.logprobs is not None, sequence.mask is not None
        wanted = is_drawn, has_logprobs, params.is_adjusted, has_mask, is_drawn and is_cut
        return sum(need for need, is_wanted in zip(Need, wanted, strict=True) if is_wanted)


class Seats:
    """Which sequence has which seat, and which ones run.

    Args:
      num_seats: how many sequences can have a seat at the same time.

    Attributes:
      free: the free seats; the last one is taken next.
      running: the sequences that run, in line. Children that wait for their parent's prompt have a seat and do not run.
      sequences: object [num_seats], the sequence at each seat, or None.
      num_tokens, num_computed, num_prompt, max_total: i64 [num_seats], as in `Sequence`; 0 at free seats.
      num_cached: i64 [num_seats], how many of the sequence's first blocks have been entered in the prefix cache.
      is_drawn: bool [num_seats], whether the device keeps the sequence's last token as the seat's last token.
      wants_scores, is_plain: bool [num_seats], as in `Sequence` when it got the seat.
      needs: i64 [num_seats], each sequence's `Need`.
      params: i32 [len(PARAMS), num_seats].
    """

    def __init__(self, num_seats: int):
        self.free = list(range(num_seats))[::-1]
        self.running: list[Sequence] = []
        self.sequences = np.full(num_seats, None, object)
        numbers = np.zeros((6, num_seats), np.int64)
        self.num_tokens, self.num_computed, self.num_prompt, self.max_total, self.num_cached, self.needs = numbers
        self.is_drawn, self.wants_scores, self.is_plain = np.zeros((3, num_seats), np.bool_)
        self.params = np.zeros((len(PARAMS), num_seats), np.int32)
        self._order: np.ndarray | None = None

    @property
    def order(self) -> np.ndarray:
        """The seats of the running sequences, i64 [num_running], in line."""
        if self._order is None:
            self._order = np.array([sequence.seat for sequence in self.running], np.int64)
        return self._order

    @property
    def num_to_compute(self) -> np.ndarray:
        """How many tokens of each sequence are not in the cache yet, i64 [num_seats]."""
        return self.num_tokens - self.num_computed

    @property
    def is_scored(self) -> np.ndarray:
        """Whether steps must compute the log-probabilities of a sequence's prompt, bool [num_seats]."""
        return self.wants_scores & (self.num_tokens == self.num_prompt)

    def give(self, sequence: Sequence) -> int:
        """Gives a sequence the next free seat, and returns it."""
        seat, num_tokens, num_computed = self.free.pop(), sequence.num_tokens, sequence.num_computed
        sequence.seat, sequence.seats = seat, self
        self.sequences[seat] = sequence
        self.num_tokens[seat], self.num_computed[seat] = num_tokens, num_computed
        self.num_prompt[seat], self.max_total[seat] = sequence.num_prompt, sequence.max_total
        self.is_drawn[seat], self.is_plain[seat] = False, sequence.is_plain
        self.wants_scores[seat], self.needs[seat] = sequence.wants_scores, Need.of(sequence)
        floats = np.array([sequence.params.temperature, sequence.params.top_p], np.float32).view(np.int32)
        seed = np.array([sequence.seed >> 32, sequence.seed & 2**32 - 1], np.uint32).view(np.int32)
        self.params[:, seat] = floats[0], sequence.params.top_k, floats[1], *seed, sequence.index
        return seat

    def take_back(self, sequence: Sequence) -> None:
        """Makes a sequence's seat free; the sequence does not run."""
        seat, num_tokens, num_computed = sequence.seat, sequence.num_tokens, sequence.num_computed
        assert seat is not None, "the sequence has no seat"
        sequence.seat = sequence.seats = None
        sequence.num_tokens, sequence.num_computed = num_tokens, num_computed
        self.sequences[seat] = None
        for array in (self.num_tokens, self.num_computed, self.num_prompt, self.max_total, self.num_cached):
            array[seat] = 0
        self.wants_scores[seat] = False
        self.free.append(seat)

    def run(self, sequence: Sequence) -> None:
        """Makes a sequence that has a seat run."""
        bisect.insort(self.running, sequence, key=lambda other: other.place)
        self._order = None

    def stop(self, sequence: Sequence) -> None:
        """Takes a sequence out of those that run."""
        self.running.remove(sequence)
        self._order = None
