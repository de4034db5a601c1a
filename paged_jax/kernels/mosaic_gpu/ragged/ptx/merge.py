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
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry, ItemKind

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


class CopyRefs(NamedTuple):
    """The arrays of a merge of copies: references, or their addresses as MLIR values."""

    wide_partials: Partials
    thin_partials: Partials
    sinks: Ref
    out: Ref
    lse: Ref


class Copy(NamedTuple):
    """One of a query's rows of the batch, and where its partial results are."""

    is_wide: Scalar  # 1 if the row is in wide items, 0 if it is in thin ones
    token: Scalar  # the row's index among its sequence's query tokens that are in items of this kind
    query_tiles: Scalar  # as in `RowGroup`, like the other fields
    heads_together: Scalar
    splits: Scalar
    first_partial: Scalar


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


def merge_copies(refs: CopyRefs, number: Scalar, copies: list[Copy], geometry: Geometry) -> None:
    """Merges group `number` of neighbouring heads of one query. A group has heads of one query only."""
    problem, (leaves, tree) = geometry.problem, jax.tree.flatten(refs)
    scalars, scalars_tree = jax.tree.flatten((number, copies))

    @inline(*[plgpu.RefType()] * len(leaves), *[SCALAR] * len(scalars))
    def merge_own_elements(_, *arguments):
        at = jax.tree.unflatten(tree, [address(x) for x in arguments[: len(leaves)]])
        values = [x.registers.item() for x in arguments[len(leaves) :]]
        number, copies = jax.tree.unflatten(scalars_tree, values)
        index = thread_index_read_again()
        lane, column = div(index, geometry.threads_of_row), rem(index, geometry.threads_of_row)
        exists = less(lane, i32(geometry.merged_rows))
        row = add(mul(number, geometry.merged_rows), arith.select(exists, lane, i32(0)))
        head = rem(row, problem.num_heads)
        sources, total = [], i32(0)
        for copy in copies:
            sources.append(_source_of(at, copy, head, total, geometry))
            total = add(total, copy.splits)

        def load(number):
            exists = less(number, total)
            partials, index = _find(arith.select(exists, number, i32(0)), sources)
            return merge.load_partial(partials, exists, index, column, problem.head_size)

        merged = merge.merged(load, total, _THIN_IN_FLIGHT)
        sinks = at.sinks if problem.per_head.sinks else ABSENT
        out, lse = merge.finished(merged, merge.saw_tokens(merged), sinks, head)
        merge.store(
            at.out, at.lse, merge.OwnElements(exists, row, column), out, lse, problem.head_size, problem.query_dtype
        )

    merge_own_elements(*leaves, *scalars)


class _Source(NamedTuple):
    """The partial results of one of a query's rows. Fields are MLIR values."""

    begin: Any  # its first partial result, among all of the query's
    partials: Partials
    first: Any  # the index of the row in its first partial result, among the rows of all partial results; 64 bits
    rows: Any  # rows of a partial result; 64 bits


def _source_of(at: CopyRefs, copy: Copy, head, begin, geometry: Geometry) -> _Source:
    """Where the partial results of a row are. `begin` counts the partial results of the query's rows before it."""

    def source(kind: ItemKind, partials: Partials):
        partial, of_partial = _place_in_partials(copy.token, head, copy, kind)
        rows = i64(kind.halves * WGMMA_ROWS)
        return [*partials, arith.addi(arith.muli(as_i64(partial), rows), as_i64(of_partial)), rows]

    (wide, thin), found = geometry.kinds, []
    found = source(thin, at.thin_partials)
    if wide.may_exist:
        is_wide = less(i32(0), copy.is_wide)
        found = [arith.select(is_wide, x, y) for x, y in zip(source(wide, at.wide_partials), found, strict=True)]
    *partials, first, rows = found
    return _Source(begin, Partials(*partials), first, rows)


def _find(number, sources: list[_Source]) -> tuple[Partials, Any]:
    """The arrays that hold partial result `number` of a query, and the index of its row in them."""

    def place(source: _Source) -> list:
        local = as_i64(arith.subi(number, source.begin))
        return [*source.partials, arith.addi(source.first, arith.muli(local, source.rows))]

    first, *others = sources
    found = place(first)
    for source in others:
        is_earlier = less(number, source.begin)
        found = [arith.select(is_earlier, x, y) for x, y in zip(found, place(source), strict=True)]
    *partials, index = found
    return Partials(*partials), index


def _row_of_thread(group: RowGroup, kind: ItemKind) -> _Row:
    """Finds this thread's row."""
    geometry, problem = kind.geometry, kind.geometry.problem
    index = thread_index_read_again()
    lane, column = div(index, geometry.threads_of_row), rem(index, geometry.threads_of_row)
    row = add(mul(group.number, geometry.merged_rows), lane)
    exists = arith.andi(less(lane, i32(geometry.merged_rows)), less(row, group.num_rows))
    row = arith.select(exists, row, i32(0))
    token, head = div(row, problem.num_heads), rem(row, problem.num_heads)
    return _Row(exists, column, token, head, *_place_in_partials(token, head, group, kind))


def _place_in_partials(token, head, group: RowGroup | Copy, kind: ItemKind) -> tuple[Any, Any]:
    """The first partial result of the item of a token and a head, and the index of their row in it."""
    geometry, problem = kind.geometry, kind.geometry.problem
    tile, of_tile = div(token, kind.tokens), rem(token, kind.tokens)
    half, of_half = div(of_tile, geometry.half_tokens), rem(of_tile, geometry.half_tokens)
    kv_head, of_group = div(head, problem.group), rem(head, problem.group)
    of_partial = add(mul(half, WGMMA_ROWS), add(mul(of_half, problem.group), of_group))
    first_head = arith.muli(arith.divui(kv_head, group.heads_together), group.heads_together)
    heads = arith.minsi(group.heads_together, arith.subi(i32(problem.num_kv_heads), first_head))
    later_tiles = arith.subi(arith.subi(group.query_tiles, i32(1)), tile)  # the last query tile comes first
    of_group = add(arith.muli(later_tiles, heads), arith.subi(kv_head, first_head))
    item = add(arith.muli(first_head, group.query_tiles), of_group)
    return add(group.first_partial, arith.muli(item, group.splits)), of_partial


def _load_partial(at: Partials, row: _Row, number, splits, kind: ItemKind) -> tuple[Any, list]:
    """Loads partial result `number` of a row; the logarithm of its sum is -inf if there is no such partial result."""
    exists = less(number, splits)
    number = arith.select(exists, number, i32(0))
    rows = kind.halves * WGMMA_ROWS
    index = arith.addi(arith.muli(as_i64(add(row.partial, number)), i64(rows)), as_i64(row.of_partial))
    return merge.load_partial(at, exists, index, row.column, kind.geometry.problem.head_size)
