"""Decode: one query a sequence over a paged KV cache. `paged_jax.ops` says what holds for every op."""

from typing import Literal, Unpack, overload

from paged_jax import _checks, _dispatch, _validate
from paged_jax._dispatch import Implementation
from paged_jax.options import Options
from paged_jax.shapes import BlockTables, Cache, Lse, Query, Residual, SeqLens, TmpOut


# fmt: off
@overload
def paged_attention(
    query: Query, key_cache: Cache, value_cache: Cache, block_tables: BlockTables, seq_lens: SeqLens, *,
    return_lse: Literal[False] = False, implementation: Implementation | None = None, **options: Unpack[Options],
) -> Query: ...
@overload
def paged_attention(
    query: Query, key_cache: Cache, value_cache: Cache, block_tables: BlockTables, seq_lens: SeqLens, *,
    return_lse: Literal[True], implementation: Implementation | None = None, **options: Unpack[Options],
) -> tuple[Query, Lse]: ...
# fmt: on
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
) -> Query | tuple[Query, Lse]:
    """Decode attention over a paged KV cache, the op to use by default: it chooses how contexts are split.

    Args:
      query: [num_seqs, num_heads, head_size], float16, bfloat16 or float32: one new token a sequence, whose key and
        value are already in the cache. num_heads is a multiple of num_kv_heads.
      key_cache, value_cache: one layer's pools of blocks in `layout`, of one of query's dtypes, float8_e4m3fn,
        float8_e5m2 or int8. Slots and blocks that no sequence uses may hold anything, NaN included.
      block_tables: i32 [num_seqs, max_blocks_per_seq]; entries at or past ceil(seq_len / block_size) are not read.
      seq_lens: i32 [num_seqs], tokens of each sequence, the new one included. Where it is 0, out is 0 and lse -inf.
      return_lse: whether to return the log-sum-exp of the logits too; sinks are part of it.
      implementation: the name of an implementation (`paged_jax.Implementation`); None takes the first that can.
      **options: `scale`, `alibi_slopes`, `sliding_window`, `logits_soft_cap`, `sinks`, `block_sparse`, `k_scale`,
        `v_scale` (both are needed for int8), `layout` and `max_seq_len`: see `paged_jax.options.Options`.

    Returns:
      out, of query's shape and dtype, accumulated in float32; with return_lse ``(out, lse)``, where lse is f32
      [num_seqs, num_heads].

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` cannot do the call.

    Aliasing: none, the caches are only read, in place. vmap: a batch of calls becomes one call with more sequences.
    Sharding: heads and kv heads may be split alike, sequences, and blocks: each device attends to
    its own blocks, and the devices merge their results (without ALiBi, windows and block-sparse patterns).
    Source: PagedAttention (arXiv:2309.06180); vLLM's forward_decode.

    Example:
      The batch is one sequence of 20 tokens, which are in blocks 5 and 2.

      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedKVCache, paged_attention
      >>> cache = PagedKVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64)
      >>> query = jnp.ones((1, 8, 64), jnp.bfloat16)
      >>> block_tables, seq_lens = jnp.array([[5, 2, -1, -1]], jnp.int32), jnp.array([20], jnp.int32)
      >>> out = paged_attention(query, cache.key_cache, cache.value_cache, block_tables, seq_lens, sliding_window=16)
      >>> out.shape, out.dtype
      ((1, 8, 64), dtype(bfloat16))
    """
    operands = _validate.decode_operands(query, key_cache, value_cache, block_tables, seq_lens, options)
    return_lse = _checks.flag("return_lse", return_lse)
    unwanted = () if return_lse else (1,)
    out, lse = _dispatch.call("paged_attention", operands, implementation=implementation, unwanted=unwanted)
    return (out, lse) if return_lse else out


# fmt: off
@overload
def paged_attention_v1(
    query: Query, key_cache: Cache, value_cache: Cache, block_tables: BlockTables, seq_lens: SeqLens, *,
    return_lse: Literal[False] = False, implementation: Implementation | None = None, **options: Unpack[Options],
) -> Query: ...
@overload
def paged_attention_v1(
    query: Query, key_cache: Cache, value_cache: Cache, block_tables: BlockTables, seq_lens: SeqLens, *,
    return_lse: Literal[True], implementation: Implementation | None = None, **options: Unpack[Options],
) -> tuple[Query, Lse]: ...
# fmt: on
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
) -> Query | tuple[Query, Lse]:
    """Decode attention over a paged KV cache, in one pass over each sequence.

    Args:
      query: [num_seqs, num_heads, head_size], float16, bfloat16 or float32: one new token a sequence, whose key and
        value are already in the cache. num_heads is a multiple of num_kv_heads.
      key_cache, value_cache: one layer's pools of blocks in `layout`, of one of query's dtypes, float8_e4m3fn,
        float8_e5m2 or int8. Slots and blocks that no sequence uses may hold anything, NaN included.
      block_tables: i32 [num_seqs, max_blocks_per_seq]; entries at or past ceil(seq_len / block_size) are not read.
      seq_lens: i32 [num_seqs], tokens of each sequence, the new one included. Where it is 0, out is 0 and lse -inf.
      return_lse, implementation: see `paged_jax.ops`.
      **options: see `paged_jax.options.Options`.

    Returns:
      out, of query's shape and dtype, accumulated in float32; with return_lse ``(out, lse)``, where lse is f32
      [num_seqs, num_heads].

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` cannot do the call.

    Aliasing: none, the caches are only read, in place. vmap: a batch of calls becomes one call with more sequences.
    Sharding: as for `paged_attention`. Source: vLLM's paged_attention_v1.

    Example:
      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedKVCache, paged_attention_v1
      >>> cache = PagedKVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64)
      >>> query, block_tables = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.array([[5, 2], [0, -1]], jnp.int32)
      >>> arrays = query, cache.key_cache, cache.value_cache, block_tables, jnp.array([20, 0], jnp.int32)
      >>> out, lse = paged_attention_v1(*arrays, return_lse=True)
      >>> out.shape, lse[1, 0]
      ((2, 8, 64), Array(-inf, dtype=float32))
    """
    operands = _validate.decode_operands(query, key_cache, value_cache, block_tables, seq_lens, options)
    return_lse = _checks.flag("return_lse", return_lse)
    unwanted = () if return_lse else (1,)
    out, lse = _dispatch.call("paged_attention_v1", operands, implementation=implementation, unwanted=unwanted)
    return (out, lse) if return_lse else out


