"""The loading warpgroup converts tiles of 8 bits: it copies them to raw shared memory, and from there into the ring."""

import functools
from dataclasses import dataclass

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.launch import as_warps
from paged_jax.kernels.mosaic_gpu.ragged import plan
from paged_jax.kernels.mosaic_gpu.ragged.copy_tiles import Blocks, Cache, Tile, TileCopies, tile_of
from paged_jax.kernels.mosaic_gpu.ragged.ptx import tiles
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref


@dataclass(frozen=True)
class TileConversions(TileCopies):
    """Converts an item's tiles."""

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

    def _convert_runs(self, number: Scalar, first_run: Scalar, blocks: Blocks, earlier: Blocks) -> None:
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

    def _zero_own_rows(self, number: Scalar, tile_smem: Ref, first_row: Scalar) -> None:
        """Zeroes the rows of a warp's runs of V that are not kept."""
        span = plan.span_of(self.item, number, self.kind)
        tiles.zero_rows(tile_smem, self._kept(span), first_row, self.kind)

    def _copy_raw_runs(self, values: int, number: Scalar, first_run: Scalar, blocks: Blocks, _: Blocks) -> None:
        """Starts the copies of a warp's raw runs of a tile, which lie in these blocks; of V only for `values` tiles."""

        def copy(cache: Cache):
            self._copy_own_runs(cache, number, *self._raw(cache, number), first_run, blocks)

        keys_cache, values_cache = self._caches
        copy(keys_cache)
        if self.kind.raw_stages % 2 == 0:
            copy(values_cache)
        else:
            pl.when(number < values)(lambda: copy(values_cache))

    def _following(self, cache: Cache) -> tuple[Cache, int]:
        """The cache whose tile overwrites a raw tile of this cache, and how many tiles it is ahead."""
        keys, values = self._caches
        stages = self.kind.raw_stages
        if stages % 2 == 0:
            return cache, stages // 2
        return (values, stages // 2) if cache.is_keys else (keys, (stages + 1) // 2)

    def _convert(self, tile: Tile) -> None:
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

            as_warps(convert_own)
            self._arrive(cache, tile)
            pl.when(is_next)(functools.partial(self._load_raw, next_cache, tile.number + ahead))

    def _load_raw(self, cache: Cache, number: Scalar) -> None:
        """Starts the copy of a raw tile."""
        raw_smem, arrived = self._raw(cache, number)
        self._copy_runs(cache, raw_smem, arrived, plan.span_of(self.item, number, self.kind))

    def _raw(self, cache: Cache, number: Scalar) -> tuple[Ref, Ref]:
        """The shared memory of a raw tile, and the barrier that signals its arrival."""
        tile, stages = self.kind.tile, self.kind.raw_stages
        is_values = 0 if cache.is_keys else 1
        stage = is_values if stages == 2 else lax.rem(2 * (self.tiles_before + number) + is_values, jnp.int32(stages))
        first = stage * tile  # a product shows Mosaic that `tile` divides it
        raw_smem = self.refs.smem.raw.rows.at[pl.ds(first, tile)]
        return raw_smem, self.refs.smem.barriers(self.kind).raw_ready.at[stage]
