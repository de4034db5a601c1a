"""Shapes and counts of ragged attention. They follow from a `Problem` and its `Tuning`; host and device use them."""

import math
from dataclasses import dataclass

import jax.experimental.pallas as pl

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.ragged.tuning import Tuning
from paged_jax.kernels.problem import Granularity, Problem

LOADING_WARPS = 4
"""Warps of the loading warpgroup."""

NO_ITEM, WIDE, THIN = range(3)
"""Values of `Item.kind`. A wide item has up to 2 * `WGMMA_ROWS` query rows, a thin one up to `WGMMA_ROWS`."""

THIN_SHARES = (1.0, 0.6)
"""Candidate costs of a thin split, as fractions of total work / programs."""

_COST_TOKENS = 64  # the unit of cost: one warpgroup's products with this many tokens of K and V
_MOST_WITH_LONG_SOFTMAX = 64  # up to this head_size the softmax takes longer than the products
_LEAST_PRODUCT = 64  # tokens: the tiling of shared memory lets wgmma take multiples of 64
_ELEMENTS_OF_A_THREAD = 4  # elements of a row that a thread of the merge kernel merges


@dataclass(frozen=True)
class Geometry:
    """Shapes and counts that follow from a problem and its tuning. It holds no fact and no choice of its own."""

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
        """The kinds of items that a batch may have: wide and thin, or thin only."""
        return tuple(kind for kind in self.kinds if kind.may_exist)

    @property
    def half_tokens(self) -> int:
        """Query tokens that fit into `WGMMA_ROWS` rows, where each token takes a row for each head of a group."""
        return WGMMA_ROWS // self.problem.group

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
    def softmax_outlasts_products(self) -> bool:
        """Whether the softmax of a wide tile takes longer than its products, and the tile can be halved.

        On an H200 the softmax takes longer for heads of 64, about as long for 80, and less long for 96
        (benchmarks/LOG.md, "The second product in halves").
        """
        return self.problem.head_size <= _MOST_WITH_LONG_SOFTMAX and self.tuning.tile % (2 * _LEAST_PRODUCT) == 0

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
        """Whether a warpgroup sorts the sequences, so that those with the costliest items come first."""
        return self.problem.num_seqs > 1 and self.count_columns == WARPGROUP

    # The merge of split items.

    @property
    def merges(self) -> bool:
        """Whether any item may be split."""
        return any(kind.may_split for kind in self.kinds)

    @property
    def threads_of_row(self) -> int:
        """Threads that merge a row."""
        return self.problem.head_size // _ELEMENTS_OF_A_THREAD

    @property
    def merged_rows(self) -> int:
        """Rows that a warpgroup merges at a time."""
        return WARPGROUP // self.threads_of_row


