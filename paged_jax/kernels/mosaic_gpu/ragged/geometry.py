"""Everything that follows from a `Problem` of ragged attention and its `Tuning`, for host and device code alike."""

import math
from dataclasses import dataclass

import jax.experimental.pallas as pl

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.ragged.tuning import Tuning
from paged_jax.kernels.problem import Problem, ScaleKind

LOADING_WARPS = 4
"""Warps of the warpgroup that loads."""

NO_ITEM, WIDE, THIN = range(3)
"""The values of a work item's `kind`; a wide item has more than `WGMMA_ROWS` rows."""

THIN_SHARES = (1.0, 0.6)
"""What a split of a thin item may be meant to cost, as parts of an even share of all work for each program."""

_COST_TOKENS = 64  # one warpgroup's products with so many tokens of K and V cost 1
_MOST_WITH_LONG_SOFTMAX = 64  # head_size
_LEAST_PRODUCT = 64  # tokens that a product must have a multiple of, as tiles lie in shared memory
_ELEMENTS_OF_A_THREAD = 4  # of a row, in the kernel that merges


@dataclass(frozen=True)
class Geometry:
    """What follows from a problem and its tuning. It chooses nothing and it holds no fact of its own."""

    problem: Problem
    tuning: Tuning

    @property
    def kernel_name(self) -> str:
        """The name that profiles show, such as "ragged_wide_thin_hd128_g4"."""
        op = "prefix" if self.problem.prefix else "ragged"
        kinds = "_".join("wide" if kind.is_wide else "thin" for kind in self.kinds_there)
        return f"{op}_{kinds}_hd{self.problem.head_size}_g{self.problem.group}"

    @property
    def kinds(self) -> tuple["ItemKind", "ItemKind"]:
        """The wide and the thin work items."""
        return ItemKind(self, WIDE), ItemKind(self, THIN)

    @property
    def kinds_there(self) -> tuple["ItemKind", ...]:
        """The kinds of which a batch may have items: both, or the thin ones."""
        return tuple(kind for kind in self.kinds if kind.may_exist)

    @property
    def half_tokens(self) -> int:
        """Query tokens of half an item: with all heads of a group as rows, they fit into `WGMMA_ROWS` rows."""
        return WGMMA_ROWS // self.problem.group

    # Tiles of K and V.

    @property
    def converts_tiles(self) -> bool:
        """Whether the kernel converts tiles in shared memory: those of caches of 8 bits."""
        return self.problem.cache_itemsize == 1

    @property
    def operand_dtype(self) -> str:
        """The dtype of what the products take.

        float16 holds whatever 8 bits can say, and Hopper converts float8 to nothing else. But it may not hold new
        tokens, nor weights that each slot's scale has multiplied: these stay in the query's dtype.
        """
        fits = self.converts_tiles and not (self.problem.prefix or self.scales_value_slots)
        return "float16" if fits else self.problem.query_dtype

    @property
    def divides_queries(self) -> bool:
        """Whether each row of a query is divided by a power of two, so that float16 can hold it."""
        return self.operand_dtype != self.problem.query_dtype

    @property
    def scales_key_slots(self) -> bool:
        """Whether each slot of the key cache has a scale."""
        return self.problem.k_scale is ScaleKind.SLOT

    @property
    def scales_value_slots(self) -> bool:
        """Whether each slot of the value cache has a scale."""
        return self.problem.v_scale is ScaleKind.SLOT

    @property
    def scales_slots(self) -> bool:
        """Whether each slot of some cache has a scale."""
        return self.scales_key_slots or self.scales_value_slots

    @property
    def has_whole_tiles(self) -> bool:
        """Whether a tile whose tokens all have values is ready as soon as it is copied."""
        return not (self.converts_tiles or self.scales_slots or self.problem.prefix)

    @property
    def converts_by_warps(self) -> bool:
        """Whether each loading warp converts its own runs of a tile, and waits for no other warp."""
        return self.converts_tiles and not (self.scales_slots or self.problem.prefix)

    @property
    def softmax_outlasts_products(self) -> bool:
        """Whether the softmax of a wide tile takes longer than its products, whose tokens can be halved.

        On an H200 that was so for heads of 64, hardly for heads of 80, and not for heads of 96 (benchmarks/LOG.md,
        "The second product in halves").
        """
        return self.problem.head_size <= _MOST_WITH_LONG_SOFTMAX and self.tuning.tile % (2 * _LEAST_PRODUCT) == 0

    # Block-sparse patterns, where there is one.

    @property
    def stripes(self) -> tuple[int, ...]:
        """How far behind a stripe of a group's last head the stripes of all its heads are, in sparse blocks."""
        sparse, group = self.problem.block_sparse, self.problem.group
        if sparse is None or sparse.head_sliding_step <= 0:
            return (0,)
        return tuple(sorted({head * sparse.head_sliding_step % sparse.vert_stride for head in range(group)}))

    @property
    def sees_stripes_only(self) -> bool:
        """Whether a query may not even see its own token."""
        return self.problem.block_sparse is not None and self.problem.block_sparse.local_blocks == 0

    # Counts of the batch's work.

    @property
    def count_columns(self) -> int:
        """Columns of the counts: the sequences, the padding and the batch's end, rounded up to whole warpgroups."""
        return pl.cdiv(self.problem.num_seqs + 2, WARPGROUP) * WARPGROUP

    @property
    def orders_sequences(self) -> bool:
        """Whether the sequences with the most costly items come first: where a warpgroup has a thread for each."""
        return self.problem.num_seqs > 1 and self.count_columns == WARPGROUP

    # The merge of split items.

    @property
    def merges(self) -> bool:
        """Whether any items may be split."""
        return any(kind.may_split for kind in self.kinds)

    @property
    def threads_of_row(self) -> int:
        """Threads that merge a row."""
        return self.problem.head_size // _ELEMENTS_OF_A_THREAD

    @property
    def merged_rows(self) -> int:
        """Rows that a warpgroup merges at once."""
        return WARPGROUP // self.threads_of_row


