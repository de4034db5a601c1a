"""Shapes and counts of ragged attention. They follow from a `Problem` and its `Tuning`; host and device use them."""

import math
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.ragged.tuning import Tuning
from paged_jax.kernels.problem import Granularity, Problem

LOADING_WARPS = 4
"""Warps of the loading warpgroup."""

NO_ITEM, WIDE, THIN = range(3)
"""Values of `Item.kind`. A wide item has up to 2 * `WGMMA_ROWS` query rows, a thin one up to `WGMMA_ROWS`."""

_WIDE_SHARES, _THIN_SHARES = (1.0, 0.5, 1 / 3), (1.0, 0.6)
"""Candidate costs of a wide and of a thin split, as fractions of total work / programs."""

_UNORDERED_THIN_SHARE = 0.5

_WIDE_ROUNDED, _THIN_ROUNDED = 0.874, 0.5
"""The number of splits is truncated after one of these is added.

Wide items: it is rounded up from a fraction of 1/8 on. Thin items: it is rounded to the nearest integer, because other
thin items fill the end of the call.
"""

_WIDE_ITEM_COST = 10  # of a wide item's beginning, end and merge: as much as its products with some 300 tokens

_MOST_ORDERED = 4 * WARPGROUP - 2  # in batches of at most so many sequences, the first 128 may be sorted
_COST_TOKENS = 64  # the unit of cost: one warpgroup's products with this many tokens of K and V
_MOST_WITH_LONG_SOFTMAX = 64  # up to this head_size the softmax takes longer than the products
_LEAST_PRODUCT = 64  # tokens: the tiling of shared memory lets wgmma take multiples of 64
_QUERY_COLUMNS = 32  # four lanes read 16 bytes of a query row each
_ELEMENTS_OF_A_THREAD = 4  # elements of a row that a thread merges


