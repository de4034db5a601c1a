"""Trace-time checks of what callers pass: one function an op family, one style of message.

Every message names the argument, says what was expected and shows what came:
``query must have shape [num_seqs, num_heads, head_size], got (3, 4)``.
"""

import math
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged_jax import cache
from paged_jax.options import AttentionOptions, BlockSparse, Layout, Options, block_axis, head_axis

_QUERY_DTYPES = ("float16", "bfloat16", "float32")
_LAYOUTS = get_args(Layout)


def array(name: str, x: Any, dims: str, dtypes: Sequence[str]) -> Array:
    """`x` as a JAX array, if its rank is that of `dims` ("num_seqs, head_size") and its dtype one of `dtypes`."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    rank = len([d for d in dims.split(", ") if d])
    if np.ndim(x) != rank:
        raise ValueError(f"{name} must have shape [{dims}], got {np.shape(x)}")
    if x.dtype.name not in dtypes:
        raise TypeError(f"{name} must have dtype {' or '.join(dtypes)}, got {x.dtype.name}")
    return jnp.asarray(x)


def shape(name: str, x: Array, expected: tuple[int, ...], dims: str) -> None:
    if x.shape != expected:
        raise ValueError(f"{name} must have shape [{dims}] = {expected}, got {x.shape}")


def tokens(name: str, x: Any, rows: str) -> Array:
    """Queries, keys or values: ``[rows, heads, head_size]``."""
    heads = "num_heads" if name == "query" else "num_kv_heads"
    x = array(name, x, f"{rows}, {heads}, head_size", _QUERY_DTYPES)
    if not (0 < x.shape[2] <= 256 and x.shape[2] % 8 == 0):
        raise ValueError(f"head_size must be a multiple of 8 up to 256, got {x.shape[2]}")
    return x


def indices(name: str, x: Any, dims: str) -> Array:
    return array(name, x, dims, ("int32",))


def caches(
    key_cache: Any, value_cache: Any, num_kv_heads: int | None, head_size: int, layout: Layout
) -> tuple[Array, Array, int, int]:
    """Both caches, `num_kv_heads` and the block size; `num_kv_heads` None takes what the caches have."""
    if layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {_LAYOUTS}, got {layout!r}")
    key_dims, value_dims = {
        "hnd": ("num_blocks, num_kv_heads, block_size, head_size",) * 2,
        "nhd": ("num_blocks, block_size, num_kv_heads, head_size",) * 2,
        "vllm": (
            "num_blocks, num_kv_heads, head_size // x, block_size, x",
            "num_blocks, num_kv_heads, head_size, block_size",
        ),
    }[layout]
    key_cache = array("key_cache", key_cache, key_dims, cache.DTYPES)
    value_cache = array("value_cache", value_cache, value_dims, cache.DTYPES)
    if key_cache.dtype != value_cache.dtype:
        raise TypeError(f"value_cache must have key_cache's dtype {key_cache.dtype}, got {value_cache.dtype}")
    num_blocks, block_size = value_cache.shape[0], value_cache.shape[block_axis(layout)]
    if block_size not in cache.BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {cache.BLOCK_SIZES}, got {block_size}")
    kv_heads: int = value_cache.shape[head_axis(layout)] if num_kv_heads is None else num_kv_heads
    key_shape, value_shape = cache.cache_shapes(num_blocks, block_size, kv_heads, head_size, key_cache.dtype, layout)
    shape("key_cache", key_cache, key_shape, key_dims)
    shape("value_cache", value_cache, value_shape, value_dims)
    return key_cache, value_cache, kv_heads, block_size


def cache_scale(name: str, x: Any | None, num_blocks: int, num_kv_heads: int, block_size: int) -> Array | None:
    if x is None:
        return None
    x = _floating(name, x)
    expected = ((), (num_kv_heads,), (num_blocks, num_kv_heads, block_size))
    if x.shape not in expected:
        raise ValueError(
            f"{name} must be a scalar or have shape [num_kv_heads] or [num_blocks, num_kv_heads, block_size], "
            f"one of {expected}, got {x.shape}"
        )
    return x


def decode_operands(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    options: Options,
    num_kv_heads: int | None = None,
) -> tuple:
    query = tokens("query", query, "num_seqs")
    operands = attention_operands(query, key_cache, value_cache, block_tables, seq_lens, options, num_kv_heads)
    shape("seq_lens", operands[4], query.shape[:1], "num_seqs")
    return operands


def attention_operands(
    query: Array,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    options: Options,
    num_kv_heads: int | None = None,
    new_tokens: int = 0,
) -> tuple:
    """The checked arrays of an attention op, and its options last; `new_tokens` need no place in the tables."""
    key_cache, value_cache, num_kv_heads, block_size = caches(
        key_cache, value_cache, num_kv_heads, query.shape[2], options.get("layout", "hnd")
    )
    block_tables = indices("block_tables", block_tables, "num_seqs, max_blocks_per_seq")
    seq_lens = indices("seq_lens", seq_lens, "num_seqs")
    shape("seq_lens", seq_lens, block_tables.shape[:1], "num_seqs")
    if unknown := options.keys() - Options.__annotations__.keys():
        raise TypeError(
            f"unexpected keyword argument {min(unknown)!r}; options are {', '.join(Options.__annotations__)}"
        )
    capacity = block_tables.shape[1] * block_size + new_tokens
    checked = attention_options(query, key_cache.shape[0], num_kv_heads, block_size, capacity, **options)
    return query, key_cache, value_cache, block_tables, seq_lens, checked


def attention_options(
    query: Array,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    capacity: int,
    *,
    scale: Any | None = None,
    alibi_slopes: Any | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Any | None = None,
    block_sparse: BlockSparse | None = None,
    k_scale: Any | None = None,
    v_scale: Any | None = None,
    layout: Layout = "hnd",
    max_seq_len: int | None = None,
) -> AttentionOptions:
    """`capacity`: tokens there can be of one sequence, the bound of `max_seq_len`."""
    num_heads, head_size = query.shape[1:]
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}")
    if sliding_window is not None:
        _static_int("sliding_window", sliding_window)
    if logits_soft_cap is not None and not (_is_number(logits_soft_cap) and 0 < logits_soft_cap < math.inf):
        raise ValueError(f"logits_soft_cap must be a finite number > 0 or None, got {logits_soft_cap!r}")
    if max_seq_len is not None:
        _static_int("max_seq_len", max_seq_len, least=0)
    if block_sparse is not None:
        _block_sparse(block_sparse, block_size)
    return AttentionOptions(
        scale=_floating("scale", head_size**-0.5 if scale is None else scale, ()),
        alibi_slopes=_per_head("alibi_slopes", alibi_slopes, num_heads),
        sinks=_per_head("sinks", sinks, num_heads),
        k_scale=cache_scale("k_scale", k_scale, num_blocks, num_kv_heads, block_size),
        v_scale=cache_scale("v_scale", v_scale, num_blocks, num_kv_heads, block_size),
        layout=layout,
        max_seq_len=capacity if max_seq_len is None else min(max_seq_len, capacity),
        sliding_window=None if sliding_window is None else int(sliding_window),
        logits_soft_cap=None if logits_soft_cap is None else float(logits_soft_cap),
        block_sparse=block_sparse if block_sparse is not None and block_sparse.vert_stride > 1 else None,
    )


def partition_size(value: int, block_size: int) -> None:
    _static_int("partition_size", value)
    if value % block_size:
        raise ValueError(f"partition_size must be a multiple of block_size = {block_size}, got {value}")


def query_start_loc(starts: Any, seq_lens: Array) -> Array:
    starts = indices("query_start_loc", starts, "num_seqs + 1")
    shape("query_start_loc", starts, (seq_lens.shape[0] + 1,), "num_seqs + 1")
    return starts


def new_tokens(key: Any, value: Any, num_tokens: int, head_size: int, dtype: Any) -> tuple[Array, Array]:
    key, value = tokens("key", key, "num_tokens"), tokens("value", value, "num_tokens")
    shape("key", key, (num_tokens, key.shape[1], head_size), "num_tokens, num_kv_heads, head_size")
    shape("value", value, key.shape, "num_tokens, num_kv_heads, head_size")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != dtype:
            raise TypeError(f"{name} must have dtype {dtype}, got {x.dtype}")
    return key, value


def block_size(value_cache: Array, layout: Layout) -> int:
    return value_cache.shape[block_axis(layout)]


def write_scales(
    key: Array, key_cache: Array, block_size: int, k_scale: Any | None, v_scale: Any | None
) -> tuple[Array | None, Array | None]:
    if key_cache.dtype.itemsize >= key.dtype.itemsize and not (k_scale is None and v_scale is None):
        raise ValueError(
            f"k_scale and v_scale need a cache narrower than key: key is {key.dtype}, key_cache {key_cache.dtype}"
        )
    dims = key_cache.shape[0], key.shape[1], block_size
    return cache_scale("k_scale", k_scale, *dims), cache_scale("v_scale", v_scale, *dims)


def pools(*named: tuple[str, Any]) -> tuple[Array, ...]:
    """Caches whose layout does not matter: key and value pools with as many blocks."""
    for name, x in named:
        if np.ndim(x) not in ((4, 5) if "key" in name else (4,)):
            axes = "4 or 5 axes" if "key" in name else "4 axes"
            raise ValueError(f"{name} must have {axes}, the first num_blocks, got shape {np.shape(x)}")
    checked = tuple(array(name, x, ", ".join(["_"] * np.ndim(x)), cache.DTYPES) for name, x in named)
    key_cache, value_cache = checked
    if value_cache.shape[0] != key_cache.shape[0]:
        raise ValueError(f"{named[1][0]} must have num_blocks = {key_cache.shape[0]}, got {value_cache.shape[0]}")
    return checked


def layers(key_cache: Any, value_cache: Any) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The pools of several layers, or of one: `pools` for each, all with as many blocks."""
    several = isinstance(key_cache, tuple | list)
    if isinstance(value_cache, tuple | list) != several:
        raise TypeError("key_cache and value_cache must both be arrays, or both be sequences of arrays")
    if not several:
        key, value = pools(("key_cache", key_cache), ("value_cache", value_cache))
        return (key,), (value,)
    if len(value_cache) != len(key_cache):
        raise ValueError(f"value_cache must have key_cache's {len(key_cache)} layers, got {len(value_cache)}")
    checked = [
        pools((f"key_cache[{i}]", key), (f"value_cache[{i}]", value))
        for i, (key, value) in enumerate(zip(key_cache, value_cache, strict=True))
    ]
    for i, (key, _) in enumerate(checked):
        if key.shape[0] != checked[0][0].shape[0]:
            raise ValueError(f"key_cache[{i}] must have num_blocks = {checked[0][0].shape[0]}, got {key.shape[0]}")
    return tuple(key for key, _ in checked), tuple(value for _, value in checked)


