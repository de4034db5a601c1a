"""Tests write_and_attend against the float64 oracle's write and decode, on poisoned inputs, and the pools bit for bit.

A slot holds poison before it is written: attention must use the new token, and not what the slot held before.
"""

import itertools

import numpy as np
import pytest

import paged_jax
from tests import inputs, oracle, plain
from tests.cases import DECODE_CASES, Case
from tests.test_cache_ops import assert_same_bytes
from tests.test_decode import marked, op_options

# These few cases have every option, layout, granularity of scales, and pair of query and cache dtype.
NAMES = [
    "hnd-float16",
    "hnd-bfloat16",
    "hnd-e4m3",
    "hnd-int8",
    "nhd-float32",
    "nhd-e5m2",
    "nhd-int8",
    "vllm-float16",
    "vllm-bfloat16",
    "vllm-e4m3",
    "vllm-int8",
    "soft-cap",
    "window-1",
    "sparse-negative-step",
    "scale-on-a-wide-cache",
    "query-bfloat16-cache-float32",
    "query-float32-cache-bfloat16",
    "query-float16-cache-bfloat16",
    "everything",
    "large-scales",
    "shared-blocks",
    "all-empty",
    "huge-logits",
    "long",
    "llama-3-8b",
]
UNSPLIT = Case("unsplit", 8, 2, 64, 16, "bfloat16", seq_lens=(9, 0, 16, 1, 3), query_lens=None, spare_columns=0)
LARGE_GROUP = Case("large-group", 142, 2, 24, 1, "float16", "bfloat16", "nhd", (9, 2), None)
# Each kv head has its own scales, and a head's elements do not fill a power of two, in layout "vllm".
UNFILLED = Case("unfilled-heads", 4, 2, 48, 8, "bfloat16", "int8", "vllm", (9, 0, 17), None, k_scale="slot",
                v_scale="slot")  # fmt: skip
SLOT_SCALES = Case("slot-scales-on-a-wide-cache", 2, 1, 64, 16, "bfloat16", k_scale="slot", v_scale="slot")
# GPUs alone run these cases, which combine the options of others in another way.
ON_GPUS = {
    *("hnd-bfloat16", "hnd-e4m3", "nhd-float32", "nhd-int8", "vllm-float16", "vllm-bfloat16", "llama-3-8b", "long"),
    *("vllm-e4m3", "shared-blocks", "sparse-negative-step"),
    *("huge-logits", "query-bfloat16-cache-float32", "query-float16-cache-bfloat16", "soft-cap", "unfilled-heads"),
}
CASES = [*(case for case in DECODE_CASES if case.name in NAMES), UNSPLIT, LARGE_GROUP, UNFILLED, SLOT_SCALES]
BY_NAME = {case.name: case for case in CASES}


