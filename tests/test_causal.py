"""Tests causal=False, where every query sees all tokens of its sequence, and a shared prefix that is read once."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from paged_jax import BlockSparse, PagedKVCache

HEADS = {"num_kv_heads": 2, "head_size": 16}


def filled(rng, **keywords):
    cache = PagedKVCache.create(num_blocks=8, block_size=4, **HEADS, dtype=jnp.float32, **keywords)
    key, value = (jnp.asarray(rng.standard_normal((32, 2, 16), np.float32)) for _ in "kv")
    return cache.write(key, value, jnp.arange(32, dtype=jnp.int32)), key, value


def dense(query, key, value):
    """Computes the attention of each query to all keys in float64: [tokens, heads, head_size]."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    key, value = (x.repeat(2, axis=1) for x in (key, value))
    weights = np.exp(np.einsum("qhd,thd->qht", query, key) / 4)
    return np.einsum("qht,thd->qhd", weights / weights.sum(-1, keepdims=True), value)


def test_every_query_sees_every_token():
    rng = np.random.default_rng(0)
    cache, key, value = filled(rng)
    query = jnp.asarray(rng.standard_normal((10, 4, 16), np.float32))
    tables, seq_lens = jnp.array([[0, 1, 2], [3, 4, -1]], jnp.int32), jnp.array([11, 6], jnp.int32)
    starts = jnp.array([0, 3, 9], jnp.int32)  # the last row is padding
    out = cache.attend_ragged(query, tables, seq_lens, starts, causal=False, implementation="xla")
    np.testing.assert_allclose(out[:3], dense(query[:3], key[:11], value[:11]), atol=2e-6)
    np.testing.assert_allclose(out[3:9], dense(query[3:9], key[12:18], value[12:18]), atol=2e-6)
    assert not out[9:].any()
    # The last three tokens of the first sequence are new, and all six of the second.
    keys = jnp.concatenate([key[8:11], key[12:18], key[:1]]), jnp.concatenate([value[8:11], value[12:18], value[:1]])
    prefix = cache.attend_prefix(query, *keys, tables, seq_lens, starts, causal=False, implementation="xla")
    np.testing.assert_allclose(prefix, out, atol=2e-6)


def test_a_prefix_with_more_queries_than_tokens_and_a_merge():
    rng = np.random.default_rng(1)
    cache, key, value = filled(rng)
    query = jnp.asarray(rng.standard_normal((70, 4, 16), np.float32))
    starts, common = jnp.array([0, 70], jnp.int32), {"return_lse": True, "implementation": "xla"}
    table, length = jnp.array([[0, 1]], jnp.int32), jnp.array([6], jnp.int32)
    prefix = cache.attend_ragged(query, table, length, starts, causal=False, **common)
    np.testing.assert_allclose(prefix[0], dense(query, key[:6], value[:6]), atol=2e-6)
    own = cache.attend(query, jnp.full((70, 1), 5, jnp.int32), jnp.full(70, 3, jnp.int32), **common)
    out, _ = paged_jax.merge_attention_states(*prefix, *own)
    both = [jnp.concatenate([x[:6], x[20:23]]) for x in (key, value)]
    np.testing.assert_allclose(out, dense(query, *both), atol=2e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [("alibi_slopes", np.ones(4, np.float32)), ("sliding_window", 4), ("block_sparse", BlockSparse(1, 2))],
)
@pytest.mark.parametrize("op", ["attend_ragged", "attend_prefix"])
def test_what_goes_by_positions_is_refused(op, name, value):
    cache = PagedKVCache.create(num_blocks=8, block_size=4, **HEADS, dtype=jnp.float32)
    query, key = jnp.zeros((3, 4, 16)), jnp.zeros((3, 2, 16))
    step = jnp.zeros((1, 2), jnp.int32), jnp.array([3], jnp.int32), jnp.array([0, 3], jnp.int32)
    new = (key, key) if op == "attend_prefix" else ()
    with pytest.raises(ValueError, match=re.escape(f"{name} must be None with causal=False, got ")):
        getattr(cache, op)(query, *new, *step, causal=False, **{name: value})


def test_decode_does_not_take_it():
    cache = PagedKVCache.create(num_blocks=8, block_size=4, **HEADS, dtype=jnp.float32)
    arguments = jnp.zeros((1, 4, 16)), jnp.zeros((1, 2), jnp.int32), jnp.array([3], jnp.int32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        cache.attend(*arguments, causal=False)
