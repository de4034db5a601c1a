"""Tests ops on pools whose blocks are split over devices: each attends to its own blocks, and no pool is gathered."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_jax
from paged_jax import _dispatch
from paged_jax.engine import Engine, SamplingParams
from paged_jax.engine.sampling import Kind
from tests import engine_model, test_partition
from tests.conftest import QUICK_COMPILE
from tests.engine_checks import BLOCK_SIZE, CONFIG, PROMPTS
from tests.engine_checks import NUM_BLOCKS as ENGINE_BLOCKS
from tests.every_op import OPS, pools_written
from tests.test_partition import ARRAYS, NUM_BLOCKS, bind, place

POOLS = "key_cache", "value_cache", "latent_cache"
SPLIT_OPS = [op for op in OPS if op not in ("paged_attention_v2", "swap_blocks", "paged_attention")]


def make_mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((2, 2, 2), ("dp", "dcp", "tp"), axis_types=(axis_type,) * 3, devices=jax.devices("cpu"))


def specs_of(op, names, seqs=None, heads="tp", layout="hnd"):
    """Blocks over "dcp", heads over `heads`, a decode op's sequences over `seqs`."""

    def spec(name, base):
        if name in POOLS or (name in ("k_scale", "v_scale") and ARRAYS[name].ndim == 3):
            return P("dcp", *base[1:])
        return base

    return [spec(*x) for x in zip(names, test_partition.specs_of(op, names, seqs, heads, layout), strict=True)]


def without_distances(op):
    """The op's arrays without ALiBi, with which blocks are not split."""
    fun, names, arrays = bind(op)
    if "alibi_slopes" not in names:
        return fun, names, arrays
    place_of = names.index("alibi_slopes")

    def without(*arrays):
        zeros = None
        return _call(op, names, (*arrays[:place_of], zeros, *arrays[place_of:]))

    return without, [n for n in names if n != "alibi_slopes"], [x for i, x in enumerate(arrays) if i != place_of]


def _call(op, names, arrays, **static):
    positional, _, keywords = OPS[op]
    named = dict(zip(names[len(positional) :], arrays[len(positional) :], strict=True))
    return getattr(paged_jax, op)(*arrays[: len(positional)], **named, **keywords | static)


def assert_no_pool_is_gathered(compiled):
    """Only results and new tokens are exchanged, and no device makes room for another one's pool."""
    local_pool = ARRAYS["key_cache"].nbytes // 4
    assert compiled.memory_analysis().temp_size_in_bytes < local_pool / 2
    assert not re.findall("all-gather|collective-permute|all-to-all", compiled.as_text())


def assert_same(actual, wanted):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        if a.ndim == 4 and a.shape[0] == NUM_BLOCKS:
            np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("op", "axis_type"),
    [(op, (AxisType.Auto, AxisType.Explicit)[i % 2]) for i, op in enumerate(SPLIT_OPS)],
)
def test_blocks_may_be_split(op, axis_type):
    fun, names, arrays = without_distances(op)
    wanted = jax.jit(fun)(*arrays)
    placed = place(arrays, specs_of(op, names), make_mesh(axis_type))
    compiled = jax.jit(fun).lower(*placed).compile()
    assert_no_pool_is_gathered(compiled)
    results = compiled(*placed)
    assert_same(results, wanted)
    for x in jax.tree.leaves(results):
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(x)[shard.index])  # the same bits on every device


def test_blocks_of_partitions_are_gathered():
    """Partitions are those of whole sequences."""
    fun, names, arrays = without_distances("paged_attention_v2")
    placed = place(arrays, specs_of("paged_attention_v2", names), make_mesh(AxisType.Explicit))
    assert_same(jax.jit(fun)(*placed), jax.jit(fun)(*arrays))


