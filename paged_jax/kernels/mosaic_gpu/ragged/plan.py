"""Work items of ragged attention, and the tokens of K and V that an item sees.

The query tokens of a sequence are cut into tiles. A work item is such a tile with all heads of one kv head's group:

    wide    up to wide_tokens tokens: each computing warpgroup has a band of 64 rows, and all read every tile of K and V
    thin    up to band_tokens tokens, 64 rows: two warpgroups have the same rows and take alternate tiles of K and V

Only the last query tile of a sequence may be thin. If it is wide, its last bands may have no queries, and compute 0.
But if `max_query_len` is small, all query tiles are thin, which halves the kernel's code. Rows past the last sequence
are padding; they are in no item, and `kernel.py` clears them.

The items of each kind are numbered: by sequence in the order of `count.py`, then by groups of kv heads, then by query
tile, then by kv head. The last query tile comes first, because it sees most tokens. A group has as few heads as fill
one or two waves of programs, so that few heads are in L2 at a time, and the last items are short. If fewer heads would
be left over, one group has all heads. An item that costs more than a share of all work is cut into splits of the
context, and each split is an item of its own. `count.py` chooses the share and counts the items before each sequence.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_least, cdiv
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths
from paged_jax.kernels.mosaic_gpu.ragged import count
from paged_jax.kernels.mosaic_gpu.ragged import sequence as sequences
from paged_jax.kernels.mosaic_gpu.ragged.arithmetic import quotient
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.pattern import Pattern, pattern_of, rank_of, token_of
from paged_jax.kernels.mosaic_gpu.ragged.refs import Counted, Counts
from paged_jax.kernels.mosaic_gpu.ragged.sequence import Sequence

WHOLE = -1
"""`Item.partial` of an item that is not split."""


class Item(NamedTuple):
    """A work item, or one of its splits."""

    kind: Scalar  # NO_ITEM, WIDE or THIN
    kv_head: Scalar
    seq: Scalar  # row of the block tables
    first_token: Scalar  # row of the batch
    num_tokens: Scalar  # query tokens
    position: Scalar  # the first query token's position in its sequence
    origin: Scalar  # the rank of the first token in the first tile
    begin: Scalar  # some row sees begin <= token < end; `begin` may be before the first tile
    end: Scalar
    values_end: Scalar  # tokens before this one have keys and values
    num_tiles: Scalar
    cached_tiles: Scalar  # tiles from the cache, which come first; the others are of new tokens
    context_len: Scalar  # tokens in the cache
    new_origin: Scalar  # the rank of the first token in the first tile of new tokens
    partial: Scalar  # the index of the partial result, or WHOLE
    first_partial: Scalar  # of all splits of the item, or WHOLE
    splits: Scalar  # the number of the item's splits


class Span(NamedTuple):
    """The tokens of a tile, as positions in the sequence."""

    rank: Scalar  # the first token's rank
    starts: tuple[Scalar, ...]  # row r of the tile is token starts[s] + r, if r is in segment s
    begin: Scalar  # no row sees tokens before this one
    end: Scalar  # no row sees tokens from this one on
    values_end: Scalar  # tokens before this one have keys and values
    is_new: Any  # whether the tile comes from the arrays of new tokens
    pattern: Pattern | None  # the item's pattern


class _Context(NamedTuple):
    """All tokens of K and V that an item sees, before it is split."""

    begin: Scalar
    end: Scalar
    context_len: Scalar
    origin: Scalar
    cached_tiles: Scalar
    new_origin: Scalar
    num_tiles: Scalar


def exists(number: Scalar, counts: Counts, kind: ItemKind) -> Scalar:
    """Whether there is an item number `number`."""
    return number < count.total(Counted.ITEMS, kind, counts)


def find(number: Scalar, counts: Counts, lengths_gmem: Lengths, kind: ItemKind) -> Item:
    """Describes item number `number`, which exists."""
    problem, num_items = kind.geometry.problem, count.total(Counted.ITEMS, kind, counts)
    ordinal = count.search(number, kind, counts)
    seq = count.sequence_at(ordinal, counts, kind.geometry)
    sequence = sequences.existing(seq, lengths_gmem)
    splits = count.num_splits(ordinal, kind, counts)
    of_sequence = number - count.before(Counted.ITEMS, ordinal, kind, counts)
    unsplit = quotient(of_sequence, splits, kind)
    split = of_sequence - unsplit * splits
    if kind.has_several:
        query_tile, kv_head = _tile_and_head(
            unsplit, at_least(sequences.query_tiles(sequence, kind), 1), num_items, kind
        )
    else:
        query_tile, kv_head = jnp.int32(0), unsplit
    first = sequences.first_query(sequence, kind) + query_tile * kind.tokens
    num_tokens = lax.min(sequence.query_len - first, jnp.int32(kind.tokens))
    position = sequence.seq_len - sequence.query_len + first
    context = _context(sequence, position, num_tokens, kv_head, kind)
    tiles_each = quotient(context.num_tiles + splits - 1, splits, kind)
    first_tile = lax.min(split * tiles_each, context.num_tiles)
    first_partial = jnp.int32(WHOLE)
    if kind.may_split:
        before = count.before(Counted.PARTIALS, ordinal, kind, counts) + unsplit * splits
        first_partial = jnp.where(splits > kind.geometry.splits_of_whole, before, first_partial)
    return Item(
        kind=jnp.int32(kind.code),
        kv_head=kv_head,
        seq=seq,
        first_token=sequence.first_token + first,
        num_tokens=num_tokens,
        position=position,
        origin=context.origin + first_tile * kind.tile,
        begin=context.begin,
        end=context.end,
        # The last tile may hold tokens from `end` on. They usually have values, because later queries see them. If
        # queries see stripes only, no query may see these tokens, and their values may be NaN.
        values_end=context.end if kind.geometry.sees_stripes_only else sequences.values_end(sequence, problem),
        num_tiles=lax.min(tiles_each, context.num_tiles - first_tile),
        cached_tiles=lax.clamp(
            jnp.int32(0), context.cached_tiles - first_tile, lax.min(tiles_each, context.num_tiles - first_tile)
        ),
        context_len=context.context_len,
        new_origin=context.new_origin + at_least(first_tile - context.cached_tiles, 0) * kind.tile,
        partial=first_partial + split,  # a whole item is its only split
        first_partial=first_partial,
        splits=splits,
    )


def query_of(item: Item, geometry: Geometry) -> Scalar:
    """The row of the query that holds an item's first query token."""
    if not geometry.merges_copies:
        return item.first_token
    return lax.rem(item.first_token, jnp.int32(geometry.problem.num_queries))


