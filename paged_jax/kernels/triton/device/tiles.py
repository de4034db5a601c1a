"""Device code of attention: the loop over tiles of K and V reads each tile, masks it and adds it to a softmax.

A tile is `cfg.tuning.tile` tokens of one sequence. They are neighbours, unless there is a block-sparse pattern.
`attend.py` calls these loops; `cfg` is a `tuning.AttentionKernel`.
"""

# Without triton installed, pyright takes this folder for that package.
# pyright: reportAttributeAccessIssue=false

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

from paged_jax.kernels.triton.device.rows import logits_of, seen_by
from paged_jax.kernels.triton.device.schedule import token_at
from paged_jax.kernels.triton.device.softmax import Softmax, weigh


class Cache(NamedTuple):
    """Pointers to the pools and to their scales."""

    key: tl.tensor
    value: tl.tensor
    k_scale: tl.tensor
    v_scale: tl.tensor


class Paged(NamedTuple):
    """The source of a sequence's cached tokens: the pools, and a pointer to its row of the block tables."""

    cache: Cache
    table: tl.tensor


class NewTokens(NamedTuple):
    """Pointers to the new tokens' keys and values, and the row of token `Span.origin`."""

    key: tl.tensor
    value: tl.tensor
    start: tl.tensor


@triton.jit
@no_type_check
def add_tiles(
    softmax, rows, source, kv_head, span, first, last, paged: tl.constexpr, masked: tl.constexpr, cfg: tl.constexpr
):
    """Adds the tiles [first, last) of a span of tokens to an unfinished softmax.

    `source` is `Paged` if `paged`, else `NewTokens`. Without `masked` every row sees every token of these tiles.
    """
    acc, max_logit, exp_sum = softmax
    problem: tl.constexpr = cfg.problem
    width: tl.constexpr = cfg.tuning.width
    for i in range(first, last):
        inner = i * cfg.tuning.tile + numbers(masked and cfg.opaque_range, cfg)
        if cfg.problem.block_sparse is None:
            tokens = span.origin + inner
            wanted = (tokens >= span.begin) & (tokens < span.end)
        else:
            tokens, wanted = token_at(inner, span.pattern, cfg)
            wanted = wanted & (tokens >= span.begin) & (tokens < span.end)
            inner = tokens - span.origin
        seen = seen_by(rows, tokens, wanted, not cfg.one_pattern, cfg)
        k_factor = None
        v_factor = None
        if paged:
            block = tl.load(source.table + tokens // cfg.problem.block_size, mask=wanted, other=0)
            if not masked:
                block = tl.max_constancy(block, tl.constexpr(cfg.run))
            block = block.to(tl.int64)
            slot = tokens % cfg.problem.block_size
            key_at = vectors(source.cache.key, block, slot, kv_head, False, problem, width)
            if cfg.problem.layout == "vllm" and not masked:
                value_at = _columns(source.cache.value, block, slot, kv_head, cfg)
            else:
                value_at = vectors(source.cache.value, block, slot, kv_head, True, problem, width)
            scale_at = (block * cfg.problem.num_kv_heads + kv_head) * cfg.problem.block_size + slot
            if cfg.problem.k_scale == "slot":
                k_factor = tl.load(source.cache.k_scale + scale_at, mask=wanted, other=0.0)
            if cfg.problem.v_scale == "slot":
                v_factor = tl.load(source.cache.v_scale + scale_at, mask=wanted, other=0.0)
        else:
            at = ((source.start + inner).to(tl.int64) * cfg.problem.num_kv_heads + kv_head) * cfg.problem.head_size
            element = tl.arange(0, cfg.tuning.width)
            key_at = source.key + at[:, None] + element[None, :]
            value_at = source.value + at[:, None] + element[None, :]
        k = _load_tile(key_at, wanted, masked, cfg)
        k = _to_float16(k, True) if cfg.tuning.staged_values and paged else convert(k, rows.q.dtype)
        if paged and cfg.problem.layout == "vllm" and not masked:
            in_head = (tl.arange(0, cfg.tuning.width) < cfg.problem.head_size)[:, None]
            v = tl.trans(convert(tl.load(value_at, mask=in_head, other=0.0), rows.q.dtype))
        elif cfg.tuning.staged_values and paged:
            v = _to_float16(_load_tile(value_at, wanted, masked, cfg), False)
        else:
            v = convert(_load_tile(value_at, wanted, masked, cfg), rows.q.dtype)

        logits = tl.dot(rows.q, tl.trans(k), input_precision="ieee")
        logits = logits_of(logits, k_factor, rows, tokens, seen, masked, cfg)
        weights, acc, max_logit, exp_sum = weigh(logits, rows.factor, acc, max_logit, exp_sum, cfg)
        if v_factor is None:
            acc = tl.dot(weights.to(rows.q.dtype), v, acc, input_precision="ieee")
        else:  # divided by the largest scale, weights fit into the operands' dtype
            peak = tl.max(tl.abs(v_factor), 0)
            peak = tl.where(peak > 0, peak, 1.0)
            weights *= (v_factor / peak)[None, :]
            acc += tl.dot(weights.to(rows.q.dtype), v, input_precision="ieee") * peak
    return Softmax(acc, max_logit, exp_sum)


@triton.jit
@no_type_check
def add_token(softmax, rows, key, value, cache, kv_head, slot, token, begin, end, cfg: tl.constexpr):
    """Adds one token to an unfinished softmax, if it is in [begin, end), as if it was read from its slot.

    `key` and `value` are what the slot holds, [1, width]; `slot` and `token` are [1].
    """
    acc, max_logit, exp_sum = softmax
    wanted = (token >= begin) & (token < end)
    seen = seen_by(rows, token, wanted, True, cfg)
    if cfg.problem.block_sparse is not None:
        wanted = wanted & (tl.max(seen.to(tl.int32), 0) > 0)
    scale_at = (slot // cfg.problem.block_size).to(tl.int64) * cfg.problem.num_kv_heads + kv_head
    scale_at = scale_at * cfg.problem.block_size + slot % cfg.problem.block_size
    k_factor = None
    if cfg.problem.k_scale == "slot":
        k_factor = tl.load(cache.k_scale + scale_at)
    k = convert(key, rows.q.dtype).to(tl.float32)
    v = tl.where(wanted[:, None], convert(value, rows.q.dtype).to(tl.float32), 0.0)
    if cfg.problem.v_scale == "slot":
        v *= tl.load(cache.v_scale + scale_at)[:, None]
    logits = tl.sum(rows.q.to(tl.float32) * k, 1)[:, None]
    logits = logits_of(logits, k_factor, rows, token, seen, True, cfg)
    weights, acc, max_logit, exp_sum = weigh(logits, rows.factor, acc, max_logit, exp_sum, cfg)
    return Softmax(acc + weights * v, max_logit, exp_sum)


@triton.jit
@no_type_check
def numbers(opaque: tl.constexpr, cfg: tl.constexpr):
    """Returns 0 to tile - 1. With `opaque`, LLVM cannot see that these come from the thread's index.

    Triton may hold the tokens in two layouts, computed by `thread & 31` and by `thread % 16 << 1`. LLVM then joins the
    two computations in vectors of two elements, and leaves an element of each unused: in the second vector it is
    `thread << 31`. The NVPTX backend of Triton 3.6 computes that vector in one register of 64 bits, where the unused
    element overflows into the other one. So some threads got other threads' tokens and masks, and read wild memory.
    """
    numbers = tl.arange(0, cfg.tuning.tile)
    if opaque:
        numbers = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], dtype=tl.int32, is_pure=True, pack=1)
    return numbers