def with_new_tokens(case):
    """Gives a case's inputs before its last tokens are written, with these tokens and their slots.

    If another row reads a row's last slot too, the token is in the cache already, and the row gets a slot that is
    skipped, as every other row does: -1 comes first. An empty row gets a slot that no row uses, unless scales of such
    slots are poison.
    """
    made, rng = inputs.make(case), inputs.rng_of(f"new-{case.name}")
    contexts = [
        [int(table[t // case.block_size]) * case.block_size + t % case.block_size for t in range(length)]
        for table, length in zip(made.decode["block_tables"], case.seq_lens, strict=True)
    ]
    used = [slot for context in contexts for slot in context]
    num_slots = oracle.cache_dims(made.decode["key_cache"], case.layout)[0] * case.block_size
    spare = [slot for slot in range(num_slots) if slot not in set(used)]
    skipped = itertools.cycle([-1, num_slots, -(2**31), 2**31 - 1])
    slots = np.zeros(len(contexts), np.int32)
    for row, context in enumerate(contexts):
        if not context and "slot" not in (case.k_scale, case.v_scale):
            slots[row] = spare.pop()
        elif context and used.count(context[-1]) == 1 and row % 2 == 0:
            slots[row] = context[-1]
        else:
            slots[row] = next(skipped)
    made.slots = slots
    for which in ("key", "value"):
        vectors = inputs.token_vectors(rng, case, len(contexts), which)
        setattr(made, which, vectors.astype(made.decode["query"].dtype))
        cache = made.decode[f"{which}_cache"]
        for slot in slots[(slots >= 0) & (slots < num_slots)]:
            nothing = inputs.poison(rng, (case.num_kv_heads, case.head_size), cache.dtype)
            oracle.set_element(cache, *divmod(int(slot), case.block_size), case.layout, which, nothing)
    return made


def expected_caches(case, made):
    """Gives the caches after the write."""
    narrower = made.decode["key_cache"].dtype.itemsize < made.key.dtype.itemsize
    scales = {name: made.arrays.get(name) for name in ("k_scale", "v_scale")} if narrower else {}
    caches = made.decode["key_cache"], made.decode["value_cache"]
    key, value = oracle.write(made.key, made.value, *caches, made.slots, layout=case.layout, **scales)
    return {"key_cache": key, "value_cache": value}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", marked(CASES, lambda case: case.name in ON_GPUS, pytest.mark.gpu))
def test_write_and_attend(case, run):
    made = with_new_tokens(case)
    static = op_options(made.static) | {"max_seq_len": case.max_seq_len, "return_lse": True}

    def function(arrays, new, options, implementation):
        return paged_jax.write_and_attend(**arrays, **new, **options, **static, implementation=implementation)

    new = {"key": made.key, "value": made.value, "slot_mapping": made.slots}
    out, lse, *caches = run(function, arrays=made.decode, new=new, options=made.arrays)
    written = expected_caches(case, made)
    for actual, (name, wanted) in zip(caches, written.items(), strict=True):
        assert_same_bytes(actual, wanted, name)
    after, options = made.decode | written, made.arrays | made.static
    exact, rough = oracle.decode(**after, **options), plain.decode(**after, **options)
    assert out.dtype == made.decode["query"].dtype
    plain.assert_close(out, exact[0], rough[0], "out")
    plain.assert_close(lse, exact[1], rough[1], "lse")


def test_tokens_past_max_seq_len_are_written_and_not_attended_to(run):
    case = Case("bound", seq_lens=(33, 16, 20), query_lens=None)
    made = with_new_tokens(case)

    def function(arrays, new, implementation):
        return paged_jax.write_and_attend(**arrays, **new, max_seq_len=20, implementation=implementation)

    new = {"key": made.key, "value": made.value, "slot_mapping": made.slots}
    out, *caches = run(function, arrays=made.decode, new=new)
    written = expected_caches(case, made)
    for actual, (name, wanted) in zip(caches, written.items(), strict=True):
        assert_same_bytes(actual, wanted, name)
    after = made.decode | written | {"seq_lens": np.array([20, 16, 20], np.int32)}
    plain.assert_close(out, oracle.decode(**after)[0], plain.decode(**after)[0], "out")


def test_what_it_returns():
    made = with_new_tokens(BY_NAME["unsplit"])
    new = {"key": made.key, "value": made.value, "slot_mapping": made.slots}
    without = paged_jax.write_and_attend(**made.decode, **new, implementation="xla")
    with_lse = paged_jax.write_and_attend(**made.decode, **new, return_lse=True, implementation="xla")
    assert [x.shape for x in without] == [made.decode[n].shape for n in ("query", "key_cache", "value_cache")]
    assert with_lse[1].shape == made.decode["query"].shape[:2]


@pytest.mark.parametrize("num_seqs", [1, 4])
def test_a_new_token_that_no_row_sees_may_hold_anything(num_seqs, run):
    """The op still writes the token. As 0 * NaN is NaN, the op must leave the token's value out of the sum."""
    rng = np.random.default_rng(0)
    caches = tuple(rng.standard_normal((4 * num_seqs, 1, 16, 16)).astype(np.float32) for _ in "kv")
    query, key, value = (rng.standard_normal((num_seqs, 1, 16)).astype(np.float32) for _ in "qkv")
    # The pattern shows the third of four blocks, which is on the stride, and hides the last one.
    sparse = paged_jax.BlockSparse(local_blocks=0, vert_stride=3, block_size=16)
    tables, lens = np.arange(4 * num_seqs, dtype=np.int32).reshape(num_seqs, 4), np.full(num_seqs, 49, np.int32)
    slots = 16 * tables[:, 3]

    def function(arrays, value, implementation):
        query, key, *rest = arrays
        return paged_jax.write_and_attend(query, key, value, *rest, block_sparse=sparse, implementation=implementation)

    arrays = (query, key, *caches, tables, lens, slots)
    out, _, written = run(function, arrays=arrays, value=np.full_like(value, np.nan))
    expected, *_ = run(function, arrays=arrays, value=value)
    assert np.isnan(written[3, 0, 0]).all()
    np.testing.assert_array_equal(out, expected)
    assert np.abs(out).max() > 0
