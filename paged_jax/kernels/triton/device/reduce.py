"""Device code: a reduce merges all splits of a sequence, or of a tile of queries, into one softmax.

The grid has one program for each (sequence, head, part of head_size). In a ragged batch it has one for each (tile of
queries, tile of heads, some of their rows, part of head_size). From the L2 cache, a program reads the partial results
of all splits: 4 bytes for each element of its part and each split. `cfg` is a `tuning.ReduceKernel` or a
`ragged_tuning.RaggedReduceKernel`.
"""

# Without triton installed, pyright takes this folder for that package.
# pyright: reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from paged_jax.kernels.triton.device.items import load_item
from paged_jax.kernels.triton.device.rows import heads_of_rows
from paged_jax.kernels.triton.device.softmax import Softmax, finish, rounded


@triton.jit
@no_type_check
def reduce_kernel(tmp_out, exp_sums, max_logits, seq_lens, sinks, num_splits, out, lse, cfg: tl.constexpr):
    """One program merges all splits of one (sequence, head), for a part of head_size."""
    problem: tl.constexpr = cfg.problem
    row = (tl.program_id(0) // cfg.parts).to(tl.int64)
    part = tl.program_id(0) % cfg.parts
    head = (row % problem.num_heads).to(tl.int32)
    used = num_splits
    if cfg.partition_size is not None:
        seq_len = tl.load(seq_lens + row // problem.num_heads)
        used = tl.minimum(num_splits, (seq_len + cfg.partition_size - 1) // cfg.partition_size)
    width: tl.constexpr = cfg.width // cfg.parts
    d = part * width + tl.arange(0, width)
    acc = tl.full([1, width], 0, tl.float32)
    max_logit = tl.full([1], float("-inf"), tl.float32)
    exp_sum = tl.full([1], 0, tl.float32)
    for start in range(0, used, cfg.splits):
        splits = start + tl.arange(0, cfg.splits)
        inside = splits < used
        at = row * num_splits + splits
        maxima = tl.load(max_logits + at, mask=inside, other=float("-inf"))
        sums = tl.load(exp_sums + at, mask=inside, other=0.0)
        mask = inside[:, None] & (d < problem.head_size)[None, :]
        parts = tl.load(tmp_out + at[:, None] * problem.head_size + d[None, :], mask=mask, other=0.0)
        top = tl.maximum(max_logit, tl.max(maxima, 0))
        shift = tl.where(top == float("-inf"), 0.0, top)
        keep = tl.exp(max_logit - shift)
        weights = rounded(sums * tl.exp(maxima - shift), inside)
        acc = acc * keep[:, None] + tl.sum(rounded(weights[:, None] * parts, mask), 0)[None, :]
        exp_sum = exp_sum * keep + tl.sum(weights, 0)
        max_logit = top
    heads = tl.full([1], 0, tl.int32) + head
    softmax = Softmax(acc, max_logit, exp_sum)
    result, log_sum, _, _ = finish(softmax, sinks, heads, heads >= 0, tl.constexpr(problem.per_head.sinks))
    tl.store(lse + row + tl.arange(0, 1), log_sum, mask=part + tl.arange(0, 1) == 0)
    tl.store(
        out + row * problem.head_size + d[None, :],
        result.to(out.dtype.element_ty),
        mask=(d < problem.head_size)[None, :],
    )


@triton.jit
@no_type_check
def ragged_reduce_kernel(
    tmp_out, exp_sums, max_logits, split_tiles, sinks, unused_out, unused_lse, out, lse, cfg: tl.constexpr
):  # fmt: skip
    """One program merges all splits of some rows of one tile of queries.

    out and lse are updated in place: they are outputs that alias inputs.
    """
    attention: tl.constexpr = cfg.attention
    problem: tl.constexpr = cfg.attention.problem
    num_head_tiles: tl.constexpr = problem.num_kv_heads * attention.head_tiles
    pid = tl.program_id(0)
    part = pid % cfg.parts
    pid = pid // cfg.parts
    rows = pid % cfg.groups * cfg.rows + tl.arange(0, cfg.rows)
    pid = pid // cfg.groups
    head_tile = pid % num_head_tiles
    item = load_item(split_tiles, pid // num_head_tiles)
    if item.seq < 0:
        return
    _, head, valid = heads_of_rows(rows, head_tile, attention)
    queries = item.first_query + rows // attention.tuning.heads
    valid = valid & (queries < item.query_len)
    if tl.max(valid.to(tl.int32), 0) == 0:
        return

    width: tl.constexpr = attention.tuning.width // cfg.parts
    d = part * width + tl.arange(0, width)
    in_head = (d < problem.head_size)[None, :]
    acc = tl.full([cfg.rows, width], 0, tl.float32)
    max_logit = tl.full([cfg.rows], float("-inf"), tl.float32)
    exp_sum = tl.full([cfg.rows], 0, tl.float32)
    for start in range(0, item.num_splits, cfg.splits):
        splits = start + tl.arange(0, cfg.splits)
        inside = (splits < item.num_splits)[:, None] & valid[None, :]
        at = ((item.partial + splits) * num_head_tiles + head_tile).to(tl.int64)
        at = at[:, None] * attention.tuning.rows + rows[None, :]
        maxima = tl.load(max_logits + at, mask=inside, other=float("-inf"))
        sums = tl.load(exp_sums + at, mask=inside, other=0.0)
        at = at[:, :, None] * problem.head_size + d[None, None, :]
        mask = inside[:, :, None] & in_head[None, :, :]
        parts = tl.load(tmp_out + at, mask=mask, other=0.0)
        top = tl.maximum(max_logit, tl.max(maxima, 0))
        shift = tl.where(top == float("-inf"), 0.0, top)
        keep = tl.exp(max_logit - shift)
        weights = rounded(sums * tl.exp(maxima - shift[None, :]), inside)
        acc = acc * keep[:, None] + tl.sum(rounded(weights[:, :, None] * parts, mask), 0)
        exp_sum = exp_sum * keep + tl.sum(weights, 0)
        max_logit = top
    softmax = Softmax(acc, max_logit, exp_sum)
    result, log_sum, _, _ = finish(softmax, sinks, head, valid, tl.constexpr(problem.per_head.sinks))
    row = (item.start + queries).to(tl.int64) * problem.num_heads + head
    tl.store(lse + row, log_sum, mask=valid & (part + rows * 0 == 0))
    at = row[:, None] * problem.head_size + d[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=valid[:, None] & in_head)
