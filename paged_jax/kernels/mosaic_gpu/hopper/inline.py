"""Helpers for code that Pallas cannot express: a thread's registers and integers as MLIR values, and PTX."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP

SCALAR = plgpu.Layout.WG_SPLAT(())
"""The layout of a scalar argument of `inline`."""

_SHARED_MEMORY = 3  # the address space of shared memory


def inline(
    *arg_types: Any,
    returns: Any = None,
    dtype: str = "float16",
    layout: Any = plgpu.Layout.WGMMA,
    results: int | None = None,
) -> Any:
    """Decorates a function of MLIR values, so that kernels can call it.

    Its result, if any, has shape `returns`. With `results`, it is a tuple of so many of them.
    """
    result = None if returns is None else plgpu.ShapeDtypeStruct(returns, jnp.dtype(dtype), layout=layout)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=result if results is None else (result,) * results)


def array(registers: np.ndarray, layout: Any, shape, is_signed: bool | None = None):
    """An array of this shape and layout from a thread's registers, in the order of the layout."""
    registers = registers.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def operand(halves: np.ndarray, shape, dtype: str) -> mgpu.FragmentedArray:
    """An array in wgmma's layout from a thread's registers; each register holds two elements of 16 bits."""
    registers = np.empty(halves.shape, object)
    pair = ir.VectorType.get((2,), ir.F16Type.get() if dtype == "float16" else ir.BF16Type.get())
    for i, x in np.ndenumerate(halves):
        registers[i] = llvm.bitcast(pair, x)
    return array(registers, mgpu.WGMMA_LAYOUT, shape)


def thread_index():
    """Each thread's index in its warpgroup."""
    return rem(mgpu.thread_idx(), WARPGROUP)


def thread_index_read_again():
    """`thread_index`, read again from the special register, so that no register holds it over loops."""
    word = ir.IntegerType.get_signless(32)
    return rem(llvm.inline_asm(word, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True), WARPGROUP)


def add(x, y):
    """x + y."""
    return arith.addi(x, y)


def mul(x, n: int):
    """x * n."""
    return arith.muli(x, i32(n))


def div(x, n: int):
    """x // n."""
    return arith.divui(x, i32(n))


def rem(x, n: int):
    """x % n."""
    return arith.remui(x, i32(n))


def select_within(x, low, high, inside, outside):
    """Returns `inside` where low <= x < high, else `outside`."""
    begun, ended = (arith.cmpi(arith.CmpIPredicate.sge, x, bound) for bound in (low, high))
    return arith.select(begun, arith.select(ended, outside, inside), outside)


def within(x, low, high):
    """Whether low <= x < high."""
    begun = arith.cmpi(arith.CmpIPredicate.sge, x, low)
    return arith.andi(begun, less(x, high))


def less(x, y):
    """Whether x < y."""
    return arith.cmpi(arith.CmpIPredicate.slt, x, y)


def i32(n: int):
    """A constant of 32 bits."""
    return mgpu.c(n, ir.IntegerType.get_signless(32))


def i64(n: int):
    """A constant of 64 bits."""
    return mgpu.c(n, ir.IntegerType.get_signless(64))


def as_i32(condition):
    """1 if a condition holds, else 0: `assembly` takes no predicates."""
    return arith.extui(ir.IntegerType.get_signless(32), condition)


def as_i64(x):
    """Sign-extends an integer from 32 to 64 bits."""
    return arith.extsi(ir.IntegerType.get_signless(64), x)


def as_index(x):
    """Converts an integer to MLIR's index type, for bounds of loops."""
    return arith.index_cast(ir.IndexType.get(), x)


def bytes_of(count, size: int):
    """count * size in 64 bits, an offset in global memory."""
    return arith.muli(as_i64(count), i64(size))


def element(register, i: int):
    """Extracts an element of a register that holds several."""
    return vector.extract(register, [], [i])


def address(ref):
    """The address of a reference: 32 bits of shared memory, 64 bits of global memory."""
    space = mgpu.utils.get_memref_llvm_address_space(ir.MemRefType(ref.type))
    bits = 32 if space == _SHARED_MEMORY else 64
    return llvm.ptrtoint(ir.IntegerType.get_signless(bits), mgpu.utils.memref_ptr(ref))


def assembly(code: str, constraints: str, *operands: Any, results: int = 0) -> list:
    """Inserts PTX with side effects, so that the compiler keeps its order. Returns `results` float32."""
    clobbers = ",".join(x for x in (constraints, "~{memory}") if x)
    f32 = ir.F32Type.get()
    if results == 0:
        llvm.inline_asm(None, operands, code, clobbers, has_side_effects=True)
        return []
    if results == 1:
        return [llvm.inline_asm(f32, operands, code, clobbers, has_side_effects=True)]
    struct = llvm.StructType.get_literal([f32] * results)
    result = llvm.inline_asm(struct, operands, code, clobbers, has_side_effects=True)
    return [llvm.extractvalue(f32, result, [i]) for i in range(results)]
