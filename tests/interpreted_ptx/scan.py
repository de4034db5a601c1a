"""Sums and orders over the threads of a warpgroup."""

import jax.experimental.pallas as pl
import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP


def gather(values_gmem, indices, last):
    return values_gmem[...][jnp.minimum(indices, last)]


def sums_before(arrays, sums_smem, first):
    for row, x in arrays.items():
        before = sums_smem[row, first] if first else jnp.zeros((), x.dtype)
        sums_smem[row, pl.ds(first, WARPGROUP)] = before + jnp.cumsum(x, dtype=x.dtype) - x
        sums_smem[row, first + WARPGROUP] = before + x.sum(dtype=x.dtype)


def largest_first(values, values_smem, order_smem):
    order_smem[...] = jnp.argsort(-values, stable=True)
