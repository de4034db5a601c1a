"""Reasons to refuse a call that all Hopper kernels share."""

from collections.abc import Sequence

from paged_jax.kernels.mosaic_gpu.hopper.limits import CAPABILITY, WGMMA_ROWS
from paged_jax.kernels.problem import Device, Problem, Unsupported

NAME = "mosaic_gpu"

_LEAST_BLOCK_SIZE = 8
_LARGEST_GROUP = WGMMA_ROWS  # query heads of a kv head


def refusals(problem: Problem, gpu: Device) -> list[str]:
    """Returns the reasons for which every Hopper kernel refuses a call."""
    reasons = []
    if gpu.capability != CAPABILITY:
        reasons.append(f"needs compute capability {CAPABILITY / 10}, this GPU has {gpu.capability / 10}")
    if problem.query_dtype not in ("float16", "bfloat16"):
        reasons.append(f"lacks queries of {problem.query_dtype}, takes float16 and bfloat16")
    if problem.cache_dtype != problem.query_dtype and problem.cache_itemsize > 1:
        reasons.append(f"lacks caches of {problem.cache_dtype} for queries of {problem.query_dtype}")
    if problem.block_size < _LEAST_BLOCK_SIZE:
        reasons.append(f"lacks block_size {problem.block_size}, takes {_LEAST_BLOCK_SIZE} and more")
    if problem.group > _LARGEST_GROUP:
        reasons.append(f"lacks groups of {problem.group} query heads, takes up to {_LARGEST_GROUP}")
    return reasons


def check(reasons: Sequence[str]) -> None:
    """Raises an error if there are any reasons.

    Raises:
      Unsupported: there is a reason.
    """
    if reasons:
        raise Unsupported(NAME, reasons)