def _tile_and_head(number: Scalar, query_tiles: Scalar, num_items: Scalar, kind: ItemKind) -> tuple[Scalar, Scalar]:
    """The query tile and the kv head of an item of a sequence."""
    heads, first_head = jnp.int32(kind.geometry.problem.num_kv_heads), jnp.int32(0)
    if kind.may_divide_heads:
        together = sequences.heads_together(query_tiles, num_items, kind)
        group = quotient(number, together * query_tiles, kind)
        first_head, number = group * together, number - group * (together * query_tiles)
        heads = lax.min(together, heads - first_head)
    later_tiles = quotient(number, heads, kind) if kind.may_divide_heads else lax.div(number, heads)
    return query_tiles - 1 - later_tiles, first_head + (number - later_tiles * heads)


def _context(sequence: Sequence, position: Scalar, num_tokens: Scalar, kv_head: Scalar, kind: ItemKind) -> _Context:
    """The context of a query tile that begins at `position`: tiles of the cache, then tiles of new tokens."""
    geometry, align = kind.geometry, kind.origin_alignment
    begin, end = sequences.visible(sequence, position, num_tokens, geometry.problem)
    context_len = sequences.context_len(sequence, geometry)
    pattern = pattern_of(kv_head, position, begin, end, geometry)
    first, last = (rank_of(token, pattern, geometry) for token in (begin, end))
    origin = lax.div(first, jnp.int32(align)) * align
    has_cached, cached_end = begin < context_len, lax.min(end, context_len)
    cached_tiles = jnp.where(has_cached, cdiv(rank_of(cached_end, pattern, geometry) - origin, kind.tile), 0)
    new_origin = last
    if geometry.problem.prefix:
        new_origin = rank_of(lax.max(begin, sequence.seq_len - sequence.query_len), pattern, geometry)
        if pattern is not None:
            new_origin = lax.div(new_origin, jnp.int32(align)) * align
    num_tiles = cached_tiles + cdiv(last - new_origin, kind.tile)
    return _Context(begin, end, context_len, origin, cached_tiles, new_origin, num_tiles)


def span_of(item: Item, tile: Scalar, kind: ItemKind) -> Span:
    """The tokens of an item's tile."""
    pattern, begin, end, values_end = pattern_of_item(item, kind), item.begin, item.end, item.values_end
    if not kind.geometry.problem.prefix:
        is_new, rank = False, item.origin + tile * kind.tile
    else:
        is_new = tile >= item.cached_tiles
        new_rank = item.new_origin + (tile - item.cached_tiles) * kind.tile
        rank = jnp.where(is_new, new_rank, item.origin + tile * kind.tile)
        end, values_end = (jnp.where(is_new, x, lax.min(x, item.context_len)) for x in (end, values_end))
        if pattern is not None:  # the first tile of new tokens may begin with cached ones
            begin = jnp.where(is_new, lax.max(begin, item.context_len), begin)
    firsts = range(0, kind.tile, kind.segment_tokens)
    starts = tuple(token_of(rank + first, pattern, kind.geometry) - first for first in firsts)
    return Span(rank, starts, begin, end, values_end, is_new, pattern)


def pattern_of_item(item: Item, kind: ItemKind) -> Pattern | None:
    """The block-sparse pattern of an item, if there is one."""
    return pattern_of(item.kv_head, item.position, item.begin, item.end, kind.geometry)


def num_whole_tiles(item: Item, kind: ItemKind) -> Scalar:
    """The number of an item's tiles in which every token has a key and a value."""
    end = rank_of(item.values_end, pattern_of_item(item, kind), kind.geometry)
    return lax.div(end - item.origin, jnp.int32(kind.tile))
