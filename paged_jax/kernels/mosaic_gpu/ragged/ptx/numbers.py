"""Arithmetic in one instruction each, for scalars and for arrays with one element for each thread of a warpgroup.

Mosaic's division and conversion take more instructions, for subnormal numbers and for floats that no integer holds.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from paged_jax.kernels.mosaic_gpu.hopper.inline import SCALAR, element, inline
from paged_jax.kernels.mosaic_gpu.hopper.threads import LAYOUT, of_threads


def reciprocal(x: Any) -> Any:
    """1 / x, if x and the result are normal float32: the same bits as Mosaic's division with `approx_math`."""
    return of_each(x, "rcp.approx.ftz.f32 $0, $1;", "float32")


def truncated(x: Any) -> Any:
    """Converts float32 to int32, rounded towards 0."""
    return of_each(x, "cvt.rzi.s32.f32 $0, $1;", "int32")


def of_each(x: Any, code: str, dtype: str) -> Any:
    """Runs an instruction without side effects on each element."""
    is_array, is_float = jnp.ndim(x) > 0, dtype == "float32"
    layout = LAYOUT if is_array else SCALAR

    @inline(layout, returns=x.shape, dtype=dtype, layout=layout)
    def compute(_, x):
        register = x.registers.item()
        value = element(register, 0) if is_array else register
        result_type = ir.F32Type.get() if is_float else ir.IntegerType.get_signless(32)
        result = llvm.inline_asm(result_type, [value], code, "=f,f" if is_float else "=r,f")
        is_signed = None if is_float else True
        return of_threads(result) if is_array else mgpu.FragmentedArray.splat(result, (), is_signed=is_signed)

    return compute(x)
