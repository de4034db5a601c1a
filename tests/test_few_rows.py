"""The kernels between products of few rows: their numbers, interpreted and on GPUs, and who takes them."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import scale_steps
from examples.all_reduce import PeerSum
from examples.config import LayerConfig
from examples.decoder import Attention, Mlp, Tokens
from examples.few_rows import SPLITS, activate, is_split, product, rotate_heads, width_of
from examples.rope import Rope, make_rotation, rotate
from examples.sharding import make_mesh
from tests import ragged_interpreter


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request):
    return ragged_interpreter.interpreting() if request.param == "interpreted" else contextlib.nullcontext()


def draw(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), dtype)


@pytest.mark.parametrize(("is_in_addends", "num_heads", "num_kv_heads"), [(True, 4, 2), (False, 3, 1)])
def test_heads_are_rotated_and_separated(where, is_in_addends, num_heads, num_kv_heads):
    rows, size = 2, 128
    total = num_heads + 2 * num_kv_heads
    shape = (*((3,) if is_in_addends else ()), rows, total * size)
    parts = draw(*shape, dtype=jnp.float32 if is_in_addends else jnp.bfloat16)
    angles = draw(rows, size // 2)
    counts = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    with where:
        found = rotate_heads(parts, jnp.cos(angles), jnp.sin(angles), **counts)
        found = [np.asarray(x, np.float32) for x in found]
    heads = (parts.sum(axis=0) if is_in_addends else parts).astype(jnp.float32).reshape(rows, total, size)
    both, value = jnp.split(heads, [num_heads + num_kv_heads], axis=1)
    turned = rotate(both, (jnp.cos(angles), jnp.sin(angles)))
    wanted = *jnp.split(turned, [num_heads], axis=1), value
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=2**-8 * np.abs(y).max())


@pytest.mark.parametrize("size", [256, 640])
def test_units(where, size):
    assert width_of(size) == {256: 256, 640: 128}[size]
    addends = draw(SPLITS, 2, 2 * size)
    with where:
        found = np.asarray(activate(addends, activation=jax.nn.silu), np.float32)
    gate, up = np.split(np.asarray(addends.sum(axis=0)), 2, axis=1)
    wanted = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(found, wanted, atol=2**-8 * np.abs(wanted).max())


def test_products_of_few_rows_are_in_addends():
    x, weights = draw(9, 64), draw(64, 32)
    np.testing.assert_allclose(product(x, weights), x @ weights, rtol=1e-4, atol=1e-4)
    found = product(x[:8], weights)
    assert found.shape == (SPLITS, 8, 32)
    np.testing.assert_allclose(found.sum(axis=0), x[:8] @ weights, rtol=1e-4, atol=1e-4)
    assert not is_split(8, 66)
    assert product(x[:8, :62], weights[:62]).shape == (8, 32)


SIZES = {"hidden_size": 8, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 256, "num_parts": 2}
CONFIG = dataclasses.replace(scale_steps.MODELS["llama3-8b"], **SIZES)


@pytest.fixture
def peers(monkeypatch):
    """Two devices' `PeerSum`, whose kernels only say that they were called."""
    monkeypatch.setattr(PeerSum, "_heads", property(lambda _: lambda *_, **counts: counts))
    monkeypatch.setattr(PeerSum, "_units", property(lambda _: lambda *_, **__: "units"))
    return PeerSum(make_mesh({"dp": 1, "tp": 2}, jax.devices("cpu")), None, None)


@pytest.mark.parametrize(
    ("changes", "rope", "is_taken"),
    [
        ({}, {}, True),
        ({"qkv_bias": True}, {}, False),
        ({"qk_norm": "head"}, {}, False),
        ({"head_size": 64}, {}, False),
        ({}, {"size": 64}, False),
        ({}, {"is_interleaved": True}, False),
        ({}, None, False),
    ],
)
def test_whose_heads_are_rotated_by_the_kernel(changes, rope, is_taken, peers):
    of_layer = None if rope is None else Rope(1e4, **rope)
    layer = LayerConfig(rope=of_layer)
    config = dataclasses.replace(CONFIG, **changes)
    attention = Attention(config, layer, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    positions = jnp.arange(9)
    rotations = {} if of_layer is None else {of_layer: make_rotation(of_layer, config.head_size, 64, positions)}
    tokens = Tokens(rotations, lambda *_, **__: (positions, None), 9, peers)
    wanted = {"num_heads": 2, "num_kv_heads": 1} if is_taken else None
    assert attention._rotated_by(tokens, jnp.ones((9, 8), jnp.bfloat16)) == wanted
    assert attention._rotated_by(dataclasses.replace(tokens, peers=None), None) is None


@pytest.mark.parametrize(
    ("changes", "rows", "is_taken"),
    [({}, 8, True), ({}, 9, False), ({"intermediate_size": 320}, 8, False), ({"mlp_bias": True}, 8, False)],
)
def test_whose_units_the_kernel_computes(changes, rows, is_taken, peers):
    config = dataclasses.replace(CONFIG, **changes)
    mlp = Mlp(config, config.intermediate_size, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    units = mlp.inner(jnp.ones((rows, 8), jnp.bfloat16), peers)
    found = units if isinstance(units, str) else units.shape
    assert found == ("units" if is_taken else (rows, config.intermediate_size))
