"""Tests how decode cuts its work: splits and queues, which the device's code plans. Most of it runs here as Python."""

import contextlib
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from paged_jax import _validate
from paged_jax.kernels.mosaic_gpu.decode import choose, plan
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.tuning import Merge
from paged_jax.kernels.problem import Device, Problem
from tests import mosaic_interpreter
from tests.test_mosaic_gpu_narrow import geometry_of
from tests.warpgroup import THREADS


@pytest.fixture(autouse=True)
def in_lanes(request):
    """Replaces what plans compute in lanes, except where a warpgroup in NumPy runs its PTX."""
    with contextlib.nullcontext() if "warpgroup" in request.fixturenames else mosaic_interpreter.in_lanes():
        yield


@pytest.fixture
def warpgroup(gpu):
    threads = np.arange(THREADS, dtype=np.int32)
    with mock.patch.object(plan.warps, "iota", return_value=threads):
        yield gpu


@pytest.fixture
def as_python():
    with jax.disable_jit():
        yield


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("splits", "fold", "tile", "has_one"), [
    (1, 1, 128, True), (2, 1, 64, True), (4, 2, 64, True), (3, 1, 64, True),
    (1, 1, 64, False), (1, 2, 128, False), (3, 2, 64, False),
])  # fmt: skip
def test_which_splits_have_one_tile(splits, fold, tile, has_one, window):
    """The geometry's contexts have up to 128 tokens. A table may also be shorter than a sequence."""
    merge = Merge.CLUSTER if splits > 1 else Merge.NONE
    made = geometry_of(
        cache_dtype="float16", head_size=64, num_heads=2, num_kv_heads=2,
        splits=splits, merge=merge, fold=fold, tile=tile,
    )  # fmt: skip
    geometry = replace(made, problem=replace(made.problem, sliding_window=window))
    assert geometry.splits_have_one_tile == has_one
    lens = jnp.arange(200)
    split = jax.vmap(lambda n: plan.split_of(n[None], jnp.int32(0), jnp.int32(0), geometry))(lens)
    assert (split.num_tiles.max() > 1) == (not has_one and window is None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("queues", "splits"), [(1, 0), (3, 0), (7, 2), (40, 0)])