@triton.jit
@no_type_check
def vectors(cache, blocks, offsets, kv_head, values: tl.constexpr, pool: tl.constexpr, width: tl.constexpr):
    """Returns pointers [tokens, width] to keys or values in the slots (blocks, offsets); blocks are 64-bit integers."""
    d = tl.arange(0, width)
    if pool.layout == "hnd":
        start = ((blocks * pool.num_kv_heads + kv_head) * pool.block_size + offsets) * pool.head_size
        element = d
    elif pool.layout == "nhd":
        start = ((blocks * pool.block_size + offsets) * pool.num_kv_heads + kv_head) * pool.head_size
        element = d
    elif pool.interleaved:
        row = 2 * kv_head + 1 if values else 2 * kv_head
        start = ((blocks * pool.block_size + offsets) * pool.rows + row) * pool.row_size
        element = d
    else:  # x neighbouring elements of one vector are followed by the same elements of the next token
        x: tl.constexpr = 1 if values else pool.key_x
        start = (blocks * pool.num_kv_heads + kv_head) * (pool.head_size * pool.block_size) + offsets * x
        element = d // x * (pool.block_size * x) + d % x
    return cache + start[:, None] + element[None, :]


@triton.jit
@no_type_check
def _columns(cache, blocks, offsets, kv_head, cfg: tl.constexpr):
    """Returns pointers [width, tokens] to values in layout "vllm", where neighbouring tokens lie side by side."""
    start = (blocks * cfg.problem.num_kv_heads + kv_head) * (cfg.problem.head_size * cfg.problem.block_size) + offsets
    return cache + start[None, :] + (tl.arange(0, cfg.tuning.width) * cfg.problem.block_size)[:, None]


