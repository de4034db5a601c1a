"""Assigns tiles of K and V to programs.

The tokens of a work item (sequence, kv head) are cut into tiles. A split is a range of neighbouring tiles of one item:
all tiles of the item, a partition, or an even share. Usually each program has one split.

If lengths may be uneven, programs have queues. Each program first sums the lengths of the batch. The tiles of all
items, in order, are cut into even queues, one for each program that runs at once. A queue has the end of an item,
whole items, and the beginning of an item.

      items   |------ 0 ------|- 1 -|2|-------------- 3 --------------|---- 4 ----|
      queues  |     0     |     1     |     2     |     3     |     4     |   5   |

But if lengths turn out to be alike, and even splits of items (`Tuning.splits`) fill the GPU or are short, a program's
queue has one such split. Then there may be more programs than queues.
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.ptx import warps
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_least, at_most, cdiv, div
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP

# Each thread looks at all lengths if there are up to `_FEW_LENGTHS`. Of more, each lane of a warp looks at some, and
# the lanes put together what they found. Beyond `_MOST_IN_LANES`, a lane would hold more than 16 lengths in registers,
# so each thread looks at all of them in a loop. Only batches of 19 to 64 sequences were timed (benchmarks/LOG.md,
# "Queues cost a look and a merge").
_FEW_LENGTHS, _MOST_IN_LANES = 16, 512
_LENGTHS_IN_FLIGHT = 64  # lengths that each thread loads at a time where it looks at all of them

# Measured: benchmarks/LOG.md, "Even queues".
_ALIKE = 16  # lengths are alike if the longest is at most 1/16 longer than the mean

# Measured: benchmarks/LOG.md, "A batch of mostly nothing".
_LEAST_TILES = 4  # the least tiles of a queue; otherwise mostly empty batches would be cut too fine


class Item(NamedTuple):
    """A work item: a sequence and one of its kv heads, or one group of folded kv heads."""

    index: Scalar  # the item's index in the batch; items are in the order of the sequences
    seq: Scalar
    kv_head: Scalar


class Split(NamedTuple):
    """Neighbouring tiles of a work item, for one program."""

    item: Item
    seq_len: Scalar
    origin: Scalar  # the first token of the first tile
    begin: Scalar  # the query sees begin <= token < end; `begin` may be before `origin`
    end: Scalar
    num_tiles: Scalar
    number: Scalar  # 0 for the item's first split, above 0 for the others
    partial: Scalar  # the index of its partial result, unless it is a whole item

    @property
    def is_first(self) -> Scalar:
        """Whether the split is the first one of its item."""
        return self.number == 0


class Queue(NamedTuple):
    """The rest of a program's queue: `tiles_left` tiles, from tile `tile` of an item on."""

    seq: Scalar
    kv_head: Scalar
    tile: Scalar
    tiles_left: Scalar
    partial: Scalar  # the index of the next split's partial result

    @property
    def has_more(self) -> Scalar:
        """Whether anything is left."""
        return self.tiles_left > 0


class QueuedSplit(NamedTuple):
    """The next split of a queue, and its role in its item."""

    split: Split
    is_last: Scalar
    is_whole: Scalar  # whether it is the item's only split


class QueryTile(NamedTuple):
    """The query heads of an item."""

    index: Scalar  # the item's index among the items of all queries
    out_row: Scalar  # the row of the item's first result
    is_there: Scalar  # whether the item has a query, and results


def split_of(seq_lens_gmem, index: Scalar, number: Scalar, geometry: Geometry) -> Split:
    """Split `number` of item `index`; it may be empty."""
    size, splits = geometry.problem.partition_size, geometry.tuning.splits
    item = item_of(index, geometry)
    seq_len = seq_lens_gmem[item.seq]
    begin, end = _visible(seq_len, geometry)
    if size:
        begin = lax.max(begin, number * size)
        end = lax.min(end, (number + 1) * size)
    origin = _first_run(begin, geometry)
    if splits > 1 and not size:
        tokens = cdiv(cdiv(end - origin, geometry.tile_tokens), splits) * geometry.tile_tokens
        origin += number * tokens
        end = lax.min(end, origin + tokens)
    num_tiles = cdiv(end - origin, geometry.tile_tokens)
    return Split(item, seq_len, origin, begin, end, num_tiles, number, index * splits + number)


