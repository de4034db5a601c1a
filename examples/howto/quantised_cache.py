"""How do I keep twice as many tokens in the same memory?

Give the cache an eight-bit dtype. Keys and values are divided by its scales when they are written. An int8 cache needs
scales; a good choice is the largest absolute value of a prompt's keys or values / 127, for each kv head.

    python -m examples.howto.quantised_cache
"""

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import PagedKVCache, allocator

HEADS, KV_HEADS, HEAD_SIZE, TOKENS = 8, 2, 64, 100


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (1, HEADS, HEAD_SIZE), jnp.bfloat16)
    # One head is ten times as large as the other, so that each needs its own scale.
    size = jnp.array([1.0, 10.0])[None, :, None]
    key, value = ((jax.random.normal(k, (TOKENS, KV_HEADS, HEAD_SIZE)) * size).astype(jnp.bfloat16) for k in keys[1:])
    blocks = allocator.create(num_blocks=8, block_size=16, max_num_seqs=1, max_blocks_per_seq=8)
    blocks, _, _ = allocator.append_tokens(blocks, [TOKENS])
    slots = jnp.asarray(allocator.slots(blocks, [0] * TOKENS, np.arange(TOKENS)))

    def attend(dtype, **scales):
        cache = PagedKVCache.create(8, 16, KV_HEADS, HEAD_SIZE, dtype=dtype, **scales)
        cache = cache.write(key, value, slots)  # the cache's methods use its scales
        tables, lens = jnp.asarray(blocks.block_tables), jnp.asarray(blocks.seq_lens)
        return cache.nbytes, cache.attend(query, tables, lens).astype(jnp.float32)

    per_head = {
        name: jnp.abs(x.astype(jnp.float32)).max(axis=(0, 2)) / 127
        for name, x in (("k_scale", key), ("v_scale", value))
    }
    exact_bytes, exact = attend(jnp.bfloat16)
    print(f"bfloat16       {exact_bytes} bytes")
    for dtype, scales in ((jnp.float8_e4m3fn, {}), (jnp.int8, per_head)):
        nbytes, out = attend(dtype, **scales)
        error = jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact)
        print(f"{jnp.dtype(dtype).name:14} {nbytes} bytes, relative error below 10%:", bool(error < 0.1))


if __name__ == "__main__":
    main()
