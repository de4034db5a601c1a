"""The merge of a group of rows: each thread merges 4 elements of one row."""

from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
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
from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOG2E, LOWEST
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry, ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.refs import Partials
from paged_jax.kernels.problem import Problem

_WIDE_IN_FLIGHT, _THIN_IN_FLIGHT = 4, 8  # partial results that are loaded at a time; wide items have few splits


class RowGroup(NamedTuple):
    """Neighbouring rows (query token, query head) of one sequence, all in split items of one kind."""

    number: Scalar  # of the group, in the sequence
    num_rows: Scalar  # of the sequence, in split items of this kind
    first_token: Scalar  # row of the query that holds the first of these tokens
    query_tiles: Scalar  # of the sequence, of this kind
    splits: Scalar  # of each item
    first_partial: Scalar  # of the sequence's first item


class RowRefs(NamedTuple):
    """The arrays of a merge of rows: references, or their addresses as MLIR values."""

    partials: Partials
    sinks: Ref
    out: Ref
    lse: Ref


class _Row(NamedTuple):
    """The row of a thread. Fields are MLIR values."""

    exists: Any
    column: Any  # index of the thread's 4 elements in the row
    token: Any  # query token, in the sequence
    head: Any
    partial: Any  # the first partial result of its item
    of_partial: Any  # its row in these partial results


class _Merged(NamedTuple):
    """A thread's part of the softmax of a row. Fields are MLIR values."""

    maximum: Any  # of logits, times log2(e)
    sum: Any
    out: list  # 4 elements of O before the division by the sum


def merge_rows(refs: RowRefs, group: RowGroup, kind: ItemKind) -> None:
    """Merges a group of rows."""
    leaves, tree = jax.tree.flatten(refs)

    @inline(*[plgpu.RefType()] * len(leaves), *[SCALAR] * len(group))
    def merge_own_elements(_, *arguments):
        at = jax.tree.unflatten(tree, [address(x) for x in arguments[: len(leaves)]])
        values = RowGroup(*(x.registers.item() for x in arguments[len(leaves) :]))
        row = _row_of_thread(values, kind)
        merged = _over_partials(at.partials, row, values.splits, kind)
        _store(at, row, values.first_token, merged, kind.geometry)

    merge_own_elements(*leaves, *group)


def _row_of_thread(group: RowGroup, kind: ItemKind) -> _Row:
    """Finds this thread's row."""
    geometry, problem = kind.geometry, kind.geometry.problem
    index = thread_index_read_again()
    lane, column = div(index, geometry.threads_of_row), rem(index, geometry.threads_of_row)
    row = add(mul(group.number, geometry.merged_rows), lane)
    exists = arith.andi(less(lane, i32(geometry.merged_rows)), less(row, group.num_rows))
    row = arith.select(exists, row, i32(0))
    token, head = div(row, problem.num_heads), rem(row, problem.num_heads)
    tile, of_tile = div(token, kind.tokens), rem(token, kind.tokens)
    half, of_half = div(of_tile, geometry.half_tokens), rem(of_tile, geometry.half_tokens)
    kv_head, of_group = div(head, problem.group), rem(head, problem.group)
    of_partial = add(mul(half, WGMMA_ROWS), add(mul(of_half, problem.group), of_group))
    of_kv_head = arith.muli(kv_head, group.query_tiles)
    # A head's last query tile comes first.
    item = add(of_kv_head, arith.subi(arith.subi(group.query_tiles, i32(1)), tile))
    partial = add(group.first_partial, arith.muli(item, group.splits))
    return _Row(exists, column, token, head, partial, of_partial)


def _over_partials(at: Partials, row: _Row, splits, kind: ItemKind) -> _Merged:
    """Merges all partial results of a row, in their order."""
    carry, step = [_f32(LOWEST), *[_f32(0.0)] * 5], _WIDE_IN_FLIGHT if kind.is_wide else _THIN_IN_FLIGHT
    loop = scf.ForOp(as_index(i32(0)), as_index(splits), as_index(i32(step)), carry)
    with ir.InsertionPoint(loop.body):
        first = arith.index_cast(ir.IntegerType.get_signless(32), loop.induction_variable)
        partials = [_load_partial(at, row, add(first, i32(i)), splits, kind) for i in range(step)]
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


