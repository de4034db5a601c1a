"""The shapes and dtypes of the ops' arrays: a jaxtyping type for each, and the sizes and layouts of caches."""

from typing import Any, get_args

import jax.numpy as jnp
from jax import Array
from jax.export import is_symbolic_dim
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32, Num

from paged_jax._static import integer
from paged_jax.options import Layout

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""How many tokens a block may have."""

LARGEST_HEAD_SIZE = 512
"""The most elements of a head, which are a multiple of 8."""

CACHE_DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
QUERY_DTYPES = ("float16", "bfloat16", "float32")

Query = Float[Array, "num_seqs num_heads head_size"]
RaggedQuery = Float[Array, "num_tokens num_heads head_size"]
NewTokens = Float[Array, "num_tokens num_kv_heads head_size"]  # keys or values
WrittenTokens = Num[Array, "num_tokens num_kv_heads head_size"]  # the same, or some that have the cache's dtype

LatentQuery = Float[Array, "num_seqs num_heads latent_size"]
RaggedLatentQuery = Float[Array, "num_tokens num_heads latent_size"]
LatentOut = Float[Array, "num_seqs num_heads value_size"]
RaggedLatentOut = Float[Array, "num_tokens num_heads value_size"]
Latents = Float[Array, "num_tokens latent_size"]  # new tokens' vectors
LatentCache = Num[Array, "num_blocks block_size latent_size"]

Cache = Num[Array, "num_blocks ..."]  # `cache_shapes` gives the layouts
SourceCache = Num[Array, "num_source_blocks ..."]
CacheScale = Float[Array, "..."] | None

BlockTables = Int32[Array, "num_seqs max_blocks_per_seq"]
SeqLens = Int32[Array, "num_seqs"]
QueryStartLoc = Int32[Array, "num_seqs+1"]
SlotMapping = Int32[Array, "num_tokens"]
BlockMapping = Int32[Array, "num_pairs 2"]

Lse = Float32[Array, "num_seqs num_heads"]
RaggedLse = Float32[Array, "num_tokens num_heads"]
Residual = Float32[Array, "num_seqs num_heads max_num_partitions"]
TmpOut = Float32[Array, "num_seqs num_heads max_num_partitions head_size"]


def cache_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: DTypeLike, layout: Layout
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Gives the shapes of the key cache and of the value cache; raises ValueError for a wrong dtype or layout."""
    dtype = check_cache_dtype(dtype)
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


def check_cache_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Checks that a cache can have this dtype."""
    dtype = jnp.dtype(dtype)
    if dtype.name not in CACHE_DTYPES:
        raise ValueError(f"the cache's dtype must be one of {', '.join(CACHE_DTYPES)}, got {dtype}")
    return dtype


def check_latent_size(latent_size: int) -> None:
    """Checks that a latent cache can have vectors of this many elements."""
    if latent_size % 16 or not 16 <= latent_size <= 1024:
        raise ValueError(f"latent_size must be a multiple of 16 up to 1024, got {latent_size}")


def size(name: str, value: Any) -> Any:
    """Checks that `value` is an integer. A symbolic size, which an exported function may have, stays as it is."""
    return value if is_symbolic_dim(value) else integer(name, value)


def check_sizes(num_blocks: Any, block_size: Any, num_kv_heads: Any, head_size: Any) -> tuple[int, int, int, int]:
    """Checks that a cache can have these sizes, and gives each as `size` does."""
    num_blocks, block_size = check_blocks(num_blocks, block_size)
    num_kv_heads, head_size = size("num_kv_heads", num_kv_heads), size("head_size", head_size)
    if num_kv_heads < 1:
        raise ValueError(f"num_kv_heads must be positive, got {num_kv_heads}")
    if head_size % 8 or not 8 <= head_size <= LARGEST_HEAD_SIZE:
        raise ValueError(f"head_size must be a multiple of 8 up to {LARGEST_HEAD_SIZE}, got {head_size}")
    return num_blocks, block_size, num_kv_heads, head_size


def check_blocks(num_blocks: Any, block_size: Any) -> tuple[int, int]:
    """Checks that a pool can have this many blocks of this size, and gives both as `size` does."""
    num_blocks, block_size = size("num_blocks", num_blocks), size("block_size", block_size)
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be positive, got {num_blocks}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size}")
    if num_blocks * block_size > 2**31:
        raise ValueError(
            f"num_blocks * block_size must be at most 2**31 (int32 slots), got {num_blocks} * {block_size}"
        )
    return num_blocks, block_size


def copied_scale(name: str, scale: Any, shapes: tuple[tuple[int, ...], ...]) -> Array | None:
    """Copies a cache's scale as float32, and checks its shape.

    The cache needs a copy, because donating the cache must not delete the caller's array.
    """
    if scale is None:
        return None
    scale = jnp.array(scale, jnp.float32)
    if scale.shape not in shapes:
        raise ValueError(f"{name} must have one of the shapes {shapes}, got {scale.shape}")
    return scale