@triton.jit
@no_type_check
def _load_tile(at, wanted, masked: tl.constexpr, cfg: tl.constexpr):
    """Loads the vectors of a tile, and 0 for unwanted tokens, whose vectors may be NaN: 0 * NaN is NaN."""
    in_head = (tl.arange(0, cfg.tuning.width) < cfg.problem.head_size)[None, :]
    if masked:
        tile = tl.load(at, mask=wanted[:, None] & in_head, other=0.0)
    elif cfg.problem.head_size != cfg.tuning.width:
        tile = tl.load(at, mask=in_head, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
@no_type_check
def convert(x, dtype: tl.constexpr):
    """Returns x as `dtype`. This is exact for the pairs of dtypes that `tuning.compute_dtype` makes."""
    if x.dtype == tl.int8 and dtype == tl.float16:
        # 0x6400 | u is the float16 1024 + u. The instruction that converts an integer to a float is slow.
        x = ((x.to(tl.int16) + 128) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    elif x.dtype == tl.float8e5 and dtype != tl.bfloat16:
        # A float8_e5m2 is the upper byte of the same number in float16. If a process has compiled a conversion for
        # compute capability 8.9, Triton 3.6 would use the same instruction for 8.0, which lacks it.
        x = (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return x.to(dtype)


@triton.jit
@no_type_check
def _to_float16(x, movable: tl.constexpr):
    """Converts like `convert`, four 8-bit values at a time; if not `movable`, right after their load.

    Triton would move the conversion of V after shared memory, and read shared memory transposed, byte by byte.
    """
    if x.dtype == tl.int8:
        code: tl.constexpr = """{ .reg .b32 u, zero; xor.b32 u, $2, 0x80808080; mov.b32 zero, 0x64806480;
            prmt.b32 $0, u, 0x64646464, 0x4140; prmt.b32 $1, u, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, zero; sub.f16x2 $1, $1, zero; }"""
    elif x.dtype == tl.float8e5:
        code: tl.constexpr = "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;"
    else:
        code: tl.constexpr = """{ .reg .b16 low, high; mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"""
    return tl.inline_asm_elementwise(code, "=r,=r,r", [x], dtype=tl.float16, is_pure=movable, pack=4)
