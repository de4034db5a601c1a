"""Tests what Hopper's loading warpgroups read: the device's code runs as Python, on NumPy.

Pallas's interpreter would read an unused entry of a block table without complaint, and mask what it read.
"""

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import BlockSparse
from paged_jax.kernels.mosaic_gpu.decode import load as decode_load
from paged_jax.kernels.mosaic_gpu.decode import plan as decode_plan
from paged_jax.kernels.mosaic_gpu.decode import tiles as decode_tiles
from paged_jax.kernels.mosaic_gpu.decode import write as decode_write
from paged_jax.kernels.mosaic_gpu.decode.tuning import Merge
from paged_jax.kernels.mosaic_gpu.hopper import logits as hopper_logits
from paged_jax.kernels.mosaic_gpu.hopper import registers
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths
from paged_jax.kernels.mosaic_gpu.mla import choose as mla_choose
from paged_jax.kernels.mosaic_gpu.mla import load as mla_load
from paged_jax.kernels.mosaic_gpu.mla import merge as mla_merge
from paged_jax.kernels.mosaic_gpu.mla import plan as mla_plan
from paged_jax.kernels.mosaic_gpu.mla.geometry import TILE
from paged_jax.kernels.mosaic_gpu.mla.geometry import Geometry as MlaGeometry
from paged_jax.kernels.mosaic_gpu.ragged import convert_tiles, copy_tiles, load_tiles, plan
from paged_jax.kernels.mosaic_gpu.ragged.kinds import kinds_of
from paged_jax.kernels.problem import Problem
from tests.interpreted_ptx import blocks as interpreted_blocks
from tests.test_mosaic_gpu_mla import problem_of
from tests.test_mosaic_gpu_narrow import geometry_of
from tests.test_mosaic_gpu_ragged_plan import planned


