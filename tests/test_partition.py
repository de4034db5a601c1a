"""Tests ops on sharded operands under plain `jit`: every device computes its own part, and nothing is exchanged."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_jax
from paged_jax import _lowered
from tests.every_op import COMPILED_OPS, OPS, WRITING_OPS, pool_copies, pools_written

NUM_SEQS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS, WIDTH = 4, 8, 4, 16, 4, 1024, 4
NUM_TOKENS = 8
DECODE_OPS = ("paged_attention", "paged_attention_v1", "paged_attention_v2", "mla_paged_attention")
DECODE_ROWS = ("query", "latent_query", "block_tables", "seq_lens")  # operands with a row for each sequence
LAYOUTS = {"hnd": (0, 1, 2, 3), "nhd": (0, 2, 1, 3)}  # the axes of "hnd", in the layout's order
COLLECTIVES = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter|collective-broadcast"


def _arrays():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    tables = rng.permutation(NUM_BLOCKS)[: NUM_SEQS * WIDTH].reshape(NUM_SEQS, WIDTH).astype(np.int32)
    pool = (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    return {
        "query": normal(NUM_SEQS, NUM_HEADS, HEAD_SIZE),
        "tokens": normal(NUM_TOKENS, NUM_HEADS, HEAD_SIZE),
        "key": normal(NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE),
        "value": normal(NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE),
        "last_key": normal(NUM_SEQS, NUM_KV_HEADS, HEAD_SIZE),
        "last_value": normal(NUM_SEQS, NUM_KV_HEADS, HEAD_SIZE),
        "key_cache": normal(*pool),
        "value_cache": normal(*pool),
        "block_tables": tables,
        "seq_lens": np.array([5, 0, 16, 9], np.int32),
        "last_slots": np.array([tables[0, 1] * 4, -1, tables[2, 3] * 4 + 3, tables[3, 2] * 4], np.int32),
        "query_start_loc": np.array([0, 2, 2, 6, 7], np.int32),
        "slot_mapping": np.array([3, -1, 40, 41, 7, 63, 64, 0], np.int32),
        "block_mapping": np.array([[0, 5], [5, 6], [-1, 3]], np.int32),
        "alibi_slopes": 0.1 * np.arange(1, NUM_HEADS + 1, dtype=np.float32),
        "sinks": normal(NUM_HEADS),
        "k_scale": np.array([0.5, 2.0, 1.5, 0.7], np.float32),
        "v_scale": rng.uniform(0.5, 2.0, (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE)).astype(np.float32),
        "latent_query": normal(NUM_SEQS, NUM_HEADS, 32),
        "latent_tokens": normal(NUM_TOKENS, NUM_HEADS, 32),
        "latent": normal(NUM_TOKENS, 32),
        "latent_cache": normal(NUM_BLOCKS, BLOCK_SIZE, 32),
    }


ARRAYS = _arrays()
HEADS_AXIS = dict.fromkeys(("query", "tokens", "key", "value", "last_key", "last_value", "key_cache", "value_cache"), 1)
HEADS_AXIS |= {"alibi_slopes": 0, "sinks": 0, "k_scale": 0, "v_scale": 1, "latent_query": 1, "latent_tokens": 1}


def bind(op, extra=(), **static):
    """Gives the op as a function of its arrays, their names and their values; `extra` names more array options."""
    positional, options, keywords = OPS[op]
    options = tuple(dict.fromkeys((*options, *extra)))

    def fun(*arrays):
        named = dict(zip(options, arrays[len(positional) :], strict=True))
        return getattr(paged_jax, op)(*arrays[: len(positional)], **named, **keywords, **static)

    names = (*positional, *options)
    axes = LAYOUTS[static.get("layout", "hnd")]
    return fun, names, [ARRAYS[n].transpose(axes) if ARRAYS[n].ndim == 4 else ARRAYS[n] for n in names]


@functools.cache
def expected(op):
    """The results of the op on one device."""
    fun, _, arrays = bind(op)
    return jax.tree.map(np.asarray, jax.jit(fun)(*arrays))


def make_mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(axis_type, axis_type), devices=jax.devices("cpu"))


def specs_of(op, names, seqs, heads, layout="hnd"):
    """The operands' specs: their heads over the mesh axes `heads`, a decode op's sequences over `seqs`."""

    def spec(name):
        if name in ("key_cache", "value_cache") and layout == "nhd":
            return P(None, None, heads)
        axes = [None] * HEADS_AXIS[name] + [heads] if name in HEADS_AXIS else [None]
        if name in DECODE_ROWS and op in DECODE_OPS:
            axes[0] = seqs
        return P(*axes)

    return [spec(name) for name in names]


def place(arrays, specs, mesh):
    """Puts the arrays on the mesh's devices. They are no views of NumPy's memory, so that they can be donated."""
    return [jax.device_put(jnp.array(x), NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]


def assert_same(actual, wanted):
    """Checks that pools have the same bits, and attention the same values up to rounding.

    Sums may round differently because XLA's CPU backend chooses a matrix product's code by its shape, and a device's
    part has fewer heads or rows.
    """
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        if a.shape[0] == NUM_BLOCKS:
            np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))
        else:
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


def assert_nothing_is_exchanged(compiled):
    assert not re.findall(COLLECTIVES, compiled.as_text())
    local_pool = ARRAYS["key_cache"].nbytes // 4
    assert compiled.memory_analysis().temp_size_in_bytes < local_pool / 2


def assert_split(op, results, seqs, heads, mesh):
    """Checks that results are sharded as their heads and sequences are."""
    for i, x in enumerate(jax.tree.leaves(results)):
        if op == "write_to_latent_cache":
            assert x.sharding.is_fully_replicated
            continue
        writes_only = op in ("write_to_paged_cache", "copy_blocks", "swap_blocks")
        is_pool = writes_only or (op == "write_and_attend" and i)
        spec = P(seqs if op in DECODE_OPS and not is_pool else None, heads)
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


@pytest.fixture
def seen(monkeypatch):
    """Gives a list to which the shapes of the operands of every traced implementation are added."""
    shapes = []
    dispatch = sys.modules["paged_jax._dispatch"]
    load = dispatch._load

    def spy(implementation, op):
        kernel = load(implementation, op)

        def recording(*operands, **static):
            shapes.append([x.shape for x in jax.tree.leaves(operands)])
            return kernel(*operands, **static)

        return recording

    monkeypatch.setattr(dispatch, "_load", spy)
    dispatch._bind.cache_clear()
    yield shapes
    dispatch._bind.cache_clear()


SPLITS = [(op, None, "tp", AxisType.Auto) for op in COMPILED_OPS]
SPLITS += [(op, None, "tp", AxisType.Explicit) for op in ("paged_attention_v2", "write_and_attend", "swap_blocks")]
SPLITS += [(op, "dp", "tp", AxisType.Auto) for op in ("paged_attention_v1", "paged_attention_v2")]
SPLITS += [("paged_attention_v1", "dp", None, axis_type) for axis_type in (AxisType.Auto, AxisType.Explicit)]
SPLITS += [("paged_attention", "dp", "tp", AxisType.Explicit), ("mla_paged_attention", "dp", "tp", AxisType.Auto)]
SPLITS += [(op, None, "tp", AxisType.Explicit) for op in ("ragged_mla_attention", "write_to_latent_cache")]
SPLITS = [
    pytest.param(*each, marks=[pytest.mark.slow] * (i >= len(COMPILED_OPS) and i % 3 > 0))
    for i, each in enumerate(SPLITS)
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("op", "seqs", "heads", "axis_type"), SPLITS)
def test_an_op_runs_where_its_operands_lie(op, seqs, heads, axis_type, seen):
    fun, names, arrays = bind(op)
    mesh = make_mesh(axis_type)
    specs = specs_of(op, names, seqs, heads)
    placed = place(arrays, specs, mesh)
    compiled = jax.jit(fun).lower(*placed).compile()
    # XLA can split its own operations, but not a kernel: the implementation itself must get a device's part.
    positional = len(OPS[op][0])
    assert seen[-1][:positional] == [x.addressable_shards[0].data.shape for x in placed[:positional]]
    assert_nothing_is_exchanged(compiled)
    results = compiled(*placed)
    assert_same(results, expected(op))
    assert_split(op, results, seqs, heads, mesh)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("op", "axis_type"), [(op, (AxisType.Auto, AxisType.Explicit)[i % 2]) for i, op in enumerate(WRITING_OPS)]
)
def test_donated_pools_are_updated_in_place(op, axis_type):
    fun, names, arrays = bind(op)
    placed = place(arrays, specs_of(op, names, None, "tp"), make_mesh(axis_type))
    pools = pools_written(op)
    compiled = jax.jit(fun, donate_argnums=pools).lower(*placed).compile()
    local = [placed[i].addressable_shards[0].data for i in pools]
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in local)
    assert not pool_copies(compiled, local)
    before = [s.data.unsafe_buffer_pointer() for i in pools for s in placed[i].addressable_shards]
    results = compiled(*placed)
    written = jax.tree.leaves(results)[-len(pools) :]
    assert before == [s.data.unsafe_buffer_pointer() for x in written for s in x.addressable_shards]


@pytest.mark.parametrize("op", ["copy_blocks", "swap_blocks"])
def test_blocks_of_any_layout_are_split(op):
    fun, names, arrays = bind(op)
    for spec in (P(None, None, "tp"), P(None, "dp", None, "tp")):
        placed = place(arrays, [spec if "cache" in name else P() for name in names], make_mesh())
        compiled = jax.jit(fun).lower(*placed).compile()
        assert_nothing_is_exchanged(compiled)
        assert_same(compiled(*placed), expected(op))


@pytest.mark.parametrize("extra", [(), ("alibi_slopes",)])
def test_a_group_of_heads_is_split_where_a_device_has_one_kv_head(extra, seen):
    fun, _, arrays = bind("paged_attention", extra)
    wanted, mesh, pool = jax.jit(fun)(*arrays), make_mesh(), P(None, "tp")
    placed = place(arrays, [P(None, ("tp", "dp")), pool, pool, P(), P(), *[P(("tp", "dp"))] * len(extra)], mesh)
    compiled = jax.jit(fun).lower(*placed).compile()
    assert seen[-1][0] == (NUM_SEQS, 1, HEAD_SIZE)
    assert_nothing_is_exchanged(compiled)
    results = compiled(*placed)
    assert results[0].sharding.is_equivalent_to(placed[0].sharding, 3)
    assert_same(results, wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("spec", "axis_type"),
    [
        (P("tp"), AxisType.Auto),
        (P(None, None, None, "tp"), AxisType.Auto),
        (P(None, None, "tp"), AxisType.Explicit),
        (P(), AxisType.Explicit),
    ],
)
def test_what_cannot_be_split_is_resharded(spec, axis_type):
    fun, _, arrays = bind("paged_attention")
    placed = place(arrays, [P(None, ("tp", "dp")), spec, spec, P("dp"), P()], make_mesh(axis_type))
    assert_same(jax.jit(fun)(*placed), expected("paged_attention"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_transformations_of_sharded_calls(axis_type):
    """Ops run eagerly, under vmap and in a scan."""
    fun, names, arrays = bind("paged_attention_v1")
    wanted = expected("paged_attention_v1")
    specs = specs_of("paged_attention_v1", names, "dp", "tp")
    query, *rest = place(arrays, specs, make_mesh(axis_type))
    assert_same(fun(query, *rest), wanted)
    queries = jax.device_put(np.stack([arrays[0]] * 2), NamedSharding(make_mesh(axis_type), P(None, *specs[0])))
    for step in (
        lambda queries, *rest: jax.vmap(lambda q: fun(q, *rest))(queries),
        lambda queries, *rest: jax.lax.scan(lambda carry, q: (carry, fun(q, *rest)), 0, queries)[1],
    ):
        compiled = jax.jit(step).lower(queries, *rest).compile()
        results = compiled(queries, *rest)
        assert_same(results[0], wanted)
        assert_same(results[1], wanted)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_export_round_trip_of_a_sharded_call(axis_type):
    fun, names, arrays = bind("paged_attention_v1")
    placed = place(arrays, specs_of("paged_attention_v1", names, "dp", "tp"), make_mesh(axis_type))
    exported = jax.export.export(jax.jit(fun), platforms=["cpu"])(*placed)
    out = jax.jit(jax.export.deserialize(exported.serialize()).call)(*placed)
    assert_same(out, expected("paged_attention_v1"))


def test_a_model_s_step_is_split_from_its_projections_on():
    """XLA propagates shardings to an op through other operations, and from its results on."""
    weights = np.random.default_rng(1).standard_normal((HEAD_SIZE, NUM_HEADS, HEAD_SIZE), np.float32)
    fun, names, arrays = bind("write_and_attend")

    def step(x, weights, *arrays):
        out, *caches = fun(jnp.einsum("nd,dhe->nhe", x, weights), *arrays)
        return jnp.einsum("nhe,dhe->nhd", out, weights), *caches

    specs = specs_of("write_and_attend", names, None, "tp")
    arrays = [arrays[0][:, 0], weights, *arrays[1:]]
    placed = place(arrays, [P(), P(None, "tp"), *specs[1:]], make_mesh())
    compiled = jax.jit(step).lower(*placed).compile()
    assert_nothing_is_exchanged(compiled)
    for actual, wanted in zip(compiled(*placed), jax.jit(step)(*arrays), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("seen")  # which forgets what earlier tests lowered
def test_the_layers_of_a_model_are_lowered_once(monkeypatch):
    """XLA asks for the part of each call, and JAX takes seconds to lower a kernel."""
    lowered = []

    def spy(module):
        lowered.append(module)
        return module_to_bytecode(module)

    module_to_bytecode = _lowered.mlir.module_to_bytecode
    monkeypatch.setattr(_lowered.mlir, "module_to_bytecode", spy)
    fun, names, arrays = bind("paged_attention_v1")

    weights = np.random.default_rng(1).standard_normal((3, HEAD_SIZE, HEAD_SIZE), np.float32)

    def three_layers(weights, query, *arrays):
        for weight in weights:
            query = fun(query @ weight, *arrays)
        return query

    arrays = [weights, *arrays]
    for axes in ((None, "tp"), ("dp", "tp")):
        placed = place(arrays, [P(), *specs_of("paged_attention_v1", names, *axes)], make_mesh())
        compiled = jax.jit(three_layers).lower(*placed).compile()
        assert_nothing_is_exchanged(compiled)
        np.testing.assert_allclose(compiled(*placed), three_layers(*arrays), rtol=1e-5, atol=1e-5)
    assert len(lowered) == 2


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_shard_map_over_some_axes_leaves_the_others_to_jax(axis_type, seen):
    """If they are Explicit, the op is split along them, too."""
    fun, names, arrays = bind("paged_attention_v1")
    mesh = make_mesh(axis_type)
    inner = [P("dp") if name in ("query", "block_tables", "seq_lens") else P() for name in names]
    sharded = jax.shard_map(fun, mesh=mesh, in_specs=tuple(inner), out_specs=P("dp"), axis_names={"dp"})
    placed = place(arrays, specs_of("paged_attention_v1", names, "dp", "tp"), mesh)
    with jax.set_mesh(mesh):
        compiled = jax.jit(sharded).lower(*placed).compile()
        results, shape = compiled(*placed), seen[-1][0]
    assert_same(results, expected("paged_attention_v1"))
    if axis_type is AxisType.Explicit:
        assert shape == placed[0].addressable_shards[0].data.shape
        assert_nothing_is_exchanged(compiled)


def test_empty_operands_and_pools_on_the_host_are_never_split():
    def is_split(fun, *arrays):
        return "paged_jax_op" in str(jax.make_jaxpr(fun)(*arrays))

    fun, names, arrays = bind("paged_attention_v1")
    assert is_split(fun, *arrays)
    assert not is_split(fun, *(x[:0] if name in DECODE_ROWS else x for name, x in zip(names, arrays, strict=True)))

    swap, names, pools = bind("swap_blocks")
    assert is_split(swap, *pools)
    host = NamedSharding(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)), P(), memory_kind="pinned_host")
    assert not is_split(
        swap, *(jax.device_put(x, host) if "cache" in n else x for n, x in zip(names, pools, strict=True))
    )
