"""Decode, one query a sequence: v1 unsplit, v2 in fixed partitions, the automatic choice in even shares."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from paged_jax.kernels.triton import launch
from paged_jax.options import AttentionOptions
from paged_jax.shapes import BlockTables, Cache, Lse, NewTokens, Query, Residual, SeqLens, SlotMapping, TmpOut


def paged_attention_v1(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
) -> tuple[Query, Lse]:
    gpu = launch.device()
    config = launch.attention_config(query, key_cache, value_cache, options, gpu)
    config = replace(config, ranked=launch.ranked(config, query.shape[0], gpu))
    out, lse, _ = _decode(query, key_cache, value_cache, block_tables, seq_lens, options, config, 1, gpu)
    return out, lse


def paged_attention(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
) -> tuple[Query, Lse]:
    gpu = launch.device()
    config, splits = _automatic(query, key_cache, value_cache, options, gpu)
    parts = _decode(query, key_cache, value_cache, block_tables, seq_lens, options, config, splits, gpu)
    return _whole(query, seq_lens, options, config, gpu, *parts)


def write_and_attend(
    query: Query,
    key: NewTokens,
    value: NewTokens,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    slot_mapping: SlotMapping,
    options: AttentionOptions,
) -> tuple[Query, Lse, Cache, Cache]:
    caches = key_cache, value_cache
    if query.size == 0 or key_cache.size == 0:  # nothing to write
        return *paged_attention(query, *caches, block_tables, seq_lens, options), *caches
    gpu = launch.device()
    config, splits = _automatic(query, *caches, options, gpu)
    narrower = key_cache.dtype.itemsize < key.dtype.itemsize
    scales = (options.k_scale, options.v_scale) if narrower else (None, None)
    config = replace(config, write=launch.quantisation(key.dtype, key_cache.dtype, *scales, gpu))
    arrays = query, key, value, block_tables, seq_lens, slot_mapping, *launch.option_arrays(options)
    scalars = query.shape[0], block_tables.shape[1], options.max_seq_len, splits, key_cache.shape[0]
    shapes = *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches), *_shapes(query, config, splits)
    num_programs = query.shape[0] * splits * config.num_kv_heads * config.head_tiles
    key_cache, value_cache, *parts = launch.call(
        "attend", "write_and_decode_kernel", config, num_programs, arrays, scalars, shapes, gpu, in_place=caches
    )
    return *_whole(query, seq_lens, options, config, gpu, *parts), key_cache, value_cache


def paged_attention_v2(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
    *,
    partition_size: int,
) -> tuple[Query, Lse, Residual, Residual, TmpOut]:
    gpu = launch.device()
    config = launch.attention_config(query, key_cache, value_cache, options, gpu)
    partitions = -(-options.max_seq_len // partition_size)
    # One longer than every context would overflow, and holds no more than the contexts do.
    partition_size = min(partition_size, max(1, -(-options.max_seq_len // config.block_size)) * config.block_size)
    config = replace(config, final=False, partition_size=partition_size)
    parts = _decode(query, key_cache, value_cache, block_tables, seq_lens, options, config, partitions, gpu)
    out, lse = _reduce(query, seq_lens, options, config, gpu, *parts)
    tmp_out, exp_sums, max_logits = parts
    return out, lse, exp_sums, max_logits, tmp_out


def _automatic(
    query: Query, key_cache: Cache, value_cache: Cache, options: AttentionOptions, gpu: launch.Device
) -> tuple[launch.Config, int]:
    """The config, and the number of splits, that static shapes suggest."""
    config = launch.attention_config(query, key_cache, value_cache, options, gpu)
    splits = launch.num_splits(config, max(query.shape[0], 1), options.max_seq_len, gpu)
    if splits > 1 and options.max_seq_len <= splits * config.tile:  # a tile each: smaller ones fill more of the GPU
        config = replace(config, tile=max(min(config.tile, 32), config.tile // 2))
        splits = launch.num_splits(config, max(query.shape[0], 1), options.max_seq_len, gpu)
    if splits > 1:
        return replace(config, final=False), splits
    return replace(config, ranked=launch.ranked(config, query.shape[0], gpu)), 1


def _shapes(query: Query, config: launch.Config, splits: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of what a decode kernel returns: out, lse and nothing, or each split's tmp_out, exp_sums and max_logits."""
    num_seqs, num_heads, head_size = query.shape
    if config.final:
        out, lse = jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct(query.shape[:2], jnp.float32)
        return out, lse, jax.ShapeDtypeStruct((1,), jnp.float32)
    residual = jax.ShapeDtypeStruct((num_seqs, num_heads, splits), jnp.float32)
    return jax.ShapeDtypeStruct((*residual.shape, head_size), jnp.float32), residual, residual


def _decode(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
    config: launch.Config,
    splits: int,
    gpu: launch.Device,
) -> tuple[Array, Array, Array]:
    """out, lse and nothing if `config.final`; else each split's tmp_out, exp_sums and max_logits."""
    num_seqs, shapes = query.shape[0], _shapes(query, config, splits)
    num_programs = num_seqs * splits * config.num_kv_heads * config.head_tiles
    if num_programs == 0:
        first, second, third = (jnp.zeros(x.shape, x.dtype) for x in shapes)
        return first, second, third
    arrays = (query, key_cache, value_cache, block_tables, seq_lens, *launch.option_arrays(options))
    scalars = num_seqs, block_tables.shape[1], options.max_seq_len, splits
    return tuple(launch.call("attend", "decode_kernel", config, num_programs, arrays, scalars, shapes, gpu))


def _whole(
    query: Query, seq_lens: SeqLens, options: AttentionOptions, config: launch.Config, gpu: launch.Device, *parts: Array
) -> tuple[Query, Lse]:
    """out and lse, from what `_decode` returns."""
    if config.final:
        return parts[0], parts[1]
    return _reduce(query, seq_lens, options, config, gpu, *parts)


def _reduce(
    query: Query,
    seq_lens: SeqLens,
    options: AttentionOptions,
    config: launch.Config,
    gpu: launch.Device,
    tmp_out: TmpOut,
    exp_sums: Residual,
    max_logits: Residual,
) -> tuple[Query, Lse]:
    num_seqs, num_heads, splits = exp_sums.shape
    if num_seqs * splits == 0:
        return jnp.zeros(query.shape, query.dtype), jnp.full((num_seqs, num_heads), -jnp.inf, jnp.float32)
    sinks = launch.option_arrays(options)[2]
    shapes = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((num_seqs, num_heads), jnp.float32),
    )
    arrays = tmp_out, exp_sums, max_logits, seq_lens, sinks
    config = launch.reduce_config(config, num_seqs, splits, gpu)
    num_programs = num_seqs * num_heads * config.reduce_parts
    return tuple(launch.call("attend", "reduce_kernel", config, num_programs, arrays, (splits,), shapes, gpu))
