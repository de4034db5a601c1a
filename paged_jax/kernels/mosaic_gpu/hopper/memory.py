"""Layouts and sizes of arrays in shared memory."""

import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp


class Slice(NamedTuple):
    """`size` neighbouring elements of a vector, from index `first` on."""

    first: int
    size: int


def transforms(head_size: int, dtype: str) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """The layout of a wgmma operand with rows of head_size elements. It is free of bank conflicts."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = math.gcd(head_size * itemsize, 128)  # bytes
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def array_bytes(scratch: Any) -> int:
    """Bytes of all arrays in a tree of scratch buffers, without barriers."""
    buffers = jax.tree.leaves(scratch)
    arrays = [x for x in buffers if not isinstance(x, plgpu.Barrier | plgpu.ClusterBarrier)]
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)
