"""Tests `paged_jax.compat.rpa` against its definition, over the parameters of tpu-inference's own tests.

On a GPU the tests run its kernels; the Triton kernels run in Triton's interpreter too (test_triton.py).
"""

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
from paged_jax.compat import rpa
from paged_jax.options import Interleaved
from tests import cuda_programs, rpa_cases
from tests.rpa_cases import Case
from tests.test_partition import COLLECTIVES, make_mesh

# The first large case; a few others are slow, and GPUs alone run the rest.
FIRST = ("complex-bfloat16-17-12x2-80",)
MORE = {"window-hd64-128", "complex-hd64-float32-1-5x1"}


def run(function, *arrays, **options):
    """Runs a call as users do: jitted, with the pool donated."""
    jitted = jax.jit(functools.partial(function, **options), donate_argnums=3)
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, jitted(*arrays))


# GPUs alone run these, which differ from others in what the ops' own tests have.
ON_GPUS = "plain-packed", "padded-hd64"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", [case for case in rpa_cases.SMALL if case.name not in ON_GPUS], ids=str)
def test_small(case):
    rpa_cases.hold(case, run)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case.name not in FIRST))
        for case in rpa_cases.GRID
        if case.name in {*FIRST, *MORE}
    ],
    ids=str,
)
def test_the_parameters_of_tpu_inference(case):
    rpa_cases.hold(case, run)


def large_pool(case, times=64):
    """A case's arrays, with a pool beside which all other memory of the call is small."""
    arrays = [jnp.asarray(x) for x in rpa_cases.make(case).arrays]
    arrays[3] = jnp.tile(arrays[3], (times, *[1] * (arrays[3].ndim - 1)))
    return arrays


def pool_copies(text, pool):
    """Finds the copies of a whole pool in a compiled program, whatever its axes are."""
    found = []
    for line in text.splitlines():
        m = re.search(r"= \w+\[([\d,]+)\]\S* (copy|copy-start|transpose|convert|concatenate|pad|slice)\(", line)
        if m and np.prod([int(n) for n in m.group(1).split(",")]) >= pool.size // 2:
            found.append(line)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "plain-bfloat16",
        *(pytest.param(f"padded-{x}", marks=pytest.mark.slow_on_cpu) for x in ("lanes", "rows")),
    ],
)
@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_donated_pool_is_read_and_written_in_place(name, platform):
    case = rpa_cases.BY_NAME[name]
    with jax.default_device(jax.devices(platform)[0]):
        arrays = large_pool(case)
        pool = arrays[3]
        fun = functools.partial(rpa_cases.function(case), **dict(case.options))
        compiled = jax.jit(fun, donate_argnums=3).lower(*arrays).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == pool.nbytes
        assert memory.temp_size_in_bytes < pool.nbytes // 2
        assert not pool_copies(compiled.as_text(), pool)
        before = pool.unsafe_buffer_pointer()
        assert compiled(*arrays)[1].unsafe_buffer_pointer() == before


