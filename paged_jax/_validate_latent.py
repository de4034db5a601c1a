"""Checks the arguments of the ops on latent caches at trace time, as `_validate` does for the other ops."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from paged_jax import _checks
from paged_jax._operands import MlaDecode, MlaRagged, WriteLatent
from paged_jax.options import AttentionOptions, LatentOptions, PerHead
from paged_jax.shapes import BLOCK_SIZES, CACHE_DTYPES, QUERY_DTYPES, check_latent_size


def decode_operands(
    query: Any, latent_cache: Any, block_tables: Any, seq_lens: Any, scale: Any, options: LatentOptions
) -> MlaDecode:
    query = _query(query, "num_seqs")
    latent_cache = _latent_cache(latent_cache, query.shape[2])
    block_tables, seq_lens = _checks.context(block_tables, seq_lens)
    _checks.shape("seq_lens", seq_lens, query.shape[:1], "num_seqs")
    sizes = _Sizes(query.shape[1], block_tables.shape[1] * latent_cache.shape[1], most_queries=1)
    checked = _attention_options(sizes, latent_cache, scale, options, causal=True)
    return MlaDecode(query, latent_cache, block_tables, seq_lens, checked)


def ragged_operands(
    query: Any,
    latent_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    query_start_loc: Any,
    scale: Any,
    causal: bool,
    options: LatentOptions,
) -> MlaRagged:
    query = _query(query, "num_tokens")
    latent_cache = _latent_cache(latent_cache, query.shape[2])
    block_tables, seq_lens = _checks.context(block_tables, seq_lens)
    query_start_loc = _checks.query_start_loc(query_start_loc, seq_lens)
    sizes = _Sizes(query.shape[1], block_tables.shape[1] * latent_cache.shape[1], most_queries=query.shape[0])
    checked = _attention_options(sizes, latent_cache, scale, options, causal=_checks.flag("causal", causal))
    return MlaRagged(query, latent_cache, block_tables, seq_lens, query_start_loc, checked)


def write_operands(latent: Any, latent_cache: Any, slot_mapping: Any, scale: Any) -> WriteLatent:
    latent = _checks.array("latent", latent, "num_tokens, latent_size", QUERY_DTYPES)
    check_latent_size(latent.shape[1])
    latent_cache = _latent_cache(latent_cache, latent.shape[1])
    slot_mapping = _checks.indices("slot_mapping", slot_mapping, "num_tokens")
    _checks.shape("slot_mapping", slot_mapping, latent.shape[:1], "num_tokens")
    scale = _scale("scale", scale, latent_cache)
    narrower = latent_cache.dtype.itemsize < latent.dtype.itemsize
    return WriteLatent(latent, latent_cache, slot_mapping, scale if narrower else None)


def value_size(value: Any, latent_size: int) -> int:
    value = _checks.static_int("value_size", value)
    if value % 16 or value > latent_size:
        raise ValueError(f"value_size must be a multiple of 16 up to latent_size = {latent_size}, got {value}")
    return value


class _Sizes(NamedTuple):
    """The sizes of a call that its options must fit: query heads, tokens of a sequence, queries of a sequence."""

    num_heads: int
    capacity: int
    most_queries: int


def _query(query: Any, rows: str) -> Array:
    query = _checks.array("query", query, f"{rows}, num_heads, latent_size", QUERY_DTYPES)
    check_latent_size(query.shape[2])
    if query.shape[1] < 1:
        raise ValueError(f"num_heads must be at least 1, got {query.shape[1]}")
    return query


def _latent_cache(latent_cache: Any, latent_size: int) -> Array:
    dims = "num_blocks, block_size, latent_size"
    latent_cache = _checks.pool("latent_cache", latent_cache, dims, CACHE_DTYPES)
    num_blocks, block_size, _ = latent_cache.shape
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size}")
    _checks.shape("latent_cache", latent_cache, (num_blocks, block_size, latent_size), dims)
    return latent_cache


def _scale(name: str, scale: Any | None, latent_cache: Array) -> Array | None:
    if scale is not None:
        return _checks.floating(name, scale, ())
    if latent_cache.dtype == jnp.int8:
        raise ValueError(f"{name} must be given for caches of int8, got None")
    return None


def _attention_options(
    sizes: _Sizes, latent_cache: Array, scale: Any, given: LatentOptions, *, causal: bool
) -> AttentionOptions:
    names = LatentOptions.__annotations__
    if unknown := given.keys() - names.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}; options are {', '.join(names)}")
    latent_scale = _scale("latent_scale", given.get("latent_scale"), latent_cache)
    return AttentionOptions(
        scale=_checks.floating("scale", scale, ()),
        per_head=PerHead(sinks=_checks.per_head("sinks", given.get("sinks"), sizes.num_heads)),
        k_scale=latent_scale,
        v_scale=latent_scale,
        layout="nhd",
        max_seq_len=_checks.bound("max_seq_len", given.get("max_seq_len"), sizes.capacity),
        max_query_len=_checks.bound("max_query_len", given.get("max_query_len"), sizes.most_queries),
        sliding_window=None,
        logits_soft_cap=_checks.soft_cap(given.get("logits_soft_cap")),
        block_sparse=None,
        causal=causal,
    )
