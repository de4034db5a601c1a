"""Copies the runs of a tile from a cache. The loading warpgroup finds them through the block table (TMA)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.launch import as_warps
from paged_jax.kernels.mosaic_gpu.ragged import plan
from paged_jax.kernels.mosaic_gpu.ragged.kinds import LOADING_WARPS, ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.plan import Item, Span
from paged_jax.kernels.mosaic_gpu.ragged.ptx import blocks as ptx_blocks
from paged_jax.kernels.mosaic_gpu.ragged.ptx.tiles import Range
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref, Refs, TileRing

Blocks = tuple[Scalar, ...]  # the block of each of a warp's runs of a tile; if lanes hold them, a tuple of one scalar
TileWork = Callable[[Scalar, Scalar, Blocks, Blocks], None]
"""The work of a warp for one tile.

Arguments: the tile, the warp's first run, and the blocks of a tile ahead and of the tile before that one.
"""


class Cache(NamedTuple):
    """The sources and the destination of tiles of K, or of V."""

    is_keys: bool
    cache_gmem: Ref
    new_gmem: Ref
    scale_gmem: Ref
    ring: TileRing  # with the barriers for the item's kind


class Tile(NamedTuple):
    """A tile of an item."""

    number: Scalar
    stage: Scalar
    is_reused: Scalar  # whether the stage held another tile before
    span: Span
    kept: Range  # rows of V that stay: from the first visible token to the last token with a value


@dataclass(frozen=True)
class TileCopies:
    """Copies runs of an item's tiles.

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

    @property
    def _caches(self) -> tuple[Cache, Cache]:
        """K and V."""
        inputs, smem, barriers = self.refs.inputs_gmem, self.refs.smem, self.refs.smem.barriers(self.kind)
        keys = Cache(
            is_keys=True,
            cache_gmem=inputs.key_cache,
            new_gmem=inputs.new_key,
            scale_gmem=inputs.options.k_scale,
            ring=smem.keys._replace(consumed=barriers.keys_consumed, ready=barriers.keys_ready),
        )
        values = Cache(
            is_keys=False,
            cache_gmem=inputs.value_cache,
            new_gmem=inputs.new_value,
            scale_gmem=inputs.options.v_scale,
            ring=smem.values._replace(consumed=barriers.values_consumed, ready=barriers.values_ready),
        )
        return keys, values

    def _wait_for_stage(self, cache: Cache, tile: Tile) -> None:
        """Waits until the previous tile of the stage is consumed."""
        if cache.is_keys or not self.kind.geometry.scales_slots:  # for V, `_load_scales` waits
            pl.when(tile.is_reused)(lambda: plgpu.barrier_wait(cache.ring.consumed.at[tile.stage]))

    def _arrive(self, cache: Cache, tile: Tile) -> None:
        """Signals a tile that this warpgroup has written."""
        for _ in range(self.kind.arrivals_per_tile):
            plgpu.barrier_arrive(cache.ring.ready.at[tile.stage])

    def _first_own_row(self) -> Scalar:
        """The first row of a tile that this warp converts or zeroes."""
        return lax.axis_index("warp") * self.kind.rows_of_warp

    def _kept(self, span: Span) -> Range:
        """The rows of a tile of V that stay. Others become 0: their weights are 0, but 0 * NaN is NaN."""
        begin, end = (plan.rank_of(x, span.pattern, self.kind.geometry) for x in (span.begin, span.values_end))
        return Range(begin - span.rank, end - span.rank)

    def _copy_runs(self, cache: Cache, tile_smem, ready, span: Span) -> None:
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

        as_warps(copy_in_turn)

    def _run_gmem(self, cache: Cache, block: Scalar, token: Scalar) -> Ref:
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

    def _for_tiles_by_warps(self, begin: Scalar, end: Scalar, ahead: int, do: TileWork) -> None:
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

        as_warps(do_as_warp)

    def _blocks_of(self, number: Scalar, first_run: Scalar) -> Blocks:
        """The blocks that hold a warp's runs of a tile."""
        tables_gmem, block_size = self.refs.inputs_gmem.block_tables, jnp.int32(self.kind.geometry.problem.block_size)
        tokens = (self._first_read(number, first_run + j) for j in range(self.kind.runs_of_warp))
        columns = [lax.div(token, block_size) for token in tokens]
        if self.kind.geometry.lanes_hold_blocks:
            return (ptx_blocks.of_lanes(tables_gmem, self.item.seq, columns),)
        return tuple(tables_gmem[self.item.seq, column] for column in columns)

    def _of_runs(self, blocks: Blocks) -> Iterator[Scalar]:
        """The block of each of a warp's runs. Read from a lane only when asked for, it takes a register for a while."""
        if self.kind.geometry.lanes_hold_blocks:
            yield from (ptx_blocks.of_run(blocks[0], run) for run in range(self.kind.runs_of_warp))
        else:
            yield from blocks

    def _copy_own_runs(self, cache: Cache, number: Scalar, tile_smem: Ref, ready: Ref, first_run, blocks) -> None:
        """Copies a warp's runs, which lie in these blocks, to their rows of the tile."""
        size = self.kind.run_tokens
        for j, block in enumerate(self._of_runs(blocks)):
            run_gmem = self._run_gmem(cache, block, self._first_read(number, first_run + j))
            plgpu.copy_gmem_to_smem(run_gmem, tile_smem.at[pl.ds((first_run + j) * size, size)], ready)

    def _prefetch_own_runs(self, number: Scalar, first_run: Scalar, blocks: Blocks) -> None:
        """Prefetches a warp's runs of a tile into L2, if the item has that tile."""

        @pl.when(number < self.item.cached_tiles)
        def prefetch():
            for cache in self._caches:
                for j, block in enumerate(self._of_runs(blocks)):
                    token = self._first_read(number, first_run + j)
                    plgpu.async_prefetch(self._run_gmem(cache, block, token))

    def _first_read(self, tile: Scalar, run: Scalar) -> Scalar:
        """The first token that is read for a run of a tile. Past the end, the last run is read again, from L2."""
        first = self.item.origin + tile * self.kind.tile + run * self.kind.run_tokens
        pattern = plan.pattern_of_item(self.item, self.kind)
        token = self.not_before_window(plan.token_of(first, pattern, self.kind.geometry))
        return lax.min(token, self.last_run(self.item.values_end))

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


def tile_of(ring_smem: Ref, stage: Scalar, kind: ItemKind) -> Ref:
    """The tile in a stage of a ring. The memory of one wide tile may hold several thin tiles."""
    tile, per_wide_tile = kind.tile, kind.tiles_per_wide_tile
    if per_wide_tile == 1:
        return ring_smem.at[stage]
    first = lax.rem(stage, jnp.int32(per_wide_tile)) * tile  # a product shows Mosaic that `tile` divides it
    return ring_smem.at[lax.div(stage, jnp.int32(per_wide_tile)), pl.ds(first, tile)]
