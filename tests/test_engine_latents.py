"""The engine over caches of latents: a tiny DeepSeek, with shared prefixes, preemption and swaps."""

import jax.numpy as jnp
import pytest

from examples import loop
from examples.checkpoint import load_model
from examples.step import make_step
from paged_jax import engine
from tests.model_folders import folder, reference

SIZES = {"max_model_len": 64, "max_num_seqs": 4, "max_tokens_per_step": 32}
NAME = "deepseek_v2_lite"


@pytest.mark.parametrize("num_blocks", [40, 18])  # the fewer are too few for all requests at once
def test_tokens_are_those_of_transformers(num_blocks):
    model, config, _, _ = load_model(folder(NAME), jnp.float32)
    weights, step = make_step(model)
    caches = loop.make_caches(config, num_blocks, 4, jnp.float32)
    sizes = engine.EngineConfig(**SIZES, num_host_blocks=16)
    quick = {"xla_backend_optimization_level": 0}
    the_engine = engine.Engine(step, weights, caches, sizes, compiler_options=quick)
    found = reference(NAME)
    params = engine.SamplingParams(max_tokens=len(found.tokens[0]))
    for _ in range(2):  # the second time, prompts are in the prefix cache
        completions = the_engine.generate(found.prompts, params)
        assert [list(each[0].token_ids) for each in completions] == found.tokens
    stats = the_engine.stats()
    assert (stats.num_swapped + stats.num_recomputed > 0) == (num_blocks == 18)
    sampled = the_engine.generate([found.prompts[3]], engine.SamplingParams(max_tokens=6, n=2))  # copies blocks
    assert all(list(each.token_ids) == found.tokens[3][:6] for each in sampled[0])


def test_bfloat16_on_a_cpu():
    """Most folders hold bfloat16, in which XLA's CPU backend lacks some products that it has in float32."""
    model, config, _, _ = load_model(folder(NAME), jnp.bfloat16)
    weights, step = make_step(model)
    caches = loop.make_caches(config, 8, 4, jnp.bfloat16)
    quick = {"xla_backend_optimization_level": 0}
    sizes = engine.EngineConfig(**SIZES, max_logprobs=4)
    the_engine = engine.Engine(step, weights, caches, sizes, compiler_options=quick)
    found = reference(NAME)
    ((completion,),) = the_engine.generate(found.prompts[:1], engine.SamplingParams(max_tokens=2, logprobs=4))
    assert found.tokens[0][0] in [token for token, _ in completion.logprobs[0].top]
