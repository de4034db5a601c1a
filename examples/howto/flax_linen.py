"""How do I use the cache in a Flax Linen model?

Make the caches arguments and results of the module, not variables, so that the outermost `jit` can donate them.
(examples/decoder.py shows the same in Flax NNX.)

    python -m examples.howto.flax_linen
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import PagedKVCache, allocator

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 16


class Attention(nn.Module):
    """Grouped-query attention of one new token a sequence over a paged cache."""

    @nn.compact
    def __call__(self, hidden, cache, block_tables, seq_lens, slots):
        query = nn.DenseGeneral((HEADS, HEAD_SIZE), name="query")(hidden)
        key = nn.DenseGeneral((KV_HEADS, HEAD_SIZE), name="key")(hidden)
        value = nn.DenseGeneral((KV_HEADS, HEAD_SIZE), name="value")(hidden)
        out, cache = cache.write_and_attend(query, key, value, block_tables, seq_lens, slots)
        out = nn.DenseGeneral(hidden.shape[-1], axis=(-2, -1), name="out")(out)
        return out, cache


def main():
    module = Attention()
    cache = PagedKVCache.create(16, 4, KV_HEADS, HEAD_SIZE, dtype=jnp.float32)
    blocks = allocator.create(num_blocks=16, block_size=4, max_num_seqs=2, max_blocks_per_seq=4)
    hidden = jax.random.normal(jax.random.key(0), (10, 2, 32))  # ten steps of two sequences
    where = blocks.block_tables, blocks.seq_lens, np.full(2, -1, np.int32)
    params = module.init(jax.random.key(1), hidden[0], cache, *where)

    @partial(jax.jit, donate_argnums=2)
    def step(params, hidden, cache, block_tables, seq_lens, slots):
        return module.apply(params, hidden, cache, block_tables, seq_lens, slots)

    outs = []
    for t in range(10):
        blocks, _, _ = allocator.append_tokens(blocks, [1, 1])
        slots = allocator.slots(blocks, [0, 1], [t, t])
        out, cache = step(params, hidden[t], cache, blocks.block_tables, blocks.seq_lens, slots)
        outs.append(out)

    def dense(name: str, x: jax.Array, features, axis: Any = -1) -> Any:
        return nn.DenseGeneral(features, axis=axis).apply({"params": params["params"][name]}, x)

    texts, kv = hidden.swapaxes(0, 1), (KV_HEADS, HEAD_SIZE)
    query, key, value = dense("query", texts, (HEADS, HEAD_SIZE)), dense("key", texts, kv), dense("value", texts, kv)
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    expected = dense("out", attended, hidden.shape[-1], axis=(-2, -1))
    error = jnp.abs(jnp.stack(outs, axis=1) - expected).max()
    print("ten steps give what dense attention gives:", bool(error < 1e-5))


if __name__ == "__main__":
    main()
