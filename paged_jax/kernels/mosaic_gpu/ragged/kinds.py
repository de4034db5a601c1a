"""The kinds of work items of ragged attention: their shapes, their tiles, and how they are split.

Wide items have the rows of many queries, and products bound them. Thin items have few rows, and loads bound them.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl

from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry

LOADING_WARPS = 4
"""Warps of the loading warpgroup."""

NO_ITEM, WIDE, THIN = range(3)
"""Values of `Item.kind`.

A thin item has up to `WGMMA_ROWS` query rows, and a wide one so many for each computing warpgroup.
"""

_ENOUGH_IN_FLIGHT = 40 * 1024
"""Bytes of raw tiles in flight in a program that keep memory busy (benchmarks/LOG.md, "Three warpgroups")."""

_WIDE_SHARES, _THIN_SHARES = (1.0, 1.25, 0.5, 1 / 3), (1.0, 0.6, 0.5)
"""Candidate costs of a wide and of a thin split, as multiples of total work / programs.

With the second one, wide items that cost a little more than a share stay whole: their halves may fill a wave and a half
of their programs. Candidates are compared by their mean item, so with 2.0 a few items of two shares could end last
(benchmarks/LOG.md, "The longest first").
"""

_LEAST_HALF = 48
"""The least cost of a thin split of half a share (benchmarks/LOG.md, "The longest first")."""

_UNORDERED_THIN_SHARE = 0.5

_BESIDE_WIDE_PARTS, _BESIDE_WIDE_LEAST = (1 / 12, 1 / 4), 24
"""The cost of a thin split beside wide items: the first part of all items' cost / programs, the second part of all thin
items' cost / programs, or the last number, whichever is most; but no more than without wide items.

The last thin items may begin when no wide ones are left, and a long one would end last.
"""

_WIDE_ROUNDED, _THIN_ROUNDED = 0.874, 0.5
"""The number of splits is truncated after one of these is added.

