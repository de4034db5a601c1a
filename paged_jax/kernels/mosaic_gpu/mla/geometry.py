"""Shapes and counts of the MLA kernel. They follow from a `Problem` and its `Tuning`; host and device use them."""

from dataclasses import dataclass

import jax.experimental.pallas as pl

from paged_jax.kernels.mosaic_gpu.hopper.limits import QUERY_ROWS, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.memory import Slice
from paged_jax.kernels.mosaic_gpu.mla.tuning import Tuning
from paged_jax.kernels.problem import Problem

_MOST_COLUMNS = 256  # the most columns of one product

TILE = 64
"""Tokens of a tile."""
STAGES = 2
"""Tiles in the ring."""


@dataclass(frozen=True)
class Geometry:
    """Shapes and counts that follow from a problem and its tuning.

    Attributes:
      problem, tuning: the facts and the choices.
      one_query: whether each sequence i has exactly one query, row i.
    """

    problem: Problem
    tuning: Tuning
    one_query: bool

    @property
    def latent_size(self) -> int:
        """Elements of a latent."""
        assert self.problem.latent_size is not None
        return self.problem.latent_size

    @property
    def value_parts(self) -> tuple[tuple[Slice, ...], tuple[Slice, ...]]:
        """The parts of a value that each of the two computing warpgroups sums up. A product has at most 256 columns."""
        size, left = self.problem.head_size, self.tuning.left
        right = [Slice(first, min(_MOST_COLUMNS, size - first)) for first in range(left, size, _MOST_COLUMNS)]
        return (Slice(0, left),), tuple(right)

    @property
    def tile_parts(self) -> tuple[Slice, ...]:
        """The parts of a tile that are copied and released alone, in this order.

        S alone reads the elements behind the value, so they are released first. Then come the right parts of the value,
        and then the left part.
        """
        left, right = self.value_parts
        rest = self.latent_size - self.problem.head_size
        behind = [Slice(self.problem.head_size, rest)] if rest else []
        return (*behind, *right, *left)

    @property
    def parts_behind(self) -> int:
        """The number of parts of a tile that are not in the value."""
        return 1 if self.latent_size > self.problem.head_size else 0

    @property
    def heads(self) -> int:
        """Rows of a query token: its heads and padding, because copies of rows start at a multiple of 8."""
        return pl.cdiv(self.problem.num_heads, QUERY_ROWS) * QUERY_ROWS

    @property
    def rows(self) -> int:
        """Rows of all query tokens."""
        return self.problem.num_tokens * self.heads

    @property
    def block_rows(self) -> int:
        """The most rows of a sequence in one row block."""
        return min(WGMMA_ROWS, self.heads * self.problem.max_query_len, self.rows)

    @property
    def run_tokens(self) -> int:
        """Tokens of a run: neighbours in one block, which one copy brings."""
        return min(self.problem.block_size, TILE)

    @property
    def runs_per_tile(self) -> int:
        """Runs that fill a tile."""
        return TILE // self.run_tokens

    @property
    def items_per_seq(self) -> int:
        """The most items of a sequence."""
        rows = min(self.problem.max_query_len * self.heads, self.rows)
        return pl.cdiv(rows, WGMMA_ROWS * self.tuning.width)

    @property
    def closes_items(self) -> bool:
        """Whether the merge looks at each item, because there are no more items than queues.

        Otherwise it looks at each queue, whose first split may close an item (`plan.py`).
        """
        return self.problem.num_seqs * self.items_per_seq <= self.tuning.queues

    @property
    def closings(self) -> int:
        """Items, or queues, that the merge looks at."""
        return self.problem.num_seqs * self.items_per_seq if self.closes_items else self.tuning.queues

    @property
    def num_partials(self) -> int:
        """Partial results for each row block of all queues: two a queue, because its two ends may cut items."""
        return 2 * self.tuning.queues
