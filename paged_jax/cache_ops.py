"""The public cache ops: what they take and return. Checks, then dispatch; no arithmetic.

`implementation`, and what holds for every op, is told in `paged_jax.ops`.
"""

from collections.abc import Sequence

import jax
from jax import Array
from jaxtyping import Float

from paged_jax import _dispatch, _validate
from paged_jax._dispatch import Implementation
from paged_jax.options import Layout
from paged_jax.shapes import BlockMapping, Cache, NewTokens, SlotMapping

Scale = Float[Array, "..."] | float | None


def write_to_paged_cache(
    key: NewTokens,
    value: NewTokens,
    key_cache: Cache,
    value_cache: Cache,
    slot_mapping: SlotMapping,
    *,
    layout: Layout = "hnd",
    k_scale: Scale = None,
    v_scale: Scale = None,
    implementation: Implementation | None = None,
) -> tuple[Cache, Cache]:
    """Puts new tokens' keys and values into their slots of a paged cache.

    Args:
      key, value: [num_tokens, num_kv_heads, head_size], float16, bfloat16 or float32.
      key_cache, value_cache: one layer's pool of blocks in `layout`. A narrower dtype than key's quantises: divide
        by the scale, round to nearest even, saturate.
      slot_mapping: i32 [num_tokens], ``block * block_size + offset``; negative slots, and those past the pool, are
        skipped. Where several tokens have one slot, each element there is an unspecified one's.
      layout: of both caches.
      k_scale, v_scale: f32 scalar, [num_kv_heads] or [num_blocks, num_kv_heads, block_size], or None for 1; only
        for a narrower cache. An int8 cache needs both.
      implementation: see `paged_jax.ops`.

    Returns:
      ``(key_cache, value_cache)``; every other slot is bit-identical.

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong, or a scale was given for a cache that is not narrower.
      NotImplementedError: `implementation` lacks an option.

    Aliasing: donate both caches to update them in place; otherwise both are copied first. vmap: one call after the
    other. Sharding: over kv heads. Source: vLLM's reshape_and_cache.

    Example:
      Two tokens, the second of them padding; the first goes to block 5, offset 3.

      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedKVCache, write_to_paged_cache
      >>> cache = PagedKVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64)
      >>> key, slot_mapping = jnp.ones((2, 2, 64), jnp.bfloat16), jnp.array([5 * 16 + 3, -1], jnp.int32)
      >>> key_cache, value_cache = write_to_paged_cache(key, key, cache.key_cache, cache.value_cache, slot_mapping)
      >>> key_cache[5, :, 3].sum(), key_cache.sum()
      (Array(128, dtype=bfloat16), Array(128, dtype=bfloat16))
    """
    operands = _validate.write_operands(key, value, key_cache, value_cache, slot_mapping, layout, k_scale, v_scale)
    return _dispatch.call("write_to_paged_cache", operands, implementation=implementation, layout=layout)


def copy_blocks[Pools: Cache | Sequence[Cache]](
    key_cache: Pools,
    value_cache: Pools,
    block_mapping: BlockMapping,
    *,
    implementation: Implementation | None = None,
) -> tuple[Pools, Pools]:
    """Copies whole blocks within a paged cache, of one layer or of many, as after a fork.

    Args:
      key_cache, value_cache: one layer's pool of blocks, any layout; or a tuple or list of such pools, one a layer and
        all with as many blocks.
      block_mapping: i32 [num_pairs, 2], (source, destination) block ids, the same for all layers; pairs with a
        negative id, or one past the pool, are skipped. All sources are read before any destination is written. Of
        several sources for one destination an unspecified one stays.
      implementation: see `paged_jax.ops`.

    Returns:
      ``(key_cache, value_cache)``, pools or sequences of pools as they came.

    Raises:
      ValueError, TypeError: a shape or dtype is wrong.
      NotImplementedError: `implementation` lacks an option.

    Aliasing: donate the caches to update them in place; otherwise they are copied first. Scratch memory for num_pairs
    blocks of both caches is needed. vmap: one call after the other. Sharding: over kv heads.
    Source: vLLM's copy_blocks.

    Example:
      Block 5 to block 2; the second pair is padding.

      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedKVCache, copy_blocks
      >>> cache = PagedKVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64)
      >>> block_mapping = jnp.array([[5, 2], [-1, -1]], jnp.int32)
      >>> key_cache, value_cache = copy_blocks(cache.key_cache.at[5].set(1), cache.value_cache, block_mapping)
      >>> (key_cache[2] == 1).all()
      Array(True, dtype=bool)
    """
    operands = _validate.copy_operands(key_cache, value_cache, block_mapping)
    copied = _dispatch.call("copy_blocks", operands, implementation=implementation)
    key_caches, value_caches = (
        jax.tree.unflatten(jax.tree.structure(given), new)
        for given, new in zip((key_cache, value_cache), copied, strict=True)
    )
    return key_caches, value_caches


def swap_blocks(
    src_key_cache: Cache,
    src_value_cache: Cache,
    dst_key_cache: Cache,
    dst_value_cache: Cache,
    block_mapping: BlockMapping,
    *,
    implementation: Implementation | None = None,
) -> tuple[Cache, Cache]:
    """Copies whole blocks from one paged cache into another, as when a sequence is swapped out or in.

    Args:
      src_key_cache, src_value_cache: the pools to read.
      dst_key_cache, dst_value_cache: the pools to write, of the sources' dtype and block shape; any number of blocks.
      block_mapping: i32 [num_pairs, 2], (source, destination) block ids, as for `copy_blocks`.
      implementation: see `paged_jax.ops`.

    Returns:
      The two destination caches.

    Raises:
      ValueError, TypeError: a shape or dtype is wrong.
      NotImplementedError: `implementation` lacks what is asked for.

    The pools may be in different memories, device and pinned host, either way round. The GPU kernel moves the blocks
    alone, XLA a whole pool that is on the host.

    Aliasing: donate the destination caches to update them in place; otherwise they are copied first. vmap: one call
    after the other. Sharding: over kv heads. Source: vLLM's swap_blocks.

    Example:
      Block 5 of one cache to block 2 of another.

      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedKVCache, swap_blocks
      >>> sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 64}
      >>> src, dst = PagedKVCache.create(num_blocks=8, **sizes), PagedKVCache.create(num_blocks=4, **sizes)
      >>> pools = src.key_cache.at[5].set(1), src.value_cache, dst.key_cache, dst.value_cache
      >>> key_cache, value_cache = swap_blocks(*pools, jnp.array([[5, 2]], jnp.int32))
      >>> (key_cache[2] == 1).all(), key_cache.shape[0]
      (Array(True, dtype=bool), 4)
    """
    operands = _validate.swap_operands(src_key_cache, src_value_cache, dst_key_cache, dst_value_cache, block_mapping)
    return _dispatch.call("swap_blocks", operands, implementation=implementation)
