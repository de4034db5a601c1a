"""Checks the arguments of the ops at trace time: one function for each kind of operands, which makes them.

Every message names the argument, says what was expected and shows what came:
``query must have shape [num_seqs, num_heads, head_size], got (3, 4)``.
"""

from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged_jax import _checks
from paged_jax._operands import Copy, Decode, Prefix, Ragged, Swap, Write, WriteAndAttend
from paged_jax.options import (
    AttentionOptions,
    BlockSparse,
    Interleaved,
    Layout,
    Options,
    PerHead,
    block_axis,
    head_axis,
    num_kv_heads,
)
from paged_jax.shapes import BLOCK_SIZES, CACHE_DTYPES, QUERY_DTYPES, cache_shapes

_LAYOUTS = get_args(Layout)


def decode_operands(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    options: Options,
) -> Decode:
    query = _checks.tokens("query", query, "num_seqs")
    pool = _caches(key_cache, value_cache, None, query.shape[2], options.get("layout", "hnd"))
    block_tables, seq_lens = _checks.context(block_tables, seq_lens)
    _checks.shape("seq_lens", seq_lens, query.shape[:1], "num_seqs")
    checked = _attention_options(query, pool, block_tables, options)
    return Decode(query, pool.key_cache, pool.value_cache, block_tables, seq_lens, checked)


def partition_size(value: Any, operands: Decode) -> int:
    block_size = operands.value_cache.shape[block_axis(operands.options.layout)]
    value = _checks.static_int("partition_size", value)
    if value % block_size:
        raise ValueError(f"partition_size must be a multiple of block_size = {block_size}, got {value}")
    return value


def write_and_attend_operands(
    query: Any,
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    slot_mapping: Any,
    options: Options,
) -> WriteAndAttend:
    query = _checks.tokens("query", query, "num_seqs")
    key, value = _new_tokens(key, value, query.shape[0], query.shape[2], query.dtype)
    pool = _caches(key_cache, value_cache, key.shape[1], query.shape[2], options.get("layout", "hnd"))
    block_tables, seq_lens = _checks.context(block_tables, seq_lens)
    _checks.shape("seq_lens", seq_lens, query.shape[:1], "num_seqs")
    slot_mapping = _checks.indices("slot_mapping", slot_mapping, "num_seqs")
    _checks.shape("slot_mapping", slot_mapping, query.shape[:1], "num_seqs")
    checked = _attention_options(query, pool, block_tables, options)
    return WriteAndAttend(
        query, key, value, pool.key_cache, pool.value_cache, block_tables, seq_lens, slot_mapping, checked
    )


def ragged_operands(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    query_start_loc: Any,
    causal: bool,
    options: Options,
) -> Ragged:
    query = _checks.tokens("query", query, "num_tokens")
    pool = _caches(key_cache, value_cache, None, query.shape[2], options.get("layout", "hnd"))
    block_tables, seq_lens = _checks.context(block_tables, seq_lens)
    query_start_loc = _checks.query_start_loc(query_start_loc, seq_lens)
    checked = _attention_options(query, pool, block_tables, options, causal=causal, most_queries=query.shape[0])
    return Ragged(query, pool.key_cache, pool.value_cache, block_tables, seq_lens, query_start_loc, checked)


def interleaved_operands(
    query: Array,
    pool: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    causal: bool,
    options: Options,
) -> Ragged:
    """Checks the options of ragged attention over an `Interleaved` pool, whose arrays were checked."""
    query, caches = jnp.asarray(query), _interleaved(pool, options.get("layout"))
    checked = _attention_options(query, caches, block_tables, options, causal=causal, most_queries=query.shape[0])
    return Ragged(query, pool, pool, block_tables, seq_lens, query_start_loc, checked)


def interleaved_scales(
    pool: Array, layout: Interleaved, k_scale: Any | None, v_scale: Any | None
) -> tuple[Array | None, Array | None]:
    """Checks the factors of an `Interleaved` pool."""
    caches = _interleaved(pool, layout)
    return _cache_scale("k_scale", k_scale, caches), _cache_scale("v_scale", v_scale, caches)