@pytest.mark.slow
@pytest.mark.skipif(cuda_programs.lacks() is not None, reason=str(cuda_programs.lacks()))
def test_the_program_for_a_gpu_copies_no_pool(tmp_path):
    """Nothing but bitcasts stands between the donated pool and the two kernels; there is no GPU here."""
    of_hopper = ["hopper-ragged", "hopper-decode-8-bits"]
    calls = [("triton", name) for name in ("padded-hd64", "q-scale")]
    calls += [("mosaic_gpu", name) for name in of_hopper]
    for (_, name), facts in zip(calls, cuda_programs.described(calls, tmp_path), strict=True):
        assert facts["aliased"] == facts["pool"], name
        assert facts["scratch"] < facts["pool"] // (4 if name in of_hopper else 100), name
        assert set(facts["on_pools"]) - {"bitcast"} == {"parameter", "custom-call"}, name
        if name not in of_hopper:  # XLA may drop a cast to a narrower dtype and back
            assert facts["rounds"] == (name == "q-scale"), name


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "triton"])
@pytest.mark.parametrize("case", [*rpa_cases.SMALL, *rpa_cases.HOPPER, *rpa_cases.GRID[::5]], ids=str)
def test_on_a_gpu(case, implementation):
    def run_there(function, *arrays, **options):
        jitted = jax.jit(functools.partial(function, implementation=implementation, **options), donate_argnums=3)
        return jax.tree.map(np.asarray, jitted(*arrays))

    rpa_cases.hold(case, run_there)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_on_sharded_arrays_each_device_computes_its_heads(axis_type):
    case = Case("sharded", rpa_cases.SMALL[0].lens, (8, 4), 64, "float32", pool="plain", sink=True)
    made = rpa_cases.make(case)
    whole = run(rpa.ragged_paged_attention, *made.arrays)
    mesh, heads = make_mesh(axis_type), P(None, "tp")
    specs = [heads, heads, heads, P(None, None, "tp"), P(), P(), P(), P(), P("tp")]
    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(made.arrays, specs, strict=True)]
    compiled = jax.jit(rpa.ragged_paged_attention, donate_argnums=3).lower(*arrays).compile()
    assert not re.search(COLLECTIVES, compiled.as_text())
    out, pool = compiled(*arrays)
    assert out.sharding.is_equivalent_to(arrays[0].sharding, 3)
    assert pool.sharding.is_equivalent_to(NamedSharding(mesh, specs[3]), 5)
    np.testing.assert_allclose(out, whole[0], atol=2e-6)
    np.testing.assert_array_equal(pool, whole[1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["padded-rows", "padded-hd64"])
def test_a_pool_with_padded_rows_stays_whole(name):
    case, mesh = rpa_cases.BY_NAME[name], make_mesh()

    def on_a_mesh(function, *arrays, **options):
        arrays = [jax.device_put(x, NamedSharding(mesh, P())) for x in arrays]
        arrays[3] = jax.device_put(arrays[3], NamedSharding(mesh, P(None, None, None, "dp")))
        return run(function, *arrays, **options)

    rpa_cases.hold(case, on_a_mesh)


@pytest.mark.slow
def test_under_vmap_and_in_a_shard_map():
    case = rpa_cases.BY_NAME["plain-packed"]
    made = rpa_cases.make(case)
    call = functools.partial(rpa.ragged_paged_attention, **made.options)
    batch = [np.stack([x, x]) for x in made.arrays]
    out, pool = jax.jit(jax.vmap(call))(*batch)
    one = run(rpa.ragged_paged_attention, *made.arrays, **made.options)
    for i in range(2):
        np.testing.assert_array_equal(out[i], one[0])
        np.testing.assert_array_equal(np.asarray(pool[i]).view(np.uint8), one[1].view(np.uint8))
    mesh, rows = make_mesh(), P("tp")
    mapped = jax.shard_map(
        lambda *arrays: jax.tree.map(lambda x: x[None], call(*(x[0] for x in arrays))),
        mesh=mesh, in_specs=rows, out_specs=rows,
    )  # fmt: skip
    out, pool = jax.jit(mapped)(*[np.stack([x] * mesh.shape["tp"]) for x in made.arrays])
    np.testing.assert_array_equal(out[-1], one[0])


def test_keywords_for_tpus_change_nothing():
    made = rpa_cases.make(rpa_cases.BY_NAME["plain-bfloat16"])
    tuning = {name: None for name in rpa.TpuTuning.__annotations__ if name != "skip_kv_mask"}
    tuning |= {"m_block_sizes": (64, 256, 32, 128), "vmem_limit_bytes": 2**20, "skip_kv_mask": False}
    plain, tuned = (run(rpa.ragged_paged_attention, *made.arrays, **more) for more in ({}, tuning))
    np.testing.assert_array_equal(plain[0], tuned[0])


def test_pages_may_have_a_row_for_each_sequence():
    made = rpa_cases.make(rpa_cases.BY_NAME["plain-bfloat16"])
    arrays = list(made.arrays)
    arrays[5] = arrays[5].reshape(len(arrays[4]), -1)
    out, _ = run(rpa.ragged_paged_attention, *arrays, **made.options, out_dtype=jnp.float32)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, run(rpa.ragged_paged_attention, *made.arrays, **made.options)[0])


@pytest.mark.parametrize(
    ("num_kv_heads", "dtype", "rows"),
    [
        (1, "bfloat16", (1, 2)),
        (3, "bfloat16", (3, 2)),
        (1, "float32", (2, 1)),
        (1, "int8", (1, 4)),
        (2, "int8", (1, 4)),
        (3, "float8_e4m3fn", (2, 4)),
    ],
)
def test_rows_of_keys_and_values_are_padded_together(num_kv_heads, dtype, rows):
    assert rpa.get_kv_cache_shape(4, 16, num_kv_heads, 80, jnp.dtype(dtype)) == (4, 16, *rows, 128)


