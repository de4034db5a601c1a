"""Rows of results."""

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.ragged.ptx.rows import ROWS_OF_WARP


def store_rows(smem, gmem, rows, kind):
    out = lax.bitcast_convert_type(smem.out[...], gmem.out.dtype)
    _store(out, smem.lse[...], gmem, rows, kind.geometry.problem.group)


def _store(out, lse, gmem, rows, group):

    @pl.loop(0, rows.num_tokens)
    def _(token):
        heads = pl.ds(rows.kv_head * group, group)
        gmem.out[rows.first_token + token, heads] = lax.dynamic_slice_in_dim(out, token * group, group)
        gmem.lse[rows.first_token + token, heads] = lax.dynamic_slice_in_dim(lse, token * group, group)


def store_from_registers(out, lse, gmem, rows, geometry):
    _store(out, lse, gmem, rows, geometry.problem.group)


def clear_rows(gmem, first_token, worker, workers, problem):
    @pl.loop(first_token + worker, problem.num_tokens, step=workers)
    def _(token):
        gmem.out[token] = jnp.zeros(gmem.out.shape[1:], gmem.out.dtype)
        gmem.lse[token] = jnp.full(gmem.lse.shape[1:], -jnp.inf, jnp.float32)


def store_partial(partial_gmem, out, num_tokens, geometry):
    old = partial_gmem[...]
    exists = jnp.arange(WGMMA_ROWS)[:, None] < num_tokens * geometry.problem.group
    partial_gmem[...] = jnp.where(exists, out, old)


def hand_over(out, places_smem, num_tokens, geometry):
    """Two arrays of 16 bits hold the bits of one of 32. Rows of warps without a query hold any value, here NaN."""
    rows = -(-num_tokens * geometry.problem.group // ROWS_OF_WARP) * ROWS_OF_WARP
    out = jnp.where(jnp.arange(WGMMA_ROWS)[:, None] < rows, out, jnp.nan)
    halves = lax.bitcast_convert_type(out, jnp.uint16)
    for i in range(2):
        places_smem.at[i][...] = lax.bitcast_convert_type(halves[..., i], places_smem.dtype)


def take_over(out, rescale, other_rescale, places_smem, num_tokens, geometry):
    halves = [lax.bitcast_convert_type(places_smem.at[i][...], jnp.uint16) for i in range(2)]
    other = lax.bitcast_convert_type(jnp.stack(halves, axis=-1), jnp.float32)
    return out * rescale[:, None] + other * other_rescale[:, None]
