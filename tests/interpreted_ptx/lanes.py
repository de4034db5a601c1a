"""The softmax's operations on the rows of a warpgroup."""

import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS


def row_numbers():
    return jnp.arange(WGMMA_ROWS)


def in_each_lane(x):
    return jnp.full(WGMMA_ROWS, x)


def sums(x):
    return x.sum(axis=1)


def sum_of_lanes(x):
    return x


def masked(x, firsts, lasts):
    column = jnp.arange(x.shape[1])[None]
    hidden = column > side_by_side(lasts, x.shape[1])
    if firsts:
        hidden |= column < side_by_side(firsts, x.shape[1])
    return jnp.where(hidden, -jnp.inf, x)


def raised(maxima, x, factor, lag):
    higher = jnp.maximum(maxima, x.max(axis=1))
    return jnp.where((higher - maxima) * factor > lag, higher, maxima)


def exponentials(x, factor, bases, ahead=None):
    factor = factor[:, None] if jnp.ndim(factor) else factor
    return jnp.exp2(x * factor - bases[:, None])


def rescaled(x, factors):
    return x * factors[:, None]


def side_by_side(values, columns):
    columns_of_each = [
        jnp.broadcast_to(jnp.asarray(x)[..., None], (WGMMA_ROWS, columns // len(values))) for x in values
    ]
    return jnp.concatenate(columns_of_each, axis=1)


def settle(sums, unused_smem):
    pass
