"""Checks functions of the Triton kernels by themselves: `run_triton.py` runs `hold`, `hold_offsets` and others.

They check how ragged attention cuts batches into items, the offsets of slots in pools of over 2**31 elements, and the
conversion of 8 bits.
"""

from dataclasses import replace

import numpy as np
import triton
import triton.language as tl

from paged_jax.kernels.problem import Device, Granularity, Pool, Problem
from paged_jax.kernels.triton import ragged_tuning
from paged_jax.kernels.triton.device.items import plan_kernel, tile_of
from paged_jax.kernels.triton.device.tiles import convert, vectors
from paged_jax.kernels.triton.device.write import latents_at
from paged_jax.kernels.triton.integers import cdiv
from paged_jax.options import BlockSparse, PerHead
from tests.inputs import dtype_of


def batches(rng):
    """Draws lengths and query lengths of batches as engines compose them, with padding rows."""
    mixes = (1, "decode", 4000), (5, "speculative", 4000), (36, "mixed", 900), (4, "prefill", 60)
    for num_seqs, mix, longest in mixes:
        contexts = rng.integers(0, longest, num_seqs)
        queries = {
            "decode": np.ones(num_seqs, np.int64),
            "speculative": rng.integers(0, 6, num_seqs),
            "mixed": np.where(rng.random(num_seqs) < 0.1, rng.integers(1, 100, num_seqs), 1),
            "prefill": rng.integers(1, 200, num_seqs),
        }[mix]
        yield contexts + queries, queries, int(rng.integers(0, 20))
    yield np.full(6, 90), np.ones(6, np.int64), 1  # as many tiles as there can be
    yield np.array([4000, 30]), np.array([100, 30]), 3  # a sequence has several tiles, and all are split


def hold(run):
    """Checks the items of random batches; `run(kernel, grid, inputs, outputs, cfg)` runs a kernel."""
    rng = np.random.default_rng(0)
    num_split, most_split = 0, 0
    for seq_lens, query_lens, padding in batches(rng):
        num_tokens = max(1, int(query_lens.sum()) + padding)
        padding = num_tokens - int(query_lens.sum())
        problem = Problem(
            num_kv_heads=2, head_size=64, block_size=16, layout="hnd", cache_dtype="bfloat16", k_scale=Granularity.NONE,
            v_scale=Granularity.NONE, num_heads=8, query_dtype="bfloat16", per_head=PerHead(False, False),
            sliding_window=None, logits_soft_cap=None, block_sparse=None, causal=True, num_seqs=len(seq_lens),
            num_tokens=num_tokens, num_blocks=8, max_blocks_per_seq=300, max_seq_len=4800, max_query_len=num_tokens,
        )  # fmt: skip
        kernel, grid = ragged_tuning.tune(problem, Device(90, 40))
        assert not kernel.tuning.final
        assert sum(cdiv(int(n), kernel.tuning.queries) for n in (*query_lens, padding)) <= grid.tiles
        kernel = replace(kernel, tuning=replace(kernel.tuning, scan=16, plan=32))
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        sizes = num_tokens, len(seq_lens), 4800, grid.at_once, grid.items, grid.split_tiles
        items, tiles = (
            np.full((count, ragged_tuning.ITEM_FIELDS), -9, np.int32) for count in (grid.items, grid.split_tiles)
        )
        inputs = seq_lens.astype(np.int32), starts, *sizes
        num_programs = cdiv(grid.items, kernel.tuning.plan)
        items, tiles = run(plan_kernel, (num_programs,), inputs, (items, tiles), kernel)
        split = _check(items, tiles, query_lens, padding, kernel, grid)
        num_split, most_split = num_split + len(split), max(most_split, *np.bincount(split), 0)
    _hold_tiles(run, kernel)
    assert num_split >= 3, num_split
    assert most_split > 1, "tiles of a sequence that are split"
    for changes, wanted in _SPLITS:
        assert _splits_of(run, changes) == wanted, changes


