"""Sums over the threads of a warpgroup."""

import jax.experimental.pallas as pl
import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP


def gather(values_gmem, indices, last):
    return values_gmem[...][jnp.minimum(indices, last)]


def sums_before(arrays, sums_smem, first, packs):
    for row, x in arrays.items():
        before = sums_smem[row, first] if first else jnp.zeros((), x.dtype)
        sums_smem[row, pl.ds(first, WARPGROUP)] = before + jnp.cumsum(x, dtype=x.dtype) - x
        sums_smem[row, first + WARPGROUP] = before + x.sum(dtype=x.dtype)


def extend(rows, sums_smem):
    count = sums_smem.shape[1] - 1 - 4 - WARPGROUP
    for row in rows:
        sums_smem[row, pl.ds(WARPGROUP + 1, count)] = jnp.full(count, sums_smem[row, WARPGROUP])


def store(arrays, arrays_smem, first):
    for row, x in arrays.items():
        arrays_smem[row, pl.ds(first, WARPGROUP)] = x


def load(arrays_smem, row, first):
    return arrays_smem[row, pl.ds(first, WARPGROUP)]


def meet():
    pass


def totals(arrays, sums_smem):
    return [x.sum().astype(jnp.float32) for x in arrays.values()]


def used(rows, sums_smem):
    return jnp.int32(WARPGROUP)


def copy_columns(from_smem, to_gmem, count):
    to_gmem[...] = from_smem[..., :count]


def number_at_most(sums_ref, row, last, number):
    sums_ref = sums_ref.at[row] if len(sums_ref.shape) > 1 else sums_ref
    return (sums_ref[1 : last + 1] <= number).sum(dtype=jnp.int32)
