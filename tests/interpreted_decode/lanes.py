"""What the lanes of a warp have together. All warps have the same elements."""

import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP


def iota():
    return jnp.arange(WARPGROUP, dtype=jnp.int32)


def gather(values_gmem, indices, last):
    return values_gmem[...][jnp.minimum(indices, last)]


def sums(x):
    return jnp.cumsum(x.reshape(-1, WARP), axis=1, dtype=x.dtype).reshape(-1)


def of_lane(x, lane):
    return x[lane]


def largest(x):
    return x.max()


def number_at_most(x, y):
    return (x[:WARP] <= y).sum(dtype=jnp.int32)
