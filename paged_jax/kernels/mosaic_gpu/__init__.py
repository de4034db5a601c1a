"""The ops in Pallas Mosaic GPU, for Hopper (compute capability 9.0). README.md says how the kernels work.

Decode leads. Ragged attention is taken by name only: where it was measured it was faster than Triton's, but in a loop,
as under `vmap`, a call with split contexts came out wrong on a GPU (benchmarks/LOG.md, "Ragged attention on Hopper").
"""

from paged_jax.kernels.mosaic_gpu.decode import leads as leads
from paged_jax.kernels.mosaic_gpu.decode import paged_attention as paged_attention
from paged_jax.kernels.mosaic_gpu.decode import paged_attention_v1 as paged_attention_v1
from paged_jax.kernels.mosaic_gpu.decode import paged_attention_v2 as paged_attention_v2
from paged_jax.kernels.mosaic_gpu.decode import write_and_attend as write_and_attend
from paged_jax.kernels.mosaic_gpu.ragged import prefix_attention as prefix_attention
from paged_jax.kernels.mosaic_gpu.ragged import ragged_paged_attention as ragged_paged_attention

BY_NAME_ONLY = ("ragged_paged_attention", "prefix_attention")
