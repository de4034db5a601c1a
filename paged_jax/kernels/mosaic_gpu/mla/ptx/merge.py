"""The merge of parts of row blocks: each lane of a warp merges four elements of a row."""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from paged_jax.kernels.mosaic_gpu.hopper import merge as hopper_merge
from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    as_i32,
    as_i64,
    assembly,
    bytes_of,
    div,
    i32,
    i64,
    inline,
    less,
    mul,
    rem,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.merge import ELEMENTS, Merged
from paged_jax.kernels.mosaic_gpu.hopper.refs import ABSENT, Partials
from paged_jax.kernels.mosaic_gpu.mla.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.mla.refs import Ref

PART_ROWS, PART_COLUMNS = 8, 16
"""Rows and columns that a warp merges; their elements are neighbours in a partial result (`rows.store_partial`)."""

_WARPS = WARPGROUP // WARP  # warps of a program
SUMS = 2 + ELEMENTS  # float32 numbers that each lane gives to the first warp
_MANY_SPLITS = 24  # if items have this many splits on average, warps share them
_LEAST_IN_FLIGHT, _MOST_IN_FLIGHT = 4, 32  # splits that a lane loads at a time; more would take too many registers


class MergeRefs(NamedTuple):
    """The arrays of the merge kernel: references, or their addresses as MLIR values."""

    closings: Ref
    partials: Partials
    sinks: Ref
    out: Ref
    lse: Ref


class RowBlock(NamedTuple):
    """A row block to merge. Fields are scalars or MLIR values."""

    first_partial: Scalar  # the index of the partial result of split 0
    num_splits: Scalar
    row: Scalar  # the row block's first row of out
    num_rows: Scalar
    block: Scalar  # the row block's index in its item


class _Task(NamedTuple):
    """The elements that a lane merges. Fields are MLIR values."""

    row: Any  # the index of the row in the row block
    column: Any  # the first of the columns; the others are 1, 8 and 9 later
    place: Any  # the index of the four elements in a partial result of the row block
    share: Any  # the index of the warp among the warps that share the splits
    exists: Any  # whether there is such a row


def shares(geometry: Geometry) -> int:
    """The number of warps that share the splits of one part."""
    return _WARPS if geometry.tuning.queues >= _MANY_SPLITS * geometry.problem.num_seqs else 1


def parts_of_program(geometry: Geometry) -> int:
    """The number of parts that a program merges at a time."""
    return _WARPS // shares(geometry)


def parts_side_by_side(geometry: Geometry) -> int:
    """The number of parts of the same rows."""
    return geometry.problem.head_size // PART_COLUMNS


def _in_flight(geometry: Geometry) -> int:
    """Splits that a lane loads at a time: the lane's share of the mean number of splits of an item."""
    splits = pl.cdiv(geometry.tuning.queues, geometry.problem.num_seqs)
    return min(_MOST_IN_FLIGHT, max(_LEAST_IN_FLIGHT, pl.cdiv(splits, shares(geometry))))


def merge_parts(refs: MergeRefs, block: RowBlock, part: Scalar, sums_smem: Ref, geometry: Geometry) -> None:
    """Merges a program's parts of a row block, from `part` on."""
    problem, num_shares, (leaves, tree) = geometry.problem, shares(geometry), jax.tree.flatten(refs)

    @inline(*[plgpu.RefType()] * (len(leaves) + 1), *[SCALAR] * (len(block) + 1))
    def merge_own_elements(_, *arguments):
        *at, smem = [address(x) for x in arguments[: len(leaves) + 1]]
        *values, first = (x.registers.item() for x in arguments[len(leaves) + 1 :])
        at, block = jax.tree.unflatten(tree, at), RowBlock(*values)
        task = _task(block, first, geometry)
        merged = hopper_merge.merged(
            lambda number: _load_partial(at.partials, block, task, number, geometry),
            div(add(block.num_splits, i32(num_shares - 1)), num_shares),
            _in_flight(geometry),
        )
        if num_shares > 1:
            merged = _over_shares(merged, smem)
        seen = hopper_merge.saw_tokens(merged)
        row = add(block.row, task.row)
        head = rem(row, geometry.heads) if problem.per_head.sinks else ABSENT
        out, lse = hopper_merge.finished(merged, seen, at.sinks, head)
        stores = arith.andi(task.exists, less(task.share, i32(1)))
        own = hopper_merge.OwnElements(stores, row, task.column)
        _store_out(at.out, own, out, geometry)
        hopper_merge.store_lse(at.lse, own, lse)

    merge_own_elements(*leaves, sums_smem, *block, part)


