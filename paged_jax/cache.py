"""One layer's paged KV cache: its layouts, sizes and sharding, and vLLM's flat pool seen as the two caches."""

import dataclasses
from typing import Any, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from paged_jax.options import Layout, block_axis, head_axis

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """The key and value pools of one layer, and the scales they were quantised with; make it with `create`.

    Attributes:
      key_cache, value_cache: the pools, of one dtype, in the shapes that `layout` gives:
        "hnd": both [num_blocks, num_kv_heads, block_size, head_size];
        "nhd": both [num_blocks, block_size, num_kv_heads, head_size];
        "vllm": key [num_blocks, num_kv_heads, head_size // x, block_size, x] with x = 16 // itemsize, value
          [num_blocks, num_kv_heads, head_size, block_size].
      k_scale, v_scale: f32 [], [num_kv_heads] or [num_blocks, num_kv_heads, block_size], the dequantisation factors,
        or None.
      layout: as above (static).
    """

    # Any: a transformation may put other leaves than arrays here (specs, shapes, axes).
    key_cache: Any
    value_cache: Any
    k_scale: Any = None
    v_scale: Any = None
    layout: Layout = dataclasses.field(default="hnd", metadata={"static": True})

    @classmethod
    def create(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        layout: Layout = "hnd",
        k_scale: ArrayLike | None = None,
        v_scale: ArrayLike | None = None,
    ) -> Self:
        """Makes a cache of zeros.

        Args:
          num_blocks: blocks in each pool.
          block_size: tokens in a block, a power of two up to 256.
          num_kv_heads: key and value heads.
          head_size: elements of a head, a multiple of 8 up to 256; for "vllm" also of x = 16 // itemsize.
          dtype: of both pools: float16, bfloat16, float32, float8_e4m3fn, float8_e5m2 or int8.
          layout: "hnd", "nhd" or "vllm".
          k_scale, v_scale: [], [num_kv_heads] or [num_blocks, num_kv_heads, block_size], kept as float32, or None.

        Returns:
          The cache, on JAX's default device.

        Raises:
          ValueError: a size, dtype, layout or scale that is not among those above, or more slots than int32 counts.
        """
        _check_sizes(num_blocks, block_size, num_kv_heads, head_size)
        key_shape, value_shape = cache_shapes(num_blocks, block_size, num_kv_heads, head_size, dtype, layout)
        scale_shapes = ((), (num_kv_heads,), (num_blocks, num_kv_heads, block_size))
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        for name, scale in scales.items():
            if scale is not None:
                scales[name] = scale = jnp.asarray(scale, jnp.float32)
                if scale.shape not in scale_shapes:
                    raise ValueError(f"{name} must have one of the shapes {scale_shapes}, got {scale.shape}")
        return cls(jnp.zeros(key_shape, dtype), jnp.zeros(value_shape, dtype), layout=layout, **scales)

    @property
    def num_blocks(self) -> int:
        """Blocks in each pool."""
        return self.value_cache.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.value_cache.shape[block_axis(self.layout)]

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.value_cache.shape[head_axis(self.layout)]

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.value_cache.shape[2 if self.layout == "vllm" else 3]

    @property
    def dtype(self) -> np.dtype:
        """Of both pools."""
        return self.value_cache.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of both pools; scales are not counted."""
        return (self.key_cache.size + self.value_cache.size) * self.dtype.itemsize

    def partition_spec(self, axis_name: str) -> Self:
        """Gives the pytree of `PartitionSpec`s that splits the kv heads over a mesh axis.

        Args:
          axis_name: mesh axis; its size must divide num_kv_heads.

        Returns:
          A `PagedKVCache` of the same structure whose leaves are `PartitionSpec`s: a scale for the whole cache is
          replicated, every other array is split on its axis of kv heads.
        """
        pool = PartitionSpec(*[None] * head_axis(self.layout), axis_name)
        # A scale is [], [num_kv_heads] or [num_blocks, num_kv_heads, block_size].
        scale = {0: PartitionSpec(), 1: PartitionSpec(axis_name), 3: PartitionSpec(None, axis_name)}
        k_scale, v_scale = (None if s is None else scale[np.ndim(s)] for s in (self.k_scale, self.v_scale))
        return dataclasses.replace(self, key_cache=pool, value_cache=pool, k_scale=k_scale, v_scale=v_scale)


def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, int, int]:
    """Gives the shape of a flat pool that holds both caches of a layer, as vLLM's `PagedAttention` does.

    Args:
      num_blocks: blocks in each cache.
      block_size: tokens in a block, a power of two up to 256.
      num_kv_heads: key and value heads.
      head_size: elements of a head, a multiple of 8 up to 256.

    Returns:
      (2, num_blocks, block_size * num_kv_heads * head_size).

    Raises:
      ValueError: a size that is not among those above, or more slots than int32 counts.
    """
    _check_sizes(num_blocks, block_size, num_kv_heads, head_size)
    return (2, num_blocks, block_size * num_kv_heads * head_size)


def split_kv_cache(kv_cache: Any, num_kv_heads: int, head_size: int, layout: Layout = "hnd") -> tuple[Any, Any]:
    """Sees a flat pool as the two caches of a layout; each is a reshape of one half, nothing is moved.

    Args:
      kv_cache: [2, num_blocks, block_size * num_kv_heads * head_size], a JAX or NumPy array.
      num_kv_heads: key and value heads.
      head_size: elements of a head, a multiple of 8 up to 256; for "vllm" also of x = 16 // itemsize.
      layout: "hnd", "nhd" or "vllm".

    Returns:
      (key_cache, value_cache) in the shapes of `PagedKVCache`: views of a NumPy array, reshapes of a JAX one.

    Raises:
      ValueError: a shape that no block size explains, or a size, dtype or layout that is not supported.
    """
    shape = kv_cache.shape
    if len(shape) != 3 or shape[0] != 2 or shape[2] % max(num_kv_heads * head_size, 1):
        raise ValueError(
            "kv_cache must have shape (2, num_blocks, block_size * num_kv_heads * head_size) with "
            f"num_kv_heads = {num_kv_heads} and head_size = {head_size}, got {shape}"
        )
    block_size = shape[2] // max(num_kv_heads * head_size, 1)
    _check_sizes(shape[1], block_size, num_kv_heads, head_size)
    key_shape, value_shape = cache_shapes(shape[1], block_size, num_kv_heads, head_size, kv_cache.dtype, layout)
    return kv_cache[0].reshape(key_shape), kv_cache[1].reshape(value_shape)


def _check_sizes(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> None:
    if num_blocks < 1 or num_kv_heads < 1:
        raise ValueError(f"num_blocks and num_kv_heads must be positive, got {num_blocks} and {num_kv_heads}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size}")
    if head_size % 8 or not 8 <= head_size <= 256:
        raise ValueError(f"head_size must be a multiple of 8 up to 256, got {head_size}")
    if num_blocks * block_size > 2**31:
        raise ValueError(
            f"num_blocks * block_size must be at most 2**31 (int32 slots), got {num_blocks} * {block_size}"
        )


def cache_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: DTypeLike, layout: Layout
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of both caches."""
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"the cache's dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {', '.join(get_args(Layout))}, got {layout!r}")
    if layout == "hnd":
        shape = (num_blocks, num_kv_heads, block_size, head_size)
        return shape, shape
    if layout == "nhd":
        shape = (num_blocks, block_size, num_kv_heads, head_size)
        return shape, shape
    x = 16 // dtype.itemsize
    if head_size % x:
        raise ValueError(
            f'layout "vllm" keeps keys in groups of 16 bytes: head_size must be a multiple of {x} for {dtype}, '
            f"got {head_size}"
        )
    key_shape = (num_blocks, num_kv_heads, head_size // x, block_size, x)
    return key_shape, (num_blocks, num_kv_heads, head_size, block_size)
