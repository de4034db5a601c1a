"""The cache ops as scatters, which XLA turns into in-place updates of donated pools."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32, Num

from paged_jax.options import Interleaved, Layout, block_axis
from paged_jax.shapes import (
    BlockMapping,
    Cache,
    CacheScale,
    LatentCache,
    Latents,
    SlotMapping,
    SourceCache,
    WrittenTokens,
)


def write_to_paged_cache(
    key: WrittenTokens,
    value: WrittenTokens,
    key_cache: Cache,
    value_cache: Cache | None,
    slot_mapping: SlotMapping,
    k_scale: CacheScale,
    v_scale: CacheScale,
    *,
    layout: Layout | Interleaved,
) -> tuple[Cache, Cache | None]:
    if key_cache.size == 0:  # nothing to write
        return key_cache, value_cache
    block_size = (key_cache if value_cache is None else value_cache).shape[block_axis(layout)]
    block, offset = _places(slot_mapping, key_cache.shape[0], block_size)
    key = _quantise(key, key_cache.dtype, _per_token(k_scale, block, offset))
    value = _quantise(value, key_cache.dtype, _per_token(v_scale, block, offset))
    if layout == "vllm":
        key = key.reshape(*key.shape[:2], *key_cache.shape[2::2])
    axis = block_axis(layout)
    if value_cache is None:
        pairs = jnp.stack([key, value], axis=2).reshape(key.shape[0], -1, key.shape[2])
        return _put(key_cache, pairs, block, offset, axis), None
    return _put(key_cache, key, block, offset, axis), _put(value_cache, value, block, offset, axis)


def write_to_latent_cache(
    latent: Latents, latent_cache: LatentCache, slot_mapping: SlotMapping, scale: CacheScale
) -> tuple[LatentCache]:
    if latent_cache.size == 0:  # nothing to write
        return (latent_cache,)
    block, offset = _places(slot_mapping, *latent_cache.shape[:2])
    # A latent is quantised like the key of a single head.
    codes = _quantise(latent[:, None], latent_cache.dtype, _per_token(scale, block, offset))[:, 0]
    return (_put(latent_cache, codes, block, offset),)


def _places(slots: SlotMapping, num_blocks: int, block_size: int) -> tuple[Int32[Array, "t"], Int32[Array, "t"]]:
    """The block and the offset of each slot.

    A negative index would count from the end, so skipped slots become indices past the end, which are dropped.
    """
    return jnp.where(slots < 0, num_blocks, slots // block_size), slots % block_size


def copy_blocks(
    key_caches: tuple[Cache, ...], value_caches: tuple[Cache | None, ...], block_mapping: BlockMapping
) -> tuple[tuple[Cache, ...], tuple[Cache | None, ...]]:
    copied = [swap_blocks(*layer, *layer, block_mapping) for layer in zip(key_caches, value_caches, strict=True)]
    return tuple(key for key, _ in copied), tuple(value for _, value in copied)


def swap_blocks(
    src_key_cache: SourceCache,
    src_value_cache: SourceCache | None,
    dst_key_cache: Cache,
    dst_value_cache: Cache | None,
    block_mapping: BlockMapping,
) -> tuple[Cache, Cache | None]:
    if src_key_cache.shape[0] == 0:  # nothing to copy
        return dst_key_cache, dst_value_cache
    src, dst = block_mapping[:, 0], block_mapping[:, 1]
    valid = (src >= 0) & (src < src_key_cache.shape[0]) & (dst >= 0)
    dst = jnp.where(valid, dst, dst_key_cache.shape[0])

    def move(source, destination):
        # XLA gathers and scatters in device memory only, so a pool on the host is moved as a whole.
        home = jax.typeof(destination).memory_space
        source, destination = (_to_memory(x, jax.memory.Space.Device) for x in (source, destination))
        return _to_memory(_put(destination, _take(source, src), dst), home)

    values = None if src_value_cache is None else move(src_value_cache, dst_value_cache)
    return move(src_key_cache, dst_key_cache), values


def _take(cache: Cache, block: Int32[Array, "n"]) -> Num[Array, "n ..."]:
    """Gathers the named blocks, bit for bit. XLA's CPU backend would convert float8 to float16 and back."""
    if cache.dtype.itemsize > 1 or not jnp.issubdtype(cache.dtype, jnp.floating):
        return jnp.take(cache, block, axis=0, mode="clip")
    taken = jnp.take(lax.bitcast_convert_type(cache, jnp.uint8), block, axis=0, mode="clip")
    return lax.bitcast_convert_type(taken, cache.dtype)


