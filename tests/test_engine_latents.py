"""The engine over caches of latents: a tiny DeepSeek, with shared prefixes, preemption and swaps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import loop
from examples.checkpoint import load_model
from examples.step import make_step
from paged_jax import engine
from paged_jax.engine.sampling import Kind
from tests.conftest import QUICK_COMPILE
from tests.engine_model import drawing
from tests.model_folders import folder, reference

SIZES = {"max_model_len": 64, "max_num_seqs": 4, "max_tokens_per_step": 32, "adjustments": False}
SIZES |= {"decode_rows": (4,), "mixed_tokens": (32,)}  # each size is a program
NAME = "deepseek_v2_lite"


@pytest.mark.slow_on_cpu
def test_tokens_are_those_of_transformers():
    model, config, _, _ = load_model(folder(NAME), jnp.float32)
    weights, step = make_step(model)
    caches = loop.make_caches(config, 18, 4, jnp.float32)  # too few blocks for all requests at once
    sizes = engine.EngineConfig(**SIZES, num_host_blocks=16)
    with drawing(Kind.GREEDY):
        the_engine = engine.Engine(step, weights, caches, sizes, compiler_options=QUICK_COMPILE)
    found = reference(NAME)
    params = engine.SamplingParams(max_tokens=len(found.tokens[0]))
    for _ in range(2):  # the second time, prompts are in the prefix cache
        completions = the_engine.generate(found.prompts, params)
        assert [list(each[0].token_ids) for each in completions] == found.tokens
    stats = the_engine.stats()
    assert stats.num_swapped + stats.num_recomputed > 0
    assert stats.hit_rate > 0
    sampled = the_engine.generate([found.prompts[3]], engine.SamplingParams(max_tokens=6, n=2))  # copies blocks
    assert all(list(each.token_ids) == found.tokens[3][:6] for each in sampled[0])


def test_bfloat16_on_a_cpu():
    """Most folders hold bfloat16, in which XLA's CPU backend lacks some products that it has in float32."""
    model, config, _, _ = load_model(folder(NAME), jnp.bfloat16)
    weights, step = make_step(model)
    caches = loop.make_caches(config, 8, 4, jnp.bfloat16)
    found = reference(NAME)
    prompt = np.array(found.prompts[0], np.int32)
    one = jnp.array([len(prompt)], jnp.int32)
    positions, tables = jnp.arange(len(prompt), dtype=jnp.int32), jnp.arange(8, dtype=jnp.int32)[None]
    run = jax.jit(step, compiler_options=QUICK_COMPILE)
    starts = jnp.array([0, len(prompt)], jnp.int32)
    batch = engine.Batch(prompt, positions, positions, tables, one, query_start_loc=starts, logit_rows=one - 1)
    logits, caches = run(weights, caches, batch)
    assert found.tokens[0][0] in np.argsort(logits[0])[-4:]
    batch = engine.Batch(jnp.array(found.tokens[0][:1], jnp.int32), one, one, tables, one + 1, is_decode=True)
    logits, _ = run(weights, caches, batch)
    assert found.tokens[0][1] in np.argsort(logits[0])[-4:]
