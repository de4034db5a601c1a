"""Tests every op under vmap, scan, shard_map, export, cross-lowering and donation, and that gradients are refused."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import paged_jax

NUM_SEQS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS, WIDTH = 3, 4, 2, 16, 4, 16, 4
QUERY_START_LOC = np.array([0, 2, 2, 7], np.int32)
NUM_TOKENS = 8  # one of them padding


def _arrays():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    pool = (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    tables = rng.permutation(NUM_BLOCKS)[: NUM_SEQS * WIDTH].reshape(NUM_SEQS, WIDTH).astype(np.int32)
    return {
        "query": normal(NUM_SEQS, NUM_HEADS, HEAD_SIZE),
        "tokens": normal(NUM_TOKENS, NUM_HEADS, HEAD_SIZE),
        "key": normal(NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE),
        "value": normal(NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE),
        "key_cache": normal(*pool),
        "value_cache": normal(*pool),
        "block_tables": tables,
        "seq_lens": np.array([5, 0, 16], np.int32),
        "last_key": normal(NUM_SEQS, NUM_KV_HEADS, HEAD_SIZE),
        "last_value": normal(NUM_SEQS, NUM_KV_HEADS, HEAD_SIZE),
        "last_slots": np.array([tables[0, 1] * BLOCK_SIZE, -1, tables[2, 3] * BLOCK_SIZE + 3], np.int32),
        "query_start_loc": QUERY_START_LOC,
        "slot_mapping": np.array([3, -1, 40, 41, 7, 63, 64, 0], np.int32),
        "block_mapping": np.array([[0, 5], [5, 6], [-1, 3]], np.int32),
        "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4], np.float32),
        "k_scale": np.array([0.5, 2.0], np.float32),
    }


ARRAYS = _arrays()
DECODE = ("query", "key_cache", "value_cache", "block_tables", "seq_lens")
RAGGED = ("tokens", *DECODE[1:], "query_start_loc")
OPTIONS = ("alibi_slopes", "k_scale")
# op: the names of its positional arrays, of its array options, and its static keywords
OPS = {
    "paged_attention_v1": (DECODE, OPTIONS, {}),
    "paged_attention_v2": (DECODE, OPTIONS, {"partition_size": 8, "return_residuals": True}),
    "paged_attention": (DECODE, (), {"return_lse": True}),
    "write_and_attend": (("query", "last_key", "last_value", *DECODE[1:], "last_slots"), ("alibi_slopes",), {}),
    "ragged_paged_attention": (RAGGED, OPTIONS, {}),
    "prefix_attention": (("tokens", "key", "value", *RAGGED[1:]), (), {}),
    "write_to_paged_cache": (("key", "value", "key_cache", "value_cache", "slot_mapping"), (), {}),
    "copy_blocks": (("key_cache", "value_cache", "block_mapping"), (), {}),
    "swap_blocks": (("key_cache", "value_cache", "value_cache", "key_cache", "block_mapping"), (), {}),
}

DECODE_OPS = [op for op in OPS if OPS[op][0] == DECODE]


def bind(op):
    """Makes the op a function of all its arrays; gives it and the arrays."""
    names, options, static = OPS[op]

    def fun(*arrays):
        keywords = dict(zip(options, arrays[len(names) :], strict=True))
        return getattr(paged_jax, op)(*arrays[: len(names)], **keywords, **static)

    return fun, [jnp.asarray(ARRAYS[n]) for n in (*names, *options)]


@functools.cache
def expected(op):
    fun, arrays = bind(op)
    return jax.tree.map(np.asarray, jax.jit(fun)(*arrays))


def assert_equal(actual, wanted, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5), actual, wanted)


@pytest.mark.parametrize("op", OPS)
def test_eager_is_jit(op):
    fun, arrays = bind(op)
    assert_equal(fun(*arrays), expected(op))


@pytest.mark.parametrize("op", OPS)
def test_vmap_over_any_argument(op):
    fun, arrays = bind(op)
    floats = {i for i, x in enumerate(arrays) if x.dtype != jnp.int32}
    pools = {i for i, x in enumerate(arrays) if x.ndim == 4}
    everything = set(range(len(arrays)))
    # A batch of decode calls becomes one call, unless only one of the two pools is batched. The calls of other ops run
    # one after the other.
    for batched in ({0}, pools, {min(pools)}, {max(pools)}, everything) if op in DECODE_OPS else (everything,):
        second = [x + 1.0 if i in batched & floats else x for i, x in enumerate(arrays)]
        stacked = [
            jnp.stack([x, y]) if i in batched else x for i, (x, y) in enumerate(zip(arrays, second, strict=True))
        ]
        axes = [0 if i in batched else None for i in range(len(arrays))]
        out = jax.jit(jax.vmap(fun, in_axes=axes))(*stacked)
        assert_equal(jax.tree.map(lambda x: x[0], out), expected(op))
        assert_equal(jax.tree.map(lambda x: x[1], out), fun(*second))


def test_vmap_over_pools_that_share_scales_of_slots():
    """One call with both pools would take the scales of the first pool's slots only."""
    query, key_cache, value_cache, *rest = bind("paged_attention")[1]
    k_scale = np.random.default_rng(2).uniform(0.5, 2.0, (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE)).astype(np.float32)

    def fun(key_cache, value_cache):
        return paged_jax.paged_attention(query, key_cache, value_cache, *rest, k_scale=k_scale)

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


@pytest.mark.parametrize("op", ["paged_attention_v1", "ragged_paged_attention", "write_to_paged_cache"])
def test_scan(op):
    fun, arrays = bind(op)
    _, out = jax.lax.scan(lambda carry, x: (carry, fun(x, *arrays[1:])), 0, arrays[0][None])
    assert_equal(jax.tree.map(lambda x: x[0], out), expected(op))


