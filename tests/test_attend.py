"""Tests that two ops (examples/attend.py) give a mixed batch the same attention as one op, for all sorts of rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from examples.attend import mixed_attend, prefill_attend
from paged_jax import PagedKVCache, allocator

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 8, 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("query_lens", "num_prompts"),
    [
        ([5, 3, 1, 1, 1, 0], 2),
        ([5, 3, 1, 1, 1, 0], 4),
        ([1, 1, 1, 1, 1, 1], 1),
        ([4, 2, 7, 0, 0, 0], 6),
        ([1, 4, 1, 0, 1, 0], 3),
        ([0, 0, 0, 0, 0, 0], 2),
    ],
    ids=["mixed", "fewer", "decode", "prompts", "in no order", "nothing"],
)
def test_two_ops_are_the_one(query_lens, num_prompts):
    rng = np.random.default_rng(0)
    query_lens = np.array(query_lens, np.int32)
    context_lens = np.where(query_lens > 0, rng.integers(0, 9, 6), 0).astype(np.int32)
    seq_lens = context_lens + query_lens
    blocks, _, _ = allocator.append_tokens(allocator.create(40, BLOCK_SIZE, 6, 5), seq_lens)
    starts = np.concatenate([[0], query_lens.cumsum()]).astype(np.int32)
    num_tokens = int(starts[-1])
    num_padding = 16 - num_tokens  # so that the cases share a program
    rows = np.repeat(np.arange(6, dtype=np.int32), query_lens)
    positions = np.arange(num_tokens, dtype=np.int32) - starts[rows] + context_lens[rows]
    slots = np.append(allocator.slots(blocks, rows, positions), np.full(num_padding, -1)).astype(np.int32)
    shape = 40, KV_HEADS, BLOCK_SIZE, HEAD_SIZE
    cache = PagedKVCache(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)))
    new = [
        jnp.asarray(rng.normal(size=(num_tokens + num_padding, n, HEAD_SIZE)), jnp.float32)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    ]
    where = blocks.block_tables, seq_lens, starts, slots
    one, one_cache = prefill_attend(*where)(*new, cache, scale=0.3, sliding_window=None)
    two, two_cache = mixed_attend(*where, num_prompts)(*new, cache, scale=0.3, sliding_window=None)
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(two_cache.key_cache, one_cache.key_cache)
    assert not np.asarray(two)[num_tokens:].any(), "padding comes out 0"
    assert bool(np.asarray(two)[:num_tokens].any()) == (num_tokens > 0)