@pytest.mark.parametrize("seqs", ["dp", "dcp"])
def test_sequences_are_split_over_other_devices(seqs):
    """Devices that share a sequence's blocks must have the same sequences: over "dcp" these are gathered."""
    fun, names, arrays = without_distances("paged_attention_v1")
    placed = place(arrays, specs_of("paged_attention_v1", names, seqs), make_mesh())
    assert_same(jax.jit(fun)(*placed), jax.jit(fun)(*arrays))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("op", "layout"),
    [("ragged_paged_attention", "hnd"), ("write_and_attend", "nhd")],
)
def test_sinks_count_once_and_scales_of_slots_are_split(op, layout):
    _, names, arrays = bind(op, ("sinks", "k_scale", "v_scale"), layout=layout)
    keep = [i for i, name in enumerate(names) if name != "alibi_slopes"]
    names, arrays = [names[i] for i in keep], [arrays[i] for i in keep]

    def fun(*arrays):
        return _call(op, names, arrays, layout=layout)

    placed = place(arrays, specs_of(op, names, layout=layout), make_mesh())
    compiled = jax.jit(fun).lower(*placed).compile()
    assert_no_pool_is_gathered(compiled)
    assert_same(compiled(*placed), jax.jit(fun)(*arrays))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("op", ["paged_attention", "ragged_paged_attention", "mla_paged_attention"])
def test_sinks_count_where_the_first_device_has_no_block(op):
    """Nor do they count for a row without tokens."""
    _, names, arrays = bind(op, ("sinks",))
    half, named = NUM_BLOCKS // 2, dict(zip(names, arrays, strict=True))
    named.pop("alibi_slopes", None)
    named["block_tables"] = named["block_tables"] % half + half
    static = {"causal": False} if "query_start_loc" in named else {}
    names, arrays = list(named), list(named.values())

    def fun(*arrays):
        return _call(op, names, arrays, **static | {"return_lse": True})

    out, lse = jax.jit(fun)(*place(arrays, specs_of(op, names), make_mesh()))
    assert_same((out, lse), jax.jit(fun)(*arrays))
    assert np.isneginf(lse).any()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("op", ["paged_attention", "ragged_paged_attention"])
def test_blocks_over_two_axes_with_sinks_and_bounded_lengths(op):
    """The axes' order is not the mesh's."""
    _, names, arrays = bind(op, ("sinks",))
    keep = [i for i, name in enumerate(names) if name != "alibi_slopes"]
    names, arrays = [names[i] for i in keep], [arrays[i] for i in keep]
    max_seq_len = 13 if op == "paged_attention" else 16  # less than the longest sequence, and no less

    def fun(*arrays):
        return _call(op, names, arrays, max_seq_len=max_seq_len)

    placed = place(arrays, [P(("tp", "dp")) if name in POOLS else P() for name in names], make_mesh())
    assert_same(jax.jit(fun)(*placed), jax.jit(fun)(*arrays))


@pytest.mark.slow_on_cpu
def test_the_vllm_layout():
    positional, _, keywords = OPS["ragged_paged_attention"]
    arrays = [jnp.asarray(ARRAYS[name]) for name in positional]
    hnd = arrays[1]
    arrays[1] = hnd.reshape(*hnd.shape[:3], -1, 4).swapaxes(2, 3)
    arrays[2] = arrays[2].swapaxes(2, 3)

    def fun(*arrays):
        return paged_jax.ragged_paged_attention(*arrays, layout="vllm", **keywords)

    specs = [P("dcp", "tp") if name in POOLS else P(None, "tp") if name == "tokens" else P() for name in positional]
    placed = place(arrays, specs, make_mesh())
    assert_same(jax.jit(fun)(*placed), jax.jit(fun)(*arrays))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [False, True])
def test_contexts_without_new_blocks_on_a_device(causal):
    """All blocks of one sequence lie on one device, and a sequence has no context at all.

    Each device's first and last blocks are among them.
    """
    rng, half = np.random.default_rng(0), NUM_BLOCKS // 2
    tables = np.array([[3, 1, 0, 2], [NUM_BLOCKS - 1, 5, 6, 7], [half, half - 1, 8, 700]], np.int32)
    lens, starts = np.array([16, 3, 14], np.int32), np.array([0, 1, 4, 10], np.int32)
    query = rng.standard_normal((12, 8, 16), np.float32)
    arrays = [query, ARRAYS["key_cache"], ARRAYS["value_cache"], tables, lens, starts]

    def fun(*arrays):
        return paged_jax.ragged_paged_attention(*arrays, causal=causal, return_lse=True)

    specs = [P(), P("dcp"), P("dcp"), P(), P(), P()]
    assert_same(jax.jit(fun)(*place(arrays, specs, make_mesh())), jax.jit(fun)(*arrays))


