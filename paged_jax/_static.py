"""Checks of arguments that must be static, which every part of the library uses: sizes, counts, bounds and flags."""

import operator
from typing import Any

import numpy as np
from jax.core import Tracer


def integer(name: str, value: Any) -> int:
    """Checks that `value` is an integer of Python, NumPy or JAX, and gives it as Python's.

    Python's integers do not wrap around in arithmetic, as NumPy's do.

    Raises:
      TypeError: it is none. A bool is none, and neither is a traced value.
    """
    try:
        if not isinstance(value, bool | np.bool_):
            return int(operator.index(value))
    except TypeError:
        pass  # JAX's message for a traced value does not name the argument
    wanted = "a static int" if isinstance(value, Tracer) else "an int"
    raise TypeError(f"{name} must be {wanted}, got {value!r:.60}")


def flag(name: str, value: Any) -> bool:
    """Checks that `value` is a static bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a static bool, got {type(value).__name__}")
    return bool(value)