def test_tokens_past_the_table_and_beside_the_batch_are_not_written():
    """The table has room for token 31 of a sequence's new tokens, but not for token 32; the last token is padding."""
    tokens = jnp.ones((3, 1, 128), jnp.bfloat16)
    pool = jnp.zeros(rpa.get_kv_cache_shape(4, 16, 1, 128, jnp.bfloat16), jnp.bfloat16)
    step = [np.array(x, np.int32) for x in ([33, 9], [3, 1, 0, 2], [0, 2, 3], [1, 1, 1])]
    _, written = rpa.ragged_paged_attention(tokens, tokens, tokens, pool, *step, sm_scale=1.0)
    assert np.argwhere(np.asarray(written).any(axis=(2, 3, 4))).tolist() == [[1, 15]]


def test_what_the_op_behind_it_is_asked(monkeypatch):
    """It gets the bounds, and need not give lse, whose -inf of padding would be an error under `jax_debug_infs`."""
    asked, call = {}, _dispatch.call

    def spy(op, operands, **more):
        asked[op] = operands, more
        return call(op, operands, **more)

    monkeypatch.setattr(_dispatch, "call", spy)
    arrays = rpa_cases.make(rpa_cases.BY_NAME["plain-bfloat16"]).arrays
    bounded = functools.partial(rpa.ragged_paged_attention, max_seq_len=70, max_query_len=9, sm_scale=2.0)
    jax.eval_shape(bounded, *arrays)
    operands, more = asked["ragged_paged_attention"]
    assert (operands.options.max_seq_len, operands.options.max_query_len) == (70, 9)
    assert more == {"implementation": None, "unwanted": (1,)}
    assert asked["write_to_paged_cache"][1] == {"implementation": None, "layout": operands.options.layout}


def test_what_later_rows_hold_is_not_read():
    """Two of four rows have sequences; the tables of the others may hold anything, and so may lengths and starts."""
    step = [np.array(x, np.int32) for x in ([3, 20, 99, 7], [5, 0, 1, 2, 9, 9, 9, 9], [0, 3, 4, 90, -1], [0, 0, 2])]
    _, lens, starts = rpa._batch(*step)
    assert lens.tolist() == [3, 20, 0, 0]
    assert starts.tolist() == [0, 3, 4, 4, 4]


def test_a_pool_of_as_many_bytes_holds_new_tokens_as_they_are():
    """float16 saturates bfloat16, but no scale divides what it holds."""
    tokens, pool = jnp.arange(24, dtype=jnp.bfloat16).reshape(3, 1, 8), jnp.zeros((2, 4, 2, 8), jnp.float16)
    slots = jnp.array([1, -1, 6], jnp.int32)
    written = rpa._write(tokens, tokens + 1, pool, slots, Interleaved(), 0.5, 0.25, None)
    np.testing.assert_array_equal(written[0, 1], np.add(np.arange(8), [[0], [1]]))
    np.testing.assert_array_equal(written[1, 2], np.add(np.arange(16, 24), [[0], [1]]))


def test_xla_may_not_drop_the_rounding_of_queries():
    """Where it is allowed excess precision, it drops a cast to a narrower dtype and back, but not around a barrier."""
    text = jax.jit(lambda x: rpa._quantised(x, 0.5, jnp.float8_e4m3fn)).lower(jnp.ones((2, 8), jnp.bfloat16)).as_text()
    assert re.search(r"optimization_barrier .*: tensor<2x8xf8E4M3FN>", text)


def test_a_pool_of_32_bits_keeps_its_axes_in_memory():
    """A row of its own for each element that a TPU packs: XLA would take this axis for the outermost one."""
    text = jax.jit(lambda x: rpa._as_given(x, (2, 4, 2, 1, 128))).lower(jnp.zeros((2, 4, 2, 128))).as_text()
    assert "LayoutConstraint" in text


def test_it_computes_what_separate_pools_give():
    case = rpa_cases.BY_NAME["plain-bfloat16"]
    made = rpa_cases.make(case)
    key_cache, value_cache = made.pool[:, :, ::2], made.pool[:, :, 1::2]
    kv_lens, pages, starts = (x for i, x in enumerate(made.arrays) if i in (4, 5, 6))
    count = len(case.lens)
    tables = pages.reshape(len(kv_lens), -1)[:count]
    separate = run(
        lambda query, key_cache, value_cache, _, *step: paged_jax.ragged_paged_attention(
            query, key_cache, value_cache, *step, layout="nhd", scale=0.2
        ),
        made.arrays[0], key_cache, value_cache, np.zeros(1), tables, kv_lens[:count], starts[: count + 1],
    )  # fmt: skip
    np.testing.assert_array_equal(separate, run(rpa.ragged_paged_attention, *made.arrays, **made.options)[0])


F8 = jnp.float8_e4m3fn


def in_host_memory(pool):
    cpu = jax.devices("cpu")[0]
    return jax.device_put(pool, jax.sharding.SingleDeviceSharding(cpu, memory_kind="pinned_host"))


