"""How do I train by reinforcement on tokens that the engine draws with the trainer's own arrays?

Give the engine the trainer's weights. Draw several samples of each prompt with their log-probabilities, make a
policy-gradient step with them, and hand the new arrays to `update_weights`: the engine copies and compiles nothing, so
that there is one set of weights in memory. Here the reward is the share of tokens that follow the token before them in
the alphabet, and the script also says how far the engine's log-probabilities are from the trainer's.

    python -m examples.howto.rollouts_in_one_process
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paged_jax import PagedKVCache
from paged_jax.engine import Engine, EngineConfig, SamplingParams

ALPHABET = "abcdefghijklmnop"
VOCAB, HEADS, KV_HEADS, HEAD_SIZE = len(ALPHABET), 4, 2, 16
HIDDEN = HEADS * HEAD_SIZE
PROMPTS = [[i, i + 1] for i in range(0, VOCAB, 4)]  # "ab", "ef", "ij", "mn"
SAMPLES, LENGTH, UPDATES = 8, 8, 40
OPTIMIZER = optax.rmsprop(2e-2)


def make_weights():
    """Random weights."""
    shapes = {
        "embedding": (VOCAB, HIDDEN),
        "query": (HIDDEN, HEADS, HEAD_SIZE),
        "key": (HIDDEN, KV_HEADS, HEAD_SIZE),
        "value": (HIDDEN, KV_HEADS, HEAD_SIZE),
        "head": (HIDDEN, VOCAB),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {name: jax.random.normal(key, shapes[name]) * 0.1 for name, key in zip(shapes, keys, strict=True)}


def model(weights, token_ids, attend):
    """A transformer of one layer, without its head; `attend` takes queries, keys and values."""
    hidden = weights["embedding"][token_ids]
    query, key, value = (jnp.einsum("th,hnd->tnd", hidden, weights[name]) for name in ("query", "key", "value"))
    return hidden + attend(query, key, value).reshape(hidden.shape)


def step(weights, caches, batch):
    """The model as the engine runs it: over a paged cache, without gradients."""
    (cache,) = caches

    def attend(query, key, value):
        nonlocal cache
        cache = cache.write(key, value, batch.slot_mapping)
        return cache.attend_ragged(query, batch.block_tables, batch.seq_lens, batch.query_start_loc)

    hidden = model(weights, batch.token_ids, attend)
    return hidden[batch.logit_rows] @ weights["head"], (cache,)


def logprobs_of(weights, text):
    """The log-probability of each token of one text after the tokens before it, as the trainer computes them."""
    hidden = model(weights, text, partial(jax.nn.dot_product_attention, is_causal=True))
    logprobs = jax.nn.log_softmax(hidden[:-1] @ weights["head"])
    return jnp.take_along_axis(logprobs, text[1:, None], axis=-1)[:, 0]


@partial(jax.jit, donate_argnums=(0, 1))
def train(weights, optimizer_state, texts, advantages):
    """Makes one step up the policy gradient; also returns the log-probabilities before it. The old arrays are gone."""

    def loss(weights):
        logprobs = jax.vmap(logprobs_of, (None, 0))(weights, texts)[:, -LENGTH:]
        return -(advantages[:, None] * logprobs).mean(), logprobs

    gradients, logprobs = jax.grad(loss, has_aux=True)(weights)
    updates, optimizer_state = OPTIMIZER.update(gradients, optimizer_state)
    return optax.apply_updates(weights, updates), optimizer_state, logprobs


def main():
    weights = make_weights()
    optimizer_state = OPTIMIZER.init(weights)
    caches = (PagedKVCache.create(64, 4, KV_HEADS, HEAD_SIZE, dtype=jnp.float32),)
    num_rows = len(PROMPTS) * SAMPLES
    sizes = EngineConfig(
        16, num_rows, num_rows, decode_rows=(num_rows,), mixed_tokens=(num_rows,), max_logprobs=0, adjustments=False
    )
    engine = Engine(step, weights, caches, sizes, seed=0)
    wanted = SamplingParams(max_tokens=LENGTH, n=SAMPLES, temperature=1.0, logprobs=0)

    rewards, mismatch = [], 0.0
    for _ in range(UPDATES):
        completions = engine.generate(PROMPTS, wanted)
        pairs = zip(PROMPTS, completions, strict=True)
        texts = np.array([[*prompt, *one.token_ids] for prompt, samples in pairs for one in samples], np.int32)
        drawn = np.array([[token.logprob for token in one.logprobs] for samples in completions for one in samples])
        reward = (texts[:, 2:] == (texts[:, 1:-1] + 1) % VOCAB).mean(axis=1).reshape(len(PROMPTS), SAMPLES)
        advantages = reward - reward.mean(axis=1, keepdims=True)  # beside the other samples of the prompt
        advantages = advantages.reshape(-1).astype(np.float32)
        weights, optimizer_state, logprobs = train(weights, optimizer_state, texts, advantages)
        engine.update_weights(weights)
        rewards.append(reward.mean())
        mismatch = max(mismatch, np.abs(np.asarray(logprobs) - drawn).max())

    text = "".join(ALPHABET[token] for token in texts[-1])
    print(f"mean reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} after {UPDATES} updates; now it writes {text!r}")
    print("the reward has risen by more than a half:", bool(rewards[-1] > rewards[0] + 0.5))
    print(f"largest difference between the engine's log-probabilities and the trainer's: {mismatch:.1e}")
    print("which is rounding:", bool(mismatch <= 1e-5))


if __name__ == "__main__":
    main()