@pytest.mark.parametrize(("lens", "starts"), [((5, 1, 16, 9), (0, 1, 2, 3, 4)), ((0, 16, 0, 0), (0, 0, 7, 7, 7))])
def test_latents_of_many_short_prompts_and_of_a_long_one(lens, starts):
    """Each prompt has blocks of its own in the pool of new latents; its last one may be partly filled."""
    arrays = dict(ARRAYS, seq_lens=np.array(lens, np.int32), query_start_loc=np.array(starts, np.int32))
    _, names, _ = bind("ragged_mla_attention")
    given = [arrays[name][: starts[-1]] if name == "latent_tokens" else arrays[name] for name in names]

    def fun(*arrays):
        return _call("ragged_mla_attention", names, arrays)

    placed = place(given, [P("dcp") if name in POOLS else P() for name in names], make_mesh())
    assert_same(jax.jit(fun)(*placed), jax.jit(fun)(*given))


def test_a_cache_of_as_many_bytes_holds_new_tokens_as_they_are():
    """float16 saturates bfloat16, but no scale divides what it holds: attention alone multiplies by the scales."""
    names, *_ = OPS["write_and_attend"]
    dtypes = [jnp.float16 if name in POOLS else jnp.bfloat16 if ARRAYS[name].ndim == 3 else jnp.int32 for name in names]
    arrays = [jnp.asarray(ARRAYS[name], dtype) for name, dtype in zip(names, dtypes, strict=True)]

    def fun(*arrays):
        return paged_jax.write_and_attend(*arrays, k_scale=0.5, v_scale=4.0)

    placed = place(arrays, [P("dcp") if name in POOLS else P() for name in names], make_mesh())
    for found, wanted in zip(jax.jit(fun)(*placed), jax.jit(fun)(*arrays), strict=True):
        np.testing.assert_allclose(found.astype(jnp.float32), wanted.astype(jnp.float32), rtol=0.02, atol=0.02)


def test_lengths_of_zero_on_all_devices():
    arrays = [ARRAYS[name] for name in ("query", *POOLS[:2], "block_tables")] + [np.zeros(4, np.int32)]
    placed = place(arrays, [P(), P("dcp"), P("dcp"), P(), P()], make_mesh())
    out, lse = jax.jit(lambda *x: paged_jax.paged_attention(*x, return_lse=True))(*placed)
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("op", ["write_to_paged_cache", "write_and_attend", "copy_blocks"])
def test_donated_pools_are_updated_in_place(op):
    fun, names, arrays = without_distances(op)
    placed = place(arrays, specs_of(op, names), make_mesh())
    pools = pools_written(op)
    before = [s.data.unsafe_buffer_pointer() for i in pools for s in placed[i].addressable_shards]
    results = jax.jit(fun, donate_argnums=pools)(*placed)
    assert before == [s.data.unsafe_buffer_pointer() for x in results[-2:] for s in x.addressable_shards]


def test_copies_go_from_device_to_device():
    """NaN of any payload, in caches of 8 bits too."""
    bits = np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, 4, 4, 16), np.uint8)
    cache = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float8_e4m3fn)
    pairs = [[0, 1000], [1000, 3], [1, 2], [-1, 7], [1023, 600], [511, 512], [512, 511], [9, 1024], [1024, 8]]
    mapping = np.array(pairs, np.int32)  # two of them name a block past the pool
    placed = place([cache, cache, mapping], [P("dcp", "tp"), P("dcp", "tp"), P()], make_mesh())
    key_cache, _ = jax.jit(paged_jax.copy_blocks)(*placed)
    wanted = bits.copy()
    for source, destination in mapping[((mapping >= 0) & (mapping < NUM_BLOCKS)).all(axis=1)]:
        wanted[destination] = bits[source]
    np.testing.assert_array_equal(jax.lax.bitcast_convert_type(key_cache, jnp.uint8), wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "option",
    [
        {"sliding_window": 3},
        {"alibi_slopes": ARRAYS["alibi_slopes"]},
        {"block_sparse": paged_jax.BlockSparse(1, 3, 4)},
    ],
)
def test_options_about_distances_still_hold(option):
    """With these the pool is gathered, as its blocks cannot be split."""
    arrays = [ARRAYS[name] for name in ("query", *POOLS[:2], "block_tables", "seq_lens")]

    def fun(*arrays):
        return paged_jax.paged_attention(*arrays, **option)

    placed = place(arrays, [P(), P("dcp"), P("dcp"), P(), P()], make_mesh())
    assert_same(jax.jit(fun)(*placed), jax.jit(fun)(*arrays))