WRONG = [
    (0, lambda x: x[0], ValueError, r"queries must have shape \[max_num_tokens, num_q_heads, head_dim\], got"),
    (0, lambda x: x.astype(F8), TypeError, "queries must have dtype float16 or bfloat16 or float32, got float8"),
    (1, lambda x: x[:3], ValueError, r"keys must have shape \[max_num_tokens, num_kv_heads, head_dim\] = \(21, "),
    (1, lambda x: x.astype(F8), TypeError, "keys must have dtype .*, got float8_e4m3fn"),
    (2, lambda x: x[:, :1], ValueError, r"values must have shape .* = \(21, 2, 64\), got \(21, 1, 64\)"),
    (2, lambda x: x.astype(np.float32), TypeError, "values must have keys' dtype bfloat16, got float32"),
    (3, lambda x: x[0, 0], ValueError, r"kv_cache must have shape \[num_pages, page_size, 2 \* num_kv_heads, "),
    (3, lambda x: x[:, :3], ValueError, "page_size must be one of .*, got 3"),
    (3, lambda x: x[:, :, :2], ValueError, "kv_cache must have 2 \\* num_kv_heads = 4 rows a slot, .* got 2 in"),
    (3, lambda x: x[..., :48], ValueError, "kv_cache must have head_dim = 64 elements a row, or the next multiple"),
    (3, lambda x: x.astype(np.float64), TypeError, "kv_cache must have dtype .*, got float64"),
    (3, lambda x: in_host_memory(x), ValueError, "kv_cache must be in device memory, got one in host memory"),
    (4, lambda x: x.astype(np.float32), TypeError, "kv_lens must have dtype .*, got float32"),
    (5, lambda x: x[:-1], ValueError, r"page_indices must have shape .*, max_num_seqs is 7, got"),
    (6, lambda x: x[:-1], ValueError, r"cu_q_lens must have shape \[max_num_seqs \+ 1\] = \(8,\), got \(7,\)"),
    (7, lambda x: x[:2], ValueError, r"distribution must have shape \[3\] = \(3,\), got \(2,\)"),
]


@pytest.mark.parametrize(("place", "change", "error", "words"), WRONG, ids=[words[:24] for *_, words in WRONG])
def test_wrong_arrays_are_refused_in_words(place, change, error, words):
    arrays = list(rpa_cases.make(rpa_cases.BY_NAME["plain-bfloat16"]).arrays)
    arrays[place] = change(arrays[place])
    with pytest.raises(error, match=words):
        rpa.ragged_paged_attention(*arrays)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sliding_window": 0}, ValueError, "sliding_window must be at least 1, got 0"),
        ({"soft_cap": 0.0}, ValueError, "cap must be from .* got 0.0"),
        ({"use_causal_mask": False, "sliding_window": 3}, ValueError, "sliding_window must be None with causal=False"),
        ({"skip_kv_mask": True}, ValueError, "skip_kv_mask must be False with use_causal_mask=True"),
        ({"bkv_sz": 3}, TypeError, "unexpected keyword argument 'bkv_sz'; keywords that are taken and ignored: mask_"),
        ({"update_kv_cache": 1}, TypeError, "update_kv_cache must be a static bool, got int"),
        ({"implementation": "mosaic_tpu"}, ValueError, "implementation must be one of"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_in_words(options, error, words):
    arrays = rpa_cases.make(rpa_cases.BY_NAME["plain-bfloat16"]).arrays
    with pytest.raises(error, match=words):
        rpa.ragged_paged_attention(*arrays, **options)


def test_an_int8_pool_needs_scales_and_takes_no_q_scale():
    made = rpa_cases.make(rpa_cases.BY_NAME["new-tokens-wider"])
    with pytest.raises(ValueError, match="k_scale must be given for caches of int8"):
        rpa.ragged_paged_attention(*made.arrays)
    with pytest.raises(ValueError, match=r"q_scale must be None for a pool of int8, got 0\.5"):
        rpa.ragged_paged_attention(*made.arrays, **made.options, q_scale=0.5)


def test_heads_of_64_need_their_pool():
    arrays = rpa_cases.make(rpa_cases.BY_NAME["plain-bfloat16"]).arrays
    with pytest.raises(ValueError, match=r"kv_cache must have shape .*, 128\] or .*, packing, 128\], got"):
        rpa.ragged_paged_attention_hd64(*arrays)
    arrays = rpa_cases.make(rpa_cases.BY_NAME["not-updated"]).arrays
    with pytest.raises(ValueError, match=r"queries must have shape \[max_num_tokens, num_q_heads, 64\], got"):
        rpa.ragged_paged_attention_hd64(*arrays)
