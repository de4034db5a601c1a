"""What the lanes of each warp have."""

import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP


def totals_in_lanes(arrays, sums_smem, first):
    sums = jnp.stack([x.sum() for x in arrays]).astype(jnp.float32)
    return sums[jnp.minimum(jnp.arange(WARPGROUP) % WARP, len(arrays) - 1)]


def of_lanes(values, count):
    return [values[lane] for lane in range(count)]


def votes(conditions):
    return ((conditions[:WARP] != 0).astype(jnp.uint32) << jnp.arange(WARP, dtype=jnp.uint32)).sum().astype(jnp.int32)


def lane_of(values, lane):
    return values[lane]


def sum_of_warp(values):
    return jnp.repeat(values.reshape(-1, WARP).sum(axis=1, dtype=values.dtype), WARP)


def sums_of_warp(values):
    return jnp.cumsum(values.reshape(-1, WARP), axis=1, dtype=values.dtype).reshape(-1)


def count_of_warp(conditions):
    return (conditions[:WARP] != 0).sum(dtype=jnp.int32)
