"""Tests which configs and which parameters of requests the engine refuses."""

import dataclasses

import jax
import numpy as np
import pytest

from paged_jax import PagedKVCache
from paged_jax.engine import Engine, EngineConfig, SamplingParams
from paged_jax.engine.request import MAX_BIASES
from tests.engine_simulation import make_engine
from tests.simulated_tokens import VOCAB, Rules


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
        ({"max_prompts_per_step": 0}, "max_prompts_per_step must be positive"),
        ({"max_tokens_beside_decodes": 0}, "max_tokens_beside_decodes must be positive"),
        ({"free_tokens_per_step": 0}, "free_tokens_per_step must be positive"),
        ({"least_shared_tokens": 0}, "least_shared_tokens must be positive"),
        ({"max_logprobs": -1}, "max_logprobs must not be negative"),
        ({"max_draft_tokens": -1}, "max_draft_tokens must not be negative"),
        ({"max_shared_prefixes": -1}, "max_shared_prefixes must not be negative"),
        ({"num_blocks": (4, 0)}, "num_blocks must be positive"),
        ({"between_tokens_seconds": 0}, "between_tokens_seconds must be positive"),
    ],
)
def test_configs_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**({"max_model_len": 48, "max_num_seqs": 4, "max_tokens_per_step": 16} | fields))


def test_defaults():
    """They are what the docstrings say."""
    assert vars(EngineConfig(max_model_len=100)) == {
        "max_model_len": 100,
        "max_num_seqs": 64,
        "max_tokens_per_step": 512,
        "max_prompts_per_step": 32,
        "decode_rows": (16, 64),
        "mixed_tokens": (32, 128, 512),
        "max_logprobs": None,
        "adjustments": True,
        "num_host_blocks": 0,
        "max_draft_tokens": 0,
        "verify_tokens": (),
        "max_shared_prefixes": 0,
        "num_blocks": None,
        "max_tokens_beside_decodes": None,
        "between_tokens_seconds": None,
        "prefix_caching": True,
        "preemption": "cheaper",
        "recompute_tokens_per_second": 40_000,
        "swap_bytes_per_second": 20e9,
        "free_tokens_per_step": 128,
        "least_shared_tokens": 16_384,
    }
    assert EngineConfig(100, 17, 17).decode_rows == EngineConfig(100, 17, 17).mixed_tokens == (5, 17)
    assert EngineConfig(100, 16, 65).mixed_tokens == (5, 17, 65)
    assert vars(SamplingParams()) == {
        "max_tokens": None,
        "n": 1,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": (),
        "min_tokens": 0,
        "mask": None,
        "priority": 0,
        "seed": None,
        "stop_token_ids": (),
        "stop": (),
        "include_stop": False,
        "skip_special_tokens": True,
        "logprobs": None,
        "prompt_logprobs": None,
    }


