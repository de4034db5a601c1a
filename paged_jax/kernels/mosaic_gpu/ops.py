"""Chooses between the decode kernel and the ragged kernel, for ops that both can run."""

from dataclasses import replace

import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.decode import call as decode
from paged_jax.kernels.mosaic_gpu.decode import choose
from paged_jax.kernels.mosaic_gpu.ragged import call as ragged
from paged_jax.kernels.problem import Device, Problem
from paged_jax.options import AttentionOptions
from paged_jax.shapes import BlockTables, Cache, Lse, Query, QueryStartLoc, RaggedLse, RaggedQuery, SeqLens


def is_decode(
    query: RaggedQuery,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
) -> bool:
    """Whether the decode kernel takes a ragged batch, because each sequence is known to have one query or none.

    Decode is faster than thin items (benchmarks/LOG.md, "One query by the decode kernel" and "A bound of query
    lengths"). There must be no more rows than sequences, because each row of padding goes to a sequence without a
    query.
    """
    if options.max_query_len != 1 or seq_lens.shape[0] < query.shape[0]:
        return False
    problem = Problem.of_call(query, key_cache, value_cache, block_tables, options)
    return not choose.refusals(problem, Device())  # the default `Device`: both kernels refuse GPUs other than Hopper's


def paged_attention(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
) -> tuple[Query, Lse]:
    """Attends with the decode kernel, or with the ragged kernel if there is a block-sparse pattern."""
    arrays = query, key_cache, value_cache, block_tables, seq_lens
    if options.block_sparse is None:
        return decode.paged_attention(*arrays, options)
    starts = jnp.arange(query.shape[0] + 1, dtype=jnp.int32)  # for the ragged kernel, each sequence has one query
    return ragged.ragged_paged_attention(*arrays, starts, options)


def ragged_paged_attention(
    query: RaggedQuery,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    options: AttentionOptions,
) -> tuple[RaggedQuery, RaggedLse]:
    """Attends with the ragged kernel, or with the decode kernel if the batch is known to be decode."""
    caches = key_cache, value_cache, block_tables
    if not is_decode(query, *caches, seq_lens, options):
        return ragged.ragged_paged_attention(query, *caches, seq_lens, query_start_loc, options)
    options = replace(options, causal=True)  # a sequence's only query is its last token, which sees all tokens
    return decode.ragged_paged_attention(query, *caches, seq_lens, query_start_loc, options)
