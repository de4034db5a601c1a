"""What Pallas has no words for, in MLIR: arrays as the registers of each thread, a thread's own integers, and PTX."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP

SCALAR = plgpu.Layout.WG_SPLAT(())
"""The layout of a scalar, as an argument of `inline`."""

_SHARED_MEMORY = 3  # the address space of shared memory


def inline(*arg_types: Any, returns: Any = None, dtype: str = "float16", layout: Any = plgpu.Layout.WGMMA) -> Any:
    """Turns a function of MLIR values into one that kernels call; what it returns, if anything, has shape `returns`."""
    result = plgpu.ShapeDtypeStruct(returns, jnp.dtype(dtype), layout=layout) if returns else None
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=result)


def array(registers: np.ndarray, layout: Any, shape, is_signed: bool | None = None):
    """An array of this shape and layout from the registers of a thread, in the layout's order."""
    registers = registers.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def operand(halves: np.ndarray, shape, dtype: str) -> mgpu.FragmentedArray:
    """An array in wgmma's layout from the registers of a thread, each of which holds two elements of 16 bits."""
    registers = np.empty(halves.shape, object)
    pair = ir.VectorType.get((2,), ir.F16Type.get() if dtype == "float16" else ir.BF16Type.get())
    for i, x in np.ndenumerate(halves):
        registers[i] = llvm.bitcast(pair, x)
    return array(registers, mgpu.WGMMA_LAYOUT, shape)


def thread_index():
    """Each thread's index in its warpgroup."""
    return rem(mgpu.thread_idx(), WARPGROUP)


def thread_index_read_again():
    """Each thread's index in its warpgroup. Reading it again keeps no register alive over loops."""
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
    """1 where a condition holds, else 0: PTX in `assembly` takes no predicates."""
    return arith.extui(ir.IntegerType.get_signless(32), condition)


def as_i64(x):
    """An integer of 32 bits in 64 bits."""
    return arith.extsi(ir.IntegerType.get_signless(64), x)


def as_index(x):
    """An integer of 32 bits as a bound of a loop."""
    return arith.index_cast(ir.IndexType.get(), x)


def bytes_of(count, size: int):
    """The bytes of some elements of `size` bytes, as an offset in global memory."""
    return arith.muli(as_i64(count), i64(size))


def element(register, i: int):
    """An element of a register that holds several."""
    return vector.extract(register, [], [i])


def address(ref):
    """The address of a reference: 32 bits of shared memory, 64 bits of global memory."""
    space = mgpu.utils.get_memref_llvm_address_space(ir.MemRefType(ref.type))
    bits = 32 if space == _SHARED_MEMORY else 64
    return llvm.ptrtoint(ir.IntegerType.get_signless(bits), mgpu.utils.memref_ptr(ref))


def assembly(code: str, constraints: str, *operands: Any, results: int = 0) -> list:
    """PTX that returns so many float32, and that the compiler leaves where it is among all that has effects."""
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
