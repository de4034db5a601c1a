"""Reads of the block tables in PTX: lanes of a loading warp hold the numbers of the blocks of its runs of a tile.

Lane i holds that of run i. So they take one register, however many runs there are. Who converts tiles beside three
computing warpgroups has few registers. If each number had one of its own, ptxas would move the numbers to uniform
registers as soon as they are asked for, and the warp would wait for global memory in each tile (benchmarks/LOG.md,
"Three warpgroups").
"""

from collections.abc import Sequence

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    address,
    as_i64,
    assembly,
    i32,
    i64,
    inline,
    less,
    rem,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref


def of_lanes(tables_gmem: Ref, seq: Scalar, columns: Sequence[Scalar]) -> Scalar:
    """Reads entries of a sequence's row of the block tables: lane i reads column `columns[i]`, others the last one."""
    row_entries = tables_gmem.shape[1]

    @inline(plgpu.RefType(), *[SCALAR] * (1 + len(columns)), returns=(), dtype="int32", layout=SCALAR)
    def read(_, tables_gmem, seq, *columns):
        *columns, column = (column.registers.item() for column in columns)
        lane = rem(thread_index_read_again(), WARP)
        for i, own in reversed(list(enumerate(columns))):
            column = arith.select(less(lane, i32(i + 1)), own, column)
        place = _place(tables_gmem, seq.registers.item(), row_entries, column)
        return _register("ld.global.b32 $0, [$1];", "=r,l", place)

    return read(tables_gmem, seq, *columns)


def of_run(blocks: Scalar, run: int) -> Scalar:
    """The number of the block of a run, from the lane that holds it."""

    @inline(SCALAR, returns=(), dtype="int32", layout=SCALAR)
    def shuffle(_, blocks):
        return _register(f"shfl.sync.idx.b32 $0, $1, {run}, 31, 0xffffffff;", "=r,r", blocks.registers.item())

    return shuffle(blocks)


def prefetch(tables_gmem: Ref, seq: Scalar, column: Scalar) -> None:
    """Prefetches an entry of the block tables, and its neighbours."""
    row_entries = tables_gmem.shape[1]

    @inline(plgpu.RefType(), SCALAR, SCALAR)
    def start_prefetch(_, tables_gmem, seq, column):
        place = _place(tables_gmem, seq.registers.item(), row_entries, column.registers.item())
        assembly("prefetch.global.L1 [$0];", "l", place)

    start_prefetch(tables_gmem, seq, column)


def _place(tables_gmem, seq, row_entries: int, column):
    """The address of an entry of the block tables, whose rows have so many."""
    entry = arith.addi(arith.muli(as_i64(seq), i64(row_entries)), as_i64(column))
    return arith.addi(address(tables_gmem), arith.muli(entry, i64(4)))


def _register(code: str, constraints: str, *operands):
    """Inserts PTX with side effects that gives a register; each lane may get another value."""
    word = ir.IntegerType.get_signless(32)
    value = llvm.inline_asm(word, operands, code, constraints, has_side_effects=True)
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)
