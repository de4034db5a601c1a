"""Device code of attention: the kernels of v1, v2, the automatic choice and ragged, around one loop over tiles.

A kernel uses six files. `schedule.py` assigns sequences and tokens to programs, and `items.py` does so in ragged
attention. `rows.py` defines a program's rows, `tiles.py` the loop over tiles, and `softmax.py` the state of that loop.
`write.py` writes new tokens into the cache. `reduce.py` merges the splits of a context.

Grid. Decode has one program for each (sequence, split of its context, tile of heads). Ragged attention has one for each
(tile of queries, split of its context, tile of heads), and the device decides how many splits there are. A tile of
heads is one kv head's group of query heads, or a part of a large group.

Who loads. Every program gathers its own tiles of `tile` tokens through the block table, with pointers of 64 bits.
Triton's software pipeline keeps a tile of K and V in flight in shared memory, or several tiles if `num_stages` is
larger. Block tables also take stages (benchmarks/LOG.md, "Tiles and stages of decode"):

    rows (query heads, times query tokens)      tile of tokens: start + 0 ... tile - 1
    +------------+     K^T in shared memory     +------------+
    | q  [rows,  |  x  [head_size, tile]     =  | logits     |  mask, online softmax in float32
    | head_size] |                              | [rows, tile]
    +------------+                              +------------+  x  V [tile, head_size]  ->  acc [rows, head_size]

Who computes. All warps of the program compute both products, on tensor cores with float32 sums. Products of float32
inputs run on plain cores, at full precision. Rows are padded to 16, and head_size to a power of two. The kernels mask
padding and never read it.

Roofline. Decode reads 2 * seq_len * head_size * itemsize bytes for each (sequence, kv head), once. It does 4 * group
operations for each element of K and the matching one of V, so memory bounds it up to groups of about 64. Ragged
attention does 4 * head_size operations for each (query, token) pair and query head, and the tensor cores bound it.

`cfg` is a `tuning.AttentionKernel`. `no_type_check` keeps run-time type checkers away from code that Triton compiles.
"""

# Without triton installed, pyright takes this folder for that package.
# pyright: reportAttributeAccessIssue=false

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

from paged_jax.kernels.triton.device.items import load_item, tile_of
from paged_jax.kernels.triton.device.rows import heads_of_rows, load_query, query_tile_of, rows_of, with_factor
from paged_jax.kernels.triton.device.schedule import Span, SparseSpan, of_rank, pattern_of, share_of
from paged_jax.kernels.triton.device.softmax import Softmax, finish, nothing_seen, with_largest_logit
from paged_jax.kernels.triton.device.tiles import Cache, NewTokens, Paged, add_tiles
from paged_jax.kernels.triton.device.write import Written, add_new_token, load_tokens
from paged_jax.options import PerHead


class Inputs(NamedTuple):
    """Pointers to the arrays that every attention kernel reads, except block tables."""

    query: tl.tensor
    key_cache: tl.tensor
    value_cache: tl.tensor
    seq_lens: tl.tensor
    scale: tl.tensor
    per_head: PerHead
    k_scale: tl.tensor
    v_scale: tl.tensor


class Outputs(NamedTuple):
    """Pointers to the results of decode: out and lse in `out` and `sums`, or each split's unfinished softmax."""

    out: tl.tensor
    sums: tl.tensor
    maxima: tl.tensor


class NewToken(NamedTuple):
    """Pointers to the new tokens' keys, values and slots, and the number of blocks in the cache."""

    key: tl.tensor
    value: tl.tensor
    slot_mapping: tl.tensor
    num_blocks: tl.tensor


class RaggedOutputs(NamedTuple):
    """Pointers to the results of ragged attention: out and lse, or each split's unfinished softmax."""

    out: tl.tensor
    lse: tl.tensor
    tmp_out: tl.tensor
    exp_sums: tl.tensor
    max_logits: tl.tensor


class Batch(NamedTuple):
    """A decode call's sizes, and its block tables."""

    block_tables: tl.tensor
    num_seqs: tl.tensor
    table_width: tl.tensor
    max_seq_len: tl.tensor
    num_splits: tl.tensor


@triton.jit
@no_type_check
def decode_kernel(
    query, key_cache, value_cache, block_tables, seq_lens, scale, alibi_slopes, sinks, k_scale, v_scale,
    num_seqs, table_width, max_seq_len, num_splits, out, sums, maxima, cfg: tl.constexpr,
):  # fmt: skip
    per_head = PerHead(alibi_slopes, sinks)
    inputs = Inputs(query, key_cache, value_cache, seq_lens, scale, per_head, k_scale, v_scale)
    batch = Batch(block_tables, num_seqs, table_width, max_seq_len, num_splits)
    _decode(inputs, None, batch, Outputs(out, sums, maxima), cfg)


