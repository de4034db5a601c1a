"""Device code: assigns a sequence, and some of its tokens, to each program.

`cfg` is a `tuning.AttentionKernel`.
"""

# Without triton installed, pyright takes this folder for that package.
# pyright: reportAttributeAccessIssue=false

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl


class Pattern(NamedTuple):
    """The facts of a block-sparse pattern from which `token_at` finds tokens.

    Attributes:
      far: the first far block, which is a sparse block before the local ones.
      shift: by how many sparse blocks the first head's pattern is shifted.
      far_tokens: how many tokens all far blocks have.
      near: the first token after the far blocks.
      heads: how many heads the program has.
    """

    far: tl.tensor
    shift: tl.tensor
    far_tokens: tl.tensor
    near: tl.tensor
    heads: tl.tensor


class Span(NamedTuple):
    """The tokens begin <= t < end of a sequence. Tiles are counted from token `origin`."""

    origin: tl.tensor
    begin: tl.tensor
    end: tl.tensor


class SparseSpan(NamedTuple):
    """The tokens of a pattern with begin <= t < end. Tiles have consecutive numbers of `pattern_of`.

    The rows of new tokens are counted from token `origin`.
    """

    origin: tl.tensor
    begin: tl.tensor
    end: tl.tensor
    pattern: Pattern


@triton.jit
@no_type_check
def of_rank(rank, seq_lens, num_seqs, cfg: tl.constexpr):
    """Returns the sequence of this rank by length. The longest ones start first, so that none of them ends alone."""
    ids = tl.arange(0, cfg.tuning.ranked)
    lens = tl.load(seq_lens + ids, mask=ids < num_seqs, other=-1)
    ahead = (lens[None, :] > lens[:, None]) | ((lens[None, :] == lens[:, None]) & (ids[None, :] < ids[:, None]))
    ranks = tl.sum(ahead.to(tl.int32), 1)
    return tl.sum(tl.where(ranks == rank, ids, 0), 0)


@triton.jit
@no_type_check
def share_of(split, begin, end, position, kv_head, head_tile, num_splits, cfg: tl.constexpr):
    """Returns a split's range of the tokens begin <= t < end, its first tile, and the tile after its last.

    A query at `position` attends to these tokens.
    """
    tile: tl.constexpr = cfg.tuning.tile
    size: tl.constexpr = cfg.tuning.partition_size
    if size is not None:  # a partition, independent of the batch
        origin = split * size
        begin = tl.maximum(begin, origin)
        end = tl.minimum(end, origin + size)
    else:
        origin = 0
    if cfg.problem.block_sparse is not None:
        pattern, count = pattern_of(begin, end, position, position, kv_head, head_tile, cfg)
        span = SparseSpan(origin, begin, end, pattern)
        first = 0
        last = tl.cdiv(count, tile)
    else:
        span = Span(origin, begin, end)
        first = (begin - origin) // tile
        last = (end - origin + tile - 1) // tile
    if size is None:  # an even share of the tiles
        share = tl.cdiv(tl.maximum(last - first, 0), num_splits)
        first += split * share
        last = tl.minimum(last, first + share)
    return span, first, last


@triton.jit
@no_type_check
def pattern_of(begin, end, position, last_position, kv_head, head_tile, cfg: tl.constexpr):
    """Numbers the tokens begin <= t < end that the block-sparse pattern shows to any row of this program.

    The rows' positions are `position` to `last_position`. Far blocks come first: one in `vert_stride` for each of the
    program's `cfg.patterns`. Then comes every token from the first row's local blocks on. The numbers have no gaps, and
    `token_at` finds the token of a number.

    Returns the pattern, and how many tokens it has.
    """
    sparse: tl.constexpr = cfg.problem.block_sparse
    size: tl.constexpr = sparse.block_size
    stride: tl.constexpr = sparse.vert_stride
    if sparse.local_blocks > 0:
        local = tl.maximum(position // size - sparse.local_blocks + 1, 0)
    else:
        local = last_position // size + 1
    far = begin // size
    stop = tl.minimum(local, (end + size - 1) // size)
    head = head_tile % cfg.head_tiles * cfg.tuning.heads
    shift = pattern_shift(kv_head, kv_head * cfg.problem.group + head, cfg)
    if cfg.patterns == 1:
        far += (stride - (shift + far) % stride) % stride
    far_tokens = tl.cdiv(tl.maximum(stop - far, 0), stride) * cfg.patterns * size
    near = tl.maximum(local * size, begin)
    pattern = Pattern(far, shift, far_tokens, near, tl.minimum(cfg.tuning.heads, cfg.problem.group - head))
    return pattern, far_tokens + tl.maximum(end - near, 0)


@triton.jit
@no_type_check
def token_at(number, pattern, cfg: tl.constexpr):
    """Returns the tokens of these numbers (`pattern_of`), and which of them some row may see."""
    sparse: tl.constexpr = cfg.problem.block_sparse
    size: tl.constexpr = sparse.block_size
    stride: tl.constexpr = sparse.vert_stride
    block = number // size
    if cfg.patterns == 1:
        token = (pattern.far + block * stride) * size + number % size
        seen = number >= 0
    else:
        head = block % cfg.patterns
        shift = pattern.shift + head * (sparse.head_sliding_step % stride)
        block = pattern.far + block // cfg.patterns * stride
        block += (stride - (shift + pattern.far) % stride) % stride
        token = block * size + number % size
        seen = (number >= pattern.far_tokens) | ((head < pattern.heads) & (token < pattern.near))
    return tl.where(number < pattern.far_tokens, token, pattern.near + number - pattern.far_tokens), seen


@triton.jit
@no_type_check
def pattern_shift(kv_head, head, cfg: tl.constexpr):
    """Returns by how many sparse blocks the heads' block-sparse patterns are shifted.

    Only the shift modulo `vert_stride` matters. Its parts may be beyond int32, so they are reduced at compile time.
    """
    sparse: tl.constexpr = cfg.problem.block_sparse
    stride: tl.constexpr = sparse.vert_stride
    if sparse.head_sliding_step >= 0:
        step: tl.constexpr = sparse.head_sliding_step % stride
        first: tl.constexpr = (sparse.tp_rank * cfg.problem.num_heads * step + 1) % stride
        shift = head * step + first
    else:
        step: tl.constexpr = -sparse.head_sliding_step % stride
        first: tl.constexpr = (sparse.tp_rank * cfg.problem.num_kv_heads * step + 1) % stride
        shift = kv_head * step + first
    return shift
