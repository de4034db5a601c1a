"""Tests the errors of wrong calls: their type, the argument they name, what was expected and what was given."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from paged_jax import BlockSparse, _checks, _validate, shapes
from paged_jax._static import integer


def decode_arrays(**changes):
    arrays = {
        "query": jnp.zeros((2, 4, 16), jnp.bfloat16),
        "key_cache": jnp.zeros((5, 2, 8, 16), jnp.bfloat16),
        "value_cache": jnp.zeros((5, 2, 8, 16), jnp.bfloat16),
        "block_tables": jnp.zeros((2, 3), jnp.int32),
        "seq_lens": jnp.zeros((2,), jnp.int32),
    }
    return arrays | changes


def write_arrays(**changes):
    arrays = {
        "key": jnp.zeros((3, 2, 16), jnp.bfloat16),
        "value": jnp.zeros((3, 2, 16), jnp.bfloat16),
        "key_cache": jnp.zeros((5, 2, 8, 16), jnp.bfloat16),
        "value_cache": jnp.zeros((5, 2, 8, 16), jnp.bfloat16),
        "slot_mapping": jnp.zeros((3,), jnp.int32),
    }
    return arrays | changes


def vllm_caches():
    return {
        "key_cache": jnp.zeros((5, 2, 2, 8, 8), jnp.bfloat16),
        "value_cache": jnp.zeros((5, 2, 16, 8), jnp.bfloat16),
    }


def int8_caches():
    return {"key_cache": jnp.zeros((5, 2, 8, 16), jnp.int8), "value_cache": jnp.zeros((5, 2, 8, 16), jnp.int8)}


DECODE = [
    ({"query": 3}, TypeError, "query must be an array, got int"),
    ({"query": jnp.zeros((2, 64), jnp.bfloat16)}, ValueError, "query must have shape [num_seqs, num_heads, head_size]"),
    ({"query": jnp.zeros((2, 4, 16), jnp.int32)}, TypeError, "query must have dtype float16 or bfloat16 or float32"),
    ({"query": jnp.zeros((2, 4, 12), jnp.bfloat16)}, ValueError, "head_size must be a multiple of 8 up to 512, got 12"),
    ({"query": jnp.zeros((2, 4, 520), jnp.bfloat16)}, ValueError, "up to 512, got 520"),
    ({"query": jnp.zeros((2, 3, 16), jnp.bfloat16)}, ValueError, "multiple of num_kv_heads = 2, got 3"),
    ({"key_cache": jnp.zeros((5, 2, 8, 16), jnp.int32)}, TypeError, "key_cache must have dtype"),
    ({"key_cache": jnp.zeros((5, 2, 8), jnp.bfloat16)}, ValueError, "key_cache must have shape [num_blocks"),
    ({"key_cache": jnp.zeros((4, 2, 8, 16), jnp.bfloat16)}, ValueError, "= (5, 2, 8, 16), got (4, 2, 8, 16)"),
    ({"value_cache": jnp.zeros((5, 2, 8, 16), jnp.int8)}, TypeError, "value_cache must have key_cache's dtype"),
    ({"key_cache": jnp.zeros((5, 2, 8, 16), jnp.int8)}, TypeError, "value_cache must have key_cache's dtype int8"),
    ({"value_cache": jnp.zeros((5, 2, 3, 16), jnp.bfloat16)}, ValueError, "block_size must be one of"),
    ({"block_tables": jnp.zeros((2, 3), jnp.uint32)}, TypeError, "block_tables must have dtype int32, got uint32"),
    ({"block_tables": jnp.zeros((6,), jnp.int32)}, ValueError, "block_tables must have shape [num_seqs,"),
    ({"seq_lens": jnp.zeros((3,), jnp.int32)}, ValueError, "seq_lens must have shape [num_seqs] = (2,), got (3,)"),
    ({"layout": "bshd"}, ValueError, "layout must be one of ('hnd', 'nhd', 'vllm'), got 'bshd'"),
    ({"layout": "vllm"}, ValueError, "key_cache must have shape [num_blocks, num_kv_heads, head_size // x"),
    ({"implementation": "cuda"}, ValueError, "implementation must be one of"),
    ({"scale": "big"}, TypeError, "scale must be a number or an array of floats, got str"),
    ({"scale": jnp.zeros((2,))}, ValueError, "scale must have shape (), got (2,)"),
    ({"alibi_slopes": jnp.zeros((2,))}, ValueError, "alibi_slopes must have shape [num_heads] = (4,), got (2,)"),
    ({"sinks": jnp.zeros((4,), jnp.int32)}, TypeError, "sinks must be a number or an array of floats, got int32"),
    ({"sliding_window": 0}, ValueError, "sliding_window must be at least 1, got 0"),
    ({"sliding_window": -1}, ValueError, "sliding_window must be at least 1, got -1"),
    ({"sliding_window": 2.5}, TypeError, "sliding_window must be an int, got 2.5"),
    ({"sliding_window": 2**31}, ValueError, "sliding_window must be below 2**31, got 2147483648"),
    ({"scale": 10**400}, ValueError, "scale must be a number that a float can hold, got an int of 1329 bits"),
    ({"scale": 10**39}, ValueError, "scale must fit in float32, got a number beyond 3.4e38"),
    ({"k_scale": np.array([1, -1e39])}, ValueError, "k_scale must fit in float32, got a number beyond 3.4e38"),
    *(
        ({"logits_soft_cap": cap}, ValueError, f"logits_soft_cap must be from 1.2e-38 to 1e+30 or None, got {cap}")
        for cap in (0.0, -1.0, 1e-39, 1.01e30, 1e38, 1e39, 10**400, float("inf"), float("nan"))
    ),
    ({"logits_soft_cap": "1"}, TypeError, "logits_soft_cap must be a number or None, got str"),
    ({"logits_soft_cap": True}, TypeError, "logits_soft_cap must be a number or None, got bool"),
    ({"max_seq_len": -1}, ValueError, "max_seq_len must be at least 0, got -1"),
    ({"max_query_len": -1}, ValueError, "max_query_len must be at least 0, got -1"),
    ({"max_query_len": 1.0}, TypeError, "max_query_len must be an int, got 1.0"),
    ({"query": jnp.zeros((2, 0, 16), jnp.bfloat16)}, ValueError, "multiple of num_kv_heads = 2, got 0"),
    ({"k_scale": jnp.zeros((4,))}, ValueError, "k_scale must be a scalar or have shape [num_kv_heads]"),
    ({"v_scale": jnp.zeros((5, 2, 4))}, ValueError, "got (5, 2, 4)"),
    ({"block_sparse": {"local_blocks": 1}}, TypeError, "block_sparse must be a BlockSparse or None, got dict"),
    ({"block_sparse": BlockSparse(1, 2, block_size=4)}, ValueError, "multiple of the cache's block_size = 8, got 4"),
    ({"block_sparse": BlockSparse(1, 2, np.int8(4))}, ValueError, "multiple of the cache's block_size = 8, got 4"),
    ({"block_sparse": BlockSparse(-1, 2)}, ValueError, "block_sparse.local_blocks must be at least 0, got -1"),
    ({"block_sparse": BlockSparse(1, 2, tp_rank=-1)}, ValueError, "block_sparse.tp_rank must be at least 0, got -1"),
    (
        {"block_sparse": BlockSparse(1, -(2**31) - 1)},
        ValueError,
        "block_sparse.vert_stride must be at least -2147483648, got -2147483649",
    ),
    (
        {"block_sparse": BlockSparse(1, 2, head_sliding_step=-(2**31) - 1)},
        ValueError,
        "block_sparse.head_sliding_step must be at least -2147483648, got -2147483649",
    ),
    ({"window": 4}, TypeError, "unexpected keyword argument 'window'"),
    ({"layout": ["hnd"]}, ValueError, "layout must be one of ('hnd', 'nhd', 'vllm'), got ['hnd']"),
    ({"implementation": ["xla"]}, ValueError, "implementation must be one of ('mosaic_gpu', 'triton', 'xla') or None"),
    ({"return_lse": [1]}, TypeError, "return_lse must be a static bool, got list"),
    ({"block_sparse": BlockSparse([1], 2)}, TypeError, "block_sparse.local_blocks must be an int, got [1]"),
    (
        {"query": jnp.zeros((3, 4, 16), jnp.bfloat16)},
        ValueError,
        "seq_lens must have shape [num_seqs] = (3,), got (2,)",
    ),
    (int8_caches(), ValueError, "k_scale must be given for caches of int8, got None"),
    (int8_caches() | {"k_scale": 0.1}, ValueError, "v_scale must be given for caches of int8, got None"),
]


@pytest.mark.parametrize(("changes", "error", "message"), DECODE, ids=lambda x: "-".join(x) if type(x) is dict else "")
def test_decode(changes, error, message):
    for op in (paged_jax.paged_attention_v1, paged_jax.paged_attention_v2, paged_jax.paged_attention):
        with pytest.raises(error, match=re.escape(message)):
            op(**decode_arrays(**changes))


ACCEPTED = {
    "one kv head": {name: jnp.zeros((5, 1, 8, 16), jnp.bfloat16) for name in ("key_cache", "value_cache")},
    "one head": {name: jnp.zeros((5, 1, 8, 16), jnp.bfloat16) for name in ("key_cache", "value_cache")}
    | {"query": jnp.zeros((2, 1, 16), jnp.bfloat16)},
    "largest heads": {name: jnp.zeros((5, 2, 8, 512), jnp.bfloat16) for name in ("key_cache", "value_cache")}
    | {"query": jnp.zeros((2, 4, 512), jnp.bfloat16)},
    "narrowest window": {"sliding_window": 1},
    "widest window": {"sliding_window": 2**31 - 1},
    "lowest bound": {"max_seq_len": 0},
    "small cap": {"logits_soft_cap": 0.5},
    "smallest cap": {"logits_soft_cap": np.finfo(np.float32).tiny},
    "cap of 16 bits": {"logits_soft_cap": np.float16(0.5)},
    "largest cap": {"logits_soft_cap": 1e30},
    "any stride": {"block_sparse": BlockSparse(0, -(2**31), block_size=8, head_sliding_step=-(2**31))},
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_decode_accepts(case):
    """Arguments are refused when a call is traced. Other tests compute with these options."""
    arrays = decode_arrays(**ACCEPTED[case])
    query = arrays.pop("query")
    assert jax.eval_shape(lambda x: paged_jax.paged_attention(x, **arrays), query).shape == query.shape


def test_a_bound_on_lengths_that_is_not_given_is_what_fits():
    """The default is what a table's row holds; `prefix_attention` adds the new tokens, which need no slot."""
    decode = tuple(decode_arrays().values())
    assert _validate.decode_operands(*decode, {}).options.max_seq_len == 3 * 8
    assert _validate.decode_operands(*decode, {"max_seq_len": 99}).options.max_seq_len == 3 * 8
    assert _validate.decode_operands(*decode, {"max_seq_len": 5}).options.max_seq_len == 5
    query, key, starts = jnp.zeros((7, 4, 16)), jnp.zeros((7, 2, 16)), jnp.zeros((3,), jnp.int32)
    assert _validate.ragged_operands(query, *decode[1:], starts, True, {}).options.max_seq_len == 3 * 8
    for given, bound in ((None, 7), (99, 7), (2, 2)):
        operands = _validate.ragged_operands(query, *decode[1:], starts, True, {"max_query_len": given})
        assert operands.options.max_query_len == bound
    assert _validate.prefix_operands(query, key, key, *decode[1:], starts, True, {}).options.max_seq_len == 3 * 8 + 7