@triton.jit
def tiles_kernel(query_start_loc, num_tokens, num_seqs, out, cfg: tl.constexpr):
    index = tl.program_id(0)
    item = tile_of(index, query_start_loc, num_tokens, num_seqs, cfg)
    tl.store(out + 4 * index, item.seq)
    tl.store(out + 4 * index + 1, item.start)
    tl.store(out + 4 * index + 2, item.query_len)
    tl.store(out + 4 * index + 3, item.first_query)


def _hold_tiles(run, kernel):
    """Checks that the tiles of batches without a plan have each row once, including rows of padding."""
    queries = kernel.tuning.queries
    for num_seqs in (1, 127, 128, 129):
        query_lens = np.random.default_rng(num_seqs).integers(0, 2 * queries, num_seqs)
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        num_tokens = int(starts[-1]) + queries + 1
        count = num_tokens // queries + num_seqs + 1
        (tiles,) = run(
            tiles_kernel, (count,), (starts, num_tokens, num_seqs), (np.zeros((count, 4), np.int32),), kernel
        )
        rows = [
            (start + query, seq)
            for seq, start, query_len, first in tiles.tolist()
            for query in range(first, min(first + queries, query_len))
        ]
        sequences = np.repeat(np.arange(num_seqs + 1), [*query_lens, num_tokens - starts[-1]])
        assert sorted(rows) == list(enumerate(sequences.tolist())), num_seqs


# How many splits the contexts of three sequences have, and the padding. Other numbers cost time only.
_SPLITS = [
    ({}, [8, 2, 4, 1]),
    ({"prefix": True}, [8, 2, 3, 1]),
    ({"sliding_window": 1000}, [5, 4, 5, 1]),
    ({"block_sparse": BlockSparse(2, 5, 64, 1)}, [9, 2, 5, 1]),
]


def _splits_of(run, changes):
    """The number of splits of each sequence of a batch, in a call with these options."""
    seq_lens, query_lens = np.array([4000, 900, 1900], np.int32), np.array([100, 1, 300])
    problem = Problem(
        num_kv_heads=2, head_size=64, block_size=16, layout="hnd", cache_dtype="bfloat16", k_scale=Granularity.NONE,
        v_scale=Granularity.NONE, num_heads=8, query_dtype="bfloat16", per_head=PerHead(False, False),
        logits_soft_cap=None, causal=True, num_seqs=3, num_tokens=410, num_blocks=8, max_blocks_per_seq=300,
        max_seq_len=4800, max_query_len=410, **{"sliding_window": None, "block_sparse": None} | changes,
    )  # fmt: skip
    kernel, grid = ragged_tuning.tune(problem, Device(90, 40))
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    sizes = 410, 3, 4800, grid.at_once, grid.items, grid.split_tiles
    items, tiles = (
        np.full((count, ragged_tuning.ITEM_FIELDS), -9, np.int32) for count in (grid.items, grid.split_tiles)
    )
    grid_size = (cdiv(grid.items, kernel.tuning.plan),)
    items, _ = run(plan_kernel, grid_size, (seq_lens, starts, *sizes), (items, tiles), kernel)
    return [int(items[items[:, 0] == seq, 5].max()) for seq in range(4)]


def _check(items, tiles, query_lens, padding, kernel, grid):
    """Checks that every tile of queries of a batch has each split once, and each partial result a place of its own.

    Returns the sequence of each tile that is split.
    """
    found = items[items[:, 0] >= 0]
    assert len(found) < len(items), "the last program has something to do, so there may be too few"
    assert np.all(items[len(found) :, 0] == -1), "items come first"
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    rows = kernel.tuning.queries
    splits_of, partials = {}, []
    for seq, start, query_len, first_query, split, num_splits, partial in found[:, :7].tolist():
        assert start == starts[seq]
        assert query_len == (padding if seq == len(query_lens) else query_lens[seq])
        assert 0 <= split < num_splits
        splits_of.setdefault((seq, first_query), []).append((split, num_splits))
        if num_splits > 1:
            partials.append(partial + split)
    for seq in set(found[:, 0]):  # the last queries see most tokens, so they start first
        assert np.all(np.diff(found[found[:, 0] == seq, 3]) <= 0)
    every = [*enumerate(query_lens.tolist()), (len(query_lens), padding)]
    assert sorted(splits_of) == [(seq, first) for seq, count in every for first in range(0, count, rows)]
    for splits in splits_of.values():
        assert sorted(splits) == [(i, splits[0][1]) for i in range(splits[0][1])]
    assert len(set(partials)) == len(partials)
    assert all(0 <= partial < grid.partials for partial in partials)
    split_tiles = {tuple(p) for p in found.tolist() if p[4] == 0 and p[5] > 1}
    assert len(split_tiles) <= grid.split_tiles
    noted = tiles[tiles[:, 0] >= 0].tolist()
    assert {tuple(p) for p in noted} == split_tiles
    assert len(noted) == len(split_tiles)
    return [seq for seq, *_ in split_tiles]


