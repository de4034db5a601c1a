"""Ragged attention: any number of queries a sequence. `paged_jax.ops` says what holds for every op."""

from typing import Literal, Unpack, overload

from paged_jax import _checks, _dispatch, _validate
from paged_jax._dispatch import Implementation
from paged_jax.options import Options
from paged_jax.shapes import BlockTables, Cache, NewTokens, QueryStartLoc, RaggedLse, RaggedQuery, SeqLens


# fmt: off
@overload
def ragged_paged_attention(
    query: RaggedQuery, key_cache: Cache, value_cache: Cache, block_tables: BlockTables, seq_lens: SeqLens,
    query_start_loc: QueryStartLoc, *, causal: bool = True, return_lse: Literal[False] = False,
    implementation: Implementation | None = None, **options: Unpack[Options],
) -> RaggedQuery: ...
@overload
def ragged_paged_attention(
    query: RaggedQuery, key_cache: Cache, value_cache: Cache, block_tables: BlockTables, seq_lens: SeqLens,
    query_start_loc: QueryStartLoc, *, causal: bool = True, return_lse: Literal[True],
    implementation: Implementation | None = None, **options: Unpack[Options],
) -> tuple[RaggedQuery, RaggedLse]: ...
# fmt: on
def ragged_paged_attention(
    query: RaggedQuery,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    *,
    causal: bool = True,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **options: Unpack[Options],
) -> RaggedQuery | tuple[RaggedQuery, RaggedLse]:
    """Attention of ragged queries over a paged KV cache: prefill, chunked prefill, decode, or a mix.

    Query j of sequence s is at position ``seq_lens[s] - query_len + j`` and sees the tokens up to that position.

    Args:
      query: [num_tokens, num_heads, head_size], float16, bfloat16 or float32: all sequences' new tokens, one sequence
        after the other. Their keys and values are already in the cache. Rows past query_start_loc[-1] are padding;
        their results are 0. num_heads is a multiple of num_kv_heads.
      key_cache, value_cache: one layer's pools of blocks in `layout`, of one of query's dtypes, float8_e4m3fn,
        float8_e5m2 or int8. Slots and blocks that no sequence uses may hold anything, NaN included.
      block_tables: i32 [num_seqs, max_blocks_per_seq]; entries at or past ceil(seq_len / block_size) are not read.
      seq_lens: i32 [num_seqs], tokens of each sequence, the new ones included.
      query_start_loc: i32 [num_seqs + 1], exclusive prefix sum of the query lengths; a length may be 0.
      causal: whether each query sees only the tokens up to its own position. With False it sees all tokens of its
        sequence, as where a batch reads a shared prefix once (see `merge_attention_states`); alibi_slopes,
        sliding_window and block_sparse must then be None.
      return_lse, implementation: see `paged_jax.ops`.
      **options: see `paged_jax.options.Options`.

    Returns:
      out, of query's shape and dtype, accumulated in float32; with return_lse ``(out, lse)``, where lse is f32
      [num_tokens, num_heads].

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` cannot do the call.

    Aliasing: none, the caches are only read, in place. vmap: one call after the other. Sharding: heads and kv heads may
    be split alike, and blocks: each device attends to its own blocks, and the devices merge their results (without
    ALiBi, windows and block-sparse patterns).
    Source: PagedAttention (arXiv:2309.06180); vLLM's unified attention.

    Example:
      The batch holds a prompt of 3 tokens, and one new token of a sequence of 20.

      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedKVCache, ragged_paged_attention
      >>> cache = PagedKVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64)
      >>> query, block_tables = jnp.ones((4, 8, 64), jnp.bfloat16), jnp.array([[0, -1], [5, 2]], jnp.int32)
      >>> seq_lens, query_start_loc = jnp.array([3, 20], jnp.int32), jnp.array([0, 3, 4], jnp.int32)
      >>> arrays = query, cache.key_cache, cache.value_cache, block_tables, seq_lens, query_start_loc
      >>> ragged_paged_attention(*arrays).shape
      (4, 8, 64)
    """
    operands = _validate.ragged_operands(
        query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, causal, options
    )
    return_lse = _checks.flag("return_lse", return_lse)
    unwanted = () if return_lse else (1,)
    out, lse = _dispatch.call("ragged_paged_attention", operands, implementation=implementation, unwanted=unwanted)
    return (out, lse) if return_lse else out


