"""Chooses the kernel of multi-head latent attention. `ragged_tuning.py` chooses its grid."""

from dataclasses import dataclass

import jax.numpy as jnp

from paged_jax.kernels.problem import Device, Problem
from paged_jax.kernels.triton import ragged_tuning, tuning
from paged_jax.kernels.triton.ragged_tuning import Grid
from paged_jax.kernels.triton.tuning import AttentionKernel, Tuning, cdiv, power_of_two


@dataclass(frozen=True)
class LatentKernel(AttentionKernel):
    """The compile-time argument of the kernel over latents. `problem.head_size` is the size of the values.

    A latent has two parts: its value, which takes `tuning.width` elements in registers, and the rest.
    """

    @property
    def rest(self) -> int:
        """How many elements of a latent follow its value."""
        return (self.problem.latent_size or 0) - self.problem.head_size

    @property
    def rest_width(self) -> int:
        """How many elements the rest takes in registers, a power of two >= `rest`."""
        return max(16, power_of_two(self.rest))

    @property
    def late_factor(self) -> bool:
        """False: logits get their factor at once, which costs nothing beside the wide products."""
        return False


def tune(problem: Problem, gpu: Device) -> tuple[LatentKernel, Grid]:
    """Chooses the kernel of a call and its grid."""
    tuned, grid = ragged_tuning.shared(problem, tuning_of(problem, gpu), gpu)
    return LatentKernel(problem.attention, tuned), grid


def tuning_of(problem: Problem, gpu: Device) -> Tuning:
    """Chooses the tiles: 16 to 64 rows, and as many tokens as shared memory and registers hold."""
    width, compute = max(16, power_of_two(problem.head_size)), tuning.compute_dtype(problem, False)
    # Hopper and data-center Blackwell multiply 64 rows at once; a thread of 8 warps sums up to 128 elements.
    most = 64 if gpu.capability // 10 in (9, 10) and width <= 512 else 32 if width <= 512 else 16
    if compute == "float32":  # without matrix units, larger products would spill registers
        most = 16
    heads = cdiv(problem.group, cdiv(problem.group, most))
    per_seq = cdiv(problem.num_tokens, max(problem.num_seqs, 1))
    queries = max(1, min(per_seq, problem.max_query_len, most // heads))
    rows = max(16, power_of_two(heads * queries))
    tile, num_stages = 64 if width <= 256 else 32, 3
    while not _fits(problem, rows, tile, num_stages, compute, gpu) and (tile > 16 or num_stages > 1):
        tile, num_stages = (tile, num_stages - 1) if num_stages > 2 or tile == 16 else (tile // 2, num_stages)
    return Tuning(
        heads=heads,
        queries=rows // heads if queries > 1 else 1,
        width=width,
        tile=tile,
        compute_dtype=compute,
        staged_values=False,
        num_warps=8 if rows * width > 8192 else 4,
        num_stages=num_stages,
    )


def _fits(problem: Problem, rows: int, tile: int, num_stages: int, compute: str, gpu: Device) -> bool:
    """Whether the queries, the tiles in flight and a converted tile fit into shared memory."""
    latent_size = problem.latent_size or 0
    width = max(16, power_of_two(problem.head_size)) + max(16, power_of_two(latent_size - problem.head_size))
    width = width if latent_size > problem.head_size else power_of_two(latent_size)
    itemsize, compute_itemsize = problem.cache_itemsize, jnp.dtype(compute).itemsize
    converted = compute_itemsize if compute_itemsize != itemsize else 0
    in_flight = max(num_stages - 1, 1) * itemsize + converted
    needed = rows * (width + tile) * compute_itemsize + tile * width * in_flight + 4096
    return needed <= tuning.shared_memory(gpu)
