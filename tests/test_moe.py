"""Mixtures of experts: both ways of computing them, the bytes of one token, and the kernel that runs on Hopper."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import moe
from examples.config import ExpertsConfig

CONFIG = ExpertsConfig(num_experts=8, num_chosen=2, intermediate_size=16)


def draw(num_tokens, config=CONFIG, hidden_size=32, dtype=jnp.float32):
    """Hidden vectors, each token's experts and their weights, and the experts' matrices."""
    keys = jax.random.split(jax.random.key(0), 5)
    size, num_experts = config.intermediate_size, config.num_experts
    return (
        jax.random.normal(keys[0], (num_tokens, hidden_size), dtype),
        jax.lax.top_k(jax.random.normal(keys[1], (num_tokens, num_experts)), config.num_chosen)[1],
        jax.random.uniform(keys[2], (num_tokens, config.num_chosen)),
        {
            "gate_up": jax.random.normal(keys[3], (num_experts, 2 * size, hidden_size), dtype),
            "down": jax.random.normal(keys[4], (num_experts, hidden_size, size), dtype),
        },
    )


def expected(hidden, experts, weights, parameters):
    """The weighted sum of each token's experts, one product at a time in float64."""
    out = np.zeros(hidden.shape)
    gate_up, down = (np.float64(parameters[name]) for name in ("gate_up", "down"))
    for token, row in enumerate(np.float64(hidden)):
        for expert, weight in zip(np.asarray(experts[token]), np.asarray(weights[token]), strict=True):
            gate, up = np.split(gate_up[expert] @ row, 2)
            out[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 40])  # 4 of them have as many pairs as there are experts
def test_experts(num_tokens):
    arrays = draw(num_tokens)
    out = jax.jit(lambda *arrays: moe.compute_experts(*arrays, config=CONFIG))(*arrays)
    np.testing.assert_allclose(out, expected(*arrays), rtol=1e-4, atol=1e-3)


def test_the_largest_scores():
    """Of equal scores those with the lowest indices come first; scores may be -inf."""
    scores = jax.random.randint(jax.random.key(0), (20, 16), 0, 9).astype(jnp.float32)
    scores = scores.at[3, 5:].set(-jnp.inf).at[4].set(-jnp.inf)
    for one, other in zip(jax.jit(moe.top_k, static_argnums=1)(scores, 6), jax.lax.top_k(scores, 6), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def test_one_token_reads_its_experts_alone():
    """Other experts are not read: no computed array is larger than the matrices of two experts."""
    config = dataclasses.replace(CONFIG, num_experts=64, intermediate_size=64)
    hidden, experts, weights, parameters = draw(1, config, 128)
    run = jax.jit(lambda *arrays: moe.compute_experts(*arrays, config=config))
    used = jnp.zeros(64, bool).at[experts[0]].set(True)
    poisoned = jax.tree.map(lambda x: jnp.where(used[:, None, None], x, jnp.nan), parameters)
    np.testing.assert_array_equal(run(hidden, experts, weights, poisoned), run(hidden, experts, weights, parameters))
    jaxpr = jax.make_jaxpr(lambda *arrays: moe.compute_experts(*arrays, config=config))(*draw(1, config, 128))
    largest = max(out.aval.size for eqn in jaxpr.eqns for out in eqn.outvars)
    assert largest <= config.num_chosen * parameters["gate_up"][0].size


@pytest.mark.slow_on_cpu
def test_experts_that_are_on_no_device_of_a_pair_add_nothing():
    """With half of the experts a device computes half of the pairs; both halves together are the whole."""
    config = dataclasses.replace(CONFIG, split="experts")
    for num_tokens in (2, 40):
        hidden, experts, weights, parameters = draw(num_tokens)
        halves = [jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], parameters) for i in range(2)]
        parts = [
            moe.compute_experts(hidden, experts, weights, half, config=config, part=jnp.int32(i))
            for i, half in enumerate(halves)
        ]
        np.testing.assert_allclose(sum(parts), expected(hidden, experts, weights, parameters), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("num_tokens", "split", "part", "is_tiled"),
    [
        (1, "columns", None, False),
        (2, "columns", None, True),
        (64, "columns", None, True),
        (65, "columns", None, False),
        (1, "columns", 0, False),
        (1, "experts", 0, True),
    ],
)
def test_how_hopper_computes_experts(num_tokens, split, part, is_tiled, monkeypatch):
    """Of fewer pairs than a fourth of the experts each gathers its matrices, if all of these are on the device."""
    tiled = []
    monkeypatch.setattr(moe, "_is_hopper", lambda: True)
    monkeypatch.setattr(moe, "compute_in_tiles", lambda hidden, *_: tiled.append(1) or hidden)
    config = dataclasses.replace(CONFIG, intermediate_size=64, split=split)
    arrays = jax.eval_shape(lambda: draw(num_tokens, config, 64, jnp.bfloat16))
    jax.eval_shape(lambda *arrays: moe.compute_experts(*arrays, config=config, part=part), *arrays)
    assert bool(tiled) == is_tiled


@pytest.mark.parametrize("shape", [(64, 256, 128), (200, 128, 192)])
def test_the_grouped_kernel_lowers_for_hopper(shape):
    num_rows, num_out, num_in = shape
    rows = jax.ShapeDtypeStruct((num_rows, num_in), jnp.bfloat16)
    matrices = jax.ShapeDtypeStruct((8, num_out, num_in), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    assert moe.fits_kernel(rows, matrices)

    def two_layers(rows, matrices, sizes):
        return moe.grouped_kernel(rows, matrices, sizes), moe.grouped_kernel(2 * rows, matrices, sizes)

    lowered = jax.jit(two_layers).trace(rows, matrices, sizes).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu") == 1  # the layers share it


@pytest.mark.parametrize(
    ("num_rows", "shape", "dtype"),
    [(32, (8, 128, 128), jnp.bfloat16), (64, (8, 96, 128), jnp.bfloat16), (64, (8, 128, 128), jnp.float32)],
)
def test_what_the_grouped_kernel_does_not_take(num_rows, shape, dtype):
    rows = jax.ShapeDtypeStruct((num_rows, shape[2]), dtype)
    assert not moe.fits_kernel(rows, jax.ShapeDtypeStruct(shape, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 3, 20, 100])  # the last ones have enough rows for the grouped kernel
def test_the_kernels_compute_what_xla_computes(num_tokens):
    config = dataclasses.replace(CONFIG, intermediate_size=128)
    arrays = draw(num_tokens, config, 256, jnp.bfloat16)
    out = jax.jit(lambda *arrays: moe.compute_experts(*arrays, config=config))(*arrays)
    np.testing.assert_allclose(out, expected(*arrays), rtol=0.1, atol=np.abs(expected(*arrays)).max() / 30)
