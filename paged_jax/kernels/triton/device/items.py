"""Device code: a small kernel cuts a ragged batch into items, by lengths that only the device knows.

An item is one tile of queries and one split of the tokens that they see. The host knows how many items there can be,
and launches as many programs of the kernel that attends, one for each item. The kernel in this file describes the
items:

    sequence   tiles of queries x splits              items
    long       [0 1 2 3] x 3                          0 ... 11     those with long contexts start first
    short      [0] x 1                                12
    padding    [0 1] x 1                              13, 14       query rows past the last sequence: they see nothing
                                                      15 ...       nothing: such a program ends at once

A context is split if it has more tiles than a split may have. This limit (`_sizes`) is the work of all tiles of
queries, divided by the number of items that run at once, so splits are short in small batches. Splits do not depend on
the order of the sequences. If queries alone fill the GPU, nothing is split, no plan is made, and `tile_of` finds the
tiles.

Grid: one program for every `cfg.tuning.plan` items. Each program reads all lengths, `cfg.tuning.scan` at a time, adds
up the work, and finds its items. `cfg` is a `tuning.AttentionKernel`.
"""

# Without triton installed, pyright takes this folder for that package.
# pyright: reportAttributeAccessIssue=false

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

from paged_jax.kernels.triton.ragged_tuning import ITEM_FIELDS

_FIELDS = tl.constexpr(ITEM_FIELDS)


class RaggedBatch(NamedTuple):
    """Pointers to a ragged batch's lengths, its sizes, and how many items run at once for each tile of heads."""

    seq_lens: tl.tensor
    query_start_loc: tl.tensor
    num_tokens: tl.tensor
    num_seqs: tl.tensor
    max_seq_len: tl.tensor
    at_once: tl.tensor


class Item(NamedTuple):
    """A tile of queries of one sequence, and a split of the tokens that they see.

    Attributes:
      seq: the sequence; num_seqs for padding rows, -1 if there is no such item.
      start: the row of the sequence's first query.
      query_len: how many queries the sequence has.
      first_query: the index of the tile's first query in the sequence.
      split: the number of the split in the context.
      num_splits: how many splits the context has.
      partial: index of the partial result of split 0, if the tile has several splits; the others follow.
    """

    seq: tl.tensor
    start: tl.tensor
    query_len: tl.tensor
    first_query: tl.tensor
    split: tl.tensor
    num_splits: tl.tensor
    partial: tl.tensor


@triton.jit
@no_type_check
def plan_kernel(
    seq_lens, query_start_loc, num_tokens, num_seqs, max_seq_len, at_once, num_items, num_split_tiles,
    items, split_tiles, cfg: tl.constexpr,
):  # fmt: skip
    """Describes all items, and split 0 of each tile of queries with several splits, in two arrays i32 [count, 8]."""
    batch = RaggedBatch(seq_lens, query_start_loc, num_tokens, num_seqs, max_seq_len, at_once)
    most, long = _sizes(batch, cfg)
    num_long = tl.full([], 0, tl.int32)  # items of long sequences
    for first in range(0, num_seqs + 1, cfg.tuning.scan):
        tiles, steps, _all_steps = _lengths(first + tl.arange(0, cfg.tuning.scan), batch, cfg)
        num_long += tl.sum(tl.where(steps >= long, tiles * _splits(steps, most), 0), 0)
    _store_items(split_tiles, num_split_tiles, True, 0, num_long, most, batch, cfg)
    _store_items(items, num_items, False, long, num_long, most, batch, cfg)


