"""The kernels for few pairs of a token and an expert: their numbers in Triton's interpreter, and their machine code."""

import importlib
import re
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import moe
from examples.config import ExpertsConfig
from tests.test_moe import draw
from tests.test_triton import needs_triton

# The other one has biases, and gpt-oss's activation. Inputs do not fill a program's last step.
CONFIGS = ExpertsConfig(8, 2, 24), ExpertsConfig(8, 2, 24, has_bias=True, swiglu_limit=1.0, swiglu_alpha=1.7)


def make(config, hidden_size=296):
    """Two tokens and a row of padding. One pair has no expert here."""
    hidden, experts, weights, parameters = draw(3, config, hidden_size, jnp.bfloat16)
    if config.has_bias:
        for name in ("gate_up", "down"):
            parameters[f"{name}_bias"] = parameters[name][:, :, 0] / 4
    return hidden, experts[:2].at[1, 0].set(config.num_experts), weights[:2].at[1, 0].set(0), parameters


def hold(out, config, arrays):
    """The results are those of XLA."""
    with mock.patch.multiple(moe, _gather_kernel=lambda: None, fits=lambda *_: False):
        expected = jax.jit(lambda *arrays: moe.compute_experts(*arrays, config=config))(*arrays)
    np.testing.assert_allclose(out, expected, rtol=0.01, atol=np.abs(expected).max() / 500)


def hold_numbers():
    """`run_triton.py` calls it in Triton's interpreter."""
    kernel = importlib.import_module("examples.gather_kernel")
    for config in CONFIGS:
        arrays = make(config)
        with jax.disable_jit():
            out = kernel.compute_pairs(*arrays, config)
        hold(out, config, arrays)


@needs_triton
@pytest.mark.parametrize(
    ("capability", "hidden_size", "config"),
    [
        (90, 512, ExpertsConfig(8, 2, 256)),
        pytest.param(80, 2048, ExpertsConfig(128, 8, 768), marks=pytest.mark.slow),  # Qwen3-30B-A3B
        pytest.param(120, 2048, ExpertsConfig(64, 6, 1408, has_bias=True, swiglu_limit=7.0), marks=pytest.mark.slow),
    ],
)
def test_a_thread_loads_16_bytes_of_a_matrix_at_once(capability, hidden_size, config, tmp_path, monkeypatch):
    from tests import triton_interpreter

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = importlib.import_module("examples.gather_kernel")
    launches = []
    arrays = jax.eval_shape(lambda: make(config, hidden_size))
    with triton_interpreter.recorded(launches):
        jax.eval_shape(partial(kernel.compute_pairs.__wrapped__, config=config), *arrays)
    for made in launches:
        ptx = triton_interpreter.compiled(made, capability).asm["ptx"]
        steps = -(-made.config.in_size // made.config.depth)
        num_loads = steps * (3 if made is launches[0] else 2 * config.num_chosen)  # of matrices and vectors
        num_loads *= made.config.rows // made.config.num_warps
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) == num_loads


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "gpt-oss"])
@pytest.mark.parametrize("hidden_size", [296, 2048])
def test_a_gpu_computes_what_xla_computes_and_the_same_each_time(config, hidden_size):
    if (kernel := moe._gather_kernel()) is None:
        pytest.skip("needs jax-triton 0.4")
    arrays = make(config, hidden_size)
    out = np.asarray(kernel.compute_pairs(*arrays, config))
    hold(out, config, arrays)
    for _ in range(3):
        np.testing.assert_array_equal(kernel.compute_pairs(*arrays, config), out)
