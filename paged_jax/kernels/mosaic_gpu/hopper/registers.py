"""Arithmetic on arrays in registers, in the layout of wgmma's results."""

import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

_EXPONENT = 0x7F800000  # the bits of a float32 that hold its exponent
_SUM_OF_INVERSES = 254 << 23  # the bits of a power of two plus the bits of its inverse

LOG2E = math.log2(math.e)
LOWEST = -1e30
"""The initial maximum. It is finite, so that exp(-inf - LOWEST) is 0 and not NaN."""


def exp(x):
    """e ** x, for differences of logits. For logits themselves, x * log2(e) would lose bits."""
    return jnp.exp2(x * LOG2E)


def log(x):
    """The natural logarithm."""
    return jnp.log2(x) / LOG2E


def power_of_two(x, least: int | None = None, most: int | None = None):
    """The largest power of two that is not larger than |x|, in float32.

    With bounds, the result is between 2 ** least and 2 ** most, even if x is NaN.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & _EXPONENT
    if least is not None and most is not None:
        bits = lax.clamp(jnp.int32((127 + least) << 23), bits, jnp.int32((127 + most) << 23))
    return lax.bitcast_convert_type(bits, jnp.float32)


def inverse(x):
    """The inverse of powers of two from 2 ** -126 to 2 ** 126, exactly."""
    return lax.bitcast_convert_type(_SUM_OF_INVERSES - lax.bitcast_convert_type(x, jnp.int32), jnp.float32)


def layout(x, axis: int | None = None):
    """Casts x to the layout of wgmma's results, or to the layout of their reduction over `axis`."""
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA if axis is None else plgpu.Layout.WGMMA.reduce(axis))


def wide(x, rows: int):
    """[columns] -> [rows, columns], without a cast of its layout: casts slow down Mosaic's layout inference."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))


def store(ref, x):
    """Stores x, even with bank conflicts. jax 0.12 refuses these in a plain store; jax 0.11 has only plain stores."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x
