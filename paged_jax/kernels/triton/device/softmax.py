"""Device code: the online softmax of a program's rows, tile by tile, in float32.

`cfg` is a `tuning.AttentionKernel`.
"""

# Without triton installed, pyright takes this folder for that package.
# pyright: reportAttributeAccessIssue=false

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


class Softmax(NamedTuple):
    """An unfinished softmax of each row.

    Attributes:
      acc: [rows, width], the weighted sum of the values.
      max_logit: [rows], the largest logit so far, -inf before the first; with `cfg.late_factor` the largest product.
      exp_sum: [rows], the sum of the weights.
    """

    acc: tl.tensor
    max_logit: tl.tensor
    exp_sum: tl.tensor


@triton.jit
@no_type_check
def nothing_seen(cfg: tl.constexpr):
    """Returns the softmax of rows that have seen no token."""
    acc = tl.full([cfg.tuning.rows, cfg.tuning.width], 0, tl.float32)
    max_logit = tl.full([cfg.tuning.rows], float("-inf"), tl.float32)
    return Softmax(acc, max_logit, tl.full([cfg.tuning.rows], 0, tl.float32))


@triton.jit
@no_type_check
def weigh(logits, factor, acc, max_logit, exp_sum, cfg: tl.constexpr):
    """Returns the weights of the tokens' values, and the softmax at the new maximum, including these weights."""
    top = tl.maximum(max_logit, tl.max(logits, 1))
    # A row that has seen nothing has no maximum: any finite one makes its exponentials 0 instead of NaN.
    level = tl.where(top == float("-inf"), 0.0, top)
    if cfg.late_factor:  # one fused multiply-add and one exponential for each logit
        base = factor * _LOG2_E
        # The selects keep LLVM from fusing these products with the subtraction below. A fused subtraction rounds one
        # product only. If the maximum had not changed, it would not give 0, and the error would grow with each tile.
        level = tl.where(top == float("-inf"), 0.0, top * base)
        before = tl.where(max_logit == float("-inf"), float("-inf"), max_logit * base)
        keep = tl.exp2(before - level)
        weights = tl.exp2(tl.fma(logits, tl.zeros_like(logits) + base[:, None], -level[:, None]))
    else:
        keep = _exp(max_logit - level, cfg)
        weights = _exp(logits - level[:, None], cfg)
    exp_sum = exp_sum * keep + tl.sum(weights, 1)
    return weights, acc * keep[:, None], top, exp_sum


@triton.jit
@no_type_check
def with_largest_logit(softmax, factor, cfg: tl.constexpr):
    """Makes `max_logit` a logit, if it is a product, and scales the sums so that its exponential is exactly 1."""
    acc, max_logit, exp_sum = softmax
    if cfg.late_factor:
        base = factor * _LOG2_E
        # `weigh` subtracted a rounded level from the exponents, which matters where logits are huge.
        lack = tl.fma(-max_logit, base, max_logit * base)
        lack = tl.exp2(tl.where(max_logit == float("-inf"), 0.0, lack))
        acc *= lack[:, None]
        exp_sum *= lack
        max_logit *= factor
    return Softmax(acc, max_logit, exp_sum)


@triton.jit
@no_type_check
def finish(softmax, sinks, head, valid, with_sinks: tl.constexpr):
    """Returns out, lse, the largest logit and the sum, with the sink. Rows without tokens have out 0 and lse -inf."""
    acc, max_logit, exp_sum = softmax
    seen = exp_sum != 0  # NaN counts as seen: it must reach the result
    if with_sinks:
        sink = tl.load(sinks + head, mask=valid, other=0.0)
        top = tl.maximum(max_logit, sink)
        keep = tl.exp(max_logit - top)
        exp_sum = exp_sum * keep + tl.exp(sink - top)
        acc = acc * keep[:, None]
        max_logit = top
    denominator = tl.where(seen, exp_sum, 1.0)
    out = tl.where(seen[:, None], acc / denominator[:, None], 0.0)
    lse = tl.where(seen, max_logit + tl.log(denominator), float("-inf"))
    return out, lse, max_logit, exp_sum


@triton.jit
@no_type_check
def rounded(products, nonzero):
    """Rounds products before they are summed. Products that are not `nonzero` must be 0.

    LLVM fuses a product with a sum, but not through a select. If the sum's other term is another lane's product, LLVM
    would round only that term, so two lanes would get different sums of the same products. Both lanes write their sums
    to the same address in shared memory, so the result would depend on which lane writes last.
    """
    return tl.where(nonzero, products, 0.0)


@triton.jit
@no_type_check
def _exp(x, cfg: tl.constexpr):
    """Returns e**x through exp2, which is one instruction; exp takes three more for denormal results."""
    if cfg.tuning.compute_dtype == "float32":
        # The rounding error of a large product matters: the power is multiplied by 2 to this error.
        # NaN stays NaN, so that it reaches the result.
        x = tl.maximum(x, -1e4, propagate_nan=tl.PropagateNan.ALL)
        y = x * 1.4426950216293335
        error = tl.fma(x, tl.full(x.shape, 1.4426950216293335, tl.float32), -y) + x * 1.9259629911266175e-8
        power = rounded(tl.exp2(y) * (1.0 + error * 0.6931471805599453), x != -1e4)
    else:
        power = tl.exp2(x * _LOG2_E)
    return power


@triton.jit
@no_type_check
def tanh(x):
    """Returns tanh(x) without libdevice. Near 0 the formula would lose bits, so a polynomial replaces it."""
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(square < 0.04, near, tl.where(x < 0, -y, y))
