"""Gathers and prefix sums of arrays with one element for each thread of a warpgroup, in PTX."""

import functools
import math
import operator
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    as_i32,
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
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP
from paged_jax.kernels.mosaic_gpu.hopper.threads import LAYOUT, of_threads, sums_in_lanes
from paged_jax.kernels.mosaic_gpu.hopper.threads import gather as gather
from paged_jax.kernels.mosaic_gpu.hopper.threads import iota as iota
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref

_WARPS = WARPGROUP // WARP


def totals(arrays: dict[int, Array], sums_smem: Ref) -> list[Any]:
    """Sums each array over all threads. The array's key is the row of `sums_smem` that holds the sums of its warps.

    No other array may use these rows, because threads may still read them when this returns.
    """
    columns, rows = sums_smem.shape[1], list(arrays)

    @inline(plgpu.RefType(), *[LAYOUT] * len(arrays))
    def store(_, sums_smem, *arrays):
        base, index = address(sums_smem), thread_index_read_again()
        is_first = arith.cmpi(arith.CmpIPredicate.eq, rem(index, WARP), i32(0))
        for row, x in zip(rows, arrays, strict=True):
            of_warp = _sum_of_warp(element(x.registers.item(), 0))
            store_word(add(base, mul(add(div(index, WARP), i32(row * columns)), 4)), of_warp, is_first)
        mgpu.warpgroup_barrier()

    store(sums_smem, *arrays.values())
    return [functools.reduce(operator.add, [sums_smem[row, warp] for warp in range(_WARPS)]) for row in rows]


def used(rows: int, sums_smem: Ref) -> Scalar:
    """The number of threads up to the end of the last warp with a sum above 0, in the first `rows` rows."""
    found = jnp.int32(WARP)
    for warp in range(1, _WARPS):
        of_warp = functools.reduce(operator.add, [sums_smem[row, warp] for row in range(rows)])
        found = jnp.where(of_warp > 0, jnp.int32(WARP * (warp + 1)), found)
    return found


def sums_before(arrays: dict[int, Array], sums_smem: Ref, first: int, packs: bool) -> None:
    """Stores each array's exclusive prefix sums in `sums_smem`, from column `first` on. The array's key is the row.

    If `first` is not 0, column `first` already holds the sum of all earlier elements, which is added. The column after
    the elements gets the total. The last four columns hold sums of warps. The warpgroup sees the sums when this
    returns. With `packs`, no total needs more than 16 bits, so two arrays are summed in one integer.
    """
    columns, rows = sums_smem.shape[1], list(arrays)

    @inline(plgpu.RefType(), *[LAYOUT] * len(arrays))
    def store(_, sums_smem, *arrays):
        base, index = address(sums_smem), thread_index_read_again()
        lane, warp = rem(index, WARP), div(index, WARP)
        groups = [rows[i : i + 2] for i in range(0, len(rows), 2)] if packs else [[row] for row in rows]

        def place(row: int, column):
            return add(base, mul(add(column, i32(row * columns)), 4))

        def packed(of_rows):
            low, *high = of_rows
            return arith.ori(low, arith.shli(high[0], i32(16))) if high else low

        def unpacked(x, count: int):
            return [arith.andi(x, i32(0xFFFF)), arith.shrui(x, i32(16))] if count == 2 else [x]

        of_row = dict(zip(rows, (element(x.registers.item(), 0) for x in arrays), strict=True))
        values = [packed([of_row[row] for row in group]) for group in groups]
        sums = [sums_in_lanes(x) for x in values]
        is_first = arith.cmpi(arith.CmpIPredicate.eq, index, i32(0))
        is_last = arith.cmpi(arith.CmpIPredicate.eq, lane, i32(WARP - 1))
        for group, x in zip(groups, sums, strict=True):  # the last lane of each warp has the warp's sum
            store_word(place(group[0], add(warp, i32(columns - _WARPS))), x, is_last)
        before = [packed([load_word(place(row, i32(first))) for row in group]) if first else i32(0) for group in groups]
        mgpu.warpgroup_barrier()  # all threads have read column `first`
        for group, value, inclusive, earlier in zip(groups, values, sums, before, strict=True):
            of_warps = [load_word(place(group[0], i32(columns - _WARPS + i))) for i in range(_WARPS)]
            start, total = _before_warp(earlier, of_warps, warp)
            own = unpacked(add(start, arith.subi(inclusive, value)), len(group))
            for row, x, of_all in zip(group, own, unpacked(total, len(group)), strict=True):
                store_word(place(row, add(index, i32(first))), x)
                store_word(place(row, i32(first + WARPGROUP)), of_all, is_first)
        mgpu.warpgroup_barrier()

    store(sums_smem, *arrays.values())


def extend(rows: list[int], sums_smem: Ref) -> None:
    """Copies the total after the first 128 elements to all later columns: the other elements are 0.

    The warpgroup sees the sums when this returns.
    """
    columns = sums_smem.shape[1]

    @inline(plgpu.RefType())
    def store(_, sums_smem):
        base, index = address(sums_smem), thread_index_read_again()
        for row in rows:
            of_row = add(base, i32(4 * (row * columns + WARPGROUP)))
            total, first = load_word(of_row), add(of_row, mul(index, 4))
            for column in range(1, columns - WARPGROUP - _WARPS, WARPGROUP):
                store_word(add(first, i32(4 * column)), total)
        mgpu.warpgroup_barrier()

    store(sums_smem)


