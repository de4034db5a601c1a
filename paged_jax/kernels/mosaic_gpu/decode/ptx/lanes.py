"""What the lanes of a warp have together: each lane has one element of an array, and all warps have the same ones."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
from jax import Array
from jaxlib.mlir.dialects import llvm

from paged_jax.kernels.mosaic_gpu.hopper.inline import SCALAR, element, inline
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP
from paged_jax.kernels.mosaic_gpu.hopper.threads import LAYOUT, of_threads, sums_in_lanes
from paged_jax.kernels.mosaic_gpu.hopper.threads import gather as gather
from paged_jax.kernels.mosaic_gpu.hopper.threads import iota as iota


def sums(x: Array) -> Array:
    """Inclusive prefix sums of integers over the lanes."""

    @inline(LAYOUT, returns=(WARPGROUP,), dtype="int32", layout=LAYOUT)
    def compute(_, x):
        return of_threads(sums_in_lanes(element(x.registers.item(), 0)))

    return compute(x)


def of_lane(x: Array, lane: Scalar) -> Scalar:
    """The element of one lane."""

    @inline(LAYOUT, SCALAR, returns=(), dtype="int32", layout=SCALAR)
    def compute(_, x, lane):
        code = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
        return _scalar(code, element(x.registers.item(), 0), lane.registers.item())

    return compute(x, lane)


def largest(x: Array) -> Scalar:
    """The largest element."""

    @inline(LAYOUT, returns=(), dtype="int32", layout=SCALAR)
    def compute(_, x):
        return _scalar("redux.sync.max.s32 $0, $1, 0xffffffff;", element(x.registers.item(), 0))

    return compute(x)


def number_at_most(x: Array, y: Scalar) -> Scalar:
    """How many elements are y or less."""

    @inline(LAYOUT, SCALAR, returns=(), dtype="int32", layout=SCALAR)
    def compute(_, x, y):
        code = """{ .reg .pred is_less; .reg .b32 votes; setp.le.s32 is_less, $1, $2;
            vote.sync.ballot.b32 votes, is_less, 0xffffffff; popc.b32 $0, votes; }"""
        return _scalar(code, element(x.registers.item(), 0), y.registers.item())

    return compute(x, y)


def _scalar(code: str, *operands: Any) -> Any:
    """Runs PTX whose result is the same in all lanes."""
    constraints = ",".join(["=r", *["r"] * len(operands)])
    value = llvm.inline_asm(operands[0].type, operands, code, constraints, has_side_effects=True)
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)