def test_cross_lowers_for_cuda():
    fun, names, arrays = without_distances("paged_attention")
    placed = place(arrays, specs_of("paged_attention", names), make_mesh())
    assert all(isinstance(x.sharding, NamedSharding) for x in placed)
    jax.jit(fun).trace(*placed).lower(lowering_platforms=("cuda",))


def test_an_implementation_by_name_computes_the_op_alone():
    """Mosaic GPU has no op that only writes, and where blocks are split nobody asks it to write."""
    _, names, arrays = bind("write_and_attend")
    keep = [i for i, name in enumerate(names) if name != "alibi_slopes"]
    names, arrays = [names[i] for i in keep], [arrays[i] for i in keep]
    arrays = [jnp.tile(x, 8).astype(jnp.bfloat16) if x.shape[-1] == 16 else x for x in arrays]
    arrays = [x.repeat(2, axis=2) if x.ndim == 4 else x for x in arrays]

    def fun(*arrays):
        return _call("write_and_attend", names, arrays, implementation="mosaic_gpu")

    placed = place(arrays, specs_of("write_and_attend", names), make_mesh(AxisType.Explicit))
    jax.jit(fun).trace(*placed).lower(lowering_platforms=("cuda",))


@pytest.mark.slow_on_cpu
def test_xla_by_name_computes_every_part(monkeypatch):
    """Also the part of the new tokens, which is another op."""
    _, names, arrays = without_distances("ragged_paged_attention")
    asked, load = set(), _dispatch._load
    monkeypatch.setattr(_dispatch, "_load", lambda name, op: asked.add((name, op)) or load(name, op))

    def fun(*arrays):
        return _call("ragged_paged_attention", names, arrays, implementation="xla")

    jax.jit(fun).trace(*place(arrays, specs_of("ragged_paged_attention", names), make_mesh(AxisType.Explicit)))
    assert asked == {("xla", "ragged_paged_attention"), ("xla", "prefix_attention")}


def test_the_engine_takes_blocks_of_each_device_in_turn(weights):
    """Its tokens are the model's own; it swaps nothing, as the host has whole blocks."""
    windows = (None,) * engine_model.LAYERS
    step = functools.partial(engine_model.step, windows=windows)
    mesh = jax.make_mesh((2,), ("dcp",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, P("dcp")))
    caches = jax.tree.map(put, engine_model.make_caches(ENGINE_BLOCKS, BLOCK_SIZE))
    weights = jax.device_put(weights, NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match="num_host_blocks needs pools whose blocks are not split"):
        Engine(step, weights, caches, CONFIG)
    config = dataclasses.replace(CONFIG, num_host_blocks=0)
    with engine_model.drawing(Kind.GREEDY):
        engine = Engine(step, weights, caches, config, compiler_options=QUICK_COMPILE)
    reference = engine_model.Reference(weights, windows)
    found = engine.generate(PROMPTS, SamplingParams(max_tokens=6))
    for prompt, (completion,) in zip(PROMPTS, found, strict=True):
        assert completion.token_ids == reference.greedy(prompt, 6)
    engine.add_request(PROMPTS[-2], SamplingParams(max_tokens=2))
    engine.step()
    table = engine._blocks.managers[0].state.block_tables
    owners = table[table >= 0] // (ENGINE_BLOCKS // 2)
    assert abs((owners == 0).sum() - (owners == 1).sum()) <= 1


def test_new_tokens_in_pools_of_8_bits():
    """Prompts in bfloat16 over float8: each device scales the new tokens that it has before it gives them away."""
    op = "ragged_paged_attention"
    names = [*OPS[op][0], "k_scale", "v_scale"]
    dtypes = {"tokens": jnp.bfloat16, **dict.fromkeys(POOLS, jnp.float8_e4m3fn)}
    arrays = [jnp.asarray(ARRAYS[name], dtypes.get(name)) for name in names]

    def fun(*arrays):
        return _call(op, names, arrays)

    placed = place(arrays, specs_of(op, names), make_mesh(AxisType.Explicit))
    found, wanted = jax.jit(fun)(*placed), jax.jit(fun)(*arrays)
    np.testing.assert_allclose(found.astype(jnp.float32), wanted.astype(jnp.float32), rtol=0.02, atol=0.02)