def _to_memory(x: Array, space: Any) -> Array:
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)


def _put(
    cache: Cache,
    updates: Num[Array, "n ..."],
    block: Int32[Array, "n"],
    offset: Int32[Array, "n"] | None = None,
    axis: int = 1,
) -> Cache:
    """Writes each update to its block, and to its offset along `axis` if there are offsets; all other bits are kept.

    Updates of blocks past the pool are dropped. No block id is negative. In the axes after `axis`, an update may be
    smaller than the pool.
    """

    def scatter(cache, updates, block, offset):
        at = (block,) if offset is None else (block, *[slice(None)] * (axis - 1), offset)
        if offset is not None and updates.shape[axis:] != cache.shape[axis + 1 :]:
            at += tuple(slice(size) for size in updates.shape[axis:])
        return cache.at[at].set(updates, mode="drop")

    if cache.dtype.itemsize > 1 or not jnp.issubdtype(cache.dtype, jnp.floating):
        return scatter(cache, updates, block, offset)

    def one_by_one(cache, updates, block, offset):
        # If XLA knew the ids, it would unroll a loop of one step, and convert both pools to float16 around the update.
        block = lax.optimization_barrier(block)
        first_inside = jnp.argsort(block >= cache.shape[0], stable=True).astype(jnp.int32)
        num_inside = (block < cache.shape[0]).sum(dtype=jnp.int32)
        # Bytes are updated, because XLA would convert float8 to float16, which changes NaNs. The update is in place.
        update_bytes = lax.bitcast_convert_type(updates, jnp.uint8)

        def step(i, cache):
            update = lax.dynamic_index_in_dim(update_bytes, first_inside[i])
            start = [jnp.zeros_like(block[0])] * cache.ndim
            start[0] = block[first_inside[i]]
            if offset is not None:
                update, start[axis] = jnp.expand_dims(update, axis), offset[first_inside[i]]
            cache_bytes = lax.bitcast_convert_type(cache, jnp.uint8)
            return lax.bitcast_convert_type(lax.dynamic_update_slice(cache_bytes, update, start), cache.dtype)

        return lax.fori_loop(0, num_inside, step, cache)

    if 0 in (cache.size, updates.size):
        return cache
    # XLA's CPU backend cannot scatter float8. It would copy the whole pool, convert it to float16 and back, and change
    # NaNs. A scatter of bytes would still copy the pool. Slices are updated in place.
    return lax.platform_dependent(cache, updates, block, offset, cpu=one_by_one, default=scatter)


def _per_token(scale: CacheScale, block: Int32[Array, "t"], offset: Int32[Array, "t"]) -> CacheScale:
    """Reshapes a scale of any shape so that it broadcasts against ``[num_tokens, num_kv_heads, head_size]``."""
    if scale is None:
        return None
    if scale.ndim == 3:
        scale = scale.at[block, :, offset].get(mode="clip")
    return scale.reshape((1,) * (2 - scale.ndim) + scale.shape)[..., None]


def _quantise(x: Num[Array, "t g d"], dtype: jnp.dtype, scale: CacheScale) -> Num[Array, "t g d"]:
    """Divides by the scale and saturates if `dtype` is narrower, in bytes or in range; otherwise only casts."""
    if dtype.itemsize >= x.dtype.itemsize and (dtype, x.dtype) != (jnp.float16, jnp.bfloat16):
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    if scale is not None:
        # The barrier keeps XLA from multiplying by the reciprocal, which rounds twice.
        x = jnp.where(x == 0, x, x / lax.optimization_barrier(jnp.broadcast_to(scale, x.shape)))  # 0 / 0 is also 0
    if jnp.issubdtype(dtype, jnp.integer):
        limits, x = jnp.iinfo(dtype), jnp.round(x)
    else:
        limits = jnp.finfo(dtype)
        # Rounding here makes the cast exact. XLA's CPU backend would round twice: to float16, then to float8_e5m2.
        exponent = jnp.maximum(jnp.frexp(x)[1] - 1, limits.minexp) - limits.nmant
        x = jnp.ldexp(jnp.round(jnp.ldexp(x, -exponent)), exponent)
    return jnp.clip(x, float(limits.min), float(limits.max)).astype(dtype)
