"""Arrays in registers, all in the layout of wgmma's results: rows over the warps, a query head a column."""

import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

_EXPONENT = 0x7F800000  # bits of a float32
_SUM_OF_INVERSES = 254 << 23  # of the bits of a power of two and of its inverse

LOG2E = math.log2(math.e)
LOWEST = -1e30
"""Where a maximum starts: finite, so that the exponential of -inf minus it is 0."""


def exp(x):
    """e ** x, for differences of logits: logits themselves would lose bits to the factor."""
    return jnp.exp2(x * LOG2E)


def log(x):
    """The natural logarithm."""
    return jnp.log2(x) / LOG2E


def power_of_two(x, least: int | None = None, most: int | None = None):
    """The largest power of two that is no larger than |x|, float32.

    With bounds it is between 2 ** least and 2 ** most, also for NaN.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & _EXPONENT
    if least is not None and most is not None:
        bits = lax.clamp(jnp.int32((127 + least) << 23), bits, jnp.int32((127 + most) << 23))
    return lax.bitcast_convert_type(bits, jnp.float32)


def inverse(x):
    """The inverse of powers of two from 2 ** -126 to 2 ** 126, exactly."""
    return lax.bitcast_convert_type(_SUM_OF_INVERSES - lax.bitcast_convert_type(x, jnp.int32), jnp.float32)


def layout(x, axis: int | None = None):
    """`x` in the layout of a result of wgmma, or of a reduction of one over `axis`."""
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA if axis is None else plgpu.Layout.WGMMA.reduce(axis))


def wide(x, rows: int):
    """[columns] -> [rows, columns], without casts: each would make Mosaic's search for layouts slower."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))


def store(ref, x):
    """Stores with bank conflicts and all: jax 0.12 refuses them in a plain store, 0.11 has no other."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x
