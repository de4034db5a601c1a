"""The public attention ops: what they take and return. Checks, then dispatch; no arithmetic.

Attention ops share the keywords of `paged_jax.options.Options`, and these two:

- return_lse: also return the log-sum-exp of the logits, f32 [..., num_heads], sinks included; -inf where a query
  sees no token.
- implementation: "mosaic_gpu", "triton" or "xla"; None takes the first that can, chosen when the call is lowered.

Every op, those of `paged_jax.cache_ops` too, raises ValueError or TypeError at trace time for a wrong shape, dtype or
option, NotImplementedError if the implementation asked for lacks an option, and TypeError when differentiated: they
are inference only. All of them work under jit, vmap, scan, shard_map (over kv heads, with ``check_vma=False``) and
jax.export (which for Triton kernels has to be told to go without a check, see README.md).
"""

from typing import Any, Unpack

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from paged_jax import _dispatch, _validate
from paged_jax.options import Implementation, Options
from paged_jax.shapes import (
    BlockTables,
    Cache,
    NewTokens,
    Query,
    QueryStartLoc,
    RaggedQuery,
    SeqLens,
    SlotMapping,
)


def paged_attention_v1(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    *,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **options: Unpack[Options],
) -> Any:
    """Decode attention over a paged KV cache, in one pass over each sequence.

    Args:
      query: [num_seqs, num_heads, head_size], float16, bfloat16 or float32: one new token a sequence, whose key and
        value are already in the cache. num_heads is a multiple of num_kv_heads.
      key_cache, value_cache: one layer's pool of blocks in `layout`; query's dtypes, float8_e4m3fn, float8_e5m2
        or int8. Read in place. Slots and blocks that no sequence uses may hold anything, NaN included.
      block_tables: i32 [num_seqs, max_blocks_per_seq]; entries at or past ceil(seq_len / block_size) are not read.
      seq_lens: i32 [num_seqs], tokens of each sequence, the new one included; 0 gives out 0 and lse -inf.
      return_lse, implementation: see `paged_jax.ops`.
      **options: see `paged_jax.options.Options`.

    Returns:
      out, of query's shape and dtype, accumulated in float32; with return_lse ``(out, lse)``.

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` lacks an option.

    Aliasing: none, the caches are only read. vmap: a batch of calls becomes one call with more sequences.
    Sharding: split heads and kv heads alike. Source: vLLM's paged_attention_v1.
    """
    operands = _validate.decode_operands(query, key_cache, value_cache, block_tables, seq_lens, options)
    out, lse = _dispatch.call("paged_attention_v1", *operands, implementation=implementation)
    return (out, lse) if return_lse else out


def paged_attention_v2(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    *,
    partition_size: int = 512,
    return_residuals: bool = False,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **options: Unpack[Options],
) -> Any:
    """Decode attention over a paged KV cache, split over partitions of the context and then reduced.

    A row's result depends on its own sequence and `partition_size` alone: it is bit-equal in any batch.

    Args:
      query, key_cache, value_cache, block_tables, seq_lens: as for `paged_attention_v1`.
      partition_size: tokens of a partition, a multiple of block_size.
      return_residuals: also return each partition's sums.
      return_lse, implementation: see `paged_jax.ops`.
      **options: see `paged_jax.options.Options`.

    Returns:
      out, or a tuple of out, then lse with return_lse, then with return_residuals exp_sums and max_logits, f32
      [num_seqs, num_heads, max_num_partitions], and tmp_out, f32 [..., head_size], each partition's normalised
      result. Residuals leave sinks out. Empty partitions give 0, -inf and 0.

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` lacks an option.

    Aliasing, vmap, sharding: as for `paged_attention_v1`. Source: vLLM's paged_attention_v2.
    """
    operands = _validate.decode_operands(query, key_cache, value_cache, block_tables, seq_lens, options)
    _validate.partition_size(partition_size, _validate.block_size(operands[2], operands[-1].layout))
    out, lse, *residuals = _dispatch.call(
        "paged_attention_v2", *operands, implementation=implementation, partition_size=int(partition_size)
    )
    results = (out, *([lse] if return_lse else []), *(residuals if return_residuals else []))
    return results if len(results) > 1 else out


