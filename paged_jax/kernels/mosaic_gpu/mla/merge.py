"""The merge of partial results: the splits of an item that queues have cut become its out and lse.

Grid: programs of one warpgroup, for each row of each row block that a queue's first split may close; most have nothing
to do. A thread merges four neighbouring elements of its row over all splits, in their order, with many loads in flight.

Roofline: 4 * value_size bytes a row and split, mostly from the L2 cache: latency is what counts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    as_i32,
    as_i64,
    as_index,
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
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOG2E, LOWEST
from paged_jax.kernels.mosaic_gpu.mla.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.mla.refs import Partials, Ref

_ELEMENTS = 4  # of a thread
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


class _Merged(NamedTuple):
    """A thread's part of the softmax of a row. Its fields are values of MLIR."""

    maximum: Any  # of base 2
    sum: Any
    out: list


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
    return _ELEMENTS * WARPGROUP // geometry.problem.head_size


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
    leaves, tree = jax.tree.flatten(refs)

    @inline(*[plgpu.RefType()] * len(leaves), *[SCALAR] * len(rows))
    def merge_own_elements(_, *arguments):
        at = jax.tree.unflatten(tree, [address(x) for x in arguments[: len(leaves)]])
        values = RowBlock(*(x.registers.item() for x in arguments[len(leaves) :]))
        threads_of_row = geometry.problem.head_size // _ELEMENTS
        thread = thread_index_read_again()
        row_of_block = add(values.row_of_block, div(thread, threads_of_row))
        # Threads are left over if 128 is no multiple of the threads of a row.
        exists = arith.andi(
            less(row_of_block, values.num_rows), less(thread, i32(rows_of_program(geometry) * threads_of_row))
        )
        values = values._replace(row_of_block=arith.select(exists, row_of_block, i32(0)))
        column = rem(thread, threads_of_row)
        merged = _over_splits(at.partials, values, column, geometry)
        _store(at, values, column, exists, merged, geometry)

    merge_own_elements(*leaves, *rows)


def _over_splits(at: Partials, rows: RowBlock, column, geometry: Geometry) -> _Merged:
    """The softmax of all splits of a row, in their order."""
    carry = [_f32(LOWEST), *[_f32(0.0)] * (1 + _ELEMENTS)]
    step = _MANY_IN_FLIGHT if _has_many_splits(geometry) else _IN_FLIGHT
    loop = scf.ForOp(as_index(i32(0)), as_index(rows.num_splits), as_index(i32(step)), carry)
    with ir.InsertionPoint(loop.body):
        first = arith.index_cast(ir.IntegerType.get_signless(32), loop.induction_variable)
        partials = [_load_partial(at, rows, add(first, i32(i)), column, geometry) for i in range(step)]
        maximum, total, *out = loop.inner_iter_args
        for log_sum, elements in partials:
            new_maximum = arith.maximumf(maximum, log_sum)
            rescale, weight = _exp2(arith.subf(maximum, new_maximum)), _exp2(arith.subf(log_sum, new_maximum))
            total = arith.addf(arith.mulf(total, rescale), weight)
            pairs = zip(out, elements, strict=True)
            out = [arith.addf(arith.mulf(x, rescale), arith.mulf(y, weight)) for x, y in pairs]
            maximum = new_maximum
        scf.yield_([maximum, total, *out])
    maximum, total, *out = loop.results
    return _Merged(maximum, total, out)


def _load_partial(at: Partials, rows: RowBlock, number, column, geometry: Geometry) -> tuple[Any, list]:
    """The logarithm of a split's sum, and four elements; nothing if there is no split of this number."""
    exists = less(number, rows.num_splits)
    number = arith.select(exists, number, i32(0))
    # As in `plan.partial_of`: the first split's, and behind it the first one of each of the next queues.
    is_first = arith.cmpi(arith.CmpIPredicate.eq, number, i32(0))
    partial = arith.select(is_first, rows.first_partial, mul(add(div(rows.first_partial, 2), number), 2))
    of_block = add(mul(partial, geometry.tuning.width), rows.block)
    index = arith.addi(arith.muli(as_i64(of_block), i64(WGMMA_ROWS)), as_i64(rows.row_of_block))
    [log_sum] = assembly("ld.global.f32 $0, [$1];", "=f,l", add(at.log_sums, arith.muli(index, i64(4))), results=1)
    log_sum = arith.select(exists, log_sum, _f32(float("-inf")))
    start = arith.muli(index, i64(4 * geometry.problem.head_size))
    place = add(at.out, arith.addi(start, bytes_of(column, 16)))
    return log_sum, assembly("ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", place, results=4)


def _store(at: MergeRefs, rows: RowBlock, column, exists, merged: _Merged, geometry: Geometry) -> None:
    """Stores four elements of a row of out, and its lse. A row that saw no token gets out 0 and lse -inf."""
    maximum, total, out = merged
    # NaN counts as seen: what is not a number must show.
    seen = arith.cmpf(arith.CmpFPredicate.UNE, total, _f32(0.0))
    row = add(rows.row, rows.row_of_block)
    if geometry.problem.per_head.sinks:
        maximum, total, out = _with_sink(merged, at.sinks, rem(row, geometry.heads))
    total = arith.select(seen, total, _f32(1.0))
    out = [arith.divf(x, total) for x in out]
    lse = arith.divf(arith.addf(maximum, _log2(total)), _f32(LOG2E))
    lse = arith.select(seen, lse, _f32(float("-inf")))
    _store_out(at.out, row, column, exists, out, geometry)
    is_first = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.eq, column, i32(0)))
    code = "{ .reg .pred exists; setp.ne.b32 exists, $0, 0; @exists st.global.f32 [$1], $2; }"
    assembly(code, "r,l,f", as_i32(is_first), add(at.lse, bytes_of(row, 4)), lse)


def _with_sink(merged: _Merged, sinks, head) -> _Merged:
    """The softmax with the logit that joins the sum of a head."""
    maximum, total, out = merged
    [sink] = assembly("ld.global.f32 $0, [$1];", "=f,l", add(sinks, bytes_of(head, 4)), results=1)
    sink = arith.mulf(sink, _f32(LOG2E))
    with_sink = arith.maximumf(maximum, sink)
    rescale = _exp2(arith.subf(maximum, with_sink))
    total = arith.addf(arith.mulf(total, rescale), _exp2(arith.subf(sink, with_sink)))
    return _Merged(with_sink, total, [arith.mulf(x, rescale) for x in out])


def _store_out(out, row, column, exists, elements: list, geometry: Geometry) -> None:
    """Stores four elements of a row, in the query's dtype."""
    pair = {"float16": "f16x2", "bfloat16": "bf16x2"}[geometry.problem.query_dtype]
    code = f"""{{ .reg .pred exists; .reg .b32 a, b; setp.ne.b32 exists, $0, 0;
        cvt.rn.{pair}.f32 a, $3, $2; cvt.rn.{pair}.f32 b, $5, $4; @exists st.global.v2.b32 [$1], {{a, b}}; }}"""
    offset = arith.addi(bytes_of(row, 2 * geometry.problem.head_size), bytes_of(column, 8))
    assembly(code, "r,l,f,f,f,f", as_i32(exists), add(out, offset), *elements)


def _exp2(x):
    return assembly("ex2.approx.ftz.f32 $0, $1;", "=f,f", x, results=1)[0]


def _log2(x):
    return assembly("lg2.approx.ftz.f32 $0, $1;", "=f,f", x, results=1)[0]


def _f32(x: float):
    return mgpu.c(x, ir.F32Type.get())
