"""Integer arithmetic on the device, for scalars and arrays."""

from typing import Any

import jax.numpy as jnp
from jax import lax

Scalar = Any
"""An int32 or a bool on the device."""

MOST_EXACT = 1 << 22
"""Smaller integers are exact in `quotient`."""


def div(x: Any, y: Any) -> Any:
    """x / y rounded towards 0."""
    return lax.div(x, _like(x, y))


def cdiv(x: Any, y: Any) -> Any:
    """x / y rounded up; 0 where x is negative."""
    return at_least(div(x + (y - 1), y), 0)


def quotient(x: Any, y: Any) -> Any:
    """x // y for 0 <= x < `MOST_EXACT` and 0 < y < `MOST_EXACT`, in a third of the instructions of an integer division.

    The error of the product in float32 is less than 1.
    """
    found = (x.astype(jnp.float32) * (1 / y.astype(jnp.float32))).astype(jnp.int32)
    left = x - found * y
    return found + (left >= y).astype(jnp.int32) - (left < 0).astype(jnp.int32)


def at_least(x: Any, y: int) -> Any:
    """The larger one of x and y."""
    return lax.max(x, _like(x, y))


def at_most(x: Any, y: int) -> Any:
    """The smaller one of x and y."""
    return lax.min(x, _like(x, y))


def _like(x: Any, y: Any) -> Any:
    if not isinstance(y, int):
        return y
    return jnp.int32(y) if x.ndim == 0 else jnp.full_like(x, y)
