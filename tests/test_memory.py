"""Tests what ops take of memory: donated pools are updated in place, and long contexts need no large buffers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from tests.every_op import (
    ARRAYS,
    DECODE_OPS,
    LATENT_STATIC,
    WRITING_OPS,
    bind,
    bind_sharded,
    is_pool,
    pool_copies,
    pools_written,
)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def default_device(request):
    """The device of a test's arrays, which decides on the implementation that is compiled."""
    with jax.default_device(jax.devices(request.param)[0]):
        yield


def large(pool):
    """A pool with 64 times as many blocks."""
    return jnp.tile(pool, (64, *[1] * (pool.ndim - 1)))


@pytest.mark.parametrize("op", WRITING_OPS)
@pytest.mark.usefixtures("default_device")
def test_donated_pools_are_updated_in_place(op):
    fun, arrays = bind(op)
    pools = pools_written(op)
    # The pools are large, so that all other memory of an op is small beside them.
    arrays = [large(x) if is_pool(op, i) else x + 0 for i, x in enumerate(arrays)]
    compiled = jax.jit(fun, donate_argnums=pools).lower(*arrays).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(arrays[i].nbytes for i in pools)
    assert memory.temp_size_in_bytes < arrays[pools[0]].nbytes
    assert not pool_copies(compiled, [arrays[i] for i in pools])
    before = [arrays[i].unsafe_buffer_pointer() for i in pools]
    after = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(compiled(*arrays))[-len(pools) :]]
    assert before == after


@pytest.mark.sampled(1)
@pytest.mark.parametrize("op", ["write_to_paged_cache", "write_and_attend", "copy_blocks"])
@pytest.mark.usefixtures("default_device")
def test_donated_pools_of_32_layers_are_updated_in_place_inside_a_loop(op):
    a = {name: jnp.asarray(x) for name, x in ARRAYS.items()}

    def layer(i, caches):
        match op:
            case "write_to_paged_cache":
                return paged_jax.write_to_paged_cache(a["key"], a["value"], *caches, a["slot_mapping"] + i)
            case "write_and_attend":
                new, rest = (a["query"], a["last_key"], a["last_value"]), (a["block_tables"], a["seq_lens"])
                return tuple(paged_jax.write_and_attend(*new, *caches, *rest, a["last_slots"])[1:])
            case "copy_blocks":
                return paged_jax.copy_blocks(*caches, a["block_mapping"] + i)

    def steps(layers):
        def step(i, carry):
            layers, total = carry
            layers = [layer(i, caches) for caches in layers]
            out = paged_jax.paged_attention(a["query"], *layers[-1], a["block_tables"], a["seq_lens"])
            return layers, total + out.sum()

        return jax.lax.fori_loop(0, 5, step, (layers, jnp.float32(0)))

    layers = [(a["key_cache"] + 0, a["value_cache"] + 0) for _ in range(32)]
    assert_layers_are_updated_in_place(steps, layers)


@pytest.mark.usefixtures("default_device")
def test_donated_pools_of_32_layers_are_copied_in_place_in_one_call():
    def steps(caches):
        def step(i, caches):
            return paged_jax.copy_blocks(*caches, jnp.asarray(ARRAYS["block_mapping"]) + i)

        return jax.lax.fori_loop(0, 5, step, caches)

    caches = tuple(tuple(jnp.asarray(ARRAYS[n]) + 0 for _ in range(32)) for n in ("key_cache", "value_cache"))
    assert_layers_are_updated_in_place(steps, caches)


def assert_layers_are_updated_in_place(steps, layers):
    """`steps(layers)` compiles to a program that holds each of the pools once."""
    compiled = jax.jit(steps, donate_argnums=0).lower(layers).compile()
    pools = jax.tree.leaves(layers)
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(x.nbytes for x in pools)
    assert not pool_copies(compiled, pools)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2"])
