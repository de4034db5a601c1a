"""What a warpgroup does with the elements that each of its lanes has, below what Pallas has words for.

Of an array [64, n] in the layout of wgmma a lane has two rows, 8 apart, and of each 8 columns two neighbours: its
registers are pairs [n / 8, 2]. Four lanes share a row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, scf, vector
from jaxlib.mlir.dialects import math as mlir_math

from paged_jax.kernels.mosaic_gpu.device.inline import inline
from paged_jax.kernels.mosaic_gpu.device.ragged_rows import address, assembly, i32
from paged_jax.kernels.mosaic_gpu.ragged_tuning import ROWS

_ROWS_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
_ALL = 0xFFFFFFFF  # lanes


def sums(x: Array) -> Array:
    """The sum of each lane's columns, as if it were its rows' [64]."""

    @inline(plgpu.Layout.WGMMA, returns=(ROWS,), dtype="float32", layout=_ROWS_LAYOUT)
    def body(_, x):
        pairs = x.registers.reshape(-1, 2)
        return _rows([_sum([_element(pair, i) for pair in pairs[:, h] for i in range(2)]) for h in range(2)])

    return body(x)


def sum_of_lanes(x: Array) -> Array:
    """The sum of what the four lanes of a row have."""

    @inline(_ROWS_LAYOUT, returns=(ROWS,), dtype="float32", layout=_ROWS_LAYOUT)
    def body(_, x):
        totals = [_element(register, 0) for register in x.registers.flat]
        for distance in (1, 2):
            totals = [arith.addf(total, mgpu.utils.shfl_bfly(total, distance)) for total in totals]
        return _rows(totals)

    return body(x)


def raised(maxima: Array, x: Array, factor: Any, lag: float) -> Array:
    """The maxima [64], or where times the factor they lag more behind, those of the rows of x [64, n].

    Lanes tell each other of their columns only in warps where that is so.
    """

    @inline(
        _ROWS_LAYOUT,
        plgpu.Layout.WGMMA,
        plgpu.Layout.WG_SPLAT(()),
        returns=(ROWS,),
        layout=_ROWS_LAYOUT,
        dtype="float32",
    )
    def body(_, maxima, x, factor):
        factor, most = factor.registers.item(), mgpu.c(lag, ir.F32Type.get())
        old = [_element(register, 0) for register in maxima.registers.flat]
        pairs = x.registers.reshape(-1, 2)
        highest = [_highest([_element(pair, i) for pair in pairs[:, h] for i in range(2)]) for h in range(2)]

        def lags(h: int, new):
            return arith.cmpf(arith.CmpFPredicate.OGT, arith.mulf(arith.subf(new, old[h]), factor), most)

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

    return body(maxima, x, factor)


def exponentials(x: Array, factor: Any, bases: Array) -> Array:
    """2 ** (x * factor - bases), of x [64, n] and bases [64], with one rounding before the exponential."""

    @inline(plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT(()), _ROWS_LAYOUT, returns=x.shape, dtype="float32")
    def body(_, x, factor, bases):
        pairs = x.registers.reshape(-1, 2)
        kind = pairs[0, 0].type
        factors = vector.broadcast(kind, factor.registers.item())
        negative = [vector.broadcast(kind, arith.negf(_element(register, 0))) for register in bases.registers.flat]
        exponents = [mlir_math.fma(pair, factors, negative[h]) for row in pairs for h, pair in enumerate(row)]
        registers = np.array(exponents, object).reshape(x.registers.shape)
        exponents = mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)
        return exponents.exp2(approx=True)

    return body(x, factor, bases)


def rescaled(x: Array, factors: Array) -> Array:
    """x [64, n] times factors [64]; a warp whose factors are all 1 does nothing."""

    @inline(plgpu.Layout.WGMMA, _ROWS_LAYOUT, returns=x.shape, dtype="float32")
    def body(_, x, factors):
        pairs, factors = x.registers.reshape(-1, 2), [_element(register, 0) for register in factors.registers.flat]
        one = mgpu.c(1.0, ir.F32Type.get())
        changes = [arith.cmpf(arith.CmpFPredicate.UNE, factor, one) for factor in factors]
        some = nvvm.vote_sync(i32(_ALL), arith.ori(*changes), "any")
        branch = scf.IfOp(some, [pair.type for pair in pairs.flat], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            wide = [vector.broadcast(pairs.flat[0].type, factor) for factor in factors]
            scf.yield_([arith.mulf(pair, wide[h]) for row in pairs for h, pair in enumerate(row)])
        with ir.InsertionPoint(branch.else_block):  # pyright: ignore[reportCallIssue, reportArgumentType]
            scf.yield_(list(pairs.flat))
        registers = np.array(list(branch.results), object).reshape(x.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return body(x, factors)


def settle(sums: Array, unused_smem: Any) -> None:
    """Returns when the sums, none of which is negative, are computed, and with them all that is summed up.

    The compiler would put much of that off until the matrix units are done. It cannot put off what a store depends on
    that comes before, though nothing is ever stored.
    """

    @inline(_ROWS_LAYOUT, plgpu.RefType())
    def body(_, sums, unused_smem):
        word = ir.IntegerType.get_signless(32)
        words = arith.ori(*[arith.bitcast(word, _element(register, 0)) for register in sums.registers.flat])
        code = "{ .reg .pred negative; setp.lt.s32 negative, $0, 0; @negative st.shared.b32 [$1], $0; }"
        assembly(code, "r,r", 0, words, address(unused_smem))

    body(sums, unused_smem)


def _rows(values) -> mgpu.FragmentedArray:
    one = ir.VectorType.get((1,), ir.F32Type.get())
    registers = np.empty(2, object)
    for i, value in enumerate(values):
        registers[i] = vector.broadcast(one, value)
    registers = registers.reshape(mgpu.WGMMA_ROW_LAYOUT.registers_shape((ROWS,)))
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_ROW_LAYOUT, _is_signed=None)


def _element(register, i: int):
    return vector.extract(register, [], [i])


def _sum(values):
    return _in_two_chains(arith.addf, values)


def _highest(values):
    return _in_two_chains(arith.maximumf, values)


def _in_two_chains(join: Callable, values: Sequence):
    """All values joined, in two chains, so that one step need not wait for the other."""
    chains = [values[0], values[1]]
    for i, value in enumerate(values[2:]):
        chains[i % 2] = join(chains[i % 2], value)
    return join(*chains)
