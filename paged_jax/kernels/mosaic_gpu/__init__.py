"""The ops in Pallas Mosaic GPU, for Hopper (compute capability 9.0). README.md says how the kernels work."""

from typing import Any

from paged_jax.kernels.mosaic_gpu import decode as _decode
from paged_jax.kernels.mosaic_gpu import ragged as _ragged
from paged_jax.kernels.mosaic_gpu.decode import paged_attention as paged_attention
from paged_jax.kernels.mosaic_gpu.decode import paged_attention_v1 as paged_attention_v1
from paged_jax.kernels.mosaic_gpu.decode import paged_attention_v2 as paged_attention_v2
from paged_jax.kernels.mosaic_gpu.decode import write_and_attend as write_and_attend
from paged_jax.kernels.mosaic_gpu.ragged import prefix_attention as prefix_attention
from paged_jax.kernels.mosaic_gpu.ragged import ragged_paged_attention as ragged_paged_attention


def leads(op: str, operands: Any) -> bool:
    """Whether these kernels, where they can do what a call asks for, are the fastest of this package's."""
    if op in ("ragged_paged_attention", "prefix_attention"):
        return _ragged.leads(operands, prefix=op == "prefix_attention")
    return op in ("paged_attention_v1", "paged_attention_v2", "paged_attention", "write_and_attend") and _decode.leads(
        operands
    )
