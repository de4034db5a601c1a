"""The merge of partial results: the splits of an item that queues have cut become its out and lse.

Grid: programs of one warpgroup, for each row of each row block that a queue's first split may close; most have nothing
to do. A thread merges four neighbouring elements of its row over all splits, in their order, with many loads in flight.

Roofline: 4 * value_size bytes a row and split, mostly from the L2 cache: latency is what counts.
"""

import functools
from typing import Any, NamedTuple

import jax
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
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.merge import ELEMENTS
from paged_jax.kernels.mosaic_gpu.hopper.refs import ABSENT, Partials
from paged_jax.kernels.mosaic_gpu.mla.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.mla.refs import Ref

_MANY_SPLITS = 8  # of an item on average, from which on as many loads as registers hold are in flight
_IN_FLIGHT, _MANY_IN_FLIGHT = 4, 16


class MergeRefs(NamedTuple):
    """The arrays of the merge kernel: references, or their addresses as MLIR values."""

    closings: Ref
    partials: Partials
    sinks: Ref
    out: Ref
    lse: Ref


class RowBlock(NamedTuple):
    """A row block to merge, or one of its rows: scalars."""

    first_partial: Scalar
    num_splits: Scalar
    row: Scalar
    num_rows: Scalar
    block: Scalar
    row_of_block: Scalar  # the first row that this program merges


def merge(geometry: Geometry, refs: MergeRefs) -> None:
    """Runs the kernel, which writes to the references of out and lse."""
    arrays, tree = jax.tree.flatten(refs)
    plgpu.kernel(
        functools.partial(_kernel, tree=tree, geometry=geometry),
        out_type=(),
        grid=(geometry.tuning.programs, pl.cdiv(geometry.block_rows, rows_of_program(geometry) * _turns(geometry))),
        grid_names=("program", "rows"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mla_merge",
    )(*arrays)


def rows_of_program(geometry: Geometry) -> int:
    """Rows that a program's threads have elements of."""
    return ELEMENTS * WARPGROUP // geometry.problem.head_size


def _has_many_splits(geometry: Geometry) -> bool:
    """Whether queues cut items into many splits."""
    return geometry.tuning.queues >= _MANY_SPLITS * geometry.problem.num_seqs


def _turns(geometry: Geometry) -> int:
    """How often a program merges rows: more often where there are so many sequences that few are cut."""
    return 4 if geometry.problem.num_seqs >= geometry.tuning.queues else 1


def _kernel(*arrays, tree: Any, geometry: Geometry) -> None:
    refs = jax.tree.unflatten(tree, arrays)
    width = jnp.int32(geometry.tuning.width)
    number, block = lax.div(lax.axis_index("program"), width), lax.rem(lax.axis_index("program"), width)
    first_partial, num_splits, row, num_rows = (refs.closings[number, block, i] for i in range(4))
    step = rows_of_program(geometry)
    first = lax.axis_index("rows") * (step * _turns(geometry))
    end = jnp.where(num_splits > 0, lax.min(num_rows, first + step * _turns(geometry)), 0)

    @pl.loop(first, end, step=step)
    def merge_some(row_of_block):
        merge_rows(refs, RowBlock(first_partial, num_splits, row, num_rows, block, row_of_block), geometry)


def merge_rows(refs: MergeRefs, rows: RowBlock, geometry: Geometry) -> None:
    """Merges some rows of a row block."""
    problem, (leaves, tree) = geometry.problem, jax.tree.flatten(refs)

    @inline(*[plgpu.RefType()] * len(leaves), *[SCALAR] * len(rows))
    def merge_own_elements(_, *arguments):
        at = jax.tree.unflatten(tree, [address(x) for x in arguments[: len(leaves)]])
        values = RowBlock(*(x.registers.item() for x in arguments[len(leaves) :]))
        threads_of_row = problem.head_size // ELEMENTS
        thread = thread_index_read_again()
        row_of_block = add(values.row_of_block, div(thread, threads_of_row))
        # Threads are left over if 128 is no multiple of the threads of a row.
        exists = arith.andi(
            less(row_of_block, values.num_rows), less(thread, i32(rows_of_program(geometry) * threads_of_row))
        )
        values = values._replace(row_of_block=arith.select(exists, row_of_block, i32(0)))
        column = rem(thread, threads_of_row)
        merged = hopper_merge.merged(
            lambda number: _load_partial(at.partials, values, number, column, geometry),
            values.num_splits,
            _MANY_IN_FLIGHT if _has_many_splits(geometry) else _IN_FLIGHT,
        )
        seen = hopper_merge.saw_tokens(merged)
        row = add(values.row, values.row_of_block)
        head = rem(row, geometry.heads) if problem.per_head.sinks else ABSENT
        out, lse = hopper_merge.finished(merged, seen, at.sinks, head)
        own = hopper_merge.OwnElements(exists, row, column)
        hopper_merge.store(at.out, at.lse, own, out, lse, problem.head_size, problem.query_dtype)

    merge_own_elements(*leaves, *rows)


def _load_partial(at: Partials, rows: RowBlock, number, column, geometry: Geometry) -> tuple[Any, list]:
    """Loads partial result `number` of a row; the logarithm of its sum is -inf if there is no such split."""
    exists = less(number, rows.num_splits)
    number = arith.select(exists, number, i32(0))
    # As in `plan.partial_of`: the first split's, and behind it the first one of each of the next queues.
    is_first = arith.cmpi(arith.CmpIPredicate.eq, number, i32(0))
    partial = arith.select(is_first, rows.first_partial, mul(add(div(rows.first_partial, 2), number), 2))
    of_block = add(mul(partial, geometry.tuning.width), rows.block)
    index = arith.addi(arith.muli(as_i64(of_block), i64(WGMMA_ROWS)), as_i64(rows.row_of_block))
    return hopper_merge.load_partial(at, exists, index, column, geometry.problem.head_size)
