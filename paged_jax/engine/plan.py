"""The plan of a step: the scheduler makes it, and the runner carries it out."""

import collections.abc
import dataclasses
from typing import NamedTuple

import numpy as np

from paged_jax.engine.blocks import Pairs
from paged_jax.engine.pools import Entry
from paged_jax.engine.seats import PARAMS, Need
from paged_jax.engine.sequence import Sequence

type Drafts = collections.abc.Mapping[int, collections.abc.Sequence[int]]


_NONE, _NO_PARAMS = np.zeros(0, np.int64), np.zeros((len(PARAMS), 0), np.int32)


def _none() -> np.ndarray:
    return _NONE


@dataclasses.dataclass
class Rows:
    """The rows of a step's batch; rows of more than one token come first. A row is the last `counts` tokens of `ends`.

    Attributes:
      sequences: whose tokens they are.
      seats: i64 [num_rows], the seats of these sequences.
      ends: i64 [num_rows], how many tokens of the sequence are computed once the step is done.
      counts: i64 [num_rows], how many of them the step computes.
      are_drawn: bool [num_rows], whether the device keeps the row's last token.
      drafts: by rows, the last tokens of those that end with guesses, which may be wrong.
    """

    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    seats: np.ndarray = dataclasses.field(default_factory=_none)
    ends: np.ndarray = dataclasses.field(default_factory=_none)
    counts: np.ndarray = dataclasses.field(default_factory=_none)
    are_drawn: np.ndarray = dataclasses.field(default_factory=_none)
    drafts: Drafts = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sequences)


@dataclasses.dataclass
class Samples:
    """The tokens that a step draws; tokens of one row come one after the other, in their order.

    Attributes:
      sequences: which sequence gets each token.
      rows: i64 [num_samples], the row whose logits the token is drawn from.
      positions: i64 [num_samples], the token's position; its logits belong to the row's token before it.
      seats: i64 [num_samples], the seat whose last token it becomes on the device.
      params: i32 [len(PARAMS), num_samples], how it is drawn.
      are_plain: bool [num_samples], whether the sequence `is_plain`, and the token is not its last one.
      needs: the bits of `Need` that any of them has.
      follows: by samples, the guess that stands before the token, if one does. Such a token counts only if all guesses
        of its row up to this one are right.
    """

    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    rows: np.ndarray = dataclasses.field(default_factory=_none)
    positions: np.ndarray = dataclasses.field(default_factory=_none)
    seats: np.ndarray = dataclasses.field(default_factory=_none)
    params: np.ndarray = dataclasses.field(default_factory=lambda: _NO_PARAMS)
    are_plain: np.ndarray = dataclasses.field(default_factory=_none)
    needs: int = 0
    follows: dict[int, int] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sequences)


class Chunk(NamedTuple):
    """One row: the tokens `start` to `start + num_tokens` of a sequence; the last ones may be a draft."""

    sequence: Sequence
    seat: int
    start: int
    num_tokens: int
    draft: collections.abc.Sequence[int] = ()


class Score(NamedTuple):
    """A prompt's token, at `position`, whose log-probability comes from the logits of a row's token `offset`."""

    sequence: Sequence
    row: int
    offset: int
    position: int


@dataclasses.dataclass
class Plan:
    """The work of one step, done in the order of the fields.

    Attributes:
      swap_out: for each group of layers, (device block, host block) pairs of preempted sequences.
      swap_in: for each group, (host block, device block) pairs of sequences that are admitted again.
      copies: for each group, (source, destination) pairs of shared blocks that sequences are about to write to.
      rows: the rows of the batch.
      samples: the tokens to draw.
      scores: the tokens of prompts whose log-probabilities are wanted. There are no more samples and scores than seats,
        or than tokens if there are drafts.
      entries: parts of block tables that have changed. They hold all changes except `row_blocks`; entries of released
        blocks stay as they were, since no op reads them.
      row_blocks: for each group, the block of each row's last token, i32 [num_groups, num_rows].
      adopted: for each group, the blocks of the prefix cache with which sequences begin in this step.
      seated: the sequences that have got a seat in this step. The host knows all tokens that they had before it.
      prefixes: (rows, tokens) of each prefix that the first rows share, if a decode step reads such prefixes once.
      is_decode: whether every row has one token, and none reads a slot that another one writes. All other steps run a
        program that writes all new tokens before it attends.
      num_prompt_tokens: how many of the rows' tokens belong to prompts.
    """

    swap_out: list[Pairs]
    swap_in: list[Pairs]
    copies: list[Pairs]
    rows: Rows = dataclasses.field(default_factory=Rows)
    samples: Samples = dataclasses.field(default_factory=Samples)
    scores: list[Score] = dataclasses.field(default_factory=list)
    entries: list[Entry] = dataclasses.field(default_factory=list)
    row_blocks: np.ndarray = dataclasses.field(default_factory=_none)
    adopted: list[set[int]] = dataclasses.field(default_factory=list)
    seated: list[Sequence] = dataclasses.field(default_factory=list)
    prefixes: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    is_decode: bool = False
    num_prompt_tokens: int = 0

    @staticmethod
    def empty(num_groups: int) -> "Plan":
        """A plan of no work for this many groups of layers."""
        swap_out, swap_in, copies = ([[] for _ in range(num_groups)] for _ in range(3))
        return Plan(swap_out, swap_in, copies, adopted=[set() for _ in range(num_groups)])

    @property
    def chunks(self) -> list[Chunk]:
        """The rows one by one."""
        rows = self.rows
        numbers = zip(rows.seats.tolist(), (rows.ends - rows.counts).tolist(), rows.counts.tolist(), strict=True)
        return [
            Chunk(sequence, *some, rows.drafts.get(row, ()))
            for row, (sequence, some) in enumerate(zip(rows.sequences, numbers, strict=True))
        ]

    @property
    def is_masked(self) -> bool:
        """Whether a sample has a mask: then the host must read the tokens before it, which the mask needs."""
        return bool(self.samples.needs & Need.MASK)

    @property
    def has_drafts(self) -> bool:
        """Whether the step verifies drafts: then the host must read its tokens before it plans the next step."""
        return bool(self.rows.drafts)

    def accepted(self, token_ids: list[int]) -> collections.abc.Sequence[int]:
        """Given the drawn tokens, returns which samples count."""
        follows = self.samples.follows
        if not follows:
            return range(len(self.samples))
        counting, is_right = [], True
        for i in range(len(self.samples)):
            is_right = i not in follows or (is_right and token_ids[i - 1] == follows[i])
            if is_right:
                counting.append(i)
        return counting
