"""The merge of a group of rows: each thread merges 4 elements of one row."""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from paged_jax.kernels.mosaic_gpu.hopper import merge
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
from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.refs import ABSENT, Partials, Ref
from paged_jax.kernels.mosaic_gpu.ragged.geometry import ItemKind

_WIDE_IN_FLIGHT, _THIN_IN_FLIGHT = 4, 8  # partial results that are loaded together; wide items have few splits


class RowGroup(NamedTuple):
    """Neighbouring rows (query token, query head) of one sequence, all in split items of one kind."""

    number: Scalar  # the group's number in the sequence
    num_rows: Scalar  # the sequence's rows in split items of this kind
    first_token: Scalar  # the row of the query that holds the first token of these items
    query_tiles: Scalar  # the sequence's query tiles of this kind
    heads_together: Scalar  # kv heads whose items alternate
    splits: Scalar  # the splits of each item
    first_partial: Scalar  # the first partial result of the sequence's first item


class RowRefs(NamedTuple):
    """The arrays of a merge of rows: references, or their addresses as MLIR values."""

    partials: Partials
    sinks: Ref
    out: Ref
    lse: Ref


class _Row(NamedTuple):
    """The row of a thread. Fields are MLIR values."""

    exists: Any
    column: Any  # the index of the thread's 4 elements in the row
    token: Any  # the query token's index in the sequence
    head: Any
    partial: Any  # the first partial result of the row's item
    of_partial: Any  # the row's index in each partial result of its item


def merge_rows(refs: RowRefs, group: RowGroup, kind: ItemKind) -> None:
    """Merges a group of rows."""
    problem, (leaves, tree) = kind.geometry.problem, jax.tree.flatten(refs)

    @inline(*[plgpu.RefType()] * len(leaves), *[SCALAR] * len(group))
    def merge_own_elements(_, *arguments):
        at = jax.tree.unflatten(tree, [address(x) for x in arguments[: len(leaves)]])
        values = RowGroup(*(x.registers.item() for x in arguments[len(leaves) :]))
        row = _row_of_thread(values, kind)
        merged = merge.merged(
            lambda number: _load_partial(at.partials, row, number, values.splits, kind),
            values.splits,
            _WIDE_IN_FLIGHT if kind.is_wide else _THIN_IN_FLIGHT,
        )
        sinks = at.sinks if problem.per_head.sinks else ABSENT
        out, lse = merge.finished(merged, merge.saw_tokens(merged), sinks, row.head)
        index = add(mul(add(values.first_token, row.token), problem.num_heads), row.head)
        own = merge.OwnElements(row.exists, index, row.column)
        merge.store(at.out, at.lse, own, out, lse, problem.head_size, problem.query_dtype)

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
    first_head = arith.muli(arith.divui(kv_head, group.heads_together), group.heads_together)
    heads = arith.minsi(group.heads_together, arith.subi(i32(problem.num_kv_heads), first_head))
    later_tiles = arith.subi(arith.subi(group.query_tiles, i32(1)), tile)  # the last query tile comes first
    of_group = add(arith.muli(later_tiles, heads), arith.subi(kv_head, first_head))
    item = add(arith.muli(first_head, group.query_tiles), of_group)
    partial = add(group.first_partial, arith.muli(item, group.splits))
    return _Row(exists, column, token, head, partial, of_partial)


def _load_partial(at: Partials, row: _Row, number, splits, kind: ItemKind) -> tuple[Any, list]:
    """Loads partial result `number` of a row; the logarithm of its sum is -inf if there is no such partial result."""
    exists = less(number, splits)
    number = arith.select(exists, number, i32(0))
    rows = kind.halves * WGMMA_ROWS
    index = arith.addi(arith.muli(as_i64(add(row.partial, number)), i64(rows)), as_i64(row.of_partial))
    return merge.load_partial(at, exists, index, row.column, kind.geometry.problem.head_size)
