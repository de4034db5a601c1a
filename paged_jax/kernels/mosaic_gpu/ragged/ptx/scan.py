"""Gathers, prefix sums and sorts of arrays with one element for each thread of a warpgroup, in PTX."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    add,
    address,
    array,
    as_i32,
    as_index,
    assembly,
    bytes_of,
    div,
    element,
    i32,
    inline,
    mul,
    rem,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref

LAYOUT = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)
_WARPS = WARPGROUP // WARP
_LARGEST = (1 << 22) - 1  # larger values are sorted like this one; the other bits hold the index
_AT_ONCE = 16  # values that `_number_larger` loads in one step of its loop


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
        registers = np.full((1,), vector.broadcast(ir.VectorType.get((1,), word), value), object)
        return array(registers, mgpu.WGStridedFragLayout((WARPGROUP,), vec_size=1), (WARPGROUP,), is_signed=True)

    return load(values_gmem, indices)


def sums_before(arrays: dict[int, Array], sums_smem: Ref, first: int) -> None:
    """Stores each array's exclusive prefix sums in `sums_smem`, from column `first` on. The array's key is the row.

    If `first` is not 0, column `first` already holds the sum of all earlier elements, which is added. The column after
    the elements gets the total. The warpgroup sees the sums when this returns.
    """
    columns, rows = sums_smem.shape[1], list(arrays)

    @inline(plgpu.RefType(), *[LAYOUT] * len(arrays))
    def store(_, sums_smem, *arrays):
        values = [element(x.registers.item(), 0) for x in arrays]
        base, index = address(sums_smem), thread_index_read_again()
        lane, warp = rem(index, WARP), div(index, WARP)

        def place(row: int, column):
            return add(base, mul(add(column, i32(rows[row] * columns)), 4))

        sums = [_sum_in_warp(x, lane) for x in values]
        before = [_load(place(row, i32(first)), x.type) if first else _zero(x.type) for row, x in enumerate(values)]
        mgpu.warpgroup_barrier()  # all threads have read column `first`
        # The last lane of each warp has the warp's sum. Columns that get results later hold these sums until then.
        is_last = arith.cmpi(arith.CmpIPredicate.eq, lane, i32(WARP - 1))
        for row, x in enumerate(sums):
            _store(place(row, add(warp, i32(first))), x, is_last)
        mgpu.warpgroup_barrier()
        of_warps = [[_load(place(row, i32(first + i)), x.type) for i in range(_WARPS)] for row, x in enumerate(values)]
        mgpu.warpgroup_barrier()
        for row, (value, inclusive) in enumerate(zip(values, sums, strict=True)):
            start, total = _before_warp(before[row], of_warps[row], warp)
            exclusive = _subtract(inclusive, value)
            _store(place(row, add(index, i32(first))), _add(start, exclusive))
            _store(place(row, i32(first + WARPGROUP)), total, arith.cmpi(arith.CmpIPredicate.eq, index, i32(0)))
        mgpu.warpgroup_barrier()

    store(sums_smem, *arrays.values())


def largest_first(values: Array, values_smem: Ref, order_smem: Ref) -> None:
    """Sorts values >= 0: stores their indices in `order_smem`, the largest value first, equal values by index.

    Values of 2 ** 22 and more count as equal. The warpgroup sees the order when this returns.
    """

    @inline(plgpu.RefType(), plgpu.RefType(), LAYOUT)
    def store(_, values_smem, order_smem, values):
        index, base = thread_index_read_again(), address(values_smem)
        value = arith.minsi(element(values.registers.item(), 0), i32(_LARGEST))
        # The index makes values unique: of two equal ones, the smaller index comes first.
        unique = arith.subi(mul(value, WARPGROUP), index)
        _store(add(base, mul(index, 4)), unique)
        mgpu.warpgroup_barrier()
        place = _number_larger(unique, base)
        _store(add(address(order_smem), mul(place, 4)), index)
        mgpu.warpgroup_barrier()

    store(values_smem, order_smem, values)


def _number_larger(value, base):
    """Counts the integers of all threads, at address `base`, that are larger than `value`.

    It adds up the sign bits of differences, which cannot overflow. Comparisons would share a predicate register, and
    each would wait 20 cycles for the one before (benchmarks/LOG.md, "The longest first").
    """
    begin, end, step = (as_index(i32(n)) for n in (0, WARPGROUP, _AT_ONCE))
    loop = scf.ForOp(begin, end, step, [i32(0)])
    with ir.InsertionPoint(loop.body):
        first = add(base, mul(arith.index_cast(ir.IntegerType.get_signless(32), loop.induction_variable), 4))
        [number] = loop.inner_iter_args
        for i in range(_AT_ONCE):
            other = _load(add(first, i32(4 * i)), ir.IntegerType.get_signless(32))
            number = add(number, arith.shrui(arith.subi(value, other), i32(31)))
        scf.yield_([number])
    return loop.result


def _before_warp(before, of_warps: list, warp) -> tuple[Any, Any]:
    """The sum before a warp's first element, and the total, from the sums of all warps."""
    start = total = before
    for i, of_warp in enumerate(of_warps):
        earlier = arith.cmpi(arith.CmpIPredicate.ult, i32(i), warp)
        start = _add(start, arith.select(earlier, of_warp, _zero(of_warp.type)))
        total = _add(total, of_warp)
    return start, total


def _sum_in_warp(x, lane):
    """Inclusive prefix sums over the lanes of a warp."""
    for distance in (1, 2, 4, 8, 16):
        word = ir.IntegerType.get_signless(32)
        bits = arith.bitcast(word, x) if _is_float(x.type) else x
        code = f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;"
        earlier = llvm.inline_asm(word, [bits], code, "=r,r", has_side_effects=True)
        earlier = arith.bitcast(x.type, earlier) if _is_float(x.type) else earlier
        reaches = arith.cmpi(arith.CmpIPredicate.uge, lane, i32(distance))
        x = _add(x, arith.select(reaches, earlier, _zero(x.type)))
    return x


def _load(at, type_):
    letter = "f" if _is_float(type_) else "r"
    return llvm.inline_asm(type_, [at], "ld.shared.b32 $0, [$1];", f"={letter},r,~{{memory}}", has_side_effects=True)


def _store(at, x, where=None) -> None:
    letter = "f" if _is_float(x.type) else "r"
    if where is None:
        assembly("st.shared.b32 [$0], $1;", f"r,{letter}", at, x)
        return
    code = "{ .reg .pred where; setp.ne.b32 where, $0, 0; @where st.shared.b32 [$1], $2; }"
    assembly(code, f"r,r,{letter}", as_i32(where), at, x)


def _is_float(type_) -> bool:
    return isinstance(type_, ir.F32Type)


def _zero(type_):
    return mgpu.c(0.0 if _is_float(type_) else 0, type_)


def _add(x, y):
    return arith.addf(x, y) if _is_float(x.type) else arith.addi(x, y)


def _subtract(x, y):
    return arith.subf(x, y) if _is_float(x.type) else arith.subi(x, y)
