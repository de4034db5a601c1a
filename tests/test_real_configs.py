"""The decoders of real folders' configs: how many parameters they have, and what their tensors are called."""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.checkpoint import named_shapes
from examples.decoder import Decoder
from examples.families import READERS, parse_config
from examples.rope import YarnScaling

REAL = json.loads((Path(__file__).parent / "data" / "real" / "configs.json").read_text())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", REAL)
def test_shapes(name):
    """The parameters are as many as published, and so are the elements of the tensors that a folder must have."""
    config = parse_config(REAL[name]["config"])
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    parameters = nnx.to_flat_state(nnx.state(model, nnx.Param))
    assert sum(math.prod(parameter.shape) for _, parameter in parameters) == REAL[name]["num_parameters"]
    shapes: dict[str, tuple[int, ...]] = {}
    for path, parameter in parameters:
        shapes |= named_shapes(path, parameter.shape, config)
    assert sum(map(math.prod, shapes.values())) == REAL[name]["num_parameters"]


def test_which_layers_have_experts():
    """Qwen's field counts layers from 1, as transformers does."""
    ((_, found), *_) = ((name, x) for name, x in REAL.items() if "Qwen3Moe" in x["config"]["architectures"][0])
    config = parse_config(found["config"] | {"decoder_sparse_step": 3, "mlp_only_layers": [5], "num_hidden_layers": 9})
    assert [i for i, layer in enumerate(config.layers) if layer.has_experts] == [2, 8]


def test_a_limit_adds_no_positions():
    found = next(x for x in REAL.values() if "Phi3" in x["config"]["architectures"][0])
    config = parse_config(found["config"] | {"num_hidden_layers": 1})
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    model.limit(10**9)
    assert model.config.max_position_embeddings == config.max_position_embeddings
    model.limit(100)
    assert model.config.max_position_embeddings == 100


def test_a_ramp_of_yarn_may_end_behind_the_last_pair():
    """In a context that is long beside the base, the slowest of four pairs is a quarter of the way from 2 to 6."""
    scaling = YarnScaling(10.0, original_max_position_embeddings=4096, attention_factor=1.0)
    frequencies, _ = scaling.frequencies(100.0, 8, 40960)
    plain = 100.0 ** -np.array([0, 0.25, 0.5, 0.75])
    np.testing.assert_allclose(frequencies, plain * [1, 1, 1, 0.75 + 0.25 / 10])


def test_a_ramp_of_yarn_may_begin_before_the_first_pair():
    """In a context of 16 tokens no pair turns 32 times: the ramp begins at pair 0, which keeps its frequency."""
    frequencies, factor = YarnScaling(10.0, original_max_position_embeddings=16, attention_factor=1.5).frequencies(
        100.0, 8, 160
    )
    plain = 100.0 ** -np.array([0, 0.25, 0.5, 0.75])
    np.testing.assert_allclose(frequencies, plain * [1, 0.1, 0.1, 0.1])
    assert factor == 1.5


def test_every_family_has_a_real_config():
    assert {found["config"]["architectures"][0] for found in REAL.values()} == set(READERS)
