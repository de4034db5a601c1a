"""Assigns rows and tiles to programs.

A query token has a row for each of its heads. The rows of a sequence lie one after the other and are cut into row
blocks of 64. An item is `width` neighbouring row blocks, which share each tile of the sequence. The tiles of all items,
one item after the other, are cut into even queues. `width` programs have one queue:

      items   |------ 0 ------|- 1 -|2|-------------- 3 --------------|---- 4 ----|
      queues  |     0     |     1     |     2     |     3     |     4     |   5   |

The programs of a queue are neighbours and attend to the same tiles at about the same time, each with its own row block.
A queue cuts at most two items, so it has at most two partial results. The last split of an item that is cut closes the
item: its program tells the merge where the item's partial results lie.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_least, at_most, cdiv, div
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths
from paged_jax.kernels.mosaic_gpu.mla.geometry import TILE, Geometry
from paged_jax.kernels.mosaic_gpu.mla.ptx import warps

_IN_FLIGHT = 4  # sequences whose lengths a lane loads before it waits for them
_LEAST_TILES = 4  # the least tiles of a queue; otherwise a small batch would be cut too fine


class Sequence(NamedTuple):
    """The facts of a sequence that the plan needs."""

    first_row: Scalar
    num_rows: Scalar
    context_len: Scalar  # the number of tokens before the first query
    limit: Scalar  # no query sees tokens from here on
    items: Scalar
    tiles: Scalar  # tiles of each item, at least one, so that some program stores its results


class Queue(NamedTuple):
    """The rest of a program's queue: `left` tiles, from tile `tile` of an item on."""

    number: Scalar
    seq: Scalar
    item: Scalar  # the item's index in its sequence
    tile: Scalar
    left: Scalar
    partial: Scalar  # the index of the next partial result


class Split(NamedTuple):
    """Neighbouring tiles of an item, for one of its row blocks."""

    seq: Scalar
    item: Scalar  # the item's index in its sequence
    row: Scalar  # the first row of the row block
    num_rows: Scalar  # rows of the row block; 0 if the row block does not exist
    first_row: Scalar  # `row`, counted from the sequence's first row
    context_len: Scalar
    limit: Scalar
    end: Scalar  # one past the last token that a row of the row block sees
    tile: Scalar  # the first tile
    num_tiles: Scalar  # tiles that the row block sees
    is_whole: Scalar
    closes: Scalar  # whether it is the last split of an item that queues have cut
    partial: Scalar


class Closing(NamedTuple):
    """Where the partial results of a closed item lie."""

    first_partial: Scalar
    num_splits: Scalar


def total_tiles(lengths_gmem: Lengths, geometry: Geometry) -> Scalar:
    """The number of tiles of all items."""

    def step(tiles, sums):
        return sums + tiles

    return warps.total(_over_sequences(lengths_gmem, step, _zeros(), geometry))


def queue_of(lengths_gmem: Lengths, number: Scalar, total: Scalar, geometry: Geometry) -> Queue:
    """Queue `number` of the queues that share `total` tiles."""
    first, end = (_cut(total, number + i, geometry) for i in range(2))

    def search(tiles, carry):
        """Finds the number of sequences that end at tile `first` or before, and where the last of them ends."""
        before, seqs, ends = carry
        after = warps.sums_to_here(tiles) + before
        is_past = after <= first
        ends = lax.max(ends, jnp.where(is_past, after, 0))
        return before + warps.total(tiles), seqs + is_past.astype(jnp.int32), ends

    _, seqs, ends = _over_sequences(lengths_gmem, search, (jnp.int32(0), _zeros(), _zeros()), geometry)
    last = jnp.int32(_num_sequences(geometry) - 1)
    seq, before = lax.min(warps.total(seqs), last), warps.largest(ends)
    tiles = sequence_of(lengths_gmem, seq, geometry).tiles
    within = first - before
    return Queue(number, seq, lax.div(within, tiles), lax.rem(within, tiles), end - first, 2 * number)


