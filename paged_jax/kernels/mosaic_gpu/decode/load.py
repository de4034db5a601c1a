"""The loading warpgroup: it copies runs of tokens, through the block table, into the rings of tiles.

Each warp copies a quarter of a tile's runs, so that the first tile arrives sooner. One thread copies all runs that the
warps cannot share, and those of a cluster whose splits have several tiles (benchmarks/LOG.md, "A program of decode").
"""

import itertools
from collections.abc import Sequence

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.plan import Split, for_each_tile
from paged_jax.kernels.mosaic_gpu.decode.refs import Refs
from paged_jax.kernels.mosaic_gpu.decode.tiles import Tiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.plain import tokens_of_run
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.launch import as_warps
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP
from paged_jax.kernels.mosaic_gpu.hopper.memory import Slice


def load_split(split: Split, tiles_before: Scalar, refs: Refs, geometry: Geometry, tiles: Tiles) -> None:
    """Copies a split's tiles into the rings, after `tiles_before` earlier tiles."""
    own, rest = divmod(geometry.runs_per_tile, WARPGROUP // WARP)
    if rest or (geometry.tuning.merges_in_cluster and not geometry.splits_have_one_tile):
        load_runs(range(geometry.runs_per_tile), split, tiles_before, refs, geometry, tiles)
        return

    def load_own_runs():
        first = lax.axis_index("warp") * own
        load_runs([first + i for i in range(own)], split, tiles_before, refs, geometry, tiles)

    as_warps(load_own_runs)


def load_runs(
    runs: Sequence[Scalar], split: Split, tiles_before: Scalar, refs: Refs, geometry: Geometry, tiles: Tiles
) -> None:
    """Copies these runs of all tiles of a split."""
    last = lax.max(lax.div(split.end - 1, jnp.int32(geometry.run_tokens)) * geometry.run_tokens, jnp.int32(0))

    def sources_of_tile(tile):
        first = split.origin + tile * geometry.tile_tokens
        return sources_of(runs, split.item.seq, first, last, split.end, refs, geometry)

    def load_tile(i, sources):
        next_sources = sources_of_tile(i + 1)  # these loads overlap with the wait for a stage
        copy_runs(runs, sources, split.item.kv_head, tiles_before + i, refs, geometry, tiles)
        return next_sources

    for_each_tile(load_tile, split.num_tiles, sources_of_tile(0), geometry)


def sources_of(
    runs: Sequence[Scalar],
    seq: Scalar,
    first: Scalar,
    last: Scalar,
    end: Scalar,
    refs: Refs,
    geometry: Geometry,
) -> tuple[tuple[Scalar, Scalar], ...]:
    """The block of each run of the tile that begins at token `first`, and the run's offset in it.

    From token `last` on, the last run repeats, and is masked. If `end` is 0, there is no block.
    """
    block_size = jnp.int32(geometry.problem.block_size)
    tokens = [lax.min(first + run * geometry.run_tokens, last) for run in runs]
    blocks = [refs.inputs_gmem.block_tables[seq, lax.div(token, block_size)] for token in tokens]
    blocks = [jnp.where(end > 0, block, 0) for block in blocks]
    return tuple((block, lax.rem(token, block_size)) for block, token in zip(blocks, tokens, strict=True))


def copy_runs(
    runs: Sequence[Scalar],
    sources: tuple[tuple[Scalar, Scalar], ...],
    kv_head: Scalar,
    number: Scalar,
    refs: Refs,
    geometry: Geometry,
    tiles: Tiles,
) -> None:
    """Copies runs of a tile into the rings, once their stages have been read. `number` tiles came before."""
    size, copies = geometry.run_tokens, geometry.copies_per_run
    inputs, options, smem = refs.inputs_gmem, refs.inputs_gmem.options, refs.smem
    heads = [kv_head * copies + i for i in range(copies)] if copies > 1 else [kv_head]
    key_rows = value_rows = heads
    if geometry.problem.interleaved:
        key_rows, value_rows = [2 * head for head in heads], [2 * head + 1 for head in heads]
    caches = (
        (inputs.key_cache, key_rows, options.k_scale, smem.keys, (Slice(0, geometry.problem.head_size),)),
        (inputs.value_cache, value_rows, options.v_scale, smem.values, geometry.head_slices),
    )
    if geometry.pairs:
        caches = ((inputs.key_cache, [kv_head], options.k_scale, smem.keys, (Slice(0, geometry.pair_size),)),)
    stage = lax.rem(number, jnp.int32(geometry.tuning.stages))
    for cache_gmem, rows, scale_gmem, ring, slices in caches:

        @pl.when(number >= geometry.tuning.stages)
        def wait_for_stage(ring=ring):
            plgpu.barrier_wait(ring.consumed.at[stage])

        for run, (block, offset) in zip(runs, sources, strict=True):
            for (copy, row), part in itertools.product(enumerate(rows), zip(ring.tiles, slices, strict=True)):
                ring_smem, head_slice = part
                run_gmem = tiles.run_gmem(cache_gmem, block, offset, row, head_slice)
                run_smem = ring_smem.at[stage, tiles.run_rows(run * copies + copy)]
                plgpu.copy_gmem_to_smem(run_gmem, run_smem, ring.ready.at[stage])
            if ring.slot_scales is not None:
                scales_gmem = scale_gmem.at[block, kv_head, tokens_of_run(offset, geometry)]
                scales_smem = ring.slot_scales.at[stage, run, pl.ds(0, size)]
                plgpu.copy_gmem_to_smem(scales_gmem, scales_smem, ring.ready.at[stage])


def drain_rings(num_tiles: Scalar, refs: Refs, geometry: Geometry) -> None:
    """Waits until all tiles are read. Each barrier must end as it began, and new tokens may be written only then."""
    stages = geometry.tuning.stages

    @pl.loop(lax.max(num_tiles - stages, jnp.int32(0)), num_tiles)
    def wait_for_tile(i):
        plgpu.barrier_wait(refs.smem.keys.consumed.at[lax.rem(i, jnp.int32(stages))])
        if not geometry.pairs:
            plgpu.barrier_wait(refs.smem.values.consumed.at[lax.rem(i, jnp.int32(stages))])
