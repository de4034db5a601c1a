"""Device code of attention: the loop over tiles of K and V, and how a tile is read and masked.

A tile is a run of `cfg.tile` consecutive tokens of one sequence. `attend.py` tells where these loops stand in the
kernels; `cfg` is a `config.Config`.
"""

# Where triton is not installed pyright takes this folder for it.
# pyright: reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from paged_jax.kernels.triton.schedule import token_at


@triton.jit
@no_type_check
def add_tiles(
    acc, max_logit, exp_sum, q, factor, position, slope, offset, key, value, table, k_scale, v_scale, kv_head, origin,
    start, first, last, begin, end, stretch, paged: tl.constexpr, masked: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Adds the tokens in [begin, end) of the tiles [first, last) counted from `origin` to an unfinished softmax.

    From the cache if `paged`; else from `key` and `value` as rows of new tokens, of which `start` is at `origin`.
    Without `masked` every row sees every token of these tiles. `factor` makes logits of the products of q and k; if
    `cfg.late_factor`, `max_logit` is the largest product instead.
    """
    for i in range(first, last):
        inner = i * cfg.tile + _range(masked and cfg.opaque_range, cfg)
        if cfg.block_sparse is None:
            tokens = origin + inner
            wanted = (tokens >= begin) & (tokens < end)
        else:
            tokens, wanted = token_at(inner, stretch, cfg)
            wanted = wanted & (tokens >= begin) & (tokens < end)
            inner = tokens - origin
        seen = _seen(tokens, wanted, position, offset, tl.constexpr(cfg.queries > 1 or cfg.patterns > 1), cfg)
        k_factor = None
        v_factor = None
        if paged:
            block = tl.load(table + tokens // cfg.block_size, mask=wanted, other=0)
            if not masked:
                block = tl.max_constancy(block, tl.constexpr(cfg.run))
            block = block.to(tl.int64)
            slot = tokens % cfg.block_size
            key_at = vectors(key, block, slot, kv_head, tl.constexpr(cfg.key_x), cfg)
            if cfg.layout == "vllm" and not masked:
                value_at = _columns(value, block, slot, kv_head, cfg)
            else:
                value_at = vectors(value, block, slot, kv_head, tl.constexpr(cfg.value_x), cfg)
            scale_at = (block * cfg.num_kv_heads + kv_head) * cfg.block_size + slot
            if cfg.k_scale == "slot":
                k_factor = tl.load(k_scale + scale_at, mask=wanted, other=0.0)
            if cfg.v_scale == "slot":
                v_factor = tl.load(v_scale + scale_at, mask=wanted, other=0.0)
        else:
            at = ((start + inner).to(tl.int64) * cfg.num_kv_heads + kv_head) * cfg.head_size
            element = tl.arange(0, cfg.padded_head_size)
            key_at = key + at[:, None] + element[None, :]
            value_at = value + at[:, None] + element[None, :]
        k = _load_tile(key_at, wanted, masked, cfg)
        k = _to_float16(k, True) if cfg.staged_values and paged else _convert(k, q.dtype)
        if paged and cfg.layout == "vllm" and not masked:
            in_head = (tl.arange(0, cfg.padded_head_size) < cfg.head_size)[:, None]
            v = tl.trans(_convert(tl.load(value_at, mask=in_head, other=0.0), q.dtype))
        elif cfg.staged_values and paged:
            v = _to_float16(_load_tile(value_at, wanted, masked, cfg), False)
        else:
            v = _convert(_load_tile(value_at, wanted, masked, cfg), q.dtype)

        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = _logits(logits, k_factor, factor, tokens, position, slope, seen, masked, cfg)
        weights, acc, max_logit, exp_sum = _weights(logits, factor, acc, max_logit, exp_sum, cfg)
        if v_factor is None:
            acc = tl.dot(weights.to(q.dtype), v, acc, input_precision="ieee")
        else:  # the largest scale stays out of the narrow product, so that it cannot overflow there
            peak = tl.max(tl.abs(v_factor), 0)
            peak = tl.where(peak > 0, peak, 1.0)
            weights *= (v_factor / peak)[None, :]
            acc += tl.dot(weights.to(q.dtype), v, input_precision="ieee") * peak
    return acc, max_logit, exp_sum


@triton.jit
@no_type_check
def add_token(
    acc, max_logit, exp_sum, q, factor, position, slope, offset, key, value, k_scale, v_scale, kv_head, slot, token,
    begin, end, cfg: tl.constexpr,
):  # fmt: skip
    """Adds one token, if it is in [begin, end), to an unfinished softmax, as `add_tiles` would from its slot.

    `key` and `value` are what that slot holds, [1, padded_head_size]; `slot` and `token` are [1] too.
    """
    wanted = (token >= begin) & (token < end)
    seen = _seen(token, wanted, position, offset, True, cfg)
    if cfg.block_sparse is not None:
        wanted = wanted & (tl.max(seen.to(tl.int32), 0) > 0)
    scale_at = (slot // cfg.block_size).to(tl.int64) * cfg.num_kv_heads + kv_head
    scale_at = scale_at * cfg.block_size + slot % cfg.block_size
    k_factor = None
    if cfg.k_scale == "slot":
        k_factor = tl.load(k_scale + scale_at)
    k = _convert(key, q.dtype).to(tl.float32)
    v = tl.where(wanted[:, None], _convert(value, q.dtype).to(tl.float32), 0.0)
    if cfg.v_scale == "slot":
        v *= tl.load(v_scale + scale_at)[:, None]
    logits = tl.sum(q.to(tl.float32) * k, 1)[:, None]
    logits = _logits(logits, k_factor, factor, token, position, slope, seen, True, cfg)
    weights, acc, max_logit, exp_sum = _weights(logits, factor, acc, max_logit, exp_sum, cfg)
    return acc + weights * v, max_logit, exp_sum


@triton.jit
@no_type_check
def _range(opaque: tl.constexpr, cfg: tl.constexpr):
    """0 to tile - 1; if `opaque`, LLVM cannot see that it comes from the thread's index.

    Where Triton has the tokens in two layouts LLVM joins their arithmetic, `thread & 31` and `thread % 16 << 1`, in
    vectors of two, of which it uses one lane each: the other one of the second is `thread << 31`. Its NVPTX backend
    (in Triton 3.6) computes that in 64 bits, where the lane that nobody wanted runs over into its neighbour. Some
    threads then had the tokens, and the masks, of others: wild reads.
    """
    numbers = tl.arange(0, cfg.tile)
    if opaque:
        numbers = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], dtype=tl.int32, is_pure=True, pack=1)
    return numbers


@triton.jit
@no_type_check
def _logits(products, k_factor, factor, tokens, position, slope, seen, masked: tl.constexpr, cfg: tl.constexpr):
    """Logits, but for the factor if that is late, of the products [rows, tokens] of q and k."""
    logits = products
    if k_factor is not None:
        logits *= k_factor[None, :]
    if not cfg.late_factor:
        logits *= factor[:, None]
    if cfg.logits_soft_cap is not None:
        logits = cfg.logits_soft_cap * _tanh(logits / cfg.logits_soft_cap)
    if cfg.alibi:
        logits += slope[:, None] * (tokens[None, :] - position[:, None]).to(tl.float32)
    if masked:
        logits = tl.where(seen, logits, float("-inf"))
    return logits


@triton.jit
@no_type_check
def _weights(logits, factor, acc, max_logit, exp_sum, cfg: tl.constexpr):
    """What the tokens' values weigh; and the softmax rescaled to the new maximum, with these weights in its sum."""
    top = tl.maximum(max_logit, tl.max(logits, 1))
    # A row that has seen nothing has no maximum: any finite one makes its exponentials 0 instead of NaN.
    level = tl.where(top == float("-inf"), 0.0, top)
    if cfg.late_factor:  # one fused multiply-add and one exponential for each logit
        base = factor * 1.4426950408889634
        # Both levels are rounded, and stay so behind the selects: a fused subtraction would see a difference where the
        # maximum is the old one, and add it up tile after tile.
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
def _seen(tokens, inside, position, offset, sparse: tl.constexpr, cfg: tl.constexpr):
    """Which of the tokens each row attends to, [rows, tile]; a row at position -1 attends to none.

    Without `sparse` every row with a position sees these tokens as far as a block-sparse pattern goes.
    """
    t = tokens[None, :]
    at = position[:, None]
    seen = inside[None, :] & (t <= at)
    if cfg.sliding_window is not None:
        seen = seen & (t > at - cfg.sliding_window)
    if sparse and cfg.block_sparse is not None:
        block = t // cfg.block_sparse.block_size
        local = block > at // cfg.block_sparse.block_size - cfg.block_sparse.local_blocks
        seen = seen & (local | ((block + offset[:, None]) % cfg.block_sparse.vert_stride == 0))
    return seen


@triton.jit
@no_type_check
def vectors(cache, blocks, offsets, kv_head, x: tl.constexpr, cfg: tl.constexpr):
    """Pointers to the vectors [tokens, padded_head_size] of the slots (blocks, offsets); blocks are 64-bit."""
    d = tl.arange(0, cfg.padded_head_size)
    if cfg.layout == "hnd":
        start = ((blocks * cfg.num_kv_heads + kv_head) * cfg.block_size + offsets) * cfg.head_size
        element = d
    elif cfg.layout == "nhd":
        start = ((blocks * cfg.block_size + offsets) * cfg.num_kv_heads + kv_head) * cfg.head_size
        element = d
    else:  # x neighbours of a vector lie together, then comes the next token
        start = (blocks * cfg.num_kv_heads + kv_head) * (cfg.head_size * cfg.block_size) + offsets * x
        element = d // x * (cfg.block_size * x) + d % x
    return cache + start[:, None] + element[None, :]


@triton.jit
@no_type_check
def _columns(cache, blocks, offsets, kv_head, cfg: tl.constexpr):
    """Pointers [padded_head_size, tokens] to values in layout "vllm", where neighbouring tokens are neighbours."""
    start = (blocks * cfg.num_kv_heads + kv_head) * (cfg.head_size * cfg.block_size) + offsets
    return cache + start[None, :] + (tl.arange(0, cfg.padded_head_size) * cfg.block_size)[:, None]


@triton.jit
@no_type_check
def _load_tile(at, wanted, masked: tl.constexpr, cfg: tl.constexpr):
    """The vectors of a tile, 0 for tokens that are not wanted: 0 * NaN is NaN, so they must not be read."""
    in_head = (tl.arange(0, cfg.padded_head_size) < cfg.head_size)[None, :]
    if masked:
        tile = tl.load(at, mask=wanted[:, None] & in_head, other=0.0)
    elif cfg.head_size != cfg.padded_head_size:
        tile = tl.load(at, mask=in_head, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
@no_type_check
def _convert(x, dtype: tl.constexpr):
    """Exact, for the pairs of dtypes that `launch.compute_dtype` makes."""
    if x.dtype == tl.int8 and dtype == tl.float16:
        # 0x6400 is 1024 in float16, where a unit is the last bit; the integer-to-float instruction is slow.
        x = ((x.to(tl.int16) + 128) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    return x.to(dtype)


@triton.jit
@no_type_check
def _to_float16(x, movable: tl.constexpr):
    """`_convert` of 8-bit values, four at a time; if not `movable`, where they were loaded.

    Triton would read values from shared memory transposed, byte by byte, to convert them in the product's registers.
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


@triton.jit
@no_type_check
def _exp(x, cfg: tl.constexpr):
    """exp2 is one instruction, exp takes three more for results that are denormal."""
    if cfg.compute_dtype == "float32":
        # A large product's rounding error is felt at this precision: it goes into a factor of its own.
        x = tl.maximum(x, -1e4)
        y = x * 1.4426950216293335
        error = tl.fma(x, tl.full(x.shape, 1.4426950216293335, tl.float32), -y) + x * 1.9259629911266175e-8
        power = tl.exp2(y) * (1.0 + error * 0.6931471805599453)
    else:
        power = tl.exp2(x * 1.4426950408889634)
    return power


@triton.jit
@no_type_check
def _tanh(x):
    """Without libdevice. Near 0, where the formula cancels, a polynomial."""
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(square < 0.04, near, tl.where(x < 0, -y, y))
