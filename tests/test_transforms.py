"""Tests every op under vmap, scan, shard_map, export and cross-lowering, without gradients, and on empty batches."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import paged_jax
from tests.every_op import (
    BLOCK_SIZE,
    COMPILED_OPS,
    DECODE_OPS,
    LATENT_OPS,
    LATENT_STATIC,
    NUM_BLOCKS,
    NUM_KV_HEADS,
    OPS,
    POOLS,
    assert_equal,
    bind,
    bind_sharded,
    expected,
    is_pool,
)


@pytest.mark.parametrize("op", OPS)
def test_eager_is_jit(op):
    fun, arrays = bind(op)
    assert_equal(fun(*arrays), expected(op))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("op", COMPILED_OPS)
def test_vmap_over_any_argument(op):
    fun, arrays = bind(op)
    floats = {i for i, x in enumerate(arrays) if x.dtype != jnp.int32}
    pools = {i for i in range(len(arrays)) if is_pool(op, i)}
    everything = set(range(len(arrays)))
    # A batch of decode calls becomes one call, unless only one of the two pools is batched. The calls of other ops run
    # one after the other.
    every = {0}, pools, {min(pools)}, {max(pools)}, everything
    for batched in every if op == "paged_attention_v1" else every[1::3] if op in DECODE_OPS else (everything,):
        second = [x + 1.0 if i in batched & floats else x for i, x in enumerate(arrays)]
        stacked = [
            jnp.stack([x, y]) if i in batched else x for i, (x, y) in enumerate(zip(arrays, second, strict=True))
        ]
        axes = [0 if i in batched else None for i in range(len(arrays))]
        out = jax.jit(jax.vmap(fun, in_axes=axes))(*stacked)
        assert_equal(jax.tree.map(lambda x: x[0], out), expected(op))
        assert_equal(jax.tree.map(lambda x: x[1], out), fun(*second))


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_vmap_over_pools_that_share_scales_of_slots(name):
    """One call with both pools would take the scales of the first pool's slots only."""
    query, key_cache, value_cache, *rest = bind("paged_attention")[1]
    scale = np.random.default_rng(2).uniform(0.5, 2.0, (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE)).astype(np.float32)

    def fun(key_cache, value_cache):
        return paged_jax.paged_attention(query, key_cache, value_cache, *rest, **{name: scale})

    pools = jnp.stack([key_cache, key_cache + 1.0]), jnp.stack([value_cache, value_cache + 1.0])
    out = jax.jit(jax.vmap(fun))(*pools)
    for i in range(2):
        assert_equal(out[i], fun(pools[0][i], pools[1][i]))


def test_nested_vmap():
    fun, arrays = bind("paged_attention_v1")
    queries = jnp.stack([arrays[0] * x for x in (1.0, 2.0, 3.0, 4.0)]).reshape(2, 2, *arrays[0].shape)
    nested = jax.vmap(jax.vmap(lambda q: fun(q, *arrays[1:])))(queries)
    for i in range(4):
        assert_equal(nested[i // 2, i % 2], fun(queries[i // 2, i % 2], *arrays[1:]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", ["paged_attention_v1", "ragged_paged_attention", "write_to_paged_cache", *LATENT_OPS])
def test_scan(op):
    fun, arrays = bind(op)
    _, out = jax.lax.scan(lambda carry, x: (carry, fun(x, *arrays[1:])), 0, arrays[0][None])
    assert_equal(jax.tree.map(lambda x: x[0], out), expected(op))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("op", COMPILED_OPS)
def test_shard_map_over_kv_heads(op):
    sharded, arrays = bind_sharded(op)
    assert_equal(jax.jit(sharded)(*arrays), expected(op))


def test_kernels_under_shard_map_vary_as_their_operands_do():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])
    heads, pool = P(None, "x"), jnp.zeros((9, 2, 16, 64), jnp.bfloat16)
    step = jnp.zeros((2, 4), jnp.int32), jnp.ones(2, jnp.int32)

    def attend(query, pool, *step):
        return paged_jax.paged_attention(query, pool, pool, *step, implementation="mosaic_gpu")

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(heads, heads, P(), P()), out_specs=heads)
    traced = jax.jit(sharded).trace(jnp.zeros((2, 8, 64), jnp.bfloat16), pool, *step)
    assert "@mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("op", COMPILED_OPS)
def test_export_round_trip(op):
    fun, arrays = bind(op)
    exported = jax.export.export(jax.jit(fun), platforms=["cpu"])(*arrays)
    assert_equal(jax.export.deserialize(exported.serialize()).call(*arrays), expected(op))


