"""Ragged attention: tiles of queries, found on the device; prefill, chunks and decodes in one launch."""

import jax
import jax.numpy as jnp

from paged_jax.kernels.problem import Unsupported
from paged_jax.kernels.triton import launch
from paged_jax.options import AttentionOptions
from paged_jax.shapes import BlockTables, Cache, NewTokens, QueryStartLoc, RaggedLse, RaggedQuery, SeqLens


def ragged_paged_attention(
    query: RaggedQuery,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    options: AttentionOptions,
) -> tuple[RaggedQuery, RaggedLse]:
    return _ragged(query, None, None, key_cache, value_cache, block_tables, seq_lens, query_start_loc, options)


def prefix_attention(
    query: RaggedQuery,
    key: NewTokens,
    value: NewTokens,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    options: AttentionOptions,
) -> tuple[RaggedQuery, RaggedLse]:
    return _ragged(query, key, value, key_cache, value_cache, block_tables, seq_lens, query_start_loc, options)


def _ragged(
    query: RaggedQuery,
    key: NewTokens | None,
    value: NewTokens | None,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    options: AttentionOptions,
) -> tuple[RaggedQuery, RaggedLse]:
    if not options.causal:
        raise Unsupported("triton", ["lacks causal=False"])
    gpu = launch.device()
    num_tokens, num_heads, _ = query.shape
    num_seqs, table_width = block_tables.shape
    config = launch.attention_config(
        query,
        key_cache,
        value_cache,
        options,
        gpu,
        # The average: batches of decodes get small tiles, prompts large ones. At least 2: 1 is decode's config.
        queries_per_seq=max(2, -(-num_tokens // max(num_seqs, 1))),
        prefix=key is not None,
    )
    shapes = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
    )
    if num_tokens == 0:
        return jnp.zeros(query.shape, query.dtype), jnp.zeros((0, num_heads), jnp.float32)
    num_tiles = num_tokens // config.queries + num_seqs + 1  # the last are for the padding rows
    num_programs = num_tiles * config.num_kv_heads * config.head_tiles
    new = query if key is None else key, query if value is None else value  # absent ones are not read
    caches = key_cache, value_cache, block_tables
    arrays = (query, *new, *caches, seq_lens, query_start_loc, *launch.option_arrays(options))
    scalars = num_tokens, num_seqs, table_width, options.max_seq_len, num_tiles
    return tuple(launch.call("attend", "ragged_kernel", config, num_programs, arrays, scalars, shapes, gpu))
