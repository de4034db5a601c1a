"""The merge of a split item, or of the rows of a query: each thread merges some elements of a row."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from paged_jax.kernels.mosaic_gpu.hopper import merge
from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    as_i64,
    as_index,
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
from paged_jax.kernels.mosaic_gpu.hopper.refs import ABSENT, Partials, Ref
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind, kinds_of

_IN_FLIGHT = 8  # partial results of a query that are loaded together
_FEW_SPLITS = 4  # of an item
_FOR_FEW, _FOR_MANY, _FOR_FEW_ROWS = (4, 4), (4, 6), (1, 16)
"""How many vectors of 4 elements of its row a thread merges, and how many partial results are loaded together.

With more vectors, fewer threads compute the same weights, and more rows are merged at a time. That is for items of many
rows. Most of the time of a merge is the latency of L2, and the time to fetch instructions, which run once or twice.
"""


class SplitRows(NamedTuple):
    """A warpgroup's rows of a split item whose partial results are all stored."""

    first_token: Scalar  # this field and the next two are as in `rows.QueryRows`
    num_tokens: Scalar
    kv_head: Scalar
    band: Scalar  # which band of the item has these rows
    first_partial: Scalar
    splits: Scalar


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
    query_tiles: Scalar  # the sequence's query tiles of this kind
    heads_together: Scalar  # kv heads whose items alternate
    splits: Scalar  # the splits of each item
    first_partial: Scalar  # the first partial result of the sequence's first item


class _Row(NamedTuple):
    """One of a thread's rows of an item. Fields are MLIR values."""

    own: merge.OwnElements
    head: Any
    of_partial: Any  # the row's index in each partial result of its item


def merge_item(refs: RowRefs, rows: SplitRows, kind: ItemKind) -> None:
    """Merges a warpgroup's rows of a split item, and stores their out and lse."""
    leaves, tree = jax.tree.flatten(refs)

    @inline(*[plgpu.RefType()] * len(leaves), *[SCALAR] * len(rows))
    def merge_own_elements(_, *arguments):
        at = jax.tree.unflatten(tree, [address(x) for x in arguments[: len(leaves)]])
        values = SplitRows(*(x.registers.item() for x in arguments[len(leaves) :]))
        _merge_in_a_shape(at, values, kind)

    merge_own_elements(*leaves, *rows)


def _merge_in_a_shape(at: RowRefs, rows: SplitRows, kind: ItemKind) -> None:
    """Merges the rows in the shape for their number and the splits. Wide items have many rows, and few splits."""
    few, many, few_rows = (
        functools.partial(_merge_rows, at, rows, kind, *shape) for shape in (_FOR_FEW, _FOR_MANY, _FOR_FEW_ROWS)
    )
    if kind.is_wide:
        few()
        return
    has_few_rows = less(mul(rows.num_tokens, kind.geometry.problem.group), i32(_rows_at_once(1, kind.geometry) + 1))
    _either(less(i32(_FEW_SPLITS), rows.splits), lambda: _either(has_few_rows, few_rows, many), few)