@pytest.mark.parametrize("op", WRITING_OPS)
@pytest.mark.usefixtures("default_device")
def test_donated_pools_are_updated_in_place_under_vmap(op, dtype):
    """Each call takes its pools out of the stacks, so one call's pools may be there twice, but never all of them."""
    fun, arrays = bind(op)
    pools, num_calls = pools_written(op), 8
    arrays = [large(x.astype(dtype)) if is_pool(op, i) else x + 0 for i, x in enumerate(arrays)]
    arrays = [jnp.stack([x] * num_calls) if i in pools else x for i, x in enumerate(arrays)]
    batched = jax.vmap(fun, in_axes=[0 if i in pools else None for i in range(len(arrays))])
    memory = jax.jit(batched, donate_argnums=pools).lower(*arrays).compile().memory_analysis()
    nbytes = sum(arrays[i].nbytes for i in pools)
    assert memory.alias_size_in_bytes == nbytes
    assert memory.temp_size_in_bytes < nbytes / 2


@pytest.mark.parametrize("num_pairs", [1, 2])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.usefixtures("default_device")
def test_donated_pools_are_copied_in_place_where_the_pairs_are_known(dtype, num_pairs):
    pools = [large(jnp.asarray(ARRAYS["key_cache"])).astype(dtype) for _ in "kv"]
    pairs = np.array([[1, 5], [2, 6]], np.int32)[:num_pairs]
    copy = jax.jit(lambda *pools: paged_jax.copy_blocks(*pools, pairs), donate_argnums=(0, 1))
    memory = copy.lower(*pools).compile().memory_analysis()
    assert memory.temp_size_in_bytes < pools[0].nbytes / 2


@pytest.mark.parametrize("op", WRITING_OPS)
def test_donated_pools_are_updated_in_place_under_shard_map(op):
    sharded, arrays = bind_sharded(op)
    pools = pools_written(op)
    compiled = jax.jit(sharded, donate_argnums=pools).lower(*arrays).compile()
    local = [arrays[i].addressable_shards[0].data for i in pools]
    assert compiled.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in local)
    assert not pool_copies(compiled, local)


def test_undonated_pools_stay_as_they_are():
    fun, arrays = bind("write_to_paged_cache")
    jax.block_until_ready(jax.jit(fun)(*arrays))
    np.testing.assert_array_equal(arrays[2], ARRAYS["key_cache"])


@pytest.mark.parametrize("op", ["ragged_paged_attention", "prefix_attention"])
def test_a_long_prefill_needs_bounded_memory(op):
    """All logits of 8192 tokens and 8 heads together would be 2 GB."""
    n, block_size = 8192, 16
    f32, i32 = (functools.partial(jax.ShapeDtypeStruct, dtype=d) for d in (jnp.float32, jnp.int32))
    pool = f32((n // block_size, 8, block_size, 64))
    new = [f32((n, 8, 64))] * (3 if op == "prefix_attention" else 1)
    arrays = [*new, pool, pool, i32((1, n // block_size)), i32((1,)), i32((2,))]
    compiled = jax.jit(getattr(paged_jax, op)).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * pool.size * 4


@pytest.mark.parametrize("op", DECODE_OPS)
def test_a_long_context_is_never_gathered_as_a_whole(op):
    n, block_size = 2**16, 16
    f32, i32 = (functools.partial(jax.ShapeDtypeStruct, dtype=d) for d in (jnp.float32, jnp.int32))
    if op == "mla_paged_attention":
        pools, static = [f32((n // block_size, block_size, 64))], LATENT_STATIC
    else:
        pools, static = [f32((n // block_size, 1, block_size, 64))] * 2, {}
    pool, arrays = pools[0], (f32((1, 1, 64)), *pools, i32((1, n // block_size)), i32((1,)))
    compiled = jax.jit(functools.partial(getattr(paged_jax, op), **static)).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pool.size * 4 / 8
