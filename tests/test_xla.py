"""Tests the XLA implementation beyond numbers: equal bits, max_seq_len, pools in place, causal=False, sharding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import paged_jax
from tests import inputs, oracle, plain
from tests.cases import LAYOUTS, Case, Sparse
from tests.conftest import FULL_COMPILE

CALL = {"implementation": "xla"}


# A row of v2 has the same bits alone and in a batch.


@pytest.mark.slow_on_cpu
def test_v2_is_bit_equal_alone_and_in_a_batch_whatever_the_tables_width():
    lens = (37, 600, 0)
    case = Case("alone", 4, 2, 64, 16, "bfloat16", seq_lens=lens, query_lens=None)
    call = inputs.make(case).decode
    run = jax.jit(
        partial(
            paged_jax.paged_attention_v2,
            partition_size=64,
            return_residuals=True,
            return_lse=True,
            **CALL,
        ),
        compiler_options=FULL_COMPILE,
    )
    together = run(**call)
    widest = call["block_tables"].shape[1]
    for row, columns in ((0, 3), (0, widest), (1, widest), (2, widest)):
        one = {name: call[name][row : row + 1] for name in ("query", "seq_lens")}
        tables = call["block_tables"][row : row + 1, :columns]
        alone = run(**{**call, **one, "block_tables": tables})
        for name, a, b in zip(("out", "lse", "exp_sums", "max_logits", "tmp_out"), alone, together, strict=True):
            a, b = np.asarray(a)[0], np.asarray(b)[row]
            b = b[:, : a.shape[1]] if name in ("exp_sums", "max_logits", "tmp_out") else b
            np.testing.assert_array_equal(a, b, err_msg=f"{name} of row {row} in a table of {columns}", strict=True)


# The memory and the time of v2 depend on the contexts, not on the length of a partition.


def test_a_long_partition_takes_no_more_memory_than_a_short_one():
    call = inputs.make(Case("long", 4, 2, 64, 16, seq_lens=(37, 100), query_lens=None)).decode

    def temporary_bytes(partition_size):
        v2 = partial(paged_jax.paged_attention_v2, partition_size=partition_size, **CALL)
        return jax.jit(v2).lower(**call).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(65536) == temporary_bytes(256)


def test_a_partition_may_end_beyond_int32():
    """The window spares the tokens of the first partition, which are too many for a test."""
    seq_len = 2**30 + 4
    block_tables = np.zeros((1, 2**30 // 256 + 1), np.int32)
    cache = jnp.broadcast_to(jnp.arange(256, dtype=jnp.float32)[:, None], (1, 1, 256, 8))
    v2 = partial(paged_jax.paged_attention_v2, partition_size=2**30, sliding_window=3, return_residuals=True, **CALL)
    arrays = jnp.zeros((1, 1, 8)), cache, cache, block_tables, np.array([seq_len], np.int32)
    out, exp_sums, *_ = jax.jit(v2)(*arrays)
    np.testing.assert_array_equal(exp_sums, [[[0, 3]]])
    np.testing.assert_allclose(out, np.full((1, 1, 8), 2), rtol=1e-6)  # the mean of the values 1, 2 and 3


# A pattern's numbers may be as large as int32.


def test_a_block_sparse_stride_may_be_the_largest_number():
    """The step is 3 less than the stride, so that head h sees block 3 * h - 1 of those that are not near."""
    pattern = Sparse(1, 2**31 - 1, 8, 2**31 - 4)
    call = inputs.make(Case("strides", 4, 2, 16, 8, seq_lens=(70, 33), query_lens=None)).decode
    out = paged_jax.paged_attention_v1(**call, block_sparse=paged_jax.BlockSparse(*pattern), **CALL)
    exact = oracle.decode(**call, block_sparse=pattern)
    np.testing.assert_allclose(out, exact[0], atol=1e-5)


# No query sees tokens past max_seq_len; without causality it sees all tokens of its sequence.


def ragged_call(case, op):
    """Makes the op's arrays of a case's inputs, and its array options."""
    made = inputs.make(case)
    return getattr(made, op), made.arrays


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bound", [20, 34, 36])
def test_prefix_attention_sees_no_token_past_max_seq_len(bound):
    """Neither cached nor new tokens past the bound are seen; the context of 34 reaches past a bound of 20."""
    case = Case("bounded", 4, 2, 32, 16, seq_lens=(39, 18, 50), query_lens=(5, 18, 1))
    call, _ = ragged_call(case, "prefix")
    out, lse = jax.jit(partial(paged_jax.prefix_attention, max_seq_len=bound, return_lse=True, **CALL))(**call)
    exact, exact_lse = oracle.prefix(**call, max_seq_len=bound)
    np.testing.assert_allclose(np.asarray(out)[: -case.padding], exact[: -case.padding], atol=1e-5)
    np.testing.assert_allclose(np.asarray(lse), exact_lse, atol=1e-5)


# Logits times k_scale may be beyond float32 where logits times k_scale times scale are not.


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axes", [0, 1, 3], ids=["scalar", "head", "slot"])
@pytest.mark.parametrize(("op", "batch"), [("paged_attention_v1", "decode"), ("ragged_paged_attention", "ragged")])
def test_logits_are_finite_where_k_scale_alone_would_make_them_infinite(op, batch, axes):
    case = Case("k-scale", 4, 2, 64, 16, "float32", "float8_e4m3fn", seq_lens=(37, 18), query_lens=(5, 1))
    call, _ = ragged_call(case, batch)
    num_blocks, num_kv_heads, block_size, _ = call["key_cache"].shape
    shape = {0: (), 1: (num_kv_heads,), 3: (num_blocks, num_kv_heads, block_size)}[axes]
    options = {"k_scale": np.full(shape, 2.0**126, np.float32), "scale": 2.0**-126}
    out = getattr(paged_jax, op)(**call, **options, **CALL)
    exact = getattr(oracle, batch)(**call, **options)
    rough = getattr(plain, batch)(**call, scale=1.0)  # the same logits, as the product of the factors is 1
    rows = 2 if batch == "decode" else 6
    plain.assert_close(out[:rows], exact[0][:rows], rough[0][:rows], "out")


# Pools in place.

NUM_BLOCKS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 512, 2, 64, 16
POOL_BYTES = NUM_BLOCKS * NUM_KV_HEADS * HEAD_SIZE * BLOCK_SIZE


def abstract(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def pool_calls(layout, dtype):
    """Yields each op that writes to pools, the shapes of its arrays, and which of them are donated."""
    shapes = inputs.cache_shapes(layout, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE, np.dtype(dtype))
    pools = [abstract(shape, dtype) for shape in shapes]
    query, new = abstract((4, 4, HEAD_SIZE), jnp.float32), abstract((4, NUM_KV_HEADS, HEAD_SIZE), jnp.float32)
    rows, tables, pairs = (abstract(shape, jnp.int32) for shape in ((4,), (4, 8), (3, 2)))
    scales = {"k_scale": 0.5, "v_scale": 0.5}
    write = partial(paged_jax.write_to_paged_cache, layout=layout, **scales, **CALL)
    attend = partial(paged_jax.write_and_attend, layout=layout, **scales, **CALL)
    return {
        "write_to_paged_cache": (write, (new, new, *pools, rows), (2, 3)),
        "write_and_attend": (attend, (query, new, new, *pools, tables, rows, rows), (3, 4)),
        "copy_blocks": (partial(paged_jax.copy_blocks, **CALL), (*pools, pairs), (0, 1)),
        "swap_blocks": (partial(paged_jax.swap_blocks, **CALL), (*pools, *pools, pairs), (2, 3)),
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("op", ["write_to_paged_cache", "write_and_attend", "copy_blocks", "swap_blocks"])
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [*(("int8", layout) for layout in LAYOUTS), pytest.param("float8_e5m2", "hnd", marks=pytest.mark.slow)],
)
def test_pools_of_eight_bits_are_updated_in_place(dtype, layout, op):
    function, arguments, donated = pool_calls(layout, jnp.dtype(dtype))[op]
    memory = jax.jit(function, donate_argnums=donated).lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 2 * POOL_BYTES
    # write_and_attend gathers four tables of 128 tokens in float32, which is half of a pool.
    assert memory.temp_size_in_bytes < (0.75 if op == "write_and_attend" else 0.05) * POOL_BYTES


@pytest.mark.parametrize(
    ("op", "dtype", "count"),
    # A quotient by each scale is one rounding. Bytes of float8 are gathered, and put one by one, in loops.
    [("write_to_paged_cache", "int8", 2), ("write_to_paged_cache", "float8_e5m2", 4), ("write_and_attend", "int8", 2),
     ("write_and_attend", "float8_e5m2", 6), ("copy_blocks", "float8_e5m2", 2)],
)  # fmt: skip
def test_xla_may_neither_move_conversions_out_of_loops_nor_multiply_by_reciprocals(op, dtype, count):
    function, arguments, _ = pool_calls("hnd", jnp.dtype(dtype))[op]
    assert jax.jit(function).lower(*arguments).as_text().count("optimization_barrier") == count


# shard_map with check_vma.


def sharded(function, in_specs, out_specs):
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True))


HEADS, ALL = P(None, "heads"), P()  # every array of the ops below has its heads on axis 1, in layout "hnd"
SHARDED_CASES = [
    Case("sharded-e4m3", 4, 2, 16, 16, "float32", "float8_e4m3fn", seq_lens=(37, 0, 90), query_lens=(5, 0, 33)),
]


def spec_of(name):
    return HEADS if name in ("query", "key", "value", "key_cache", "value_cache") else ALL


def compare(function, out_specs, arrays):
    """Checks that two devices give the same results as one, and pools the same bits; `arrays` are by name."""
    expected = jax.jit(function)(*arrays.values())
    results = sharded(function, tuple(map(spec_of, arrays)), out_specs)(*arrays.values())
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.ndim == 4:
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), strict=True)
        else:  # a product over fewer heads may be summed in another order
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, strict=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", SHARDED_CASES, ids=str)
@pytest.mark.parametrize(
    ("op", "batch", "options", "num_results"),
    [
        ("paged_attention_v1", "decode", {"sliding_window": 20}, 1),
        ("paged_attention_v2", "decode", {"partition_size": 32, "return_lse": True}, 2),
        ("ragged_paged_attention", "ragged", {"return_lse": True}, 2),
        ("prefix_attention", "prefix", {"return_lse": True}, 2),
    ],
)
def test_attention_under_shard_map_with_its_types_checked(op, batch, options, num_results, case):
    arrays = ragged_call(case, batch)[0]

    def function(*values):
        return getattr(paged_jax, op)(**dict(zip(arrays, values, strict=True)), **options, **CALL)

    compare(function, (HEADS,) * num_results if num_results > 1 else HEADS, arrays)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", SHARDED_CASES, ids=str)
@pytest.mark.parametrize("op", ["write_to_paged_cache", "write_and_attend", "copy_blocks", "swap_blocks"])
def test_writes_under_shard_map_with_their_types_checked(op, case):
    decode = inputs.make(case).decode
    key = inputs.rng_of("new").standard_normal((3, 2, 16)).astype(np.float32)
    new = {"key": key, "value": key + 1}
    pools = {name: decode[name] for name in ("key_cache", "value_cache")}
    # Negative slots and pairs are skipped.
    slots = np.array([5, -1, 40], np.int32)
    pairs = np.array([[0, 2], [-1, 3], [1, 4]], np.int32)
    match op:
        case "write_to_paged_cache":
            arrays = {**new, **pools, "slot_mapping": slots}
        case "write_and_attend":
            arrays = {"query": decode["query"], **new, **pools}
            arrays |= {"block_tables": decode["block_tables"], "seq_lens": decode["seq_lens"], "slot_mapping": slots}
        case "copy_blocks":
            arrays = {**pools, "block_mapping": pairs}
        case "swap_blocks":
            arrays = {**pools, "block_mapping": pairs}

    def function(*values):
        call = getattr(paged_jax, op)
        if op == "swap_blocks":
            key_cache, value_cache, pairs = values
            return call(key_cache, value_cache, value_cache, key_cache, pairs, **CALL)
        return call(*values, **CALL)

    compare(function, (HEADS,) * (3 if op == "write_and_attend" else 2), arrays)


def test_a_write_to_a_wider_pool_only_casts():
    values = jnp.full((1, 1, 16), jnp.inf, jnp.bfloat16)
    pool = jnp.zeros((2, 1, 4, 16))
    for cache in paged_jax.write_to_paged_cache(
        values, -values, pool, pool, np.array([5], np.int32), implementation="xla"
    ):
        assert np.isinf(cache[1, 0, 1]).all()


@pytest.mark.parametrize("dtype", [jnp.float8_e5m2, jnp.bfloat16])
def test_the_last_of_many_tokens_for_one_slot_stays(dtype):
    tokens = jnp.arange(100, dtype=jnp.bfloat16)[:, None, None] * jnp.ones((1, 1, 16), jnp.bfloat16)
    pool = jnp.zeros((2, 1, 4, 16), dtype)
    for cache in paged_jax.write_to_paged_cache(
        tokens, tokens, pool, pool, np.full(100, 6, np.int32), implementation="xla"
    ):
        np.testing.assert_array_equal(cache[1, 0, 2], jnp.full(16, 99, dtype))
