"""Chooses the `Tuning` of the MLA kernel by pure functions of `Problem` and `Device`, or refuses with every reason."""

import jax.experimental.pallas as pl

from paged_jax.kernels.mosaic_gpu.hopper import refuse
from paged_jax.kernels.mosaic_gpu.hopper.limits import CAPABILITY, QUERY_ROWS, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.mla.tuning import Tuning
from paged_jax.kernels.problem import Device, Problem

_LARGEST_LATENT = 576  # queries and two tiles of this size fill shared memory
_LARGEST_VALUE = 512  # a warpgroup holds half of its sums in registers
_SWIZZLED = 64  # neighbouring columns in a tile of the swizzled layout
_LEAST_QUEUES = 0.93  # the least fraction of the queues that fill the GPU
_MOST_WIDTH = 4
"""Sharing a context among four programs is fastest (benchmarks/LOG.md, "Latents read once")."""


def tune(problem: Problem, gpu: Device) -> Tuning:
    """Chooses the grid: a program on each multiprocessor."""
    refuse.check(refusals(problem, gpu))
    heads = pl.cdiv(problem.num_heads, QUERY_ROWS) * QUERY_ROWS
    average = pl.cdiv(problem.num_tokens, max(problem.num_seqs, 1))
    row_blocks = pl.cdiv(min(problem.max_query_len, average) * heads, WGMMA_ROWS)
    width = max(1, min(row_blocks, _MOST_WIDTH, gpu.num_multiprocessors))
    most, items = max(1, gpu.num_multiprocessors // width), max(1, problem.num_seqs * pl.cdiv(row_blocks, width))
    # If lengths are alike, queues of these numbers cut no item, or cut all items alike.
    fitting = [n for n in range(most, int(_LEAST_QUEUES * most), -1) if items % n == 0 or n % items == 0]
    # A half balances both warpgroups. But a quarter is released earlier, which pays if copies bound the kernel.
    left = problem.head_size // (2 if width == _MOST_WIDTH else 4)
    left = max(_SWIZZLED, left // _SWIZZLED * _SWIZZLED)
    return Tuning(queues=fitting[0] if fitting else most, width=width, left=left)


def refusals(problem: Problem, gpu: Device) -> list[str]:
    """Every reason why the kernel cannot do a call."""
    latent_size, value_size = problem.latent_size or 0, problem.head_size
    reasons = []
    if gpu.capability != CAPABILITY:
        reasons.append(f"needs compute capability {CAPABILITY / 10}, this GPU has {gpu.capability / 10}")
    if problem.query_dtype not in ("float16", "bfloat16") or problem.cache_dtype != problem.query_dtype:
        reasons.append(
            f"takes queries and latents of one dtype of 16 bits, got {problem.query_dtype} and {problem.cache_dtype}"
        )
    if latent_size % 64 or latent_size > _LARGEST_LATENT:
        reasons.append(f"takes latents of a multiple of 64 elements up to {_LARGEST_LATENT}, got {latent_size}")
    if value_size % 128 or value_size > _LARGEST_VALUE:
        reasons.append(f"takes values of a multiple of 128 elements up to {_LARGEST_VALUE}, got {value_size}")
    if problem.block_size < QUERY_ROWS:
        reasons.append(f"takes blocks of {QUERY_ROWS} tokens or more, got {problem.block_size}")
    return reasons
