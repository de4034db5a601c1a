"""Multi-head latent attention: decode and ragged attention over keys whose first elements are the values."""

import jax.numpy as jnp

from paged_jax.kernels.xla import softmax
from paged_jax.kernels.xla.ragged import chunk_by_chunk
from paged_jax.options import AttentionOptions
from paged_jax.shapes import (
    BlockTables,
    LatentCache,
    LatentOut,
    LatentQuery,
    Lse,
    QueryStartLoc,
    RaggedLatentOut,
    RaggedLatentQuery,
    RaggedLse,
    SeqLens,
)


def mla_paged_attention(
    query: LatentQuery,
    latent_cache: LatentCache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
    *,
    value_size: int,
) -> tuple[LatentOut, Lse]:
    queries, end = query[:, None], jnp.minimum(seq_lens, options.max_seq_len)
    state = softmax.empty(queries, value_size)
    positions = seq_lens[:, None] - 1
    state = softmax.add_cached(state, queries, positions, latent_cache, None, block_tables, end, options)
    out, lse = softmax.finish(state, options.per_head)
    return out[:, 0].astype(query.dtype), lse[:, 0]


def ragged_mla_attention(
    query: RaggedLatentQuery,
    latent_cache: LatentCache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    options: AttentionOptions,
    *,
    value_size: int,
) -> tuple[RaggedLatentOut, RaggedLse]:
    def attend_to(state, queries, positions, seq, end):
        table = block_tables[seq][None]
        return softmax.add_cached(state, queries, positions, latent_cache, None, table, end[None], options)

    return chunk_by_chunk(query, seq_lens, query_start_loc, options, attend_to, value_size)