@dataclass(frozen=True)
class ItemKind:
    """The wide or the thin work items of a geometry.

    Attributes:
      geometry: the geometry.
      number: `WIDE` or `THIN`.
    """

    geometry: Geometry
    number: int

    @property
    def is_wide(self) -> bool:
        """Whether these are the wide items."""
        return self.number == WIDE

    @property
    def may_exist(self) -> bool:
        """Whether a batch may have such items. Sequences that are known to have few queries have thin ones only."""
        return not self.is_wide or self.geometry.problem.max_query_len > self.geometry.half_tokens

    @property
    def takes_all(self) -> bool:
        """Whether items of this kind have all of a sequence's queries, and not only those of its last tile."""
        return self.geometry.kinds_there == (self,)

    @property
    def has_several(self) -> bool:
        """Whether a sequence may have several tiles of these, from its first query on, and not only one at its end."""
        return self.is_wide or self.takes_all

    @property
    def halves(self) -> int:
        """Halves of an item, of up to `WGMMA_ROWS` rows each."""
        return 2 if self.is_wide else 1

    @property
    def tokens(self) -> int:
        """The most query tokens of an item."""
        return self.halves * self.geometry.half_tokens

    # Tiles of K and V.

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        tuning = self.geometry.tuning
        return tuning.tile if self.is_wide else tuning.thin_tile

    @property
    def pieces(self) -> int:
        """Tiles of these items that one tile of wide items has room for."""
        return self.geometry.tuning.tile // self.tile

    @property
    def stages(self) -> int:
        """Tiles in the rings of K and of V."""
        return self.geometry.tuning.stages * self.pieces

    @property
    def raw_stages(self) -> int:
        """Tiles of K, and of V, that wait in shared memory to be converted."""
        return self.pieces

    @property
    def run_tokens(self) -> int:
        """Tokens of a run: neighbours of a tile that are in one block, which one copy brings.

        Each warp that loads has runs of every tile. A warp without runs would still wait for stages, and nobody would
        keep a stage for it: if it lagged behind the others by a whole ring, it could wait forever.
        """
        return min(self.geometry.problem.block_size, self.tile // LOADING_WARPS)

    @property
    def runs_per_tile(self) -> int:
        """Runs that fill a tile."""
        return self.tile // self.run_tokens

    @property
    def runs_of_warp(self) -> int:
        """Runs of a tile that each loading warp has, where it has neighbours."""
        return self.runs_per_tile // LOADING_WARPS

    @property
    def rows_of_warp(self) -> int:
        """Rows of these runs."""
        return self.tile // LOADING_WARPS

    @property
    def stretch_tokens(self) -> int:
        """Tokens of a stretch: neighbours of a tile that are always neighbours in the sequence, too."""
        sparse = self.geometry.problem.block_sparse
        return self.tile if sparse is None else math.gcd(sparse.block_size, self.tile)

    @property
    def origin_alignment(self) -> int:
        """What the number of the first token of an item's first tile is a multiple of, so that runs are not cut."""
        return self.run_tokens if self.geometry.problem.block_sparse is None else self.stretch_tokens

    @property
    def arrivals_per_tile(self) -> int:
        """Arrivals that say that a tile is there: one for each copy, or one of each warp that has converted its runs.

        Where the warpgroup converts together, one arrival is all: each of its threads takes part in it.
        """
        if self.geometry.converts_by_warps:
            return LOADING_WARPS
        return 1 if self.geometry.converts_tiles else self.runs_per_tile

    @property
    def tile_cost(self) -> int:
        """What an item's products with one tile cost."""
        return self.tile // _COST_TOKENS * self.halves

    # Splits.

    @property
    def may_split(self) -> bool:
        """Whether any of these items may be split."""
        return self.num_partials > 0

    @property
    def num_partials(self) -> int:
        """Partial results of split items that memory has room for.

        Twice as many as programs are enough for wide items. One is split only if it costs more than an even share of
        all work, and the work has as many shares as there are programs: so fewer items than programs are split. Such an
        item has less than one split more than it costs shares: so all of them have fewer splits than twice the
        programs. A thin item is split only if it costs one and a half shares, into at most half a split more than that,
        which is up to 4/3 of its shares.
        """
        problem, programs, most_splits = self.geometry.problem, self.geometry.tuning.num_programs, self._most_splits
        if most_splits <= 1:
            return 0
        if self.is_wide:
            return 2 * programs if self.may_exist else 0
        most = math.ceil(4 / 3 / min(THIN_SHARES) * programs)
        query_tiles = pl.cdiv(problem.num_tokens, self.tokens) if self.takes_all else 1
        return min(most, problem.num_seqs * query_tiles * problem.num_kv_heads * most_splits)

    @property
    def _most_splits(self) -> int:
        """The most splits that an item may have."""
        tiles = pl.cdiv(self.geometry.problem.max_seq_len, self.tile) + (1 if self.geometry.problem.prefix else 0)
        return pl.cdiv(tiles * self.tile_cost, self.geometry.tuning.least_split)
