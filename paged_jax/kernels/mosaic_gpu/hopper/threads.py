"""Arrays with one element for each thread of a warpgroup, in PTX.

The folders `ptx/` of kernels import these functions, and kernels call them there, where the tests replace them.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from paged_jax.kernels.mosaic_gpu.hopper.inline import SCALAR, add, address, array, bytes_of, element, i32, inline
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref

LAYOUT = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)


def iota() -> Array:
    """0, 1, 2, ..."""
    return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP,), 0, layout=LAYOUT)


def gather(values_gmem: Ref, indices: Array, last: int) -> Array:
    """values[min(index, last)] for each index."""

    @inline(plgpu.RefType(), LAYOUT, returns=(WARPGROUP,), dtype="int32", layout=LAYOUT)
    def load(_, values_gmem, indices):
        index = arith.minsi(element(indices.registers.item(), 0), i32(last))
        at = add(address(values_gmem), bytes_of(index, 4))
        word = ir.IntegerType.get_signless(32)
        value = llvm.inline_asm(word, [at], "ld.global.b32 $0, [$1];", "=r,l,~{memory}", has_side_effects=True)
        return of_threads(value)

    return load(values_gmem, indices)


def sums_of_warp(values: Array) -> Array:
    """Inclusive prefix sums of integers over the lanes of each warp."""

    @inline(LAYOUT, returns=(WARPGROUP,), dtype="int32", layout=LAYOUT)
    def compute(_, values):
        return of_threads(sums_in_lanes(element(values.registers.item(), 0)))

    return compute(values)


def lane_of(values: Array, lane: Any) -> Scalar:
    """The integer of a lane, for all threads of its warp."""

    @inline(LAYOUT, SCALAR, returns=(), dtype="int32", layout=SCALAR)
    def get(_, values, lane):
        value = element(values.registers.item(), 0)
        code = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
        value = llvm.inline_asm(value.type, [value, lane.registers.item()], code, "=r,r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return get(values, jnp.int32(lane))


def sums_in_lanes(x):
    """Inclusive prefix sums of integers over the lanes of a warp."""
    code = """{ .reg .b32 earlier; .reg .pred reaches; mov.b32 $0, $1;
    shfl.sync.up.b32 earlier|reaches, $1, DISTANCE, 0, 0xffffffff; @reaches add.s32 $0, $1, earlier; }"""
    for distance in (1, 2, 4, 8, 16):
        text = code.replace("DISTANCE", str(distance))
        x = llvm.inline_asm(x.type, [x], text, "=&r,r", has_side_effects=True)
    return x


def of_threads(value):
    """An array with an integer, or a float32, of each thread."""
    registers = np.full((1,), vector.broadcast(ir.VectorType.get((1,), value.type), value), object)
    is_signed = None if isinstance(value.type, ir.F32Type) else True
    return array(registers, mgpu.WGStridedFragLayout((WARPGROUP,), vec_size=1), (WARPGROUP,), is_signed)
