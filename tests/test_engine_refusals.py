"""Tests which configs and which parameters of requests the engine refuses."""

import numpy as np
import pytest

from paged_jax.engine import EngineConfig, SamplingParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_model_len": 0}, "max_model_len must be positive, got 0"),
        ({"max_tokens_per_step": 3}, "max_tokens_per_step must be at least max_num_seqs = 4, got 3"),
        ({"decode_rows": (2, 8)}, "decode_rows must rise"),
        ({"decode_rows": (4, 4)}, "decode_rows must rise"),
        ({"decode_rows": (0, 4)}, "decode_rows must rise from 1 or more"),
        ({"mixed_tokens": (8, 4, 16)}, "mixed_tokens must rise"),
        ({"preemption": "never"}, "preemption must be"),
        ({"num_blocks": 0}, "num_blocks must be positive"),
        ({"num_host_blocks": -1}, "num_host_blocks must not be negative"),
        ({"recompute_tokens_per_second": 0}, "recompute_tokens_per_second must be positive, got 0"),
        ({"swap_bytes_per_second": float("nan")}, "swap_bytes_per_second must be positive, got nan"),
    ],
)
def test_configs_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**({"max_model_len": 48, "max_num_seqs": 4, "max_tokens_per_step": 16} | fields))


@pytest.mark.parametrize("name", ["max_model_len", "max_logprobs", "num_host_blocks", "num_blocks"])
def test_sizes_of_a_config_are_whole_numbers(name):
    with pytest.raises(TypeError, match=f"{name} must be an int, got 8.5"):
        EngineConfig(**{"max_model_len": 48, name: 8.5})


@pytest.mark.parametrize("sizes", [(2, 4.0), np.array([2.0, 4.0])], ids=str)
@pytest.mark.parametrize("name", ["decode_rows", "mixed_tokens"])
def test_numbers_of_rows_and_tokens_are_whole_numbers(name, sizes):
    with pytest.raises(TypeError, match=rf"{name} must be an int, got .*[24]\.0"):
        EngineConfig(max_model_len=48, max_num_seqs=4, max_tokens_per_step=4, **{name: sizes})


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"max_tokens": 0}, ValueError, r"max_tokens must be in \[1"),
        ({"n": True}, TypeError, "n must be an int, got True"),
        ({"temperature": float("nan")}, ValueError, "temperature must be 0 or more and finite"),
        ({"temperature": "1"}, TypeError, "temperature must be a number"),
        ({"temperature": 1e39}, ValueError, "temperature must be 0 or more and finite in float32, got 1e"),
        ({"top_p": 0.0}, ValueError, "top_p must be above 0 and at most 1"),
        ({"seed": -1}, ValueError, "seed must be in"),
        ({"stop": "text"}, TypeError, "stop must be a tuple of texts"),
        ({"stop": ("",)}, ValueError, "stop must hold texts that are not empty"),
        ({"stop_token_ids": (1.5,)}, TypeError, "stop_token_ids must be an int, got 1.5"),
    ],
)
def test_params_that_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**fields)