@dataclass(frozen=True)
class ItemKind:
    """All wide work items of a batch, or all thin ones.

    Attributes:
      geometry: the call's geometry.
      code: `WIDE` or `THIN`.
    """

    geometry: Geometry
    code: int

    @property
    def is_wide(self) -> bool:
        """Whether these are the wide items."""
        return self.code == WIDE

    @property
    def may_exist(self) -> bool:
        """Whether a batch may have items of this kind. With a small `max_query_len` all items are thin."""
        return not self.is_wide or self.geometry.problem.max_query_len > self.geometry.half_tokens

    @property
    def takes_all(self) -> bool:
        """Whether all items of the batch are of this kind."""
        return self.geometry.kinds_there == (self,)

    @property
    def has_several(self) -> bool:
        """Whether a sequence may have several query tiles of this kind. Otherwise only its last one may be thin."""
        return self.is_wide or self.takes_all

    @property
    def halves(self) -> int:
        """Halves of an item; each has up to `WGMMA_ROWS` rows."""
        return 2 if self.is_wide else 1

    @property
    def tokens(self) -> int:
        """The most query tokens that an item may have."""
        return self.halves * self.geometry.half_tokens

    # Tiles of K and V.

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        tuning = self.geometry.tuning
        return tuning.tile if self.is_wide else tuning.thin_tile

    @property
    def tiles_per_wide_tile(self) -> int:
        """Tiles of this kind that fit into the shared memory of one wide tile."""
        return self.geometry.tuning.tile // self.tile

    @property
    def stages(self) -> int:
        """Tiles in the ring of K, and in the ring of V."""
        return self.geometry.tuning.stages * self.tiles_per_wide_tile

    @property
    def raw_stages(self) -> int:
        """Raw tiles of K, and of V, that shared memory holds before their conversion."""
        return self.tiles_per_wide_tile

    @property
    def prefetches(self) -> bool:
        """Whether warps prefetch raw tiles into L2, because one raw tile in flight does not keep memory busy.

        A warp prefetches the tile after the one in flight. The contexts of wide items are in L2 more often; prefetching
        would make these items 3% slower (benchmarks/LOG.md, "One pool of keys
        and values").
        """
        return self.geometry.converts_by_warps and not self.is_wide

    @property
    def run_tokens(self) -> int:
        """Tokens of a run: neighbouring tokens of a tile in one block, which one copy brings.

        A run is at most a quarter of a tile, so that each loading warp has runs of every tile. A warp without runs
        would still wait for each stage, but nobody would wait for that warp. It could fall a whole ring behind, miss a
        phase of a barrier, and hang.
        """
        return min(self.geometry.problem.block_size, self.tile // LOADING_WARPS)

    @property
    def runs_per_tile(self) -> int:
        """Runs that fill a tile."""
        return self.tile // self.run_tokens

    @property
    def runs_of_warp(self) -> int:
        """Runs of each loading warp, which are neighbours in the tile."""
        return self.runs_per_tile // LOADING_WARPS

    @property
    def rows_of_warp(self) -> int:
        """Rows of a tile that the runs of one loading warp fill."""
        return self.tile // LOADING_WARPS

    @property
    def segment_tokens(self) -> int:
        """Tokens of a segment: neighbours in the tile that are neighbours in the sequence, too."""
        sparse = self.geometry.problem.block_sparse
        return self.tile if sparse is None else math.gcd(sparse.block_size, self.tile)

    @property
    def origin_alignment(self) -> int:
        """The rank of an item's first token is a multiple of this, so that no run is cut."""
        return self.run_tokens if self.geometry.problem.block_sparse is None else self.segment_tokens

    @property
    def arrivals_per_tile(self) -> int:
        """Arrivals at a tile's barrier before the tile is ready.

        Without a conversion, each copy arrives once. If each loading warp converts its own runs, each of the four warps
        arrives once. If the warps convert a tile together, their warpgroup arrives once.
        """
        if self.geometry.converts_by_warps:
            return LOADING_WARPS
        return 1 if self.geometry.converts_tiles else self.runs_per_tile

    @property
    def tile_cost(self) -> int:
        """The cost of an item's products with one tile."""
        return self.tile // _COST_TOKENS * self.halves

    # Splits.

    @property
    def may_split(self) -> bool:
        """Whether any of these items may be split."""
        return self.num_partials > 0

    @property
    def num_partials(self) -> int:
        """An upper bound of the number of partial results of all split items.

        Let a share be total work / programs. A wide item is split only if it costs more than a share, so fewer items
        than programs are split. An item that costs x shares has fewer than x + 1 splits. All split items together cost
        no more than `programs` shares, so they have fewer than 2 * programs splits.

        A thin item that costs x of its own shares is split only if x is 1.5 or more. It has at most x + 0.5 splits, and
        so at most 4/3 * x. The least share of thin items is min(THIN_SHARES) times total work / programs.
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
        """An upper bound of the number of splits of one item."""
        tiles = pl.cdiv(self.geometry.problem.max_seq_len, self.tile) + (1 if self.geometry.problem.prefix else 0)
        return pl.cdiv(tiles * self.tile_cost, self.geometry.tuning.least_split)