def bind_sharded(op):
    """`bind` over two devices that share the kv heads."""
    fun, arrays = bind(op)
    names = (*OPS[op][0], *OPS[op][1])
    heads_axis = {"block_tables": None, "seq_lens": None, "query_start_loc": None, "slot_mapping": None}
    heads_axis |= {"block_mapping": None, "last_slots": None, "alibi_slopes": 0, "k_scale": 0}
    specs = [P() if (a := heads_axis.get(n, 1)) is None else P(*[None] * a, "x") for n in names]
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2])
    sharded = jax.shard_map(fun, mesh=mesh, in_specs=tuple(specs), out_specs=P(None, "x"))
    return sharded, [jax.device_put(x, jax.NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]


@pytest.mark.parametrize("op", OPS)
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


@pytest.mark.parametrize("op", OPS)
def test_export_round_trip(op):
    fun, arrays = bind(op)
    exported = jax.export.export(jax.jit(fun), platforms=["cpu"])(*arrays)
    assert_equal(jax.export.deserialize(exported.serialize()).call(*arrays), expected(op))


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
    lse_grad = jax.grad(lambda x: paged_jax.merge_attention_states(out, x, out, x)[0].sum())(lse)
    assert jnp.isfinite(lse_grad).all()


def test_gradients_around_an_op_pass():
    fun, arrays = bind("paged_attention")
    out = jax.grad(lambda x: (x * jax.lax.stop_gradient(fun(*arrays)[0])).sum())(arrays[0])
    assert_equal(out, expected("paged_attention")[0])


def pool_copies(compiled, pools):
    """Finds the copies of a whole pool in a compiled program."""
    shapes = {f"f32[{','.join(map(str, x.shape))}]" for x in pools}
    return [
        line
        for line in compiled.as_text().splitlines()
        if (m := re.search(r"= (\S+?)(\{\S*\})? copy(-start)?\(", line)) and m.group(1) in shapes
    ]


WRITING_OPS = ["write_to_paged_cache", "write_and_attend", "copy_blocks", "swap_blocks"]


def pools_written(op):
    """The indices of the two pools that the op updates among its arrays; swap_blocks only reads its first two."""
    return [i for i, n in enumerate(OPS[op][0]) if n in ("key_cache", "value_cache")][-2:]


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def default_device(request):
    """The device of a test's arrays, which decides on the implementation that is compiled."""
    with jax.default_device(jax.devices(request.param)[0]):
        yield


@pytest.mark.parametrize("op", WRITING_OPS)
@pytest.mark.usefixtures("default_device")
def test_donated_pools_are_updated_in_place(op):
    fun, arrays = bind(op)
    pools = pools_written(op)
    # The pools are large, so that all other memory of an op is small beside them.
    arrays = [jnp.tile(x, (64, 1, 1, 1)) if x.ndim == 4 else x + 0 for x in arrays]
    compiled = jax.jit(fun, donate_argnums=pools).lower(*arrays).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(arrays[i].nbytes for i in pools)
    assert memory.temp_size_in_bytes < arrays[pools[0]].nbytes
    assert not pool_copies(compiled, [arrays[i] for i in pools])
    before = [arrays[i].unsafe_buffer_pointer() for i in pools]
    after = [x.unsafe_buffer_pointer() for x in compiled(*arrays)[-2:]]
    assert before == after


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
    pool = f32((n // block_size, 1, block_size, 64))
    arrays = f32((1, 1, 64)), pool, pool, i32((1, n // block_size)), i32((1,))
    compiled = jax.jit(getattr(paged_jax, op)).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pool.size * 4 / 8


@pytest.mark.parametrize("op", OPS)
def test_empty_batches_give_empty_results(op):
    """Calls without any sequences, tokens or pairs are no error."""
    names, options, _ = OPS[op]
    fun, arrays = bind(op)
    empty = {"query", "tokens", "key", "value", "block_tables", "seq_lens", "slot_mapping", "block_mapping"}
    empty |= {"last_key", "last_value", "last_slots"}
    arrays = [x[:0] if n in empty else x for n, x in zip((*names, *options), arrays, strict=True)]
    arrays = [x[:1] if n == "query_start_loc" else x for n, x in zip((*names, *options), arrays, strict=True)]
    wanted = jax.eval_shape(fun, *arrays)
    assert [x.shape for x in jax.tree.leaves(fun(*arrays))] == [x.shape for x in jax.tree.leaves(wanted)]


@pytest.mark.parametrize(
    "op", ["paged_attention_v1", "paged_attention_v2", "paged_attention", "ragged_paged_attention"]
)
def test_no_room_for_a_context(op):
    """Without table columns or blocks, or with a bound of 0, every row is empty."""
    fun, arrays = bind(op)
    names = OPS[op][0]
    for changes in ({"block_tables": 1}, {"key_cache": 0, "value_cache": 0}):
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
    out, lse = op(*arrays[: len(names)], max_seq_len=0, return_lse=True)
    assert not out.any()
    assert jnp.isneginf(lse).all()


@pytest.mark.parametrize("op", ["ragged_paged_attention", "prefix_attention"])
def test_tokens_without_sequences_are_padding(op):
    arrays = bind(op)[1][: len(OPS[op][0])]
    *tokens, tables, seq_lens, query_start_loc = arrays
    out, lse = getattr(paged_jax, op)(*tokens, tables[:0], seq_lens[:0], query_start_loc[:1], return_lse=True)
    assert out.shape == arrays[0].shape
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
