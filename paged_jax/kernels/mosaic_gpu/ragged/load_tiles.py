"""The loading warpgroup fills the rings with a work item's tiles.

It copies a tile of the cache run by run through the block table (TMA). A tile of 8 bits is copied to raw shared memory,
and converted from there into the ring. In `prefix_attention` an item's last tiles come from the arrays of new tokens.

Each warp loads its own runs of most tiles, one tile after the other, without waiting for the other warps. The warps
work together only on tiles that need more than copies.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.ragged import plan
from paged_jax.kernels.mosaic_gpu.ragged.kinds import LOADING_WARPS, ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.plan import Item, Span
from paged_jax.kernels.mosaic_gpu.ragged.ptx import rows, tiles
from paged_jax.kernels.mosaic_gpu.ragged.ptx.tiles import Range
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref, Refs, TileRing

_Blocks = tuple[Scalar, ...]  # the block of each of a warp's runs of a tile
_OfTile = Callable[[Scalar, Scalar, _Blocks, _Blocks], None]
"""The work of a warp for one tile.

Arguments: the tile, the warp's first run, and the blocks of a tile ahead and of the tile before that one.
"""


class _Cache(NamedTuple):
    """The sources and the destination of tiles of K, or of V."""

    is_keys: bool
    cache_gmem: Ref
    new_gmem: Ref
    scale_gmem: Ref
    ring: TileRing  # with the barriers for the item's kind


class _Tile(NamedTuple):
    """A tile of an item."""

    number: Scalar
    stage: Scalar
    is_reused: Scalar  # whether the stage held another tile before
    span: Span
    kept: Range  # rows of V that stay: from the first visible token to the last token with a value


@dataclass(frozen=True)
class TileLoader:
    """Loads the tiles of an item.

    Attributes:
      item: the item.
      tiles_before: the number of tiles of this kind that the program has loaded before the item.
      kind: the item's kind.
      refs: all references.
    """

    item: Item
    tiles_before: Scalar
    kind: ItemKind
    refs: Refs

    def load(self, number: Scalar) -> None:
        """Copies one tile of K and of V into the rings."""
        geometry = self.kind.geometry
        stage = lax.rem(self.tiles_before + number, jnp.int32(self.kind.stages))
        is_reused = self.tiles_before + number >= self.kind.stages
        span = plan.span_of(self.item, number, self.kind)
        tile = _Tile(number, stage, is_reused, span, self._kept(span))
        if geometry.scales_slots:
            self._load_scales(tile)
        load_cached = functools.partial(self._convert if geometry.converts_tiles else self._copy, tile)
        if geometry.problem.prefix:
            pl.when(span.is_new)(lambda: self._load_new(tile))
            pl.when(~span.is_new)(load_cached)
        else:
            load_cached()

    def _kept(self, span: Span) -> Range:
        """The rows of a tile of V that stay. Others become 0: their weights are 0, but 0 * NaN is NaN."""
        begin, end = (plan.rank_of(x, span.pattern, self.kind.geometry) for x in (span.begin, span.values_end))
        return Range(begin - span.rank, end - span.rank)

    def num_whole(self, most: Scalar) -> Scalar:
        """The number of tiles, up to `most`, that only need copies, if `has_whole_tiles`."""
        if self.kind.zeroes_when_read:
            return lax.min(self.item.num_tiles, most)
        whole = plan.num_whole_tiles(self.item, self.kind)
        return lax.max(lax.min(lax.min(whole, self.item.num_tiles), most), jnp.int32(0))

    def load_first(self, count: Scalar) -> None:
        """Copies the first tiles, which only need copies."""

        def do_as_warp():
            first_run = lax.axis_index("warp") * self.kind.runs_of_warp

            @pl.loop(0, count)
            def copy(number):
                self._copy_whole_tile(number, first_run, self._blocks_of(number, first_run), ())

        _as_warps(do_as_warp)

    def load_range(self, begin: Scalar, end: Scalar) -> None:
        """Loads the tiles begin <= number < end. Warps work independently where they can."""
        if self.kind.zeroes_when_read:
            self._for_tiles_by_warps(begin, end, 0, self._copy_whole_tile)
            return
        if self.kind.geometry.has_whole_tiles:
            whole = lax.clamp(begin, plan.num_whole_tiles(self.item, self.kind), lax.max(end, begin))
            self._for_tiles_by_warps(begin, whole, 0, self._copy_whole_tile)
            begin = whole
        elif self.kind.geometry.converts_by_warps:
            self._for_tiles_by_warps(begin, end, self._following(self._caches[1])[1], self._convert_runs)
            return
        pl.loop(begin, end)(self.load)

    def begin_raw(self) -> None:
        """Starts the copies of the item's first raw tiles."""
        keys, values = (-(-(self.kind.raw_stages - i) // 2) for i in range(2))
        if self.kind.geometry.converts_by_warps:
            end = lax.min(self.item.cached_tiles, jnp.int32(keys))
            self._for_tiles_by_warps(jnp.int32(0), end, 0, functools.partial(self._copy_raw_runs, values))
            return
        for cache, number in zip(self._caches, (keys, values), strict=True):
            for i in range(number):
                pl.when(i < self.item.cached_tiles)(functools.partial(self._load_raw, cache, jnp.int32(i)))

    @property
    def _caches(self) -> tuple[_Cache, _Cache]:
        """K and V."""
        inputs, smem, barriers = self.refs.inputs_gmem, self.refs.smem, self.refs.smem.barriers(self.kind)
        keys = _Cache(
            is_keys=True,
            cache_gmem=inputs.key_cache,
            new_gmem=inputs.new_key,
            scale_gmem=inputs.options.k_scale,
            ring=smem.keys._replace(consumed=barriers.keys_consumed, ready=barriers.keys_ready),
        )
        values = _Cache(
            is_keys=False,
            cache_gmem=inputs.value_cache,
            new_gmem=inputs.new_value,
            scale_gmem=inputs.options.v_scale,
            ring=smem.values._replace(consumed=barriers.values_consumed, ready=barriers.values_ready),
        )
        return keys, values

    def _wait_for_stage(self, cache: _Cache, tile: _Tile) -> None:
        """Waits until the previous tile of the stage is consumed."""
        if cache.is_keys or not self.kind.geometry.scales_slots:  # for V, `_load_scales` waits
            pl.when(tile.is_reused)(lambda: plgpu.barrier_wait(cache.ring.consumed.at[tile.stage]))

    def _arrive(self, cache: _Cache, tile: _Tile) -> None:
        """Signals a tile that this warpgroup has written."""
        for _ in range(self.kind.arrivals_per_tile):
            plgpu.barrier_arrive(cache.ring.ready.at[tile.stage])

    def _first_own_row(self) -> Scalar:
        """The first row of a tile that this warp converts or zeroes."""
        return lax.axis_index("warp") * self.kind.rows_of_warp

    # Tiles of the cache, of 16 bits.

    def _copy(self, tile: _Tile) -> None:
        """Copies a tile of the cache, and zeroes the rows of V that are not kept."""
        keys, values = self._caches
        keys_smem, values_smem = (tile_of(cache.ring.tiles, tile.stage, self.kind) for cache in self._caches)
        self._wait_for_stage(keys, tile)
        self._copy_runs(keys, keys_smem, keys.ring.ready.at[tile.stage], tile.span)
        self._wait_for_stage(values, tile)
        partly = (tile.kept.end < self.kind.tile) | (tile.kept.begin > 0)
        pl.when(~partly)(lambda: self._copy_runs(values, values_smem, values.ring.ready.at[tile.stage], tile.span))

        @pl.when(partly)
        def copy_some():
            copied = self.refs.smem.barriers(self.kind).values_copied
            self._copy_runs(values, values_smem, copied, tile.span)
            plgpu.barrier_wait(copied)
            _as_warps(lambda: tiles.zero_rows(values_smem, tile.kept, self._first_own_row(), self.kind))
            self._arrive(values, tile)

    def _copy_runs(self, cache: _Cache, tile_smem, ready, span: Span) -> None:
        """Copies the runs of a tile; each warp copies every fourth one. Past the end, it copies the last run again."""
        size, block_size = self.kind.run_tokens, self.kind.geometry.problem.block_size
        last = self.last_run(span.end)

        def copy_run(run: int):
            token = lax.min(span.starts[run * size // self.kind.segment_tokens] + run * size, last)
            token = self.not_before_window(token)
            block = self.refs.inputs_gmem.block_tables[self.item.seq, lax.div(token, jnp.int32(block_size))]
            run_gmem = self._run_gmem(cache, block, token)
            plgpu.copy_gmem_to_smem(run_gmem, tile_smem.at[pl.ds(run * size, size)], ready)

        def copy_in_turn():
            for warp in range(LOADING_WARPS):

                @pl.when(lax.axis_index("warp") == warp)
                def copy_own(warp=warp):
                    for run in range(warp, self.kind.runs_per_tile, LOADING_WARPS):
                        copy_run(run)

        _as_warps(copy_in_turn)

    def _run_gmem(self, cache: _Cache, block: Scalar, token: Scalar) -> Ref:
        """The run of a cache that begins with `token`, which is in `block`."""
        problem, size = self.kind.geometry.problem, self.kind.run_tokens
        if size == problem.block_size:
            tokens = slice(None)
        else:  # a product shows Mosaic that the offset is a multiple of `size`
            run = lax.rem(lax.div(token, jnp.int32(size)), jnp.int32(problem.block_size // size))
            tokens = pl.ds(run * size, size)
        kv_head = self.item.kv_head
        if problem.interleaved:
            row = 2 * kv_head + (0 if cache.is_keys else 1)
            return cache.cache_gmem.at[block, tokens, row, pl.ds(0, problem.head_size)]
        return cache.cache_gmem.at[(block, tokens, kv_head) if problem.layout == "nhd" else (block, kv_head, tokens)]

    def _for_tiles_by_warps(self, begin: Scalar, end: Scalar, ahead: int, do: _OfTile) -> None:
        """Calls `do` in each warp for the tiles begin <= number < end; no warp waits for another.

        Each warp has its own runs of every tile. For tile i, `do` gets the blocks that hold the warp's runs of tile i +
        `ahead`. The warp reads these blocks' numbers from the block table before it calls `do` for tile i - 1, so that
        the reads overlap with the work on that tile.
        """

        def do_as_warp():
            first_run = lax.axis_index("warp") * self.kind.runs_of_warp

            def do_tile(number, state):
                earlier, blocks = state
                next_blocks = self._blocks_of(number + ahead + 1, first_run)
                do(number, first_run, blocks, earlier)
                if self.kind.prefetches:
                    self._prefetch_own_runs(number + ahead + 1, first_run, next_blocks)
                return (blocks if earlier else ()), next_blocks

            earlier = ()
            if ahead > 0 and self.kind.raw_stages % 2:
                earlier = self._blocks_of(begin + ahead - 1, first_run)
            lax.fori_loop(begin, end, do_tile, (earlier, self._blocks_of(begin + ahead, first_run)))

        _as_warps(do_as_warp)

    def _blocks_of(self, number: Scalar, first_run: Scalar) -> _Blocks:
        """The blocks that hold a warp's runs of a tile. Past the end, they are the block of the last run."""
        tables_gmem, block_size = self.refs.inputs_gmem.block_tables, jnp.int32(self.kind.geometry.problem.block_size)
        last = self.last_run(self.item.values_end)
        own = range(self.kind.runs_of_warp)
        tokens = (lax.min(self._first_read(number, first_run + j), last) for j in own)
        return tuple(tables_gmem[self.item.seq, lax.div(token, block_size)] for token in tokens)

    def _copy_whole_tile(self, number: Scalar, first_run: Scalar, blocks: _Blocks, _: _Blocks) -> None:
        """Copies a warp's runs of a tile, which lie in these blocks."""
        stage = lax.rem(self.tiles_before + number, jnp.int32(self.kind.stages))
        for cache in self._caches:
            is_reused = self.tiles_before + number >= self.kind.stages
            pl.when(is_reused)(lambda cache=cache: plgpu.barrier_wait(cache.ring.consumed.at[stage]))
            tile_smem = tile_of(cache.ring.tiles, stage, self.kind)
            self._copy_own_runs(cache, number, tile_smem, cache.ring.ready.at[stage], first_run, blocks)

    def _copy_own_runs(self, cache: _Cache, number: Scalar, tile_smem: Ref, ready: Ref, first_run, blocks) -> None:
        """Copies a warp's runs, which lie in these blocks, to their rows of the tile."""
        size = self.kind.run_tokens
        for j, block in enumerate(blocks):
            run_gmem = self._run_gmem(cache, block, self._first_read(number, first_run + j))
            plgpu.copy_gmem_to_smem(run_gmem, tile_smem.at[pl.ds((first_run + j) * size, size)], ready)

    def _first_read(self, tile: Scalar, run: Scalar) -> Scalar:
        """The first token that is read for a run of a tile."""
        first = self.item.origin + tile * self.kind.tile + run * self.kind.run_tokens
        pattern = plan.pattern_of_item(self.item, self.kind)
        return self.not_before_window(plan.token_of(first, pattern, self.kind.geometry))

    def last_run(self, end: Scalar) -> Scalar:
        """The first token of the last run that holds a token before `end`."""
        geometry, pattern, size = self.kind.geometry, plan.pattern_of_item(self.item, self.kind), self.kind.run_tokens
        last_token = plan.token_of(plan.rank_of(end, pattern, geometry) - 1, pattern, geometry)
        return lax.max(lax.div(last_token, jnp.int32(size)) * size, jnp.int32(0))

    def not_before_window(self, token: Scalar) -> Scalar:
        """Returns `token`, or the first token of the window's first run if `token` lies before that run.

        An item's tiles may begin with a sparse block that lies partly before the sliding window. The cache blocks
        before the window may be freed, so the window's first run is read in their place, and masked.
        """
        problem, size = self.kind.geometry.problem, jnp.int32(self.kind.run_tokens)
        if problem.block_sparse is None or problem.sliding_window is None:
            return token
        return lax.max(token, lax.div(self.item.begin, size) * size)

    # Tiles of the cache, of 8 bits.

    def _convert_runs(self, number: Scalar, first_run: Scalar, blocks: _Blocks, earlier: _Blocks) -> None:
        """Converts a warp's runs of a tile, and starts the copies from these blocks that overwrite the raw runs."""
        stage = lax.rem(self.tiles_before + number, jnp.int32(self.kind.stages))
        is_reused = self.tiles_before + number >= self.kind.stages
        first_row = first_run * self.kind.run_tokens  # a warp's index would be spilled, and read again for each tile
        for cache in self._caches:
            following = number + self._following(cache)[1]
            raw_smem, arrived = self._raw(cache, number)
            plgpu.barrier_wait(arrived)
            pl.when(is_reused)(lambda cache=cache: plgpu.barrier_wait(cache.ring.consumed.at[stage]))
            tile_smem = tile_of(cache.ring.tiles, stage, self.kind)
            tiles.convert_rows(raw_smem, tile_smem, first_row, self.kind)
            if not cache.is_keys:
                is_partial = number >= plan.num_whole_tiles(self.item, self.kind)
                pl.when(is_partial)(functools.partial(self._zero_own_rows, number, tile_smem, first_row))
            plgpu.barrier_arrive(cache.ring.ready.at[stage])

            @pl.when(following < self.item.cached_tiles)
            def copy_next(cache=cache, following=following, raw_smem=raw_smem, arrived=arrived):
                of_following = earlier if earlier and cache.is_keys else blocks
                self._copy_own_runs(self._following(cache)[0], following, raw_smem, arrived, first_run, of_following)

    def _prefetch_own_runs(self, number: Scalar, first_run: Scalar, blocks: tuple[Scalar, ...]) -> None:
        """Prefetches a warp's runs of a tile into L2, if the item has that tile."""

        @pl.when(number < self.item.cached_tiles)
        def prefetch():
            for cache in self._caches:
                for j, block in enumerate(blocks):
                    token = self._first_read(number, first_run + j)
                    plgpu.async_prefetch(self._run_gmem(cache, block, token))

    def _zero_own_rows(self, number: Scalar, tile_smem: Ref, first_row: Scalar) -> None:
        """Zeroes the rows of a warp's runs of V that are not kept."""
        span = plan.span_of(self.item, number, self.kind)
        tiles.zero_rows(tile_smem, self._kept(span), first_row, self.kind)

    def _copy_raw_runs(self, values: int, number: Scalar, first_run: Scalar, blocks: _Blocks, _: _Blocks) -> None:
        """Starts the copies of a warp's raw runs of a tile, which lie in these blocks; of V only for `values` tiles."""

        def copy(cache: _Cache):
            self._copy_own_runs(cache, number, *self._raw(cache, number), first_run, blocks)

        keys_cache, values_cache = self._caches
        copy(keys_cache)
        if self.kind.raw_stages % 2 == 0:
            copy(values_cache)
        else:
            pl.when(number < values)(lambda: copy(values_cache))

    def _following(self, cache: _Cache) -> tuple[_Cache, int]:
        """The cache whose tile overwrites a raw tile of this cache, and how many tiles it is ahead."""
        keys, values = self._caches
        stages = self.kind.raw_stages
        if stages % 2 == 0:
            return cache, stages // 2
        return (values, stages // 2) if cache.is_keys else (keys, (stages + 1) // 2)

    def _convert(self, tile: _Tile) -> None:
        """Converts a raw tile, and starts the copy of the tile that overwrites it."""
        for cache in self._caches:
            next_cache, ahead = self._following(cache)
            is_next = tile.number + ahead < self.item.cached_tiles
            raw_smem, arrived = self._raw(cache, tile.number)
            plgpu.barrier_wait(arrived)
            self._wait_for_stage(cache, tile)
            tile_smem = tile_of(cache.ring.tiles, tile.stage, self.kind)

            def convert_own(cache=cache, raw_smem=raw_smem, tile_smem=tile_smem):
                first_row = self._first_own_row()
                tiles.convert_rows(raw_smem, tile_smem, first_row, self.kind)
                if not cache.is_keys:
                    tiles.zero_rows(tile_smem, tile.kept, first_row, self.kind)

            _as_warps(convert_own)
            self._arrive(cache, tile)
            pl.when(is_next)(functools.partial(self._load_raw, next_cache, tile.number + ahead))

    def _load_raw(self, cache: _Cache, number: Scalar) -> None:
        """Starts the copy of a raw tile."""
        raw_smem, arrived = self._raw(cache, number)
        self._copy_runs(cache, raw_smem, arrived, plan.span_of(self.item, number, self.kind))

    def _raw(self, cache: _Cache, number: Scalar) -> tuple[Ref, Ref]:
        """The shared memory of a raw tile, and the barrier that signals its arrival."""
        tile, stages = self.kind.tile, self.kind.raw_stages
        is_values = 0 if cache.is_keys else 1
        stage = is_values if stages == 2 else lax.rem(2 * (self.tiles_before + number) + is_values, jnp.int32(stages))
        raw_smem = self.refs.smem.raw.rows.at[
            pl.ds(stage * tile, tile)
        ]  # a product shows Mosaic that `tile` divides it
        return raw_smem, self.refs.smem.barriers(self.kind).raw_ready.at[stage]

    # Copies without TMA.

    def _load_new(self, tile: _Tile) -> None:
        """Copies a tile of new tokens. It may begin at any row of their arrays, which TMA does not support."""
        first_rows = [self.item.first_token + (start - self.item.position) for start in tile.span.starts]
        for cache in self._caches:
            self._wait_for_stage(cache, tile)
            tile_smem = tile_of(cache.ring.tiles, tile.stage, self.kind)
            tiles.load_new(cache.new_gmem, tile_smem, self.item, first_rows, tile.kept, self.kind)
            rows.finish_copies()
            self._arrive(cache, tile)

    def _load_scales(self, tile: _Tile) -> None:
        """Copies the scales of a tile's slots. They stay in shared memory until the tile of V is consumed."""
        tables_gmem, starts = self.refs.inputs_gmem.block_tables, tile.span.starts
        values = self._caches[1]
        pl.when(tile.is_reused)(lambda: plgpu.barrier_wait(values.ring.consumed.at[tile.stage]))
        for cache in self._caches:
            if cache.ring.slot_scales is not None:
                scales_smem = scales_of(cache.ring, tile.stage, self.kind)
                tiles.load_scales(cache.scale_gmem, tables_gmem, scales_smem, self.item, starts, tile.kept, self.kind)
                plgpu.barrier_arrive(cache.ring.ready.at[tile.stage])


def tile_of(ring_smem: Ref, stage: Scalar, kind: ItemKind) -> Ref:
    """The tile in a stage of a ring. The memory of one wide tile may hold several thin tiles."""
    tile, per_wide_tile = kind.tile, kind.tiles_per_wide_tile
    if per_wide_tile == 1:
        return ring_smem.at[stage]
    first = lax.rem(stage, jnp.int32(per_wide_tile)) * tile  # a product shows Mosaic that `tile` divides it
    return ring_smem.at[lax.div(stage, jnp.int32(per_wide_tile)), pl.ds(first, tile)]


def scales_of(ring: TileRing, stage: Scalar, kind: ItemKind) -> Ref | None:
    """The scales of a tile's slots, [tile], or None."""
    if ring.slot_scales is None:
        return None
    return ring.slot_scales.at[pl.ds(stage * kind.tile, kind.tile)]


def _as_warps(function: Any) -> None:
    """Runs a function in each warp of the warpgroup."""
    pl.kernel(function, mesh=plgpu.WarpMesh(axis_name="warp"))()  # pyright: ignore[reportCallIssue]
