"""The ops for any NVIDIA GPU from Ampere on, through jax-triton. Importing this needs neither GPU nor jax-triton."""

from paged_jax.kernels.triton.cache_ops import copy_blocks as copy_blocks
from paged_jax.kernels.triton.cache_ops import swap_blocks as swap_blocks
from paged_jax.kernels.triton.cache_ops import write_to_paged_cache as write_to_paged_cache
from paged_jax.kernels.triton.decode import paged_attention as paged_attention
from paged_jax.kernels.triton.decode import paged_attention_v1 as paged_attention_v1
from paged_jax.kernels.triton.decode import paged_attention_v2 as paged_attention_v2
from paged_jax.kernels.triton.decode import write_and_attend as write_and_attend
from paged_jax.kernels.triton.mla import mla_paged_attention as mla_paged_attention
from paged_jax.kernels.triton.mla import ragged_mla_attention as ragged_mla_attention
from paged_jax.kernels.triton.mla import write_to_latent_cache as write_to_latent_cache
from paged_jax.kernels.triton.ragged import prefix_attention as prefix_attention
from paged_jax.kernels.triton.ragged import ragged_paged_attention as ragged_paged_attention
