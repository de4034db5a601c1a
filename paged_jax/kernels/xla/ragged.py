"""Ragged attention: the queries are cut into chunks of one sequence each, which are computed one after the other.

The device computes from `query_start_loc` which chunk belongs to which sequence. A chunk writes all of its rows; rows
beyond its sequence keep their values.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from paged_jax.kernels.xla import softmax
from paged_jax.options import AttentionOptions
from paged_jax.shapes import BlockTables, Cache, NewTokens, QueryStartLoc, RaggedLse, RaggedQuery, SeqLens

_CHUNK = 64  # queries of a chunk


def ragged_paged_attention(
    query: RaggedQuery,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    options: AttentionOptions,
) -> tuple[RaggedQuery, RaggedLse]:
    def attend_to(state, queries, positions, seq, end):
        return softmax.add_cached(
            state, queries, positions, key_cache, value_cache, block_tables[seq][None], end[None], options
        )

    return chunk_by_chunk(query, seq_lens, query_start_loc, options, attend_to)


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
    chunk = min(_CHUNK, query.shape[0])
    keys, values = _pad(key, chunk), _pad(value, chunk)
    context_lens = seq_lens - jnp.diff(query_start_loc)

    def attend_to(state, queries, positions, seq, end):
        context, start = context_lens[seq], query_start_loc[seq]
        cached = jnp.minimum(context, options.max_seq_len)
        state = softmax.add_cached(
            state, queries, positions, key_cache, value_cache, block_tables[seq][None], cached[None], options
        )

        def step(i, state):
            first = i * chunk
            tile = softmax.Tile(
                lax.dynamic_slice_in_dim(keys, start + first, chunk)[None],
                lax.dynamic_slice_in_dim(values, start + first, chunk)[None],
                context + first + jnp.arange(chunk, dtype=jnp.int32),
            )
            return softmax.add_tile(state, queries, positions, tile, end[None], options)

        return lax.fori_loop(0, -(-(end - context) // chunk), step, state)

    return chunk_by_chunk(query, seq_lens, query_start_loc, options, attend_to)


def chunk_by_chunk(
    query: RaggedQuery,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    options: AttentionOptions,
    attend_to: Callable[..., softmax.Softmax],
    value_size: int | None = None,
) -> tuple[Float[Array, "num_tokens num_heads value_size"], RaggedLse]:
    """Calls ``attend_to(state, queries, positions, seq, end)`` for every chunk.

    `end` is one past the last token that any of the chunk's queries sees. `value_size` is head_size if it is None.
    """
    num_tokens, num_heads, head_size = query.shape
    value_size = head_size if value_size is None else value_size
    if num_tokens == 0 or seq_lens.shape[0] == 0:
        out = jnp.zeros((num_tokens, num_heads, value_size), query.dtype)
        return out, jnp.full((num_tokens, num_heads), -jnp.inf, jnp.float32)
    chunk = min(_CHUNK, num_tokens)
    query_lens = jnp.diff(query_start_loc)
    last_chunk = jnp.cumsum(-(-query_lens // chunk), dtype=jnp.int32)  # one past each sequence's last chunk
    queries = _pad(query, chunk)

    def step(i, results):
        seq = jnp.searchsorted(last_chunk, i, side="right").astype(jnp.int32)
        first_chunk = last_chunk[seq] - -(-query_lens[seq] // chunk)
        offset = (i - first_chunk) * chunk
        rows = offset + jnp.arange(chunk, dtype=jnp.int32)
        own = rows < query_lens[seq]
        context_len = seq_lens[seq] - query_lens[seq]
        # The position of a query that sees all tokens does not matter; a prefix can have more queries than tokens.
        positions = jnp.where(own, context_len + rows if options.causal else 0, -1)
        start = query_start_loc[seq] + offset
        chunk_queries = lax.dynamic_slice_in_dim(queries, start, chunk)[None]
        last = context_len + offset + chunk if options.causal else seq_lens[seq]
        end = jnp.minimum(jnp.minimum(seq_lens[seq], last), options.max_seq_len)
        state = attend_to(softmax.empty(chunk_queries, value_size), chunk_queries, positions[None], seq, end)
        done = softmax.finish(state, options.per_head)

        def put(result, new):
            old = lax.dynamic_slice_in_dim(result, start, chunk)
            mask = own.reshape(-1, *[1] * (old.ndim - 1))
            return lax.dynamic_update_slice_in_dim(result, jnp.where(mask, new[0].astype(old.dtype), old), start, 0)

        return put(results[0], done[0]), put(results[1], done[1])

    out = jnp.zeros((queries.shape[0], num_heads, value_size), queries.dtype)
    lse = jnp.full((queries.shape[0], num_heads), -jnp.inf, jnp.float32)
    out, lse = lax.fori_loop(0, last_chunk[-1], step, (out, lse))
    return out[:num_tokens], lse[:num_tokens]


def _pad(x: Array, rows: int) -> Array:
    """Appends rows, so that a chunk may begin at the last one."""
    return jnp.pad(x, ((0, rows), *[(0, 0)] * (x.ndim - 1)))
