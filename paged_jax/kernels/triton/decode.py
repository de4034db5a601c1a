"""Decode, one query a sequence: v1 unsplit, v2 in fixed partitions, the automatic choice in even shares."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from paged_jax.kernels.triton import launch
from paged_jax.options import AttentionOptions
from paged_jax.shapes import BlockTables, Cache, Lse, Query, Residual, SeqLens, TmpOut


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
    config = launch.attention_config(query, key_cache, value_cache, options, gpu)
    splits = launch.num_splits(config, max(query.shape[0], 1), options.max_seq_len, gpu)
    if splits == 1:
        return paged_attention_v1(query, key_cache, value_cache, block_tables, seq_lens, options)
    if options.max_seq_len <= splits * config.tile:  # a tile each: smaller ones fill more of the GPU
        config = replace(config, tile=max(min(config.tile, 32), config.tile // 2))
        splits = launch.num_splits(config, query.shape[0], options.max_seq_len, gpu)
    config = replace(config, final=False)
    parts = _decode(query, key_cache, value_cache, block_tables, seq_lens, options, config, splits, gpu)
    return _reduce(query, seq_lens, options, config, gpu, *parts)


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
    config = replace(config, final=False, partition_size=partition_size)
    partitions = -(-options.max_seq_len // partition_size)
    parts = _decode(query, key_cache, value_cache, block_tables, seq_lens, options, config, partitions, gpu)
    out, lse = _reduce(query, seq_lens, options, config, gpu, *parts)
    tmp_out, exp_sums, max_logits = parts
    return out, lse, exp_sums, max_logits, tmp_out


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
    num_seqs, num_heads, _ = query.shape
    f32 = jnp.float32
    if config.final:
        shapes = (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((num_seqs, num_heads), f32),
            jax.ShapeDtypeStruct((1,), f32),
        )
    else:
        residual = jax.ShapeDtypeStruct((num_seqs, num_heads, splits), f32)
        shapes = jax.ShapeDtypeStruct((*residual.shape, query.shape[2]), f32), residual, residual
    num_programs = num_seqs * splits * config.num_kv_heads * config.head_tiles
    if num_programs == 0:
        first, second, third = (jnp.zeros(x.shape, x.dtype) for x in shapes)
        return first, second, third
    arrays = (query, key_cache, value_cache, block_tables, seq_lens, *launch.option_arrays(options))
    scalars = num_seqs, block_tables.shape[1], options.max_seq_len, splits
    return tuple(launch.call("attend", "decode_kernel", config, num_programs, arrays, scalars, shapes, gpu))


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