def _either(condition, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Does one thing or the other."""
    branch = scf.IfOp(condition, [], has_else=True)
    for block, do in ((branch.then_block, then), (branch.else_block, otherwise)):
        assert block is not None
        with ir.InsertionPoint(block):
            do()
            scf.yield_([])


def _merge_rows(at: RowRefs, rows: SplitRows, kind: ItemKind, vectors: int, in_flight: int) -> None:
    """Merges the rows, each thread so many vectors of one of them at a time."""
    geometry, problem, threads = kind.geometry, kind.geometry.problem, _threads_of_row(vectors, kind.geometry)
    sinks = at.sinks if problem.per_head.sinks else ABSENT
    bounds = i32(0), mul(rows.num_tokens, problem.group), i32(_rows_at_once(vectors, geometry))
    loop = scf.ForOp(*map(as_index, bounds))  # pyright: ignore[reportCallIssue]
    with ir.InsertionPoint(loop.body):
        first = arith.index_cast(ir.IntegerType.get_signless(32), loop.induction_variable)
        row = _row_of_thread(first, rows, threads, geometry)
        load = functools.partial(_load_partial, at.partials, row, rows, vectors, kind)
        merged = merge.merged(load, rows.splits, in_flight, vectors * merge.ELEMENTS)
        out, lse = merge.finished(merged, merge.saw_tokens(merged), sinks, row.head)
        merge.store(at.out, at.lse, row.own, out, lse, problem.head_size, problem.query_dtype, threads)
        scf.yield_([])


def _threads_of_row(vectors: int, geometry: Geometry) -> int:
    """Threads that merge a row of a split item."""
    return geometry.problem.head_size // (vectors * merge.ELEMENTS)


def _rows_at_once(vectors: int, geometry: Geometry) -> int:
    """Rows of a split item that a warpgroup merges at a time."""
    return WARPGROUP // _threads_of_row(vectors, geometry)


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
            partials, index = _find(number, sources)
            return merge.load_partial(partials, exists, index, column, problem.head_size)

        merged = merge.merged(load, total, _IN_FLIGHT)
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
        rows = i64(kind.bands * WGMMA_ROWS)
        return [*partials, arith.addi(arith.muli(as_i64(partial), rows), as_i64(of_partial)), rows]

    (wide, thin), found = kinds_of(geometry), []
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


def _row_of_thread(first, rows: SplitRows, threads: int, geometry: Geometry) -> _Row:
    """Finds this thread's row among those that are merged at a time, from row `first` of an item on."""
    problem, index = geometry.problem, thread_index_read_again()
    lane, column = div(index, threads), rem(index, threads)
    row = add(first, lane)
    exists = arith.andi(less(lane, i32(WARPGROUP // threads)), less(row, mul(rows.num_tokens, problem.group)))
    row = arith.select(exists, row, i32(0))
    head = add(mul(rows.kv_head, problem.group), rem(row, problem.group))
    place = add(mul(add(rows.first_token, div(row, problem.group)), problem.num_heads), head)
    return _Row(merge.OwnElements(exists, place, column), head, row)


def _place_in_partials(token, head, copy: Copy, kind: ItemKind) -> tuple[Any, Any]:
    """The first partial result of the item of a token and a head, and the index of their row in it."""
    geometry, problem = kind.geometry, kind.geometry.problem
    tile, of_tile = div(token, kind.tokens), rem(token, kind.tokens)
    band, of_band = div(of_tile, geometry.band_tokens), rem(of_tile, geometry.band_tokens)
    kv_head, of_group = div(head, problem.group), rem(head, problem.group)
    of_partial = add(mul(band, WGMMA_ROWS), add(mul(of_band, problem.group), of_group))
    first_head = arith.muli(arith.divui(kv_head, copy.heads_together), copy.heads_together)
    heads = arith.minsi(copy.heads_together, arith.subi(i32(problem.num_kv_heads), first_head))
    later_tiles = arith.subi(arith.subi(copy.query_tiles, i32(1)), tile)  # the last query tile comes first
    of_group = add(arith.muli(later_tiles, heads), arith.subi(kv_head, first_head))
    item = add(arith.muli(first_head, copy.query_tiles), of_group)
    return add(copy.first_partial, arith.muli(item, copy.splits)), of_partial


def _load_partial(at: Partials, row: _Row, rows: SplitRows, vectors: int, kind: ItemKind, number) -> tuple[Any, list]:
    """Loads partial result `number` of a row; the logarithm of its sum is -inf if there is no such partial result."""
    exists = arith.andi(row.own.exists, less(number, rows.splits))
    band = as_i64(add(mul(add(rows.first_partial, number), kind.bands), rows.band))
    index = arith.addi(arith.muli(band, i64(WGMMA_ROWS)), as_i64(row.of_partial))
    start = arith.addi(arith.muli(index, i64(4 * kind.geometry.problem.head_size)), bytes_of(row.own.column, 16))
    step = 16 * _threads_of_row(vectors, kind.geometry)
    loaded = [merge.load_elements(at, exists, arith.addi(start, i64(i * step))) for i in range(vectors)]
    return merge.load_log_sum(at, exists, index), [x for vector in loaded for x in vector]
