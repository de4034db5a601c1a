"""Ragged attention: tiles of queries, found on the device; prefill, chunks and decodes in one launch."""

import jax
import jax.numpy as jnp

from paged_jax.kernels.problem import OptionArrays, Problem
from paged_jax.kernels.triton import launch, tuning
from paged_jax.kernels.triton.tuning import AttentionKernel, cdiv
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
    gpu = launch.device()
    problem = Problem.of_call(query, key_cache, value_cache, block_tables, options)
    launch.check(gpu, problem.cache_dtype)
    # Tiles are as large as sequences have queries on average. At least 2, since 1 stands for decode's tuning.
    queries_per_seq = max(2, cdiv(problem.num_tokens, max(problem.num_seqs, 1)))
    prefix = key is not None
    tuned = tuning.attention(problem, gpu, queries_per_seq=queries_per_seq, prefix=prefix)
    kernel = AttentionKernel(problem.attention, tuned, prefix)
    if problem.num_tokens == 0:
        return jnp.zeros(query.shape, query.dtype), jnp.zeros((0, problem.num_heads), jnp.float32)
    shapes = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((problem.num_tokens, problem.num_heads), jnp.float32),
    )
    num_tiles = problem.num_tokens // tuned.queries + problem.num_seqs + 1  # the last ones are for the padding rows
    num_programs = num_tiles * problem.num_kv_heads * kernel.head_tiles
    new = query if key is None else key, query if value is None else value  # the kernel does not read absent ones
    caches = key_cache, value_cache, block_tables
    arrays = query, *new, *caches, seq_lens, query_start_loc, *OptionArrays.of(options).flat
    scalars = problem.num_tokens, problem.num_seqs, problem.max_blocks_per_seq, problem.max_seq_len, num_tiles
    return tuple(launch.call("attend", "ragged_kernel", kernel, num_programs, arrays, scalars, shapes, gpu))
