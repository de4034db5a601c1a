"""Device code of attention: the kernels of v1, v2, the automatic choice and ragged, around one loop over tiles.

What a kernel is made of: `schedule.py` says whose turn it is, `tiles.py` has the loop, `write.py` the new tokens.

Grid. Decode: one program for each (sequence, split of its context, tile of heads). Ragged: one for each (tile of
queries, tile of heads). A tile of heads is one kv head's group of query heads, or a part of a very large group.

Who loads. Every program gathers its own tiles of `tile` tokens through the block table, with the pointers worked
out in 64 bits; Triton's software pipeline keeps a tile of K and V, or more with more `num_stages`, in flight in
shared memory (block tables take stages too: benchmarks/LOG.md):

    rows (query heads, times query tokens)      tile of tokens: start + 0 ... tile - 1
    +------------+     K^T in shared memory     +------------+
    | q  [rows,  |  x  [head_size, tile]     =  | logits     |  mask, online softmax in float32
    | head_size] |                              | [rows, tile]
    +------------+                              +------------+  x  V [tile, head_size]  ->  acc [rows, head_size]

Who computes. All warps of the program, both products on tensor cores with float32 sums (float32 inputs: on plain
cores, at full precision). Rows are padded to 16 and head_size to a power of two; padding is masked, never read.

Roofline. Decode reads 2 * seq_len * head_size * itemsize bytes for each (sequence, kv head), once, and does
4 * group operations for each pair of elements: bound by memory up to groups of about 64. Ragged does
2 * head_size * 2 operations for each (query, token) pair and is bound by the tensor cores.

`cfg` is a `config.Config`. `no_type_check` keeps run-time type checkers away from code that Triton compiles.
"""

# Where triton is not installed pyright takes this folder for it.
# pyright: reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from paged_jax.kernels.triton.schedule import (
    of_rank,
    pattern_shift,
    sequence_of,
    share_of,
    sparse_share_of,
    sparse_stretch,
)
from paged_jax.kernels.triton.tiles import add_tiles
from paged_jax.kernels.triton.write import add_new_token, load_tokens


@triton.jit
@no_type_check
def decode_kernel(
    query, key_cache, value_cache, block_tables, seq_lens, scale, alibi_slopes, sinks, k_scale, v_scale,
    num_seqs, table_width, max_seq_len, num_splits, out, sums, maxima, cfg: tl.constexpr,
):  # fmt: skip
    _decode(
        query, query, query, key_cache, value_cache, block_tables, seq_lens, seq_lens, scale, alibi_slopes, sinks,
        k_scale, v_scale, num_seqs, table_width, max_seq_len, num_splits, 0, out, sums, maxima, cfg,
    )  # fmt: skip


@triton.jit
@no_type_check
def write_and_decode_kernel(
    query, key, value, block_tables, seq_lens, slot_mapping, scale, alibi_slopes, sinks, k_scale, v_scale,
    unused_key, unused_value, num_seqs, table_width, max_seq_len, num_splits, num_blocks, key_cache, value_cache,
    out, sums, maxima, cfg: tl.constexpr,
):  # fmt: skip
    """The caches are updated in place: they are outputs that alias inputs."""
    _decode(
        query, key, value, key_cache, value_cache, block_tables, seq_lens, slot_mapping, scale, alibi_slopes, sinks,
        k_scale, v_scale, num_seqs, table_width, max_seq_len, num_splits, num_blocks, out, sums, maxima, cfg,
    )  # fmt: skip