def paged_attention(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    *,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **options: Unpack[Options],
) -> Any:
    """Decode attention over a paged KV cache, split as static shapes suggest: the one to use.

    Args, Returns, Raises, aliasing, vmap, sharding: as for `paged_attention_v1`. Source: vLLM's forward_decode.
    """
    operands = _validate.decode_operands(query, key_cache, value_cache, block_tables, seq_lens, options)
    out, lse = _dispatch.call("paged_attention", *operands, implementation=implementation)
    return (out, lse) if return_lse else out


def write_and_attend(
    query: Query,
    key: NewTokens,
    value: NewTokens,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    slot_mapping: SlotMapping,
    *,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **options: Unpack[Options],
) -> Any:
    """Decode attention that puts each sequence's new key and value into the cache on the way.

    What it computes is `write_to_paged_cache` and then `paged_attention`: attention sees the values as they are
    stored, quantised in a narrower cache. The scales are those of attention; the write divides by them where the
    cache is narrower than key, and stores key and value as they are where it is not.

    Args:
      query, key_cache, value_cache, block_tables: as for `paged_attention_v1`.
      key, value: [num_seqs, num_kv_heads, head_size], of query's dtype: of each sequence's last token.
      seq_lens: i32 [num_seqs], tokens of each sequence, the new one included.
      slot_mapping: i32 [num_seqs], ``block * block_size + offset`` of each sequence's last token, the one at position
        ``seq_lens[s] - 1``. Rows with a negative slot, or one past the pool, write nothing and attend to what the
        cache holds. Any other slot is written whatever it is, but the results of rows that are given the slot of
        another position, or whose context holds a slot that another row writes, are unspecified.
      return_lse, implementation: see `paged_jax.ops`.
      **options: see `paged_jax.options.Options`.

    Returns:
      ``(out, key_cache, value_cache)``, or with return_lse ``(out, lse, key_cache, value_cache)``; every other slot of
      the caches is bit-identical.

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` lacks an option.

    Aliasing: donate both caches to update them in place; otherwise both are copied first. vmap: one call after the
    other. Sharding: split heads and kv heads alike.
    """
    query = _validate.tokens("query", query, "num_seqs")
    key, value = _validate.new_tokens(key, value, query.shape[0], query.shape[2], query.dtype)
    operands = _validate.decode_operands(
        query, key_cache, value_cache, block_tables, seq_lens, options, num_kv_heads=key.shape[1]
    )
    slot_mapping = _validate.indices("slot_mapping", slot_mapping, "num_seqs")
    _validate.shape("slot_mapping", slot_mapping, query.shape[:1], "num_seqs")
    out, lse, *caches = _dispatch.call(
        "write_and_attend",
        query,
        key,
        value,
        *operands[1:-1],
        slot_mapping,
        operands[-1],
        implementation=implementation,
    )
    return (out, lse, *caches) if return_lse else (out, *caches)


def ragged_paged_attention(
    query: RaggedQuery,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    *,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **options: Unpack[Options],
) -> Any:
    """Causal attention of ragged queries over a paged KV cache: prefill, chunked prefill, decode, or a mix.

    Query j of sequence s stands at position ``seq_lens[s] - query_len + j`` and sees the tokens up to it.

    Args:
      query: [num_tokens, num_heads, head_size]: all sequences' new tokens, one sequence after the other. Their keys
        and values are already in the cache. Rows past query_start_loc[-1] are padding and come out 0.
      key_cache, value_cache, block_tables: as for `paged_attention_v1`.
      seq_lens: i32 [num_seqs], tokens of each sequence, the new ones included.
      query_start_loc: i32 [num_seqs + 1], exclusive prefix sum of the query lengths, each of which may be 0.
      return_lse, implementation: see `paged_jax.ops`.
      **options: see `paged_jax.options.Options`.

    Returns:
      out, of query's shape and dtype; with return_lse ``(out, lse)``.

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` lacks an option.

    Aliasing: none. vmap: one call after the other. Sharding: split heads and kv heads alike.
    Source: PagedAttention (arXiv:2309.06180); vLLM's unified attention.
    """
    query = _validate.tokens("query", query, "num_tokens")
    operands = _validate.attention_operands(query, key_cache, value_cache, block_tables, seq_lens, options)
    query_start_loc = _validate.query_start_loc(query_start_loc, operands[4])
    out, lse = _dispatch.call(
        "ragged_paged_attention", *operands[:-1], query_start_loc, operands[-1], implementation=implementation
    )
    return (out, lse) if return_lse else out


