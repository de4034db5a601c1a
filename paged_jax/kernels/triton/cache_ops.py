"""The cache write, and copies of blocks within a layer's pools or from other pools."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from paged_jax.kernels.problem import Device, Pool
from paged_jax.kernels.triton import cache_tuning, launch
from paged_jax.kernels.triton.cache_tuning import CopyKernel
from paged_jax.kernels.triton.integers import cdiv
from paged_jax.options import Interleaved, Layout
from paged_jax.shapes import BlockMapping, Cache, CacheScale, SlotMapping, SourceCache, WrittenTokens


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
    gpu = launch.device()
    launch.check(gpu, key_cache.dtype.name)
    num_tokens, num_kv_heads, head_size = key.shape
    caches = (key_cache,) if value_cache is None else (key_cache, value_cache)
    pool = Pool.of(caches[-1], head_size, layout, k_scale, v_scale)
    kernel = cache_tuning.write(key.dtype.name, num_tokens, pool, gpu)
    num_programs = cdiv(num_tokens, kernel.tokens) * num_kv_heads
    if num_programs == 0 or key_cache.size == 0:
        return key_cache, value_cache
    scales = tuple(slot_mapping if scale is None else scale for scale in (k_scale, v_scale))  # absent scales are unread
    written = launch.call(
        "write",
        "write_kernel" if len(caches) == 2 else "write_interleaved_kernel",
        kernel,
        num_programs,
        (key, value, slot_mapping, *scales),
        (num_tokens, key_cache.shape[0]),
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches),
        gpu,
        in_place=caches,
    )
    return written[0], written[1] if len(caches) == 2 else None


def copy_blocks(
    key_caches: tuple[Cache, ...], value_caches: tuple[Cache | None, ...], block_mapping: BlockMapping
) -> tuple[tuple[Cache, ...], tuple[Cache | None, ...]]:
    gpu = launch.device()
    copied = [_copy(*layer, block_mapping, gpu) for layer in zip(key_caches, value_caches, strict=True)]
    return tuple(key for key, _ in copied), tuple(value for _, value in copied)


def _copy(key_cache: Array, value_cache: Array | None, block_mapping: Array, gpu: Device) -> tuple[Array, Array | None]:
    """Copies blocks within one layer's pools."""
    caches = key_cache, value_cache
    kernel = _kernel_for(caches, gpu, within=True)
    if block_mapping.size == 0 or all(x is None or x.size == 0 for x in caches):
        return caches
    stashed = _stash(block_mapping, caches, key_cache.shape[0], kernel, gpu)
    return _in_place("copy_kernel", kernel, (block_mapping, *stashed), caches, gpu)


def swap_blocks(
    src_key_cache: SourceCache,
    src_value_cache: SourceCache | None,
    dst_key_cache: Cache,
    dst_value_cache: Cache | None,
    block_mapping: BlockMapping,
) -> tuple[Cache, Cache | None]:
    gpu = launch.device()
    sources, caches = (src_key_cache, src_value_cache), (dst_key_cache, dst_value_cache)
    kernel = _kernel_for(caches, gpu, within=False)
    if block_mapping.size == 0 or any(x is not None and x.size == 0 for x in (*sources, *caches)):
        return caches
    plans, *_ = _stash(block_mapping, sources, dst_key_cache.shape[0], kernel, gpu)
    arrays = block_mapping, plans, *_present(sources)
    return _in_place("swap_kernel", kernel, arrays, caches, gpu)


def _present(caches: tuple[Array, Array | None]) -> tuple[Array, Array]:
    """Both pools. Without a value cache, the second one is an array that kernels neither read nor write."""
    key_cache, value_cache = caches
    return key_cache, jnp.zeros(1, jnp.int32) if value_cache is None else value_cache


def _kernel_for(caches: tuple[Array, Array | None], gpu: Device, *, within: bool) -> CopyKernel:
    block_bytes = [0 if x is None else math.prod(x.shape[1:]) * x.dtype.itemsize for x in caches]
    odd = [f"copies blocks of a multiple of 8 bytes, these have {n}" for n in block_bytes if n % 8]
    for cache in caches:
        if cache is not None:
            launch.check(gpu, cache.dtype.name, odd)
    key_words, value_words = (n // 8 for n in block_bytes)
    return CopyKernel(key_words=key_words, value_words=value_words, within=within)


def _stash(
    block_mapping: Array, sources: tuple[Array, Array | None], num_blocks: int, kernel: CopyKernel, gpu: Device
) -> list[Array]:
    """Makes each pair's plan, and saves the blocks of keys and values that other pairs will overwrite."""
    num_pairs = block_mapping.shape[0]
    plans = jax.ShapeDtypeStruct((num_pairs,), jnp.int32)
    room = num_pairs if kernel.within else 1
    present = _present(sources)
    tmp = [jax.ShapeDtypeStruct((room, *x.shape[1:]), x.dtype) for x in present]
    sizes = num_pairs, present[0].shape[0], num_blocks
    return launch.call("copy", "stash_kernel", kernel, num_pairs, (block_mapping, *present), sizes, (plans, *tmp), gpu)


def _in_place(
    name: str, kernel: CopyKernel, arrays: tuple[Array, ...], caches: tuple[Array, Array | None], gpu: Device
) -> tuple[Array, Array | None]:
    present = _present(caches)
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in present]
    num_programs = arrays[0].shape[0] * kernel.chunks
    written = launch.call("copy", name, kernel, num_programs, arrays, (), outputs, gpu, in_place=present)
    key_cache, value_cache = (
        None if cache is None else _at_home(x, cache) for x, cache in zip(written, caches, strict=True)
    )
    assert key_cache is not None
    return key_cache, value_cache


def _at_home(written: Array, cache: Array) -> Array:
    """Gives a pool that a kernel wrote in place the memory space of `cache`, in JAX's types.

    JAX assumes that all results of a kernel are in device memory. XLA sees that no copy is needed.
    """
    home = jax.typeof(cache).memory_space
    return written if jax.typeof(written).memory_space == home else jax.device_put(written, home)