def item_of(index: Scalar, geometry: Geometry) -> Item:
    """The item of this index."""
    items_per_seq = jnp.int32(geometry.items_per_seq)
    return Item(index, lax.div(index, items_per_seq), lax.rem(index, items_per_seq))


def queue_of(seq_lens_gmem, program: Scalar, geometry: Geometry) -> Queue:
    """A program's queue."""
    total, longest = _total_and_longest(seq_lens_gmem, geometry)
    total_of_items = total * geometry.items_per_seq
    even = functools.partial(_even_queue, seq_lens_gmem, program, total_of_items, geometry)
    if not geometry.tuning.splits:
        return even()
    alike = _ALIKE * longest * geometry.problem.num_seqs <= (_ALIKE + 1) * total
    one_split = functools.partial(_queue_of_one_split, seq_lens_gmem, program, geometry)
    return lax.cond(alike, one_split, even)


def _queue_of_one_split(seq_lens_gmem, program: Scalar, geometry: Geometry) -> Queue:
    """A queue of one even split of an item."""
    splits = jnp.int32(geometry.tuning.splits)
    item, number = item_of(lax.div(program, splits), geometry), lax.rem(program, splits)
    num_tiles = _num_tiles(seq_lens_gmem[item.seq], geometry)
    tiles_each = cdiv(num_tiles, splits)
    first = lax.min(number * tiles_each, num_tiles)
    return Queue(item.seq, item.kv_head, first, lax.min(tiles_each, num_tiles - first), 2 * program)


def _even_queue(seq_lens_gmem, program: Scalar, total: Scalar, geometry: Geometry) -> Queue:
    """An even share of the `total` tiles of all items; empty for programs beyond the queues."""
    queues = jnp.int32(geometry.tuning.queues)
    size, left_over = lax.div(total, queues), lax.rem(total, queues)

    def cut(number):  # the first tile of queue `number`
        number = lax.min(number, queues)
        even = number * size + lax.div(number * left_over, queues)
        return jnp.where(size < _LEAST_TILES, lax.min(number * _LEAST_TILES, total), even)

    first, end = cut(program), cut(program + 1)
    seq, before = _sequence_at(seq_lens_gmem, first, geometry)
    num_tiles = _num_tiles(seq_lens_gmem[lax.min(seq, jnp.int32(geometry.problem.num_seqs - 1))], geometry)
    kv_head, tile = lax.div(first - before, num_tiles), lax.rem(first - before, num_tiles)
    return Queue(seq, kv_head, tile, end - first, 2 * program)


def for_each_tile[S](step: Callable[[Scalar, S], S], num_tiles: Scalar, first: S, geometry: Geometry) -> S:
    """Folds `step` over a split's tiles, from `first` on.

    Where splits have one tile there is no loop. In a loop, ptxas would compute the addresses of all parts of the tile
    ahead, and keep them in registers: with heads of 256 these spill.
    """
    if geometry.splits_have_one_tile:
        return lax.cond(num_tiles > 0, functools.partial(step, jnp.int32(0)), lambda state: state, first)
    return lax.fori_loop(0, num_tiles, step, first)


def for_each_split(do: Callable[[QueuedSplit, Scalar, Queue], None], queue: Queue, seq_lens_gmem, geometry: Geometry):
    """Calls `do` with each split of a queue, the number of tiles before it, and the rest of the queue after it.

    Returns the number of tiles of all splits.
    """

    def step(state):
        queue, tiles_before = state
        queued = next_split(seq_lens_gmem, queue, geometry)
        left = after_split(seq_lens_gmem, queue, geometry)
        do(queued, tiles_before, left)
        return left, tiles_before + queued.split.num_tiles

    return lax.while_loop(lambda state: state[0].has_more, step, (queue, jnp.int32(0)))[1]


