"""Tests the softmax on each lane's own elements (`hopper/lanes.py`), and stores of rows, without a GPU.

They are written in MLIR and PTX, so Pallas's interpreter replaces them. Here a warpgroup in NumPy runs them
(`warpgroup.py`).
"""

from unittest import mock

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
import pytest

from paged_jax.kernels.mosaic_gpu.hopper import inline, lanes, rows
from tests.warpgroup import InLayout

COLUMNS = 24


@pytest.fixture(autouse=True)
def gpu(gpu):
    with mock.patch.object(lanes, "_layout_of"):
        yield gpu


def tile(x):
    return InLayout(x, mgpu.WGMMA_LAYOUT)


def by_row(x):
    return InLayout(np.asarray(x), mgpu.WGMMA_ROW_LAYOUT)


def drawn(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_rows_and_their_values(gpu):
    assert lanes.row_numbers().tolist() == list(range(64))
    values = drawn(90)
    np.testing.assert_array_equal(lanes.loaded(gpu.put(values), np.int32(7)), values[7:71])


def test_values_side_by_side():
    first, last = np.arange(64, dtype=np.int32), np.arange(100, 164, dtype=np.int32)
    found = lanes.side_by_side([by_row(first), np.int32(5), by_row(last)], COLUMNS)
    wanted = np.repeat(np.stack([first, np.full(64, 5), last], axis=1), 8, axis=1)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("window", [False, True])
def test_unseen_columns_are_hidden(window):
    x, last = drawn(64, 2 * COLUMNS), np.arange(-10, 54, dtype=np.int32)
    lasts, firsts = [last, np.int32(20), last - 3], [last - 9, np.int32(17), last - 5] if window else []
    by_rows = [[by_row(bound) if np.ndim(bound) else bound for bound in bounds] for bounds in (firsts, lasts)]
    found = lanes.masked(tile(x), *by_rows)
    column = np.arange(2 * COLUMNS)
    hidden = column > of_columns(lasts)
    if window:
        hidden |= column < of_columns(firsts)
    assert 0 < hidden.sum() < hidden.size
    np.testing.assert_array_equal(found, np.where(hidden, -np.inf, x))


def of_columns(bounds):
    shares = np.stack([np.broadcast_to(bound, 64) for bound in bounds], axis=1)
    return np.repeat(shares, 2 * COLUMNS // len(bounds), axis=1)


def test_sums():
    x = drawn(64, COLUMNS)
    of_lanes = lanes.sums(tile(x))
    assert not np.array_equal(*of_lanes.registers[0][:2]), "each lane sums its own columns"
    np.testing.assert_allclose(lanes.sum_of_lanes(of_lanes), x.sum(axis=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [0.5, np.linspace(0.1, 2, 64, dtype=np.float32)], ids=["scalar", "rows"])
def test_maxima_rise_where_they_lag(factor):
    x, lag = drawn(64, COLUMNS), 0.75
    highest = x.max(axis=1)
    maxima = highest - np.resize([-1, 0.1, 3, 0.9], 64).astype(np.float32)
    maxima[:24] = highest[:24] + 1  # no maximum of the first warp rises, and in the next one only those of second rows
    found = lanes.raised(by_row(maxima), tile(x), by_row(factor) if np.ndim(factor) else np.float32(factor), lag)
    rises = (highest - maxima) * factor > lag
    assert 0 < rises[16:].sum() < 48
    np.testing.assert_array_equal(found, np.where(rises, highest, maxima))


@pytest.mark.parametrize("ahead", [None, 1, 2])
@pytest.mark.parametrize("factor", [-0.5, np.linspace(0.1, 2, 64, dtype=np.float32)], ids=["scalar", "rows"])
def test_exponentials(factor, ahead):
    x, bases = drawn(64, COLUMNS), drawn(64)
    factors = by_row(factor) if np.ndim(factor) else np.float32(factor)
    found = lanes.exponentials(tile(x), factors, by_row(bases), ahead)
    wanted = np.exp2(x * np.reshape(factor, (-1, 1)) - bases[:, None])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("ahead", [None, 1, 2])
def test_a_nan_among_exponentials_stays_in_its_row(ahead):
    """0 times an earlier exponential is added to later bases, and 0 * NaN is NaN."""
    x = drawn(64, COLUMNS)
    x[3, 0] = np.nan
    found = np.asarray(lanes.exponentials(tile(x), np.float32(1), by_row(drawn(64)), ahead))
    assert np.flatnonzero(np.isnan(found).any(axis=1)).tolist() == [3]


def test_a_tile_times_factors_of_rows():
    x, factors = drawn(64, COLUMNS), drawn(64)
    factors[16:40] = 1  # one warp multiplies nothing, and the next one only the second rows of its lanes
    found = lanes.rescaled(tile(x), by_row(factors))
    np.testing.assert_array_equal(found, x * factors[:, None])


@pytest.mark.parametrize("rows_of_token", [1, 3])
def test_the_first_rows_are_stored(gpu, rows_of_token):
    x, num_tokens, row_size = drawn(64, COLUMNS), 11, 40
    gmem = gpu.put(np.full((64, row_size), np.nan, np.float32))

    @inline.inline()
    def store(_, gmem, x):
        rows.store_first_rows(gmem, x.registers, inline.i32(num_tokens), row_size, rows_of_token=rows_of_token)

    store(gmem, tile(x))
    wanted = np.full((64, row_size), np.nan, np.float32)
    count = num_tokens * rows_of_token
    wanted[:count, :COLUMNS] = x[:count]
    np.testing.assert_array_equal(gmem.get(), wanted)