class Place:
    """A reference to a part of an array."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        return Place(self.array[tuple(_plain(x) for x in index)])


def _plain(index):
    if hasattr(index, "start") and hasattr(index, "size"):  # pl.ds
        return slice(int(index.start), int(index.start) + int(index.size))
    return index if isinstance(index, slice) else int(index)


class Table:
    """A block table that tells which columns were read, and fails for those that no op may read."""

    def __init__(self, ids, allowed):
        self.ids, self.allowed = ids, allowed

    def __getitem__(self, index):
        column = int(index[1])
        assert column in self.allowed, f"column {column} is read, not one of {self.allowed}"
        return jnp.int32(self.ids[column])


def copy(source, target, _):
    assert target.array.shape == source.array.shape
    target.array[...] = source.array


class Barrier:
    """A barrier, or a ring of barriers."""

    def __getitem__(self, _):
        return self

    at = property(lambda self: self)


@pytest.fixture(autouse=True)
def as_python():
    fakes = SimpleNamespace(copy_gmem_to_smem=copy, barrier_wait=lambda _: None, barrier_arrive=lambda _: None)
    fakes.async_prefetch = lambda _: None
    with (
        jax.disable_jit(),
        mock.patch.object(decode_load, "plgpu", fakes),
        mock.patch.object(mla_load, "plgpu", fakes),
        mock.patch.object(copy_tiles, "plgpu", fakes),
        mock.patch.object(convert_tiles, "plgpu", fakes),
        mock.patch.object(load_tiles, "plgpu", fakes),
    ):
        yield


def ids_of(width):
    """The block of each column of a table, and how many blocks the pool has."""
    return np.random.default_rng(0).permutation(width + 3)[:width], width + 3


@contextlib.contextmanager
def warps_one_by_one(*modules):
    """Runs what modules give to the four warps in one warp after the other."""
    warp = [0]

    def as_warps(function):
        for warp[0] in range(4):
            function()

    def axis_index(name):
        assert name == "warp"
        return jnp.int32(warp[0])

    with contextlib.ExitStack() as patches:
        for module in modules:
            patches.enter_context(mock.patch.object(module, "as_warps", as_warps))
        patches.enter_context(mock.patch.object(jax.lax, "axis_index", axis_index))
        yield


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("layout", "block_size", "fold"), [("hnd", 16, 1), ("nhd", 32, 1), ("hnd", 128, 1), ("hnd", 16, 2), ("nhd", 16, 2)]
)
def test_decode_reads_its_tokens_and_no_others(layout, block_size, fold, window):
    made = geometry_of(
        cache_dtype="float16", head_size=64, block_size=block_size, layout=layout, num_heads=2, num_kv_heads=2,
        fold=fold, tile=64, stages=4,
    )  # fmt: skip
    geometry = replace(made, problem=replace(made.problem, sliding_window=window))
    ids, num_blocks = ids_of(8)
    shape = (num_blocks, 2, block_size, 64) if layout == "hnd" else (num_blocks, block_size, 2, 64)
    caches = [np.random.default_rng(i).standard_normal(shape).astype(np.float16) for i in range(2)]
    by_token = [(x if layout == "nhd" else x.swapaxes(1, 2))[ids].reshape(-1, 2, 64) for x in caches]
    tiles = decode_tiles.class_of(geometry.problem)(geometry)
    for seq_len in (1, block_size, 33, 64, 65, 96, 128):
        begin = max(0, seq_len - window) if window else 0
        table = Table(ids, range(begin // block_size, -(-seq_len // block_size)))
        rings = [np.full((4, 64, 64), np.nan, np.float16) for _ in range(2)]
        keys, values = (
            SimpleNamespace(consumed=Barrier(), ready=Barrier(), tiles=[Place(x)], slot_scales=None) for x in rings
        )
        options = SimpleNamespace(k_scale=None, v_scale=None)
        viewed = (Place(tiles.view(x)) for x in caches)
        inputs = SimpleNamespace(
            block_tables=table, options=options, **dict(zip(("key_cache", "value_cache"), viewed, strict=True))
        )
        refs = SimpleNamespace(inputs_gmem=inputs, smem=SimpleNamespace(keys=keys, values=values))
        for index in range(geometry.items_per_seq):
            split = decode_plan.split_of(jnp.array([seq_len]), jnp.int32(index), jnp.int32(0), geometry)
            with warps_one_by_one(decode_load):
                decode_load.load_split(split, jnp.int32(0), refs, geometry, tiles)
            token = np.arange(geometry.tile_tokens).reshape(-1, geometry.run_tokens)
            token = np.repeat(token[:, None], fold, axis=1)
            head = np.broadcast_to(np.arange(fold)[None, :, None], token.shape)
            for i in range(int(split.num_tiles)):
                at = int(split.origin) + i * geometry.tile_tokens + token.reshape(-1)
                seen = (at >= begin) & (at < seq_len)
                for ring, cached in zip(rings, by_token, strict=True):
                    wanted = cached[at[seen], index * fold + head.reshape(-1)[seen]]
                    np.testing.assert_array_equal(ring[i][seen], wanted)


@pytest.mark.parametrize("block_size", [8, 16, 64, 128])
def test_latent_attention_reads_its_tokens_and_no_others(block_size):
    problem = problem_of(1, 16, block_size=block_size)
    geometry = MlaGeometry(problem, mla_choose.Tuning(queues=1, width=1, left=256), one_query=True)
    ids, num_blocks = ids_of(256 // block_size)
    cache = np.random.default_rng(0).standard_normal((num_blocks, block_size, 576)).astype(np.float32)
    by_token = cache[ids].reshape(-1, 576)
    for end in (1, block_size, 64, 100, 128):
        table = Table(ids, range(-(-end // block_size)))
        rings = [np.full((2, TILE, part.size), np.nan, np.float32) for part in geometry.tile_parts]
        barriers = [Barrier()] * len(rings)
        smem = SimpleNamespace(
            tiles=[Place(x) for x in rings], tile_ready=barriers, tile_consumed=barriers,
            query=Place(np.zeros((64, 576))), query_ready=Barrier(), query_consumed=Barrier(),
        )  # fmt: skip
        query = Place(np.zeros((64, 576)))
        inputs = SimpleNamespace(block_tables=table, latent_cache=Place(cache), query=query)
        refs, zero = SimpleNamespace(inputs_gmem=inputs, smem=smem), jnp.int32(0)
        fields = dict.fromkeys(mla_plan.Split._fields, zero)
        fields |= {"end": jnp.int32(end), "num_tiles": jnp.int32(-(-end // TILE)), "num_rows": jnp.int32(16)}
        mla_load.load_split(mla_plan.Split(**fields), (zero, zero), refs, geometry)
        found = np.concatenate(rings, axis=2).reshape(-1, 576)
        order = np.concatenate([np.arange(part.first, part.first + part.size) for part in geometry.tile_parts])
        np.testing.assert_array_equal(found[:end], by_token[:end, order])


@pytest.mark.parametrize(("query_lens", "queues"), [((9, 1, 4), 40), ((9, 1, 4), 4)])
def test_items_that_are_not_there_are_not_merged(query_lens, queues, monkeypatch):
    """Nobody writes where their partial results lie, so what the merge would read there may be anything."""
    problem = problem_of(3, 16, num_queries=9)
    problem = Problem(**vars(problem) | {"num_tokens": sum(query_lens), "max_query_len": 9})
    geometry = MlaGeometry(problem, mla_choose.Tuning(queues=queues, width=1, left=256), one_query=False)
    assert geometry.closes_items == (queues == 40)
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(query_lens)]), jnp.int32)
    lengths = Lengths(jnp.array([300, 200, 100], jnp.int32), starts)
    rows = [-(-n * 16 // 64) for n in query_lens]
    there = [i * geometry.items_per_seq + j for i, n in enumerate(rows) for j in range(n)]
    closings = np.full((geometry.closings, 1, 4), 99, np.int32)
    closings[there if queues == 40 else [1, 3], 0] = 0, 2, 0, 16
    if queues == 4:
        closings[[0, 2], 0, 1] = 0  # no split of these queues closes an item
    merged, axes = [], {"part": jnp.int32(0)}
    arrays, tree = jax.tree.flatten((lengths, mla_merge.ptx.MergeRefs(jnp.asarray(closings), None, None, None, None)))
    monkeypatch.setattr(mla_merge.ptx, "merge_parts", lambda *_: merged.append(int(axes["closing"])))
    monkeypatch.setattr(jax.lax, "axis_index", lambda name: axes[name])
    for i in range(geometry.closings):
        axes["closing"] = jnp.int32(i)
        mla_merge._kernel(*arrays, None, tree=tree, geometry=geometry)
    assert sorted(set(merged)) == (there if queues == 40 else [1, 3])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "window", "block_size", "cache_dtype", "tuning"),
    [
        ({}, None, 16, "bfloat16", {}),
        ({}, 50, 16, "int8", {}),
        ({}, None, 8, "int8", {"raw_tiles": 3, "computing_warpgroups": 2}),
        ({}, None, 16, "int8", {"raw_tiles": 1, "computing_warpgroups": 2}),
        ({}, 50, 64, "bfloat16", {}),
        ({"block_sparse": BlockSparse(1, 3, 64, 1)}, None, 64, "int8", {}),
        ({"block_sparse": BlockSparse(2, 4, 64, -1)}, 150, 32, "bfloat16", {}),
    ],
)
def test_ragged_attention_reads_its_tokens_and_no_others(options, window, block_size, cache_dtype, tuning):
    scales = {"k_scale": np.float32(1), "v_scale": np.float32(1)} if cache_dtype == "int8" else {}
    with jax.disable_jit(False):
        geometry, counts, lengths = planned(
            (40, 1), (300, 290), 4, 2, 64, window, block_size=block_size, table_width=320 // block_size,
            options=options | scales, cache_dtype=cache_dtype, num_programs=2, stages=4, **tuning,
        )  # fmt: skip
    ids, num_blocks = ids_of(320 // block_size)
    rng = np.random.default_rng(0)
    caches = [rng.integers(-99, 99, (num_blocks, 2, block_size, 64)).astype(np.float32) for _ in range(2)]
    by_token = [x.swapaxes(1, 2)[ids].reshape(-1, 2, 64) for x in caches]
    for kind in kinds_of(geometry):
        for number in range(int(plan.count.total(plan.Counted.ITEMS, kind, counts))):
            item = plan.find(jnp.int32(number), counts, lengths, kind)
            end, begin = int(item.values_end), int(item.begin)
            table = Table(ids, range(begin // block_size, -(-max(end, 1) // block_size)))
            spans = [plan.span_of(item, jnp.int32(i), kind) for i in range(int(item.num_tiles))]
            rings = _loaded(item, kind, caches, table)
            row = np.arange(kind.tile)
            for i, span in enumerate(spans):
                token = np.array([int(x) for x in span.starts])[row // kind.segment_tokens] + row
                seen = (token >= begin) & (token < int(item.end))
                for ring, cached in zip(rings, by_token, strict=True):
                    np.testing.assert_array_equal(ring[i][seen], cached[token[seen], int(item.kv_head)])
                if not kind.zeroes_when_read:
                    np.testing.assert_array_equal(rings[1][i][token >= end], 0)


def _loaded(item, kind, caches, table):
    """The tiles of K and of V of an item, as the loading warpgroup leaves them."""
    num_tiles = max(int(item.num_tiles), kind.stages)
    kind = replace(kind, geometry=replace(kind.geometry, tuning=replace(kind.geometry.tuning, stages=2 * num_tiles)))
    rings = [np.full((2 * num_tiles, kind.tile, 64), np.nan, np.float32) for _ in range(2)]
    raw = Place(np.full((kind.raw_stages * kind.tile, 64), np.nan, np.float32))
    barriers = SimpleNamespace(**dict.fromkeys(
        ("keys_consumed", "keys_ready", "values_consumed", "values_ready", "raw_ready", "values_copied"), Barrier(),
    ))  # fmt: skip

    class Ring(SimpleNamespace):
        def _replace(self, **changes):
            return Ring(**vars(self) | changes)

    smem = SimpleNamespace(
        keys=Ring(tiles=Place(rings[0]), slot_scales=None), values=Ring(tiles=Place(rings[1]), slot_scales=None),
        raw=SimpleNamespace(rows=raw), barriers=lambda _: barriers,
    )  # fmt: skip
    inputs = SimpleNamespace(
        key_cache=Place(caches[0]), value_cache=Place(caches[1]), block_tables=table, new_key=None, new_value=None,
        options=SimpleNamespace(k_scale=None, v_scale=None),
    )  # fmt: skip
    loader = load_tiles.TileLoader(item, jnp.int32(0), kind, SimpleNamespace(inputs_gmem=inputs, smem=smem))

    def own_rows(first_row):
        return slice(int(first_row), int(first_row) + kind.rows_of_warp)

    def zero_rows(tile_smem, kept, first_row, _):
        row = np.arange(kind.tile)[:, None]
        unseen = (row < int(kept.begin)) | (row >= int(kept.end))
        own = own_rows(first_row)
        tile_smem.array[own] = np.where(unseen[own], 0, tile_smem.array[own])

    def convert_rows(raw_smem, tile_smem, first_row, _):
        tile_smem.array[own_rows(first_row)] = raw_smem.array[own_rows(first_row)]

    with (
        warps_one_by_one(copy_tiles, convert_tiles, load_tiles),  # later copies overwrite a warp's own raw rows only
        mock.patch.object(copy_tiles, "ptx_blocks", interpreted_blocks),
        mock.patch.object(load_tiles.tiles, "zero_rows", zero_rows),
        mock.patch.object(load_tiles.tiles, "convert_rows", convert_rows),
    ):
        if kind.geometry.converts_tiles:
            loader.begin_raw()
        loader.load_range(jnp.int32(0), item.num_tiles)
    return rings


@pytest.mark.parametrize(("slot", "seq_len", "number"), [
    (-9, 33, 0), (-1, 33, 0), (0, 33, 0), (143, 33, 0), (144, 33, 0), (5, 64, 0), (5, 65, 0), (5, 65, 1), (5, 0, 0),
    (5, 129, 0), (5, 129, 1),
])  # fmt: skip
def test_which_program_sees_and_writes_a_new_token(slot, seq_len, number):
    """Two splits have 64 tokens each, and contexts up to 128. The first split writes a token that no program sees."""
    made = geometry_of(cache_dtype="float16", head_size=64, tile=64, splits=2, merge=Merge.KERNEL)
    split = decode_plan.split_of(jnp.array([seq_len]), jnp.int32(0), jnp.int32(number), made)
    inputs = SimpleNamespace(slot_mapping=jnp.array([slot], jnp.int32))
    found = decode_write.new_token(split, SimpleNamespace(inputs_gmem=inputs), made)
    is_valid, position = 0 <= slot < made.problem.num_blocks * made.problem.block_size, seq_len - 1
    tiles = -(-min(seq_len, 128) // 64)
    own = range(0, 64 * -(-tiles // 2)) if number == 0 else range(64 * -(-tiles // 2), 128)
    sees = is_valid and position in own and position < 128
    assert bool(found.is_seen) == sees
    assert bool(found.is_written) == (sees or (is_valid and number == 0 and not 0 <= position < 128))


@pytest.mark.parametrize("cap", [1.0, 30.0, 1e4])
def test_capped_logits_are_those_of_tanh(cap):
    """Near 0, and where the series ends, too."""
    logits = np.concatenate([np.geomspace(1e-6, 20, 400), [0.0]]).astype(np.float32) * np.float32(cap)
    for x in (logits, -logits):
        found, exact = np.float64(hopper_logits._capped(jnp.asarray(x), cap)), cap * np.tanh(x.astype(np.float64) / cap)
        assert (np.abs(found - exact) <= 6e-7 * np.abs(exact)).all()


def test_powers_of_two_and_their_inverses():
    x = jnp.array([1.0, -1.5, 2.0, 3.9, 0.24, 1e-30, -1e30], jnp.float32)
    powers = np.float64(registers.power_of_two(x))
    np.testing.assert_array_equal(powers, 2.0 ** np.floor(np.log2(np.abs(np.float64(x)))))
    np.testing.assert_array_equal(np.float64(registers.inverse(registers.power_of_two(x))), 1 / powers)
    bounded = registers.power_of_two(jnp.array([0.0, 1e-20, jnp.nan, jnp.inf, 5.0], jnp.float32), -40, 126)
    np.testing.assert_array_equal(np.float64(bounded), [2.0**-40, 2.0**-40, 2.0**126, 2.0**126, 4.0])


@pytest.mark.parametrize("of_kind", [0, 1], ids=["wide", "thin"])
def test_runs_past_the_end_read_the_last_run_again(of_kind):
    """What lies behind it in its block would come from memory, and short contexts would take up to 7% longer."""
    shapes = {"block_size": 128, "table_width": 4, "num_programs": 1}
    geometry, counts, lengths = planned(((40, 1)[of_kind],), (300,), 8, 2, 128, None, **shapes)
    kind = kinds_of(geometry)[of_kind]
    item = plan.find(jnp.int32(0), counts, lengths, kind)
    tiles, size = load_tiles.TileLoader(item, jnp.int32(0), kind, None), kind.run_tokens
    runs = itertools.product(range(int(item.num_tiles)), range(kind.runs_per_tile))
    assert [int(tiles._first_read(*run)) for run in runs] == [
        min(first, 300 - 300 % size) for first in range(0, int(item.num_tiles) * kind.tile, size)
    ]