def next_split(seq_lens_gmem, queue: Queue, geometry: Geometry) -> QueuedSplit:
    """The first split of the rest of a queue, which must not be empty."""
    seq_len = seq_lens_gmem[queue.seq]
    item_tiles = _num_tiles(seq_len, geometry)
    tiles = lax.min(item_tiles - queue.tile, queue.tiles_left)
    begin, end = _visible(seq_len, geometry)
    origin = _first_run(begin, geometry) + queue.tile * geometry.tile_tokens
    end = lax.min(end, origin + tiles * geometry.tile_tokens)
    item = Item(queue.seq * geometry.items_per_seq + queue.kv_head, queue.seq, queue.kv_head)
    number = jnp.where(queue.tile == 0, 0, 1)
    is_last = queue.tile + tiles == item_tiles
    is_whole = is_last & (queue.tile == 0)
    num_tiles = cdiv(end - origin, geometry.tile_tokens)  # 0 for an empty sequence, which also has an item in a queue
    split = Split(item, seq_len, origin, begin, end, num_tiles, number, queue.partial)
    return QueuedSplit(split, is_last, is_whole)


def after_split(seq_lens_gmem, queue: Queue, geometry: Geometry) -> Queue:
    """The rest of a queue after its first split."""
    tiles_left = queue.tile + queue.tiles_left - _num_tiles(seq_lens_gmem[queue.seq], geometry)
    seq_done = queue.kv_head + 1 == geometry.items_per_seq
    seq, kv_head = queue.seq + seq_done.astype(jnp.int32), jnp.where(seq_done, 0, queue.kv_head + 1)
    return Queue(seq, kv_head, jnp.int32(0), tiles_left, queue.partial | 1)


def partial_of(first: Scalar, number: Scalar, geometry: Geometry) -> Scalar:
    """The index of the partial result of an item's split `number`; `first` is the index for split 0.

    A program with a queue has two partial results: an even index for its first split, and the next index for its last.
    An item continues as the first split of each following program.
    """
    if not geometry.tuning.queues:
        return first + number
    return jnp.where(number == 0, first, (lax.div(first, jnp.int32(2)) + number) * 2)


def num_queued_splits(last_program: Scalar, first_partial: Scalar) -> Scalar:
    """The number of an item's splits, from its first partial result and the program that has its last split."""
    return last_program - lax.div(first_partial, jnp.int32(2)) + 1


def num_splits(seq_len: Scalar, geometry: Geometry) -> Scalar:
    """The number of an item's splits without queues; v2's empty splits do not count."""
    if not geometry.problem.partition_size:
        return jnp.int32(geometry.tuning.splits)
    return cdiv(lax.min(seq_len, jnp.int32(geometry.problem.max_seq_len)), geometry.problem.partition_size)


def query_tile(of: Item | Queue, query_indices_gmem, geometry: Geometry) -> QueryTile:
    """The query tile of an item, or of a queue's first item. An item without a query gets an arbitrary one."""
    query, is_there = of.seq, True
    if query_indices_gmem is not None:
        query = query_indices_gmem[of.seq]
        is_there = query >= 0
        query = lax.max(query, jnp.int32(0))
    index = query * geometry.items_per_seq + of.kv_head
    return QueryTile(index, index * geometry.heads_per_item, is_there)


def _visible(seq_len: Scalar, geometry: Geometry) -> tuple[Scalar, Scalar]:
    """The tokens that a sequence's query sees: begin <= token < end."""
    begin, end = jnp.int32(0), at_most(seq_len, geometry.problem.max_seq_len)
    if geometry.problem.sliding_window is not None:
        begin = at_least(seq_len - geometry.problem.sliding_window, 0)
    return begin, end


def _first_run(begin: Scalar, geometry: Geometry) -> Scalar:
    """The first token of the run that contains `begin`."""
    return div(begin, geometry.run_tokens) * geometry.run_tokens


def _num_tiles(seq_len: Scalar, geometry: Geometry) -> Scalar:
    """The number of an item's tiles in queues. An empty sequence has one, so that a program stores its results."""
    begin, end = _visible(seq_len, geometry)
    return at_least(cdiv(end - _first_run(begin, geometry), geometry.tile_tokens), 1)


