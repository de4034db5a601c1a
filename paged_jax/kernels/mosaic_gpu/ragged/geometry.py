"""Shapes and counts of ragged attention. They follow from a `Problem` and its `Tuning`; host and device use them."""

import math
from dataclasses import dataclass

import jax.experimental.pallas as pl

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.ragged.tuning import Tuning
from paged_jax.kernels.problem import Granularity, Problem

_MOST_ORDERED = 4 * WARPGROUP - 2  # in a batch of more, XLA counts, and nothing is sorted
_MOST_WITH_LONG_SOFTMAX = 64  # up to this head_size the softmax takes longer than the products
_LEAST_PRODUCT = 64  # tokens: the tiling of shared memory lets wgmma take multiples of 64
_QUERY_COLUMNS = 32  # four lanes read 16 bytes of a query row each
_MOST_QUERY_IN_REGISTERS = 224  # elements of a row; with 256, ptxas spills 652 bytes, and 304 if no query is read
_ELEMENTS_OF_A_THREAD = 4  # elements of a row that a thread merges


@dataclass(frozen=True)
class Geometry:
    """Shapes and counts that follow from a problem and its tuning. It holds no fact and no choice of its own."""

    problem: Problem
    tuning: Tuning

    @property
    def band_tokens(self) -> int:
        """Query tokens that fit into `WGMMA_ROWS` rows, where each token takes a row for each head of a group."""
        return WGMMA_ROWS // self.problem.group

    @property
    def wide_tokens(self) -> int:
        """The most query tokens of a wide item."""
        return self.tuning.computing_warpgroups * self.band_tokens

    # Tiles of K and V.

    @property
    def converts_tiles(self) -> bool:
        """Whether the kernel converts tiles in shared memory; it does so for caches of 8 bits."""
        return self.problem.cache_itemsize == 1

    @property
    def operand_dtype(self) -> str:
        """The dtype of both operands of the products.

        For caches of 8 bits it is float16, which holds every value of 8 bits and is the only target of Hopper's
        conversion from float8. New tokens, and weights times scales of slots, may exceed float16's range: calls with
        these use the query's dtype.
        """
        fits = self.converts_tiles and not (self.problem.prefix or self.scales_value_slots)
        return "float16" if fits else self.problem.query_dtype

    @property
    def divides_queries(self) -> bool:
        """Whether each query row is divided by a power of two to fit into float16."""
        return self.operand_dtype != self.problem.query_dtype

    @property
    def reads_own_queries(self) -> bool:
        """Whether the computing warpgroups read the queries; otherwise the loading warpgroup copies them.

        If shared memory holds one query only, results on their way to global memory occupy the next query's place. A
        warpgroup reads its rows of the next query into registers before it stores its results. Larger heads leave too
        few registers for that.
        """
        may_read = self.problem.head_size % _QUERY_COLUMNS == 0 and self.problem.head_size <= _MOST_QUERY_IN_REGISTERS
        return self.converts_tiles and self.tuning.queries == 1 and may_read

    @property
    def copies_queries(self) -> bool:
        """Whether the two warpgroups of a thin item have a copy of the query each."""
        return self.divides_queries or self.reads_own_queries

    @property
    def scales_key_slots(self) -> bool:
        """Whether each slot of the key cache has a scale."""
        return self.problem.k_scale is Granularity.SLOT

    @property
    def scales_value_slots(self) -> bool:
        """Whether each slot of the value cache has a scale."""
        return self.problem.v_scale is Granularity.SLOT

    @property
    def scales_slots(self) -> bool:
        """Whether either cache has a scale for each slot."""
        return self.scales_key_slots or self.scales_value_slots

    @property
    def has_whole_tiles(self) -> bool:
        """Whether a tile is ready as soon as its copies have arrived, if all of its tokens have values."""
        return not (self.converts_tiles or self.scales_slots or self.problem.prefix)

    @property
    def converts_by_warps(self) -> bool:
        """Whether each loading warp converts its own runs of a tile, without waiting for the other warps."""
        return self.converts_tiles and not (self.scales_slots or self.problem.prefix)

    @property
    def lanes_hold_blocks(self) -> bool:
        """Whether a loading warp's lanes hold the blocks of its runs, one lane for each run (`ptx/blocks.py`).

        Who converts tiles beside three computing warpgroups has no registers for all of these blocks.
        """
        return self.converts_by_warps and not self.takes_turns

    @property
    def softmax_outlasts_products(self) -> bool:
        """Whether the softmax of a wide tile takes longer than its products, and the tile can be halved.

        On an H200 the softmax takes longer for heads of 64, about as long for 80, and less long for 96
        (benchmarks/LOG.md, "The second product in halves").
        """
        return self.problem.head_size <= _MOST_WITH_LONG_SOFTMAX and self.tuning.tile % (2 * _LEAST_PRODUCT) == 0

    @property
    def takes_turns(self) -> bool:
        """Whether computing warpgroups take turns at the matrix units. Three keep them busy without turns."""
        return self.tuning.computing_warpgroups == 2

    # Block-sparse patterns.

    @property
    def stripes(self) -> tuple[int, ...]:
        """Distances, in sparse blocks, from a stripe of a group's last head to the next stripe of each of the heads."""
        sparse, group = self.problem.block_sparse, self.problem.group
        if sparse is None or sparse.head_sliding_step <= 0:
            return (0,)
        return tuple(sorted({head * sparse.head_sliding_step % sparse.vert_stride for head in range(group)}))

    @property
    def sees_stripes_only(self) -> bool:
        """Whether queries see stripes only. Then a query may be unable to see its own token."""
        return self.problem.block_sparse is not None and self.problem.block_sparse.local_blocks == 0

    # The batch's work, counted for each sequence.

    @property
    def count_columns(self) -> int:
        """Columns of `Counts.table`: sequences, padding and total, rounded up to a multiple of 128 threads."""
        return pl.cdiv(self.problem.num_seqs + 2, WARPGROUP) * WARPGROUP

    @property
    def orders_sequences(self) -> bool:
        """Whether the sequences are sorted, so that those with the costliest items come first."""
        return 1 < self.problem.num_seqs <= _MOST_ORDERED and not self.merges_copies

    # The merge of split items, or of the rows of each query.

    @property
    def merges_copies(self) -> bool:
        """Whether each query has several rows, which a kernel of its own merges.

        Then every item leaves a partial result, also if it is not split.
        """
        return self.problem.copies > 1

    @property
    def splits_of_whole(self) -> int:
        """The number of splits of an item that leaves no partial result; 0 if every item leaves one."""
        return 0 if self.merges_copies else 1

    @property
    def threads_of_row(self) -> int:
        """Threads that merge a row."""
        return self.problem.head_size // _ELEMENTS_OF_A_THREAD

    @property
    def merged_rows(self) -> int:
        """Rows that a warpgroup merges at a time; if each query has several rows, they are heads of one query."""
        rows = WARPGROUP // self.threads_of_row
        return math.gcd(rows, self.problem.num_heads) if self.merges_copies else rows