def prefix_attention(
    query: RaggedQuery,
    key: NewTokens,
    value: NewTokens,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    *,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **options: Unpack[Options],
) -> Any:
    """Like `ragged_paged_attention`, with the new tokens' keys and values given instead of read from the cache.

    Args:
      query: [num_tokens, num_heads, head_size], as for `ragged_paged_attention`.
      key, value: [num_tokens, num_kv_heads, head_size], of query's dtype: the new tokens at full precision, whether
        or not they are in the cache too. k_scale and v_scale do not apply to them.
      key_cache, value_cache, block_tables: hold the context, the tokens before the new ones.
      seq_lens, query_start_loc, return_lse, implementation, **options: as for `ragged_paged_attention`.

    Returns:
      out, of query's shape and dtype; with return_lse ``(out, lse)``.

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` lacks an option.

    Aliasing, vmap, sharding: as for `ragged_paged_attention`. Source: vLLM's forward_prefix.
    """
    query = _validate.tokens("query", query, "num_tokens")
    key, value = _validate.new_tokens(key, value, query.shape[0], query.shape[2], query.dtype)
    operands = _validate.attention_operands(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        options,
        num_kv_heads=key.shape[1],
        new_tokens=key.shape[0],
    )
    query_start_loc = _validate.query_start_loc(query_start_loc, operands[4])
    out, lse = _dispatch.call(
        "prefix_attention",
        query,
        key,
        value,
        *operands[1:-1],
        query_start_loc,
        operands[-1],
        implementation=implementation,
    )
    return (out, lse) if return_lse else out


def merge_attention_states(
    out_a: Float[Array, "... num_heads head_size"],
    lse_a: Float32[Array, "... num_heads"],
    out_b: Float[Array, "... num_heads head_size"],
    lse_b: Float32[Array, "... num_heads"],
) -> tuple[Float[Array, "... num_heads head_size"], Float32[Array, "... num_heads"]]:
    """Attention over two disjoint sets of tokens, from the attention over each: cascade or shared-prefix attention.

    Associative and commutative, with identity (0, -inf). Differentiable, unlike the kernels.

    Args:
      out_a, out_b: [..., num_heads, head_size], one dtype.
      lse_a, lse_b: f32 [..., num_heads], natural log-sum-exp of the logits. Give a sink to one of the two only.

    Returns:
      ``(out, lse)`` over both sets, of out_a's dtype and f32.

    Raises:
      ValueError, TypeError: shapes or dtypes do not match.

    Source: FlashInfer (arXiv:2501.01005), section 2.2.
    """
    _validate.states(out_a, lse_a, out_b, lse_b)
    # Where neither side saw a token -inf minus -inf is NaN, in gradients too: such rows go by 0 instead.
    empty = jnp.isneginf(lse_a) & jnp.isneginf(lse_b)
    base = jnp.logaddexp(jnp.where(empty, 0.0, lse_a), jnp.where(empty, 0.0, lse_b))
    lse = jnp.where(empty, -jnp.inf, base)
    weight_a, weight_b = jnp.exp(lse_a - base)[..., None], jnp.exp(lse_b - base)[..., None]
    out = weight_a * out_a.astype(jnp.float32) + weight_b * out_b.astype(jnp.float32)
    return out.astype(out_a.dtype), lse