@pytest.mark.parametrize("stride", [1, 0, -3])
def test_a_pattern_is_on_from_a_stride_of_2(stride):
    arrays = tuple(decode_arrays().values())
    options = _validate.decode_operands(*arrays, {"block_sparse": BlockSparse(1, stride)}).options
    assert options.block_sparse is None
    options = _validate.decode_operands(*arrays, {"block_sparse": BlockSparse(np.int32(1), 2)}).options
    assert options.block_sparse == BlockSparse(1, 2)


def test_write_and_attend_takes_more_sequences_than_kv_heads():
    query, key = jnp.zeros((3, 4, 16), jnp.bfloat16), jnp.zeros((3, 2, 16), jnp.bfloat16)
    lens, tables = jnp.ones(3, jnp.int32), jnp.zeros((3, 3), jnp.int32)
    arrays = decode_arrays(query=query, key=key, value=key, seq_lens=lens, block_tables=tables, slot_mapping=lens)
    out, key_cache, _ = jax.eval_shape(lambda: paged_jax.write_and_attend(**arrays))
    assert (out.shape, key_cache.shape) == ((3, 4, 16), (5, 2, 8, 16))


@pytest.mark.parametrize("value", [7, np.int8(7), np.array(7), jnp.uint8(7)], ids=lambda x: type(x).__name__)
def test_integers_of_any_library_become_pythons(value):
    made = integer("size", value)
    assert (made, type(made)) == (7, int)