@triton.jit
@no_type_check
def _decode(
    query, key, value, key_cache, value_cache, block_tables, seq_lens, slot_mapping, scale, alibi_slopes, sinks,
    k_scale, v_scale, num_seqs, table_width, max_seq_len, num_splits, num_blocks, out, sums, maxima,
    cfg: tl.constexpr,
):  # fmt: skip
    """One split of one sequence. The only split writes out and lse (to `sums`), others their unfinished softmax.

    With `cfg.write` the last token comes from `key` and `value` where its slot is valid. The last split, whose share
    of the context is the smallest, stores it in the cache and attends to it; no program reads its slot.
    """
    pid = tl.program_id(0)
    head_tile = pid % (cfg.num_kv_heads * cfg.head_tiles)
    pid = pid // (cfg.num_kv_heads * cfg.head_tiles)
    split = pid % num_splits
    seq = pid // num_splits
    if cfg.ranked > 0:
        seq = of_rank(seq, seq_lens, num_seqs, cfg)
    kv_head, head, valid = _heads_of_rows(head_tile, cfg)
    seq_len = tl.load(seq_lens + seq)
    position = tl.where(valid, seq_len - 1, -1)
    begin = seq_len * 0
    if cfg.sliding_window is not None:
        begin = tl.maximum(seq_len - cfg.sliding_window, 0)
    end = tl.minimum(seq_len, max_seq_len)
    if cfg.write is not None:
        slot = tl.load(slot_mapping + seq)
        given = (slot >= 0) & (slot // cfg.block_size < num_blocks)
        mine = given & (split == num_splits - 1)
        new = tl.full([1], 0, tl.int32) + tl.where(mine, seq, -1)
        new_key, new_value = load_tokens(key, value, new, kv_head, new >= 0, cfg)
        bound = end
        end = tl.where(given, tl.minimum(end, seq_len - 1), end)
    if cfg.block_sparse is None:
        stretch = None
        origin, begin, end, first, last = share_of(split, begin, end, num_splits, cfg)
    else:
        origin = 0
        begin, end, first, last, stretch = sparse_share_of(
            split, begin, end, seq_len - 1, kv_head, head_tile, num_splits, cfg
        )

    cache_scale = _head_scale(k_scale, kv_head, tl.constexpr(cfg.k_scale))
    q, factor = _load_query(query, tl.zeros_like(head) + seq, head, valid, tl.load(scale) * cache_scale, out, cfg)
    slope, offset = _of_heads(alibi_slopes, kv_head, head, valid, cfg)
    acc, max_logit, exp_sum = _empty(cfg)
    if cfg.write is not None and cfg.final:  # before a long loop: no registers are kept through it
        acc, max_logit, exp_sum = add_new_token(
            acc, max_logit, exp_sum, q, factor, position, slope, offset, new_key, new_value, key_cache, value_cache,
            k_scale, v_scale, kv_head, slot, seq_len - 1, mine, begin, bound, cfg,
        )  # fmt: skip
    table = block_tables + seq.to(tl.int64) * table_width
    if cfg.whole_tiles:
        middle = tl.maximum(tl.minimum(last, (end - origin) // cfg.tile), first)
        acc, max_logit, exp_sum = add_tiles(
            acc, max_logit, exp_sum, q, factor, position, slope, offset, key_cache, value_cache, table, k_scale,
            v_scale, kv_head, origin, 0, first, middle, begin, end, stretch, True, False, cfg,
        )  # fmt: skip
        first = middle
    acc, max_logit, exp_sum = add_tiles(
        acc, max_logit, exp_sum, q, factor, position, slope, offset, key_cache, value_cache, table, k_scale, v_scale,
        kv_head, origin, 0, first, last, begin, end, stretch, True, True, cfg,
    )  # fmt: skip
    if cfg.write is not None and not cfg.final:  # after a short one, which does not wait for it
        acc, max_logit, exp_sum = add_new_token(
            acc, max_logit, exp_sum, q, factor, position, slope, offset, new_key, new_value, key_cache, value_cache,
            k_scale, v_scale, kv_head, slot, seq_len - 1, mine, begin, bound, cfg,
        )  # fmt: skip
    acc *= _head_scale(v_scale, kv_head, tl.constexpr(cfg.v_scale))
    acc, max_logit, exp_sum = _largest_logit(acc, max_logit, exp_sum, factor, cfg)

    row = seq.to(tl.int64) * cfg.num_heads + head
    result, lse, max_logit, exp_sum = _finish(
        acc, max_logit, exp_sum, sinks, head, valid, tl.constexpr(cfg.sinks and cfg.final)
    )
    if cfg.final:
        tl.store(sums + row, lse, mask=valid)
    else:
        row = row * num_splits + split
        tl.store(sums + row, exp_sum, mask=valid)
        tl.store(maxima + row, max_logit, mask=valid)
    _store(out, row, result, valid, cfg)


@triton.jit
@no_type_check
def reduce_kernel(
    tmp_out, exp_sums, max_logits, seq_lens, sinks, num_splits, out, lse, cfg: tl.constexpr
):  # fmt: skip
    """The softmax over all splits of one (sequence, head), for a part of head_size."""
    row = (tl.program_id(0) // cfg.reduce_parts).to(tl.int64)
    part = tl.program_id(0) % cfg.reduce_parts
    head = (row % cfg.num_heads).to(tl.int32)
    used = num_splits
    if cfg.partition_size is not None:
        seq_len = tl.load(seq_lens + row // cfg.num_heads)
        used = tl.minimum(num_splits, (seq_len + cfg.partition_size - 1) // cfg.partition_size)
    width: tl.constexpr = cfg.padded_head_size // cfg.reduce_parts
    d = part * width + tl.arange(0, width)
    acc = tl.full([1, width], 0, tl.float32)
    max_logit = tl.full([1], float("-inf"), tl.float32)
    exp_sum = tl.full([1], 0, tl.float32)
    for start in range(0, used, cfg.reduce_splits):
        splits = start + tl.arange(0, cfg.reduce_splits)
        inside = splits < used
        at = row * num_splits + splits
        maxima = tl.load(max_logits + at, mask=inside, other=float("-inf"))
        sums = tl.load(exp_sums + at, mask=inside, other=0.0)
        mask = inside[:, None] & (d < cfg.head_size)[None, :]
        parts = tl.load(tmp_out + at[:, None] * cfg.head_size + d[None, :], mask=mask, other=0.0)
        top = tl.maximum(max_logit, tl.max(maxima, 0))
        shift = tl.where(top == float("-inf"), 0.0, top)
        keep = tl.exp(max_logit - shift)
        weights = sums * tl.exp(maxima - shift)
        acc = acc * keep[:, None] + tl.sum(weights[:, None] * parts, 0)[None, :]
        exp_sum = exp_sum * keep + tl.sum(weights, 0)
        max_logit = top
    heads = tl.full([1], 0, tl.int32) + head
    result, log_sum, _, _ = _finish(acc, max_logit, exp_sum, sinks, heads, heads >= 0, tl.constexpr(cfg.sinks))
    tl.store(lse + row + tl.arange(0, 1), log_sum, mask=part + tl.arange(0, 1) == 0)
    tl.store(out + row * cfg.head_size + d[None, :], result.to(out.dtype.element_ty), mask=(d < cfg.head_size)[None, :])


@triton.jit
@no_type_check
def ragged_kernel(
    query, key, value, key_cache, value_cache, block_tables, seq_lens, query_start_loc, scale, alibi_slopes, sinks,
    k_scale, v_scale, num_tokens, num_seqs, table_width, max_seq_len, num_tiles, out, lse, cfg: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one sequence; the padding rows are a last sequence that sees nothing."""
    pid = tl.program_id(0)
    head_tile = pid % (cfg.num_kv_heads * cfg.head_tiles)
    tile = num_tiles - 1 - pid // (cfg.num_kv_heads * cfg.head_tiles)  # the longest contexts first
    seq = sequence_of(tile, query_start_loc, num_seqs, cfg)
    start = tl.load(query_start_loc + seq)
    stop = tl.load(query_start_loc + seq + 1, mask=seq < num_seqs, other=num_tokens)
    seq_len = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0)
    query_len = stop - start
    context_len = seq_len - query_len
    first_query = (tile - start // cfg.queries - seq) * cfg.queries

    kv_head, head, valid = _heads_of_rows(head_tile, cfg)
    queries = first_query + tl.arange(0, cfg.rows) // cfg.heads
    valid = valid & (queries < query_len)
    position = tl.where(valid & (seq < num_seqs), context_len + queries, -1)
    at = context_len + first_query  # position of the first query
    end = tl.minimum(context_len + tl.minimum(query_len, first_query + cfg.queries), max_seq_len)
    end = tl.where((seq < num_seqs) & (first_query < query_len), end, 0)
    begin = at * 0
    if cfg.sliding_window is not None:
        begin = tl.maximum(at - cfg.sliding_window + 1, 0)

    cache_scale = _head_scale(k_scale, kv_head, tl.constexpr(cfg.k_scale))
    if cfg.late_factor or not cfg.prefix:
        q, factor = _load_query(query, start + queries, head, valid, tl.load(scale) * cache_scale, out, cfg)
        new_factor = factor
    else:
        q, new_factor = _load_query(query, start + queries, head, valid, tl.load(scale), out, cfg)
        factor = new_factor * cache_scale
    slope, offset = _of_heads(alibi_slopes, kv_head, head, valid, cfg)
    acc, max_logit, exp_sum = _empty(cfg)
    table = block_tables + seq.to(tl.int64) * table_width
    cached = end
    if cfg.prefix:
        cached = tl.minimum(end, context_len)
    stretch = None
    first = begin // cfg.tile
    last = (cached + cfg.tile - 1) // cfg.tile
    if cfg.block_sparse is not None:
        stretch, count = sparse_stretch(begin, cached, at, end - 1, kv_head, head_tile, cfg)
        first = 0
        last = tl.cdiv(count, cfg.tile)
    if cfg.whole_tiles:
        middle = tl.maximum(tl.minimum(at + 1, cached) // cfg.tile, 0)
        acc, max_logit, exp_sum = add_tiles(
            acc, max_logit, exp_sum, q, factor, position, slope, offset, key_cache, value_cache, table, k_scale,
            v_scale, kv_head, 0, 0, first, middle, begin, cached, stretch, True, False, cfg,
        )  # fmt: skip
        first = middle
    acc, max_logit, exp_sum = add_tiles(
        acc, max_logit, exp_sum, q, factor, position, slope, offset, key_cache, value_cache, table, k_scale, v_scale,
        kv_head, 0, 0, first, last, begin, cached, stretch, True, True, cfg,
    )  # fmt: skip
    acc *= _head_scale(v_scale, kv_head, tl.constexpr(cfg.v_scale))
    if cfg.prefix:
        first = tl.maximum(begin - context_len, 0) // cfg.tile
        last = (end - context_len + cfg.tile - 1) // cfg.tile
        if cfg.block_sparse is not None:
            begin = tl.maximum(begin, context_len)
            stretch, count = sparse_stretch(begin, end, at, end - 1, kv_head, head_tile, cfg)
            first = 0
            last = tl.cdiv(count, cfg.tile)
        acc, max_logit, exp_sum = add_tiles(
            acc, max_logit, exp_sum, q, new_factor, position, slope, offset, key, value, table, k_scale, v_scale,
            kv_head, context_len, start, first, last, begin, end, stretch, False, True, cfg,
        )  # fmt: skip

    acc, max_logit, exp_sum = _largest_logit(acc, max_logit, exp_sum, factor, cfg)

    row = (start + queries).to(tl.int64) * cfg.num_heads + head
    result, log_sum, _, _ = _finish(acc, max_logit, exp_sum, sinks, head, valid, tl.constexpr(cfg.sinks))
    tl.store(lse + row, log_sum, mask=valid)
    _store(out, row, result, valid, cfg)


@triton.jit
@no_type_check
def _load_query(query, tokens, head, valid, scale, out, cfg: tl.constexpr):
    """The rows' queries in the dtype of the products, and each row's factor that makes logits of products with keys.

    If that waits for the exponential it is positive: the sign of `scale` goes to the queries.
    """
    d = tl.arange(0, cfg.padded_head_size)
    at = ((tokens.to(tl.int64) * cfg.num_heads + head) * cfg.head_size)[:, None] + d[None, :]
    mask = valid[:, None] & (d < cfg.head_size)[None, :]
    if cfg.late_factor and cfg.queries > 1:  # noqa: SIM102 (the inner condition is the device's)
        # Through the rows of `out`: matrix units take q from shared memory only if nothing happens to it on the way.
        if scale < 0:
            tl.store(out + at, -tl.load(query + at, mask=mask, other=0.0), mask=mask)
            tl.debug_barrier()
            query = out
    q = tl.load(query + at, mask=mask, other=0.0)
    if cfg.late_factor and cfg.queries == 1:
        q = tl.where(scale < 0, -q, q)
    unit = tl.full([cfg.rows], 1.0, tl.float32)
    if cfg.normalise_query:  # bfloat16 into float16: a power of two out of each row, so that it fits, exactly
        q = q.to(tl.float32)
        peak = tl.maximum(tl.max(tl.abs(q), 1), 1e-30)
        unit = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        q = q / unit[:, None]
    if cfg.compute_dtype == "float32":
        q = q.to(tl.float32)
    elif cfg.compute_dtype == "float16":
        q = q.to(tl.float16)
    else:
        q = q.to(tl.bfloat16)
    factor = unit * scale
    if cfg.late_factor:
        factor = tl.abs(factor)
        factor = tl.where(factor == 0, 1e-30, factor)  # 0 * -inf would be NaN where tokens are masked
    return q, factor


@triton.jit
@no_type_check
def _heads_of_rows(head_tile, cfg: tl.constexpr):
    """The kv head, each row's head, and which rows are no padding."""
    rows = tl.arange(0, cfg.rows)
    kv_head = head_tile // cfg.head_tiles
    in_group = head_tile % cfg.head_tiles * cfg.heads + rows % cfg.heads
    valid = (rows < cfg.heads * cfg.queries) & (in_group < cfg.group)
    return kv_head, kv_head * cfg.group + in_group, valid


@triton.jit
@no_type_check
def _of_heads(alibi_slopes, kv_head, head, valid, cfg: tl.constexpr):
    """Each row's ALiBi slope and its shift of the block-sparse pattern."""
    slope = tl.full([cfg.rows], 0, tl.float32)
    if cfg.alibi:
        slope = tl.load(alibi_slopes + head, mask=valid, other=0.0)
    offset = head * 0
    if cfg.block_sparse is not None:
        offset = head * 0 + pattern_shift(kv_head, head, cfg)
    return slope, offset


@triton.jit
@no_type_check
def _head_scale(scale, kv_head, kind: tl.constexpr):
    """A scale that is the same for the whole of a kv head's cache; 1 if there is none."""
    factor = 1.0
    if kind == "scalar":
        factor = tl.load(scale)
    elif kind == "head":
        factor = tl.load(scale + kv_head)
    return factor


@triton.jit
@no_type_check
def _empty(cfg: tl.constexpr):
    acc = tl.full([cfg.rows, cfg.padded_head_size], 0, tl.float32)
    return acc, tl.full([cfg.rows], float("-inf"), tl.float32), tl.full([cfg.rows], 0, tl.float32)


@triton.jit
@no_type_check
def _largest_logit(acc, max_logit, exp_sum, factor, cfg: tl.constexpr):
    """The softmax after `add_tiles`, with `max_logit` a logit and the exponential there 1."""
    if cfg.late_factor:
        base = factor * 1.4426950408889634
        # The level that was taken out of the exponents had been rounded, which shows where logits are huge.
        lack = tl.fma(-max_logit, base, max_logit * base)
        lack = tl.exp2(tl.where(max_logit == float("-inf"), 0.0, lack))
        acc *= lack[:, None]
        exp_sum *= lack
        max_logit *= factor
    return acc, max_logit, exp_sum


@triton.jit
@no_type_check
def _finish(acc, max_logit, exp_sum, sinks, head, valid, with_sinks: tl.constexpr):
    """Normalises; a sink joins the denominator and the lse. Rows that saw no token: out 0, lse -inf."""
    seen = exp_sum != 0  # NaN has been seen, too
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
def _store(out, row, result, valid, cfg: tl.constexpr):
    d = tl.arange(0, cfg.padded_head_size)
    mask = valid[:, None] & (d < cfg.head_size)[None, :]
    tl.store(out + row[:, None] * cfg.head_size + d[None, :], result.to(out.dtype.element_ty), mask=mask)
