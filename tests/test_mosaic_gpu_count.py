"""Tests how the ragged kernel sums up, sorts and claims a batch in PTX: a warpgroup in NumPy runs it."""

from types import SimpleNamespace

import numpy as np
import pytest

from paged_jax.kernels.mosaic_gpu.decode.ptx import warps as decode_warps
from paged_jax.kernels.mosaic_gpu.ragged.kinds import kinds_of
from paged_jax.kernels.mosaic_gpu.ragged.ptx import items, numbers, scan, sort
from paged_jax.kernels.mosaic_gpu.ragged.ptx import warps as ragged_warps
from tests.warpgroup import GLOBAL, SHARED, THREADS


def test_gather(gpu):
    values = np.arange(100, 150, dtype=np.int32)
    indices = np.arange(THREADS, dtype=np.int32) // 2
    np.testing.assert_array_equal(scan.gather(gpu.put(values), indices, 49), values[np.minimum(indices, 49)])


@pytest.mark.parametrize("packs", [False, True])
def test_sums(gpu, packs):
    rng = np.random.default_rng(0)
    sums = gpu.empty((4, 2 * THREADS + 5), np.int32, SHARED)
    whole = rng.integers(0 if packs else -9, 250, (2, THREADS)).astype(np.int32)
    arrays = {2: whole, 0: whole[::-1], 3: whole // 2}
    for i in range(2):
        scan.sums_before({row: x[i] for row, x in arrays.items()}, sums, i * THREADS, packs)
    for row, x in arrays.items():
        np.testing.assert_array_equal(sums[row][: 2 * THREADS + 1], np.cumsum([0, *x.reshape(-1)]))


def test_elements_are_stored(gpu):
    stored, rng = gpu.empty((3, 2 * THREADS + 5), np.int32, SHARED), np.random.default_rng(0)
    whole = rng.integers(0, 99, (2, THREADS)).astype(np.int32)
    for i in range(2):
        scan.store({1: whole[i], 2: -whole[i]}, stored, i * THREADS)
    np.testing.assert_array_equal(stored.get()[1:, : 2 * THREADS], [whole.reshape(-1), -whole.reshape(-1)])


def test_totals(gpu):
    rng = np.random.default_rng(0)
    first, second = gpu.empty((1, 4), np.float32, SHARED), gpu.empty((3, 4), np.float32, SHARED)
    costs, items = rng.uniform(0, 9, THREADS).astype(np.float32), rng.integers(0, 1 << 22, THREADS).astype(np.int32)
    np.testing.assert_allclose(scan.totals({0: costs}, first), [costs.sum()], rtol=1e-6)
    found = scan.totals({1: items, 2: items // 2}, second)
    np.testing.assert_allclose(found, [items.sum(), (items // 2).sum()], rtol=1e-6)
    in_lanes = ragged_warps.totals_in_lanes([items, items // 2], gpu.empty((3, 4), np.float32, SHARED), 1)
    expected = np.float32([items.sum(), *[(items // 2).sum()] * 31])
    np.testing.assert_array_equal(in_lanes, np.tile(expected, 4))
    assert ragged_warps.of_lanes(in_lanes, 2) == expected[:2].tolist()


def test_votes_of_lanes(gpu):
    bits = np.random.default_rng(0).integers(0, 2, 32).astype(np.int32)
    expected = sum(int(bit) << lane for lane, bit in enumerate(bits))
    assert np.uint32(ragged_warps.votes(np.tile(3 * bits, 4))) == expected


def test_sums_of_warps(gpu):
    values = np.random.default_rng(0).integers(-99, 99, THREADS).astype(np.int32)
    of_warps = values.reshape(-1, 32)
    np.testing.assert_array_equal(ragged_warps.sum_of_warp(values), np.repeat(of_warps.sum(axis=1), 32))
    np.testing.assert_array_equal(ragged_warps.sums_of_warp(values), of_warps.cumsum(axis=1).reshape(-1))
    first = np.tile(of_warps[0], 4)
    assert ragged_warps.lane_of(first, np.int32(7)) == first[7]
    assert ragged_warps.count_of_warp((first > 0).astype(np.int32)) == (of_warps[0] > 0).sum()
    assert decode_warps.largest(first) == first.max()
    for limit in first[:3]:
        assert decode_warps.number_at_most(first, limit) == (of_warps[0] <= limit).sum()


def test_arithmetic_in_one_instruction(gpu):
    numbers_of_threads = np.random.default_rng(0).uniform(-1e6, 1e6, THREADS).astype(np.float32)
    np.testing.assert_allclose(numbers.reciprocal(numbers_of_threads), 1 / numbers_of_threads, rtol=1e-6)
    np.testing.assert_array_equal(numbers.truncated(numbers_of_threads), np.trunc(numbers_of_threads).astype(np.int32))
    assert numbers.truncated(np.float32(-2.9)) == -2


@pytest.mark.parametrize(("most", "count"), [(3, 128), (1 << 22, 128), (2**31 - 1, 128), (9, 64), (9, 32)])
def test_the_largest_come_first(gpu, most, count):
    costs = np.random.default_rng(0).integers(0, most, THREADS).astype(np.int32)
    costs[[3, 77, 100]] = costs.max()
    costs[count:] = 0
    values, order = (gpu.empty((THREADS,), np.int32, SHARED) for _ in range(2))
    rows = gpu.empty((3, THREADS + 5), np.int32, SHARED)
    places = sort.places_largest_first(costs, values, np.int32(count))
    expected = np.argsort(-np.minimum(costs, (1 << 22) - 1), stable=True)
    [moved] = sort.moved([{0: costs, 2: -costs}], [places], rows, order)
    np.testing.assert_array_equal(order.get(), expected)
    np.testing.assert_array_equal([moved[0], moved[2]], [costs[expected], -costs[expected]])


@pytest.mark.parametrize("num_seqs", [129, 192, 255, 256, 257, 383, 510])
@pytest.mark.parametrize("most", [1, 9, 1000, 2**31 - 1])
def test_many_are_sorted_by_class(gpu, num_seqs, most):
    """No value comes before one that is larger by a quarter, unless both are below 5, or at least 768; -1 is last."""
    rng, parts = np.random.default_rng(num_seqs), -(-(num_seqs + 2) // THREADS)
    costs = np.full(parts * THREADS, -1, np.int32)
    costs[:num_seqs] = rng.integers(-1, most, num_seqs)
    rows, order = (gpu.empty(shape, np.int32, SHARED) for shape in ((3, parts * THREADS + 5), (parts * THREADS,)))
    places = sort.places_by_class(list(costs.reshape(parts, THREADS)), rows)
    moved = sort.moved([{0: x, 1: -x} for x in costs.reshape(parts, THREADS)], places, rows, order)
    whole = np.concatenate([x[0] for x in moved])
    np.testing.assert_array_equal(np.sort(order.get()), np.arange(parts * THREADS))
    np.testing.assert_array_equal(whole, costs[order.get()])
    np.testing.assert_array_equal(np.concatenate([x[1] for x in moved]), -whole)
    existing = (costs >= 0).sum()
    assert (whole[:existing] >= 0).all()
    clipped = np.clip(whole[:existing], 4, 768)
    assert (clipped * 1.25 >= np.maximum.accumulate(clipped[::-1])[::-1]).all()


def test_a_kept_order_is_stored(gpu):
    rows, order = gpu.empty((3, THREADS + 5), np.int32, SHARED), gpu.empty((THREADS,), np.int32, SHARED)
    own = np.arange(THREADS, dtype=np.int32)
    sort.keep({2: 7 * own}, rows, order)
    np.testing.assert_array_equal([rows.get()[2, :THREADS], order.get()], [7 * own, own])


@pytest.mark.parametrize("space", [SHARED, GLOBAL])
@pytest.mark.parametrize("last", [1, 31, 32, 33, 126])
def test_the_number_of_sums_at_most(gpu, last, space):
    sums = np.cumsum(np.random.default_rng(0).integers(0, 3, (3, THREADS)), axis=1).astype(np.int32)
    sums_ref = gpu.put(sums, space)
    for number in (0, 1, 50, 200):
        assert scan.number_at_most(sums_ref, 1, last, np.int32(number)) == (sums[1, 1 : last + 1] <= number).sum()


@pytest.mark.parametrize("shape", [(2 * THREADS + 5,), (3, THREADS + 5)], ids=["vector", "matrix"])
def test_columns_are_copied(gpu, shape):
    values = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    count = shape[-1] - 5
    copied = gpu.empty((*shape[:-1], count), np.int32)
    scan.copy_columns(gpu.put(values, SHARED), copied, count)
    np.testing.assert_array_equal(copied.get(), values[..., :count])


def test_claims_and_stores_are_counted_once(gpu):
    counters = gpu.put(np.array([5, 70, 0, 30], np.int32))
    smem = SimpleNamespace(drawn=gpu.put(np.zeros(3, np.int32), SHARED))
    refs = SimpleNamespace(inputs_gmem=SimpleNamespace(counters=counters), smem=smem)
    wide, thin = kinds_of(64)
    found = [int(items.number_after(0, 100, kind, refs)) for kind in (wide, thin, wide, thin, thin)]
    assert found == [105, 170, 106, 171, 172]
    places = [(3, 0), (3, 1), (2, 1), (3, 0)]
    assert [int(items.stored_before(*map(np.int32, place), refs)) for place in places] == [30, 31, 0, 32]
    assert counters.get().tolist() == [7, 73, 1, 33]
    assert gpu.orders == [""] * 5 + ["acq_rel.gpu"] * 4, "who merges sees what others have stored"
    assert smem.drawn.get().tolist() == [72, 32, 0], "each warpgroup has a place of its own"
