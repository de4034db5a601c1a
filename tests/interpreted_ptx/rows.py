"""Rows of queries and of results."""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS


def _row_of_query(row, rows, geometry):
    """For each row of a warpgroup: whether it has a token, and its token and query head."""
    group = geometry.problem.group
    token, of_group = row // group, row % group
    exists = (token < rows.num_tokens) & (row < geometry.half_tokens * group)
    return exists, rows.first_token + token, rows.kv_head * group + of_group


def load_queries(query_gmem, query_smem, rows, kind):
    exists, token, query_head = _row_of_query(jnp.arange(WGMMA_ROWS), rows, kind.geometry)
    values = query_gmem[...][jnp.where(exists, token, 0), query_head]
    values = jnp.where(exists[:, None], values, jnp.zeros_like(values))
    query_smem[...] = lax.bitcast_convert_type(values, query_smem.dtype)
    plgpu.commit_smem()


def prefetch_queries(query_gmem, rows, kind):
    """Changes no result."""


def read_queries(query_gmem, rows, geometry):
    exists, token, query_head = _row_of_query(jnp.arange(WGMMA_ROWS), rows, geometry)
    values = query_gmem[...][jnp.where(exists, token, 0), query_head]
    return jnp.where(exists[:, None], values, jnp.zeros_like(values))


def write_queries(query, divisors, query_smem, divisors_smem, geometry):
    query_smem[...] = lax.bitcast_convert_type(query, query_smem.dtype)
    if divisors is not None:
        divisors_smem[...] = divisors


def copy_words(gmem, smem):
    smem[...] = gmem[...]


def finish_copies():
    plgpu.commit_smem()


def see_copies():
    plgpu.commit_smem()


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
