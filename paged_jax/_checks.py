"""Checks of one argument each, at trace time; `_validate` puts an op's together.

Every message names the argument, says what was expected and shows what came:
``query must have shape [num_seqs, num_heads, head_size], got (3, 4)``.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged_jax.shapes import QUERY_DTYPES


def flag(name: str, value: Any) -> bool:
    """A static bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a static bool, got {type(value).__name__}")
    return bool(value)


def typed(name: str, x: Any, dtypes: Sequence[str]) -> Array:
    """`x` as a JAX array, if it is an array and its dtype one of `dtypes`."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    if x.dtype.name not in dtypes:
        raise TypeError(f"{name} must have dtype {' or '.join(dtypes)}, got {x.dtype.name}")
    return jnp.asarray(x)


def array(name: str, x: Any, dims: str, dtypes: Sequence[str]) -> Array:
    """`typed`, if its rank is that of `dims` ("num_seqs, head_size") too."""
    rank = len([d for d in dims.split(", ") if d])
    if isinstance(x, jax.Array | np.ndarray | np.generic) and np.ndim(x) != rank:
        raise ValueError(f"{name} must have shape [{dims}], got {np.shape(x)}")
    return typed(name, x, dtypes)


def shape(name: str, x: Array, expected: tuple[int, ...], dims: str) -> None:
    """Raises ValueError unless the shape is `expected`, whose words are `dims`."""
    if x.shape != expected:
        raise ValueError(f"{name} must have shape [{dims}] = {expected}, got {x.shape}")


def tokens(name: str, x: Any, rows: str) -> Array:
    """Queries, keys or values: ``[rows, heads, head_size]``."""
    heads = "num_heads" if name == "query" else "num_kv_heads"
    x = array(name, x, f"{rows}, {heads}, head_size", QUERY_DTYPES)
    if not (0 < x.shape[2] <= 256 and x.shape[2] % 8 == 0):
        raise ValueError(f"head_size must be a multiple of 8 up to 256, got {x.shape[2]}")
    return x


def indices(name: str, x: Any, dims: str) -> Array:
    """An int32 array."""
    return array(name, x, dims, ("int32",))


def floating(name: str, x: Any, expected: tuple[int, ...] | None = None) -> Array:
    """A number or an array of floats as f32."""
    is_float = isinstance(x, jax.Array | np.ndarray | np.generic) and jnp.issubdtype(x.dtype, jnp.floating)
    if not is_number(x) and not is_float:
        raise TypeError(f"{name} must be a number or an array of floats, got {getattr(x, 'dtype', type(x).__name__)}")
    if expected is not None and np.shape(x) != expected:
        raise ValueError(f"{name} must have shape {expected}, got {np.shape(x)}")
    if isinstance(x, jax.Array):
        return jnp.asarray(x, jnp.float32)
    # Numbers come from the host by the caller's wish: explicitly, which jax.transfer_guard("disallow") lets pass.
    with np.errstate(over="ignore"):  # what is too large for f32 is infinite
        return jax.device_put(np.asarray(x, np.float32))


def static_int(name: str, value: int, least: int = 1) -> None:
    """Raises unless `value` is a Python or NumPy integer, at least `least` and below 2**31."""
    if not _is_int(value):
        raise TypeError(f"{name} must be a static int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value >= 2**31:
        raise ValueError(f"{name} must be below 2**31, got {value}")


def _is_int(x: object) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def is_number(x: object) -> bool:
    """Whether `x` is a number of Python's or NumPy's; a bool is none."""
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)
