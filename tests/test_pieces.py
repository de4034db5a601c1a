"""Tests steps of prompts that several devices run in pieces: they give what they give as a whole."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import scale_steps
from examples import loop, spread_sum, step
from examples.sharding import make_mesh, split_config
from examples.step import make_abstract_step
from paged_jax.engine import Batch

BLOCK_SIZE = 16
CONFIG = dataclasses.replace(
    scale_steps.MODELS["llama3-8b"],
    vocab_size=64,
    embedding_size=64,
    hidden_size=64,
    intermediate_size=128,
    head_size=16,
    num_heads=8,
    num_kv_heads=8,
    layers=scale_steps.MODELS["llama3-8b"].layers[:2],
)


def make_batch(new, lens, num_tokens, **options):
    """Rows with so many new tokens and so many tokens, each with two blocks; `num_tokens` counts tokens of padding."""
    new, lens = np.array(new, np.int32), np.array(lens, np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    row = np.repeat(np.arange(len(new), dtype=np.int32), new)
    positions = np.arange(len(row), dtype=np.int32) + lens[row] - starts[row + 1]
    tables = options.pop("tables", np.arange(2 * len(new), dtype=np.int32)[::-1].reshape(-1, 2))
    slots = tables[row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    padding = (0, num_tokens - len(row))
    ids, positions = (np.pad(x, padding) for x in ((positions * 7 + row) % 64, positions))
    slots = np.pad(slots, padding, constant_values=-1)
    rows = options.pop("rows", None)
    arrays = ids, positions, slots, tables, lens, starts, None if rows is None else np.array(rows, np.int32)
    return jax.tree.map(jnp.asarray, Batch(*arrays, **options))


BATCHES = {
    "prompts": lambda: make_batch([10, 8, 6], [10, 8, 12], 24, rows=[9, 17, 23]),
    "every-token": lambda: make_batch([10, 8, 6], [10, 8, 12], 24),
    "one-prompt": lambda: make_batch([24], [27], 24, rows=[23, 7, 8, 0]),
    "decodes-and-padding": lambda: make_batch(
        [3, 9, 2, 1, 1, 1, 0, 0], [3, 20, 2, 9, 17, 1, 0, 0], 24, rows=[2, 11, 13, 14, 15, 16, 0, 0], num_prompts=4
    ),
    "most-is-padding": lambda: make_batch([5, 2, 0], [5, 4, 0], 24, rows=[4, 6, 0]),
    # The second row's first block is the first row's, which writes it in this step.
    "a-row-that-reads-what-one-before-writes": lambda: make_batch(
        [16, 8], [16, 24], 24, rows=[15, 23], tables=np.array([[3, 0], [3, 1]], np.int32)
    ),
}


def windows_of(batch):
    """The batch as an engine gives it where layers with a window have tables of their own."""
    tables = batch.block_tables[::-1]
    row = jnp.searchsorted(batch.query_start_loc[1:], jnp.arange(len(batch.token_ids)), side="right")
    at = batch.positions
    slots = tables[row, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
    return dataclasses.replace(
        batch, slot_mapping=(batch.slot_mapping, slots), block_tables=(batch.block_tables, tables), windows=(None, 4)
    )


def run(config, mesh, batch, pieces, spread=None):
    """A step's logits and caches, and its program before XLA compiles it."""
    draw = np.random.default_rng(0)
    shapes, call = make_abstract_step(config, jnp.float32, pieces=pieces, spread=spread)
    weights = jax.tree.map(lambda leaf: draw.normal(size=leaf.shape, scale=0.1).astype(np.float32), shapes)
    caches = loop.make_caches(config, 16, BLOCK_SIZE, jnp.float32, mesh=mesh)
    options = step.xla_options(len(batch.token_ids), weights=shapes, mesh=mesh, pieces=pieces)
    lowered = jax.jit(call, compiler_options=options).lower(weights, caches, batch)
    return *lowered.compile()(weights, caches, batch), lowered.as_text()


def assert_equal(config, size, batch, pieces, make_spread=lambda mesh: None, platform="cpu", error=2e-5):
    mesh = make_mesh({"dp": 1, "tp": size}, jax.devices(platform))
    config = split_config(config, mesh)
    wanted, kept, whole = run(config, mesh, batch, 1)
    found, kept_in_pieces, text = run(config, mesh, batch, pieces, make_spread(mesh))
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(found, wanted, atol=error * np.abs(wanted).max())
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=error), kept_in_pieces, kept)
    assert [x.count("optimization_barrier") for x in (whole, text)] == [0, pieces * len(CONFIG.layers)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(step, "_LEAST_IN_PIECE", 8)
    monkeypatch.setattr(step, "_TILE", 4)


@pytest.mark.parametrize("pieces", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BATCHES)
def test_pieces_are_what_the_step_is_whole(name, pieces):
    assert_equal(CONFIG, 2, BATCHES[name](), pieces)


@pytest.mark.slow
def test_pieces_over_eight_devices():
    assert_equal(CONFIG, 8, BATCHES["prompts"](), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 8])
def test_pieces_on_gpus(size):
    """GPUs multiply with TF32."""
    if len(jax.devices()) < size:
        pytest.skip(f"needs {size} GPUs")
    assert_equal(CONFIG, size, BATCHES["prompts"](), 2, platform="gpu", error=3e-2)


@pytest.mark.parametrize("by_copies", [False, True])
@pytest.mark.parametrize("name", ["prompts", pytest.param("every-token", marks=pytest.mark.slow)])
def test_a_spread_residual_stream(name, by_copies, monkeypatch):
    monkeypatch.setattr(spread_sum, "LEAST", 2)
    make = functools.partial(spread_sum.SpreadSum, by_copies=by_copies)
    assert_equal(CONFIG, 4, BATCHES[name](), 2, make)


def test_layers_with_windows_of_their_own():
    first, second = CONFIG.layers
    config = dataclasses.replace(CONFIG, layers=(first, dataclasses.replace(second, sliding_window=4)))
    assert_equal(config, 2, windows_of(BATCHES["prompts"]()), 2)


def test_a_step_of_few_tokens_has_fewer_pieces():
    assert step._bounds(24, 1) == [0, 24]
    assert step._bounds(24, 3) == [0, 8, 16, 24]
    assert step._bounds(23, 3) == [0, 8, 23]
    assert [step._bounds(n, 3) for n in (0, 1, 15)] == [[0, 0], [0, 1], [0, 15]]
    assert step._bounds(31, 3) == [0, 8, 20, 31]


def test_one_device_and_decode_steps_have_none():
    shapes, call = make_abstract_step(CONFIG, jnp.float32, pieces=2)
    caches = jax.eval_shape(lambda: loop.make_caches(CONFIG, 16, BLOCK_SIZE, jnp.float32))
    text = jax.jit(call).lower(shapes, caches, BATCHES["prompts"]()).as_text()
    assert "optimization_barrier" not in text
    config = split_config(CONFIG, make_mesh({"dp": 1, "tp": 2}, jax.devices("cpu")))
    shapes, call = make_abstract_step(config, jnp.float32, pieces=2)
    batch = dataclasses.replace(make_batch([1] * 24, [3] * 24, 24), is_decode=True)
    assert "optimization_barrier" not in jax.jit(call).lower(shapes, caches, batch).as_text()