def prefix_operands(
    query: Any,
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    query_start_loc: Any,
    causal: bool,
    options: Options,
) -> Prefix:
    query = _checks.tokens("query", query, "num_tokens")
    key, value = _new_tokens(key, value, query.shape[0], query.shape[2], query.dtype)
    pool = _caches(key_cache, value_cache, key.shape[1], query.shape[2], options.get("layout", "hnd"))
    block_tables, seq_lens = _checks.context(block_tables, seq_lens)
    query_start_loc = _checks.query_start_loc(query_start_loc, seq_lens)
    checked = _attention_options(
        query, pool, block_tables, options, causal=causal, most_queries=query.shape[0], new_tokens=key.shape[0]
    )
    return Prefix(query, key, value, pool.key_cache, pool.value_cache, block_tables, seq_lens, query_start_loc, checked)


def write_operands(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    layout: Layout,
    k_scale: Any | None,
    v_scale: Any | None,
) -> Write:
    key = _checks.tokens("key", key, "num_tokens")
    key, value = _new_tokens(key, value, key.shape[0], key.shape[2], key.dtype)
    slot_mapping = _checks.indices("slot_mapping", slot_mapping, "num_tokens")
    _checks.shape("slot_mapping", slot_mapping, key.shape[:1], "num_tokens")
    pool = _caches(key_cache, value_cache, key.shape[1], key.shape[2], layout)
    scales = _cache_scale("k_scale", k_scale, pool), _cache_scale("v_scale", v_scale, pool)
    if pool.key_cache.dtype.itemsize >= key.dtype.itemsize:  # such a cache holds keys and values as they are
        scales = None, None
    return Write(key, value, pool.key_cache, pool.value_cache, slot_mapping, *scales)


def copy_operands(key_cache: Any, value_cache: Any, block_mapping: Any) -> Copy:
    """Checks the pools of several layers, or of one; all pools must have the same number of blocks."""
    several, latent = isinstance(key_cache, tuple | list), value_cache is None
    if not latent and isinstance(value_cache, tuple | list) != several:
        raise TypeError("key_cache and value_cache must both be arrays, or both be sequences of arrays")
    if latent:
        caches = key_cache if several else [key_cache]
        checked = [(_latent_pool(f"key_cache[{i}]" if several else "key_cache", x), None) for i, x in enumerate(caches)]
    elif several:
        if len(value_cache) != len(key_cache):
            raise ValueError(f"value_cache must have key_cache's {len(key_cache)} layers, got {len(value_cache)}")
        checked = [
            _pools((f"key_cache[{i}]", key), (f"value_cache[{i}]", value))
            for i, (key, value) in enumerate(zip(key_cache, value_cache, strict=True))
        ]
    else:
        checked = [_pools(("key_cache", key_cache), ("value_cache", value_cache))]
    for i, (key, _) in enumerate(checked):
        if key.shape[0] != checked[0][0].shape[0]:
            raise ValueError(f"key_cache[{i}] must have num_blocks = {checked[0][0].shape[0]}, got {key.shape[0]}")
    key_caches, value_caches = tuple(key for key, _ in checked), tuple(value for _, value in checked)
    return Copy(key_caches, value_caches, _pairs(block_mapping))


def swap_operands(
    src_key_cache: Any, src_value_cache: Any, dst_key_cache: Any, dst_value_cache: Any, block_mapping: Any
) -> Swap:
    if src_value_cache is None and dst_value_cache is None:
        src, dst = (
            (_latent_pool("src_key_cache", src_key_cache), None),
            (_latent_pool("dst_key_cache", dst_key_cache), None),
        )
    else:
        src = _pools(("src_key_cache", src_key_cache), ("src_value_cache", src_value_cache))
        dst = _pools(("dst_key_cache", dst_key_cache), ("dst_value_cache", dst_value_cache))
    for name, s, d in zip(("key", "value"), src, dst, strict=True):
        if s is None or d is None:
            continue
        if s.shape[1:] != d.shape[1:]:
            raise ValueError(
                f"dst_{name}_cache must have the blocks of src_{name}_cache, {s.shape[1:]}, got {d.shape[1:]}"
            )
        if s.dtype != d.dtype:
            raise TypeError(f"dst_{name}_cache must have src_{name}_cache's dtype {s.dtype}, got {d.dtype}")
    return Swap(*src, *dst, _pairs(block_mapping))


