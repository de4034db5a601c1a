"""Device code: a program's matrix products have one row for each of its query heads and query tokens.

This file has all options with a value for each head: it loads their values for the rows, and applies them to logits.

`cfg` is a `tuning.AttentionKernel`.
"""

# Without triton installed, pyright takes this folder for that package.
# pyright: reportAttributeAccessIssue=false

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

from paged_jax.kernels.triton.device.schedule import pattern_shift
from paged_jax.kernels.triton.device.softmax import tanh


class Rows(NamedTuple):
    """The values of each row.

    Attributes:
      q: [rows, width], the queries in the dtype of the products.
      factor: [rows], the factor from a product of q and k to a logit.
      position: [rows], the last token that the row sees: its own query token or, if attention is not causal, the
        sequence's last token; -1 for padding, which sees nothing.
      slope: [rows], the head's ALiBi slope.
      shift: [rows], how far the head's block-sparse pattern is shifted, in sparse blocks.
    """

    q: tl.tensor
    factor: tl.tensor
    position: tl.tensor
    slope: tl.tensor
    shift: tl.tensor


class QueryTile(NamedTuple):
    """The rows of a tile of queries, and the tokens that they see.

    Attributes:
      kv_head: the kv head of all rows.
      head: each row's query head.
      valid: which rows have a query.
      queries: the index of each row's query in its sequence.
      position: each row's position in its sequence, -1 if it sees nothing.
      first_position: the position of the first query.
      begin: the first token that some row sees.
      end: one past the last token that some row sees.
      context_len: how many tokens come before the sequence's queries.
    """

    kv_head: tl.tensor
    head: tl.tensor
    valid: tl.tensor
    queries: tl.tensor
    position: tl.tensor
    first_position: tl.tensor
    begin: tl.tensor
    end: tl.tensor
    context_len: tl.tensor


@triton.jit
@no_type_check
def heads_of_rows(rows, head_tile, cfg: tl.constexpr):
    """Returns the kv head of a tile of heads, the query head of each of these rows, and which rows are not padding."""
    kv_head = head_tile // cfg.head_tiles
    in_group = head_tile % cfg.head_tiles * cfg.tuning.heads + rows % cfg.tuning.heads
    valid = (rows < cfg.tuning.heads * cfg.tuning.queries) & (in_group < cfg.problem.group)
    return kv_head, kv_head * cfg.problem.group + in_group, valid


@triton.jit
@no_type_check
def query_tile_of(item, head_tile, seq_lens, num_seqs, max_seq_len, cfg: tl.constexpr):
    """Returns the rows of an item's tile of queries, and which tokens they see."""
    seq_len = tl.load(seq_lens + item.seq, mask=item.seq < num_seqs, other=0)
    context_len = seq_len - item.query_len
    kv_head, head, valid = heads_of_rows(tl.arange(0, cfg.tuning.rows), head_tile, cfg)
    queries = item.first_query + tl.arange(0, cfg.tuning.rows) // cfg.tuning.heads
    valid = valid & (queries < item.query_len)
    if cfg.problem.causal:
        first_position = context_len + item.first_query
        position = context_len + queries
        end = context_len + tl.minimum(item.query_len, item.first_query + cfg.tuning.queries)
    else:  # every query sees as much as the sequence's last one
        first_position = seq_len - 1
        position = queries * 0 + first_position
        end = seq_len
    position = tl.where(valid & (item.seq < num_seqs), position, -1)
    end = tl.where((item.seq < num_seqs) & (item.first_query < item.query_len), tl.minimum(end, max_seq_len), 0)
    begin = first_position * 0
    if cfg.problem.sliding_window is not None:
        begin = tl.maximum(first_position - cfg.problem.sliding_window + 1, 0)
    return QueryTile(kv_head, head, valid, queries, position, first_position, begin, end, context_len)