@triton.jit
@no_type_check
def tile_of(index, query_start_loc, num_tokens, num_seqs, cfg: tl.constexpr):
    """Returns the tile of queries of this index, if no context is split and there is no plan.

    Sequence s has the tiles from query_start_loc[s] // queries + s on. These are enough for all of its queries, and no
    two sequences share a tile.
    """
    count = index * 0
    for first in range(0, num_seqs + 1, 128):
        ids = first + tl.arange(0, 128)
        inside = ids <= num_seqs
        starts = tl.load(query_start_loc + ids, mask=inside, other=0)
        count += tl.sum((inside & (starts // cfg.tuning.queries + ids <= index)).to(tl.int32), 0)
    seq = count - 1
    start = tl.load(query_start_loc + seq)
    stop = tl.load(query_start_loc + seq + 1, mask=seq < num_seqs, other=num_tokens)
    first_query = (index - start // cfg.tuning.queries - seq) * cfg.tuning.queries
    return Item(seq, start, stop - start, first_query, 0, 1, 0)


@triton.jit
@no_type_check
def load_item(items, index, again: tl.constexpr = False):
    """Returns the item of this index, as `plan_kernel` has described it.

    `again` keeps the compiler from reusing an earlier load, whose result would hold registers in between.
    """
    at = items + index * _FIELDS
    seq = tl.load(at, volatile=again)
    start = tl.load(at + 1, volatile=again)
    query_len = tl.load(at + 2, volatile=again)
    first_query = tl.load(at + 3, volatile=again)
    split = tl.load(at + 4, volatile=again)
    num_splits = tl.load(at + 5, volatile=again)
    return Item(seq, start, query_len, first_query, split, num_splits, tl.load(at + 6, volatile=again))


@triton.jit
@no_type_check
def _store_items(out, num, split_tiles: tl.constexpr, long, num_long, most, batch, cfg: tl.constexpr):
    """Stores the descriptions of up to `num` items or, with `split_tiles`, of tiles of queries with several splits.

    The sequences of `long` steps and more come first. A sequence's last queries come before its first, because they see
    most tokens.
    """
    index = tl.program_id(0) * cfg.tuning.plan + tl.arange(0, cfg.tuning.plan)
    seq, begin, partial = index * 0 - 1, index * 0, index * 0
    of_long, of_others, partials = tl.full([], 0, tl.int32), num_long, tl.full([], 0, tl.int32)
    for first in range(0, batch.num_seqs + 1, cfg.tuning.scan):
        ids = first + tl.arange(0, cfg.tuning.scan)
        tiles, steps, _all_steps = _lengths(ids, batch, cfg)
        num_splits = _splits(steps, most)
        taken = tl.where(num_splits > 1, tiles * num_splits, 0)
        if split_tiles:
            counts = tl.where(num_splits > 1, tiles, 0)
            begins = of_long + tl.cumsum(counts, 0) - counts
            of_long += tl.sum(counts, 0)
        else:
            counts = tiles * num_splits
            if_long = tl.where(steps >= long, counts, 0)
            others = counts - if_long
            begins = of_others + tl.cumsum(others, 0) - others
            begins = tl.where(steps >= long, of_long + tl.cumsum(if_long, 0) - if_long, begins)
            of_long += tl.sum(if_long, 0)
            of_others += tl.sum(others, 0)
        mine = (index[:, None] >= begins[None, :]) & (index[:, None] < (begins + counts)[None, :])
        firsts = partials + tl.cumsum(taken, 0) - taken
        partials += tl.sum(taken, 0)
        seq = tl.maximum(seq, tl.max(tl.where(mine, ids[None, :], -1), 1))
        begin = tl.maximum(begin, tl.max(tl.where(mine, begins[None, :], 0), 1))
        partial = tl.maximum(partial, tl.max(tl.where(mine, firsts[None, :], 0), 1))

    tiles, steps, _all_steps = _lengths(seq, batch, cfg)
    num_splits = _splits(steps, most)
    number = index - begin
    tile = number
    if not split_tiles:
        tile = number // num_splits
    found = seq >= 0
    start = tl.load(batch.query_start_loc + seq, mask=found, other=0)
    stop = tl.load(batch.query_start_loc + seq + 1, mask=found & (seq < batch.num_seqs), other=batch.num_tokens)
    at = out + index * _FIELDS
    tl.store(at, seq, mask=index < num)
    found = found & (index < num)
    tl.store(at + 1, start, mask=found)
    tl.store(at + 2, stop - start, mask=found)
    tl.store(at + 3, (tiles - 1 - tile) * cfg.tuning.queries, mask=found)
    tl.store(at + 4, number - tile * num_splits if not split_tiles else number * 0, mask=found)
    tl.store(at + 5, num_splits, mask=found)
    tl.store(at + 6, partial + tile * num_splits, mask=found)


@triton.jit
@no_type_check
def _sizes(batch, cfg: tl.constexpr):
    """Returns the most tiles of a split, and the mean tiles of a context, from which on a context is long."""
    work = tl.full([], 0, tl.int64)
    count = tl.full([], 0, tl.int32)
    for first in range(0, batch.num_seqs + 1, cfg.tuning.scan):
        tiles, _steps, all_steps = _lengths(first + tl.arange(0, cfg.tuning.scan), batch, cfg)
        work += tl.sum(tiles.to(tl.int64) * all_steps, 0)
        count += tl.sum(tiles, 0)
    most = tl.maximum(tl.cdiv(work, batch.at_once).to(tl.int32), cfg.tuning.least_split)
    return most, tl.cdiv(work, tl.maximum(count, 1)).to(tl.int32)


@triton.jit
@no_type_check
def _splits(steps, most):
    """Returns how many splits contexts of `steps` tiles have; a split may have an eighth more tiles than `most`."""
    return tl.maximum(tl.cdiv(steps - most // 8, most), 1)


@triton.jit
@no_type_check
def _lengths(ids, batch, cfg: tl.constexpr):
    """Returns each sequence's number of query tiles, and two numbers of token tiles that its last query tile sees.

    The first number counts the tiles of cached tokens, which are split. The second one also counts the tiles of new
    tokens in `prefix_attention`. Sequence num_seqs has the padding rows; -1 and higher ones are empty.
    """
    problem: tl.constexpr = cfg.problem
    queries: tl.constexpr = cfg.tuning.queries
    tile: tl.constexpr = cfg.tuning.tile
    real = (ids >= 0) & (ids < batch.num_seqs)
    starts = tl.load(batch.query_start_loc + ids, mask=(ids >= 0) & (ids <= batch.num_seqs), other=batch.num_tokens)
    stops = tl.load(batch.query_start_loc + ids + 1, mask=real, other=batch.num_tokens)
    tokens = tl.load(batch.seq_lens + ids, mask=real, other=0)
    query_lens = stops - starts
    new = 0
    if cfg.prefix:
        tokens -= query_lens
        new = tl.where(real, tl.cdiv(query_lens, tile), 0)
    tokens = tl.maximum(tl.minimum(tokens, batch.max_seq_len), 0)
    if problem.sliding_window is not None:
        tokens = tl.minimum(tokens, problem.sliding_window + queries)
    if problem.block_sparse is not None:  # an estimate: a pattern may begin anywhere
        near = tl.minimum(tokens, problem.block_sparse.local_blocks * problem.block_sparse.block_size + queries)
        tokens = near + (tokens - near) // problem.block_sparse.vert_stride * cfg.patterns
    steps = tl.cdiv(tokens, tile)
    return tl.cdiv(query_lens, queries), steps, steps + new
