"""Decode attention and the cache write of its new tokens, in one op. `paged_jax.ops` says what holds for every op."""

from typing import Literal, Unpack, overload

from paged_jax import _checks, _dispatch, _validate
from paged_jax._dispatch import Implementation
from paged_jax.options import Options
from paged_jax.shapes import BlockTables, Cache, Lse, NewTokens, Query, SeqLens, SlotMapping


# fmt: off
@overload
def write_and_attend(
    query: Query, key: NewTokens, value: NewTokens, key_cache: Cache, value_cache: Cache, block_tables: BlockTables,
    seq_lens: SeqLens, slot_mapping: SlotMapping, *, return_lse: Literal[False] = False,
    implementation: Implementation | None = None, **options: Unpack[Options],
) -> tuple[Query, Cache, Cache]: ...
@overload
def write_and_attend(
    query: Query, key: NewTokens, value: NewTokens, key_cache: Cache, value_cache: Cache, block_tables: BlockTables,
    seq_lens: SeqLens, slot_mapping: SlotMapping, *, return_lse: Literal[True],
    implementation: Implementation | None = None, **options: Unpack[Options],
) -> tuple[Query, Lse, Cache, Cache]: ...
# fmt: on
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
) -> tuple[Query, Cache, Cache] | tuple[Query, Lse, Cache, Cache]:
    """Writes each sequence's new key and value to the cache, and computes decode attention, in one op.

    The op does what `write_to_paged_cache` and then `paged_attention` do: attention sees the keys and values as they
    are stored, quantised if the cache's dtype is narrower. k_scale and v_scale serve both: the write divides by them if
    the cache is narrower than key, and otherwise stores key and value unchanged.

    Args:
      query: [num_seqs, num_heads, head_size], float16, bfloat16 or float32: one new token a sequence. num_heads is a
        multiple of num_kv_heads.
      key, value: [num_seqs, num_kv_heads, head_size], of query's dtype: the key and the value of each sequence's last
        token.
      key_cache, value_cache: one layer's pools of blocks in `layout`, of one of query's dtypes, float8_e4m3fn,
        float8_e5m2 or int8. Slots and blocks that no sequence uses may hold anything, NaN included.
      block_tables: i32 [num_seqs, max_blocks_per_seq]; entries at or past ceil(seq_len / block_size) are not read.
      seq_lens: i32 [num_seqs], tokens of each sequence, the new one included. Where it is 0, out is 0 and lse -inf.
      slot_mapping: i32 [num_seqs], ``block * block_size + offset`` of each sequence's last token, the one at position
        ``seq_lens[s] - 1``. A row with a negative slot, or one past the pool, writes nothing and attends to what the
        cache holds. Every other row writes its slot. But its out and lse are unspecified if the slot belongs to
        another position, or if another row writes to a slot of its context.
      return_lse, implementation: see `paged_jax.ops`.
      **options: see `paged_jax.options.Options`.

    Returns:
      ``(out, key_cache, value_cache)``, or with return_lse ``(out, lse, key_cache, value_cache)``: out has query's
      shape and dtype, lse is f32 [num_seqs, num_heads], and all other slots of the caches are bit-identical.

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` cannot do the call.

    Aliasing: donate both caches to update them in place; otherwise both are copied first. vmap: one call after the
    other. Sharding: heads and kv heads may be split alike, and blocks, as for `paged_attention`.
    Source: vLLM's reshape_and_cache, then its paged attention.

    Example:
      A step writes the twentieth token of a sequence whose blocks are 5 and 2, and attends to all twenty.

      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedKVCache, write_and_attend
      >>> cache = PagedKVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64)
      >>> query, key = jnp.ones((1, 8, 64), jnp.bfloat16), jnp.ones((1, 2, 64), jnp.bfloat16)
      >>> block_tables, seq_lens = jnp.array([[5, 2]], jnp.int32), jnp.array([20], jnp.int32)
      >>> caches, slot_mapping = (cache.key_cache, cache.value_cache), jnp.array([2 * 16 + 3], jnp.int32)
      >>> out, *caches = write_and_attend(query, key, key, *caches, block_tables, seq_lens, slot_mapping)
      >>> out.shape, caches[0][2, :, 3].sum()
      ((1, 8, 64), Array(128, dtype=bfloat16))
    """
    operands = _validate.write_and_attend_operands(
        query, key, value, key_cache, value_cache, block_tables, seq_lens, slot_mapping, options
    )
    return_lse = _checks.flag("return_lse", return_lse)
    unwanted = () if return_lse else (1,)
    out, lse, key_cache, value_cache = _dispatch.call(
        "write_and_attend", operands, implementation=implementation, unwanted=unwanted
    )
    return (out, lse, key_cache, value_cache) if return_lse else (out, key_cache, value_cache)
