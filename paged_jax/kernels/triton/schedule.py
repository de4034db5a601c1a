"""Device code: which sequence a program works on, and what of it. `cfg` is a `config.Config`."""

# Where triton is not installed pyright takes this folder for it.
# pyright: reportAttributeAccessIssue=false

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl


class Stretch(NamedTuple):
    """The tokens of a block-sparse pattern.

    Attributes:
      far: the first far block.
      shift: of the first head's pattern.
      far_tokens: in far blocks.
      near: the first token behind them.
      heads: that the program has.
    """

    far: tl.tensor
    shift: tl.tensor
    far_tokens: tl.tensor
    near: tl.tensor
    heads: tl.tensor


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
def sparse_share_of(split, begin, end, position, kv_head, head_tile, num_splits, cfg: tl.constexpr):
    """As `share_of`, in tiles of the tokens that a block-sparse pattern has."""
    if cfg.partition_size is not None:
        begin = tl.maximum(begin, split * cfg.partition_size)
        end = tl.minimum(end, (split + 1) * cfg.partition_size)
    stretch, count = sparse_stretch(begin, end, position, position, kv_head, head_tile, cfg)
    first = 0
    last = tl.cdiv(count, cfg.tile)
    if cfg.partition_size is None:
        share = tl.cdiv(last, num_splits)
        first = split * share
        last = tl.minimum(last, first + share)
    return begin, end, first, last, stretch


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
def sparse_stretch(begin, end, position, last_position, kv_head, head_tile, cfg: tl.constexpr):
    """Which of the tokens begin <= t < end the block-sparse pattern lets some row of this program see.

    The rows' positions are `position` to `last_position`. Far blocks, one in `vert_stride` for each of the rows'
    `cfg.patterns`, come first; behind them every token counts from where the first row's local blocks begin. Numbered
    in this order the tokens that somebody sees have no gaps, and `token_at` finds the token of a number.

    Returns what `token_at` needs, and how many tokens there are.
    """
    size: tl.constexpr = cfg.block_sparse.block_size
    stride: tl.constexpr = cfg.block_sparse.vert_stride
    if cfg.block_sparse.local_blocks > 0:
        local = tl.maximum(position // size - cfg.block_sparse.local_blocks + 1, 0)
    else:
        local = last_position // size + 1
    far = begin // size
    stop = tl.minimum(local, (end + size - 1) // size)
    shift = pattern_shift(kv_head, kv_head * cfg.group + head_tile % cfg.head_tiles * cfg.heads, cfg)
    if cfg.patterns == 1:
        far += (stride - (shift + far) % stride) % stride
    blocks = tl.cdiv(tl.maximum(stop - far, 0), stride) * cfg.patterns
    near = tl.maximum(local * size, begin)
    heads = tl.minimum(cfg.heads, cfg.group - head_tile % cfg.head_tiles * cfg.heads)
    return Stretch(far, shift, blocks * size, near, heads), blocks * size + tl.maximum(end - near, 0)


@triton.jit
@no_type_check
def token_at(number, stretch, cfg: tl.constexpr):
    """The tokens of these numbers (`sparse_stretch`), and which of them some row sees."""
    far, shift, far_tokens, near, valid_heads = stretch
    size: tl.constexpr = cfg.block_sparse.block_size
    stride: tl.constexpr = cfg.block_sparse.vert_stride
    block = number // size
    if cfg.patterns == 1:
        token = (far + block * stride) * size + number % size
        seen = number >= 0
    else:
        pattern = block % cfg.patterns
        first = (shift + far + pattern * cfg.block_sparse.head_sliding_step) % stride
        block = far + block // cfg.patterns * stride + (stride - first) % stride
        token = block * size + number % size
        seen = (number >= far_tokens) | ((pattern < valid_heads) & (token < near))
    return tl.where(number < far_tokens, token, near + number - far_tokens), seen


@triton.jit
@no_type_check
def pattern_shift(kv_head, head, cfg: tl.constexpr):
    """How far the heads' block-sparse patterns are shifted, in sparse blocks."""
    if cfg.block_sparse.head_sliding_step >= 0:
        shift = (cfg.block_sparse.tp_rank * cfg.num_heads + head) * cfg.block_sparse.head_sliding_step + 1
    else:
        shift = (cfg.block_sparse.tp_rank * cfg.num_kv_heads + kv_head) * (-cfg.block_sparse.head_sliding_step) + 1
    return shift


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
