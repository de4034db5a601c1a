"""The plan of a step: the scheduler makes it, and the runner carries it out."""

import collections.abc
import dataclasses
from typing import NamedTuple

from paged_jax.engine.blocks import Pairs
from paged_jax.engine.pools import Entry
from paged_jax.engine.sequence import Sequence


class Chunk(NamedTuple):
    """The tokens `start` to `start + num_tokens` of a sequence, which a step computes as one row of its batch.

    If the row has a draft, its tokens are the last ones: guesses, which may be wrong.
    """

    sequence: Sequence
    seat: int
    start: int
    num_tokens: int
    draft: collections.abc.Sequence[int] = ()


class Sample(NamedTuple):
    """A token that a step draws for `sequence`, at `position`, from the logits of the row's token before it.

    If the token before it belongs to a draft, it is `follows`; the drawn token then counts only if the draft is right
    up to `follows`.
    """

    sequence: Sequence
    seat: int
    row: int
    position: int
    follows: int | None = None


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
      chunks: the rows of the batch, those of more than one token first.
      samples: the tokens to draw; those of one row come one after the other, in their order.
      scores: the tokens of prompts whose log-probabilities are wanted. There are no more samples and scores than seats,
        or than tokens if there are drafts.
      entries: parts of block tables that have changed. They hold all changes except `row_blocks`; entries of released
        blocks stay as they were, since no op reads them.
      row_blocks: for each group, the block of each row's last token.
      adopted: for each group, the blocks of the prefix cache with which sequences begin in this step.
      seated: the sequences that have got a seat in this step. The host knows all tokens that they had before it.
      prefixes: (rows, tokens) of each prefix that the first rows share, if a decode step reads such prefixes once.
      is_decode: whether every row has one token, and none reads a slot that another one writes. All other steps run a
        program that writes all new tokens before it attends.
    """

    swap_out: list[Pairs]
    swap_in: list[Pairs]
    copies: list[Pairs]
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    scores: list[Score] = dataclasses.field(default_factory=list)
    entries: list[Entry] = dataclasses.field(default_factory=list)
    row_blocks: list[list[int]] = dataclasses.field(default_factory=list)
    adopted: list[set[int]] = dataclasses.field(default_factory=list)
    seated: list[Sequence] = dataclasses.field(default_factory=list)
    prefixes: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    is_decode: bool = False

    @staticmethod
    def empty(num_groups: int) -> "Plan":
        """A plan of no work for this many groups of layers."""
        swap_out, swap_in, copies = ([[] for _ in range(num_groups)] for _ in range(3))
        return Plan(swap_out, swap_in, copies, adopted=[set() for _ in range(num_groups)])

    @property
    def is_masked(self) -> bool:
        """Whether a sample has a mask: then the host must read the tokens before it, which the mask needs."""
        return any(sample.sequence.mask is not None for sample in self.samples)

    @property
    def has_drafts(self) -> bool:
        """Whether the step verifies drafts: then the host must read its tokens before it plans the next step."""
        return any(chunk.draft for chunk in self.chunks)

    def accepted(self, token_ids: list[int]) -> list[tuple[int, Sample]]:
        """Given the drawn tokens, returns the samples that count, with their indices among all samples."""
        counting, is_right = [], True
        for i, sample in enumerate(self.samples):
            is_right = sample.follows is None or (is_right and token_ids[i - 1] == sample.follows)
            if is_right:
                counting.append((i, sample))
        return counting
