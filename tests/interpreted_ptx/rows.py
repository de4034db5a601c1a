"""Rows of queries."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS


def _row_of_query(row, rows, geometry):
    """For each row of a warpgroup: whether it has a token, and its token and query head."""
    group = geometry.problem.group
    token, of_group = row // group, row % group
    exists = (token < rows.num_tokens) & (row < geometry.band_tokens * group)
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
