"""Device code: which sequence a program works on. `cfg` is a `config.Config`."""

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
