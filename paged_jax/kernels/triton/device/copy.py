"""Device code of block copies: these kernels copy blocks within one layer's pools, or from other pools.

Within a pool every source must be read before another pair overwrites it, and programs run in no order. So a copy takes
two launches, of the first two kernels. A swap launches the first and the third:

    stash   one program for each pair: makes the pair's plan, and saves in `tmp` a source that another pair overwrites
    copy    one program for each (pair, chunk of a block): copies from pool or `tmp` to the pool, as planned
    swap    one program for each (pair, chunk of a block): copies from another pool, whose blocks no pair overwrites;
            either pool may be in pinned host memory, which the GPU reads and writes over the bus

Who loads. Every thread moves 16 bytes at a time if a block's size allows it, otherwise 8, for all dtypes. No bit
changes, not even in NaN. Offsets have 64 bits.

Roofline. The kernels read and write the K block and the V block of each pair once, and a stashed block twice. Every
program of the stash also reads all pairs: in all num_pairs^2 * 8 bytes, from the L2 cache.

The pools are updated in place: `key_cache` and `value_cache` of the copying kernels are outputs that alias inputs.
`cfg` is a `cache_tuning.CopyKernel`.
"""

# Without triton installed, pyright takes this folder for that package.
# pyright: reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

# A pair's plan. If several valid pairs have one destination, the last one writes it.
SKIPPED = tl.constexpr(0)
DIRECT = tl.constexpr(1)
STASHED = tl.constexpr(2)


@triton.jit
@no_type_check
def stash_kernel(
    block_mapping, key_cache, value_cache, num_pairs, num_sources, num_blocks, plans, tmp_key, tmp_value,
    cfg: tl.constexpr,
):  # fmt: skip
    """`key_cache` and `value_cache` are the pools of the sources."""
    pair = tl.program_id(0)
    source, destination, valid = _pair(block_mapping, pair, num_pairs, num_sources, num_blocks)
    written = tl.full([cfg.scan], 0, tl.int1)  # whether some pair overwrites the source
    outdone = tl.full([cfg.scan], 0, tl.int1)  # whether a later pair writes the same destination
    for first in range(0, num_pairs, cfg.scan):
        others = first + tl.arange(0, cfg.scan)
        other_source, other_destination, other_valid = _pair(block_mapping, others, num_pairs, num_sources, num_blocks)
        if cfg.within:
            written |= other_valid & (other_destination == source) & (other_source != other_destination)
        outdone |= other_valid & (other_destination == destination) & (others > pair)
    copies = valid & (tl.max(outdone.to(tl.int32), 0) == 0)
    if cfg.within:
        copies &= source != destination
    plan = tl.where(tl.max(written.to(tl.int32), 0) > 0, STASHED, DIRECT)
    plan = tl.where(copies, plan, SKIPPED)
    tl.store(plans + pair, plan)
    if cfg.within:  # noqa: SIM102 (the inner condition is the device's)
        if plan == STASHED:
            for chunk in range(cfg.chunks):
                _copy_chunk(key_cache, source, tmp_key, pair, chunk, tl.constexpr(cfg.key_words), cfg)
                _copy_chunk(value_cache, source, tmp_value, pair, chunk, tl.constexpr(cfg.value_words), cfg)


@triton.jit
@no_type_check
def copy_kernel(
    block_mapping, plans, tmp_key, tmp_value, unused_key, unused_value, key_cache, value_cache, cfg: tl.constexpr
):  # fmt: skip
    pair = tl.program_id(0) // cfg.chunks
    chunk = tl.program_id(0) % cfg.chunks
    plan = tl.load(plans + pair)
    source = tl.load(block_mapping + 2 * pair)
    destination = tl.load(block_mapping + 2 * pair + 1)
    if plan == DIRECT:
        _copy_chunk(key_cache, source, key_cache, destination, chunk, tl.constexpr(cfg.key_words), cfg)
        _copy_chunk(value_cache, source, value_cache, destination, chunk, tl.constexpr(cfg.value_words), cfg)
    elif plan == STASHED:
        _copy_chunk(tmp_key, pair, key_cache, destination, chunk, tl.constexpr(cfg.key_words), cfg)
        _copy_chunk(tmp_value, pair, value_cache, destination, chunk, tl.constexpr(cfg.value_words), cfg)


@triton.jit
@no_type_check
def swap_kernel(
    block_mapping, plans, source_key, source_value, unused_key, unused_value, key_cache, value_cache, cfg: tl.constexpr
):  # fmt: skip
    pair = tl.program_id(0) // cfg.chunks
    chunk = tl.program_id(0) % cfg.chunks
    if tl.load(plans + pair) == DIRECT:
        source = tl.load(block_mapping + 2 * pair)
        destination = tl.load(block_mapping + 2 * pair + 1)
        _copy_chunk(source_key, source, key_cache, destination, chunk, tl.constexpr(cfg.key_words), cfg)
        _copy_chunk(source_value, source, value_cache, destination, chunk, tl.constexpr(cfg.value_words), cfg)


@triton.jit
@no_type_check
def _pair(block_mapping, pair, num_pairs, num_sources, num_blocks):
    """Returns the source and the destination of pairs, and whether both are blocks of their pools."""
    inside = pair < num_pairs
    source = tl.load(block_mapping + 2 * pair, mask=inside, other=-1)
    destination = tl.load(block_mapping + 2 * pair + 1, mask=inside, other=-1)
    valid = (source >= 0) & (source < num_sources) & (destination >= 0) & (destination < num_blocks)
    return source, destination, valid


@triton.jit
@no_type_check
def _copy_chunk(source, source_block, destination, destination_block, chunk, words: tl.constexpr, cfg: tl.constexpr):
    """Copies one chunk of a block of `words` 8-byte words from one array of blocks to another."""
    at = chunk * cfg.chunk + tl.arange(0, cfg.chunk)
    inside = at < words
    source = source.to(tl.pointer_type(tl.int64), bitcast=True) + source_block.to(tl.int64) * words
    destination = destination.to(tl.pointer_type(tl.int64), bitcast=True) + destination_block.to(tl.int64) * words
    tl.store(destination + at, tl.load(source + at, mask=inside), mask=inside)