def for_each_split(
    do: Callable[[Split, Any], Any], carry: Any, lengths_gmem: Lengths, queue: Queue, block: Scalar, geometry: Geometry
) -> Any:
    """Calls `do(split, carry)` with each split of a queue, for program `block` of it; `do` returns the next carry."""

    def step(state):
        queue, carry = state
        seq = lax.while_loop(
            lambda seq: sequence_of(lengths_gmem, seq, geometry).items == 0, lambda seq: seq + 1, queue.seq
        )
        queue = queue._replace(seq=seq)
        s = sequence_of(lengths_gmem, seq, geometry)
        tiles = lax.min(s.tiles - queue.tile, queue.left)
        carry = do(_split_of(queue, s, tiles, block, geometry), carry)
        done = queue.item + 1 == s.items
        after = Queue(
            number=queue.number,
            seq=seq + done.astype(jnp.int32),
            item=jnp.where(done, 0, queue.item + 1),
            tile=jnp.int32(0),
            left=queue.left - tiles,
            partial=queue.partial | 1,
        )
        return after, carry

    return lax.while_loop(lambda state: state[0].left > 0, step, (queue, carry))[1]


def sequence_of(lengths_gmem: Lengths, seq: Scalar, geometry: Geometry) -> Sequence:
    """The facts of a sequence that the plan needs."""
    return _sequence(*_lengths_of(lengths_gmem, seq, geometry), geometry)


def _num_sequences(geometry: Geometry) -> int:
    """The number of sequences. If there may be padding rows, they are one more sequence, without tokens."""
    return geometry.problem.num_seqs + (0 if geometry.one_query else 1)


def _lengths_of(lengths_gmem: Lengths, seq: Scalar, geometry: Geometry) -> tuple[Scalar, Scalar, Scalar]:
    """A sequence's length, and where its queries begin and end."""
    if geometry.one_query:
        return lengths_gmem.seq_lens[seq], seq, seq + 1
    num_seqs, starts_gmem = jnp.int32(geometry.problem.num_seqs), lengths_gmem.query_start_loc
    is_padding = seq == num_seqs
    seq_len = lengths_gmem.seq_lens[lax.min(seq, num_seqs - 1)]
    stop = starts_gmem[lax.min(seq + 1, num_seqs)]
    stop = jnp.where(is_padding, geometry.problem.num_tokens, stop)
    return jnp.where(is_padding, 0, seq_len), starts_gmem[seq], stop


def _lengths_of_lanes(lengths_gmem: Lengths, seqs: Array, geometry: Geometry) -> tuple[Array, Array, Array]:
    """As `_lengths_of`, for a sequence in each lane."""
    last = geometry.problem.num_seqs - 1
    seq_lens = warps.gather(lengths_gmem.seq_lens, seqs, last)
    if geometry.one_query:
        return seq_lens, seqs, seqs + 1
    starts = warps.gather(lengths_gmem.query_start_loc, seqs, last + 1)
    stops = warps.gather(lengths_gmem.query_start_loc, seqs + 1, last + 1)
    stops = jnp.where(seqs > last, geometry.problem.num_tokens, stops)
    return jnp.where(seqs > last, 0, seq_lens), starts, stops


def _sequence(seq_len: Scalar, start: Scalar, stop: Scalar, geometry: Geometry) -> Sequence:
    num_rows = (stop - start) * geometry.heads
    limit = at_most(seq_len, geometry.problem.max_seq_len)
    items = cdiv(num_rows, WGMMA_ROWS * geometry.tuning.width)
    tiles = at_least(cdiv(limit, TILE), 1)
    return Sequence(start * geometry.heads, num_rows, seq_len - (stop - start), limit, items, tiles)


