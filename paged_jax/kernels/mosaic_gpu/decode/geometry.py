"""Shapes and counts of decode. They follow from a `Problem` and its `Tuning`; host and device use them."""

from dataclasses import dataclass

import jax.experimental.pallas as pl

from paged_jax.kernels.mosaic_gpu.decode.tuning import Tuning
from paged_jax.kernels.mosaic_gpu.hopper.limits import QUERY_ROWS, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.memory import Slice
from paged_jax.kernels.problem import Problem


@dataclass(frozen=True)
class Geometry:
    """Shapes and counts that follow from a problem and its tuning. It holds no fact and no choice of its own."""

    problem: Problem
    tuning: Tuning

    @property
    def kernel_name(self) -> str:
        """The name that profiles show, such as "decode_hd128_g4"."""
        op = "decode_write" if self.problem.writes_tokens else "decode"
        return f"{op}_hd{self.problem.head_size}_g{self.problem.group}"

    # Work items.

    @property
    def items_per_seq(self) -> int:
        """Work items of a sequence; each has `fold` neighbouring kv heads."""
        return self.problem.num_kv_heads // self.tuning.fold

    @property
    def num_items(self) -> int:
        """Work items of the batch."""
        return self.problem.num_seqs * self.items_per_seq

    @property
    def heads_per_item(self) -> int:
        """Query heads of a work item."""
        return self.problem.group * self.tuning.fold

    @property
    def stores_whole_items(self) -> bool:
        """Whether a program may have a whole item, and store its results itself."""
        return not self.tuning.merges or self.tuning.queues > 0

    @property
    def num_programs(self) -> int:
        """Programs of the kernel: one for each split or one for each queue, whichever is more."""
        return max(self.num_items * self.tuning.splits, self.tuning.queues)

    @property
    def num_partials(self) -> int:
        """Partial results in memory. A program has one, or two if it has a queue, because both ends may cut items."""
        return self.num_programs * (2 if self.tuning.queues else 1)

    @property
    def splits_have_one_tile(self) -> bool:
        """Whether no split has more than one tile."""
        if self.tuning.queues or self.problem.partition_size:
            return False
        return self.problem.max_seq_len <= self.tuning.splits * self.tile_tokens

    @property
    def most_visible_tokens(self) -> int:
        """An upper bound of the tokens that a query sees."""
        window = self.problem.sliding_window
        return self.problem.max_seq_len if window is None else min(self.problem.max_seq_len, window)

    # The query tile, the right operand of both products.

    @property
    def columns(self) -> int:
        """Rows of a query tile, which are columns of S^T: an item's heads, and zeros."""
        return pl.cdiv(self.heads_per_item, QUERY_ROWS) * QUERY_ROWS

    @property
    def query_copies(self) -> int:
        """Copies of a query tile.

        A copy of `QUERY_ROWS` rows may have fewer heads, and reads zeros for the others. A larger copy may not: Mosaic
        tiles its heads by `QUERY_ROWS`. So if more heads do not fill the tile, several copies share them.
        """
        return self.columns // QUERY_ROWS if self.heads_per_item % QUERY_ROWS else 1

    @property
    def heads_per_copy(self) -> int:
        """Query heads of a copy of the query; its last copy may have fewer."""
        return pl.cdiv(self.heads_per_item, self.query_copies)

    def column(self, head: int) -> int:
        """The column of a query head of a work item."""
        copy, row = divmod(head, self.heads_per_copy)
        return copy * QUERY_ROWS + row

    # Tiles of K and V, the left operands.

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile. Each has a row for each kv head of the item."""
        return self.tuning.tile // self.tuning.fold

    @property
    def run_tokens(self) -> int:
        """Tokens of a run: neighbours in one block. The runs of folded kv heads fit into `WGMMA_ROWS` rows."""
        most = self.tile_tokens if self.tuning.fold == 1 else WGMMA_ROWS // self.tuning.fold
        return min(self.problem.block_size, most)

    @property
    def pairs(self) -> bool:
        """Whether one copy brings K and V of all heads of a run, from one pool of 8 bits."""
        return self.problem.has_pairs and self.problem.cache_itemsize == 1

    @property
    def pair_size(self) -> int:
        """Elements of a token's K and V of all folded heads, if `pairs`."""
        return 2 * self.tuning.fold * self.problem.head_size

    @property
    def rows_of_head(self) -> int:
        """Rows of a tile that belong to one of the folded kv heads, before rows of the next head."""
        return QUERY_ROWS if self.pairs else self.run_tokens

    @property
    def copies_per_run(self) -> int:
        """Copies of a run: one for all folded kv heads if they are neighbours in memory, otherwise one each."""
        neighbours = self.problem.layout in ("hnd", "vllm") and self.run_tokens == self.problem.block_size
        return 1 if neighbours or self.pairs else self.tuning.fold

    @property
    def runs_per_tile(self) -> int:
        """The number of runs in a tile."""
        return self.tile_tokens // self.run_tokens

    @property
    def sums_once_a_split(self) -> bool:
        """Whether sums across warps are computed once for each split, instead of once for each tile.

        That saves three barriers for each tile and takes four registers. With tiles of 128 tokens, the registers would
        leave no room for a third program on a multiprocessor (benchmarks/LOG.md, "Sums of exponentials").
        """
        return self.columns * self.tuning.tile <= 512

    # O^T, the result of the second product.

    @property
    def head_slices(self) -> tuple[Slice, ...]:
        """The slices of a head in V, O^T and out.

        There is one slice if head_size is a multiple of `WGMMA_ROWS`. Otherwise there are two: the second one is the
        head's last 64 elements, and overlaps with the first.
        """
        size = self.problem.head_size
        if size % WGMMA_ROWS == 0:
            return (Slice(0, size),)
        return Slice(0, size // WGMMA_ROWS * WGMMA_ROWS), Slice(size - WGMMA_ROWS, WGMMA_ROWS)

    @property
    def padded_head_size(self) -> int:
        """Rows of O^T: the elements of all head slices."""
        return pl.cdiv(self.problem.head_size, WGMMA_ROWS) * WGMMA_ROWS

    @property
    def copied_heads(self) -> tuple[Slice, ...]:
        """The query heads whose results one copy stores; they have neighbouring columns.

        If there are two head slices, they are copied row by row. For copies of several rows, Mosaic would tile shared
        memory, and refuse a head_size that is no multiple of 64.
        """
        most, heads = self.heads_per_copy if len(self.head_slices) == 1 else 1, self.heads_per_item
        return tuple(Slice(i, min(most, heads - i)) for i in range(0, heads, most))

    @property
    def num_merged_slices(self) -> int:
        """The number of slices of 64 elements, which are merged one at a time. The last two may overlap."""
        return pl.cdiv(self.problem.head_size, WGMMA_ROWS)

    @property
    def merging_programs(self) -> int:
        """Programs that merge one item. They share its merged slices; if these overlap, one program has all."""
        most = self.num_merged_slices if len(self.head_slices) == 1 else 1
        return min(most, self.tuning.splits) if self.tuning.merges_in_cluster else most
