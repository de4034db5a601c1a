"""The public cache ops: what they take and return. Checks, then dispatch; no arithmetic.

`implementation`, and what holds for every op, is told in `paged_jax.ops`.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jaxtyping import Float

from paged_jax import _dispatch, _validate
from paged_jax.options import Implementation, Layout
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
        for a narrower cache.
      implementation: see `paged_jax.ops`.

    Returns:
      ``(key_cache, value_cache)``; every other slot is bit-identical.

    Raises:
      ValueError, TypeError: a shape, dtype or option is wrong, or a scale was given for a cache that is not narrower.
      NotImplementedError: `implementation` lacks an option.

    Aliasing: donate both caches to update them in place; otherwise both are copied first. vmap: one call after the
    other. Sharding: over kv heads. Source: vLLM's reshape_and_cache.
    """
    key = _validate.tokens("key", key, "num_tokens")
    key, value = _validate.new_tokens(key, value, key.shape[0], key.shape[2], key.dtype)
    slot_mapping = _validate.indices("slot_mapping", slot_mapping, "num_tokens")
    _validate.shape("slot_mapping", slot_mapping, key.shape[:1], "num_tokens")
    key_cache, value_cache, _, block_size = _validate.caches(key_cache, value_cache, key.shape[1], key.shape[2], layout)
    scales = _validate.write_scales(key, key_cache, block_size, k_scale, v_scale)
    return _dispatch.call(
        "write_to_paged_cache",
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        *scales,
        implementation=implementation,
        layout=layout,
    )


def copy_blocks(
    key_cache: Cache | Sequence[Cache],
    value_cache: Cache | Sequence[Cache],
    block_mapping: BlockMapping,
    *,
    implementation: Implementation | None = None,
) -> tuple[Any, Any]:
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
    """
    layers = _validate.layers(key_cache, value_cache)
    block_mapping = _validate.pairs(block_mapping)
    copied = _dispatch.call("copy_blocks", *layers, block_mapping, implementation=implementation)
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

    The pools may be in different memories, device and pinned host, either way round. The GPU kernel moves the blocks
    alone, XLA a whole pool that is on the host.

    Aliasing: donate the destination caches to update them in place; otherwise they are copied first. vmap: one call
    after the other. Sharding: over kv heads. Source: vLLM's swap_blocks.
    """
    src = _validate.pools(("src_key_cache", src_key_cache), ("src_value_cache", src_value_cache))
    dst = _validate.pools(("dst_key_cache", dst_key_cache), ("dst_value_cache", dst_value_cache))
    _validate.same_blocks(src, dst)
    block_mapping = _validate.pairs(block_mapping)
    return _dispatch.call("swap_blocks", *src, *dst, block_mapping, implementation=implementation)