def states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Array, Array, Array, Array]:
    """Checks the arguments of `merge_attention_states`."""
    out_a, out_b = _checks.typed("out_a", out_a, QUERY_DTYPES), _checks.typed("out_b", out_b, QUERY_DTYPES)
    if out_a.ndim < 2:
        raise ValueError(f"out_a must have shape [..., num_heads, head_size], got {out_a.shape}")
    if out_b.shape != out_a.shape or out_b.dtype != out_a.dtype:
        raise ValueError(
            f"out_b must have out_a's shape and dtype {out_a.shape} {out_a.dtype}, got {out_b.shape} {out_b.dtype}"
        )
    lse_a, lse_b = _checks.typed("lse_a", lse_a, ("float32",)), _checks.typed("lse_b", lse_b, ("float32",))
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _checks.shape(name, lse, out_a.shape[:-1], "..., num_heads")
    return out_a, lse_a, out_b, lse_b


class _Caches(NamedTuple):
    """Both caches of a layer, and their sizes."""

    key_cache: Array
    value_cache: Array
    num_blocks: int
    num_kv_heads: int
    block_size: int


def _caches(key_cache: Any, value_cache: Any, num_kv_heads: int | None, head_size: int, layout: Layout) -> _Caches:
    """Checks a layer's two caches against the sizes of the other operands, except `num_kv_heads` if it is None."""
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {_LAYOUTS}, got {layout!r}")
    key_dims, value_dims = {
        "hnd": ("num_blocks, num_kv_heads, block_size, head_size",) * 2,
        "nhd": ("num_blocks, block_size, num_kv_heads, head_size",) * 2,
        "vllm": (
            "num_blocks, num_kv_heads, head_size // x, block_size, x",
            "num_blocks, num_kv_heads, head_size, block_size",
        ),
    }[layout]
    key_cache = _checks.pool("key_cache", key_cache, key_dims, CACHE_DTYPES)
    value_cache = _checks.pool("value_cache", value_cache, value_dims, CACHE_DTYPES)
    if key_cache.dtype != value_cache.dtype:
        raise TypeError(f"value_cache must have key_cache's dtype {key_cache.dtype}, got {value_cache.dtype}")
    num_blocks, block_size = value_cache.shape[0], value_cache.shape[block_axis(layout)]
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size}")
    kv_heads: int = value_cache.shape[head_axis(layout)] if num_kv_heads is None else num_kv_heads
    key_shape, value_shape = cache_shapes(num_blocks, block_size, kv_heads, head_size, key_cache.dtype, layout)
    _checks.shape("key_cache", key_cache, key_shape, key_dims)
    _checks.shape("value_cache", value_cache, value_shape, value_dims)
    return _Caches(key_cache, value_cache, num_blocks, kv_heads, block_size)


def _interleaved(pool: Array, layout: Any) -> _Caches:
    return _Caches(pool, pool, pool.shape[0], num_kv_heads(pool, layout), pool.shape[block_axis(layout)])


def _cache_scale(name: str, x: Any | None, pool: _Caches) -> Array | None:
    if x is None:
        if pool.key_cache.dtype == jnp.int8:
            raise ValueError(f"{name} must be given for caches of int8, got None")
        return None
    x = _checks.floating(name, x)
    expected = ((), (pool.num_kv_heads,), (pool.num_blocks, pool.num_kv_heads, pool.block_size))
    if x.shape not in expected:
        raise ValueError(
            f"{name} must be a scalar or have shape [num_kv_heads] or [num_blocks, num_kv_heads, block_size], "
            f"one of {expected}, got {x.shape}"
        )
    return x


def _new_tokens(key: Any, value: Any, num_tokens: int, head_size: int, dtype: Any) -> tuple[Array, Array]:
    key, value = _checks.tokens("key", key, "num_tokens"), _checks.tokens("value", value, "num_tokens")
    _checks.shape("key", key, (num_tokens, key.shape[1], head_size), "num_tokens, num_kv_heads, head_size")
    _checks.shape("value", value, key.shape, "num_tokens, num_kv_heads, head_size")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != dtype:
            raise TypeError(f"{name} must have dtype {dtype}, got {x.dtype}")
    return key, value


