"""Turns counts, ids and masks of any kind into int32 or bool arrays: NumPy's on the host, JAX's in traced programs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

# Callers may pass an array of NumPy or JAX, a number, or a sequence of numbers (or of JAX scalars).
Values = ArrayLike | Sequence[Any]

_INT32 = np.iinfo(np.int32)


def on_host(state: Any) -> bool:
    """Whether all of a state's leaves are NumPy's arrays, as in states that the functions on the host return."""
    kinds = [type(leaf) for leaf in vars(state).values()]
    return kinds.count(np.ndarray) == len(kinds) - 1  # the block size is no leaf


def namespace(state: Any, *arguments: Values) -> Any:
    """Picks the form of a call: `numpy` if the state is on the host and no argument is traced, else `jax.numpy`."""
    # Arithmetic on NumPy arrays of no axes gives NumPy's scalars.
    is_host = on_host(state) or all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(state))
    return np if is_host and not any(map(_is_traced, arguments)) else jnp


def integers(xp: Any, name: str, x: Values, shape: tuple[int, ...] | None) -> Any:
    """Checks that `x` holds integers that fit in int32, and its shape (None: any with one axis); gives it as int32."""
    if (
        xp is np
        and type(x) is np.ndarray
        and x.dtype == np.int32
        and x.shape == (x.shape[:1] if shape is None else shape)
    ):
        return x  # the usual case on the host, where the checks below would take long
    array = _array(name, x, np.int32, "iu")
    if array.dtype != np.int32 and not np.can_cast(array.dtype, np.int32) and array.size:
        if isinstance(array, Tracer):
            # Integers that wrapped around at 32 bits would name other blocks, rows or tokens.
            limits = np.asarray((max(_INT32.min, np.iinfo(array.dtype).min), _INT32.max), array.dtype)
            array = jnp.clip(array, limits[0], limits[1])
        else:
            array = np.asarray(array)
            unfit = (array < _INT32.min) | (array > _INT32.max)
            if unfit.any():
                raise ValueError(f"{name} must fit in int32, got {array.ravel()[unfit.argmax()]}")
    return _shaped(xp, name, array, np.int32, shape)


def bools(xp: Any, name: str, x: Values, shape: tuple[int, ...]) -> Any:
    """Checks that `x` holds bools and has this shape, and gives it as an array."""
    return _shaped(xp, name, _array(name, x, np.bool_, "b"), np.bool_, shape)


def _is_traced(x: Values) -> bool:
    if type(x) is np.ndarray:
        return False
    elements = x if isinstance(x, list | tuple) else (x,)
    return any(isinstance(element, Tracer) for element in elements)


def _array(name: str, x: Values, dtype: type, kinds: str) -> Any:
    array = x if isinstance(x, jax.Array) else jnp.asarray(x) if _is_traced(x) else np.asarray(x)
    array = array if array.size else array.astype(dtype)  # NumPy makes [] a float64 array
    if array.dtype.kind not in kinds:
        raise TypeError(f"{name} must be of dtype {np.dtype(dtype)}, got {array.dtype}")
    return array


def _shaped(xp: Any, name: str, array: Any, dtype: type, shape: tuple[int, ...] | None) -> Any:
    if array.ndim != 1 if shape is None else array.shape != shape:
        raise ValueError(f"{name} must have shape {'(n,)' if shape is None else shape}, got {array.shape}")
    return xp.asarray(array if array.dtype == dtype else array.astype(dtype))
