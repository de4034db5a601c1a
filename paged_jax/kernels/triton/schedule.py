"""Device code: which sequence a program works on, and what of it. `cfg` is a `config.Config`."""

# Where triton is not installed pyright takes this folder for it.
# pyright: reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def of_rank(rank, seq_lens, num_seqs, cfg: tl.constexpr):
    """The sequence of that rank by length, the longest first, so that none is left for the end."""
    ids = tl.arange(0, cfg.ranked)
    lens = tl.load(seq_lens + ids, mask=ids < num_seqs, other=-1)
    ahead = (lens[None, :] > lens[:, None]) | ((lens[None, :] == lens[:, None]) & (ids[None, :] < ids[:, None]))
    ranks = tl.sum(ahead.to(tl.int32), 1)
    return tl.sum(tl.where(ranks == rank, ids, 0), 0)


@triton.jit
@no_type_check
def share_of(split, begin, end, num_splits, cfg: tl.constexpr):
    """What a split has of the tokens begin <= t < end.

    Returns the token that its tiles are counted from, its begin and end, and its first tile and that after its last.
    """
    if cfg.partition_size is not None:  # a fixed part of the context, whatever the batch
        origin = split * cfg.partition_size
        begin = tl.maximum(begin, origin)
        end = tl.minimum(end, origin + cfg.partition_size)
        first = (begin - origin) // cfg.tile
        last = (end - origin + cfg.tile - 1) // cfg.tile
    else:  # an even share of the tiles that are there
        origin = 0
        first = begin // cfg.tile
        last = (end + cfg.tile - 1) // cfg.tile
        share = tl.cdiv(tl.maximum(last - first, 0), num_splits)
        first += split * share
        last = tl.minimum(last, first + share)
    return origin, begin, end, first, last


@triton.jit
@no_type_check
def sequence_of(tile, query_start_loc, num_seqs, cfg: tl.constexpr):
    """The sequence that a tile of queries belongs to.

    Sequence s has the tiles from query_start_loc[s] // queries + s on: enough room for each, and no two overlap.
    """
    count = tile * 0
    for first in range(0, num_seqs + 1, 128):
        ids = first + tl.arange(0, 128)
        inside = ids <= num_seqs
        starts = tl.load(query_start_loc + ids, mask=inside, other=0)
        count += tl.sum((inside & (starts // cfg.queries + ids <= tile)).to(tl.int32), 0)
    return count - 1