# fmt: off
@overload
def prefix_attention(
    query: RaggedQuery, key: NewTokens, value: NewTokens, key_cache: Cache, value_cache: Cache,
    block_tables: BlockTables, seq_lens: SeqLens, query_start_loc: QueryStartLoc, *, causal: bool = True,
    return_lse: Literal[False] = False, implementation: Implementation | None = None, **options: Unpack[Options],
) -> RaggedQuery: ...
@overload
def prefix_attention(
    query: RaggedQuery, key: NewTokens, value: NewTokens, key_cache: Cache, value_cache: Cache,
    block_tables: BlockTables, seq_lens: SeqLens, query_start_loc: QueryStartLoc, *, causal: bool = True,
    return_lse: Literal[True], implementation: Implementation | None = None, **options: Unpack[Options],
) -> tuple[RaggedQuery, RaggedLse]: ...
# fmt: on
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
    causal: bool = True,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **options: Unpack[Options],
) -> RaggedQuery | tuple[RaggedQuery, RaggedLse]:
    """Attention of ragged queries over a paged context and over new tokens that are given at full precision.

    Query j of sequence s is at position ``seq_lens[s] - query_len + j`` and sees the tokens up to that position. The
    op reads the context from the cache, and the new tokens from `key` and `value`.

    Args:
      query: [num_tokens, num_heads, head_size], float16, bfloat16 or float32: all sequences' new tokens, one sequence
        after the other. Rows past query_start_loc[-1] are padding; their results are 0. num_heads is a multiple
        of num_kv_heads.
      key, value: [num_tokens, num_kv_heads, head_size], of query's dtype: the new tokens, whether or not the cache
        holds them too. k_scale and v_scale do not apply to them.
      key_cache, value_cache: one layer's pools of blocks in `layout`, of one of query's dtypes, float8_e4m3fn,
        float8_e5m2 or int8. They hold the context, which is the tokens before the new ones.
      block_tables: i32 [num_seqs, max_blocks_per_seq]; entries past the context's last block are not read.
      seq_lens: i32 [num_seqs], tokens of each sequence, the new ones included.
      query_start_loc: i32 [num_seqs + 1], exclusive prefix sum of the query lengths; a length may be 0.
      causal: whether each query sees only the tokens up to its own position. With False it sees all tokens of its
        sequence, as where a batch reads a shared prefix once (see `merge_attention_states`); alibi_slopes,
        sliding_window and block_sparse must then be None.
      return_lse, implementation: see `paged_jax.ops`.
      **options: see `paged_jax.options.Options`.

    Returns:
      out, of query's shape and dtype, accumulated in float32; with return_lse ``(out, lse)``, where lse is f32
      [num_tokens, num_heads].

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` cannot do the call.

    Aliasing: none, the caches are only read, in place. vmap: one call after the other. Sharding: heads and kv heads may
    be split alike, and blocks: each device attends to its own blocks, and the devices merge their results (without
    ALiBi, windows and block-sparse patterns).
    Source: vLLM's forward_prefix.

    Example:
      The batch holds a chunk of 4 tokens after a context of 16 tokens, which is in block 5.

      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedKVCache, prefix_attention
      >>> cache = PagedKVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64)
      >>> query, key = jnp.ones((4, 8, 64), jnp.bfloat16), jnp.ones((4, 2, 64), jnp.bfloat16)
      >>> block_tables, seq_lens = jnp.array([[5]], jnp.int32), jnp.array([20], jnp.int32)
      >>> arrays = cache.key_cache, cache.value_cache, block_tables, seq_lens, jnp.array([0, 4], jnp.int32)
      >>> prefix_attention(query, key, key, *arrays).shape
      (4, 8, 64)
    """
    operands = _validate.prefix_operands(
        query, key, value, key_cache, value_cache, block_tables, seq_lens, query_start_loc, causal, options
    )
    return_lse = _checks.flag("return_lse", return_lse)
    unwanted = () if return_lse else (1,)
    out, lse = _dispatch.call("prefix_attention", operands, implementation=implementation, unwanted=unwanted)
    return (out, lse) if return_lse else out
