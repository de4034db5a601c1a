"""How do I serve many requests at once with my own model?

Write the model as `step(weights, caches, batch) -> (logits, caches)` and give it to an `Engine`. You can then add
requests to the running batch at any time: the engine allocates blocks, computes long prompts in chunks, computes equal
beginnings once, and compiles a few shapes at its start.

    python -m examples.howto.continuous_batching
"""

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import PagedKVCache
from paged_jax.engine import Engine, EngineConfig, SamplingParams

VOCAB, HEADS, KV_HEADS, HEAD_SIZE = 101, 4, 2, 16


def step(weights, caches, batch):
    """A transformer of one layer; `batch` holds chunks of prompts and single tokens together."""
    (cache,) = caches
    hidden = weights["embedding"][batch.token_ids]
    query, key, value = (jnp.einsum("th,hnd->tnd", hidden, weights[name]) for name in ("query", "key", "value"))
    cache = cache.write(key, value, batch.slot_mapping)
    out = cache.attend_ragged(query, batch.block_tables, batch.seq_lens, batch.query_start_loc)
    hidden = hidden + out.reshape(hidden.shape)
    return hidden[batch.logit_rows] @ weights["embedding"].T, (cache,)


def make_weights():
    """Random weights."""
    shapes = {
        "embedding": (VOCAB, HEADS * HEAD_SIZE),
        "query": (HEADS * HEAD_SIZE, HEADS, HEAD_SIZE),
        "key": (HEADS * HEAD_SIZE, KV_HEADS, HEAD_SIZE),
        "value": (HEADS * HEAD_SIZE, KV_HEADS, HEAD_SIZE),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {name: jax.random.normal(key, shapes[name]) * 0.1 for name, key in zip(shapes, keys, strict=True)}


def main():
    caches = (PagedKVCache.create(32, 8, KV_HEADS, HEAD_SIZE, dtype=jnp.float32),)  # 32 blocks of 8 tokens
    # No request has a penalty, a bias or a mask, so no program for these is compiled.
    config = EngineConfig(max_model_len=128, max_num_seqs=4, max_tokens_per_step=16, adjustments=False)
    engine = Engine(step, make_weights(), caches, config)

    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (5, 40, 17, 3, 28)]
    requests = [engine.add_request(prompt, SamplingParams(max_tokens=12)) for prompt in prompts[:3]]
    texts = {request: [] for request in requests}
    while engine.has_work:
        for delta in engine.step():  # each step gives the tokens of the step before
            texts[delta.request_id] += delta.token_ids
        if len(texts) < len(prompts):  # the other requests arrive while the first ones run
            texts[engine.add_request(prompts[len(texts)], SamplingParams(max_tokens=12))] = []
    for request, tokens in texts.items():
        print(f"request {request}: {len(tokens)} tokens")

    engine.reset()
    alone = engine.generate([prompts[1]], SamplingParams(max_tokens=12))[0][0]
    print("alone or in a crowd, the same tokens:", list(alone.token_ids) == texts[1])


if __name__ == "__main__":
    main()
