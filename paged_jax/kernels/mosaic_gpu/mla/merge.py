"""The merge of partial results: it computes out and lse of items that queues have cut, from the results of splits.

Grid: programs of four warps for each row block that queues may have cut (`Geometry.closings`). A warp merges `PART`
columns of a row. Each of its lanes merges four neighbouring elements, with loads of many splits in flight. If items
have many splits, the four warps of a program share the splits of one part of a row, and the first warp adds up their
four sums from shared memory. Only the number of splits decides the order of the sums.

Roofline: 4 * value_size bytes for each row and split, mostly from the L2 cache. Latency bounds the kernel, not
bandwidth.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith

from paged_jax.kernels.mosaic_gpu.hopper import merge as hopper_merge
from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    as_i64,
    assembly,
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
from paged_jax.kernels.mosaic_gpu.mla import plan
from paged_jax.kernels.mosaic_gpu.mla.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.mla.plan import Lengths
from paged_jax.kernels.mosaic_gpu.mla.refs import Ref

PART = ELEMENTS * WARP
"""Columns of a row that a warp merges."""

_WARPS = WARPGROUP // WARP  # warps of a program
_SUMS = 2 + ELEMENTS  # float32 numbers that each lane gives to the first warp
_MANY_SPLITS = 24  # if items have this many splits on average, warps share them
_LEAST_IN_FLIGHT, _MOST_IN_FLIGHT = 4, 16  # splits that a lane loads at a time; more would take too many registers
_PROGRAMS = 1056  # programs that run at once: 8 on each multiprocessor


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
    column: Any  # the index of the four elements in the row
    share: Any  # the index of the warp among the warps that share the splits
    exists: Any  # whether there is such a row


def merge(geometry: Geometry, lengths: Lengths, refs: MergeRefs) -> None:
    """Runs the kernel. It writes to the references of out and lse."""
    arrays, tree = jax.tree.flatten((lengths, refs))
    plgpu.kernel(
        functools.partial(_kernel, tree=tree, geometry=geometry),
        out_type=(),
        scratch_types=(plgpu.SMEM((WARPGROUP * _SUMS,), jnp.float32),),
        grid=(geometry.closings * geometry.tuning.width, _programs_of_block(geometry)),
        grid_names=("closing", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mla_merge",
    )(*arrays)


def shares(geometry: Geometry) -> int:
    """The number of warps that share the splits of one part of a row."""
    return _WARPS if geometry.tuning.queues >= _MANY_SPLITS * geometry.problem.num_seqs else 1


def parts_of_program(geometry: Geometry) -> int:
    """The number of parts of rows that a program merges at a time."""
    return _WARPS // shares(geometry)


def _parts_of_row(geometry: Geometry) -> int:
    return geometry.problem.head_size // PART


def _programs_of_block(geometry: Geometry) -> int:
    """Programs for each row block. All of them run at once, because most row blocks may be whole and need no merge."""
    most = pl.cdiv(geometry.block_rows * _parts_of_row(geometry), parts_of_program(geometry))
    return min(most, max(1, _PROGRAMS // (geometry.closings * geometry.tuning.width)))


def _in_flight(geometry: Geometry) -> int:
    """Splits that a lane loads at a time: the lane's share of the mean number of splits of an item."""
    splits = pl.cdiv(geometry.tuning.queues, geometry.problem.num_seqs)
    return min(_MOST_IN_FLIGHT, max(_LEAST_IN_FLIGHT, pl.cdiv(splits, shares(geometry))))


def _kernel(*arrays, tree: Any, geometry: Geometry) -> None:
    *arrays, sums_smem = arrays
    lengths_gmem, refs = jax.tree.unflatten(tree, arrays)
    width = jnp.int32(geometry.tuning.width)
    closing, block = lax.div(lax.axis_index("closing"), width), lax.rem(lax.axis_index("closing"), width)
    first_partial, num_splits, row, num_rows = (refs.closings[closing, block, i] for i in range(4))
    step = parts_of_program(geometry)
    first, all_steps = lax.axis_index("part") * step, _programs_of_block(geometry) * step
    end = jnp.where(num_splits > 0, num_rows * _parts_of_row(geometry), 0)
    if geometry.closes_items and not geometry.one_query:
        of_seq = jnp.int32(geometry.items_per_seq)
        items = plan.sequence_of(lengths_gmem, lax.div(closing, of_seq), geometry).items
        end = jnp.where(lax.rem(closing, of_seq) < items, end, 0)  # other items have no entry in `closings`

    @pl.loop(first, end, step=all_steps)
    def merge_some(part):
        merge_parts(refs, RowBlock(first_partial, num_splits, row, num_rows, block), part, sums_smem, geometry)


def merge_parts(refs: MergeRefs, block: RowBlock, part: Scalar, sums_smem: Ref, geometry: Geometry) -> None:
    """Merges a program's parts of the rows of a row block, from `part` on."""
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
        hopper_merge.store(at.out, at.lse, own, out, lse, problem.head_size, problem.query_dtype)

    merge_own_elements(*leaves, sums_smem, *block, part)


def _task(block: RowBlock, first, geometry: Geometry) -> _Task:
    """Finds the elements that this lane merges."""
    thread, parts_of_row = thread_index_read_again(), _parts_of_row(geometry)
    warp, lane = div(thread, WARP), rem(thread, WARP)
    part = add(first, div(warp, shares(geometry)))
    row = div(part, parts_of_row)
    exists = less(row, block.num_rows)
    column = add(mul(rem(part, parts_of_row), WARP), lane)
    return _Task(arith.select(exists, row, i32(0)), column, rem(warp, shares(geometry)), exists)


def _over_shares(merged: Merged, smem) -> Merged:
    """Merges the warps' shares through shared memory, in the order of the warps."""
    thread, size = thread_index_read_again(), 4 * _SUMS
    code = "".join(f"st.shared.f32 [$0 + {4 * i}], ${1 + i};" for i in range(_SUMS))
    mgpu.utils.warpgroup_barrier()  # all warps have read the sums of the previous part
    assembly(
        code, ",".join(["r"] + ["f"] * _SUMS), add(smem, mul(thread, size)), merged.maximum, merged.sum, *merged.out
    )
    mgpu.utils.warpgroup_barrier()
    place, found = add(smem, mul(rem(thread, WARP), size)), []
    for warp in range(_WARPS):
        code = "".join(f"ld.shared.f32 ${i}, [${_SUMS} + {4 * i + size * WARP * warp}];" for i in range(_SUMS))
        maximum, total, *out = assembly(code, ",".join(["=f"] * _SUMS + ["r"]), place, results=_SUMS)
        found.append(Merged(maximum, total, out))
    return functools.reduce(hopper_merge.joined, found)


def _load_partial(at: Partials, block: RowBlock, task: _Task, number, geometry: Geometry) -> tuple[Any, list]:
    """Loads split `number` of a lane's share. If there is no such split, the logarithm of its sum is -inf."""
    number = add(mul(number, shares(geometry)), task.share)
    exists = less(number, block.num_splits)
    number = arith.select(exists, number, i32(0))
    # As in `plan.partial_of`: later splits have the first partial result of the queues that follow.
    is_first = arith.cmpi(arith.CmpIPredicate.eq, number, i32(0))
    partial = arith.select(is_first, block.first_partial, mul(add(div(block.first_partial, 2), number), 2))
    of_block = add(mul(partial, geometry.tuning.width), block.block)
    index = arith.addi(arith.muli(as_i64(of_block), i64(WGMMA_ROWS)), as_i64(task.row))
    return hopper_merge.load_partial(at, exists, index, task.column, geometry.problem.head_size)
