"""The fused cache write, and copies of blocks. Swapping blocks has no kernel here: XLA's scatters serve."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from paged_jax.kernels.triton import launch
from paged_jax.options import Layout, block_axis
from paged_jax.shapes import BlockMapping, Cache, CacheScale, NewTokens, SlotMapping


def write_to_paged_cache(
    key: NewTokens,
    value: NewTokens,
    key_cache: Cache,
    value_cache: Cache,
    slot_mapping: SlotMapping,
    k_scale: CacheScale,
    v_scale: CacheScale,
    *,
    layout: Layout,
) -> tuple[Cache, Cache]:
    gpu = launch.device()
    launch.check(gpu, key_cache.dtype.name)
    num_tokens, num_kv_heads, head_size = key.shape
    # Few tokens: one a program, to fill the GPU. Many: 16, to have fewer programs.
    tokens = min(16, launch.power_of_two(num_tokens * num_kv_heads // (8 * gpu.num_multiprocessors)))
    config = launch.WriteConfig(
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=value_cache.shape[block_axis(layout)],
        layout=layout,
        key_x=16 // key_cache.dtype.itemsize,
        value_x=1,
        tokens=tokens,
        write=launch.quantisation(key.dtype, key_cache.dtype, k_scale, v_scale),
    )
    num_programs = -(-num_tokens // tokens) * num_kv_heads
    if num_programs == 0 or key_cache.size == 0:
        return key_cache, value_cache
    scales = tuple(slot_mapping if scale is None else scale for scale in (k_scale, v_scale))  # absent: not read
    caches = key_cache, value_cache
    return tuple(
        launch.call(
            "write",
            "write_kernel",
            config,
            num_programs,
            (key, value, slot_mapping, *scales),
            (num_tokens, key_cache.shape[0]),
            tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches),
            gpu,
            in_place=caches,
        )
    )


def copy_blocks(
    key_caches: tuple[Cache, ...], value_caches: tuple[Cache, ...], block_mapping: BlockMapping
) -> tuple[tuple[Cache, ...], tuple[Cache, ...]]:
    gpu = launch.device()
    copied = [_copy(*layer, block_mapping, gpu) for layer in zip(key_caches, value_caches, strict=True)]
    return tuple(key for key, _ in copied), tuple(value for _, value in copied)


def _copy(key_cache: Array, value_cache: Array, block_mapping: Array, gpu: launch.Device) -> tuple[Array, Array]:
    """One layer's copies."""
    caches = key_cache, value_cache
    num_pairs, num_blocks = block_mapping.shape[0], key_cache.shape[0]
    block_bytes = [math.prod(x.shape[1:]) * x.dtype.itemsize for x in caches]
    odd = [f"copies blocks of a multiple of 8 bytes, these have {n}" for n in block_bytes if n % 8]
    for cache in caches:
        launch.check(gpu, cache.dtype.name, odd)
    if num_pairs == 0 or key_cache.size + value_cache.size == 0:
        return caches
    config = launch.CopyConfig(*(n // 8 for n in block_bytes))
    plans = jax.ShapeDtypeStruct((num_pairs,), jnp.int32)
    tmp = [jax.ShapeDtypeStruct((num_pairs, *x.shape[1:]), x.dtype) for x in caches]
    sizes = num_pairs, num_blocks
    stashed = launch.call(
        "copy", "stash_kernel", config, num_pairs, (block_mapping, *caches), sizes, (plans, *tmp), gpu
    )
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches]
    num_programs = num_pairs * config.chunks
    arrays = block_mapping, *stashed
    return tuple(launch.call("copy", "copy_kernel", config, num_programs, arrays, (), outputs, gpu, in_place=caches))
