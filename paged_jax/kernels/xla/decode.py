"""Decode attention: v1 computes all sequences at once, v2 one partition after the other."""

from typing import cast

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float32

from paged_jax.kernels.xla import cache_ops, softmax
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
    queries, end = query[:, None], jnp.minimum(seq_lens, options.max_seq_len)
    state = softmax.add_cached(
        softmax.empty(queries),
        queries,
        seq_lens[:, None] - 1,
        key_cache,
        value_cache,
        block_tables,
        end,
        options,
    )
    out, lse = softmax.finish(state, options.per_head)
    return out[:, 0].astype(query.dtype), lse[:, 0]


# On a CPU partitions gain nothing, so the automatic choice is v1.
paged_attention = paged_attention_v1


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
    narrower = key_cache.dtype.itemsize < key.dtype.itemsize
    scales = (options.k_scale, options.v_scale) if narrower else (None, None)
    written = cache_ops.write_to_paged_cache(
        key, value, key_cache, value_cache, slot_mapping, *scales, layout=options.layout
    )
    key_cache, value_cache = cast(tuple[Cache, Cache], written)
    out, lse = paged_attention(query, key_cache, value_cache, block_tables, seq_lens, options)
    return out, lse, key_cache, value_cache


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
    starts = jnp.arange(0, options.max_seq_len, partition_size, dtype=jnp.int32)

    # One sequence at a time is computed, so that a row's arithmetic cannot depend on the rest of the batch.
    def one(sequence):
        query, table, seq_len = sequence
        queries, position = query[None, None], seq_len[None, None] - 1

        def partition(start):
            # The partition's end, `start + partition_size`, may be beyond int32.
            rest = jnp.minimum(seq_len, options.max_seq_len) - start
            end = (start + jnp.minimum(rest, partition_size))[None]
            state = softmax.add_cached(
                softmax.empty(queries),
                queries,
                position,
                key_cache,
                value_cache,
                table[None],
                end,
                options,
                origin=start,
                tile=partition_size,
            )
            tmp_out, _ = softmax.finish(state, None)
            return state.exp_sum[0, 0], state.max_logit[0, 0], tmp_out[0, 0]

        exp_sums, max_logits, tmp_out = lax.map(partition, starts)
        out, lse = softmax.finish(_reduce(exp_sums, max_logits, tmp_out), options.per_head)
        return (
            out[0, 0].astype(query.dtype),
            lse[0, 0],
            exp_sums.T,
            max_logits.T,
            tmp_out.transpose(1, 0, 2),
        )

    return lax.map(one, (query, block_tables, seq_lens))


def _reduce(
    exp_sums: Float32[Array, "p h"], max_logits: Float32[Array, "p h"], tmp_out: Float32[Array, "p h d"]
) -> softmax.Softmax:
    """Merges the partitions of one sequence into one softmax.

    The partitions are added one after the other, so that empty ones at the end add exact zeros.
    """
    max_logit = max_logits.max(0, initial=-jnp.inf)
    shift = jnp.where(jnp.isneginf(max_logit), 0.0, max_logit)

    def add(sums, partition):
        exp_sum, logit, out = partition
        weight = exp_sum * jnp.exp(logit - shift)
        return (sums[0] + weight[:, None] * out, sums[1] + weight), None

    zeros = jnp.zeros(tmp_out.shape[1:], jnp.float32), jnp.zeros(exp_sums.shape[1:], jnp.float32)
    partitions = exp_sums, max_logits, tmp_out
    (weighted, total), _ = lax.scan(add, zeros, partitions)
    return softmax.Softmax(weighted[None, None], total[None, None], max_logit[None, None])
