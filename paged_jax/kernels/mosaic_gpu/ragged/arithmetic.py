"""Arithmetic of counts and of the plan: in single instructions in a kernel that counts, else by XLA or Mosaic."""

from typing import Any

import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.integers import div
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.ptx import numbers

_MOST_EXACT = 1 << 22  # smaller quotients of floats have an error of less than 1


def reciprocal(x: Any, geometry: Geometry) -> Any:
    """1 / x for normal float32 with a normal result."""
    return numbers.reciprocal(x) if geometry.tuning.counts_in_kernel else 1 / x


def truncated(x: Any, geometry: Geometry) -> Any:
    """Converts float32 to int32, rounded towards 0."""
    return numbers.truncated(x) if geometry.tuning.counts_in_kernel else x.astype(jnp.int32)


def quotient(x: Any, y: Any, kind: ItemKind) -> Any:
    """x // y for numbers of items and of tiles, where x >= 0 and y > 0.

    If they are small enough for float32, this takes a quarter of the instructions of an integer division.
    """
    if kind.most_items >= _MOST_EXACT:
        return div(x, y)
    inverse = reciprocal(y.astype(jnp.float32), kind.geometry)
    found = truncated(x.astype(jnp.float32) * inverse, kind.geometry)
    left = x - found * y
    return found + (left >= y).astype(jnp.int32) - (left < 0).astype(jnp.int32)
