"""The ops in Pallas Mosaic GPU, for Hopper (compute capability 9.0).

On the host: `decode.py` has the ops, `choice.py` finds a call's config, `config.py` says what that is. On the device:
`attend.py` is the decode kernel, `load.py` its copies, `plan.py` which tokens are whose, `write.py` new tokens,
`reduce.py` the merge of parts; `narrow.py` and `vllm.py` take tiles of 8 bits and of layout "vllm" through registers,
with `inline.py` below Pallas and `registers.py` above.
"""

from paged_jax.kernels.mosaic_gpu.decode import leads as leads
from paged_jax.kernels.mosaic_gpu.decode import paged_attention as paged_attention
from paged_jax.kernels.mosaic_gpu.decode import paged_attention_v1 as paged_attention_v1
from paged_jax.kernels.mosaic_gpu.decode import paged_attention_v2 as paged_attention_v2
from paged_jax.kernels.mosaic_gpu.decode import write_and_attend as write_and_attend
