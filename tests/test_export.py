"""Tests that functions over this library's pytrees can be exported, serialised and read back."""

import inspect
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from paged_jax import BlockSparse, PagedKVCache, allocator
from paged_jax.kernels.problem import Unsupported
from paged_jax.options import AttentionOptions, PerHead


def round_trip(function, *arguments):
    """Exports `function`, serialises it, reads it back and runs it; checks that the results are the function's own."""
    exported = jax.export.export(jax.jit(function), platforms=["cpu"])(*arguments)
    found = jax.export.deserialize(exported.serialize()).call(*arguments)
    expected = jax.jit(function)(*arguments)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    return found


def test_a_decode_step_over_a_cache_and_an_allocator():
    sizes = {"num_kv_heads": 2, "head_size": 16, "dtype": jnp.int8, "layout": "nhd"}
    cache = PagedKVCache.create(8, 4, **sizes, k_scale=0.1, v_scale=np.full((8, 2, 4), 0.1))
    blocks = allocator.create(num_blocks=8, block_size=4, max_num_seqs=2, max_blocks_per_seq=3, xp=jnp)

    def step(query, key, cache, blocks):
        blocks, _, _ = allocator.append_tokens(blocks, jnp.ones(2, jnp.int32))
        slots = allocator.slots(blocks, jnp.arange(2, dtype=jnp.int32), blocks.seq_lens - 1)
        out, cache = cache.write_and_attend(query, key, key, blocks.block_tables, blocks.seq_lens, slots)
        return out, cache, blocks

    out, cache, blocks = round_trip(step, jnp.ones((2, 4, 16)), jnp.ones((2, 2, 16)), cache, blocks)
    np.testing.assert_allclose(out, 1, atol=1e-5)
    assert cache.layout == "nhd"
    assert blocks.block_size == 4


def test_a_decode_step_over_a_cache_of_latents():
    cache = paged_jax.PagedLatentCache.create(8, 4, 32, dtype=jnp.int8, latent_scale=0.1)

    def step(query, latent, cache):
        cache = cache.write(latent, jnp.arange(2, dtype=jnp.int32) * 4)
        tables, lens = jnp.arange(2, dtype=jnp.int32)[:, None], jnp.ones(2, jnp.int32)
        return cache.attend(query, tables, lens, value_size=16, scale=0.2), cache

    out, cache = round_trip(step, jnp.ones((2, 4, 32)), jnp.ones((2, 32)), cache)
    np.testing.assert_allclose(out, 1, atol=1e-5)
    assert cache.latent_cache.dtype == jnp.int8


def test_metadata():
    metadata = paged_jax.build_metadata([[0, 1], [2]], [5, 3], [5, 1], 4)
    same = round_trip(lambda metadata: jax.tree.map(lambda x: x + 1, metadata), metadata)
    assert (same.num_prefills, same.max_prefill_seq_len) == (1, 5)


def test_sizes_that_numpy_counted():
    """NumPy's integers would stay in the static fields, which are stored as JSON."""
    sizes = np.array([8, 4, 2, 3])
    blocks = inspect.unwrap(allocator.create)(*sizes)  # the tests' check of annotations would refuse them
    metadata = paged_jax.build_metadata([[0, 1], [2]], [5, 3], [5, 1], sizes[1], num_prefills=np.int64(1))
    round_trip(lambda *pytrees: jax.tree.map(jnp.sum, pytrees), blocks, metadata)


def test_a_number_of_blocks_that_is_not_known_yet():
    num_blocks, two = jax.export.symbolic_shape("num_blocks, 2", constraints=["num_blocks <= 100"])
    pool = jax.ShapeDtypeStruct((two, num_blocks, 2048), jnp.float32)
    make = {
        "split": lambda pool: paged_jax.split_kv_cache(pool, 2, 64)[0],
        "create": lambda pool: PagedKVCache.create(pool.shape[1], 16, 2, 64, dtype=jnp.float32).key_cache,
    }
    for function in make.values():
        exported = jax.export.deserialize(jax.export.export(jax.jit(function))(pool).serialize())
        assert exported.call(jnp.zeros((2, 5, 2048))).shape == (5, 2, 16, 64)


def test_sizes_that_are_not_known_yet_go_to_xla():
    """Kernels for GPUs have grids and tilings, which need numbers and not symbolic sizes."""
    n = jax.export.symbolic_shape("num_seqs")[0]
    caches = [jax.ShapeDtypeStruct((9, 2, 16, 64), jnp.bfloat16)] * 2
    query, new = (jax.ShapeDtypeStruct((n, heads, 64), jnp.bfloat16) for heads in (4, 2))
    tables, ints = jax.ShapeDtypeStruct((n, 3), jnp.int32), jax.ShapeDtypeStruct((n,), jnp.int32)
    calls = {
        paged_jax.paged_attention: (query, *caches, tables, ints),
        paged_jax.write_to_paged_cache: (new, new, *caches, ints),
    }
    rng = np.random.default_rng(0)
    for op, shapes in calls.items():
        exported = jax.export.export(jax.jit(op), platforms=["cpu", "cuda"])(*shapes)
        arrays = [
            jnp.asarray(rng.integers(1, 9, [3 if x is n else x for x in each.shape]), each.dtype) for each in shapes
        ]
        found = jax.export.deserialize(exported.serialize()).call(*arrays)
        jax.tree.map(np.testing.assert_array_equal, found, jax.jit(op)(*arrays))
        if op is paged_jax.paged_attention:  # to which the bound says nothing, so that it is not compared with n
            jax.export.export(jax.jit(partial(op, max_query_len=4)), platforms=["cpu"])(*shapes)
        with pytest.raises(Unsupported, match="lacks symbolic sizes"):
            jax.export.export(jax.jit(partial(op, implementation="triton")), platforms=["cuda"])(*shapes)
        with mock.patch.object(jax, "local_devices"):
            jax.export.export(jax.jit(op), platforms=["cuda"])(*shapes)  # which looks for the implementation that leads


def test_options():
    per_head = PerHead(sinks=jnp.ones(4))
    options = AttentionOptions(jnp.float32(1), per_head, None, None, "vllm", 9, 1, None, 2.5, BlockSparse(1, 3))
    same = round_trip(lambda options: options, options)
    assert same.block_sparse == BlockSparse(1, 3)
    assert (same.per_head.alibi_slopes, same.logits_soft_cap, same.causal) == (None, 2.5, True)