def _total_and_longest(seq_lens_gmem, geometry: Geometry) -> tuple[Scalar, Scalar]:
    """The tiles of all sequences together, and those of the longest one, where a sequence has one item."""

    def add(_, seq_len, carry):
        total, longest = carry
        num_tiles = _num_tiles(seq_len, geometry)
        return total + num_tiles, lax.max(longest, num_tiles)

    if not _in_lanes(geometry):
        return _over_lengths(seq_lens_gmem, add, (jnp.int32(0), jnp.int32(0)), geometry)
    tiles = _tiles_in_lanes(seq_lens_gmem, geometry)
    total = warps.lane_of(warps.sums_of_warp(functools.reduce(operator.add, tiles)), WARP - 1)
    return total, warps.largest(functools.reduce(lax.max, tiles))


def _sequence_at(seq_lens_gmem, first: Scalar, geometry: Geometry) -> tuple[Scalar, Scalar]:
    """The sequence that holds tile `first` of all items, and the tiles before the sequence."""

    def search(seq, seq_len, carry):
        after, (found, before) = carry[0] + _num_tiles(seq_len, geometry) * geometry.items_per_seq, carry[1]
        past = first >= after
        return after, (jnp.where(past, seq + 1, found), jnp.where(past, after, before))

    if not _in_lanes(geometry):
        zero = jnp.int32(0)
        return _over_lengths(seq_lens_gmem, search, (zero, (zero, zero)), geometry)[1]
    tiles = [x * geometry.items_per_seq for x in _tiles_in_lanes(seq_lens_gmem, geometry)]
    own = functools.reduce(operator.add, tiles)
    sums = warps.sums_of_warp(own)
    # Each lane searches its own sequences. Only the first lane whose last tile comes after tile `first` can find it.
    before = after = sums - own
    seq = _first_of_lane(geometry)
    for num_tiles in tiles:
        after = after + num_tiles
        past = after <= first
        seq, before = seq + past.astype(jnp.int32), jnp.where(past, after, before)
    lane = at_most(warps.number_at_most(sums, first), WARP - 1)
    return warps.lane_of(seq, lane), warps.lane_of(before, lane)


def _in_lanes(geometry: Geometry) -> bool:
    """Whether the lanes of each warp share the lengths among them."""
    return _FEW_LENGTHS < geometry.problem.num_seqs <= _MOST_IN_LANES


def _tiles_in_lanes(seq_lens_gmem, geometry: Geometry) -> list[Array]:
    """For each of a lane's sequences, an array of the tiles of one item; 0 past the last sequence."""
    num_seqs, first = geometry.problem.num_seqs, _first_of_lane(geometry)
    lens = [warps.gather(seq_lens_gmem, first + i, num_seqs - 1) for i in range(_seqs_of_lane(geometry))]
    return [jnp.where(first + i < num_seqs, _num_tiles(x, geometry), 0) for i, x in enumerate(lens)]


def _first_of_lane(geometry: Geometry) -> Array:
    """The first of each lane's sequences, which are neighbours."""
    return (warps.iota() & (WARP - 1)) * _seqs_of_lane(geometry)


def _seqs_of_lane(geometry: Geometry) -> int:
    """How many sequences each lane looks at; there may be none for the last lanes."""
    return pl.cdiv(geometry.problem.num_seqs, WARP)


def _over_lengths(seq_lens_gmem, step, carry, geometry: Geometry):
    """Folds `step` over the lengths of all sequences in order, with many loads in flight."""
    whole, left_over = divmod(geometry.problem.num_seqs, _LENGTHS_IN_FLIGHT)

    def some(first, count: int, carry):
        for i, seq_len in enumerate([seq_lens_gmem[first + i] for i in range(count)]):
            carry = step(first + i, seq_len, carry)
        return carry

    if whole:
        carry = lax.fori_loop(0, whole, lambda i, carry: some(i * _LENGTHS_IN_FLIGHT, _LENGTHS_IN_FLIGHT, carry), carry)
    return some(whole * _LENGTHS_IN_FLIGHT, left_over, carry)