def _load_partial(at: Partials, row: _Row, number, splits, kind: ItemKind) -> tuple[Any, list]:
    """Loads lse and 4 elements of partial result `number`; lse is -inf if there is no such partial result."""
    exists = less(number, splits)
    number = arith.select(exists, number, i32(0))
    rows = kind.halves * WGMMA_ROWS
    index = arith.addi(arith.muli(as_i64(add(row.partial, number)), i64(rows)), as_i64(row.of_partial))
    [log_sum] = assembly("ld.global.f32 $0, [$1];", "=f,l", add(at.log_sums, arith.muli(index, i64(4))), results=1)
    log_sum = arith.select(exists, log_sum, _f32(float("-inf")))
    start = arith.muli(index, i64(4 * kind.geometry.problem.head_size))
    place = add(at.out, arith.addi(start, bytes_of(row.column, 16)))
    return log_sum, assembly("ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", place, results=4)


def _store(at: RowRefs, row: _Row, first_token, merged: _Merged, geometry: Geometry) -> None:
    """Stores 4 elements of out, and lse. A row that saw no token gets out 0 and lse -inf."""
    maximum, total, out = merged
    # NaN counts as seen: it must reach the result.
    seen = arith.cmpf(arith.CmpFPredicate.UNE, total, _f32(0.0))
    if geometry.problem.per_head.sinks:
        maximum, total, out = _with_sink(merged, at.sinks, row.head)
    total = arith.select(seen, total, _f32(1.0))
    out = [arith.divf(x, total) for x in out]
    lse = arith.divf(arith.addf(maximum, _log2(total)), _f32(LOG2E))
    lse = arith.select(seen, lse, _f32(float("-inf")))
    index = add(mul(add(first_token, row.token), geometry.problem.num_heads), row.head)
    _store_out(at.out, row, index, out, geometry.problem)
    is_first = arith.andi(row.exists, arith.cmpi(arith.CmpIPredicate.eq, row.column, i32(0)))
    code = "{ .reg .pred exists; setp.ne.b32 exists, $0, 0; @exists st.global.f32 [$1], $2; }"
    assembly(code, "r,l,f", as_i32(is_first), add(at.lse, bytes_of(index, 4)), lse)


def _with_sink(merged: _Merged, sinks, head) -> _Merged:
    """Adds a head's sink to the softmax."""
    maximum, total, out = merged
    [sink] = assembly("ld.global.f32 $0, [$1];", "=f,l", add(sinks, bytes_of(head, 4)), results=1)
    sink = arith.mulf(sink, _f32(LOG2E))
    with_sink = arith.maximumf(maximum, sink)
    rescale = _exp2(arith.subf(maximum, with_sink))
    total = arith.addf(arith.mulf(total, rescale), _exp2(arith.subf(sink, with_sink)))
    return _Merged(with_sink, total, [arith.mulf(x, rescale) for x in out])


def _store_out(out, row: _Row, index, elements: list, problem: Problem) -> None:
    """Stores 4 elements of row `index`, in the query's dtype."""
    pair = {"float16": "f16x2", "bfloat16": "bf16x2"}[problem.query_dtype]
    code = f"""{{ .reg .pred exists; .reg .b32 a, b; setp.ne.b32 exists, $0, 0;
        cvt.rn.{pair}.f32 a, $3, $2; cvt.rn.{pair}.f32 b, $5, $4; @exists st.global.v2.b32 [$1], {{a, b}}; }}"""
    offset = arith.addi(bytes_of(index, 2 * problem.head_size), bytes_of(row.column, 8))
    assembly(code, "r,l,f,f,f,f", as_i32(row.exists), add(out, offset), *elements)


def _exp2(x):
    return assembly("ex2.approx.ftz.f32 $0, $1;", "=f,f", x, results=1)[0]


def _log2(x):
    return assembly("lg2.approx.ftz.f32 $0, $1;", "=f,f", x, results=1)[0]


def _f32(x: float):
    return mgpu.c(x, ir.F32Type.get())
