"""The kernel for experts with few rows: its numbers in Pallas's interpreter, and the tiles that it takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import expert_kernel, moe
from examples.config import ExpertsConfig
from tests import ragged_interpreter
from tests.test_moe import draw

make_tiles = jax.jit(expert_kernel.make_tiles, static_argnums=1)
CONFIG = ExpertsConfig(num_experts=4, num_chosen=2, intermediate_size=64)


def test_experts_in_tiles(monkeypatch):
    """One pair has no expert here, and gpt-oss has biases and an activation of its own."""
    monkeypatch.setattr(expert_kernel, "_STAGES", 2)  # so that stages are filled again
    hidden, experts, weights, parameters = draw(7, CONFIG, 256, jnp.bfloat16)
    config, num_experts = dataclasses.replace(CONFIG, swiglu_limit=1.0, swiglu_alpha=1.7), CONFIG.num_experts
    experts, weights = experts.at[2, 1].set(num_experts), weights.at[2, 1].set(0)
    keys = jax.random.split(jax.random.key(1))
    for name, key in zip(("gate_up", "down"), keys, strict=True):
        parameters[f"{name}_bias"] = jax.random.normal(key, parameters[name].shape[:2], jnp.bfloat16)
    compute = jax.jit(expert_kernel.compute_in_tiles, static_argnums=4)
    with ragged_interpreter.interpreting():
        out = np.asarray(compute(hidden, experts, weights, parameters, moe._activation(config)))
    compute = jax.jit(lambda *arrays: moe.compute_experts(*arrays, config=config))
    numbers = compute(hidden, experts, weights, parameters)
    np.testing.assert_allclose(out, numbers, rtol=0.05, atol=np.abs(numbers).max() / 50)


@pytest.mark.parametrize(("num_pairs", "num_experts", "size"), [(6, 8, 8), (40, 4, 32), (200, 3, 64), (9, 128, 8)])
def test_each_pair_has_a_row_in_a_tile_of_its_expert(num_pairs, num_experts, size):
    pairs = np.random.default_rng(0).integers(0, num_experts + 1, num_pairs)
    pairs[: num_pairs // 2] = 1  # one expert has many
    tiles = make_tiles(jnp.asarray(pairs), num_experts)
    slots, experts = np.asarray(tiles.slots), np.asarray(tiles.experts)
    assert tiles.size == size
    has_expert = pairs < num_experts
    assert len(set(slots[has_expert])) == has_expert.sum()
    np.testing.assert_array_equal(experts[slots[has_expert] // size], pairs[has_expert])
    assert not set(slots[has_expert]) & set(slots[~has_expert])
    np.testing.assert_array_equal(np.asarray(tiles.pairs)[slots[has_expert]], np.flatnonzero(has_expert))
    needed = -(-np.bincount(pairs, minlength=num_experts + 1)[:-1] // size)
    np.testing.assert_array_equal(np.bincount(experts, minlength=num_experts + 1)[:-1], needed)  # none for nothing


def test_the_largest_number_of_tiles():
    """Each expert has one row more than whole tiles hold, and no tile is left over."""
    tiles = make_tiles(jnp.asarray([0] * 17 + [*range(1, 8)]), 8)
    assert tiles.size == 8
    np.testing.assert_array_equal(tiles.experts, [0, 0, 0, *range(1, 8)])


@pytest.mark.parametrize(
    ("shape", "dtype", "is_taken"),
    [((8, 128, 192), jnp.bfloat16, True), ((8, 96, 128), jnp.bfloat16, False), ((8, 128, 128), jnp.float32, False)],
)
def test_what_the_kernel_takes(shape, dtype, is_taken):
    assert expert_kernel.fits(jax.ShapeDtypeStruct(shape, dtype)) == is_taken