def _pools(*named: tuple[str, Any]) -> tuple[Array, Array]:
    """Checks a key pool and a value pool, each with its name, of any layout: as many blocks, in the same memory."""
    for name, x in named:
        if np.ndim(x) not in ((4, 5) if "key" in name else (4,)):
            axes = "4 or 5 axes" if "key" in name else "4 axes"
            raise ValueError(f"{name} must have {axes}, the first num_blocks, got shape {np.shape(x)}")
    key_cache, value_cache = (_checks.typed(name, x, CACHE_DTYPES) for name, x in named)
    if value_cache.shape[0] != key_cache.shape[0]:
        raise ValueError(f"{named[1][0]} must have num_blocks = {key_cache.shape[0]}, got {value_cache.shape[0]}")
    memories = [jax.typeof(x).memory_space for x in (key_cache, value_cache)]
    if memories[0] != memories[1]:  # one kernel writes both: XLA refuses such a pair on a GPU (E1200)
        names = ["host" if memory == jax.memory.Space.Host else "device" for memory in memories]
        raise ValueError(f"{named[1][0]} must be in {named[0][0]}'s {names[0]} memory, got one in {names[1]} memory")
    return key_cache, value_cache


def _latent_pool(name: str, x: Any) -> Array:
    """Checks a latent cache, which is given without a value cache."""
    if np.ndim(x) != 3:
        raise ValueError(
            f"{name} must be a latent cache [num_blocks, block_size, latent_size] where the value cache is None, "
            f"got shape {np.shape(x)}"
        )
    return _checks.typed(name, x, CACHE_DTYPES)


def _pairs(block_mapping: Any) -> Array:
    block_mapping = _checks.indices("block_mapping", block_mapping, "num_pairs, 2")
    _checks.shape("block_mapping", block_mapping, (block_mapping.shape[0], 2), "num_pairs, 2")
    return block_mapping


def _attention_options(
    query: Array,
    pool: _Caches,
    block_tables: Array,
    given: Options,
    *,
    causal: bool = True,
    most_queries: int = 1,
    new_tokens: int = 0,
) -> AttentionOptions:
    """Checks the options that attention ops share.

    A sequence has no more than `most_queries`. It may be longer than its row of the block tables by `new_tokens`, which
    are not read from the cache.
    """
    if unknown := given.keys() - Options.__annotations__.keys():
        raise TypeError(
            f"unexpected keyword argument {min(unknown)!r}; options are {', '.join(Options.__annotations__)}"
        )
    num_heads, head_size = query.shape[1:]
    if pool.num_kv_heads < 1 or num_heads < 1 or num_heads % pool.num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads = {pool.num_kv_heads}, got {num_heads}")
    options = {name: given.get(name) for name in Options.__annotations__}
    if not _checks.flag("causal", causal):
        for name in ("alibi_slopes", "sliding_window", "block_sparse"):
            if options[name] is not None:
                raise ValueError(f"{name} must be None with causal=False, got {options[name]!r}")
    if (window := options["sliding_window"]) is not None:
        window = _checks.static_int("sliding_window", window)
    scale = head_size**-0.5 if options["scale"] is None else options["scale"]
    capacity = block_tables.shape[1] * pool.block_size + new_tokens  # the most tokens that a sequence can have
    return AttentionOptions(
        scale=_checks.floating("scale", scale, ()),
        per_head=PerHead(*(_checks.per_head(name, options[name], num_heads) for name in PerHead._fields)),
        k_scale=_cache_scale("k_scale", options["k_scale"], pool),
        v_scale=_cache_scale("v_scale", options["v_scale"], pool),
        layout=given.get("layout", "hnd"),
        max_seq_len=_checks.bound("max_seq_len", options["max_seq_len"], capacity),
        max_query_len=_checks.bound("max_query_len", options["max_query_len"], most_queries),
        sliding_window=window,
        logits_soft_cap=_checks.soft_cap(options["logits_soft_cap"]),
        block_sparse=_block_sparse(options["block_sparse"], pool.block_size),
        causal=bool(causal),
    )


def _block_sparse(sparse: Any | None, block_size: int) -> BlockSparse | None:
    if sparse is None:
        return None
    if not isinstance(sparse, BlockSparse):
        raise TypeError(f"block_sparse must be a BlockSparse or None, got {type(sparse).__name__}")
    least = {"block_size": 1, "local_blocks": 0, "tp_rank": 0, "vert_stride": -(2**31), "head_sliding_step": -(2**31)}
    sparse = BlockSparse(
        **{name: _checks.static_int(f"block_sparse.{name}", getattr(sparse, name), least[name]) for name in least}
    )
    if sparse.block_size % block_size:
        raise ValueError(
            f"block_sparse.block_size must be a multiple of the cache's block_size = {block_size}, "
            f"got {sparse.block_size}"
        )
    return None if sparse.vert_stride <= 1 else sparse