def pairs(block_mapping: Any) -> Array:
    block_mapping = indices("block_mapping", block_mapping, "num_pairs, 2")
    shape("block_mapping", block_mapping, (block_mapping.shape[0], 2), "num_pairs, 2")
    return block_mapping


def same_blocks(src: tuple[Array, ...], dst: tuple[Array, ...]) -> None:
    for name, s, d in zip(("key", "value"), src, dst, strict=True):
        if s.shape[1:] != d.shape[1:]:
            raise ValueError(
                f"dst_{name}_cache must have the blocks of src_{name}_cache, {s.shape[1:]}, got {d.shape[1:]}"
            )
        if s.dtype != d.dtype:
            raise TypeError(f"dst_{name}_cache must have src_{name}_cache's dtype {s.dtype}, got {d.dtype}")


def states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> None:
    if out_b.shape != out_a.shape or out_b.dtype != out_a.dtype:
        raise ValueError(
            f"out_b must have out_a's shape and dtype {out_a.shape} {out_a.dtype}, got {out_b.shape} {out_b.dtype}"
        )
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        shape(name, lse, out_a.shape[:-1], "..., num_heads")
        if lse.dtype != jnp.float32:
            raise TypeError(f"{name} must have dtype float32, got {lse.dtype}")


def _block_sparse(sparse: BlockSparse, block_size: int) -> None:
    if not isinstance(sparse, BlockSparse):
        raise TypeError(f"block_sparse must be a BlockSparse or None, got {type(sparse).__name__}")
    _static_int("block_sparse.block_size", sparse.block_size)
    if sparse.block_size % block_size:
        raise ValueError(
            f"block_sparse.block_size must be a multiple of the cache's block_size = {block_size}, "
            f"got {sparse.block_size}"
        )
    for name, least in (
        ("local_blocks", 0),
        ("tp_rank", 0),
        ("vert_stride", -(2**31)),
        ("head_sliding_step", -(2**31)),
    ):
        _static_int(f"block_sparse.{name}", getattr(sparse, name), least)


def _per_head(name: str, x: Any | None, num_heads: int) -> Array | None:
    if x is None:
        return None
    x = _floating(name, x)
    shape(name, x, (num_heads,), "num_heads")
    return x


def _floating(name: str, x: Any, expected: tuple[int, ...] | None = None) -> Array:
    """A number or an array of floats as f32."""
    if not _is_number(x) and not (isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)):
        raise TypeError(f"{name} must be a number or an array of floats, got {getattr(x, 'dtype', type(x).__name__)}")
    if expected is not None and np.shape(x) != expected:
        raise ValueError(f"{name} must have shape {expected}, got {np.shape(x)}")
    return jnp.asarray(x, jnp.float32)


def _static_int(name: str, value: int, least: int = 1) -> None:
    if not _is_int(value):
        raise TypeError(f"{name} must be a static int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value >= 2**31:
        raise ValueError(f"{name} must be below 2**31, got {value}")


def _is_int(x: object) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)
