"""How the loading warpgroup fills the rings of tiles with those of a work item.

A tile comes from the cache, run by run through the block table (TMA). A tile of 8 bits is converted to 16 on its way
from one place in shared memory to the other. In `prefix_attention` an item's last tiles are of new tokens, and come
from arrays of their own.

Most tiles are loaded by each warp for itself: its own runs, of one tile after the other. The warps come together only
for tiles with which there is more to do.
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
from paged_jax.kernels.mosaic_gpu.ragged.geometry import LOADING_WARPS, ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.plan import Item, Span
from paged_jax.kernels.mosaic_gpu.ragged.ptx import rows, tiles
from paged_jax.kernels.mosaic_gpu.ragged.ptx.tiles import Range
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref, Refs, TileRing

_OfTile = Callable[[Scalar, Scalar, tuple[Scalar, ...]], None]
"""What a warp does for a tile: it gets the tile's number, the number of its own first run, and a block for each run."""


class _Cache(NamedTuple):
    """Where tiles of K, or of V, come from and go to."""

    is_keys: bool
    cache_gmem: Ref
    new_gmem: Ref
    scale_gmem: Ref
    ring: TileRing  # with the barriers of the item's kind
    raw: Ref
    raw_ready: Ref


class _Tile(NamedTuple):
    """A tile of an item."""

    number: Scalar
    stage: Scalar
    is_reused: Scalar  # whether the stage has had another tile before
    span: Span
    kept: Range  # rows of V that are not to be zeroed: from the first token that is seen to the last that has a value