@dataclass(frozen=True)
class Geometry:
    """Shapes and counts that follow from a problem and its tuning. It holds no fact and no choice of its own."""

    problem: Problem
    tuning: Tuning

    @property
    def kernel_name(self) -> str:
        """The name that profiles show, such as "ragged_wide_thin_hd128_g4"."""
        op = "prefix" if self.problem.prefix else "ragged" if self.problem.copies == 1 else "shared"
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
    def reads_own_queries(self) -> bool:
        """Whether the computing warpgroups read the queries; otherwise the loading warpgroup copies them.

        If shared memory holds one query only, results on their way to global memory occupy the next query's place. A
        warpgroup reads its rows of the next query into registers before it stores its results.
        """
        return self.converts_tiles and self.tuning.queries == 1 and self.problem.head_size % _QUERY_COLUMNS == 0

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
        """Whether the sequences with the costliest items come first, if only the first 128 have queries.

        A thread of a warpgroup compares one sequence with all others. More of them keep their order: even the longest
        is short compared with the work of a program, and sorting takes longer.
        """
        return 1 < self.problem.num_seqs <= _MOST_ORDERED and not self.merges_copies

    # The merge of split items, or of the rows of each query.

    @property
    def merges_copies(self) -> bool:
        """Whether each query has several rows, which a kernel of its own merges.

        Then every item leaves a partial result, also if it is not split.
        """
        return self.problem.copies > 1

    @property
    def partial_bytes(self) -> int:
        """Bytes of global memory that are set aside for partial results."""
        rows = sum(kind.num_partials * kind.halves * WGMMA_ROWS for kind in self.kinds)
        return 4 * rows * (self.problem.head_size + 1)

    @property
    def splits_of_whole(self) -> int:
        """The number of splits of an item that leaves no partial result; 0 if every item leaves one."""
        return 0 if self.merges_copies else 1

    @property
    def num_counters(self) -> int:
        """Counters in global memory: of the claimed items of each kind, then those of split items of each kind."""
        return 2 + sum(kind.split_counters for kind in self.kinds)

    @property
    def threads_of_row(self) -> int:
        """Threads that merge a row."""
        return self.problem.head_size // _ELEMENTS_OF_A_THREAD

    @property
    def merged_rows(self) -> int:
        """Rows that a warpgroup merges at a time; if each query has several rows, they are heads of one query."""
        rows = WARPGROUP // self.threads_of_row
        return math.gcd(rows, self.problem.num_heads) if self.merges_copies else rows


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
    def may_divide_heads(self) -> bool:
        """Whether some sequences may have so many query tiles that not all kv heads' items alternate."""
        problem = self.geometry.problem
        query_tiles = pl.cdiv(problem.max_query_len, self.tokens)
        return self.has_several and query_tiles * problem.num_kv_heads > 2 * self.geometry.tuning.num_programs

    @property
    def most_items(self) -> int:
        """An upper bound of the number of items, and of an item's tiles."""
        return max(self.most_numbered + 2 * self.geometry.tuning.num_programs, self.geometry.problem.max_seq_len)

    @property
    def most_numbered(self) -> int:
        """An upper bound of the number of items, where each split counts as one."""
        return self.most_unsplit + self.num_partials

    @property
    def most_unsplit(self) -> int:
        """An upper bound of the number of items, each with all of its splits."""
        problem = self.geometry.problem
        return problem.num_kv_heads * (problem.num_tokens // self.tokens + problem.num_seqs)

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
    def zeroes_when_read(self) -> bool:
        """Whether the warpgroup that reads a tile of V zeroes its rows past the end.

        Otherwise the loading warpgroup waits for the tile, and loads nothing meanwhile. Thin items of short contexts
        would lose most. Wide items have no registers left for this.
        """
        return not self.is_wide and self.geometry.has_whole_tiles

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
        """Raw tiles that shared memory holds before their conversion; those of K and of V alternate.

        Wide items, which computing warpgroups bound, use one of K and one of V: the code of a ring of three costs them
        1%.
        """
        raw_tiles = self.geometry.tuning.raw_tiles
        return (2 if self.is_wide else raw_tiles) * self.tiles_per_wide_tile

    @property
    def prefetches(self) -> bool:
        """Whether warps prefetch raw tiles into L2, because one raw tile in flight does not keep memory busy.

        A warp prefetches the tile after the one in flight. The contexts of wide items are in L2 more often; prefetching
        would make these items 3% slower (benchmarks/LOG.md, "One pool of keys
        and values").
        """
        return False

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
    def chunks_of_lane(self) -> int:
        """Chunks of eight bytes that each lane converts of a warp's rows of 8 bits."""
        return self.rows_of_warp * self.geometry.problem.head_size // (8 * WARP)

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
        """Whether any of these items may be split, or leave a partial result because each query has several rows."""
        return self.num_partials > 0

    @property
    def num_partials(self) -> int:
        """An upper bound of the number of partial results of all split items.

        An item that costs x targets has x + rounded splits, truncated. It is split only if x is 2 - rounded or more, so
        it has at most 2 / (2 - rounded) * x splits. The least target is the least share times total work / programs,
        and all items together cost no more than total work.
        """
        problem, tuning = self.geometry.problem, self.geometry.tuning
        if not self.may_exist:
            return 0
        unsplit = self._most_query_tiles * problem.num_kv_heads if self.geometry.merges_copies else 0
        tiles = pl.cdiv(problem.max_seq_len, self.tile) + (1 if problem.prefix else 0)
        most_splits = pl.cdiv(tiles * self.tile_cost, self.least_split)
        if most_splits <= 1:
            return unsplit
        most = math.ceil(2 / (2 - self.rounded) / min(self.shares) * tuning.num_programs)
        if self.is_wide:
            return most + unsplit
        query_tiles = pl.cdiv(problem.num_tokens, self.tokens) if self.takes_all else 1
        return min(most, problem.num_seqs * query_tiles * problem.num_kv_heads * most_splits) + unsplit

    @property
    def split_counters(self) -> int:
        """The number of counters of stored partial results, if the kernel merges them."""
        return 0 if self.geometry.merges_copies else self.num_partials * self.halves

    def split_counter(self, first_partial: Any, half: Any) -> Any:
        """The index of the counter of one half of a split item, which its first partial result identifies."""
        first = 2 if self.is_wide else 2 + self.geometry.kinds[0].split_counters
        return first + first_partial * self.halves + half

    @property
    def _most_query_tiles(self) -> int:
        """An upper bound of the number of query tiles of all sequences."""
        problem = self.geometry.problem
        if self.is_wide:  # each has more tokens than a half
            return problem.num_tokens // (self.geometry.half_tokens + 1)
        return problem.num_seqs + (problem.num_tokens // self.tokens if self.takes_all else 0)

    @property
    def shares(self) -> tuple[float, ...]:
        """Candidate costs of a split, as fractions of total work / programs. Without an order only even shares are.

        If each query has several rows, sequences have no order, and thin splits are short: one may begin last.
        """
        shares = _WIDE_SHARES if self.is_wide else _THIN_SHARES
        if self.geometry.merges_copies and not self.is_wide:
            return (_UNORDERED_THIN_SHARE,)
        return shares if self.geometry.orders_sequences else shares[:1]

    @property
    def rounded(self) -> float:
        """The addend that rounds a number of splits before it is truncated."""
        return _WIDE_ROUNDED if self.is_wide else _THIN_ROUNDED

    @property
    def item_cost(self) -> float:
        """The cost of a further item when shares are compared."""
        return _WIDE_ITEM_COST if self.is_wide else 0.0

    @property
    def least_split(self) -> int:
        """The least target cost of a split."""
        tuning = self.geometry.tuning
        return tuning.least_split if self.is_wide else min(tuning.least_split, tuning.least_thin_split)
