"""Chooses how a call with shared prefixes runs, or refuses with every reason."""

import dataclasses

from paged_jax.kernels.mosaic_gpu.decode import choose as decode
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.shared.plan import lines
from paged_jax.kernels.mosaic_gpu.decode.shared.refs import Parts, shared_memory_bytes
from paged_jax.kernels.mosaic_gpu.decode.tuning import Merge, Tuning
from paged_jax.kernels.mosaic_gpu.hopper.limits import PROGRAM_MEMORY, WARPGROUP
from paged_jax.kernels.mosaic_gpu.hopper.refuse import NAME, check
from paged_jax.kernels.problem import Device, Granularity, Problem, Unsupported

_TILE = 64  # tokens of a tile; with more, a prefix's logits and O would not fit into registers
_MOST_STAGES = 3


def tune(problem: Problem, gpu: Device) -> Parts:
    """The geometries of both parts of a call.

    Raises:
      Unsupported: the kernel cannot do what the problem asks for.
    """
    check(refusals(problem, gpu))
    queries, programs = problem.num_queries, gpu.num_multiprocessors
    own = dataclasses.replace(problem, num_seqs=queries, num_tokens=queries, copies=1, max_query_len=1, causal=True)
    prefixes = dataclasses.replace(own, num_seqs=problem.num_seqs - queries)
    for stages in (2,):
        tuning = Tuning(queues=programs, splits=0, merge=Merge.KERNEL, programs=1, tile=_TILE, stages=stages)
        of_line = dataclasses.replace(tuning, queues=max(1, programs // lines(problem)), stages=2)
        parts = Parts(Geometry(own, tuning), Geometry(prefixes, of_line), max(programs, lines(problem)))
        if shared_memory_bytes(parts) <= PROGRAM_MEMORY:
            return parts
    raise Unsupported(NAME, [f"has no tiling that fits in shared memory for {problem}"])


def refusals(problem: Problem, gpu: Device) -> list[str]:
    """Reasons to refuse a call."""
    reasons = decode.refusals(problem, gpu)
    if problem.cache_itemsize == 1:
        reasons.append(f"lacks several rows for each query over caches of {problem.cache_dtype}")
    if Granularity.SLOT in (problem.k_scale, problem.v_scale):
        reasons.append("lacks several rows for each query with scales of slots")
    if problem.layout not in ("hnd", "nhd"):
        reasons.append(f"lacks several rows for each query in layout {str(problem.layout)!r}")
    if problem.head_size % WARPGROUP:
        reasons.append("lacks several rows for each query with such heads")
    return reasons
