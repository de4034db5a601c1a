"""Functions that check one argument each, at trace time; `_validate` combines them for each op.

Every message names the argument, says what was expected and shows what came:
``query must have shape [num_seqs, num_heads, head_size], got (3, 4)``.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged_jax._static import flag as flag
from paged_jax._static import integer
from paged_jax.shapes import LARGEST_HEAD_SIZE, QUERY_DTYPES

# A soft cap must be a normal number of float32, so that it is not taken for 0. Logits are divided by it, and XLA and
# GPUs take a quotient below float32's smallest normal number for 0. With caps up to 1e30 that happens only to logits
# below 2e-8, whose exponentials change by less than float32's precision.
_SMALLEST_SOFT_CAP, _LARGEST_SOFT_CAP = float(np.finfo(np.float32).tiny), 1e30


def typed(name: str, x: Any, dtypes: Sequence[str]) -> Array:
    """Checks that `x` is an array of one of these dtypes, and gives it as a JAX array."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    if x.dtype.name not in dtypes:
        raise TypeError(f"{name} must have dtype {' or '.join(dtypes)}, got {x.dtype.name}")
    return jnp.asarray(x)


def array(name: str, x: Any, dims: str, dtypes: Sequence[str]) -> Array:
    """Does what `typed` does, and checks that `x` has as many axes as `dims` ("num_seqs, head_size") names."""
    rank = len([d for d in dims.split(", ") if d])
    if isinstance(x, jax.Array | np.ndarray | np.generic) and np.ndim(x) != rank:
        raise ValueError(f"{name} must have shape [{dims}], got {np.shape(x)}")
    return typed(name, x, dtypes)


def shape(name: str, x: Array, expected: tuple[int, ...], dims: str) -> None:
    """Checks that the shape is `expected`; `dims` are the words for its axes."""
    if x.shape != expected:
        raise ValueError(f"{name} must have shape [{dims}] = {expected}, got {x.shape}")


def tokens(name: str, x: Any, rows: str) -> Array:
    """Checks queries, keys or values: ``[rows, heads, head_size]``."""
    heads = "num_heads" if name == "query" else "num_kv_heads"
    x = array(name, x, f"{rows}, {heads}, head_size", QUERY_DTYPES)
    head_size("head_size", x.shape[2])
    return x


def head_size(name: str, value: int) -> None:
    """Checks that heads may have this many elements."""
    if not (0 < value <= LARGEST_HEAD_SIZE and value % 8 == 0):
        raise ValueError(f"{name} must be a multiple of 8 up to {LARGEST_HEAD_SIZE}, got {value}")


def indices(name: str, x: Any, dims: str) -> Array:
    """Checks that `x` is an array of integers that fit in int32, and gives it as int32.

    NumPy's arrays may have any integer dtype, as their values can be looked at. Those of JAX may be traced.
    """
    if isinstance(x, np.ndarray | np.generic) and np.issubdtype(x.dtype, np.integer):
        values: np.ndarray = np.asarray(x)
        unfit = values[(values < -(2**31)) | (values >= 2**31)]
        if unfit.size:
            raise ValueError(f"{name} must fit in int32, got {unfit.flat[0]}")
        x = values.astype(np.int32)
    elif isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.integer) and x.dtype != jnp.int32:
        if not np.can_cast(x.dtype, np.int32):
            raise TypeError(f"{name} must have dtype int32, got {x.dtype.name}: convert it by {name}.astype('int32')")
        x = x.astype(jnp.int32)
    return array(name, x, dims, ("int32",))


def context(block_tables: Any, seq_lens: Any) -> tuple[Array, Array]:
    """Checks block tables and lengths, which have a row for each sequence."""
    block_tables = indices("block_tables", block_tables, "num_seqs, max_blocks_per_seq")
    seq_lens = indices("seq_lens", seq_lens, "num_seqs")
    shape("seq_lens", seq_lens, block_tables.shape[:1], "num_seqs")
    return block_tables, seq_lens


def query_start_loc(starts: Any, seq_lens: Array) -> Array:
    """Checks the prefix sum of the query lengths of as many sequences as `seq_lens` has."""
    starts = indices("query_start_loc", starts, "num_seqs + 1")
    shape("query_start_loc", starts, (seq_lens.shape[0] + 1,), "num_seqs + 1")
    return starts


def pool(name: str, x: Any, dims: str, dtypes: Sequence[str]) -> Array:
    """Does what `array` does, and checks that `x` is in device memory."""
    x = array(name, x, dims, dtypes)
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        raise ValueError(f"{name} must be in device memory, got one in host memory, see swap_blocks")
    return x


def per_head(name: str, x: Any | None, num_heads: int) -> Array | None:
    """Checks that `x` has a number for each query head, and gives it as f32."""
    if x is None:
        return None
    x = floating(name, x)
    shape(name, x, (num_heads,), "num_heads")
    return x


def bound(name: str, value: Any | None, most: int) -> int:
    """Checks an upper bound, and gives it, but never more than `most`, which None stands for."""
    return most if value is None else min(static_int(name, value, least=0), most)


def soft_cap(cap: Any) -> float | None:
    """Checks `logits_soft_cap`."""
    if cap is None:
        return None
    if not is_number(cap):
        raise TypeError(f"logits_soft_cap must be a number or None, got {type(cap).__name__}")
    cap = cap.item() if isinstance(cap, np.generic) else cap  # floats of 16 bits cannot be compared to these limits
    if not _SMALLEST_SOFT_CAP <= cap <= _LARGEST_SOFT_CAP:
        limits = f"from {_SMALLEST_SOFT_CAP:.2g} to {_LARGEST_SOFT_CAP:g}"
        raise ValueError(f"logits_soft_cap must be {limits} or None, got {cap!r}")
    return float(cap)


def floating(name: str, x: Any, expected: tuple[int, ...] | None = None) -> Array:
    """Checks that `x` is a number or an array of floats, and gives it as f32."""
    is_float = isinstance(x, jax.Array | np.ndarray | np.generic) and jnp.issubdtype(x.dtype, jnp.floating)
    if not is_number(x) and not is_float:
        raise TypeError(f"{name} must be a number or an array of floats, got {getattr(x, 'dtype', type(x).__name__)}")
    if expected is not None and np.shape(x) != expected:
        raise ValueError(f"{name} must have shape {expected}, got {np.shape(x)}")
    if isinstance(x, jax.Array):
        return jnp.asarray(x, jnp.float32)
    try:
        with np.errstate(over="ignore"):  # floats too large for f32 become infinite
            taken = np.array(x, np.float32)  # a copy: on a CPU JAX may read memory late, when the caller has changed it
    except OverflowError:
        bits = int(x).bit_length()
        raise ValueError(f"{name} must be a number that a float can hold, got an int of {bits} bits") from None
    if (np.isinf(taken) & np.isfinite(np.asarray(x, np.float64))).any():
        raise ValueError(f"{name} must fit in float32, got a number beyond 3.4e38")
    # An explicit transfer, which jax.transfer_guard("disallow") permits: it was the caller who passed a number.
    return jax.device_put(taken)


def static_int(name: str, value: Any, least: int = 1) -> int:
    """Checks that `value` is an integer, at least `least` and below 2**31; gives it as Python's."""
    value = integer(name, value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value >= 2**31:
        raise ValueError(f"{name} must be below 2**31, got {value}")
    return value


def is_number(x: object) -> bool:
    """Whether `x` is a number of Python or NumPy; a bool does not count as one."""
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)