@pytest.mark.usefixtures("as_python")
def test_queues_of_decode_share_all_tiles(queues, splits):
    """Each tile of each item is in one queue, and the merge finds the partial results of the items that are cut."""
    rng = np.random.default_rng(queues)
    made = geometry_of(cache_dtype="float16", head_size=64, num_heads=4, num_kv_heads=2, tile=64)
    seq_lens = [0, 700, 64, 1, 130, 0, 500] if queues < 40 else rng.integers(0, 2000, 9).tolist()
    problem = Problem(**vars(made.problem) | {"num_seqs": len(seq_lens), "max_seq_len": 1900})
    tuning = replace(made.tuning, queues=queues, splits=splits, merge=Merge.KERNEL)
    geometry, lens = replace(made, problem=problem, tuning=tuning), jnp.array(seq_lens, jnp.int32)
    found, ends, firsts, partials = {}, {}, {}, set()
    for program in range(geometry.num_programs):

        def keep(queued, _, __, program=program):
            split = queued.split
            item = int(split.item.index)
            tiles = range(int(split.origin) // 64, int(split.origin) // 64 + int(split.num_tiles))
            found.setdefault(item, []).extend(tiles)
            if not queued.is_whole:
                assert int(split.partial) not in partials
                assert 0 <= int(split.partial) < geometry.num_partials
                partials.add(int(split.partial))
                of_item = firsts.setdefault(item, [])
                of_item.append(int(split.partial))
                if queued.is_last:
                    ends[item] = int(plan.num_queued_splits(jnp.int32(program), jnp.int32(of_item[0])))

        plan.for_each_split(keep, plan.queue_of(lens, jnp.int32(program), geometry), lens, geometry)
    assert found == {i: [*range(-(-min(seq_lens[i // 2], 1900) // 64))] for i in range(geometry.num_items)}
    for item, of_item in firsts.items():
        assert ends[item] == len(of_item)
        places = [int(plan.partial_of(jnp.int32(of_item[0]), jnp.int32(n), geometry)) for n in range(ends[item])]
        assert places == of_item


@pytest.mark.usefixtures("as_python")
def test_short_batches_are_not_cut_finely():
    """A queue has four tiles or more, except the last one."""
    made = geometry_of(cache_dtype="float16", head_size=64, num_heads=2, num_kv_heads=2, tile=64)
    problem = Problem(**vars(made.problem) | {"num_seqs": 3, "max_seq_len": 4000})
    geometry = replace(made, problem=problem, tuning=replace(made.tuning, splits=0, queues=40, merge=Merge.KERNEL))
    lens = jnp.array([64 * 3] * 3, jnp.int32)
    found = [int(plan.queue_of(lens, jnp.int32(i), geometry).tiles_left) for i in range(6)]
    assert found == [4, 4, 4, 4, 2, 0]


@pytest.mark.parametrize(("longest", "is_alike"), [(64 * 17, True), (64 * 18, False)])
@pytest.mark.usefixtures("as_python")
def test_lengths_that_are_alike_keep_their_splits(longest, is_alike):
    """Alike lengths are at most a sixteenth longer than the mean."""
    made = geometry_of(cache_dtype="float16", head_size=64, num_heads=2, num_kv_heads=2, tile=64)
    seq_lens = [64 * 16] * 30 + [longest]
    problem = Problem(**vars(made.problem) | {"num_seqs": len(seq_lens), "max_seq_len": 4000})
    tuning = replace(made.tuning, queues=20, splits=2, merge=Merge.KERNEL)
    geometry, lens = replace(made, problem=problem, tuning=tuning), jnp.array(seq_lens, jnp.int32)
    queue = plan.queue_of(lens, jnp.int32(3), geometry)
    found = int(queue.seq), int(queue.kv_head), int(queue.tile), int(queue.tiles_left)
    assert found == ((0, 1, 8, 8) if is_alike else (4, 1, 5, 50))


UNEVEN = {  # lengths, number of programs, number of programs with work, numbers of splits of some sequences' items
    "alike": ((8192,) * 8, 128, 128, {0: 2, 7: 2}),
    "nearly-alike": ((8192, 8190, 8180, 8192, 8100, 8192, 8192, 8190), 128, 128, {0: 2, 7: 2}),
    "short": ((100, 100, 110), 120, 48, {0: 2, 2: 2}),
    "few": ((9000, 4000, 2000, 5000, 6000), 120, 120, {}),
    "one-long": ((15000, 600, 1, 600), 128, 128, {2: 1}),
    "nothing": ((0, 0, 0), 120, 24, {0: 1, 1: 1, 2: 1}),
    "mostly-nothing": ((1000, *(0,) * 63), 512, 158, {0: 4, 1: 1}),
    "resident": ((16000, *(4000,) * 9), 240, 240, {}),
    "most-multiprocessors": ((15000, *(1000,) * 11, 2000), 264, 264, {}),
    "more-than-multiprocessors": ((16384, *(1024,) * 19), 264, 264, {0: 16}),
    "half-a-wave": ((16384, *(1000,) * 14, -3), 128, 128, {-1: 1}),
    "one-wave": ((16384, 0, *(1000,) * 30), 256, 256, {1: 1}),
    "two-waves": ((5000, 6000, 15000, *(4000,) * 60, 2000), 512, 264, {}),
    "two-waves-alike": ((5000,) * 64, 512, 512, {0: 1, 63: 1}),
    "many-waves": ((3000,) * 100 + (15000,) * 28, 264, 264, {}),
    "more-than-two-waves": ((5000,) * 50 + (16384, *(1000,) * 18, 0), 264, 264, {}),
    "longer-than-all": ((16384, 100_000, *(1000,) * 62), 512, 264, {}),
}


def uneven():
    """All batches without a window, four fifths of them slow, and one batch with a window."""
    for i, (name, batch) in enumerate(UNEVEN.items()):
        yield pytest.param(*batch, None, id=name, marks=[pytest.mark.slow] * (i % 5 > 0))
    yield pytest.param(*UNEVEN["one-long"], 8000, id="one-long-window")


@pytest.mark.parametrize(("seq_lens", "programs", "busy", "splits", "window"), [*uneven()])
def test_queues(seq_lens, programs, busy, splits, window):
    """Every tile of every item is in exactly one split, and all programs have about the same number of tiles."""
    num_seqs, kv_heads = len(seq_lens), 8
    query, cache = (np.zeros(shape, jnp.bfloat16) for shape in ((num_seqs, 64, 128), (1, kv_heads, 16, 128)))
    tables, lens = np.zeros((num_seqs, 1024), jnp.int32), jnp.asarray(seq_lens, jnp.int32)
    options = _validate.decode_operands(query, cache, cache, tables, lens, {"sliding_window": window}).options
    problem = Problem.of_call(query, cache, cache, tables, options)
    geometry = Geometry(problem, choose.balanced(problem, Device()))
    assert geometry.num_programs == programs

    @jax.jit
    @jax.vmap
    def splits_of(program):
        def step(queue, _):
            queued = plan.next_split(lens, queue, geometry)
            return plan.after_split(lens, queue, geometry), (queue.has_more, queued)

        return lax.scan(step, plan.queue_of(lens, program, geometry), length=geometry.num_items)[1]

    there, queued = jax.tree.map(np.asarray, splits_of(jnp.arange(programs)))
    program = np.broadcast_to(np.arange(programs)[:, None], there.shape)[there]
    found = {name: x[there] for name, x in queued.split._asdict().items() if name != "item"}
    found |= {"item": queued.split.item.index[there], "last": queued.is_last[there], "whole": queued.is_whole[there]}
    # Items come in order, and each split has a partial result of its own.
    assert (np.diff(found["item"]) >= 0).all()
    partial = ~found["whole"]
    assert len(set(found["partial"][partial].tolist())) == partial.sum()
    assert found["partial"].max() < geometry.num_partials
    assert (found["num_tiles"] >= 0).all()
    for item in range(geometry.num_items):
        of_item = found["item"] == item
        (its,) = np.nonzero(of_item)
        length = min(seq_lens[item // kv_heads], options.max_seq_len)
        low = max(0, seq_lens[item // kv_heads] - window) if window else 0
        begin, end = np.maximum(found["begin"], found["origin"])[its], found["end"][its]
        last = np.minimum(end, found["origin"][its] + found["num_tiles"][its] * geometry.tile_tokens)
        spans = [(first, past) for first, past in zip(begin, last, strict=True) if first < past]
        ends = [low, *(past for _, past in spans)]  # each span begins where the previous one ends
        assert (ends[:-1], ends[-1]) == ([first for first, _ in spans], max(length, low)), item
        assert (found["number"][its] == 0).tolist() == [True] + [False] * (len(its) - 1)
        assert found["last"][its].tolist() == [False] * (len(its) - 1) + [True]
        assert found["whole"][its].tolist() == [len(its) == 1] * len(its)
    # The merge computes where the partial results lie. They must lie there.
    starts = np.searchsorted(found["item"], np.arange(geometry.num_items + 1)).astype(np.int32)
    first, last_program = found["partial"][starts[:-1]], program[starts[1:] - 1].astype(np.int32)
    assert (plan.num_queued_splits(last_program, first) == np.diff(starts)).all()
    number = np.arange(len(program), dtype=np.int32) - starts[found["item"]]
    np.testing.assert_array_equal(found["partial"], plan.partial_of(first[found["item"]], number, geometry))
    work = np.bincount(program, np.maximum(found["num_tiles"], 1), programs)
    assert (work > 0).sum() == busy
    assert work.max() <= 17 / 16 * work.sum() / busy + 1
    if window is None:
        assert {seq: (found["item"] == seq % num_seqs * kv_heads).sum() for seq in splits} == splits


FOR_LANES = pytest.mark.parametrize(("num_seqs", "window"), [(17, None), (33, 100), (64, 8000), (511, None)])


def drawn(num_seqs, window):
    """Random lengths, half of them 0, and a geometry with 264 queues."""
    rng = np.random.default_rng(num_seqs)
    lens = jnp.asarray(rng.integers(0, 16000, num_seqs) * rng.integers(0, 2, num_seqs), jnp.int32)
    made = geometry_of(cache_dtype="float16", head_size=64, num_heads=2, num_kv_heads=2, tile=64)
    changed = {"num_seqs": num_seqs, "max_seq_len": 16000, "sliding_window": window}
    tuning = replace(made.tuning, queues=264, splits=0, merge=Merge.KERNEL)
    return lens, replace(made, problem=Problem(**vars(made.problem) | changed), tuning=tuning)


def queues_of(lens, geometry):
    return jax.vmap(lambda program: plan.queue_of(lens, program, geometry))(jnp.arange(264))


def queues_of_one_thread(lens, geometry):
    """The queues if each thread looks at all lengths."""
    with mock.patch.object(plan, "_in_lanes", return_value=False):
        return queues_of(lens, geometry)


@FOR_LANES
def test_lanes_find_the_queues_that_one_thread_would_find(num_seqs, window):
    lens, geometry = drawn(num_seqs, window)
    found = queues_of(lens, geometry)
    for of_lanes, of_one in zip(found, queues_of_one_thread(lens, geometry), strict=True):
        assert jnp.where(found.has_more, of_lanes == of_one, True).all()


@FOR_LANES
def test_their_ptx_finds_the_same(warpgroup, num_seqs, window):
    lens, geometry = drawn(num_seqs, window)
    expected, lens_gmem = queues_of_one_thread(lens, geometry), warpgroup.put(np.asarray(lens))
    there = np.flatnonzero(expected.has_more)
    for program in there[:: len(there) // 20]:
        found = plan.queue_of(lens_gmem, np.int32(program), geometry)
        assert [int(x) for x in found] == [int(x[program]) for x in expected]
    assert not plan.queue_of(lens_gmem, np.int32(264), geometry).has_more
