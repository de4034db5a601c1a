"""Device code: the reduce makes one softmax of all splits of a sequence.

The grid has one program for each (sequence, head, part of head_size). A program reads what the splits left, 4 bytes for
each element of its part and each split, out of the L2 cache. `cfg` is a `tuning.ReduceKernel`.
"""

# Where triton is not installed pyright takes this folder for it.
# pyright: reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from paged_jax.kernels.triton.device.softmax import Softmax, finish


@triton.jit
@no_type_check
def reduce_kernel(tmp_out, exp_sums, max_logits, seq_lens, sinks, num_splits, out, lse, cfg: tl.constexpr):
    """One program joins all splits of one (sequence, head), for a part of head_size."""
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
        weights = sums * tl.exp(maxima - shift)
        acc = acc * keep[:, None] + tl.sum(weights[:, None] * parts, 0)[None, :]
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
