"""Device code of multi-head latent attention: a tile of latents is the keys, and a part of it is the values.

The grid is the one of ragged attention (`attend.py`): one program for each (tile of queries, split of its context, tile
of heads). Decode has one query for each sequence. A latent has two parts, the value and the rest. A program loads each
part as a tile of its own, once:

    rows (query heads, times query tokens)        tile of tokens
    +------------------+-------+   value^T, rest^T            +------------+
    | q        [value] | [rest]|  x  [value + rest, tile]  =  | logits     |  mask, online softmax in float32
    +------------------+-------+                              +------------+  x  value [tile, value_size] -> acc

Roofline. A token's latent_size * itemsize bytes are read once for each tile of heads. The products take
2 * rows * (latent_size + value_size) operations for each token. Arithmetic bounds the kernel from 64 rows on.

`cfg` is a `mla_tuning.LatentKernel`, whose `problem.head_size` is the size of the values.
"""

# Without triton installed, pyright takes this folder for that package.
# pyright: reportAttributeAccessIssue=false

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

from paged_jax.kernels.triton.device.attend import RaggedOutputs, head_scale, store_item, store_whole, with_head_scale
from paged_jax.kernels.triton.device.items import load_item, tile_of
from paged_jax.kernels.triton.device.rows import Rows, logits_of, power_of_two, query_tile_of, seen_by, to_compute
from paged_jax.kernels.triton.device.softmax import Softmax, nothing_seen, weigh
from paged_jax.kernels.triton.device.tiles import convert


class Parts(NamedTuple):
    """The two parts of a tile of latents or of queries: the value [rows, width], and any rest [rows, rest_width]."""

    value: tl.tensor
    rest: tl.tensor


@triton.jit
@no_type_check
def latent_kernel(
    query, latent_cache, block_tables, seq_lens, query_start_loc, items, scale, sinks, latent_scale,
    num_tokens, num_seqs, table_width, max_seq_len, num_items, out, lse, tmp_out, exp_sums, max_logits,
    cfg: tl.constexpr,
):  # fmt: skip
    """One program attends with one tile of queries to one split of their context, like `attend.ragged_kernel`."""
    num_head_tiles: tl.constexpr = cfg.head_tiles
    head_tile = tl.program_id(0) % num_head_tiles
    index = tl.program_id(0) // num_head_tiles
    if cfg.tuning.final:
        item = tile_of(num_items - 1 - index, query_start_loc, num_tokens, num_seqs, cfg)  # long contexts first
    else:
        item = load_item(items, index)
        if item.seq < 0:
            return
    tile = query_tile_of(item, head_tile, seq_lens, num_seqs, max_seq_len, cfg)
    tokens = item.start + tile.queries
    q, factor = _load_query(query, tokens, tile.head, tile.valid, cfg)
    factor *= tl.load(scale) * head_scale(latent_scale, 0, tl.constexpr(cfg.problem.k_scale))
    rows = Rows(q.value, factor, tile.position, factor, tile.head)
    table = block_tables + item.seq.to(tl.int64) * table_width
    size: tl.constexpr = cfg.tuning.tile
    first = 0
    last = (tile.end + size - 1) // size
    if not cfg.tuning.final:
        share = tl.cdiv(last, item.num_splits)
        first = item.split * share
        last = tl.minimum(last, first + share)
    softmax = _add_tiles(nothing_seen(cfg), rows, q, latent_cache, table, first, last, tile.end, cfg)
    softmax = with_head_scale(softmax, latent_scale, 0, tl.constexpr(cfg.problem.k_scale))
    if cfg.tuning.final:
        store_whole(softmax, sinks, out, lse, tokens, tile.head, tile.valid, cfg)
    else:
        outputs = RaggedOutputs(out, lse, tmp_out, exp_sums, max_logits)
        store_item(softmax, sinks, outputs, load_item(items, index, again=True), head_tile, num_head_tiles, cfg)


@triton.jit
@no_type_check
def _add_tiles(softmax, rows, q, latent_cache, table, first, last, end, cfg: tl.constexpr):
    """Adds the tiles [first, last) of a sequence's tokens before `end` to an unfinished softmax."""
    acc, max_logit, exp_sum = softmax
    for i in range(first, last):
        tokens = i * cfg.tuning.tile + tl.arange(0, cfg.tuning.tile)
        wanted = tokens < end
        seen = seen_by(rows, tokens, wanted, False, cfg)
        block = tl.load(table + tokens // cfg.problem.block_size, mask=wanted, other=0).to(tl.int64)
        latents = _load(latent_cache, block * cfg.problem.block_size + tokens % cfg.problem.block_size, wanted, cfg)
        value = convert(latents.value, q.value.dtype)
        logits = tl.dot(q.value, tl.trans(value), input_precision="ieee")
        if cfg.rest > 0:
            logits = tl.dot(q.rest, tl.trans(convert(latents.rest, q.value.dtype)), logits, input_precision="ieee")
        logits = logits_of(logits, None, rows, tokens, seen, True, cfg)
        weights, acc, max_logit, exp_sum = weigh(logits, rows.factor, acc, max_logit, exp_sum, cfg)
        acc = tl.dot(weights.to(q.value.dtype), value, acc, input_precision="ieee")
    return Softmax(acc, max_logit, exp_sum)


@triton.jit
@no_type_check
def _load(array, vectors, wanted, cfg: tl.constexpr):
    """Loads the two parts of vectors of latent_size elements, and 0 for unwanted vectors."""
    start = (vectors.to(tl.int64) * cfg.problem.latent_size)[:, None]
    d = tl.arange(0, cfg.tuning.width)[None, :]
    value = tl.load(array + start + d, mask=wanted[:, None] & (d < cfg.problem.head_size), other=0.0)
    rest = value  # stands in for an absent rest, because Triton cannot return None
    if cfg.rest > 0:
        d = tl.arange(0, cfg.rest_width)[None, :]
        rest = tl.load(array + start + cfg.problem.head_size + d, mask=wanted[:, None] & (d < cfg.rest), other=0.0)
    return Parts(value, rest)


@triton.jit
@no_type_check
def _load_query(query, tokens, head, valid, cfg: tl.constexpr):
    """Returns the rows' queries in the dtype of the products, and a factor for each row's products."""
    value, rest = _load(query, tokens.to(tl.int64) * cfg.problem.num_heads + head, valid, cfg)
    unit = tl.full([cfg.tuning.rows], 1.0, tl.float32)
    if cfg.normalise_query:  # bfloat16 becomes float16: a power of two divides each row, exactly
        peak = tl.max(tl.abs(value.to(tl.float32)), 1)
        if cfg.rest > 0:
            peak = tl.maximum(peak, tl.max(tl.abs(rest.to(tl.float32)), 1))
        unit = power_of_two(peak)
    value = to_compute(value, unit, cfg)
    if cfg.rest > 0:
        rest = to_compute(rest, unit, cfg)
    return Parts(value, rest), unit