@triton.jit
@no_type_check
def load_query(query, tokens, head, valid, scale, out, cfg: tl.constexpr):
    """Returns the rows' queries in the dtype of the products, and each row's factor from products to logits.

    With `cfg.late_factor` the factor is positive: if `scale` is negative, the queries are negated instead.
    """
    d = tl.arange(0, cfg.tuning.width)
    at = ((tokens.to(tl.int64) * cfg.problem.num_heads + head) * cfg.problem.head_size)[:, None] + d[None, :]
    mask = valid[:, None] & (d < cfg.problem.head_size)[None, :]
    if cfg.late_factor and cfg.tuning.queries > 1:  # noqa: SIM102 (the inner condition is the device's)
        # Negated queries pass through the rows of `out`, because matrix units take q from shared memory only if it is
        # multiplied as it was loaded.
        if scale < 0:
            tl.store(out + at, -tl.load(query + at, mask=mask, other=0.0), mask=mask)
            tl.debug_barrier()
            query = out
    q = tl.load(query + at, mask=mask, other=0.0)
    if cfg.late_factor and cfg.tuning.queries == 1:
        q = tl.where(scale < 0, -q, q)
    unit = tl.full([cfg.tuning.rows], 1.0, tl.float32)
    if cfg.normalise_query:  # bfloat16 becomes float16: a power of two divides each row, exactly
        unit = power_of_two(tl.max(tl.abs(q.to(tl.float32)), 1))
    q = to_compute(q, unit, cfg)
    factor = unit * scale
    if cfg.late_factor:
        factor = tl.abs(factor)
        factor = tl.where(factor == 0, 1e-30, factor)  # 0 * -inf would be NaN where tokens are masked
    return q, factor


@triton.jit
@no_type_check
def power_of_two(x):
    """Returns the largest power of two that is not larger than x, in float32; x below 1e-30 counts as 1e-30."""
    x = tl.maximum(x, 1e-30)
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def to_compute(q, unit, cfg: tl.constexpr):
    """Returns queries in the dtype of the products; each row is divided by its unit if `cfg.normalise_query`."""
    if cfg.normalise_query:
        q = q.to(tl.float32) / unit[:, None]
    if cfg.tuning.compute_dtype == "float32":
        q = q.to(tl.float32)
    elif cfg.tuning.compute_dtype == "float16":
        q = q.to(tl.float16)
    else:
        q = q.to(tl.bfloat16)
    return q


@triton.jit
@no_type_check
def rows_of(q, factor, position, per_head, kv_head, head, valid, cfg: tl.constexpr):
    """Returns the rows with the values of the options `per_head` for each row's head."""
    slope = tl.full([cfg.tuning.rows], 0, tl.float32)
    if cfg.problem.per_head.alibi_slopes:
        slope = tl.load(per_head.alibi_slopes + head, mask=valid, other=0.0)
    shift = head * 0
    if cfg.problem.block_sparse is not None:
        shift = head * 0 + pattern_shift(kv_head, head, cfg)
    return Rows(q, factor, position, slope, shift)


@triton.jit
@no_type_check
def with_factor(rows, factor):
    """Returns the rows with another factor."""
    return Rows(rows.q, factor, rows.position, rows.slope, rows.shift)


@triton.jit
@no_type_check
def seen_by(rows, tokens, inside, sparse: tl.constexpr, cfg: tl.constexpr):
    """Returns which of the tokens each row attends to, [rows, tile]; a row at position -1 attends to none.

    Without `sparse`, the caller knows that no block-sparse pattern hides any of these tokens.
    """
    t = tokens[None, :]
    at = rows.position[:, None]
    seen = inside[None, :] & (t <= at)
    if cfg.problem.sliding_window is not None:
        seen = seen & (t > at - cfg.problem.sliding_window)
    if sparse and cfg.problem.block_sparse is not None:
        block = t // cfg.problem.block_sparse.block_size
        local = block > at // cfg.problem.block_sparse.block_size - cfg.problem.block_sparse.local_blocks
        seen = seen & (local | ((block + rows.shift[:, None]) % cfg.problem.block_sparse.vert_stride == 0))
    return seen


@triton.jit
@no_type_check
def logits_of(products, k_factor, rows, tokens, seen, masked: tl.constexpr, cfg: tl.constexpr):
    """Returns the logits of the products [rows, tokens] of q and k, without a late factor."""
    logits = products
    if k_factor is not None:
        logits *= k_factor[None, :]
    if not cfg.late_factor:
        logits *= rows.factor[:, None]
    if cfg.problem.logits_soft_cap is not None:
        logits = cfg.problem.logits_soft_cap * tanh(logits / cfg.problem.logits_soft_cap)
    if cfg.problem.per_head.alibi_slopes:
        logits += rows.slope[:, None] * (tokens[None, :] - rows.position[:, None]).to(tl.float32)
    if masked:
        logits = tl.where(seen, logits, float("-inf"))
    return logits
