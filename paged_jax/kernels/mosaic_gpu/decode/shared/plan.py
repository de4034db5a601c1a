"""Assigns tiles of own tokens and of shared prefixes to programs.

Tokens of all heads are neighbours in a block, and memory is fastest if neighbours are read at about the same time. So
each head has a line of tiles, and programs at the same place of different heads' lines run side by side:

    program          0       1       2       3       4       5     ...
    head, share    0, 0    1, 0    0, 1    1, 1    0, 2    1, 2           of two heads
    line of a head   |--- sequence 0 ---|-- 1 --|------- 2 -------|
    its shares       |    0    |    1    |    2    |    3    |    4

*Own tokens.* A line has the tiles of all sequences, and its shares are decode's queues.

*Prefixes.* The queries of a prefix are cut into tiles of `queries_of_tile`. A work item is such a tile with
`heads_of_item` heads of one kv head's group. A line has the tiles of K and V of all items of these heads, by prefix and
query tile. A program attends to its share split by split. So programs read the same K and V for different query tiles
at about the same time, and find them in L2.

    items    |------ 0 ------|------ 1 ------|- 2 -|- 3 -|
    shares   |    0    |    1    |    2    |    3    |
    splits   |    0    | 1 |  2  |    3    | 4 | 5 |  ...    split number = item + share
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.plan import Item, Split
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_least, at_most, cdiv, div
from paged_jax.kernels.mosaic_gpu.hopper.limits import QUERY_ROWS, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths
from paged_jax.kernels.problem import Problem

STREAMS = 2  # of own tokens in each program
_LEAST_TILES = 4  # of a share; a smaller one takes less time than its partial result
_LOADS_IN_FLIGHT = 8


def heads_of_item(problem: Problem) -> int:
    """Query heads of an item: a kv head's group, or an equal part of a large group, as a tile has 8 queries or more."""
    return max(n for n in range(1, WGMMA_ROWS // QUERY_ROWS + 1) if problem.group % n == 0)


def queries_of_tile(problem: Problem) -> int:
    """Queries of an item: as many as fit into the rows of a product. A copy takes a multiple of 8 of each head."""
    return WGMMA_ROWS // heads_of_item(problem) // QUERY_ROWS * QUERY_ROWS


def lines(problem: Problem) -> int:
    """The number of lines of prefixes: items of a query tile."""
    return problem.num_heads // heads_of_item(problem)


def own_share(stream: Scalar, problem: Problem, num_programs: int) -> tuple[Scalar, Scalar]:
    """A stream's share of own tokens, and its kv head."""
    number = stream * num_programs + lax.axis_index("program")
    share = div(number, problem.num_kv_heads)
    return share, number - share * problem.num_kv_heads


def num_splits(geometry: Geometry) -> int:
    """An upper bound of the splits of a line. A prefix has up to two query tiles that are not full."""
    problem = geometry.problem
    return 2 * problem.num_seqs + problem.num_tokens // queries_of_tile(problem) + geometry.tuning.queues


class PrefixSplit(NamedTuple):
    """Neighbouring tiles of an item, and the item's rows."""

    split: Split
    first_head: Scalar
    first_query: Scalar  # of its query tile, a multiple of 8


class Line(NamedTuple):
    """A line of prefixes; all heads have equal ones."""

    total: Scalar  # its tiles
    share: Scalar  # tiles of a program's share


class RowPlace(NamedTuple):
    """Where the partial results of a query's head are."""

    first: Scalar  # the index of the first one; the others follow, each `lines` further
    count: Scalar  # the item's splits; 0 if the query has no prefix with tokens
    row: Scalar  # the row of the head in each of them


class _Place(NamedTuple):
    """A prefix, and what lies before it in the line."""

    prefix: Scalar
    tiles_before: Scalar
    items_before: Scalar


def line_of(prefixes: Lengths, geometry: Geometry) -> Line:
    """Measures the line."""
    _, end = _search(lambda _, __: False, prefixes, geometry)
    return _line(end.tiles_before, geometry)


def share_of(program: Scalar, line: Line, geometry: Geometry) -> tuple[Scalar, Scalar]:
    """The place where a program's share begins, and the one where it ends. Programs behind all shares have none."""
    first = lax.min(div(program, lines(geometry.problem)) * line.share, line.total)
    return first, lax.min(first + line.share, line.total)


def for_each_split(
    do: Callable[[PrefixSplit, Scalar, PrefixSplit, Scalar], Any],
    program: Scalar,
    prefixes: Lengths,
    geometry: Geometry,
    begin: Callable[[PrefixSplit], Any] = lambda _: None,
) -> Scalar:
    """Calls `do` with each split of a program's share, the share's tiles before it, the next one, and if there is one.

    `begin` is called with the first split, before all. Returns the number of tiles of all splits.
    """
    line = line_of(prefixes, geometry)
    first, end = share_of(program, line, geometry)

    def step(state):
        place, found = state
        after = place + found.split.num_tiles
        following = split_at(after, program, prefixes, line, geometry)
        do(found, place - first, following, after < end)
        return after, following

    found = split_at(first, program, prefixes, line, geometry)
    pl.when(first < end)(lambda: begin(found))
    lax.while_loop(lambda state: state[0] < end, step, (first, found))
    return end - first


def split_at(place: Scalar, program: Scalar, prefixes: Lengths, line: Line, geometry: Geometry) -> PrefixSplit:
    """The split that begins at a place in the line, in the share of `program`; any split if the line ends there."""
    problem, place = geometry.problem, at_least(lax.min(place, line.total - 1), 0)
    found, _ = _search(lambda after, _: place >= after.tiles_before, prefixes, geometry)
    prefix = lax.min(found.prefix, jnp.int32(problem.num_seqs - 1))
    seq_len = _seen(prefixes.seq_lens[prefix], geometry)
    tiles = at_least(cdiv(seq_len, geometry.tile_tokens), 1)
    query_tile = lax.div(place - found.tiles_before, tiles)
    tile = place - found.tiles_before - query_tile * tiles
    share = div(program, lines(problem))
    head = program - share * lines(problem)
    first_head = head * heads_of_item(problem)
    count = lax.min(tiles - tile, lax.min((share + 1) * line.share, line.total) - place)
    origin, number = tile * geometry.tile_tokens, found.items_before + query_tile + share
    end = lax.min(seq_len, origin + count * geometry.tile_tokens)
    zero = jnp.int32(0)
    item = Item(zero, prefix, div(first_head, problem.group))
    split = Split(item, seq_len, origin, zero, end, count, zero, number * lines(problem) + head)
    first_query = _aligned(prefixes.query_start_loc[prefix]) + query_tile * queries_of_tile(problem)
    return PrefixSplit(split, first_head, first_query)


def place_of(query: Scalar, head: Scalar, prefixes: Lengths, geometry: Geometry) -> RowPlace:
    """Finds the partial results of a query's head."""
    found, end = _search(lambda _, next_start: query >= next_start, prefixes, geometry)
    problem, heads = geometry.problem, heads_of_item(geometry.problem)
    queries = queries_of_tile(problem)
    prefix = lax.min(found.prefix, jnp.int32(problem.num_seqs - 1))
    tiles = cdiv(_seen(prefixes.seq_lens[prefix], geometry), geometry.tile_tokens)
    of_prefix = query - _aligned(prefixes.query_start_loc[prefix])
    query_tile, part = div(of_prefix, queries), div(head, heads)
    begin, share = found.tiles_before + query_tile * tiles, _line(end.tiles_before, geometry).share
    first, last = lax.div(begin, share), lax.div(begin + tiles - 1, share)
    return RowPlace(
        first=(found.items_before + query_tile + first) * lines(problem) + part,
        count=jnp.where((found.prefix == prefix) & (tiles > 0), last - first + 1, 0),
        row=(head - part * heads) * queries + of_prefix - query_tile * queries,
    )


def _line(total: Scalar, geometry: Geometry) -> Line:
    """The line of so many tiles, cut into equal shares."""
    return Line(total, at_least(cdiv(total, geometry.tuning.queues), _LEAST_TILES))


def _search(is_later: Callable[[_Place, Scalar], Any], prefixes: Lengths, geometry: Geometry) -> tuple[_Place, _Place]:
    """Finds the first prefix behind which nothing is later. Returns its place in the line, and the line's end.

    The arguments of `is_later` are the place behind a prefix, and the first query of the next one.
    """
    problem = geometry.problem

    def some(first, count: int, carry):
        found, before = carry
        lens = [prefixes.seq_lens[first + i] for i in range(count)]
        starts = [prefixes.query_start_loc[first + i] for i in range(count + 1)]
        for i, (seq_len, start, next_start) in enumerate(zip(lens, starts, starts[1:], strict=False)):
            query_tiles = cdiv(next_start - _aligned(start), queries_of_tile(problem))
            items = jnp.where(next_start > start, query_tiles, 0)
            tiles = cdiv(_seen(seq_len, geometry), geometry.tile_tokens)
            before = _Place(first + i + 1, before.tiles_before + tiles * items, before.items_before + items)
            later = is_later(before, next_start)
            found = _Place(*(jnp.where(later, x, y) for x, y in zip(before, found, strict=True)))
        return found, before

    whole, left_over = divmod(problem.num_seqs, _LOADS_IN_FLIGHT)
    zero = jnp.int32(0)
    carry = _Place(zero, zero, zero), _Place(zero, zero, zero)
    if whole:
        carry = lax.fori_loop(0, whole, lambda i, carry: some(i * _LOADS_IN_FLIGHT, _LOADS_IN_FLIGHT, carry), carry)
    return some(jnp.int32(whole * _LOADS_IN_FLIGHT), left_over, carry)


def _aligned(query: Scalar) -> Scalar:
    """The query where the first query tile of a prefix begins: copies begin at multiples of 8 rows."""
    return div(query, QUERY_ROWS) * QUERY_ROWS


def _seen(seq_len: Scalar, geometry: Geometry) -> Scalar:
    """The tokens of a prefix that its queries see."""
    return at_most(at_least(seq_len, 0), geometry.problem.max_seq_len)
