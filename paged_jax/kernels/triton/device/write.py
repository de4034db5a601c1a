"""Device code of the fused cache write: it quantises K and V of new tokens and stores them in their slots.

The grid has one program for each (tile of tokens, kv head). A program loads both vectors of each token, rounds them,
and stores them in the token's slot, if it has one. Roofline: (itemsize of key + itemsize of the cache) * 2 * head_size
bytes for each (token, kv head). A decode step writes so little that the launch dominates.

`load_tokens` and `add_new_token` serve `write_and_attend` (`attend.py`).

The caches are updated in place: the outputs `key_cache` and `value_cache`, or `kv_cache`, alias inputs. `cfg` is a
`cache_tuning.WriteKernel`, or in decode a `tuning.AttentionKernel`. `pool` is a `problem.Pool`, `quantisation` a
`cache_tuning.Quantisation`, and `width` the number of elements that a vector takes in registers.
"""

# Without triton installed, pyright takes this folder for that package.
# pyright: reportAttributeAccessIssue=false

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

from paged_jax.kernels.triton.device.softmax import Softmax
from paged_jax.kernels.triton.device.tiles import Cache, add_token, vectors


@triton.jit
@no_type_check
def write_kernel(
    key, value, slot_mapping, k_scale, v_scale, unused_key, unused_value, num_tokens, num_blocks,
    key_cache, value_cache, cfg: tl.constexpr,
):  # fmt: skip
    cache = Cache(key_cache, value_cache, k_scale, v_scale)
    _write(key, value, slot_mapping, cache, num_tokens, num_blocks, cfg)


@triton.jit
@no_type_check
def write_interleaved_kernel(
    key, value, slot_mapping, k_scale, v_scale, unused, num_tokens, num_blocks, kv_cache, cfg: tl.constexpr
):
    """Does the same as `write_kernel`, in one pool that holds keys and values."""
    cache = Cache(kv_cache, kv_cache, k_scale, v_scale)
    _write(key, value, slot_mapping, cache, num_tokens, num_blocks, cfg)