BOUNDS = {
    "max_tokens": (1, 2**31 - 1, 1),
    "n": (1, 2**31 - 1, 1),
    "top_k": (0, 2**31 - 1, 1),
    "min_tokens": (0, 2**31 - 1, 1),
    "logprobs": (0, 2**31 - 1, 1),
    "prompt_logprobs": (0, 2**31 - 1, 1),
    "priority": (-(2**31), 2**31 - 1, 1),
    "seed": (0, 2**64 - 1, 1),
    "temperature": (0.0, float(np.finfo(np.float32).max), 1e30),
    "top_p": (1e-9, 1.0, 1e-6),
    "min_p": (0.0, 1.0, 1e-6),
    "repetition_penalty": (1e-6, 1e6, 1e-7),
    "presence_penalty": (-2.0, 2.0, 1e-6),
    "frequency_penalty": (-2.0, 2.0, 1e-6),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_parameters_may_have_their_bounds_and_nothing_beyond(name):
    least, most, more = BOUNDS[name]
    for value in (least, most):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (least - more, most + (more if name != "repetition_penalty" else 1)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            SamplingParams(**{name: value})


def test_lists_of_tokens_may_be_as_long_as_told():
    """Tokens that end a text take places of biases where there is a least length."""
    many = {token: 1.0 for token in range(MAX_BIASES)}
    assert MAX_BIASES == 512
    assert len(SamplingParams(logit_bias=many).logit_bias) == MAX_BIASES
    assert SamplingParams(logit_bias=many, stop_token_ids=(1, 2)).stop_token_ids == (1, 2)
    assert SamplingParams(min_tokens=5, max_tokens=5, stop_token_ids=range(512)).min_tokens == 5
    assert SamplingParams(logit_bias=[(2, -100), (1, 100.0)]).logit_bias == ((1, 100.0), (2, -100))
    assert SamplingParams(stop_token_ids=(0, 2**31 - 1)).stop_token_ids == (0, 2**31 - 1)
    for biases in ({1: 100.5}, {1: -101}, [(1, 1.0), (1, 2.0)], {-1: 1.0}, {2**31: 1.0}):
        with pytest.raises(ValueError, match="logit_bias"):
            SamplingParams(logit_bias=biases)
    for token_id in (-1, 2**31):
        with pytest.raises(ValueError, match="stop_token_ids"):
            SamplingParams(stop_token_ids=(token_id,))


def test_what_an_engine_refuses():
    """The least that is refused, and the most that is not: `check` gives the most tokens of a sample."""
    config = EngineConfig(max_model_len=20, max_num_seqs=3, max_tokens_per_step=8, max_logprobs=2)
    engine = make_engine(64, 4, config)
    prompt = [1] * 5
    for params, most in [
        ({}, 21),
        ({"max_tokens": 16}, 21),
        ({"max_tokens": 1}, 6),
        ({"n": 3, "logprobs": 2, "prompt_logprobs": 2, "logit_bias": {VOCAB - 1: 1.0}}, 21),
    ]:
        assert engine.check(prompt, SamplingParams(**params)) == most
    assert engine.check([1] * 20, SamplingParams()) == 21
    for params, message in [
        ({"max_tokens": 17}, "at most 16 new tokens do"),
        ({"n": 4}, "n must be at most max_num_seqs = 3, got 4"),
        ({"logprobs": 3}, "logprobs must be at most max_logprobs = 2, got 3"),
        ({"prompt_logprobs": 3}, "prompt_logprobs must be at most max_logprobs = 2, got 3"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias names token {VOCAB}; the model has {VOCAB}"),
        ({"stop": ("x",)}, "stop texts need an engine with a tokenizer"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.check(prompt, SamplingParams(**params))
    for wrong, error in ([], "at least one token"), ([1] * 21, "at most 20 fit"), ([-1], "token ids must be in"):
        with pytest.raises(ValueError, match=error):
            engine.check(wrong, SamplingParams())
    engine.reset(dataclasses.replace(config, num_blocks=3))
    assert engine.check(prompt, SamplingParams()) == 13
    plain = make_engine(64, 4, dataclasses.replace(config, max_logprobs=None, adjustments=False))
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ValueError, match=f"{name} need an engine whose max_logprobs is not None"):
            plain.check(prompt, SamplingParams(**{name: 0}))
    adjusted = {"min_p": 0.5, "min_tokens": 1, "logit_bias": {1: 1.0}, "mask": Rules(), "repetition_penalty": 2.0}
    for name, value in (adjusted | {"presence_penalty": 1.0, "frequency_penalty": 1.0}).items():
        with pytest.raises(ValueError, match="need an engine with adjustments=True"):
            plain.check(prompt, SamplingParams(**{name: value}))


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
        ({"include_stop": 1}, TypeError, "include_stop must be a bool, got 1"),
        ({"skip_special_tokens": None}, TypeError, "skip_special_tokens must be a bool, got None"),
        ({"top_p": True}, TypeError, "top_p must be a number, got True"),
        ({"logit_bias": {1: "x"}}, TypeError, "logit_bias of token 1 must be a number"),
        ({"mask": 5}, TypeError, "mask must have a method start"),
        ({"min_tokens": 6, "max_tokens": 5}, ValueError, "min_tokens must be at most max_tokens = 5, got 6"),
    ],
)
def test_params_that_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**fields)


def test_pools_whose_blocks_are_split_have_none_on_the_host():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    cache = PagedKVCache.create(num_blocks=8, block_size=4, num_kv_heads=1, head_size=8)
    cache = jax.device_put(cache, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    config = EngineConfig(max_model_len=16, max_num_seqs=2, max_tokens_per_step=8, num_host_blocks=2)
    with pytest.raises(ValueError, match="num_host_blocks needs pools whose blocks are not split over devices"):
        Engine(lambda *_: None, {}, (cache,), config)