def _split_of(queue: Queue, s: Sequence, tiles: Scalar, block: Scalar, geometry: Geometry) -> Split:
    """The next split of a queue, `tiles` tiles of its item, for row block `block`."""
    first_row = (queue.item * geometry.tuning.width + block) * WGMMA_ROWS
    num_rows = lax.clamp(jnp.int32(0), s.num_rows - first_row, jnp.int32(WGMMA_ROWS))
    end = s.limit
    if geometry.problem.causal and not geometry.one_query:
        last_query = div(first_row + at_least(num_rows, 1) - 1, geometry.heads)
        end = lax.min(end, s.context_len + last_query + 1)
    end = jnp.where(num_rows > 0, at_least(end, 0), 0)
    num_tiles = lax.clamp(jnp.int32(0), cdiv(end, TILE) - queue.tile, tiles)
    is_last = queue.tile + tiles == s.tiles
    return Split(
        seq=queue.seq,
        item=queue.item,
        row=s.first_row + first_row,
        num_rows=num_rows,
        first_row=first_row,
        context_len=s.context_len,
        limit=s.limit,
        end=end,
        tile=queue.tile,
        num_tiles=num_tiles,
        is_whole=is_last & (queue.tile == 0),
        closes=is_last & (queue.tile > 0),
        partial=queue.partial,
    )


def closing_of(number: Scalar, tile: Scalar, total: Scalar, geometry: Geometry) -> Closing:
    """Locates the partial results of the item that queue `number` closes. `tile` is its first tile in the queue."""
    begin = _cut(total, number, geometry) - tile
    opener = _queue_at(total, begin, number, geometry)
    has_others = _cut(total, opener, geometry) != begin  # whether the queue has tiles before the item
    return Closing(2 * opener + has_others.astype(jnp.int32), number - opener + 1)


def _cut(total: Scalar, number: Scalar, geometry: Geometry) -> Scalar:
    """The first tile of queue `number`, counted over all items."""
    queues = jnp.int32(geometry.tuning.queues)
    number = lax.min(number, queues)
    size, left_over = lax.div(total, queues), lax.rem(total, queues)
    even = number * size + lax.div(number * left_over, queues)
    return jnp.where(size < _LEAST_TILES, lax.min(number * _LEAST_TILES, total), even)


def _queue_at(total: Scalar, tile: Scalar, most: Scalar, geometry: Geometry) -> Scalar:
    """The last queue that begins at this tile or before. Queue `most` begins at this tile or after."""
    size = at_least(lax.div(total, jnp.int32(geometry.tuning.queues)), _LEAST_TILES)
    guess = lax.min(most, lax.div(tile, size))
    return lax.while_loop(lambda number: _cut(total, number, geometry) > tile, lambda number: number - 1, guess)


def partial_of(first: Scalar, number: Scalar) -> Scalar:
    """The index of the partial result of an item's split `number`; `first` is the index for split 0."""
    return jnp.where(number == 0, first, (lax.div(first, jnp.int32(2)) + number) * 2)


def _over_sequences(lengths_gmem: Lengths, step: Callable, carry: Any, geometry: Geometry) -> Any:
    """Folds `step(tiles, carry)` over all sequences in order. Each lane of a warp has the tiles of one sequence."""
    lanes, end = warps.lane_numbers(), _num_sequences(geometry)
    whole, left_over = divmod(pl.cdiv(end, WARP), _IN_FLIGHT)

    def some(first, count: int, carry):
        seqs = [lanes + (first + i) * WARP for i in range(count)]
        lengths = [_lengths_of_lanes(lengths_gmem, x, geometry) for x in seqs]
        for x, of_lanes in zip(seqs, lengths, strict=True):
            s = _sequence(*of_lanes, geometry)
            carry = step(jnp.where(x < end, s.items * s.tiles, 0), carry)
        return carry

    if whole:
        carry = lax.fori_loop(0, whole, lambda i, carry: some(i * _IN_FLIGHT, _IN_FLIGHT, carry), carry)
    return some(whole * _IN_FLIGHT, left_over, carry)


def _zeros() -> Array:
    """A zero in each lane."""
    return jnp.zeros_like(warps.lane_numbers())
