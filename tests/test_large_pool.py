"""Pools past the limits of 32-bit arithmetic: more than 2**31 elements, and more than 2**32 bytes, in each cache."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import paged_jax
from tests import oracle, plain

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE = 2**16 + 8, 128, 1, 256
NUM_HEADS, SEQ_LEN = 2, 200
# A context in the very last blocks, whose offsets 32 bits would wrap into the first ones.
BLOCK_TABLES = np.array([[NUM_BLOCKS - 1, NUM_BLOCKS - 3]], np.int32)


def test_high_block_ids(implementation, device, skip_lacking):
    shape = (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    assert np.prod(shape, dtype=np.int64) > 2**31
    rng = np.random.default_rng(0)
    key, value = (rng.standard_normal((SEQ_LEN, NUM_KV_HEADS, HEAD_SIZE)).astype(jnp.bfloat16) for _ in range(2))
    query = rng.standard_normal((1, NUM_HEADS, HEAD_SIZE)).astype(jnp.bfloat16)
    positions = np.arange(SEQ_LEN, dtype=np.int32)
    slots = BLOCK_TABLES[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    seq_lens = np.array([SEQ_LEN], np.int32)

    @partial(jax.jit, donate_argnums=(0, 1))
    def write(key_cache, value_cache):
        return paged_jax.write_to_paged_cache(key, value, key_cache, value_cache, slots, implementation=implementation)

    @jax.jit
    def attend(key_cache, value_cache):
        caches = (key_cache, value_cache, BLOCK_TABLES, seq_lens)
        return [
            paged_jax.paged_attention_v1(query, *caches, implementation=implementation),
            paged_jax.paged_attention_v2(query, *caches, implementation=implementation),
            paged_jax.ragged_paged_attention(query, *caches, np.array([0, 1], np.int32), implementation=implementation),
        ]

    with skip_lacking(), jax.default_device(device):
        caches = write(jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16))
        # Copied at the same heights, by XLA where an implementation leaves that to it.
        copy = jax.jit(paged_jax.copy_blocks, donate_argnums=(0, 1))
        caches = copy(*caches, np.array([[NUM_BLOCKS - 1, NUM_BLOCKS - 2]], np.int32))
        outs = attend(*caches)
        copied = [np.asarray(x) for x in (caches[0][NUM_BLOCKS - 2], caches[1][NUM_BLOCKS - 2])]
        untouched = [np.asarray(x[:8]) for x in caches]

    small = {"block_tables": np.array([[0, 1]], np.int32), "seq_lens": seq_lens, "query": query}
    for name, new in (("key_cache", key), ("value_cache", value)):
        small[name] = np.zeros((2, *shape[1:]), jnp.bfloat16)
        for t in positions:
            small[name][t // BLOCK_SIZE, :, t % BLOCK_SIZE] = new[t]
    exact, rough = oracle.decode(**small), plain.decode(**small)
    for out in outs:
        plain.assert_close(np.asarray(out), exact[0], rough[0], "out")
    for block, name in zip(copied, ("key_cache", "value_cache"), strict=True):
        np.testing.assert_array_equal(block, small[name][0])
    for block in untouched:
        assert not block.any()
