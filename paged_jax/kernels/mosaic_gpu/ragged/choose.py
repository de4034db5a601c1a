"""Chooses the `Tuning` of ragged attention from `Problem` and `Device` alone, or refuses with every reason."""

import itertools
from collections.abc import Iterator

from paged_jax.kernels.mosaic_gpu.hopper import refuse
from paged_jax.kernels.mosaic_gpu.hopper.limits import PROGRAM_MEMORY, WARPGROUP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.refuse import NAME, check
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.refs import shared_memory_bytes
from paged_jax.kernels.mosaic_gpu.ragged.tuning import Tuning
from paged_jax.kernels.problem import Device, Granularity, Problem, Unsupported

_LEAST_HEAD_SIZE, _LARGEST_HEAD_SIZE = 16, 256

_MOST_HEAD_SIZE_OF_THREE = 64  # the largest with three computing warpgroups; for more of O they lack registers
# The least bytes of a small tile of K, and its tokens. Two warpgroups take alternate tiles of a thin item, so they
# share a short context more evenly if tiles are small. With fewer bytes, long contexts take longer (benchmarks/LOG.md,
# "Small thin tiles").
_SMALL_TILE_BYTES, _SMALL_TILE = 16 * 1024, 64
_RAW_TILES = 6, 3, 2  # the numbers of raw tiles of 8 bits, best first
_MOST_REGISTERS = 200  # of a computing thread's 216, for O, S and P, if two warpgroups compute
_MOST_COUNTED = 4 * WARPGROUP  # sequences whose counts fit into shared memory


def tune(problem: Problem, device: Device) -> Tuning:
    """Chooses the first tiling that fits into registers and shared memory.

    Raises:
      Unsupported: the kernels cannot do what the problem asks for.
    """
    check([*_refusals(problem, device), *(_prefix_refusals(problem) if problem.prefix else ())])
    for tuning in _tilings(problem, device):
        if shared_memory_bytes(Geometry(problem, tuning)) <= PROGRAM_MEMORY:
            return tuning
    what = f"head_size {problem.head_size} with caches of {problem.cache_dtype}"
    raise Unsupported(NAME, [f"lacks {what} in ragged attention: no tile fits in shared memory"])


def _tilings(problem: Problem, device: Device) -> Iterator[Tuning]:
    """Tunings whose tiles fit into registers, best first."""
    tilings = [(128, 4, 2), (128, 2, 2), (128, 2, 1), (64, 4, 2), (64, 2, 2), (64, 2, 1)]
    scales_slots = Granularity.SLOT in (problem.k_scale, problem.v_scale)
    by_warps = problem.cache_itemsize == 1 and not (problem.prefix or scales_slots)
    warpgroups = _computing_warpgroups(problem)
    if by_warps and warpgroups > 2:  # six raw tiles gain more than four stages (LOG, "Three warpgroups")
        tilings = [tiling for tiling in tilings if tiling[1] == 2]
    counts = problem.num_seqs + 2 <= _MOST_COUNTED
    candidates = [*itertools.product(tilings, _RAW_TILES if by_warps else (2,), (counts,))]
    # The last resort of large heads over 8 bits is one raw tile, whose next copy waits for its conversion. Triton's
    # kernel takes up to 5.4 times as long. If the counts of many sequences do not fit beside that, XLA counts.
    candidates += [(tilings[-1], 1, counts), (tilings[-1], 1, False)]
    for (tile, stages, queries), raw_tiles, counts_in_kernel in candidates:
        if problem.head_size / 2 + tile <= _MOST_REGISTERS:
            tile_bytes = tile * problem.head_size * problem.cache_itemsize
            yield Tuning(
                num_programs=device.num_multiprocessors,
                tile=tile,
                thin_tile=_SMALL_TILE if tile_bytes >= 2 * _SMALL_TILE_BYTES else tile,
                stages=stages,
                raw_tiles=raw_tiles,
                queries=queries,
                computing_warpgroups=warpgroups,
                counts_in_kernel=counts_in_kernel,
            )


def _computing_warpgroups(problem: Problem) -> int:
    """How many warpgroups compute: three if wide items may exist and their O and P leave room for a third one."""
    may_be_wide = problem.max_query_len > WGMMA_ROWS // problem.group
    return 3 if may_be_wide and problem.head_size <= _MOST_HEAD_SIZE_OF_THREE else 2


def _refusals(problem: Problem, device: Device) -> list[str]:
    """Reasons to refuse ragged attention."""
    reasons = refuse.refusals(problem, device)
    if problem.head_size % 16 or not _LEAST_HEAD_SIZE <= problem.head_size <= _LARGEST_HEAD_SIZE:
        takes = f"takes multiples of 16 from {_LEAST_HEAD_SIZE} to {_LARGEST_HEAD_SIZE}"
        reasons.append(f"lacks head_size {problem.head_size} in ragged attention, {takes}")
    if problem.layout == "vllm":
        reasons.append("lacks layout 'vllm' in ragged attention")
    sparse = problem.block_sparse
    slides = sparse is not None and sparse.head_sliding_step % sparse.vert_stride > 0
    if sparse is not None and slides and sparse.vert_stride * problem.num_heads >= 1 << 31:
        reasons.append(f"lacks a vert_stride of {sparse.vert_stride} for {problem.num_heads} heads, beyond 32 bits")
    if problem.v_scale is Granularity.SLOT and problem.query_dtype == "float16":
        reasons.append("lacks v_scale for each slot in ragged attention of float16, which may not hold its products")
    return reasons


def _prefix_refusals(problem: Problem) -> list[str]:
    """Further reasons to refuse new keys and values beside the cache."""
    reasons = []
    if problem.query_dtype == "float16" and problem.v_scale is not Granularity.NONE:
        reasons.append("lacks prefix_attention of float16 with v_scale, whose inverse float16 may not hold")
    if Granularity.SLOT in (problem.k_scale, problem.v_scale):
        reasons.append("lacks prefix_attention with scales for each slot")
    if problem.max_blocks_per_seq * problem.num_blocks == 0:
        reasons.append("lacks prefix_attention without a cache")
    return reasons
