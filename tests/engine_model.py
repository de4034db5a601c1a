"""A two-layer transformer in plain JAX for the engine's tests, and the same model without a cache to compare with.

Its weights are random, so that every prompt gives other tokens. The logits of likely tokens are far enough apart that
rounding in another order of sums does not change which token is the most likely.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import paged_jax
from paged_jax.engine.sampling import Kind

VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, MAX_LEN = 61, 2, 4, 2, 8, 64
HIDDEN = HEADS * HEAD_SIZE
WINDOWS = 6, None  # the layers' sliding windows


def drawing(*kinds):
    """While this context lasts, engines compile these ways to draw tokens, for the test has no use for the others.

    All of them take half of the time in which an engine is made. A step that needs another one raises.
    """
    return mock.patch.object(Kind, "all_of", return_value=list(kinds))


def make_weights(seed=0):
    """Makes random weights: an embedding, positions, and for each layer q, k, v, o and an MLP."""
    rng = np.random.default_rng(seed)

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    layer = {"q": HIDDEN, "k": KV_HEADS * HEAD_SIZE, "v": KV_HEADS * HEAD_SIZE, "o": HIDDEN}
    return {
        "embedding": random(VOCAB, HIDDEN) * 8,
        "positions": random(MAX_LEN, HIDDEN) * 4,
        "head": random(HIDDEN, VOCAB) * 3,
        "layers": [
            {
                **{name: random(HIDDEN, size) * 2 for name, size in layer.items()},
                "up": random(HIDDEN, 2 * HIDDEN),
                "down": random(2 * HIDDEN, HIDDEN),
            }
            for _ in range(LAYERS)
        ],
    }


def make_caches(num_blocks, block_size, **options):
    """Makes a cache for each layer."""
    options = {"dtype": jnp.float32} | options
    return tuple(
        paged_jax.PagedKVCache.create(num_blocks, block_size, KV_HEADS, HEAD_SIZE, **options) for _ in range(LAYERS)
    )


def step(weights, caches, batch, windows=WINDOWS):
    """The model over a paged cache: `paged_jax.engine.Step`."""

    def attend(query, key, value, cache, window):
        seen, option = batch.for_window(window), {"sliding_window": window}
        where = seen.block_tables, batch.seq_lens
        if batch.prefixes is not None and window is None:
            cache = cache.write(key, value, seen.slot_mapping)
            return batch.prefixes.attend(query, cache), cache
        if batch.is_decode:
            return cache.write_and_attend(query, key, value, *where, seen.slot_mapping, **option)
        cache = cache.write(key, value, seen.slot_mapping)
        return cache.attend_ragged(query, *where, batch.query_start_loc, **option), cache

    hidden, caches = _layers(weights, batch.token_ids, batch.positions, caches, attend, windows)
    return hidden[batch.logit_rows] @ weights["head"], caches


@functools.partial(jax.jit, static_argnums=2)
def _logits(weights, token_ids, windows):
    """Computes all logits of one sequence, with plain causal attention."""

    def attend(query, key, value, cache, window):
        key, value = (jnp.repeat(x, HEADS // KV_HEADS, axis=1) for x in (key, value))
        logits = jnp.einsum("qhd,khd->hqk", query, key) * HEAD_SIZE**-0.5
        seen = jnp.tril(jnp.ones(logits.shape[1:], bool))
        if window is not None:
            seen &= ~jnp.tril(seen, -window)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen[None], logits, -jnp.inf)), value), cache

    positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    hidden, _ = _layers(weights, token_ids, positions, (None,) * LAYERS, attend, windows)
    return hidden @ weights["head"]


def _layers(weights, token_ids, positions, caches, attend, windows):
    hidden = weights["embedding"][token_ids] + weights["positions"][positions]
    new_caches = []
    for layer, cache, window in zip(weights["layers"], caches, windows, strict=True):
        normed = _norm(hidden)
        query, key, value = ((normed @ layer[name]).reshape(hidden.shape[0], -1, HEAD_SIZE) for name in "qkv")
        out, cache = attend(query, key, value, cache, window)
        hidden = hidden + out.reshape(hidden.shape) @ layer["o"]
        hidden = hidden + jax.nn.relu(_norm(hidden) @ layer["up"]) @ layer["down"]
        new_caches.append(cache)
    return _norm(hidden), tuple(new_caches)


def _norm(x):
    return x / jnp.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)


class Reference:
    """Generates tokens without cache or batch, by computing the whole sequence again for every token."""

    def __init__(self, weights, windows=WINDOWS):
        self.weights, self.windows = weights, windows
        self._next = functools.cache(self._next)

    def logits(self, tokens):
        """The logits after these tokens, f32 [vocab]."""
        padded = np.zeros(MAX_LEN, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(_logits(self.weights, padded, self.windows))[len(tokens) - 1]

    def greedy(self, prompt, max_tokens, stop=()):
        """The most likely tokens after a prompt, up to and with the first stop token."""
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(self._next(tuple(tokens)))
            if tokens[-1] in stop:
                break
        return tuple(tokens[len(prompt) :])

    def _next(self, tokens):
        return int(self.logits(tokens).argmax())
