"""The public cache ops. Each one checks its arguments and passes them to an implementation.

`paged_jax.ops` explains `implementation` and says what holds for every op.
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
      key_cache, value_cache: one layer's pools of blocks in `layout`. If their dtype has fewer bytes than key's, the op
        quantises: it divides by the scale, rounds to nearest even and saturates. A float16 cache of bfloat16 keys
        saturates too. Otherwise the op only casts.
      slot_mapping: i32 [num_tokens], ``block * block_size + offset``. Tokens with a negative slot, or one past the
        pool, are skipped. If several tokens have the same slot, each element there comes from an unspecified one.
      layout: the layout of both caches.
      k_scale, v_scale: f32 scalar, [num_kv_heads] or [num_blocks, num_kv_heads, block_size], or None for 1; only
        for a cache whose dtype has fewer bytes than key's. An int8 cache needs both.
      implementation: see `paged_jax.ops`.

    Returns:
      ``(key_cache, value_cache)``; every other slot is bit-identical.

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong, or a scale was given for a cache that does not take one.
      NotImplementedError: `implementation` cannot do the call.

    Aliasing: donate both caches to update them in place; otherwise both are copied first. vmap: one call after the
    other. Sharding: kv heads may be split. Source: vLLM's reshape_and_cache.

    Example:
      The first of two tokens goes to block 5, offset 3; the second token is padding.

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
    """Copies whole blocks within the paged caches of one layer or of many, for example after a fork.

    Args:
      key_cache, value_cache: one layer's pools of blocks in any layout; or two tuples or lists of such pools, with one
        pool for each layer. All pools must have the same number of blocks.
      block_mapping: i32 [num_pairs, 2], (source, destination) block ids, the same for all layers. Pairs with a
        negative id, or one past the pool, are skipped. All sources are read before any destination is written. If a
        destination has several sources, an unspecified one of them is copied.
      implementation: see `paged_jax.ops`.

    Returns:
      ``(key_cache, value_cache)``: pools, or tuples or lists of pools, as the arguments were.

    Raises:
      ValueError, TypeError: a shape or dtype is wrong.
      NotImplementedError: `implementation` cannot do the call.

    Both pools of a layer may be in device memory or in pinned host memory; XLA moves the whole of a pool that is on the
    host.

    Aliasing: donate the caches to update them in place; otherwise they are copied first. The op needs scratch memory
    for num_pairs blocks of both caches. vmap: one call after the other. Sharding: kv heads may be split.
    Source: vLLM's copy_blocks.

    Example:
      Block 5 is copied to block 2; the second pair is padding.

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
    """Copies whole blocks from one paged cache into another, for example to swap a sequence out or in.

    Args:
      src_key_cache, src_value_cache: the pools to read.
      dst_key_cache, dst_value_cache: the pools to write, of the sources' dtype and block shape. They may have another
        number of blocks.
      block_mapping: i32 [num_pairs, 2], (source, destination) block ids, see `copy_blocks`.
      implementation: see `paged_jax.ops`.

    Returns:
      The two destination caches.

    Raises:
      ValueError, TypeError: a shape or dtype is wrong.
      NotImplementedError: `implementation` cannot do the call.

    The sources, and the destinations, may both be in device memory or in pinned host memory. The GPU kernel moves the
    named blocks only; XLA moves the whole of a pool that is on the host.

    Aliasing: donate the destination caches to update them in place; otherwise they are copied first. vmap: one call
    after the other. Sharding: kv heads may be split. Source: vLLM's swap_blocks.

    Example:
      Block 5 of one cache is copied to block 2 of another.

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
