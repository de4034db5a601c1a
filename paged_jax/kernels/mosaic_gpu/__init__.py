"""The ops in Pallas Mosaic GPU, for Hopper (compute capability 9.0). README.md says how the kernels work."""

from paged_jax.kernels.mosaic_gpu.decode.call import paged_attention_v1 as paged_attention_v1
from paged_jax.kernels.mosaic_gpu.decode.call import paged_attention_v2 as paged_attention_v2
from paged_jax.kernels.mosaic_gpu.decode.call import write_and_attend as write_and_attend
from paged_jax.kernels.mosaic_gpu.leads import leads as leads
from paged_jax.kernels.mosaic_gpu.mla.call import mla_paged_attention as mla_paged_attention
from paged_jax.kernels.mosaic_gpu.mla.call import ragged_mla_attention as ragged_mla_attention
from paged_jax.kernels.mosaic_gpu.ops import merges_copies as merges_copies
from paged_jax.kernels.mosaic_gpu.ops import paged_attention as paged_attention
from paged_jax.kernels.mosaic_gpu.ops import ragged_paged_attention as ragged_paged_attention
from paged_jax.kernels.mosaic_gpu.ragged.call import prefix_attention as prefix_attention
