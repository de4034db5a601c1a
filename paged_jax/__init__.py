"""Paged attention in JAX: decode and ragged prefill over a paged KV cache, with a functional block allocator."""

from paged_jax import _export as _export
from paged_jax import allocator, engine
from paged_jax._dispatch import Implementation
from paged_jax._selection import which_implementation
from paged_jax.cache import PagedKVCache
from paged_jax.cache_ops import copy_blocks, swap_blocks, write_to_latent_cache, write_to_paged_cache
from paged_jax.flat_pool import get_kv_cache_shape, split_kv_cache
from paged_jax.latent_cache import PagedLatentCache
from paged_jax.metadata import AttentionMetadata, build_metadata, check_metadata
from paged_jax.ops import (
    merge_attention_states,
    mla_paged_attention,
    paged_attention,
    paged_attention_v1,
    paged_attention_v2,
    prefix_attention,
    ragged_mla_attention,
    ragged_paged_attention,
    write_and_attend,
)
from paged_jax.options import BlockSparse, Layout
from paged_jax.shapes import BLOCK_SIZES

__version__ = "0.1.0"
__all__ = [
    "BLOCK_SIZES",
    "AttentionMetadata",
    "BlockSparse",
    "Implementation",
    "Layout",
    "PagedKVCache",
    "PagedLatentCache",
    "allocator",
    "build_metadata",
    "check_metadata",
    "copy_blocks",
    "engine",
    "get_kv_cache_shape",
    "merge_attention_states",
    "mla_paged_attention",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
    "prefix_attention",
    "ragged_mla_attention",
    "ragged_paged_attention",
    "split_kv_cache",
    "swap_blocks",
    "which_implementation",
    "write_and_attend",
    "write_to_latent_cache",
    "write_to_paged_cache",
]