Wide items: it is rounded up from a fraction of 1/8 on. Thin items: it is rounded to the nearest integer, because other
thin items fill the end of the call.
"""

_WIDE_ITEM_COST = 10  # of a wide item's beginning and end: as much as two bands' products with some 300 tokens
_WIDE_SPLIT_COST = 22  # the same, and its partial result with the merge (benchmarks/LOG.md, "The longest first")
_COST_TOKENS = 64  # the unit of cost: one warpgroup's products with this many tokens of K and V


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
        return not self.is_wide or self.geometry.problem.max_query_len > self.geometry.band_tokens

    @property
    def takes_all(self) -> bool:
        """Whether all items of the batch are of this kind."""
        return kinds_there(self.geometry) == (self,)

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
    def bands(self) -> int:
        """Bands of an item: each has up to `WGMMA_ROWS` rows, those of one wgmma instruction."""
        return self.geometry.tuning.computing_warpgroups if self.is_wide else 1

    @property
    def tokens(self) -> int:
        """The most query tokens that an item may have."""
        return self.bands * self.geometry.band_tokens

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

        Wide items, which computing warpgroups bound, use one of K and one of V, or one for both if no more fits.
        """
        raw_tiles = self.geometry.tuning.raw_tiles
        return (min(raw_tiles, 2) if self.is_wide else raw_tiles) * self.tiles_per_wide_tile

    @property
    def prefetches(self) -> bool:
        """Whether warps prefetch raw tiles into L2, because raw tiles in flight do not keep memory busy.

        A warp prefetches the tile after those in flight. The contexts of wide items are in L2 more often; prefetching
        would make these items 3% slower (benchmarks/LOG.md, "One pool of keys and values").
        """
        in_flight = (self.raw_stages - 1) * self.tile * self.geometry.problem.head_size  # one tile is converted
        return self.geometry.converts_by_warps and not self.is_wide and in_flight < _ENOUGH_IN_FLIGHT

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
        return self.tile // _COST_TOKENS * self.bands

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
        and all items together cost no more than total work. The same holds for thin items beside wide ones: their least
        target is a part of their own cost / programs.
        """
        problem, tuning = self.geometry.problem, self.geometry.tuning
        if not self.may_exist:
            return 0
        unsplit = self._most_query_tiles * problem.num_kv_heads if self.geometry.merges_copies else 0
        tiles = pl.cdiv(problem.max_seq_len, self.tile) + (1 if problem.prefix else 0)
        most_splits = pl.cdiv(tiles * self.tile_cost, self.least_split)
        if most_splits <= 1:
            return unsplit
        least_share = min(*self.shares, self.beside_wide[1] if self.beside_wide else 1.0)
        most = math.ceil(2 / (2 - self.rounded) / least_share * tuning.num_programs)
        if self.is_wide:
            return most + unsplit
        query_tiles = pl.cdiv(problem.num_tokens, self.tokens) if self.takes_all else 1
        return min(most, problem.num_seqs * query_tiles * problem.num_kv_heads * most_splits) + unsplit

    @property
    def split_counters(self) -> int:
        """The number of counters of stored partial results, if the kernel merges them."""
        return 0 if self.geometry.merges_copies else self.num_partials * self.bands

    def split_counter(self, first_partial: Any, band: Any) -> Any:
        """The index of the counter of one band of a split item, which its first partial result identifies."""
        first = 2 if self.is_wide else 2 + kinds_of(self.geometry)[0].split_counters
        return first + first_partial * self.bands + band

    @property
    def _most_query_tiles(self) -> int:
        """An upper bound of the number of query tiles of all sequences."""
        problem = self.geometry.problem
        if self.is_wide:  # each has more tokens than a band
            return problem.num_tokens // (self.geometry.band_tokens + 1)
        return problem.num_seqs + (problem.num_tokens // self.tokens if self.takes_all else 0)

    @property
    def shares(self) -> tuple[float, ...]:
        """Candidate costs of a split, as multiples of total work / programs. Without an order only even shares are.

        If each query has several rows, sequences have no order, and thin splits are short: one may begin last.
        """
        shares = _WIDE_SHARES if self.is_wide else _THIN_SHARES
        if self.geometry.merges_copies and not self.is_wide:
            return (_UNORDERED_THIN_SHARE,)
        return shares if self.geometry.orders_sequences else shares[:1]

    @property
    def least_of_shares(self) -> tuple[int, ...]:
        """The least cost of a split with each of `shares`. A whole share replaces one that would cost less."""
        return (0,) * len(self.shares) if self.is_wide else (0, 0, _LEAST_HALF)[: len(self.shares)]

    @property
    def beside_wide(self) -> tuple[float, float] | None:
        """The cost of a thin split beside wide items: parts of all items' and of all thin items' cost / programs.

        None for wide items, and where wide items make no difference.
        """
        wide, _ = kinds_of(self.geometry)
        may_differ = not (self.is_wide or self.geometry.merges_copies) and wide.may_exist
        return _BESIDE_WIDE_PARTS if may_differ else None

    @property
    def least_beside_wide(self) -> int:
        """The least target cost of a thin split if there are wide items, unless it is less without them."""
        return max(self.least_split, _BESIDE_WIDE_LEAST)

    @property
    def rounded(self) -> float:
        """The addend that rounds a number of splits before it is truncated."""
        return _WIDE_ROUNDED if self.is_wide else _THIN_ROUNDED

    @property
    def item_costs(self) -> tuple[int, ...]:
        """What each item costs beside its tiles, for each of `shares`. Shares below 1 split most items."""
        if not self.is_wide:
            return (0,) * len(self.shares)
        return tuple(_WIDE_SPLIT_COST if share < 1 else _WIDE_ITEM_COST for share in self.shares)

    @property
    def least_split(self) -> int:
        """The least target cost of a split."""
        tuning = self.geometry.tuning
        return tuning.least_split if self.is_wide else min(tuning.least_split, tuning.least_thin_split)


def kinds_of(geometry: Geometry) -> tuple[ItemKind, ItemKind]:
    """The wide and the thin work items."""
    return ItemKind(geometry, WIDE), ItemKind(geometry, THIN)


def kinds_there(geometry: Geometry) -> tuple[ItemKind, ...]:
    """The kinds of items that a batch may have: wide and thin, or thin only."""
    return tuple(kind for kind in kinds_of(geometry) if kind.may_exist)


def kernel_name(geometry: Geometry) -> str:
    """The name that profiles show, such as "ragged_wide_thin_hd128_g4"."""
    problem = geometry.problem
    op = "prefix" if problem.prefix else "ragged" if problem.copies == 1 else "shared"
    kinds = "_".join("wide" if kind.is_wide else "thin" for kind in kinds_there(geometry))
    return f"{op}_{kinds}_hd{problem.head_size}_g{problem.group}"


def partial_bytes(geometry: Geometry) -> int:
    """Bytes of global memory that are set aside for partial results."""
    rows = sum(kind.num_partials * kind.bands * WGMMA_ROWS for kind in kinds_of(geometry))
    return 4 * rows * (geometry.problem.head_size + 1)


def num_counters(geometry: Geometry) -> int:
    """Counters in global memory: of the claimed items of each kind, then those of split items of each kind."""
    return 2 + sum(kind.split_counters for kind in kinds_of(geometry))