@triton.jit
def offsets_kernel(cache, block_ids, offsets, cfg):
    """Stores the offsets, in elements, of the vectors of two slots of the second kv head, [2, 16]."""
    slots = tl.arange(0, 2)
    blocks = tl.load(block_ids + slots).to(tl.int64)
    at = vectors(cache, blocks, slots, 1, False, cfg, 16)
    tl.store(offsets + slots[:, None] * 16 + tl.arange(0, 16)[None, :], at.to(tl.int64) - cache.to(tl.int64))


@triton.jit
def latent_offsets_kernel(rows, offsets, cfg: tl.constexpr):
    at = tl.arange(0, 2)
    d = tl.arange(0, 16)[None, :]
    tl.store(offsets + at[:, None] * 16 + d, latents_at(tl.load(rows + at), d, cfg))


def hold_offsets(run):
    """Checks the offsets of slots in the last blocks of a pool that is far too large for 32 bits."""
    rows = np.array([2**31 - 1, 2**27], np.int32)
    pool = Pool(
        num_kv_heads=1, head_size=576, block_size=16, layout="nhd", cache_dtype="bfloat16",
        k_scale=Granularity.NONE, v_scale=Granularity.NONE,
    )  # fmt: skip
    (offsets,) = run(latent_offsets_kernel, (1,), (rows,), (np.zeros((2, 16), np.int64),), pool)
    np.testing.assert_array_equal(offsets, rows[:, None].astype(np.int64) * 576 + np.arange(16))
    blocks, slots, d = np.array([2**31 - 1, 2**30], np.int32), np.arange(2)[:, None], np.arange(16)[None, :]
    for layout in ("hnd", "nhd", "vllm"):
        pool = Pool(
            num_kv_heads=4, head_size=16, block_size=16, layout=layout, cache_dtype="bfloat16",
            k_scale=Granularity.NONE, v_scale=Granularity.NONE,
        )  # fmt: skip
        (offsets,) = run(offsets_kernel, (1,), (np.zeros(1, np.int8), blocks), (np.zeros((2, 16), np.int64),), pool)
        start = blocks[:, None].astype(np.int64) * 4 * 16 * 16
        within = {
            "hnd": 1 * 16 * 16 + slots * 16 + d,
            "nhd": slots * 4 * 16 + 1 * 16 + d,
            "vllm": 1 * 16 * 16 + d // 8 * 16 * 8 + slots * 8 + d % 8,
        }[layout]
        np.testing.assert_array_equal(offsets, start + within)


@triton.jit
def conversion_kernel(codes, out, cfg: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, convert(tl.load(codes + at), cfg))


def hold_conversions(run):
    """Checks that every number of 8 bits becomes the same number of float16, with subnormal ones, infinity and NaN."""
    for name in ("float8_e5m2", "float8_e4m3fn", "int8"):
        codes = np.arange(256, dtype=np.uint8).view(dtype_of(name))
        (out,) = run(conversion_kernel, (1,), (codes,), (np.zeros(256, np.float16),), tl.float16)
        np.testing.assert_array_equal(out, codes.astype(np.float16), err_msg=name)
        np.testing.assert_array_equal(np.signbit(out), np.signbit(codes.astype(np.float16)), err_msg=name)