@triton.jit
@no_type_check
def _write(key, value, slot_mapping, cache, num_tokens, num_blocks, cfg: tl.constexpr):
    """One program quantises the vectors of one kv head of some tokens, and stores them."""
    pool: tl.constexpr = cfg.pool
    quantisation: tl.constexpr = cfg.quantisation
    kv_head = tl.program_id(0) % pool.num_kv_heads
    tokens = tl.program_id(0) // pool.num_kv_heads * cfg.tokens + tl.arange(0, cfg.tokens)
    given = tokens < num_tokens
    slot = tl.load(slot_mapping + tokens, mask=given, other=-1)
    valid = (slot >= 0) & (slot // pool.block_size < num_blocks)
    # The loads of vectors and slots overlap.
    new_key, new_value = load_tokens(key, value, tokens, kv_head, given, pool, cfg.width)
    _store_tokens(new_key, new_value, cache, slot, kv_head, valid, pool, quantisation, cfg.width)


@triton.jit
@no_type_check
def latents_at(rows, d, pool: tl.constexpr):
    """The offsets of elements `d`, [1, width], of latents: [n, width]. Pools may have more than 2**31 elements."""
    return (rows.to(tl.int64) * pool.head_size)[:, None] + d


@triton.jit
@no_type_check
def write_latents_kernel(
    latent, slot_mapping, scale, unused_latent, num_tokens, num_blocks, latent_cache, cfg: tl.constexpr
):  # fmt: skip
    """The pool of `cfg` has one kv head, whose head_size is latent_size; one program writes some tokens."""
    pool: tl.constexpr = cfg.pool
    quantisation: tl.constexpr = cfg.quantisation
    tokens = tl.program_id(0) * cfg.tokens + tl.arange(0, cfg.tokens)
    given = tokens < num_tokens
    slot = tl.load(slot_mapping + tokens, mask=given, other=-1)
    valid = (slot >= 0) & (slot // pool.block_size < num_blocks)
    d = tl.arange(0, cfg.width)[None, :]
    in_latent = d < pool.head_size
    x = tl.load(latent + latents_at(tokens, d, pool), mask=given[:, None] & in_latent, other=0.0)
    x = _quantise(x, scale, tl.constexpr(quantisation.k_scale), 0, slot, valid, quantisation)
    at = latents_at(slot, d, pool)
    code = _code(x, latent_cache.dtype.element_ty, quantisation)
    tl.store(latent_cache + at, code, mask=valid[:, None] & in_latent)


class Written(NamedTuple):
    """The token that decode writes.

    Attributes:
      key, value: [1, width], the token's vectors.
      slot: the slot that gets the vectors.
      token: the token's position.
      mine: whether this program writes the token.
      begin, end: the sequence's query attends to the tokens begin <= t < end.
    """

    key: tl.tensor
    value: tl.tensor
    slot: tl.tensor
    token: tl.tensor
    mine: tl.tensor
    begin: tl.tensor
    end: tl.tensor


@triton.jit
@no_type_check
def load_tokens(key, value, tokens, kv_head, valid, pool: tl.constexpr, width: tl.constexpr):
    """Loads the vectors [tokens, width] of one kv head."""
    d = tl.arange(0, width)
    mask = valid[:, None] & (d < pool.head_size)[None, :]
    at = ((tokens.to(tl.int64) * pool.num_kv_heads + kv_head) * pool.head_size)[:, None] + d[None, :]
    return tl.load(key + at, mask=mask, other=0.0), tl.load(value + at, mask=mask, other=0.0)


@triton.jit
@no_type_check
def add_new_token(softmax, rows, written, cache, kv_head, cfg: tl.constexpr):
    """If the token is this program's, writes it into its slot and adds the slot's content to the softmax.

    If there are several tiles of heads, their programs store the same bytes.
    """
    pool: tl.constexpr = cfg.problem
    quantisation: tl.constexpr = cfg.tuning.write
    acc, max_logit, exp_sum = softmax
    if written.mine:
        single = tl.full([1], 0, tl.int32)
        key, value = _store_tokens(
            written.key, written.value, cache, single + written.slot, kv_head, single == 0, pool, quantisation,
            cfg.tuning.width,
        )  # fmt: skip
        acc, max_logit, exp_sum = add_token(
            Softmax(acc, max_logit, exp_sum), rows, key, value, cache, kv_head, single + written.slot,
            single + written.token, written.begin, written.end, cfg,
        )  # fmt: skip
    return Softmax(acc, max_logit, exp_sum)


@triton.jit
@no_type_check
def _store_tokens(
    new_key, new_value, cache, slot, kv_head, valid, pool: tl.constexpr, quantisation: tl.constexpr,
    width: tl.constexpr,
):  # fmt: skip
    """Writes vectors into the valid slots; returns them as they are in the caches."""
    slot = tl.where(valid, slot, 0)
    block = (slot // pool.block_size).to(tl.int64)
    offset = slot % pool.block_size
    scale_at = (block * pool.num_kv_heads + kv_head) * pool.block_size + offset
    new_key = _quantise(
        new_key, cache.k_scale, tl.constexpr(quantisation.k_scale), kv_head, scale_at, valid, quantisation
    )
    new_value = _quantise(
        new_value, cache.v_scale, tl.constexpr(quantisation.v_scale), kv_head, scale_at, valid, quantisation
    )
    new_key = _code(new_key, cache.key.dtype.element_ty, quantisation)
    new_value = _code(new_value, cache.value.dtype.element_ty, quantisation)
    if pool.layout == "vllm":
        _store_across(new_key, new_value, cache, block, offset, kv_head, valid, pool, width)
    else:
        mask = valid[:, None] & (tl.arange(0, width) < pool.head_size)[None, :]
        tl.store(vectors(cache.key, block, offset, kv_head, False, pool, width), new_key, mask=mask)
        tl.store(vectors(cache.value, block, offset, kv_head, True, pool, width), new_value, mask=mask)
    return new_key, new_value


@triton.jit
@no_type_check
def _store_across(
    new_key, new_value, cache, block, offset, kv_head, valid, pool: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    """Stores vectors in layout "vllm". Neighbouring threads store neighbouring tokens, which are adjacent in memory."""
    x: tl.constexpr = pool.key_x
    start = (block * pool.num_kv_heads + kv_head) * (pool.head_size * pool.block_size)
    # Triton assigns neighbouring threads along the last axis, if its elements are known to be contiguous, and then
    # along the first axis, which has the tokens.
    chunk = tl.arange(0, width // x)
    chunks = tl.reshape(new_key, (new_key.shape[0], width // x, x))
    at = (start + offset * x)[:, None, None] + (chunk * (pool.block_size * x))[None, :, None]
    mask = valid[:, None, None] & (chunk * x < pool.head_size)[None, :, None]
    tl.store(cache.key + at + tl.arange(0, x)[None, None, :], chunks, mask=mask)
    mask = valid[:, None] & (tl.arange(0, width) < pool.head_size)[None, :]
    tl.store(vectors(cache.value, block, offset, kv_head, True, pool, width), new_value, mask=mask)


@triton.jit
@no_type_check
def _quantise(x, scale, granularity: tl.constexpr, kv_head, scale_at, valid, quantisation: tl.constexpr):
    """Divides x by the scale and clips it to the range of the cache's dtype, if that is narrower than x's."""
    if quantisation.narrower:
        x = x.to(tl.float32)
        if granularity == "cache":
            x = _divide(x, tl.zeros_like(scale_at).to(tl.float32)[:, None] + tl.load(scale), quantisation)
        elif granularity == "head":
            x = _divide(x, tl.zeros_like(scale_at).to(tl.float32)[:, None] + tl.load(scale + kv_head), quantisation)
        elif granularity == "slot":
            x = _divide(x, tl.load(scale + scale_at, mask=valid, other=1.0)[:, None], quantisation)
        x = tl.clamp(x, quantisation.smallest, quantisation.largest, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
@no_type_check
def _divide(x, divisor, quantisation: tl.constexpr):
    """Returns x / divisor [rows, 1], rounded to nearest if the result is in the range of the cache's dtype."""
    size = tl.abs(divisor)
    tame = tl.min(tl.where((size > 1e-18) & (size < 1e18), 1, 0)) > 0
    if tame & (quantisation.largest < 1e6):
        # The bound is far outside the range, and keeps products from overflowing. Each of two corrections adds the
        # exact remainder times the inverse.
        bound = tl.zeros_like(x) + size * (2 * quantisation.largest)
        x = tl.clamp(x, -bound, bound, propagate_nan=tl.PropagateNan.ALL)
        inverse = tl.zeros_like(x) + tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        y = x * inverse
        for _ in tl.static_range(2):
            y = tl.fma(tl.fma(tl.zeros_like(x) + divisor, y, -x), -inverse, y)
    else:
        y = tl.where(x == 0, x, tl.div_rn(x, tl.zeros_like(x) + divisor))  # 0 / 0 is also 0
    return y


@triton.jit
@no_type_check
def _code(x, dtype: tl.constexpr, quantisation: tl.constexpr):
    """Rounds x to nearest even in the cache's dtype; float8 in software if the GPU has no instruction for it."""
    if quantisation.native or x.dtype == dtype:
        code = x.to(dtype)
    elif quantisation.cache_dtype == "float8_e4m3fn":
        code = _float8(x, 3, 7).to(dtype, bitcast=True)
    elif quantisation.cache_dtype == "float8_e5m2":
        code = _float8(x, 2, 15).to(dtype, bitcast=True)
    elif quantisation.cache_dtype == "int8":
        # The last bit of a float32 near 1.5 * 2**23 counts 1.
        code = ((x + 12582912.0) - 12582912.0).to(tl.int32).to(dtype)
    else:
        code = x.to(dtype)
    return code


@triton.jit
@no_type_check
def _float8(x, mantissa: tl.constexpr, bias: tl.constexpr):
    """Returns the codes, uint8, of float32 values within a float8 format's finite range."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    shift: tl.constexpr = 23 - mantissa
    normal = (bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift
    normal -= (127 - bias) << mantissa
    # Numbers below the smallest normal one are multiples of a fixed unit, which is the last bit of x + `magic`.
    unit: tl.constexpr = (127 + 1 - bias - mantissa + 23) << 23
    magic = (bits * 0 + unit).to(tl.float32, bitcast=True)
    subnormal = (bits.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) - unit
    code = tl.where(bits < ((128 - bias) << 23), subnormal, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | sign).to(tl.uint8)
