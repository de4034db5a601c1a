"""Integer arithmetic on the device, for scalars and arrays."""

from typing import Any

import jax.numpy as jnp
from jax import lax

Scalar = Any
"""An int32 or a bool on the device."""


def div(x: Any, y: Any) -> Any:
    """x / y rounded towards 0."""
    return lax.div(x, _like(x, y))


def cdiv(x: Any, y: Any) -> Any:
    """x / y rounded up; 0 where x is negative."""
    return at_least(div(x + (y - 1), y), 0)


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
