"""Which work items ragged attention has: how they are counted, and how `find` finds one on the device.

The query tokens of a sequence are cut into tiles. A work item is one of them with all heads of one kv head's group:

    wide    up to 2 * half tokens, 128 rows: a warpgroup has 64 rows, and both read every tile of K and V
    thin    up to half tokens, 64 rows: both warpgroups have the same rows, and take the tiles of K and V in turn

Only the last tile of a sequence may be thin. Rows past the last sequence's are one sequence more, of which no token is
in the cache: their items write zeros.

All wide items are one line, all thin ones another: sequence by sequence, in a sequence head by head, of a head the last
tile first, as it sees most. Items that cost more than an even share of all work are cut into splits of the context.
How many items come before each sequence is summed up on the device, where the lengths are known: by the kernel
(`ragged_count.py`), or where sequences are many by XLA (`plan`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.ragged_tuning import COUNTED, Config, Line

Scalar = Any  # an int32 of the device
_SLACK = 1.125  # of an even share, before an item is split
ITEMS, PLACES, MERGES = range(COUNTED)  # what is counted: items, parts of split ones, and turns of merging their rows


class Work(NamedTuple):
    """What was counted: arrays on the host, references on the device.

    Attributes:
      table: i32 [2 * COUNTED, num_seqs + 2 or more], wide items, their parts and merges, thin items, and so on, of all
        sequences before each, that of the padding and the end included.
      per_split: f32 [1], one over the largest cost of an item that is not split.
      of_wide: i32 [1], programs that begin with wide items.
    """

    table: Any
    per_split: Any
    of_wide: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Item:
    """A work item, or its part: query tokens first_token.. of a kv head, and tiles of K and V.

    Attributes:
      kind: 0 none, 1 wide, 2 thin.
      kv_head: the kv head.
      seq: the row of the block tables.
      first_token, tokens: rows of the query.
      position: of the first token in its sequence.
      origin: position of the first tile's first token.
      low, high: tokens low <= t < high are seen, by some row.
      end: tokens before it have values.
      count: tiles.
      cached: those of them that are in the cache; the others are of the new tokens' own arrays.
      context: tokens in the cache.
      new_origin: position of the first token of the first tile of new tokens.
      place: of the part among the parts of split items, or -1 if the item is whole.
    """

    kind: Scalar
    kv_head: Scalar
    seq: Scalar
    first_token: Scalar
    tokens: Scalar
    position: Scalar
    origin: Scalar
    low: Scalar
    high: Scalar
    end: Scalar
    count: Scalar
    cached: Scalar
    context: Scalar
    new_origin: Scalar
    place: Scalar


@dataclass(frozen=True)
class Row:
    """A sequence: its first query token, how many it has, and tokens of the sequence."""

    start: Scalar
    queries: Scalar
    seq_len: Scalar


def plan(cfg: Config, query_start_loc: Array, seq_lens: Array) -> Work:
    """Counts the work, in XLA; or does nothing, where the kernel counts."""
    if cfg.counts_in_kernel:
        return Work(*[jnp.zeros((1,), jnp.int32)] * 3)
    ends = jnp.append(query_start_loc[1:], cfg.problem.num_tokens)
    rows = Row(query_start_loc, jnp.maximum(ends - query_start_loc, 0), jnp.append(seq_lens, 0))
    wide, thin = (_sum_before(costs_of(rows, line, cfg))[-1] for line in cfg.lines)
    per_split, of_wide = shares(wide, thin, cfg)
    counts = {row: x for line in cfg.lines for row, x in counts_of(rows, per_split, line, cfg).items()}
    none = jnp.zeros_like(rows.start)
    table = jnp.stack([counts.get(row, none) for row in range(2 * COUNTED)])
    return Work(_sum_before(table), per_split[None], of_wide[None])


def costs_of(rows: Row, line: Line, cfg: Config) -> Array:
    """What all items of each sequence cost."""
    cost = tiles_of(rows, line, cfg) * (line.tile_cost * _length(rows, line, cfg) + line.item_cost)
    return cost.astype(jnp.float32) * float(cfg.problem.num_kv_heads)


def shares(wide, thin, cfg: Config) -> tuple[Any, Any]:
    """`per_split` and `of_wide` of a batch whose wide and thin items cost that much."""
    programs = cfg.tuning.num_programs
    share = lax.max((wide + thin) * (_SLACK / programs) + 1, jnp.float32(cfg.tuning.least_split))
    of_wide = (wide / lax.max(wide + thin, jnp.float32(1)) * programs + 0.5).astype(jnp.int32)
    of_wide = lax.max(of_wide, (wide > 0).astype(jnp.int32))
    of_wide = jnp.where(thin > 0, lax.min(of_wide, jnp.int32(programs - 1)), programs)
    return 1 / share, of_wide


def counts_of(rows: Row, per_split, line: Line, cfg: Config) -> dict[int, Array]:
    """By its row of the table: items, parts of split ones and turns of merging their rows, of each sequence."""
    items = tiles_of(rows, line, cfg) * cfg.problem.num_kv_heads
    if not cfg.splits(line):
        return {_row(ITEMS, line): items}
    splits = splits_of(rows, per_split, line, cfg)
    merges = _over(tokens_of(rows, line, cfg) * cfg.problem.num_heads + (cfg.merged_rows - 1), cfg.merged_rows)
    counts = {ITEMS: items * splits}
    counts |= {PLACES: jnp.where(splits > 1, items * splits, 0), MERGES: jnp.where(splits > 1, merges, 0)}
    return {_row(what, line): x for what, x in counts.items()}


def _row(what: int, line: Line) -> int:
    """The row of the table that has a count of a line."""
    return what + (0 if line.wide else COUNTED)


def _sum_before(x: Array) -> Array:
    """[..., n] -> [..., n + 1], the sums of all elements before each place, and of all."""
    count = x.shape[-1]
    earlier = jnp.arange(count)[None, :] < jnp.arange(count + 1)[:, None]
    earlier = earlier.reshape(*[1] * (x.ndim - 1), count + 1, count)
    return jnp.where(earlier, x[..., None, :], jnp.zeros_like(x)[..., None, :]).sum(axis=-1, dtype=x.dtype)


def total(what: int, line: Line, work: Work, cfg: Config) -> Scalar:
    """How many of ITEMS, PLACES or MERGES a line has."""
    return before(what, jnp.int32(cfg.problem.num_seqs + 1), line, work)


def before(what: int, seq: Scalar, line: Line, work: Work) -> Scalar:
    """How many of ITEMS, PLACES or MERGES come before a sequence."""
    return work.table[_row(what, line), seq]


def search(number: Scalar, what: int, line: Line, work: Work, cfg: Config) -> Scalar:
    """The sequence that has the number-th of ITEMS or MERGES, which the line must have."""
    seq = jnp.int32(0)  # the last one known to begin at or before the number
    step = 1 << (cfg.problem.num_seqs + 1).bit_length()
    while step := step // 2:
        further = lax.min(seq + step, jnp.int32(cfg.problem.num_seqs + 1))
        seq = jnp.where(before(what, further, line, work) <= number, further, seq)
    return seq


def find(number: Scalar, line: Line, work: Work, refs, cfg: Config) -> Item:
    """The item of a number in a line; its kind is 0 if the line has no such item."""
    problem = cfg.problem
    some = number < total(ITEMS, line, work, cfg)
    seq = lax.min(search(number, ITEMS, line, work, cfg), jnp.int32(problem.num_seqs))
    row = row_of(seq, refs, cfg)
    tiles, splits = tiles_of(row, line, cfg), splits_of(row, work.per_split[0], line, cfg)
    inside = number - before(ITEMS, seq, line, work)
    split, rest = lax.rem(inside, splits), lax.div(inside, splits)
    tile = tiles - 1 - lax.rem(rest, lax.max(tiles, jnp.int32(1)))
    head = lax.div(rest, lax.max(tiles, jnp.int32(1)))
    first = first_of(row, line, cfg) + tile * line.tokens
    tokens = lax.min(row.queries - first, jnp.int32(line.tokens))
    position = row.seq_len - row.queries + first
    low, high = _seen(row, position, tokens, cfg)
    context = _context(row, cfg)
    origin = lax.div(low, jnp.int32(line.run)) * line.run
    cached = jnp.where(low < context, _tiles(lax.min(high, context) - origin, line), 0)
    new_origin = lax.max(low, row.seq_len - row.queries) if cfg.prefix else high
    count = cached + _tiles(high - new_origin, line)
    share = lax.div(count + splits - 1, splits)
    begin = lax.min(split * share, count)
    return Item(
        kind=jnp.where(some, 1 if line.wide else 2, 0),
        kv_head=head,
        seq=lax.min(seq, jnp.int32(problem.num_seqs - 1)),
        first_token=row.start + first,
        tokens=tokens,
        position=position,
        origin=origin + begin * line.tile,
        low=low,
        high=high,
        end=_end(row, cfg),
        count=lax.min(share, count - begin),
        cached=lax.clamp(jnp.int32(0), cached - begin, lax.min(share, count - begin)),
        context=context,
        new_origin=new_origin + lax.max(begin - cached, jnp.int32(0)) * line.tile,
        place=jnp.where(splits > 1, before(PLACES, seq, line, work) + inside, -1)
        if cfg.splits(line)
        else jnp.int32(-1),
    )


class Span(NamedTuple):
    """The tokens of a tile, by their positions.

    Attributes:
      start: of its first token.
      high: rows see none from there on.
      end: there are values before it.
      is_new: whether it is of the new tokens' own arrays.
    """

    start: Scalar
    high: Scalar
    end: Scalar
    is_new: Any


def span_of(item: Item, i: Scalar, line: Line, cfg: Config) -> Span:
    """The tokens of the i-th tile of an item."""
    if not cfg.prefix:
        return Span(item.origin + i * line.tile, item.high, item.end, False)
    is_new = i >= item.cached
    start = jnp.where(is_new, item.new_origin + (i - item.cached) * line.tile, item.origin + i * line.tile)
    high, end = (jnp.where(is_new, x, lax.min(x, item.context)) for x in (item.high, item.end))
    return Span(start, high, end, is_new)


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
    wide = _over(row.queries, 2 * cfg.half)
    rest = row.queries - wide * (2 * cfg.half)
    if line.wide:
        return wide + (rest > cfg.half).astype(jnp.int32)
    return ((rest > 0) & (rest <= cfg.half)).astype(jnp.int32)


def first_of(row: Row, line: Line, cfg: Config) -> Scalar:
    """The first query token of a sequence that is in wide items, or in a thin one."""
    return jnp.int32(0) if line.wide else _over(row.queries, 2 * cfg.half) * (2 * cfg.half)


def tokens_of(row: Row, line: Line, cfg: Config) -> Scalar:
    """Query tokens of a sequence that are in wide items, or in a thin one."""
    wide = _over(row.queries, 2 * cfg.half) * (2 * cfg.half)
    rest = row.queries - wide
    if line.wide:
        return jnp.where(rest > cfg.half, row.queries, wide)
    return jnp.where(rest <= cfg.half, rest, 0)


def splits_of(row: Row, per_split: Scalar, line: Line, cfg: Config) -> Scalar:
    """Splits of each item of a sequence, as many as make none larger than a share; a little more does not count."""
    if not cfg.splits(line):
        return jnp.ones_like(row.seq_len)
    cost = (_length(row, line, cfg) * line.tile_cost).astype(jnp.float32)
    return _at_least((cost * per_split + 0.999).astype(jnp.int32), 1)


def _length(row: Row, line: Line, cfg: Config) -> Scalar:
    """Tiles of K and V that an item of the sequence sees, at most."""
    most = cfg.problem.max_seq_len
    if cfg.problem.sliding_window is not None:
        most = min(most, cfg.problem.sliding_window + line.tokens)
    return _tiles(-_at_least(-row.seq_len, -most), line) + (1 if cfg.prefix else 0)


def _seen(row: Row, position: Scalar, tokens: Scalar, cfg: Config) -> tuple[Scalar, Scalar]:
    """The tokens that query tokens from `position` on see: low <= t < high."""
    problem = cfg.problem
    high = _end(row, cfg)
    low = jnp.int32(0)
    if problem.causal:
        high = lax.min(high, position + tokens)
    if problem.sliding_window is not None:
        low = lax.max(position - (problem.sliding_window - 1), low)
    return lax.min(low, lax.max(high, jnp.int32(0))), lax.max(high, jnp.int32(0))


def _end(row: Row, cfg: Config) -> Scalar:
    """There are keys and values before it, in the cache or in arrays of their own."""
    return lax.max(lax.min(row.seq_len, jnp.int32(cfg.problem.max_seq_len)), jnp.int32(0))


def _context(row: Row, cfg: Config) -> Scalar:
    """Tokens in the cache."""
    if not cfg.prefix:
        return _end(row, cfg)
    return lax.max(lax.min(row.seq_len - row.queries, jnp.int32(cfg.problem.max_seq_len)), jnp.int32(0))


def _tiles(tokens: Scalar, line: Line) -> Scalar:
    return _at_least(_over(tokens + (line.tile - 1), line.tile), 0)


def _over(x: Any, n: int) -> Any:
    """x / n towards 0, of a scalar of the device or of an array of all sequences."""
    return lax.div(x, jnp.int32(n) if x.ndim == 0 else jnp.full_like(x, n))


def _at_least(x: Any, n: int) -> Any:
    return lax.max(x, jnp.int32(n) if x.ndim == 0 else jnp.full_like(x, n))