def _task(block: RowBlock, first, geometry: Geometry) -> _Task:
    """Finds the elements that this lane merges."""
    thread, side_by_side = thread_index_read_again(), parts_side_by_side(geometry)
    warp, lane = div(thread, WARP), rem(thread, WARP)
    part = add(first, div(warp, shares(geometry)))
    row = add(mul(div(part, side_by_side), PART_ROWS), div(lane, 4))
    exists = less(row, block.num_rows)
    column = add(mul(rem(part, side_by_side), PART_COLUMNS), mul(rem(lane, 4), 2))
    row, place = (arith.select(exists, x, i32(0)) for x in (row, add(mul(part, WARP), lane)))
    return _Task(row, column, place, rem(warp, shares(geometry)), exists)


def _store_out(out_gmem: Ref, own: hopper_merge.OwnElements, out: list, geometry: Geometry) -> None:
    """Stores a lane's elements in the query's dtype: those of two columns, and those 8 columns later."""
    pair = {"float16": "f16x2", "bfloat16": "bf16x2"}[geometry.problem.query_dtype]
    code = f"""{{ .reg .pred exists; .reg .b32 a, b; setp.ne.b32 exists, $0, 0;
        cvt.rn.{pair}.f32 a, $3, $2; cvt.rn.{pair}.f32 b, $5, $4;
        @exists st.global.b32 [$1], a; @exists st.global.b32 [$1 + 16], b; }}"""
    offset = arith.addi(bytes_of(own.row, 2 * geometry.problem.head_size), bytes_of(own.column, 2))
    assembly(code, "r,l,f,f,f,f", as_i32(own.exists), add(out_gmem, offset), *out)


def _over_shares(merged: Merged, smem) -> Merged:
    """Merges the warps' shares through shared memory, in the order of the warps."""
    thread, size = thread_index_read_again(), 4 * SUMS
    code = "".join(f"st.shared.f32 [$0 + {4 * i}], ${1 + i};" for i in range(SUMS))
    mgpu.utils.warpgroup_barrier()  # all warps have read the sums of the previous part
    assembly(
        code, ",".join(["r"] + ["f"] * SUMS), add(smem, mul(thread, size)), merged.maximum, merged.sum, *merged.out
    )
    mgpu.utils.warpgroup_barrier()
    place, found = add(smem, mul(rem(thread, WARP), size)), []
    for warp in range(_WARPS):
        code = "".join(f"ld.shared.f32 ${i}, [${SUMS} + {4 * i + size * WARP * warp}];" for i in range(SUMS))
        maximum, total, *out = assembly(code, ",".join(["=f"] * SUMS + ["r"]), place, results=SUMS)
        found.append(Merged(maximum, total, out))
    return functools.reduce(hopper_merge.joined, found)


def _load_partial(at: Partials, block: RowBlock, task: _Task, number, geometry: Geometry) -> tuple[Any, list]:
    """Loads split `number` of a lane's share. If there is no such split, the logarithm of its sum is -inf."""
    number = add(mul(number, shares(geometry)), task.share)
    exists = less(number, block.num_splits)
    # As in `plan.partial_of`: later splits have the first partial result of the queues that follow.
    is_first = arith.cmpi(arith.CmpIPredicate.eq, number, i32(0))
    partial = arith.select(is_first, block.first_partial, mul(add(div(block.first_partial, 2), number), 2))
    of_block = add(mul(partial, geometry.tuning.width), block.block)
    first_row = arith.muli(as_i64(of_block), i64(WGMMA_ROWS))
    log_sum = hopper_merge.load_log_sum(at, exists, arith.addi(first_row, as_i64(task.row)))
    start = arith.muli(first_row, i64(4 * geometry.problem.head_size))
    return log_sum, hopper_merge.load_elements(at, exists, arith.addi(start, bytes_of(task.place, 4 * ELEMENTS)))
