"""Counts, ids and masks of any kind as arrays of the state's kind, int32 or bool."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

# What callers may pass: an array of either kind, a number, or a sequence of numbers (or of JAX scalars).
Values = ArrayLike | Sequence[Any]

_INT32 = np.iinfo(np.int32)


def namespace(state: Any, *arguments: Values) -> Any:
    """Picks the form of a call: `numpy` where the state is on the host and nothing is traced, else `jax.numpy`."""
    on_host = all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(state))
    return np if on_host and not any(map(_is_traced, arguments)) else jnp


def integers(xp: Any, name: str, x: Values, shape: tuple[int, ...] | None) -> Any:
    """Gives `x` as int32 after checking its kind of dtype, its range and its shape (None: one dimension)."""
    array = _array(name, x, np.int32, "iu")
    if array.dtype != np.int32 and not np.can_cast(array.dtype, np.int32) and array.size:
        if isinstance(array, Tracer):
            # Wrapped to 32 bits they would name other blocks, rows or tokens.
            limits = np.asarray((max(_INT32.min, np.iinfo(array.dtype).min), _INT32.max), array.dtype)
            array = jnp.clip(array, limits[0], limits[1])
        else:
            array = np.asarray(array)
            unfit = (array < _INT32.min) | (array > _INT32.max)
            if unfit.any():
                raise ValueError(f"{name} must fit in int32, got {array.ravel()[unfit.argmax()]}")
    return _shaped(xp, name, array, np.int32, shape)


def bools(xp: Any, name: str, x: Values, shape: tuple[int, ...]) -> Any:
    """Gives `x` as bool after checking its dtype and its shape."""
    return _shaped(xp, name, _array(name, x, np.bool_, "b"), np.bool_, shape)


def _is_traced(x: Values) -> bool:
    elements = x if isinstance(x, list | tuple) else (x,)
    return any(isinstance(element, Tracer) for element in elements)


def _array(name: str, x: Values, dtype: type, kinds: str) -> Any:
    array = x if isinstance(x, jax.Array) else jnp.asarray(x) if _is_traced(x) else np.asarray(x)
    array = array if array.size else array.astype(dtype)  # [] has NumPy's float64
    if array.dtype.kind not in kinds:
        raise TypeError(f"{name} must be of dtype {np.dtype(dtype)}, got {array.dtype}")
    return array


def _shaped(xp: Any, name: str, array: Any, dtype: type, shape: tuple[int, ...] | None) -> Any:
    if array.ndim != 1 if shape is None else array.shape != shape:
        raise ValueError(f"{name} must have shape {'(n,)' if shape is None else shape}, got {array.shape}")
    return xp.asarray(array if array.dtype == dtype else array.astype(dtype))