# fmt: off
@overload
def paged_attention_v2(
    query: Query, key_cache: Cache, value_cache: Cache, block_tables: BlockTables, seq_lens: SeqLens, *,
    partition_size: int = 512, return_residuals: Literal[False] = False, return_lse: Literal[False] = False,
    implementation: Implementation | None = None, **options: Unpack[Options],
) -> Query: ...
@overload
def paged_attention_v2(
    query: Query, key_cache: Cache, value_cache: Cache, block_tables: BlockTables, seq_lens: SeqLens, *,
    partition_size: int = 512, return_residuals: Literal[False] = False, return_lse: Literal[True],
    implementation: Implementation | None = None, **options: Unpack[Options],
) -> tuple[Query, Lse]: ...
@overload
def paged_attention_v2(
    query: Query, key_cache: Cache, value_cache: Cache, block_tables: BlockTables, seq_lens: SeqLens, *,
    partition_size: int = 512, return_residuals: Literal[True], return_lse: Literal[False] = False,
    implementation: Implementation | None = None, **options: Unpack[Options],
) -> tuple[Query, Residual, Residual, TmpOut]: ...
@overload
def paged_attention_v2(
    query: Query, key_cache: Cache, value_cache: Cache, block_tables: BlockTables, seq_lens: SeqLens, *,
    partition_size: int = 512, return_residuals: Literal[True], return_lse: Literal[True],
    implementation: Implementation | None = None, **options: Unpack[Options],
) -> tuple[Query, Lse, Residual, Residual, TmpOut]: ...
# fmt: on
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
) -> (
    Query | tuple[Query, Lse] | tuple[Query, Residual, Residual, TmpOut] | tuple[Query, Lse, Residual, Residual, TmpOut]
):
    """Decode attention over a paged KV cache, split over partitions of the context and then reduced.

    The result of a row depends on its own sequence and `partition_size` alone, so that it is bit-equal in any batch.

    Args:
      query: [num_seqs, num_heads, head_size], float16, bfloat16 or float32: one new token a sequence, whose key and
        value are already in the cache. num_heads is a multiple of num_kv_heads.
      key_cache, value_cache: one layer's pools of blocks in `layout`, of one of query's dtypes, float8_e4m3fn,
        float8_e5m2 or int8. Slots and blocks that no sequence uses may hold anything, NaN included.
      block_tables: i32 [num_seqs, max_blocks_per_seq]; entries at or past ceil(seq_len / block_size) are not read.
      seq_lens: i32 [num_seqs], tokens of each sequence, the new one included. Where it is 0, out is 0 and lse -inf.
      partition_size: tokens of a partition, a multiple of block_size.
      return_residuals: whether to return the result of each partition too.
      return_lse, implementation: see `paged_jax.ops`.
      **options: see `paged_jax.options.Options`.

    Returns:
      out, of query's shape and dtype, or a tuple. The tuple holds out; with return_lse lse; and with return_residuals
      exp_sums and max_logits, f32 [num_seqs, num_heads, max_num_partitions], and tmp_out, f32 [num_seqs, num_heads,
      max_num_partitions, head_size], the normalised result of each partition. Sinks are no part of the residuals. An
      empty partition has the residuals 0, -inf and 0.

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` cannot do the call.

    Aliasing: none, the caches are only read, in place. vmap: a batch of calls becomes one call with more sequences.
    Sharding: heads and kv heads may be split alike, and sequences. Source: vLLM's paged_attention_v2.

    Example:
      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedKVCache, paged_attention_v2
      >>> cache = PagedKVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64)
      >>> query, block_tables = jnp.ones((1, 8, 64), jnp.bfloat16), jnp.array([[5, 2, 7, 1]], jnp.int32)
      >>> arrays = query, cache.key_cache, cache.value_cache, block_tables, jnp.array([20], jnp.int32)
      >>> out, *residuals = paged_attention_v2(*arrays, partition_size=32, return_residuals=True)
      >>> [x.shape for x in residuals]
      [(1, 8, 2), (1, 8, 2), (1, 8, 2, 64)]
    """
    operands = _validate.decode_operands(query, key_cache, value_cache, block_tables, seq_lens, options)
    partition_size = _validate.partition_size(partition_size, operands)
    return_residuals = _checks.flag("return_residuals", return_residuals)
    return_lse = _checks.flag("return_lse", return_lse)
    unwanted = (() if return_lse else (1,)) + (() if return_residuals else (2, 3, 4))
    out, lse, exp_sums, max_logits, tmp_out = _dispatch.call(
        "paged_attention_v2",
        operands,
        implementation=implementation,
        unwanted=unwanted,
        partition_size=partition_size,
    )
    if return_residuals:
        return (out, lse, exp_sums, max_logits, tmp_out) if return_lse else (out, exp_sums, max_logits, tmp_out)
    return (out, lse) if return_lse else out
