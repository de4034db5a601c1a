"""Layouts and sizes of arrays in shared memory."""

import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

_ALIGNMENT = 1024  # bytes; Pallas begins each array in shared memory at a multiple of it
_BARRIER = 8  # bytes


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
    """Bytes of all arrays in a tree of scratch buffers, without barriers and without padding."""
    return sum(_bytes(x) for x in jax.tree.leaves(scratch) if not _is_barrier(x))


def program_bytes(scratch: Any) -> int:
    """Bytes of shared memory that a program with this tree of scratch buffers takes: arrays, padding and barriers.

    It is exact for a kernel whose `reduction_scratch_bytes` are 0.
    """
    arrays, barriers = 0, 0
    for buffer in jax.tree.leaves(scratch):
        if _is_barrier(buffer):
            barriers += math.prod(buffer.num_barriers) * _BARRIER
        else:
            arrays += pl.cdiv(_bytes(buffer), _ALIGNMENT) * _ALIGNMENT
    return arrays + barriers


def _is_barrier(buffer: Any) -> bool:
    return isinstance(buffer, plgpu.Barrier | plgpu.ClusterBarrier)


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