@dataclass(frozen=True)
class TileLoader:
    """Loads the tiles of an item.

    Attributes:
      item: the item.
      tiles_before: tiles of items of its kind that the program has loaded before.
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
        """The rows of a tile of V that are not to be zeroed. Weights of others are 0, but 0 * NaN would be NaN."""
        begin, end = (plan.number_of(x, span.pattern, self.kind.geometry) for x in (span.begin, span.values_end))
        return Range(begin - span.number, end - span.number)

    def load_range(self, begin: Scalar, end: Scalar) -> None:
        """Copies the tiles begin <= number < end into the rings, as many as possible without waits between warps."""
        if self.kind.geometry.has_whole_tiles:
            whole = lax.clamp(begin, plan.num_whole_tiles(self.item, self.kind), lax.max(end, begin))
            self._for_tiles_by_warps(begin, whole, 0, self._copy_whole_tile)
            begin = whole
        elif self.kind.geometry.converts_by_warps:
            self._for_tiles_by_warps(begin, end, self.kind.raw_stages, self._convert_runs)
            return
        pl.loop(begin, end)(self.load)

    def begin_raw(self) -> None:
        """Starts to copy the item's first tiles to where they are converted from."""
        if self.kind.geometry.converts_by_warps:
            end = lax.min(self.item.cached_tiles, jnp.int32(self.kind.raw_stages))
            self._for_tiles_by_warps(jnp.int32(0), end, 0, self._copy_raw_runs)
            return
        for i in range(self.kind.raw_stages):
            for cache in self._caches:
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
            raw=smem.raw_keys.rows,
            raw_ready=barriers.raw_keys_ready,
        )
        values = _Cache(
            is_keys=False,
            cache_gmem=inputs.value_cache,
            new_gmem=inputs.new_value,
            scale_gmem=inputs.options.v_scale,
            ring=smem.values._replace(consumed=barriers.values_consumed, ready=barriers.values_ready),
            raw=smem.raw_values.rows,
            raw_ready=barriers.raw_values_ready,
        )
        return keys, values

    def _wait_for_stage(self, cache: _Cache, tile: _Tile) -> None:
        """Waits until the tile that had the stage before is consumed."""
        if cache.is_keys or not self.kind.geometry.scales_slots:  # `_load_scales` has waited for V
            pl.when(tile.is_reused)(lambda: plgpu.barrier_wait(cache.ring.consumed.at[tile.stage]))

    def _arrive(self, cache: _Cache, tile: _Tile) -> None:
        """Says that a tile that this warpgroup has written is there."""
        for _ in range(self.kind.arrivals_per_tile):
            plgpu.barrier_arrive(cache.ring.ready.at[tile.stage])

    def _first_own_row(self) -> Scalar:
        """The first of the rows of a tile that a warp converts or zeroes."""
        return lax.axis_index("warp") * self.kind.rows_of_warp

    # Tiles of the cache, of 16 bits.

    def _copy(self, tile: _Tile) -> None:
        """Copies a tile of the cache. V has zeros where no token has a value."""
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
        """Copies the runs of a tile, the warps in turn; past the end the last run again."""
        size, block_size = self.kind.run_tokens, self.kind.geometry.problem.block_size
        last = self.last_run(span.end)

        def copy_run(run: int):
            token = lax.min(span.starts[run * size // self.kind.stretch_tokens] + run * size, last)
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
        """The run of a cache that begins with a token, in a block."""
        problem, size = self.kind.geometry.problem, self.kind.run_tokens
        if size == problem.block_size:
            tokens = slice(None)
        else:  # Mosaic sees that a product is a multiple.
            run = lax.rem(lax.div(token, jnp.int32(size)), jnp.int32(problem.block_size // size))
            tokens = pl.ds(run * size, size)
        kv_head = self.item.kv_head
        if problem.interleaved:
            row = 2 * kv_head + (0 if cache.is_keys else 1)
            return cache.cache_gmem.at[block, tokens, row, pl.ds(0, problem.head_size)]
        return cache.cache_gmem.at[(block, tokens, kv_head) if problem.layout == "nhd" else (block, kv_head, tokens)]

    def _for_tiles_by_warps(self, begin: Scalar, end: Scalar, ahead: int, do: _OfTile) -> None:
        """Calls `do` in each warp, with the tiles begin <= number < end, and no warp waits for another.

        Each warp has its own runs of every tile. With tile i it gets the blocks that have its runs of tile i + `ahead`.
        It reads these blocks from the table before it calls `do` with tile i - 1, so that the reads are in flight
        meanwhile.
        """
        item, block_size = self.item, jnp.int32(self.kind.geometry.problem.block_size)
        tables_gmem, runs_of_warp = self.refs.inputs_gmem.block_tables, self.kind.runs_of_warp
        last = self.last_run(item.values_end)

        def do_as_warp():
            first_run = lax.axis_index("warp") * runs_of_warp

            def blocks_of(number):
                tokens = (lax.min(self._first_read(number, first_run + j), last) for j in range(runs_of_warp))
                return tuple(tables_gmem[item.seq, lax.div(token, block_size)] for token in tokens)

            def do_tile(number, blocks):
                next_blocks = blocks_of(number + ahead + 1)
                do(number, first_run, blocks)
                return next_blocks

            lax.fori_loop(begin, end, do_tile, blocks_of(begin + ahead))

        _as_warps(do_as_warp)

    def _copy_whole_tile(self, number: Scalar, first_run: Scalar, blocks: tuple[Scalar, ...]) -> None:
        """Copies a warp's runs of a tile, which are in these blocks."""
        stage = lax.rem(self.tiles_before + number, jnp.int32(self.kind.stages))
        for cache in self._caches:
            is_reused = self.tiles_before + number >= self.kind.stages
            pl.when(is_reused)(lambda cache=cache: plgpu.barrier_wait(cache.ring.consumed.at[stage]))
            tile_smem = tile_of(cache.ring.tiles, stage, self.kind)
            self._copy_own_runs(cache, number, tile_smem, cache.ring.ready.at[stage], first_run, blocks)

    def _copy_own_runs(self, cache: _Cache, number: Scalar, tile_smem: Ref, ready: Ref, first_run, blocks) -> None:
        """Copies a warp's runs of a tile, which are in these blocks, to their places in the tile."""
        size = self.kind.run_tokens
        for j, block in enumerate(blocks):
            run_gmem = self._run_gmem(cache, block, self._first_read(number, first_run + j))
            plgpu.copy_gmem_to_smem(run_gmem, tile_smem.at[pl.ds((first_run + j) * size, size)], ready)

    def _first_read(self, tile: Scalar, run: Scalar) -> Scalar:
        """The first token of what is read as a run of a tile, both by their numbers."""
        first = self.item.origin + tile * self.kind.tile + run * self.kind.run_tokens
        pattern = plan.pattern_of_item(self.item, self.kind)
        return self.not_before_window(plan.token_of(first, pattern, self.kind.geometry))

    def last_run(self, end: Scalar) -> Scalar:
        """The first token of the last run that may be read, where no row sees tokens from `end` on."""
        geometry, pattern, size = self.kind.geometry, plan.pattern_of_item(self.item, self.kind), self.kind.run_tokens
        last_token = plan.token_of(plan.number_of(end, pattern, geometry) - 1, pattern, geometry)
        return lax.max(lax.div(last_token, jnp.int32(size)) * size, jnp.int32(0))

    def not_before_window(self, token: Scalar) -> Scalar:
        """The first token of the run that is read for the one that begins with `token`.

        An item's tiles may begin with a sparse block of which only the end is in the window. Of its other runs none is
        read, but the window's first one instead.
        """
        problem, size = self.kind.geometry.problem, jnp.int32(self.kind.run_tokens)
        if problem.block_sparse is None or problem.sliding_window is None:
            return token
        return lax.max(token, lax.div(self.item.begin, size) * size)

    # Tiles of the cache, of 8 bits.

    def _convert_runs(self, number: Scalar, first_run: Scalar, blocks: tuple[Scalar, ...]) -> None:
        """Converts a warp's runs of a tile, and starts to copy those in these blocks, which take their place."""
        stage = lax.rem(self.tiles_before + number, jnp.int32(self.kind.stages))
        is_reused = self.tiles_before + number >= self.kind.stages
        first_row, following = self._first_own_row(), number + self.kind.raw_stages
        for cache in self._caches:
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
            def copy_next(cache=cache, raw_smem=raw_smem, arrived=arrived):
                self._copy_own_runs(cache, following, raw_smem, arrived, first_run, blocks)

    def _zero_own_rows(self, number: Scalar, tile_smem: Ref, first_row: Scalar) -> None:
        """Zeroes the rows of a warp's runs of a tile of V that are not to be kept."""
        span = plan.span_of(self.item, number, self.kind)
        tiles.zero_rows(tile_smem, self._kept(span), first_row, self.kind)

    def _copy_raw_runs(self, number: Scalar, first_run: Scalar, blocks: tuple[Scalar, ...]) -> None:
        """Starts to copy a warp's runs of a tile, which are in these blocks, to where they are converted from."""
        for cache in self._caches:
            self._copy_own_runs(cache, number, *self._raw(cache, number), first_run, blocks)

    def _convert(self, tile: _Tile) -> None:
        """Converts a tile that has been copied, and starts to copy the one that takes its place."""
        following = tile.number + self.kind.raw_stages
        is_next = following < self.item.cached_tiles
        for cache in self._caches:
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
            pl.when(is_next)(functools.partial(self._load_raw, cache, following))

    def _load_raw(self, cache: _Cache, number: Scalar) -> None:
        """Starts to copy a tile to where it is converted from."""
        raw_smem, arrived = self._raw(cache, number)
        self._copy_runs(cache, raw_smem, arrived, plan.span_of(self.item, number, self.kind))

    def _raw(self, cache: _Cache, number: Scalar) -> tuple[Ref, Ref]:
        """Where a tile is converted from, and the barrier that says that it is there."""
        tile, stages = self.kind.tile, self.kind.raw_stages
        stage = lax.rem(self.tiles_before + number, jnp.int32(stages))
        raw_smem = cache.raw
        if stages > 1:
            raw_smem = raw_smem.at[pl.ds(pl.multiple_of(stage * tile, tile), tile)]
        return raw_smem, cache.raw_ready.at[stage]

    # What does not come by TMA.

    def _load_new(self, tile: _Tile) -> None:
        """Copies a tile of new tokens, which begins at any row of their arrays: TMA does not take that."""
        first_rows = [self.item.first_token + (start - self.item.position) for start in tile.span.starts]
        for cache in self._caches:
            self._wait_for_stage(cache, tile)
            tile_smem = tile_of(cache.ring.tiles, tile.stage, self.kind)
            tiles.load_new(cache.new_gmem, tile_smem, self.item, first_rows, tile.kept, self.kind)
            rows.finish_copies()
            self._arrive(cache, tile)

    def _load_scales(self, tile: _Tile) -> None:
        """Copies the scales of a tile's slots, which the softmax reads: they stay until the tile of V is consumed."""
        tables_gmem, starts = self.refs.inputs_gmem.block_tables, tile.span.starts
        values = self._caches[1]
        pl.when(tile.is_reused)(lambda: plgpu.barrier_wait(values.ring.consumed.at[tile.stage]))
        for cache in self._caches:
            if cache.ring.slot_scales is not None:
                scales_smem = scales_of(cache.ring, tile.stage, self.kind)
                tiles.load_scales(cache.scale_gmem, tables_gmem, scales_smem, self.item, starts, tile.kept, self.kind)
                plgpu.barrier_arrive(cache.ring.ready.at[tile.stage])


def tile_of(ring_smem: Ref, stage: Scalar, kind: ItemKind) -> Ref:
    """The tile of a ring in a stage. The place of one tile of wide items may hold several tiles of thin ones."""
    tile, pieces = kind.tile, kind.pieces
    if pieces == 1:
        return ring_smem.at[stage]
    first = lax.rem(stage, jnp.int32(pieces)) * tile  # Mosaic sees that a product is a multiple
    return ring_smem.at[lax.div(stage, jnp.int32(pieces)), pl.ds(first, tile)]


def scales_of(ring: TileRing, stage: Scalar, kind: ItemKind) -> Ref | None:
    """The scales of the slots of a tile, [tile], if each slot has one."""
    if ring.slot_scales is None:
        return None
    return ring.slot_scales.at[pl.ds(stage * kind.tile, kind.tile)]


def _as_warps(function: Any) -> None:
    """Runs a function in each warp of the warpgroup."""
    pl.kernel(function, mesh=plgpu.WarpMesh(axis_name="warp"))()  # pyright: ignore[reportCallIssue]
