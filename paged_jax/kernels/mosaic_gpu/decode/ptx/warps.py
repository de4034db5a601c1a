"""Arrays of int32 with an element for each lane of a warp, in PTX. All warps hold the same array.

To Pallas, an array has an element for each thread of a warpgroup: four times the same 32 elements.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
from jax import Array
from jaxlib.mlir.dialects import llvm

from paged_jax.kernels.mosaic_gpu.hopper.inline import SCALAR, element, inline
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.threads import LAYOUT
from paged_jax.kernels.mosaic_gpu.hopper.threads import gather as gather
from paged_jax.kernels.mosaic_gpu.hopper.threads import iota as iota
from paged_jax.kernels.mosaic_gpu.hopper.threads import lane_of as lane_of
from paged_jax.kernels.mosaic_gpu.hopper.threads import sums_of_warp as sums_of_warp


def largest(values: Array) -> Scalar:
    """The largest element."""

    @inline(LAYOUT, returns=(), dtype="int32", layout=SCALAR)
    def compute(_, values):
        return _in_all_lanes("redux.sync.max.s32 $0, $1, 0xffffffff;", element(values.registers.item(), 0))

    return compute(values)


def number_at_most(values: Array, limit: Scalar) -> Scalar:
    """How many elements are at most `limit`."""

    @inline(LAYOUT, SCALAR, returns=(), dtype="int32", layout=SCALAR)
    def count(_, values, limit):
        code = """{ .reg .pred is_counted; .reg .b32 votes; setp.le.s32 is_counted, $1, $2;
        vote.sync.ballot.b32 votes, is_counted, 0xffffffff; popc.b32 $0, votes; }"""
        return _in_all_lanes(code, element(values.registers.item(), 0), limit.registers.item())

    return count(values, limit)


def _in_all_lanes(code: str, *operands: Any) -> Any:
    """Runs PTX whose result is the same in all lanes."""
    constraints = ",".join(["=r", *["r"] * len(operands)])
    value = llvm.inline_asm(operands[0].type, operands, code, constraints, has_side_effects=True)
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)