@pytest.mark.parametrize("value", [True, np.True_, 7.0, np.array([7, 8]), "7", None], ids=repr)
def test_no_integers(value):
    with pytest.raises(TypeError, match=f"size must be an int, got {re.escape(repr(value))}"):
        integer("size", value)


def test_traced_integers_are_not_static():
    with pytest.raises(TypeError, match=r"size must be a static int, got \w*Tracer"):
        jax.jit(lambda value: integer("size", value))(7)


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (12, ValueError, "partition_size must be a multiple of block_size = 8, got 12"),
        (0, ValueError, "partition_size must be at least 1, got 0"),
        (8.0, TypeError, "partition_size must be an int, got 8.0"),
    ],
)
def test_partition_size(size, error, message):
    with pytest.raises(error, match=re.escape(message)):
        paged_jax.paged_attention_v2(**decode_arrays(), partition_size=size)


def test_sizes_of_few_bits_beside_larger_blocks():
    """A NumPy integer of 8 bits cannot be divided by 256."""
    pool = jnp.zeros((5, 2, 256, 16), jnp.bfloat16)
    arrays = decode_arrays(key_cache=pool, value_cache=pool)
    with pytest.raises(ValueError, match="partition_size must be a multiple of block_size = 256, got 64"):
        paged_jax.paged_attention_v2(**arrays, partition_size=np.int8(64))
    with pytest.raises(ValueError, match="multiple of the cache's block_size = 256, got 64"):
        paged_jax.paged_attention(**arrays, block_sparse=BlockSparse(1, 2, np.int8(64)))


