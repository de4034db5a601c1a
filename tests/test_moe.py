"""Mixtures of experts: both ways of computing them, the bytes of one token, and the kernel that runs on Hopper."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import moe
from examples.config import ExpertsConfig
from tests.plain_decoder import routed

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


ROUTERS = [
    {"scores": "softmax"},
    {"scores": "softmax", "are_normalized": True, "scale": 2.5},
    {"scores": "softmax", "are_normalized": True, "has_correction": True, "scale": 0.5},
    {"scores": "softmax", "num_groups": 4, "num_chosen_groups": 2, "scale": 16.0},
    {"scores": "softmax", "num_groups": 4, "num_chosen_groups": 2, "are_normalized": True, "group_score": "best_two"},
    {"scores": "sigmoid", "has_bias": True},
    {"scores": "sigmoid", "num_groups": 4, "num_chosen_groups": 3, "are_normalized": True, "has_correction": True},
    {"scores": "chosen", "has_bias": True, "scale": 1.5},
]


def test_the_router_chooses_as_its_config_says():
    """The last row is padding."""
    rng = np.random.default_rng(0)
    hidden, kernel = rng.normal(size=(20, 32)), rng.normal(size=(32, 16))
    bias, correction = rng.normal(size=(2, 16))
    for fields in ROUTERS:
        config = ExpertsConfig(16, 3, 8, **fields)
        make = partial(moe.Router, SimpleNamespace(experts=config, hidden_size=32), dtype=jnp.float32)
        router = nnx.eval_shape(lambda make=make: make(rngs=nnx.Rngs(0)))
        assert (router.bias is None, router.correction is None) == (not config.has_bias, not config.has_correction)
        logits, corrections = hidden @ kernel, correction * config.has_correction
        for name, values in (("kernel", kernel), ("bias", bias), ("correction", correction)):
            if getattr(router, name) is not None:
                setattr(router, name, nnx.Param(np.float32(values)))
        if config.has_bias:
            logits += bias
        experts, weights = router(jnp.float32(hidden), 19)
        expected = [routed(config, row, corrections) for row in logits[:-1]]
        np.testing.assert_array_equal(experts, [chosen for chosen, _ in expected], str(fields))
        np.testing.assert_allclose(weights, [factors for _, factors in expected], rtol=1e-4, err_msg=str(fields))
        if config.scores == "sigmoid":  # all scores of a token may be 0
            router.kernel = nnx.Param(-np.ones((32, 16), np.float32))
            assert np.isfinite(router(jnp.full((20, 32), 10.0), 19)[1]).all()


@pytest.mark.parametrize(("num_rows", "num_in"), [(3, 192), (65, 128), (3, 96)])
def test_few_rows_of_the_router_are_summed_in_parts(num_rows, num_in):
    rng = np.random.default_rng(0)
    rows, matrix = (np.float32(rng.normal(size=shape)) for shape in ((num_rows, num_in), (num_in, 8)))
    np.testing.assert_allclose(moe._narrow_product(jnp.array(rows), jnp.array(matrix)), rows @ matrix, atol=1e-4)
    products = [
        eqn for eqn in jax.make_jaxpr(moe._narrow_product)(rows, matrix).eqns if eqn.primitive.name == "dot_general"
    ]
    assert [eqn.params["precision"] for eqn in products] == [(jax.lax.Precision.HIGHEST,) * 2]  # no TF32


def test_swiglu_and_the_variant_of_gpt_oss():
    gate, up = (np.float32(x) for x in np.meshgrid([-9, -1, 0, 0.5, 2, 9], [-9, -1.5, 0.5, 1.5, 9]))
    expected = up * gate / (1 + np.exp(-gate))
    np.testing.assert_allclose(moe._swiglu(gate, up, CONFIG), expected, rtol=1e-5)
    config = dataclasses.replace(CONFIG, swiglu_limit=2.0, swiglu_alpha=1.7)
    cut, bounded = np.minimum(gate, 2), np.clip(up, -2, 2)
    expected = cut / (1 + np.exp(-1.7 * cut)) * (bounded + 1)
    np.testing.assert_allclose(moe._swiglu(gate, up, config), expected, rtol=1e-5)


@pytest.mark.parametrize(("split", "adds_bias"), [("columns", [True, False]), ("experts", [True, True])])
def test_one_of_the_hopper_gpus_that_share_columns_adds_the_bias(split, adds_bias, monkeypatch):
    given = []
    monkeypatch.setattr(moe, "_is_hopper", lambda: True)
    monkeypatch.setattr(moe, "fits", lambda *_: True)
    monkeypatch.setattr(moe, "compute_in_tiles", lambda *arrays: given.append(arrays[3]))
    hidden, experts, weights, parameters = draw(4)
    parameters |= {name: jnp.ones((8, size)) for name, size in (("gate_up_bias", 32), ("down_bias", 32))}
    for part in range(2):
        config = dataclasses.replace(CONFIG, split=split)
        moe.compute_experts(hidden, experts, weights, parameters, config=config, part=jnp.int32(part))
    assert [bool(biases["down_bias"].all()) for biases in given] == adds_bias
    assert [bool(biases["down_bias"].any()) for biases in given] == adds_bias
    assert all(biases["gate_up_bias"].all() for biases in given)


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


def test_rows_of_pairs_that_are_on_other_devices_may_hold_anything(monkeypatch):
    """The grouped products leave them as they are."""
    make_product = moe._many_pairs

    def make_poisoned(pairs, num_experts):
        product = make_product(pairs, num_experts)
        return lambda *arrays: jnp.where((pairs < num_experts)[:, None], product(*arrays), jnp.nan)

    monkeypatch.setattr(moe, "_many_pairs", make_poisoned)
    hidden, experts, weights, parameters = draw(5)
    here = jax.tree.map(lambda x: x[4:], parameters)
    config = dataclasses.replace(CONFIG, split="experts")
    out = moe.compute_experts(hidden, experts, weights, here, config=config, part=jnp.int32(1))
    wanted = expected(hidden, experts, jnp.where(experts >= 4, weights, 0), parameters)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-3)


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