def store(arrays: dict[int, Array], arrays_smem: Ref, first: int) -> None:
    """Stores each thread's elements in `arrays_smem`, from column `first` on. The array's key is the row."""
    columns, rows = arrays_smem.shape[1], list(arrays)

    @inline(plgpu.RefType(), *[LAYOUT] * len(arrays))
    def put(_, arrays_smem, *arrays):
        base, index = address(arrays_smem), thread_index_read_again()
        for row, x in zip(rows, arrays, strict=True):
            store_word(add(base, mul(add(index, i32(row * columns + first)), 4)), element(x.registers.item(), 0))

    put(arrays_smem, *arrays.values())


def load(arrays_smem: Ref, row: int, first: int) -> Array:
    """Loads the elements of a row from column `first` on, one in each thread."""
    place = 4 * (row * arrays_smem.shape[1] + first)

    @inline(plgpu.RefType(), returns=(WARPGROUP,), dtype="int32", layout=LAYOUT)
    def own(_, arrays_smem):
        return of_threads(load_word(add(address(arrays_smem), add(mul(thread_index_read_again(), 4), i32(place)))))

    return own(arrays_smem)


def meet() -> None:
    """Waits until all threads are here, and lets each see what the others have stored."""

    @inline()
    def wait(_):
        mgpu.warpgroup_barrier()

    wait()


def copy_columns(from_smem: Ref, to_gmem: Ref, count: int) -> None:
    """Copies the first `count` columns of a matrix of words, or of a vector; `count` is a multiple of 128."""
    rows, from_columns, to_columns = math.prod(from_smem.shape[:-1]), from_smem.shape[-1], to_gmem.shape[-1]

    @inline(plgpu.RefType(), plgpu.RefType())
    def copy(_, from_smem, to_gmem):
        source, target, index = address(from_smem), address(to_gmem), thread_index_read_again()
        for row in range(rows):
            for first in range(0, count, WARPGROUP):
                column = add(index, i32(first))
                word = load_word(add(source, mul(add(column, i32(row * from_columns)), 4)))
                to = add(target, bytes_of(add(column, i32(row * to_columns)), 4))
                assembly("st.global.b32 [$0], $1;", "l,r", to, word)

    copy(from_smem, to_gmem)


def number_at_most(sums_ref: Ref, row: int, last: int, number: Scalar) -> Scalar:
    """Counts the elements of columns 1 <= column <= `last` in a row that are at most `number`; the row is sorted.

    Each warp looks at 32 columns at a time, and at those after the first 128 only if these are all counted. The
    reference is to shared or to global memory; a vector is row 0.
    """

    @inline(plgpu.RefType(), SCALAR, returns=(), dtype="int32", layout=SCALAR)
    def count(_, sums_ref, number):
        at, lane = address(sums_ref), rem(thread_index_read_again(), WARP)
        is_global, word = at.type.width == 64, ir.IntegerType.get_signless(32)

        def count_in(columns, found):
            for first in columns:
                column = add(lane, i32(first + row * sums_ref.type.shape[-1]))
                place = add(at, bytes_of(column, 4) if is_global else mul(column, 4))
                code = """{ .reg .pred exists; .reg .b32 other; setp.lt.s32 exists, $2, $4; mov.b32 other, 0x7fffffff;
                @exists ld.SPACE.b32 other, [$1]; setp.le.and.s32 exists, other, $3, exists;
                vote.sync.ballot.b32 other, exists, 0xffffffff; popc.b32 $0, other; }"""
                code = code.replace("SPACE", "global" if is_global else "shared")
                operands = place, lane, number.registers.item(), i32(last + 1 - first)
                constraints = f"=&r,{'l' if is_global else 'r'},r,r,r,~{{memory}}"
                found = add(found, llvm.inline_asm(word, operands, code, constraints, has_side_effects=True))
            return found

        found = count_in(range(1, min(last, WARPGROUP) + 1, WARP), i32(0))
        if last > WARPGROUP:
            branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, found, i32(WARPGROUP)), [word], has_else=True)
            with ir.InsertionPoint(branch.then_block):
                scf.yield_([count_in(range(WARPGROUP + 1, last + 1, WARP), found)])
            with ir.InsertionPoint(branch.else_block):  # pyright: ignore[reportCallIssue, reportArgumentType]
                scf.yield_([found])
            found = branch.results[0]
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return count(sums_ref, number)


def _before_warp(before, of_warps: list, warp) -> tuple[Any, Any]:
    """The sum before a warp's first element, and the total, from the sums of all warps."""
    start = total = before
    for i, of_warp in enumerate(of_warps):
        earlier = arith.cmpi(arith.CmpIPredicate.ult, i32(i), warp)
        start = add(start, arith.select(earlier, of_warp, i32(0)))
        total = add(total, of_warp)
    return start, total


def _sum_of_warp(x):
    """The sum of a float32, or of an integer, over the lanes of a warp, as a float32."""
    if not isinstance(x.type, ir.F32Type):
        return arith.sitofp(ir.F32Type.get(), integer_sum_of_warp(x))
    for distance in (1, 2, 4, 8, 16):
        x = arith.addf(x, mgpu.utils.shfl_bfly(x, distance))
    return x


def integer_sum_of_warp(x):
    """The sum of an integer over the lanes of a warp."""
    return llvm.inline_asm(x.type, [x], "redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", has_side_effects=True)


def load_word(at):
    """Loads a word of shared memory."""
    word = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(word, [at], "ld.shared.b32 $0, [$1];", "=r,r,~{memory}", has_side_effects=True)


def store_word(at, x, where=None) -> None:
    """Stores a word in shared memory, if `where` holds."""
    letter = "f" if isinstance(x.type, ir.F32Type) else "r"
    if where is None:
        assembly("st.shared.b32 [$0], $1;", f"r,{letter}", at, x)
        return
    code = "{ .reg .pred where; setp.ne.b32 where, $0, 0; @where st.shared.b32 [$1], $2; }"
    assembly(code, f"r,r,{letter}", as_i32(where), at, x)
