"""Device code below what Pallas has words for: arrays as each thread's registers, and integers of a thread, in MLIR."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from paged_jax.kernels.mosaic_gpu.config import Config


def inline(*arg_types: Any, returns: Any = None, dtype: str = "float16", layout: Any = plgpu.Layout.WGMMA) -> Any:
    """Device code on fragmented arrays; what it returns, if anything, has the shape `returns`."""
    result = plgpu.ShapeDtypeStruct(returns, jnp.dtype(dtype), layout=layout) if returns else None
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=result)


def array(registers: np.ndarray, layout: mgpu.TiledLayout, shape, is_signed: bool | None = None):
    registers = registers.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def operand(halves: np.ndarray, shape, dtype: str) -> mgpu.FragmentedArray:
    """Registers, each of two elements, as an array in the layout of wgmma."""
    registers = np.empty(halves.shape, object)
    pair = ir.VectorType.get((2,), ir.F16Type.get() if dtype == "float16" else ir.BF16Type.get())
    for i, x in np.ndenumerate(halves):
        registers[i] = llvm.bitcast(pair, x)
    return array(registers, mgpu.WGMMA_LAYOUT, shape)


def token_of(row, cfg: Config):
    """The token of a row of a tile."""
    if cfg.fold == 1:
        return row
    return add(times(over(row, cfg.fold * cfg.run), cfg.run), rest(row, cfg.run))


def thread(*, anew: bool = False):
    """Of the warpgroup. If read anew, what follows from it is computed there, and not kept in registers over loops."""
    if not anew:
        return rest(mgpu.thread_idx(), 128)
    word = ir.IntegerType.get_signless(32)
    return rest(llvm.inline_asm(word, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True), 128)


def add(x, y):
    return arith.addi(x, y)


def times(x, n: int):
    return arith.muli(x, i32(n))


def over(x, n: int):
    return arith.divui(x, i32(n))


def rest(x, n: int):
    return arith.remui(x, i32(n))


def within(low, x, high):
    """Whether low <= x, and whether high <= x."""
    return tuple(arith.cmpi(arith.CmpIPredicate.sge, x, bound) for bound in (low, high))


def if_within(bounds, value, otherwise):
    """`value` where `within` found low <= x < high."""
    begun, ended = bounds
    return arith.select(begun, arith.select(ended, otherwise, value), otherwise)


def i32(n: int):
    return mgpu.c(n, ir.IntegerType.get_signless(32))
