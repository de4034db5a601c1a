"""Arrays with an element for each lane of a warp: here four times the same 32 elements."""

import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP


def iota():
    return jnp.arange(WARPGROUP, dtype=jnp.int32)


def gather(values_gmem, indices, last):
    return values_gmem[...][jnp.minimum(indices, last)]


def sums_of_warp(values):
    return jnp.tile(jnp.cumsum(values[:WARP], dtype=values.dtype), WARPGROUP // WARP)


def lane_of(values, lane):
    return values[lane]


def largest(values):
    return values[:WARP].max()


def number_at_most(values, limit):
    return (values[:WARP] <= limit).sum(dtype=jnp.int32)
