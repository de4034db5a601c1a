"""Work on tiles of K and V, except copies by TMA."""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp


def load_new(new_gmem, tile_smem, item, first_rows, kept, kind):
    row = jnp.arange(kind.tile)
    is_kept = (row >= kept.begin) & (row < kept.end)
    new_row = jnp.repeat(jnp.stack(first_rows), kind.segment_tokens) + row
    values = new_gmem[...][jnp.where(is_kept, new_row, 0), item.kv_head]
    tile_smem[...] = jnp.where(is_kept[:, None], values, jnp.zeros_like(values))


def zero_rows(tile_smem, kept, first_row, kind):
    own = pl.ds(first_row, kind.rows_of_warp)
    row = first_row + jnp.arange(kind.rows_of_warp)[:, None]
    rows = tile_smem[own]
    tile_smem[own] = jnp.where((row >= kept.begin) & (row < kept.end), rows, jnp.zeros_like(rows))
    plgpu.commit_smem()


def zero_rows_from(tile_smem, end, kind):
    rows = tile_smem[...]
    tile_smem[...] = jnp.where(jnp.arange(kind.tile)[:, None] < end, rows, jnp.zeros_like(rows))
    plgpu.commit_smem()


def convert_rows(raw_smem, tile_smem, first_row, kind):
    own = pl.ds(first_row, kind.rows_of_warp)
    tile_smem[own] = raw_smem[own].astype(tile_smem.dtype)
    plgpu.commit_smem()


def convert_tile(raw_smem, tile_smem, kind):
    tile_smem[...] = raw_smem[...].astype(tile_smem.dtype)


def load_scales(scale_gmem, tables_gmem, scales_smem, item, starts, kept, kind):
    block_size = kind.geometry.problem.block_size
    row = jnp.arange(kind.tile)
    is_kept = (row >= kept.begin) & (row < kept.end)
    token = jnp.where(is_kept, jnp.repeat(jnp.stack(starts), kind.segment_tokens) + row, 0)
    block = jnp.where(is_kept, tables_gmem[...][item.seq, token // block_size], 0)
    scale = scale_gmem[...][block, item.kv_head, token % block_size]
    scales_smem[...] = jnp.where(is_kept, scale, 0)
