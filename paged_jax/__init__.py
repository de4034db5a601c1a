"""Paged attention in JAX: decode and ragged prefill over a paged KV cache, with a functional block allocator."""

from paged_jax import allocator as allocator
from paged_jax.cache import PagedKVCache as PagedKVCache
from paged_jax.cache import get_kv_cache_shape as get_kv_cache_shape
from paged_jax.cache import split_kv_cache as split_kv_cache
from paged_jax.cache_ops import copy_blocks as copy_blocks
from paged_jax.cache_ops import swap_blocks as swap_blocks
from paged_jax.cache_ops import write_to_paged_cache as write_to_paged_cache
from paged_jax.metadata import AttentionMetadata as AttentionMetadata
from paged_jax.metadata import build_metadata as build_metadata
from paged_jax.metadata import check_metadata as check_metadata
from paged_jax.ops import merge_attention_states as merge_attention_states
from paged_jax.ops import paged_attention as paged_attention
from paged_jax.ops import paged_attention_v1 as paged_attention_v1
from paged_jax.ops import paged_attention_v2 as paged_attention_v2
from paged_jax.ops import prefix_attention as prefix_attention
from paged_jax.ops import ragged_paged_attention as ragged_paged_attention
from paged_jax.ops import write_and_attend as write_and_attend
from paged_jax.options import BlockSparse as BlockSparse
