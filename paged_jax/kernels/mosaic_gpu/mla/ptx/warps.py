"""Arrays [32] of int32 with an element for each lane of a warp, in PTX. All warps hold the same array.

To Pallas, an array has an element for each thread of a warpgroup: [128], four times the same 32 elements.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    array,
    bytes_of,
    element,
    i32,
    inline,
    rem,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref

_LAYOUT = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)


def lane_numbers() -> Array:
    """0 to 31."""

    @inline(returns=(WARPGROUP,), dtype="int32", layout=_LAYOUT)
    def compute(_):
        return _array(rem(thread_index_read_again(), WARP))

    return compute()


def gather(values_gmem: Ref, indices: Array, last: int) -> Array:
    """values[min(index, last)] for each index."""

    @inline(plgpu.RefType(), _LAYOUT, returns=(WARPGROUP,), dtype="int32", layout=_LAYOUT)
    def load(_, values_gmem, indices):
        index = arith.minsi(_element(indices), i32(last))
        at = add(address(values_gmem), bytes_of(index, 4))
        return _array(llvm.inline_asm(_word(), [at], "ld.global.b32 $0, [$1];", "=r,l", has_side_effects=False))

    return load(values_gmem, indices)


def sums_to_here(x: Array) -> Array:
    """Inclusive prefix sums."""

    @inline(_LAYOUT, returns=(WARPGROUP,), dtype="int32", layout=_LAYOUT)
    def compute(_, x):
        value = _element(x)
        for distance in (1, 2, 4, 8, 16):
            code = (
                "{ .reg .pred reaches; .reg .b32 earlier; "
                f"shfl.sync.up.b32 earlier|reaches, $1, {distance}, 0, 0xffffffff; "
                "@!reaches mov.b32 earlier, 0; add.s32 $0, earlier, $1; }"
            )
            value = llvm.inline_asm(_word(), [value], code, "=r,r", has_side_effects=True)
        return _array(value)

    return compute(x)


def total(x: Array) -> Scalar:
    """The sum of all elements."""
    return _reduced(x, "add")


def largest(x: Array) -> Scalar:
    """The largest element."""
    return _reduced(x, "max")


def _reduced(x: Array, operation: str) -> Scalar:
    @inline(_LAYOUT, returns=(), dtype="int32", layout=SCALAR)
    def compute(_, x):
        code = f"redux.sync.{operation}.s32 $0, $1, 0xffffffff;"
        value = llvm.inline_asm(_word(), [_element(x)], code, "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return compute(x)


def _word() -> Any:
    return ir.IntegerType.get_signless(32)


def _element(x: Any) -> Any:
    return element(x.registers.item(), 0)


def _array(value: Any) -> Any:
    registers = np.full((1,), vector.broadcast(ir.VectorType.get((1,), _word()), value), object)
    return array(registers, mgpu.WGStridedFragLayout((WARPGROUP,), vec_size=1), (WARPGROUP,), is_signed=True)
