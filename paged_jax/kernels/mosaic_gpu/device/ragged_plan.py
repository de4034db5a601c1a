"""Device code: which work items ragged attention has, worked out from query_start_loc and seq_lens alone.

The query tokens of a sequence are cut into tiles. A work item is one of them with all heads of one kv head's group:

    wide    up to 2 * half tokens, 128 rows: a warpgroup has 64 rows, and both read every tile of K and V
    thin    up to half tokens, 64 rows: both warpgroups have the same rows, and take the tiles of K and V in turn

Only the last tile of a sequence may be thin. Rows past the last sequence's are one sequence more, of which no token is
in the cache: their items write zeros.

All wide items are one line, all thin ones another: sequence by sequence, in a sequence head by head, of a head the last
tile first, as it sees most. Items that cost more than an even share of all work are cut into splits of the context.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.ragged_tuning import Config

Scalar = Any  # an int32 of the device
_IN_FLIGHT = 8  # sequences whose lengths are read at once
_SLACK = 1.125  # of an even share, before an item is split


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Item:
    """A work item, or its part: query tokens first_token.. of a kv head, and tiles of K and V.

    Attributes:
      kind: 0 none, 1 wide, 2 thin.
      head: the kv head.
      seq: the row of the block tables.
      first_token, tokens: rows of the query.
      position: of the first token in its sequence.
      origin: position of the first tile's first token.
      low, high: tokens low <= t < high are seen, by some row.
      count: tiles.
      place: of the part among the parts of split items, or -1 if the item is whole.
    """

    kind: Scalar
    head: Scalar
    seq: Scalar
    first_token: Scalar
    tokens: Scalar
    position: Scalar
    origin: Scalar
    low: Scalar
    high: Scalar
    count: Scalar
    place: Scalar


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cursor:
    """A sequence in a line: how many items, parts of split ones and rows of split ones come before it."""

    seq: Scalar
    items: Scalar
    places: Scalar
    merges: Scalar


@dataclass(frozen=True)
class Line:
    """Wide or thin items.

    Attributes:
      wide: which.
      tokens: at most, of an item.
      weight: cost of a tile of K and V.
    """

    wide: bool
    tokens: int
    weight: int


@dataclass(frozen=True)
class Row:
    """A sequence: its first query token, how many it has, and tokens of the sequence."""

    start: Scalar
    queries: Scalar
    seq_len: Scalar


def lines(cfg: Config) -> tuple[Line, Line]:
    """The wide and the thin items."""
    return Line(True, 2 * cfg.half, 2), Line(False, cfg.half, 1)


def start() -> Cursor:
    """Before all sequences."""
    zero = jnp.int32(0)
    return Cursor(zero, zero, zero, zero)


def work(refs, cfg: Config) -> tuple[Scalar, Scalar]:
    """One over the largest cost of an item that is not split, and the programs of all that begin with wide items."""

    def add(_, row, carry):
        wide, thin = carry
        costs = [
            (tiles_of(row, line, cfg) * (line.weight * _length(row, line, cfg) + 1)).astype(jnp.float32)
            for line in lines(cfg)
        ]
        return wide + costs[0], thin + costs[1]

    zero = jnp.float32(0)
    wide, thin = _over_rows(add, (zero, zero), refs, cfg)
    programs, heads = cfg.tuning.num_programs, cfg.problem.num_kv_heads
    share = (wide + thin) * (_SLACK * heads / programs) + 1
    total = lax.max(wide + thin, jnp.float32(1))
    of_wide = (wide / total * programs + 0.5).astype(jnp.int32)
    of_wide = lax.max(of_wide, (wide > 0).astype(jnp.int32))
    of_wide = jnp.where(thin > 0, lax.min(of_wide, jnp.int32(programs - 1)), programs)
    return 1 / lax.max(share, jnp.float32(cfg.tuning.least_split)), of_wide


def find(number: Scalar, cursor: Cursor, per_split: Scalar, line: Line, refs, cfg: Config) -> tuple[Cursor, Item]:
    """The item of a number in a line, at or after the cursor; its kind is 0 if the line has no such item."""
    problem = cfg.problem
    cursor = _seek(number, cursor, per_split, line, lambda cursor, counts: cursor.items + counts[0], refs, cfg)
    row = row_of(cursor.seq, refs, cfg)
    tiles, splits = tiles_of(row, line, cfg), splits_of(row, per_split, line, cfg)
    inside = number - cursor.items
    split, rest = lax.rem(inside, splits), lax.div(inside, splits)
    tile = tiles - 1 - lax.rem(rest, lax.max(tiles, jnp.int32(1)))
    head = lax.div(rest, lax.max(tiles, jnp.int32(1)))
    first = first_of(row, line, cfg) + tile * line.tokens
    tokens = lax.min(row.queries - first, jnp.int32(line.tokens))
    position = row.seq_len - row.queries + first
    low, high = _seen(row, position, tokens, cfg)
    origin = lax.div(low, jnp.int32(cfg.run)) * cfg.run
    count = _tiles(high - origin, cfg)
    share = lax.div(count + splits - 1, splits)
    begin = lax.min(split * share, count)
    some = cursor.seq <= problem.num_seqs
    place = cursor.places + inside
    item = Item(
        kind=jnp.where(some, 1 if line.wide else 2, 0),
        head=head,
        seq=lax.min(cursor.seq, jnp.int32(problem.num_seqs - 1)),
        first_token=row.start + first,
        tokens=tokens,
        position=position,
        origin=origin + begin * cfg.tuning.tile,
        low=low,
        high=lax.min(high, origin + (begin + share) * cfg.tuning.tile),
        count=lax.min(share, count - begin),
        place=jnp.where(splits > 1, place, -1),
    )
    return cursor, item


def row_of(seq: Scalar, refs, cfg: Config) -> Row:
    """A sequence; num_seqs is that of the padding, and later ones are empty."""
    num_seqs = cfg.problem.num_seqs
    start = refs.query_start_loc_gmem[lax.min(seq, jnp.int32(num_seqs))]
    end = refs.query_start_loc_gmem[lax.min(seq + 1, jnp.int32(num_seqs))]
    end = jnp.where(seq == num_seqs, cfg.problem.num_tokens, end)
    seq_len = refs.seq_lens_gmem[lax.min(seq, jnp.int32(num_seqs - 1))]
    return Row(start, lax.max(end - start, jnp.int32(0)), jnp.where(seq < num_seqs, seq_len, 0))


def tiles_of(row: Row, line: Line, cfg: Config) -> Scalar:
    """Tiles of query tokens of a sequence that are wide, or thin."""
    wide, rest = lax.div(row.queries, jnp.int32(2 * cfg.half)), lax.rem(row.queries, jnp.int32(2 * cfg.half))
    if line.wide:
        return wide + (rest > cfg.half).astype(jnp.int32)
    return ((rest > 0) & (rest <= cfg.half)).astype(jnp.int32)


def first_of(row: Row, line: Line, cfg: Config) -> Scalar:
    """The first query token of a sequence that is in wide items, or in a thin one."""
    return jnp.int32(0) if line.wide else lax.div(row.queries, jnp.int32(2 * cfg.half)) * (2 * cfg.half)


def tokens_of(row: Row, line: Line, cfg: Config) -> Scalar:
    """Query tokens of a sequence that are in wide items, or in a thin one."""
    wide = lax.div(row.queries, jnp.int32(2 * cfg.half)) * (2 * cfg.half)
    rest = row.queries - wide
    if line.wide:
        return jnp.where(rest > cfg.half, row.queries, wide)
    return jnp.where(rest <= cfg.half, rest, 0)


def splits_of(row: Row, per_split: Scalar, line: Line, cfg: Config) -> Scalar:
    """Splits of each item of a sequence, as many as make none larger than a share; a little more does not count."""
    cost = (_length(row, line, cfg) * line.weight).astype(jnp.float32)
    return (cost * per_split + 0.999).astype(jnp.int32) | (cost == 0).astype(jnp.int32)


def _length(row: Row, line: Line, cfg: Config) -> Scalar:
    """Tiles of K and V that an item of the sequence sees, at most."""
    seen = lax.min(row.seq_len, jnp.int32(cfg.problem.max_seq_len))
    if cfg.problem.sliding_window is not None:
        seen = lax.min(seen, jnp.int32(cfg.problem.sliding_window + line.tokens))
    return _tiles(seen, cfg)


def _seen(row: Row, position: Scalar, tokens: Scalar, cfg: Config) -> tuple[Scalar, Scalar]:
    """The tokens that query tokens from `position` on see: low <= t < high."""
    problem = cfg.problem
    high = lax.min(row.seq_len, jnp.int32(problem.max_seq_len))
    low = jnp.int32(0)
    if problem.causal:
        high = lax.min(high, position + tokens)
    if problem.sliding_window is not None:
        low = lax.max(position - (problem.sliding_window - 1), low)
    return lax.min(low, lax.max(high, jnp.int32(0))), lax.max(high, jnp.int32(0))


def _tiles(tokens: Scalar, cfg: Config) -> Scalar:
    return lax.max(lax.div(tokens + (cfg.tuning.tile - 1), jnp.int32(cfg.tuning.tile)), jnp.int32(0))


def seek_merge(number: Scalar, cursor: Cursor, per_split: Scalar, line: Line, refs, cfg: Config) -> Cursor:
    """The sequence that has a row to merge, by its number in the line."""
    return _seek(number, cursor, per_split, line, lambda cursor, counts: cursor.merges + counts[2], refs, cfg)


def _counts(row: Row, per_split: Scalar, line: Line, cfg: Config) -> tuple[Scalar, Scalar, Scalar]:
    """Items of a sequence, and of split ones the parts and what a warpgroup merges at once."""
    tiles, splits = tiles_of(row, line, cfg), splits_of(row, per_split, line, cfg)
    heads, split = cfg.problem.num_kv_heads, splits > 1
    items = tiles * splits * heads
    merges = lax.div(tokens_of(row, line, cfg) * cfg.problem.num_heads + cfg.merged_rows - 1, jnp.int32(cfg.merged_rows))
    return items, jnp.where(split, items, 0), jnp.where(split, merges, 0)


def _seek(
    number: Scalar,
    cursor: Cursor,
    per_split: Scalar,
    line: Line,
    after: Callable[[Cursor, tuple[Scalar, Scalar, Scalar]], Scalar],
    refs,
    cfg: Config,
) -> Cursor:
    """Moves the cursor to the sequence for which `after`, of what comes after it, is more than the number."""

    def counts_of(cursor):
        rows = [row_of(cursor.seq + i, refs, cfg) for i in range(_IN_FLIGHT)]
        return [_counts(row, per_split, line, cfg) for row in rows]

    def moved(cursor, seqs, counts):
        return Cursor(cursor.seq + seqs, cursor.items + counts[0], cursor.places + counts[1], cursor.merges + counts[2])

    def total_of(cursor):
        return tuple(sum(column[1:], column[0]) for column in zip(*counts_of(cursor), strict=True))

    def turn(state):
        cursor = moved(state[0], _IN_FLIGHT, state[1])
        return cursor, total_of(cursor)

    def further(state):
        return (number >= after(*state)) & (state[0].seq <= cfg.problem.num_seqs)

    cursor, _ = lax.while_loop(further, turn, (cursor, total_of(cursor)))
    found = jnp.bool_(False)
    for counts in counts_of(cursor):
        found |= number < after(cursor, counts)
        cursor = jax.tree.map(functools.partial(jnp.where, found), cursor, moved(cursor, 1, counts))
    return cursor


def _over_rows(step, carry, refs, cfg: Config):
    """`step` over all sequences in order; several loads are in flight, as each program waits for them."""

    def some(i, carry):
        seqs = [i * _IN_FLIGHT + j for j in range(_IN_FLIGHT)]
        for seq, row in zip(seqs, [row_of(seq, refs, cfg) for seq in seqs], strict=True):
            carry = step(seq, row, carry)
        return carry

    return lax.fori_loop(0, -(-(cfg.problem.num_seqs + 1) // _IN_FLIGHT), some, carry)
