"""The public cache ops. Each one checks its arguments and passes them to an implementation.

`paged_jax.ops` explains `implementation` and says what holds for every op.
"""

from collections.abc import Sequence

import jax
from jax import Array
from jaxtyping import Float

from paged_jax import _dispatch, _validate, _validate_latent
from paged_jax._dispatch import Implementation
from paged_jax.options import Layout
from paged_jax.shapes import BlockMapping, Cache, LatentCache, Latents, NewTokens, SlotMapping

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
      k_scale, v_scale: f32 scalar, [num_kv_heads] or [num_blocks, num_kv_heads, block_size], or None for 1. An int8
        cache needs both. To a cache whose dtype has as many bytes as key's, they do nothing here: it holds keys and
        values as they are, and attention multiplies what it holds by its scales.
      implementation: see `paged_jax.ops`.

    Returns:
      ``(key_cache, value_cache)``; every other slot is bit-identical.

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` cannot do the call.

    Aliasing: donate both caches to update them in place; otherwise both are copied first. vmap: one call after the
    other. Sharding: kv heads and blocks may be split. Source: vLLM's reshape_and_cache.

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


def write_to_latent_cache(
    latent: Latents,
    latent_cache: LatentCache,
    slot_mapping: SlotMapping,
    *,
    scale: Float[Array, ""] | float | None = None,
    implementation: Implementation | None = None,
) -> LatentCache:
    """Puts new tokens' latents into their slots of a paged latent cache.

    Args:
      latent: [num_tokens, latent_size], float16, bfloat16 or float32; latent_size is a multiple of 16 up to 1024.
      latent_cache: one layer's pool, [num_blocks, block_size, latent_size]. If its dtype has fewer bytes than latent's,
        the op quantises: it divides by the scale, rounds to nearest even and saturates. A float16 cache of bfloat16
        latents saturates too. Otherwise the op only casts.
      slot_mapping: i32 [num_tokens], ``block * block_size + offset``. Tokens with a negative slot, or one past the
        pool, are skipped. If several tokens have the same slot, each element there comes from an unspecified one.
      scale: f32 scalar, or None for 1. An int8 cache needs one. To a cache whose dtype has as many bytes as latent's it
        does nothing here: such a cache holds latents as they are, and attention multiplies what it holds by its scale.
      implementation: see `paged_jax.ops`.

    Returns:
      latent_cache; every other slot is bit-identical.

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong.
      NotImplementedError: `implementation` cannot do the call.

    Aliasing: donate the cache to update it in place; otherwise it is copied first. vmap: one call after the other.
    Sharding: blocks may be split; otherwise each device writes all tokens into its own copy.
    Source: vLLM's concat_and_cache_mla.

    Example:
      The first of two tokens goes to block 5, offset 3; the second token is padding.

      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedLatentCache, write_to_latent_cache
      >>> cache = PagedLatentCache.create(num_blocks=8, block_size=16, latent_size=576)
      >>> latent, slot_mapping = jnp.ones((2, 576), jnp.bfloat16), jnp.array([5 * 16 + 3, -1], jnp.int32)
      >>> latent_cache = write_to_latent_cache(latent, cache.latent_cache, slot_mapping)
      >>> latent_cache[5, 3].sum(), latent_cache.sum()
      (Array(576, dtype=bfloat16), Array(576, dtype=bfloat16))
    """
    operands = _validate_latent.write_operands(latent, latent_cache, slot_mapping, scale)
    (written,) = _dispatch.call("write_to_latent_cache", operands, implementation=implementation)
    return written


def copy_blocks[Keys: Cache | Sequence[Cache], Values: Cache | Sequence[Cache] | None](
    key_cache: Keys,
    value_cache: Values,
    block_mapping: BlockMapping,
    *,
    implementation: Implementation | None = None,
) -> tuple[Keys, Values]:
    """Copies whole blocks within the paged caches of one layer or of many, for example after a fork.

    Args:
      key_cache, value_cache: one layer's pools of blocks in any layout; or two tuples or lists of such pools, with one
        pool for each layer. All pools must have the same number of blocks. key_cache may also be a latent cache
        [num_blocks, block_size, latent_size], or those of several layers; value_cache is then None.
      block_mapping: i32 [num_pairs, 2], (source, destination) block ids, the same for all layers. Pairs with a
        negative id, or one past the pool, are skipped. All sources are read before any destination is written. If a
        destination has several sources, an unspecified one of them is copied.
      implementation: see `paged_jax.ops`.

    Returns:
      ``(key_cache, value_cache)``: pools, or tuples or lists of pools, or None, as the arguments were.

    Raises:
      ValueError, TypeError: a shape or dtype is wrong.
      NotImplementedError: `implementation` cannot do the call.

    Both pools of a layer may be in device memory or in pinned host memory; XLA moves the whole of a pool that is on the
    host.

    Aliasing: donate the caches to update them in place; otherwise they are copied first. The op needs scratch memory
    for num_pairs blocks of both caches. vmap: one call after the other. Sharding: kv heads may be split, and
    blocks: every device gets all copied blocks and stores its own. Source: vLLM's copy_blocks.

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
    keys, values = _dispatch.call("copy_blocks", operands, implementation=implementation)
    key_caches = jax.tree.unflatten(jax.tree.structure(key_cache), keys)
    if value_cache is None:
        return key_caches, value_cache
    return key_caches, jax.tree.unflatten(jax.tree.structure(value_cache), values)


def swap_blocks[Values: Cache | None](
    src_key_cache: Cache,
    src_value_cache: Values,
    dst_key_cache: Cache,
    dst_value_cache: Values,
    block_mapping: BlockMapping,
    *,
    implementation: Implementation | None = None,
) -> tuple[Cache, Values]:
    """Copies whole blocks from one paged cache into another, for example to swap a sequence out or in.

    Args:
      src_key_cache, src_value_cache: the pools to read, or a latent cache and None.
      dst_key_cache, dst_value_cache: the pools to write, of the sources' dtype and block shape. They may have another
        number of blocks.
      block_mapping: i32 [num_pairs, 2], (source, destination) block ids, see `copy_blocks`.
      implementation: see `paged_jax.ops`.

    Returns:
      The two destination caches, or the one and None.

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
