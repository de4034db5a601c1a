"""The loading warpgroup: it copies queries and, through the block table, the latents of tiles."""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import QUERY_ROWS
from paged_jax.kernels.mosaic_gpu.mla.geometry import STAGES, TILE, Geometry
from paged_jax.kernels.mosaic_gpu.mla.plan import Split
from paged_jax.kernels.mosaic_gpu.mla.refs import Refs


def load_split(split: Split, counts: tuple[Scalar, Scalar], refs: Refs, geometry: Geometry) -> None:
    """Copies a split's query and tiles. `counts` are the numbers of tiles and of queries that were copied before.

    The program's first query is copied before its tiles, because copies arrive in this order. A later query is copied
    after its split's first tiles, because the previous results must leave the query's shared memory first.
    """
    tiles_before, queries_before = counts
    early, is_first = lax.min(split.num_tiles, jnp.int32(STAGES)), queries_before == 0

    def load_query():
        rows = pl.ds(pl.multiple_of(split.row, QUERY_ROWS), geometry.block_rows)
        query_smem = refs.smem.query.at[pl.ds(0, geometry.block_rows)]
        plgpu.copy_gmem_to_smem(refs.inputs_gmem.query.at[rows], query_smem, refs.smem.query_ready)

    def load(begin, end):
        lax.fori_loop(begin, end, lambda i, runs: _load_tile(i, runs, split, tiles_before, refs, geometry),
                      _runs_of(begin, split, refs, geometry))  # fmt: skip

    pl.when(is_first)(load_query)
    load(jnp.int32(0), early)

    @pl.when(~is_first)
    def load_later_query():
        plgpu.barrier_wait(refs.smem.query_consumed)
        load_query()

    load(early, split.num_tiles)


def drain(counts: tuple[Scalar, Scalar], refs: Refs) -> None:
    """Waits until all tiles and queries have been read: each barrier must end as it began."""
    num_tiles, num_queries = counts

    @pl.loop(lax.max(num_tiles - STAGES, jnp.int32(0)), num_tiles)
    def wait_for_tile(i):
        for consumed in refs.smem.tile_consumed:
            plgpu.barrier_wait(consumed.at[lax.rem(i, jnp.int32(STAGES))])

    pl.when(num_queries > 0)(lambda: plgpu.barrier_wait(refs.smem.query_consumed))


def _runs_of(tile: Scalar, split: Split, refs: Refs, geometry: Geometry) -> tuple:
    """The block of each run of a tile, and the offset in it. Runs past the end repeat the last run, and are masked."""
    size, block_size = geometry.run_tokens, jnp.int32(geometry.problem.block_size)
    last = lax.max(lax.div(split.end - 1, jnp.int32(size)) * size, jnp.int32(0))
    first = (split.tile + tile) * TILE
    tokens = [lax.min(first + i, last) for i in range(0, TILE, size)]
    seq = jnp.where(split.end > 0, split.seq, 0)  # padding rows belong to no sequence
    blocks = [refs.inputs_gmem.block_tables[seq, lax.div(token, block_size)] for token in tokens]
    blocks = [jnp.where(split.end > 0, block, 0) for block in blocks]
    return tuple((block, lax.rem(token, block_size)) for block, token in zip(blocks, tokens, strict=True))


def _load_tile(i: Scalar, runs: tuple, split: Split, tiles_before: Scalar, refs: Refs, geometry: Geometry) -> tuple:
    """Copies the runs of a tile, and returns the runs of the next tile."""
    next_runs = _runs_of(i + 1, split, refs, geometry)  # these loads are in flight while this tile waits for its stage
    stage, size, smem = lax.rem(tiles_before + i, jnp.int32(STAGES)), geometry.run_tokens, refs.smem
    is_later = tiles_before + i >= STAGES
    of_parts = geometry.tile_parts, smem.tiles, smem.tile_ready, smem.tile_consumed
    for part, ring_smem, ready, consumed in zip(*of_parts, strict=True):
        pl.when(is_later)(lambda consumed=consumed: plgpu.barrier_wait(consumed.at[stage]))
        for j, (block, offset) in enumerate(runs):
            tokens = slice(None) if size == geometry.problem.block_size else pl.ds(pl.multiple_of(offset, size), size)
            run_gmem = refs.inputs_gmem.latent_cache.at[block, tokens, pl.ds(*part)]
            plgpu.copy_gmem_to_smem(run_gmem, ring_smem.at[stage, pl.ds(j * size, size)], ready.at[stage])
    return next_runs