@triton.jit
@no_type_check
def write_and_decode_kernel(
    query, key, value, block_tables, seq_lens, slot_mapping, scale, alibi_slopes, sinks, k_scale, v_scale,
    unused_key, unused_value, num_seqs, table_width, max_seq_len, num_splits, num_blocks, key_cache, value_cache,
    out, sums, maxima, cfg: tl.constexpr,
):  # fmt: skip
    """The caches are updated in place: they are outputs that alias inputs."""
    per_head = PerHead(alibi_slopes, sinks)
    inputs = Inputs(query, key_cache, value_cache, seq_lens, scale, per_head, k_scale, v_scale)
    batch = Batch(block_tables, num_seqs, table_width, max_seq_len, num_splits)
    new = NewToken(key, value, slot_mapping, num_blocks)
    _decode(inputs, new, batch, Outputs(out, sums, maxima), cfg)


@triton.jit
@no_type_check
def _decode(inputs, new, batch, outputs, cfg: tl.constexpr):
    """One program attends to one split of one sequence.

    A sequence's only split writes out and lse; each of several splits writes its unfinished softmax. If `new` has a
    valid slot for the sequence, the sequence's last token comes from `new`. The last split, which has the smallest
    share of the context, then stores the token in the cache and attends to it. No program reads the token's slot.
    """
    problem: tl.constexpr = cfg.problem
    num_splits = batch.num_splits
    pid = tl.program_id(0)
    head_tile = pid % (problem.num_kv_heads * cfg.head_tiles)
    pid = pid // (problem.num_kv_heads * cfg.head_tiles)
    split = pid % num_splits
    seq = pid // num_splits
    if cfg.tuning.ranked > 0:
        seq = of_rank(seq, inputs.seq_lens, batch.num_seqs, cfg)
    kv_head, head, valid = heads_of_rows(tl.arange(0, cfg.tuning.rows), head_tile, cfg)
    seq_len = tl.load(inputs.seq_lens + seq)
    position = tl.where(valid, seq_len - 1, -1)
    begin = seq_len * 0
    if problem.sliding_window is not None:
        begin = tl.maximum(seq_len - problem.sliding_window, 0)
    end = tl.minimum(seq_len, batch.max_seq_len)
    if new is not None:
        slot = tl.load(new.slot_mapping + seq)
        given = (slot >= 0) & (slot // problem.block_size < new.num_blocks)
        mine = given & (split == num_splits - 1)
        row = tl.full([1], 0, tl.int32) + tl.where(mine, seq, -1)
        new_key, new_value = load_tokens(new.key, new.value, row, kv_head, row >= 0, problem, cfg.tuning.width)
        written = Written(new_key, new_value, slot, seq_len - 1, mine, begin, end)
        end = tl.where(given, tl.minimum(end, seq_len - 1), end)
    span, first, last = share_of(split, begin, end, seq_len - 1, kv_head, head_tile, num_splits, cfg)

    cache_scale = head_scale(inputs.k_scale, kv_head, tl.constexpr(problem.k_scale))
    tokens = tl.zeros_like(head) + seq
    q, factor = load_query(inputs.query, tokens, head, valid, tl.load(inputs.scale) * cache_scale, outputs.out, cfg)
    rows = rows_of(q, factor, position, inputs.per_head, kv_head, head, valid, cfg)
    softmax = nothing_seen(cfg)
    table = batch.block_tables + seq.to(tl.int64) * batch.table_width
    cache = Cache(inputs.key_cache, inputs.value_cache, inputs.k_scale, inputs.v_scale)
    paged = Paged(cache, table)
    if new is not None and cfg.tuning.final:  # before a long loop, so that the token holds no registers during the loop
        softmax = add_new_token(softmax, rows, written, cache, kv_head, cfg)
    if cfg.whole_tiles:
        middle = tl.maximum(tl.minimum(last, (span.end - span.origin) // cfg.tuning.tile), first)
        softmax = add_tiles(softmax, rows, paged, kv_head, span, first, middle, True, False, cfg)
        first = middle
    softmax = add_tiles(softmax, rows, paged, kv_head, span, first, last, True, True, cfg)
    if new is not None and not cfg.tuning.final:  # after a short loop, so that the loop does not wait for the token
        softmax = add_new_token(softmax, rows, written, cache, kv_head, cfg)
    softmax = with_head_scale(softmax, inputs.v_scale, kv_head, tl.constexpr(problem.v_scale))
    softmax = with_largest_logit(softmax, factor, cfg)

    row = seq.to(tl.int64) * problem.num_heads + head
    with_sinks: tl.constexpr = problem.per_head.sinks and cfg.tuning.final
    result, lse, max_logit, exp_sum = finish(softmax, inputs.per_head.sinks, head, valid, with_sinks)
    if cfg.tuning.final:
        tl.store(outputs.sums + row, lse, mask=valid)
    else:
        row = row * num_splits + split
        tl.store(outputs.sums + row, exp_sum, mask=valid)
        tl.store(outputs.maxima + row, max_logit, mask=valid)
    _store(outputs.out, row, result, valid, cfg)


@triton.jit
@no_type_check
def ragged_kernel(
    query, key, value, key_cache, value_cache, block_tables, seq_lens, query_start_loc, items, scale, alibi_slopes,
    sinks, k_scale, v_scale, num_tokens, num_seqs, table_width, max_seq_len, num_items,
    out, lse, tmp_out, exp_sums, max_logits, cfg: tl.constexpr,
):  # fmt: skip
    """One program attends with one tile of queries to one split of their context.

    A context's only split writes out and lse; each of several splits writes its unfinished softmax.
    """
    per_head = PerHead(alibi_slopes, sinks)
    inputs = Inputs(query, key_cache, value_cache, seq_lens, scale, per_head, k_scale, v_scale)
    outputs = RaggedOutputs(out, lse, tmp_out, exp_sums, max_logits)
    num_head_tiles: tl.constexpr = cfg.problem.num_kv_heads * cfg.head_tiles
    head_tile = tl.program_id(0) % num_head_tiles
    index = tl.program_id(0) // num_head_tiles
    if cfg.tuning.final:
        item = tile_of(num_items - 1 - index, query_start_loc, num_tokens, num_seqs, cfg)  # long contexts first
    else:
        item = load_item(items, index)
        if item.seq < 0:
            return
    tile = query_tile_of(item, head_tile, seq_lens, num_seqs, max_seq_len, cfg)
    rows, factor, new_factor = _ragged_rows(inputs, item, tile, out, cfg)
    table = block_tables + item.seq.to(tl.int64) * table_width
    paged = Paged(Cache(key_cache, value_cache, k_scale, v_scale), table)
    softmax = _add_cached(nothing_seen(cfg), rows, paged, tile, head_tile, item, cfg)
    softmax = with_head_scale(softmax, v_scale, tile.kv_head, tl.constexpr(cfg.problem.v_scale))
    if cfg.prefix:
        new = NewTokens(key, value, item.start)
        softmax = _add_new(softmax, with_factor(rows, new_factor), new, tile, head_tile, item, cfg)
    softmax = with_largest_logit(softmax, factor, cfg)
    if cfg.tuning.final:
        store_whole(softmax, sinks, out, lse, item.start + tile.queries, tile.head, tile.valid, cfg)
    else:
        store_item(softmax, sinks, outputs, load_item(items, index, again=True), head_tile, num_head_tiles, cfg)


@triton.jit
@no_type_check
def _ragged_rows(inputs, item, tile, out, cfg: tl.constexpr):
    """Returns a tile's rows, the factor of products with cached keys, and the factor of products with new keys."""
    cache_scale = head_scale(inputs.k_scale, tile.kv_head, tl.constexpr(cfg.problem.k_scale))
    tokens = item.start + tile.queries
    scale = tl.load(inputs.scale)
    if cfg.late_factor or not cfg.prefix:
        q, factor = load_query(inputs.query, tokens, tile.head, tile.valid, scale * cache_scale, out, cfg)
        new_factor = factor
    else:
        q, new_factor = load_query(inputs.query, tokens, tile.head, tile.valid, scale, out, cfg)
        factor = new_factor * cache_scale
    rows = rows_of(q, factor, tile.position, inputs.per_head, tile.kv_head, tile.head, tile.valid, cfg)
    return rows, factor, new_factor


@triton.jit
@no_type_check
def store_item(softmax, sinks, outputs, item, head_tile, num_head_tiles: tl.constexpr, cfg: tl.constexpr):
    """Stores out and lse if the item is its context's only split, otherwise its unfinished softmax."""
    tokens = item.first_query + tl.arange(0, cfg.tuning.rows) // cfg.tuning.heads
    _kv_head, head, valid = heads_of_rows(tl.arange(0, cfg.tuning.rows), head_tile, cfg)
    valid = valid & (tokens < item.query_len)
    if item.num_splits == 1:
        store_whole(softmax, sinks, outputs.out, outputs.lse, item.start + tokens, head, valid, cfg)
    else:
        row = ((item.partial + item.split) * num_head_tiles + head_tile).to(tl.int64) * cfg.tuning.rows
        row += tl.arange(0, cfg.tuning.rows)
        result, _, max_logit, exp_sum = finish(softmax, sinks, head, valid, False)
        tl.store(outputs.exp_sums + row, exp_sum, mask=valid)
        tl.store(outputs.max_logits + row, max_logit, mask=valid)
        _store(outputs.tmp_out, row, result, valid, cfg)


@triton.jit
@no_type_check
def store_whole(softmax, sinks, out, lse, tokens, head, valid, cfg: tl.constexpr):
    """Stores out and lse of rows that have seen all their tokens."""
    row = tokens.to(tl.int64) * cfg.problem.num_heads + head
    result, log_sum, _, _ = finish(softmax, sinks, head, valid, tl.constexpr(cfg.problem.per_head.sinks))
    tl.store(lse + row, log_sum, mask=valid)
    _store(out, row, result, valid, cfg)


@triton.jit
@no_type_check
def _add_cached(softmax, rows, paged, tile, head_tile, item, cfg: tl.constexpr):
    """Adds the item's share of the tokens that its tile of queries sees in the cache."""
    size: tl.constexpr = cfg.tuning.tile
    end = tile.end
    if cfg.prefix:
        end = tl.minimum(end, tile.context_len)
    if cfg.problem.block_sparse is not None:
        pattern, count = pattern_of(tile.begin, end, tile.first_position, tile.end - 1, tile.kv_head, head_tile, cfg)
        span = SparseSpan(0, tile.begin, end, pattern)
        first = 0
        last = tl.cdiv(count, size)
    else:
        span = Span(0, tile.begin, end)
        first = tile.begin // size
        last = (end + size - 1) // size
    if not cfg.tuning.final:
        share = tl.cdiv(tl.maximum(last - first, 0), item.num_splits)
        first += item.split * share
        last = tl.minimum(last, first + share)
    if cfg.whole_tiles:
        middle = tl.maximum(tl.minimum(tl.minimum(tile.first_position + 1, end) // size, last), first)
        softmax = add_tiles(softmax, rows, paged, tile.kv_head, span, first, middle, True, False, cfg)
        first = middle
    return add_tiles(softmax, rows, paged, tile.kv_head, span, first, last, True, True, cfg)


@triton.jit
@no_type_check
def _add_new(softmax, rows, new, tile, head_tile, item, cfg: tl.constexpr):
    """Adds the tokens beside the cache that a tile of queries sees, in the last split only, which is the smallest."""
    size: tl.constexpr = cfg.tuning.tile
    end = tile.end
    if not cfg.tuning.final:
        end = tl.where(item.split == item.num_splits - 1, end, tile.context_len)
    if cfg.problem.block_sparse is not None:
        begin = tl.maximum(tile.begin, tile.context_len)
        pattern, count = pattern_of(begin, end, tile.first_position, end - 1, tile.kv_head, head_tile, cfg)
        span = SparseSpan(tile.context_len, begin, end, pattern)
        first = 0
        last = tl.cdiv(count, size)
    else:
        span = Span(tile.context_len, tile.begin, end)
        first = tl.maximum(tile.begin - tile.context_len, 0) // size
        last = (end - tile.context_len + size - 1) // size
    return add_tiles(softmax, rows, new, tile.kv_head, span, first, last, False, True, cfg)


@triton.jit
@no_type_check
def head_scale(scale, kv_head, granularity: tl.constexpr):
    """Returns the scale of a kv head; 1 if the cache has no scale, or one for each slot."""
    factor = 1.0
    if granularity == "cache":
        factor = tl.load(scale)
    elif granularity == "head":
        factor = tl.load(scale + kv_head)
    return factor


@triton.jit
@no_type_check
def with_head_scale(softmax, v_scale, kv_head, granularity: tl.constexpr):
    """Multiplies the softmax's values by `head_scale`; the loop took unscaled values from the cache."""
    acc, max_logit, exp_sum = softmax
    acc *= head_scale(v_scale, kv_head, granularity)
    return Softmax(acc, max_logit, exp_sum)


@triton.jit
@no_type_check
def _store(out, row, result, valid, cfg: tl.constexpr):
    """Stores each row's result in that row of `out`."""
    d = tl.arange(0, cfg.tuning.width)
    mask = valid[:, None] & (d < cfg.problem.head_size)[None, :]
    out = out + row[:, None] * cfg.problem.head_size + d[None, :]
    tl.store(out, result.to(out.dtype.element_ty), mask=mask)