def test_slots_fit_in_int32():
    assert shapes.check_blocks(2**23, 256) == (2**23, 256)
    with pytest.raises(ValueError, match=re.escape("num_blocks * block_size must be at most 2**31")):
        shapes.check_blocks(2**23 + 1, 256)


def test_the_largest_cap_keeps_logits_near_1():
    """A much larger one would make logits / cap subnormal, which XLA and GPUs take for 0."""
    query, key = (jax.random.normal(jax.random.key(i), (2, 4, 16)) for i in range(2))
    pool, one = jnp.zeros((5, 4, 8, 16)).at[0, :, :2].set(key.swapaxes(0, 1)), jnp.full(2, 2, jnp.int32)
    arrays = query, pool, pool, jnp.zeros((2, 1), jnp.int32), one
    capped = paged_jax.paged_attention(*arrays, logits_soft_cap=_checks._LARGEST_SOFT_CAP)
    np.testing.assert_allclose(capped, paged_jax.paged_attention(*arrays), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query_start_loc": jnp.zeros((2,), jnp.int32)}, ValueError, "[num_seqs + 1] = (3,), got (2,)"),
        ({"query_start_loc": jnp.zeros((3,), jnp.float32)}, TypeError, "query_start_loc must have dtype int32"),
        ({"seq_lens": jnp.zeros((3,), jnp.int32)}, ValueError, "seq_lens must have shape [num_seqs] = (2,), got (3,)"),
        ({"key_cache": jnp.zeros((5, 2, 4, 16), jnp.bfloat16)}, ValueError, "key_cache must have shape"),
    ],
)
def test_ragged(changes, error, message):
    arrays = decode_arrays(query=jnp.zeros((7, 4, 16), jnp.bfloat16), query_start_loc=jnp.zeros((3,), jnp.int32))
    new = {"key": jnp.zeros((7, 2, 16), jnp.bfloat16), "value": jnp.zeros((7, 2, 16), jnp.bfloat16)}
    with pytest.raises(error, match=re.escape(message)):
        paged_jax.ragged_paged_attention(**arrays | changes)
    with pytest.raises(error, match=re.escape(message)):
        paged_jax.prefix_attention(**arrays | new | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"key": jnp.zeros((6, 2, 16), jnp.bfloat16)}, ValueError, "key must have shape [num_tokens,"),
        ({"value": jnp.zeros((7, 1, 16), jnp.bfloat16)}, ValueError, "= (7, 2, 16), got (7, 1, 16)"),
        ({"value": jnp.zeros((7, 16), jnp.bfloat16)}, ValueError, "value must have shape [num_tokens, num_kv_heads, "),
        ({"value": jnp.zeros((7, 2, 16), jnp.float16)}, TypeError, "value must have dtype bfloat16, got float16"),
    ],
)
def test_prefix(changes, error, message):
    arrays = decode_arrays(query=jnp.zeros((7, 4, 16), jnp.bfloat16), query_start_loc=jnp.zeros((3,), jnp.int32))
    new = {"key": jnp.zeros((7, 2, 16), jnp.bfloat16), "value": jnp.zeros((7, 2, 16), jnp.bfloat16)}
    with pytest.raises(error, match=re.escape(message)):
        paged_jax.prefix_attention(**arrays | new | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"value": jnp.zeros((3, 1, 16), jnp.bfloat16)}, ValueError, "value must have shape"),
        ({"value": jnp.zeros((3, 2, 16), jnp.float32)}, TypeError, "value must have dtype bfloat16, got float32"),
        ({"slot_mapping": jnp.zeros((4,), jnp.int32)}, ValueError, "slot_mapping must have shape [num_tokens] = (3,)"),
        ({"slot_mapping": jnp.zeros((3,), jnp.float32)}, TypeError, "slot_mapping must have dtype int32"),
        ({"layout": "vllm"}, ValueError, "key_cache must have shape"),
        (int8_caches() | {"v_scale": 0.1}, ValueError, "k_scale must be given for caches of int8, got None"),
        ({"slot_mapping": np.array([1, 2**31, 3])}, ValueError, "slot_mapping must fit in int32, got 2147483648"),
        (vllm_caches() | {"layout": "vllm", "key": jnp.zeros((3, 4, 16), jnp.bfloat16)}, ValueError, "value must have"),
    ],
)
def test_write(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        paged_jax.write_to_paged_cache(**write_arrays(**changes))


def test_vllm_layout_needs_whole_groups():
    caches = {n: jnp.zeros((5, 2, 1, 8, 16), jnp.int8) for n in ("key_cache",)}
    caches["value_cache"] = jnp.zeros((5, 2, 24, 8), jnp.int8)
    with pytest.raises(ValueError, match="head_size must be a multiple of 16 for int8, got 24"):
        paged_jax.paged_attention(**decode_arrays(query=jnp.zeros((2, 4, 24), jnp.bfloat16), **caches), layout="vllm")


def test_copy_and_swap():
    cache, other = jnp.zeros((5, 2, 8, 16), jnp.bfloat16), jnp.zeros((5, 2, 4, 16), jnp.bfloat16)
    pairs = jnp.zeros((3, 2), jnp.int32)
    with pytest.raises(ValueError, match=re.escape("[num_pairs, 2] = (3, 2), got (3, 3)")):
        paged_jax.copy_blocks(cache, cache, jnp.zeros((3, 3), jnp.int32))
    with pytest.raises(TypeError, match="block_mapping must have dtype int32"):
        paged_jax.copy_blocks(cache, cache, jnp.zeros((3, 2)))
    with pytest.raises(ValueError, match="value_cache must have num_blocks = 5, got 4"):
        paged_jax.copy_blocks(cache, cache[:4], pairs)
    with pytest.raises(ValueError, match=re.escape("value_cache[1] must have num_blocks = 5, got 4")):
        paged_jax.copy_blocks((cache, cache), (cache, cache[:4]), pairs)
    with pytest.raises(ValueError, match=re.escape("key_cache[1] must have num_blocks = 5, got 4")):
        paged_jax.copy_blocks((cache, cache[:4]), (cache, cache[:4]), pairs)
    with pytest.raises(ValueError, match="value_cache must have key_cache's 2 layers, got 1"):
        paged_jax.copy_blocks([cache, cache], [cache], pairs)
    with pytest.raises(TypeError, match="must both be arrays, or both be sequences"):
        paged_jax.copy_blocks([cache], cache, pairs)
    with pytest.raises(ValueError, match=re.escape("dst_key_cache must have the blocks of src_key_cache, (2, 8, 16)")):
        paged_jax.swap_blocks(cache, cache, other, other, pairs)
    with pytest.raises(ValueError, match=re.escape("dst_key_cache must have the blocks of src_key_cache, (2, 4, 16)")):
        paged_jax.swap_blocks(other, other, cache, cache, pairs)
    with pytest.raises(
        ValueError, match=re.escape("key_cache must have 4 or 5 axes, the first num_blocks, got shape (5,")
    ):
        paged_jax.copy_blocks(cache[:, 0, 0], cache, pairs)
    with pytest.raises(
        ValueError, match=re.escape("value_cache must have 4 axes, the first num_blocks, got shape (5, 1")
    ):
        paged_jax.copy_blocks(cache, cache[:, None], pairs)
    with pytest.raises(TypeError, match="dst_key_cache must have src_key_cache's dtype bfloat16, got float16"):
        paged_jax.swap_blocks(cache, cache, cache.astype(jnp.float16), cache.astype(jnp.float16), pairs)


def test_merge():
    out, lse = jnp.zeros((3, 4, 8), jnp.bfloat16), jnp.zeros((3, 4))
    with pytest.raises(ValueError, match="out_b must have out_a's shape and dtype"):
        paged_jax.merge_attention_states(out, lse, out[:2], lse)
    with pytest.raises(ValueError, match="out_b must have out_a's shape and dtype"):
        paged_jax.merge_attention_states(out[:2], lse[:2], out, lse)
    for one, two in ((jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)):
        with pytest.raises(ValueError, match="out_b must have out_a's shape and dtype"):
            paged_jax.merge_attention_states(out.astype(one), lse, out.astype(two), lse)
    with pytest.raises(ValueError, match=re.escape("lse_b must have shape [..., num_heads] = (3, 4), got (3,)")):
        paged_jax.merge_attention_states(out, lse, out, lse[:, 0])
    with pytest.raises(TypeError, match="lse_a must have dtype float32"):
        paged_jax.merge_attention_states(out, lse.astype(jnp.bfloat16), out, lse)
    with pytest.raises(TypeError, match="out_a must be an array, got list"):
        paged_jax.merge_attention_states([[[0.0]]], lse, out, lse)
    with pytest.raises(TypeError, match="out_b must have dtype float16 or bfloat16 or float32, got int32"):
        paged_jax.merge_attention_states(out, lse, out.astype(jnp.int32), lse)
    with pytest.raises(ValueError, match=re.escape("out_a must have shape [..., num_heads, head_size], got (8,)")):
        paged_jax.merge_attention_states(out[0, 0], lse[0, 0], out[0, 0], lse[0, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": jnp.zeros((3, 4, 16), jnp.bfloat16)}, "key must have shape [num_tokens,"),
        ({"key": jnp.zeros((3, 2, 16), jnp.bfloat16)}, "key must have shape [num_tokens,"),
        ({"seq_lens": jnp.zeros(3, jnp.int32)}, "seq_lens must have shape [num_seqs] = (2,), got (3,)"),
        ({"block_tables": jnp.zeros((3, 3), jnp.int32)}, "seq_lens must have shape [num_seqs] = (3,), got (2,)"),
        (
            {"block_tables": jnp.zeros((3, 3), jnp.int32), "seq_lens": jnp.zeros(3, jnp.int32)},
            "seq_lens must have shape [num_seqs] = (2,), got (3,)",
        ),
        ({"slot_mapping": jnp.zeros(3, jnp.int32)}, "slot_mapping must have shape [num_seqs] = (2,), got (3,)"),
        (int8_caches(), "k_scale must be given for caches of int8, got None"),
    ],
)
def test_write_and_attend(changes, message):
    new = jnp.zeros((2, 2, 16), jnp.bfloat16)
    arrays = decode_arrays(key=new, value=new, slot_mapping=jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_jax.write_and_attend(**arrays | changes)


def test_an_array_of_the_caller_may_change_after_the_call():
    """On a CPU JAX takes an aligned array of NumPy as it is, and reads it when the call is computed."""
    memory = np.zeros(64 + 32, np.float32)
    first = -memory.ctypes.data % 64 // 4
    scale = memory[first : first + 32]
    scale[:] = 5
    taken = _checks.floating("v_scale", scale)
    scale[:] = 9
    np.testing.assert_array_equal(taken, 5)
