"""Operations of the softmax on each lane's own elements, in MLIR and PTX.

In the layout of wgmma's results, a lane has two rows of an array [64, n], 8 apart, and two neighbouring columns of
every 8. Its registers are pairs [n / 8, 2]. Four lanes share a row.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, scf, vector
from jaxlib.mlir.dialects import math as mlir_math

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    array,
    assembly,
    bytes_of,
    div,
    element,
    i32,
    i64,
    inline,
    mul,
    rem,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WGMMA_ROWS

_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_ALL = 0xFFFFFFFF  # the mask of all lanes of a warp


def row_numbers() -> Array:
    """0 to 63, [64], from the thread's index, which is read again so that no register holds it over loops."""

    @inline(returns=(WGMMA_ROWS,), dtype="int32", layout=_BY_ROW)
    def compute(_):
        index = thread_index_read_again()
        first = add(mul(div(index, WARP), WGMMA_ROWS // 4), div(rem(index, WARP), 4))
        return _rows([first, add(first, i32(8))], is_signed=True)

    return compute()


def loaded(values_gmem: Any, first: Any) -> Array:
    """Loads 64 neighbouring float32 of an array in global memory, from index `first` on: [64]."""

    @inline(plgpu.RefType(), SCALAR, returns=(WGMMA_ROWS,), dtype="float32", layout=_BY_ROW)
    def compute(_, values_gmem, first):
        index = thread_index_read_again()
        row = add(mul(div(index, WARP), WGMMA_ROWS // 4), div(rem(index, WARP), 4))
        place = add(address(values_gmem), bytes_of(add(first.registers.item(), row), 4))
        places = place, add(place, i64(4 * 8))
        return _rows([assembly("ld.global.f32 $0, [$1];", "=f,l", x, results=1)[0] for x in places])

    return compute(values_gmem, first)


def in_each_lane(x: Any) -> Array:
    """Broadcasts a scalar to all rows, [64], in a register of each lane.

    If a warp shared one uniform register, ptxas would delay the exponentials. Adding 0 times the thread's index hides
    from ptxas that all lanes have the same value.
    """

    @inline(SCALAR, returns=(WGMMA_ROWS,), dtype="float32", layout=_BY_ROW)
    def compute(_, x):
        code = "{ .reg .f32 index; cvt.rn.f32.u32 index, $1; fma.rn.f32 $0, index, 0f00000000, $2; }"
        return _rows(assembly(code, "=f,r,f", thread_index_read_again(), x.registers.item(), results=1) * 2)

    return compute(x)


def sums(x: Array) -> Array:
    """Sums each lane's own columns, [64, n] -> [64]; the four lanes of a row have different partial sums."""

    @inline(plgpu.Layout.WGMMA, returns=(WGMMA_ROWS,), dtype="float32", layout=_BY_ROW)
    def compute(_, x):
        pairs = x.registers.reshape(-1, 2)
        return _rows([_sum([element(pair, i) for pair in pairs[:, h] for i in range(2)]) for h in range(2)])

    return compute(x)


def sum_of_lanes(x: Array) -> Array:
    """Sums the partial sums of the four lanes of each row."""

    @inline(_BY_ROW, returns=(WGMMA_ROWS,), dtype="float32", layout=_BY_ROW)
    def compute(_, x):
        totals = [element(register, 0) for register in x.registers.flat]
        for distance in (1, 2):
            totals = [arith.addf(total, mgpu.utils.shfl_bfly(total, distance)) for total in totals]
        return _rows(totals)

    return compute(x)


def masked(x: Array, firsts: Sequence[Any], lasts: Sequence[Any]) -> Array:
    """x [64, n], with -inf in the columns before the first one that a row sees, and after the last one.

    Each first column, and each last one, is an array [64] or a scalar, for an equal share of the columns. A share has 8
    columns or more. Without first columns, rows see all columns up to their last one. Bounds are compared with
    constants, so no register holds the number of a column.
    """
    shape, layouts = x.shape, [_layout_of(bound) for bound in (*firsts, *lasts)]

    @inline(plgpu.Layout.WGMMA, *layouts, returns=shape, dtype="float32")
    def compute(_, x, *bounds):
        pairs, own_column = x.registers.reshape(-1, 2), mul(rem(thread_index_read_again(), 4), 2)
        bounds = [[arith.subi(bound, own_column) for bound in _of_both_rows(of_rows)] for of_rows in bounds]
        firsts_of_rows, lasts_of_rows = bounds[: len(firsts)], bounds[len(firsts) :]
        hidden, shown = mgpu.c(-math.inf, ir.F32Type.get()), np.empty(pairs.shape, object)

        def hides(column: int, h: int, share: int):
            is_after = arith.cmpi(arith.CmpIPredicate.sgt, i32(column), lasts_of_rows[share][h])
            if not firsts:
                return is_after
            return arith.ori(is_after, arith.cmpi(arith.CmpIPredicate.slt, i32(column), firsts_of_rows[share][h]))

        for chunk, h in np.ndindex(pairs.shape):
            share, pair = chunk * len(lasts) // len(pairs), pairs[chunk, h]
            values = [arith.select(hides(8 * chunk + i, h, share), hidden, element(pair, i)) for i in range(2)]
            shown[chunk, h] = vector.from_elements(pair.type, values)
        return array(shown, x.layout, shape)

    return compute(x, *firsts, *lasts)


def raised(maxima: Array, x: Array, factor: Any, lag: float) -> Array:
    """Raises maxima [64] to the maxima of the rows of x [64, n] that exceed them by more than `lag` / `factor`.

    The factor is a scalar or [64]. Lanes exchange their maxima only in warps where some maximum rises.
    """

    @inline(_BY_ROW, plgpu.Layout.WGMMA, _layout_of(factor), returns=(WGMMA_ROWS,), dtype="float32", layout=_BY_ROW)
    def compute(_, maxima, x, factor):
        factors, most = _of_both_rows(factor), mgpu.c(lag, ir.F32Type.get())
        old = [element(register, 0) for register in maxima.registers.flat]
        pairs = x.registers.reshape(-1, 2)
        highest = [_highest([element(pair, i) for pair in pairs[:, h] for i in range(2)]) for h in range(2)]

        def lags(h: int, new):
            return arith.cmpf(arith.CmpFPredicate.OGT, arith.mulf(arith.subf(new, old[h]), factors[h]), most)

        some = nvvm.vote_sync(i32(_ALL), arith.ori(*[lags(h, highest[h]) for h in range(2)]), "any")
        branch = scf.IfOp(some, [value.type for value in old], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            new = highest
            for distance in (1, 2):
                new = [arith.maximumf(value, mgpu.utils.shfl_bfly(value, distance)) for value in new]
            scf.yield_([arith.select(lags(h, new[h]), new[h], old[h]) for h in range(2)])
        with ir.InsertionPoint(branch.else_block):  # pyright: ignore[reportCallIssue, reportArgumentType]
            scf.yield_(old)
        return _rows(list(branch.results))

    return compute(maxima, x, factor)


def exponentials(x: Array, factor: Any, bases: Array, ahead: int | None = None) -> Array:
    """2 ** (x * factor - bases), for x [64, n] and bases [64]. The factor is a scalar or [64]; exponents round once.

    Args:
      ahead: how many groups of 8 columns ptxas may compute exponents ahead of their exponentials; None for any number.
        If it computes many ahead, the units for exponentials wait. So 0 times an earlier exponential is added to the
        base of a later group. That is NaN if the exponential is NaN or infinite, but then the row's result is NaN
        anyway.
    """
    shape = x.shape

    @inline(plgpu.Layout.WGMMA, _layout_of(factor), _BY_ROW, returns=shape, dtype="float32")
    def compute(_, x, factor, bases):
        pairs, zero = x.registers.reshape(-1, 2), mgpu.c(0.0, ir.F32Type.get())
        pair_type = pairs[0, 0].type
        factors = [vector.broadcast(pair_type, value) for value in _of_both_rows(factor)]
        negative = [arith.negf(element(register, 0)) for register in bases.registers.flat]
        groups = ahead or len(pairs)
        found = np.empty(pairs.shape, object)
        for first in range(0, len(pairs), groups):
            if first:
                earlier = [element(found[first - groups, h], 0) for h in range(2)]
                negative = [mlir_math.fma(earlier[h], zero, negative[h]) for h in range(2)]
            of_pairs = [vector.broadcast(pair_type, value) for value in negative]
            some = pairs[first : first + groups]
            exponents = [mlir_math.fma(pair, factors[h], of_pairs[h]) for row in some for h, pair in enumerate(row)]
            columns = array(np.array(exponents, object), x.layout, (WGMMA_ROWS, 8 * len(some))).exp2(approx=True)
            found[first : first + groups] = columns.registers.reshape(-1, 2)
        return array(found, x.layout, shape)

    return compute(x, factor, bases)


def rescaled(x: Array, factors: Array) -> Array:
    """x [64, n] times factors [64]. A warp whose factors are all 1 skips the multiplications."""
    shape = x.shape

    @inline(plgpu.Layout.WGMMA, _BY_ROW, returns=shape, dtype="float32")
    def compute(_, x, factors):
        pairs, factors = x.registers.reshape(-1, 2), [element(register, 0) for register in factors.registers.flat]
        one = mgpu.c(1.0, ir.F32Type.get())
        changes = [arith.cmpf(arith.CmpFPredicate.UNE, factor, one) for factor in factors]
        some = nvvm.vote_sync(i32(_ALL), arith.ori(*changes), "any")
        branch = scf.IfOp(some, [pair.type for pair in pairs.flat], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            of_pairs = [vector.broadcast(pairs.flat[0].type, factor) for factor in factors]
            scf.yield_([arith.mulf(pair, of_pairs[h]) for row in pairs for h, pair in enumerate(row)])
        with ir.InsertionPoint(branch.else_block):  # pyright: ignore[reportCallIssue, reportArgumentType]
            scf.yield_(list(pairs.flat))
        return array(np.array(list(branch.results), object), x.layout, shape)

    return compute(x, factors)


def side_by_side(values: Sequence[Any], columns: int) -> Array:
    """Integers [64, columns]: each value, an array [64] or a scalar, fills an equal share of the columns.

    A share has 8 columns or more, so the result reuses the registers of the values, without instructions.
    """

    @inline(*[_BY_ROW if x.ndim else SCALAR for x in values], returns=(WGMMA_ROWS, columns), dtype="int32")
    def compute(_, *values):
        pair = ir.VectorType.get((2,), ir.IntegerType.get_signless(32))
        registers = np.empty((columns // 8, 2), object)
        for chunk, h in np.ndindex(registers.shape):
            value = values[chunk * 8 * len(values) // columns].registers.flat
            one = element(value[h], 0) if len(value) > 1 else value[0]
            registers[chunk, h] = vector.broadcast(pair, one)
        return array(registers, mgpu.WGMMA_LAYOUT, (WGMMA_ROWS, columns), is_signed=True)

    return compute(*values)


def settle(sums: Array, unused_smem: Any) -> None:
    """Keeps the compiler from delaying the computation of the sums until the matrix units are done.

    A conditional store depends on the sums, and the compiler cannot move it. It never stores, because no sum is
    negative.
    """

    @inline(_BY_ROW, plgpu.RefType())
    def compute(_, sums, unused_smem):
        word = ir.IntegerType.get_signless(32)
        words = arith.ori(*[arith.bitcast(word, element(register, 0)) for register in sums.registers.flat])
        code = "{ .reg .pred negative; setp.lt.s32 negative, $0, 0; @negative st.shared.b32 [$1], $0; }"
        assembly(code, "r,r", words, address(unused_smem))

    compute(sums, unused_smem)


def _layout_of(factor: Any) -> Any:
    """The layout of a factor: a scalar or [64]."""
    return _BY_ROW if jnp.ndim(factor) else SCALAR


def _of_both_rows(factor) -> list:
    """The factors of a lane's two rows."""
    if factor.registers.size == 1:
        return [factor.registers.item()] * 2
    return [element(register, 0) for register in factor.registers.flat]


def _rows(values, *, is_signed: bool | None = None) -> mgpu.FragmentedArray:
    """An array [64] from a lane's two values, one for each of its rows."""
    one = ir.VectorType.get((1,), values[0].type)
    registers = np.empty(2, object)
    for i, value in enumerate(values):
        registers[i] = vector.broadcast(one, value)
    return array(registers, mgpu.WGMMA_ROW_LAYOUT, (WGMMA_ROWS,), is_signed)


def _sum(values):
    return _in_two_chains(arith.addf, values)


def _highest(values):
    return _in_two_chains(arith.maximumf, values)


def _in_two_chains(join: Callable, values: Sequence):
    """Reduces the values in two independent chains, for instruction-level parallelism."""
    chains = [values[0], values[1]]
    for i, value in enumerate(values[2:]):
        chains[i % 2] = join(chains[i % 2], value)
    return join(*chains)
