"""Tests pools past the limits of 32-bit arithmetic, with more than 2**31 elements in each cache and, on GPUs, 2**32
bytes; and a pool that takes most of a GPU's memory, which has no room for a copy of it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from tests import oracle, plain
from tests.conftest import FULL_COMPILE

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE = 2**16 + 8, 128, 1, 256
NUM_HEADS, SEQ_LEN = 2, 200
# The context is in the last blocks; their offsets would wrap around, at 32 bits, into the first ones.
BLOCK_TABLES = np.array([[NUM_BLOCKS - 1, NUM_BLOCKS - 3]], np.int32)


@pytest.mark.slow_on_cpu  # it fills 4.3 GB
def test_high_block_ids(implementation, device, skip_lacking):
    shape = (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    assert np.prod(shape, dtype=np.int64) > 2**31
    rng = np.random.default_rng(0)
    # On a CPU an element has one byte, because half of the memory is filled in half of the time.
    cache_dtype, one = (jnp.int8, 32) if implementation == "xla" else (jnp.bfloat16, 1)
    scales = {"k_scale": np.float32(1 / one), "v_scale": np.float32(1 / one)} if one > 1 else {}
    options = scales | {"implementation": implementation}
    numbers = rng.integers(-100, 101, (2, SEQ_LEN, NUM_KV_HEADS, HEAD_SIZE)) / 32
    key, value = numbers.astype(jnp.bfloat16)
    query = rng.standard_normal((1, NUM_HEADS, HEAD_SIZE)).astype(jnp.bfloat16)
    positions = np.arange(SEQ_LEN, dtype=np.int32)
    slots = BLOCK_TABLES[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    seq_lens = np.array([SEQ_LEN], np.int32)

    @partial(jax.jit, donate_argnums=(0, 1))
    def write(key_cache, value_cache):
        all_but_one = key[:-1], value[:-1], key_cache, value_cache, slots[:-1]
        return paged_jax.write_to_paged_cache(*all_but_one, **options)

    @partial(jax.jit, donate_argnums=(0, 1))
    def write_and_attend(key_cache, value_cache):
        last = key[-1:], value[-1:], key_cache, value_cache, BLOCK_TABLES, seq_lens, slots[-1:]
        return paged_jax.write_and_attend(query, *last, **options)

    @jax.jit
    def attend(key_cache, value_cache):
        caches = (key_cache, value_cache, BLOCK_TABLES, seq_lens)
        return [
            paged_jax.paged_attention_v1(query, *caches, **options),
            paged_jax.paged_attention_v2(query, *caches, **options),
            paged_jax.ragged_paged_attention(query, *caches, np.array([0, 1], np.int32), **options),
        ]

    with skip_lacking(), jax.default_device(device):
        zeros = jax.jit(jnp.zeros, static_argnums=(0, 1), compiler_options=FULL_COMPILE)  # twice as fast
        caches = write(zeros(shape, cache_dtype), zeros(shape, cache_dtype))
        copy = jax.jit(partial(paged_jax.copy_blocks, implementation=implementation), donate_argnums=(0, 1))
        caches = copy(*caches, np.array([[NUM_BLOCKS - 1, NUM_BLOCKS - 2]], np.int32))
        out, *caches = write_and_attend(*caches)
        outs = [out, *attend(*caches)]
        copied = [np.asarray(x) for x in (caches[0][NUM_BLOCKS - 2], caches[1][NUM_BLOCKS - 2])]
        untouched = [np.asarray(x[:8]) for x in caches]

    small = {"block_tables": np.array([[0, 1]], np.int32), "seq_lens": seq_lens, "query": query}
    for name, new in (("key_cache", key), ("value_cache", value)):
        small[name] = np.zeros((2, *shape[1:]), cache_dtype)
        for t in positions:
            small[name][t // BLOCK_SIZE, :, t % BLOCK_SIZE] = (new[t].astype(np.float32) * one).astype(cache_dtype)
    exact, rough = oracle.decode(**small, **scales), plain.decode(**small, **scales)
    for out in outs:
        plain.assert_close(np.asarray(out), exact[0], rough[0], "out")
    for block, name in zip(copied, ("key_cache", "value_cache"), strict=True):
        np.testing.assert_array_equal(block, small[name][0])
    for block in untouched:
        assert not block.any()


@pytest.mark.gpu
def test_pool_of_most_of_the_memory_is_updated_in_place():
    """A write, attention and a copy have the pool donated, since there is no room for a second one."""
    block = (8, 16, 128)  # kv heads, block size, head size
    block_bytes = 2 * 2 * int(np.prod(block))  # of both caches, in bfloat16
    num_blocks = int(0.6 * jax.devices("gpu")[0].memory_stats()["bytes_limit"]) // block_bytes
    rng = np.random.default_rng(0)
    high = num_blocks - 1 - np.arange(4, dtype=np.int32)
    tables, seq_lens = high.reshape(2, 2), np.array([32, 17], np.int32)
    slots = np.concatenate([table * 16 + np.arange(16)[:, None] for table in tables], 1).T.reshape(-1).astype(np.int32)
    query = rng.standard_normal((2, 32, 128)).astype(jnp.bfloat16)
    key, value = (rng.standard_normal((64, 8, 128)).astype(jnp.bfloat16) for _ in "kv")
    last_key, last_value = (rng.standard_normal((2, 8, 128)).astype(jnp.bfloat16) for _ in "kv")
    last_slots = np.array([tables[0, 1] * 16 + 15, tables[1, 1] * 16], np.int32)
    mapping = np.array([[high[0], 0], [high[1], 1], [high[2], 2], [high[3], 3], [3, high[3]]], np.int32)

    donated = partial(jax.jit, donate_argnums=(0, 1))
    write = donated(lambda *caches: paged_jax.write_to_paged_cache(key, value, *caches, slots))
    attend = donated(
        lambda *caches: paged_jax.write_and_attend(
            query, last_key, last_value, *caches, tables, seq_lens, last_slots
        )
    )  # fmt: skip
    copy = donated(lambda *caches: paged_jax.copy_blocks(*caches, mapping))

    caches = [jnp.zeros((num_blocks, *block), jnp.bfloat16) for _ in "kv"]
    caches = write(*caches)
    out, *caches = attend(*caches)
    alone = paged_jax.paged_attention(query, *caches, tables, seq_lens)
    caches = copy(*caches)

    # The reference has a pool of the eight blocks in use, the four lowest and then the four highest.
    small = [np.zeros((8, *block), jnp.bfloat16) for _ in "kv"]
    shift = num_blocks - 8
    small = oracle.write(key, value, *small, slots - shift * 16)
    small = oracle.write(last_key, last_value, *small, last_slots - shift * 16)
    arrays = {"query": query, "block_tables": tables - shift, "seq_lens": seq_lens}
    arrays |= dict(zip(("key_cache", "value_cache"), small, strict=True))
    exact, rough = oracle.decode(**arrays), plain.decode(**arrays)
    plain.assert_close(np.asarray(out), exact[0], rough[0], "out")
    plain.assert_close(np.asarray(alone), exact[0], rough[0], "out of attention alone")
    lowered = np.where(mapping >= 4, mapping - shift, mapping)
    for cache, before in zip(caches, small, strict=True):
        after = oracle.copy(before, lowered)
        np.testing.assert_array_equal(np.concatenate([cache[:4], cache[-4:]]), after)
        # The blocks between must not have changed. They are read in pieces, since there is little room.
        assert not any(bool(cache[i : i + 4096].any()) for i in range(4, num_blocks - 4 - 4096, num_blocks // 16))