@pytest.mark.sampled(5)
@pytest.mark.skipif(sys.platform != "linux", reason="there is no CUDA plugin for JAX")
@pytest.mark.parametrize("op", OPS)
def test_lowers_for_cuda_without_a_gpu(op):
    fun, arrays = bind(op)
    text = jax.jit(fun).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    called = set(re.findall(r"custom_call @(triton|mosaic_gpu|paged)", text))
    chosen = paged_jax.which_implementation(fun, *arrays, platform="cuda").name
    # The tests are run with the extra `lower`; without it every op would be lowered through XLA.
    assert chosen != "xla", "pip install -e '.[test,lower]'"
    assert called == {chosen}


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_refused(op):
    fun, arrays = bind(op)

    def loss(x):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(fun(x, *arrays[1:])))

    with pytest.raises(TypeError, match=f"{op} is inference only"):
        jax.grad(loss)(arrays[0])
    with pytest.raises(TypeError, match=f"{op} is inference only"):
        jax.jit(jax.grad(loss))(arrays[0])


def test_merging_empty_states_has_finite_gradients():
    out, lse = jnp.zeros((2, 4, 8)), jnp.full((2, 4), -jnp.inf)
    grads = jax.grad(lambda a, b: paged_jax.merge_attention_states(a, lse, b, lse)[0].sum(), argnums=(0, 1))(out, out)
    assert all(jnp.isfinite(g).all() for g in grads)
    for i in range(2):  # of the merged values, and of their lse
        lse_grad = jax.grad(lambda x, i=i: paged_jax.merge_attention_states(out, x, out, x)[i].sum())(lse)
        assert jnp.isfinite(lse_grad).all()


def test_gradients_around_an_op_pass():
    fun, arrays = bind("paged_attention")
    out = jax.grad(lambda x: (x * jax.lax.stop_gradient(fun(*arrays)[0])).sum())(arrays[0])
    assert_equal(out, expected("paged_attention")[0])


@pytest.mark.parametrize("op", OPS)
def test_empty_batches_give_empty_results(op):
    """Calls without any sequences, tokens or pairs are no error."""
    names, options, _ = OPS[op]
    fun, arrays = bind(op)
    empty = {"query", "tokens", "key", "value", "block_tables", "seq_lens", "slot_mapping", "block_mapping"}
    empty |= {"last_key", "last_value", "last_slots", "latent", "latent_query", "latent_tokens"}
    arrays = [x[:0] if n in empty else x for n, x in zip((*names, *options), arrays, strict=True)]
    arrays = [x[:1] if n == "query_start_loc" else x for n, x in zip((*names, *options), arrays, strict=True)]
    wanted = jax.eval_shape(fun, *arrays)
    assert [x.shape for x in jax.tree.leaves(fun(*arrays))] == [x.shape for x in jax.tree.leaves(wanted)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", ["paged_attention_v1", "paged_attention_v2", "ragged_paged_attention", *LATENT_OPS[:2]])
def test_no_room_for_a_context(op):
    """Without table columns or blocks, or with a bound of 0, every row is empty."""
    fun, arrays = bind(op)
    names = OPS[op][0]
    for changes in ({"block_tables": 1}, dict.fromkeys(POOLS, 0)):
        sliced = [
            jax.lax.slice_in_dim(x, 0, 0, axis=changes[n])
            if n in changes
            else jnp.zeros_like(x)
            if n == "seq_lens"
            else x
            for n, x in zip((*names, *OPS[op][1]), arrays, strict=True)
        ]
        assert not np.asarray(jax.tree.leaves(fun(*sliced))[0]).any()
    op = getattr(paged_jax, op)
    static = LATENT_STATIC if "mla" in op.__name__ else {}
    out, lse = op(*arrays[: len(names)], **static | {"max_seq_len": 0, "return_lse": True})
    assert not out.any()
    assert jnp.isneginf(lse).all()


@pytest.mark.parametrize("op", ["ragged_paged_attention", "prefix_attention", "ragged_mla_attention"])
def test_tokens_without_sequences_are_padding(op):
    arrays = bind(op)[1][: len(OPS[op][0])]
    *tokens, tables, seq_lens, query_start_loc = arrays
    static = LATENT_STATIC if "mla" in op else {"return_lse": True}
    out, lse = getattr(paged_jax, op)(*tokens, tables[:0], seq_lens[:0], query_start_loc[:1], **static)
    assert out.shape == (*arrays[0].shape[:2], static.get("value_size", arrays[0].shape[2]))
    assert not out.any()
    assert jnp.isneginf(lse).all()


def test_vmap_over_an_empty_axis():
    fun, arrays = bind("paged_attention_v1")
    out = jax.vmap(lambda q: fun(q, *arrays[1:]))(arrays[0][None][:0])
    assert out.shape == (0, *arrays[0].shape)


def test_lengths_that_change_do_not_compile_again():
    fun, arrays = bind("paged_attention_v1")
    jitted = jax.jit(fun)
    for seq_lens in ([1, 2, 3], [16, 0, 9]):
        jitted(*arrays[:4], jnp.array(seq_lens, jnp.int32), *arrays[5:])
    assert jitted._cache_size() == 1
