"""Tests the example decoder against plain NumPy: every field of its config changes what NumPy says it does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.attend import causal_attend
from examples.config import DecoderConfig, ExpertsConfig, LatentConfig, LayerConfig
from examples.decoder import Decoder
from examples.rope import Rope
from tests import plain_decoder
from tests.conftest import QUICK_COMPILE

PLAIN, MIXED = LayerConfig(Rope(100.0)), LayerConfig(Rope(100.0), has_experts=True)
BASE = DecoderConfig(
    "llama",
    vocab_size=40,
    embedding_size=16,
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    max_position_embeddings=32,
    norm_eps=0.1,
    layers=(PLAIN,),
)
EXPERTS = ExpertsConfig(num_experts=8, num_chosen=2, intermediate_size=12)
OF_EXPERTS = {"layers": (MIXED,), "experts": EXPERTS}
LATENT = {"layers": (PLAIN,), "num_kv_heads": 4, "latent": LatentConfig(None, 16, 4, 8, 6)}


def mixed(**fields):
    return OF_EXPERTS | {"experts": dataclasses.replace(EXPERTS, **fields)}


# Fields of a config, and fields beside which they matter.
CHANGES = {
    "nothing": ({}, {}),
    "norm_eps": ({}, {"norm_eps": 1.0}),
    "embedding_size": ({}, {"embedding_size": 8}),
    "layers": ({}, {"layers": (PLAIN, PLAIN)}),
    "qkv_bias": ({}, {"qkv_bias": True}),
    "o_bias": ({}, {"o_bias": True}),
    "mlp_bias": ({}, {"mlp_bias": True}),
    "tie_embeddings": ({}, {"tie_embeddings": True}),
    "tied and projected": ({"embedding_size": 8}, {"tie_embeddings": True}),
    "norm": ({}, {"norm": "layer"}),
    "norm_offset": ({}, {"norm_offset": 1.0}),
    "after": ({}, {"norm_place": "after"}),
    "around": ({}, {"norm_place": "around"}),
    "after_sum": ({}, {"norm_place": "after_sum"}),
    "final_norm": ({}, {"final_norm": False}),
    "qk_norm of heads": ({}, {"qk_norm": "head"}),
    "qk_norm of all": ({}, {"qk_norm": "all"}),
    "qk_norm with an offset": ({"norm_offset": 1.0}, {"qk_norm": "head"}),
    "learned positions": ({}, {"has_learned_positions": True}),
    "relu": ({}, {"activation": "relu"}),
    "gelu": ({}, {"activation": "gelu_pytorch_tanh"}),
    "attention_scale": ({}, {"attention_scale": 0.9}),
    "attention_soft_cap": ({}, {"attention_soft_cap": 0.5}),
    "has_sinks": ({}, {"has_sinks": True}),
    "embedding_scale": ({"final_norm": False}, {"embedding_scale": 3.0}),
    "residual_scale": ({}, {"residual_scale": 0.3}),
    "logits_scale": ({}, {"logits_scale": 0.5}),
    "logits_soft_cap": ({}, {"logits_soft_cap": 1.5}),
    "rope": ({}, {"layers": (LayerConfig(Rope(7.0)),)}),
    "no rope": ({}, {"layers": (LayerConfig(None),)}),
    "rope of a part": ({}, {"layers": (LayerConfig(Rope(100.0, size=4)),)}),
    "rope of neighbours": ({}, {"layers": (LayerConfig(Rope(100.0, is_interleaved=True)),)}),
    "rope of some neighbours": ({}, {"layers": (LayerConfig(Rope(100.0, size=4, is_interleaved=True)),)}),
    "layers that differ": ({}, {"layers": (LayerConfig(Rope(9.0), 2), PLAIN, LayerConfig(None, 3))}),
    "experts": ({}, OF_EXPERTS),
    "experts in one layer": (OF_EXPERTS, {"layers": (PLAIN, MIXED)}),
    "experts of sigmoids": (OF_EXPERTS, mixed(scores="sigmoid", are_normalized=True, has_correction=True, scale=2.5)),
    "experts of groups": (OF_EXPERTS, mixed(num_groups=4, num_chosen_groups=2, group_score="best_two")),
    "experts with biases": (OF_EXPERTS, mixed(scores="chosen", has_bias=True, swiglu_limit=0.5, swiglu_alpha=1.7)),
    "experts beside a shared one": (OF_EXPERTS, mixed(shared_size=24)),
    "latent": ({}, LATENT),
    "latent with biases": (LATENT, {"qkv_bias": True, "o_bias": True}),
    "latent with compressed queries": (LATENT, {"latent": LatentConfig(6, 16, 4, 8, 6)}),
    "latent with a scale": (LATENT, {"attention_scale": 0.9}),
    "latent of neighbours": (LATENT, {"layers": (LayerConfig(Rope(100.0, is_interleaved=True)),)}),
}
IDS = np.array([3, 17, 5, 5, 20, 1], np.int32)


@functools.cache
def make(config):
    """A decoder with random weights, and these weights as NumPy's float64."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape) * 0.4), nnx.to_pure_dict(state))
    return nnx.merge(graphdef, jax.tree.map(jnp.asarray, weights)), jax.tree.map(np.float64, weights)


def logits_of(model, ids, rows=None):
    ids, caches = jnp.array(ids), (None,) * model.config.num_layers
    positions = jnp.arange(len(ids), dtype=jnp.int32)
    rows = None if rows is None else jnp.array(rows, jnp.int32)
    hidden, _ = model(ids, positions, caches, causal_attend(), rows)
    return model.logits(hidden)


@pytest.mark.parametrize("name", CHANGES)
def test_every_field_of_a_config(name):
    beside, changes = CHANGES[name]
    config = dataclasses.replace(BASE, **beside)
    model, weights = make(changed := dataclasses.replace(config, **changes))
    expected = plain_decoder.logits_of(changed, weights, IDS)
    np.testing.assert_allclose(logits_of(model, IDS), expected, rtol=2e-4, atol=2e-5)
    if changes:
        before = plain_decoder.logits_of(config, make(config)[1], IDS)
        assert np.abs(before - expected).max() > 0.01, "the field matters"


def test_rows_are_those_that_are_wanted():
    """In any order, and more often than once; a single token has a row of padding beside it."""
    model, _ = make(dataclasses.replace(BASE, experts=EXPERTS, layers=(PLAIN, MIXED)))
    whole, rows = np.asarray(logits_of(model, IDS)), [4, 0, 4, 5, 1, 1]
    np.testing.assert_allclose(logits_of(model, IDS, rows), whole[rows], rtol=1e-4, atol=1e-5)
    run = jax.jit(lambda ids: (logits_of(model, ids), logits_of(model, ids, [0, 0])), compiler_options=QUICK_COMPILE)
    for found in run(IDS[:1]):
        np.testing.assert_allclose(found, np.broadcast_to(whole[:1], found.shape), rtol=1e-4, atol=1e-5)
