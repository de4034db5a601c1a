"""Tests the softmax on each lane's own elements (`hopper/lanes.py`), and stores of rows, without a GPU.

They are written in MLIR and PTX, so Pallas's interpreter replaces them. Here NumPy runs them: a register is an array
[128, elements], with a row for each thread of a warpgroup.
"""

from types import SimpleNamespace
from unittest import mock

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
import pytest

from paged_jax.kernels.mosaic_gpu.hopper import inline, lanes, rows
from tests.test_mosaic_gpu_merge import ARITH, THREADS, Gpu
from tests.test_mosaic_gpu_narrow import array_of, registers_of

COLUMNS = 24
THREAD = np.arange(THREADS)
ROWS = [THREAD // 32 * 16 + THREAD % 32 // 4 + 8 * h for h in range(2)]  # the rows of each thread


class Register(np.ndarray):
    """A register, or one element of it, of all threads. `type` is the number of elements, or None for one element."""

    @property
    def type(self):
        return self.shape[1] if self.ndim == 2 else None


def register(x):
    return np.asarray(x).view(Register)


class Array(SimpleNamespace):
    """Stands in for Mosaic's array in registers."""

    def exp2(self, approx):
        assert approx
        return Array(registers=np.array([*map(np.exp2, self.registers.flat), None], object)[:-1], layout=self.layout)


def tile(x):
    registers = registers_of(x, mgpu.WGMMA_LAYOUT)
    registers[:] = [register(each) for each in registers]
    return Array(registers=registers, layout=mgpu.WGMMA_LAYOUT)


def by_row(x):
    registers = np.empty(2, object)
    registers[:] = [register(np.asarray(x)[row][:, None]) for row in ROWS]
    return Array(registers=registers, layout=mgpu.WGMMA_ROW_LAYOUT, ndim=1)


def scalar(x):
    return Array(registers=np.array(x), ndim=0)


def of_rows(found):
    """The array [64] in registers of rows; the four lanes of a row must agree."""
    result = np.empty(64, found.registers[0].dtype)
    for h in range(2):
        result[ROWS[h]] = found.registers[h][:, 0]
    for h in range(2):
        np.testing.assert_array_equal(result[ROWS[h]], found.registers[h][:, 0])
    return result


class Branch:
    """Stands in for `scf.IfOp`: both blocks run, and each thread takes the results of one of them."""

    def __init__(self, condition, _, has_else):
        assert has_else
        self.condition, self.then_block, self.else_block = condition, None, None
        self.blocks = []
        Branch.last = self

    @property
    def results(self):
        conditions = [self.condition.reshape(-1, *[1] * (x.ndim - 1)) for x in self.blocks[0]]
        return [register(np.where(c, x, y)) for c, x, y in zip(conditions, *self.blocks, strict=True)]


def vote(_, condition, kind):
    assert kind == "any"
    return np.repeat(np.asarray(condition).reshape(4, 32).any(axis=1), 32)


@pytest.fixture(autouse=True)
def gpu():
    made, index = Gpu(), register(THREAD)
    arith = SimpleNamespace(**vars(ARITH) | {
        "ori": np.logical_or, "negf": np.negative, "select": lambda c, x, y: register(np.where(c, x, y)),
        "CmpFPredicate": SimpleNamespace(OGT=np.greater, UNE=np.not_equal),
    })  # fmt: skip
    ir = mock.MagicMock()
    ir.VectorType.get = lambda shape, _: shape[0]
    fakes = {
        "inline": lambda *_, **__: lambda body: lambda *arguments: body(None, *arguments),
        "array": lambda registers, layout, *_, **__: Array(registers=registers.reshape(-1), layout=layout),
        "element": lambda x, i: x[:, i],
        "address": lambda x: x,
        "assembly": lambda *args, **keywords: [register(x) for x in made.assembly(*args, **keywords)],
        "thread_index_read_again": lambda: index,
        "vector": SimpleNamespace(
            broadcast=lambda size, x: register(np.repeat(np.broadcast_to(x, THREADS)[:, None], size, axis=1))
        ),
        "nvvm": SimpleNamespace(vote_sync=vote),
        "scf": SimpleNamespace(IfOp=Branch, yield_=lambda values: Branch.last.blocks.append(values)),
        "mlir_math": SimpleNamespace(fma=lambda x, y, z: x * y + z),
        "arith": arith,
        "ir": ir,
    }
    of_rows = {name: fakes[name] for name in ("element", "address", "assembly", "thread_index_read_again")}
    with (
        mock.patch.object(mgpu, "c", lambda x, _: x),
        mock.patch.object(mgpu.utils, "shfl_bfly", lambda x, distance: x[THREAD ^ distance]),
        mock.patch.multiple(inline, arith=arith, ir=ir),
        mock.patch.multiple(lanes, _layout_of=mock.DEFAULT, **fakes),
        mock.patch.multiple(rows, **of_rows),
    ):
        yield made


def drawn(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_rows_and_their_values(gpu):
    assert of_rows(lanes.row_numbers()).tolist() == list(range(64))
    values = drawn(90)
    np.testing.assert_array_equal(of_rows(lanes.loaded(gpu.put(values), scalar(7))), values[7:71])


def test_values_side_by_side():
    first, last = np.arange(64), 100 + np.arange(64)
    found = lanes.side_by_side([by_row(first), scalar(5), by_row(last)], COLUMNS)
    wanted = np.repeat(np.stack([first, np.full(64, 5), last], axis=1), 8, axis=1)
    np.testing.assert_array_equal(array_of(found.registers, mgpu.WGMMA_LAYOUT, (64, COLUMNS)), wanted)


def test_sums():
    x = drawn(64, COLUMNS)
    of_lanes = lanes.sums(tile(x))
    assert not np.array_equal(*(of_lanes.registers[0][i] for i in (0, 1))), "each lane sums its own columns"
    np.testing.assert_allclose(of_rows(lanes.sum_of_lanes(of_lanes)), x.sum(axis=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [0.5, np.linspace(0.1, 2, 64, dtype=np.float32)], ids=["scalar", "rows"])
def test_maxima_rise_where_they_lag(factor):
    x, lag = drawn(64, COLUMNS), 0.75
    highest = x.max(axis=1)
    maxima = highest - np.resize([-1, 0.1, 3, 0.9], 64).astype(np.float32)
    maxima[:24] = highest[:24] + 1  # no maximum of the first warp rises, and in the next one only those of second rows
    found = of_rows(lanes.raised(by_row(maxima), tile(x), by_row(factor) if np.ndim(factor) else scalar(factor), lag))
    rises = (highest - maxima) * factor > lag
    assert 0 < rises[16:].sum() < 48
    np.testing.assert_array_equal(found, np.where(rises, highest, maxima))


@pytest.mark.parametrize("factor", [-0.5, np.linspace(0.1, 2, 64, dtype=np.float32)], ids=["scalar", "rows"])
def test_exponentials(factor):
    x, bases = drawn(64, COLUMNS), drawn(64)
    found = lanes.exponentials(shaped(x), by_row(factor) if np.ndim(factor) else scalar(factor), by_row(bases))
    wanted = np.exp2(x * np.reshape(factor, (-1, 1)) - bases[:, None])
    np.testing.assert_allclose(array_of(found.registers, mgpu.WGMMA_LAYOUT, x.shape), wanted, rtol=1e-5)


def test_a_tile_times_factors_of_rows():
    x, factors = drawn(64, COLUMNS), drawn(64)
    factors[16:40] = 1  # one warp multiplies nothing, and the next one only the second rows of its lanes
    found = array_of(lanes.rescaled(shaped(x), by_row(factors)).registers, mgpu.WGMMA_LAYOUT, x.shape)
    np.testing.assert_array_equal(found, x * factors[:, None])


def shaped(x):
    made = tile(x)
    made.shape = x.shape
    return made


@pytest.mark.parametrize(("rows_of_token", "first_column"), [(1, 0), (3, 8)])
def test_the_first_rows_are_stored(gpu, rows_of_token, first_column):
    x, num_tokens, row_size = drawn(64, COLUMNS), 11, 40
    gmem = gpu.put(np.full((64, row_size), np.nan, np.float32))
    rows.store_first_rows(
        gmem, tile(x).registers, num_tokens, row_size, rows_of_token=rows_of_token, first_column=first_column
    )
    wanted = np.full((64, row_size), np.nan, np.float32)
    count = num_tokens * rows_of_token
    wanted[:count, first_column : first_column + COLUMNS] = x[:count]
    np.testing.assert_array_equal(gpu.get(gmem, wanted.shape, np.float32), wanted)
