"""vLLM's flat pool, one array [2, num_blocks, ...] for both caches of a layer: its shape, and how it is split."""

from typing import Any

from paged_jax.options import Layout
from paged_jax.shapes import cache_shapes, check_sizes, size


def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, int, int]:
    """Gives the shape of a flat pool that holds both caches of a layer, as vLLM's `PagedAttention` does.

    Args:
      num_blocks: blocks in each cache.
      block_size: tokens in a block, a power of two up to 256.
      num_kv_heads: key and value heads.
      head_size: elements of a head, a multiple of 8 up to 512.

    Returns:
      (2, num_blocks, block_size * num_kv_heads * head_size).

    Raises:
      ValueError: a size is not among those above, or int32 cannot count the slots.
      TypeError: a size is not an integer.

    Example:
      >>> from paged_jax import get_kv_cache_shape
      >>> get_kv_cache_shape(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64)
      (2, 8, 2048)
    """
    num_blocks, block_size, num_kv_heads, head_size = check_sizes(num_blocks, block_size, num_kv_heads, head_size)
    return (2, num_blocks, block_size * num_kv_heads * head_size)


def split_kv_cache(kv_cache: Any, num_kv_heads: int, head_size: int, layout: Layout = "hnd") -> tuple[Any, Any]:
    """Splits a flat pool into the two caches of a layout; each has the elements of one half, in their order.

    Args:
      kv_cache: [2, num_blocks, block_size * num_kv_heads * head_size], a JAX or NumPy array.
      num_kv_heads: key and value heads.
      head_size: elements of a head, a multiple of 8 up to 512; for "vllm" also of x = 16 // itemsize.
      layout: "hnd", "nhd" or "vllm".

    Returns:
      (key_cache, value_cache) in the shapes of `PagedKVCache`. They are views of a NumPy array. Of a JAX array they are
      new arrays, into which JAX copies the halves outside `jit`.

    Raises:
      ValueError: no block size gives this shape, or a size, dtype or layout is not supported.
      TypeError: a size is not an integer.

    Example:
      >>> import jax.numpy as jnp
      >>> from paged_jax import split_kv_cache
      >>> key_cache, value_cache = split_kv_cache(jnp.zeros((2, 8, 2048)), num_kv_heads=2, head_size=64, layout="nhd")
      >>> key_cache.shape
      (8, 16, 2, 64)
    """
    shape, num_kv_heads, head_size = kv_cache.shape, size("num_kv_heads", num_kv_heads), size("head_size", head_size)
    if len(shape) != 3 or shape[0] != 2 or shape[2] % max(num_kv_heads * head_size, 1):
        raise ValueError(
            "kv_cache must have shape (2, num_blocks, block_size * num_kv_heads * head_size) with "
            f"num_kv_heads = {num_kv_heads} and head_size = {head_size}, got {shape}"
        )
    block_size = shape[2] // max(num_kv_heads * head_size, 1)
    check_sizes(shape[1], block_size, num_kv_heads, head_size)
    key_shape, value_shape = cache_shapes(shape[1], block_size, num_kv_heads, head_size, kv_cache.dtype, layout)
    return kv_cache[0].reshape(key_shape), kv_cache[1].reshape(value_shape)
