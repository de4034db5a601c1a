"""Device code: arrays in registers, in the layout of wgmma's results: rows over the warps, a head a column."""

import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.config import Config

_LOG2E = math.log2(math.e)
LOWEST = -1e30  # of a maximum: finite, so that the exponential of -inf minus it is 0


def exp(x):
    return jnp.exp2(x * _LOG2E)  # of differences: large logits themselves would lose bits to the factor


def log(x):
    return jnp.log2(x) / _LOG2E


def scaled_logits(products, factor, cfg: Config):
    """Products of queries and keys, scaled and capped."""
    if (cap := cfg.logits_soft_cap) is not None:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        return cap - (2 * cap) / (exp(products * (factor * (2 / cap))) + 1)
    return products * factor


def of_heads(values_gmem, rows: int, offset, segment, cfg: Config):
    """A value for each head of the group, over `rows`: [rows, columns]."""
    column = plgpu.broadcasted_iota(jnp.int32, (rows, cfg.columns), 1, layout=plgpu.Layout.WGMMA)
    zeros = values = layout(jnp.zeros((rows, cfg.columns), jnp.float32))
    for i in range(cfg.group):
        values = jnp.where(column == offset + i, zeros + values_gmem[segment.head * cfg.group + i], values)
    return values


def layout(x, axis: int | None = None):
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA if axis is None else plgpu.Layout.WGMMA.reduce(axis))


def wide(x, rows: int):
    """[columns] -> [rows, columns], without casts: each would make Mosaic's search for layouts slower."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))


def store(ref, x):
    """Bank conflicts and all: jax 0.12 refuses them in a plain store, 0.11 has no other."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x
