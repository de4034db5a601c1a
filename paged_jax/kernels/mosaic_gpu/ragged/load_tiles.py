"""The loading warpgroup fills the rings with a work item's tiles.

It copies a tile of the cache run by run through the block table (TMA). A tile of 8 bits is copied to raw shared memory,
and converted from there into the ring. In `prefix_attention` an item's last tiles come from the arrays of new tokens.

Each warp loads its own runs of most tiles, one tile after the other, without waiting for the other warps. The warps
work together only on tiles that need more than copies.
"""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.launch import as_warps
from paged_jax.kernels.mosaic_gpu.ragged import plan
from paged_jax.kernels.mosaic_gpu.ragged.convert_tiles import TileConversions
from paged_jax.kernels.mosaic_gpu.ragged.copy_tiles import Blocks, Tile, tile_of
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.ptx import rows, tiles
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref, TileRing


class TileLoader(TileConversions):
    """Loads the tiles of an item."""

    def load(self, number: Scalar) -> None:
        """Copies one tile of K and of V into the rings."""
        geometry = self.kind.geometry
        stage = lax.rem(self.tiles_before + number, jnp.int32(self.kind.stages))
        is_reused = self.tiles_before + number >= self.kind.stages
        span = plan.span_of(self.item, number, self.kind)
        tile = Tile(number, stage, is_reused, span, self._kept(span))
        if geometry.scales_slots:
            self._load_scales(tile)
        load_cached = functools.partial(self._convert if geometry.converts_tiles else self._copy, tile)
        if geometry.problem.prefix:
            pl.when(span.is_new)(lambda: self._load_new(tile))
            pl.when(~span.is_new)(load_cached)
        else:
            load_cached()

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

        as_warps(do_as_warp)

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

    def _copy(self, tile: Tile) -> None:
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
            as_warps(lambda: tiles.zero_rows(values_smem, tile.kept, self._first_own_row(), self.kind))
            self._arrive(values, tile)

    def _copy_whole_tile(self, number: Scalar, first_run: Scalar, blocks: Blocks, _: Blocks) -> None:
        """Copies a warp's runs of a tile, which lie in these blocks."""
        stage = lax.rem(self.tiles_before + number, jnp.int32(self.kind.stages))
        for cache in self._caches:
            is_reused = self.tiles_before + number >= self.kind.stages
            pl.when(is_reused)(lambda cache=cache: plgpu.barrier_wait(cache.ring.consumed.at[stage]))
            tile_smem = tile_of(cache.ring.tiles, stage, self.kind)
            self._copy_own_runs(cache, number, tile_smem, cache.ring.ready.at[stage], first_run, blocks)

    def _load_new(self, tile: Tile) -> None:
        """Copies a tile of new tokens. It may begin at any row of their arrays, which TMA does not support."""
        first_rows = [self.item.first_token + (start - self.item.position) for start in tile.span.starts]
        for cache in self._caches:
            self._wait_for_stage(cache, tile)
            tile_smem = tile_of(cache.ring.tiles, tile.stage, self.kind)
            tiles.load_new(cache.new_gmem, tile_smem, self.item, first_rows, tile.kept, self.kind)
            rows.finish_copies()
            self._arrive(cache, tile)

    def _load_scales(self, tile: Tile) -> None:
        """Copies the scales of a tile's slots. They stay in shared memory until the tile of V is consumed."""
        tables_gmem, starts = self.refs.inputs_gmem.block_tables, tile.span.starts
        values = self._caches[1]
        pl.when(tile.is_reused)(lambda: plgpu.barrier_wait(values.ring.consumed.at[tile.stage]))
        for cache in self._caches:
            if cache.ring.slot_scales is not None:
                scales_smem = scales_of(cache.ring, tile.stage, self.kind)
                tiles.load_scales(cache.scale_gmem, tables_gmem, scales_smem, self.item, starts, tile.kept, self.kind)
                plgpu.barrier_arrive(cache.ring.ready.at[tile.stage])


def scales_of(ring: TileRing, stage: Scalar, kind: ItemKind) -> Ref | None:
    """The scales of a tile's slots, [tile], or None."""
    if ring.slot_scales is None:
        return None
    return ring.slot_scales.at[pl.ds(stage * kind.tile, kind.tile)]
