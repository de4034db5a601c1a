"""The decoders of real folders' configs: how many parameters they have, and what their tensors are called."""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from examples.checkpoint import named_shapes
from examples.decoder import Decoder
from examples.families import READERS, parse_config

REAL = json.loads((Path(__file__).parent / "data" / "real" / "configs.json").read_text())


@pytest.mark.parametrize("name", REAL)
def test_shapes(name):
    """The parameters' shapes give the published number of them, and so do the tensors that a folder must have."""
    config = parse_config(REAL[name]["config"])
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    parameters = nnx.to_flat_state(nnx.state(model, nnx.Param))
    assert sum(math.prod(parameter.shape) for _, parameter in parameters) == REAL[name]["num_parameters"]
    shapes: dict[str, tuple[int, ...]] = {}
    for path, parameter in parameters:
        shapes |= named_shapes(path, parameter.shape, config)
    assert sum(map(math.prod, shapes.values())) == REAL[name]["num_parameters"]


def test_every_family_has_a_real_config():
    assert {found["config"]["architectures"][0] for found in REAL.values()} == set(READERS)
