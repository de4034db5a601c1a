"""Tests write_to_paged_cache, and all cache ops over empty pools, bit for bit; test_block_ops.py has copies and swaps.

Pools start as random bytes (signalling NaN payloads among them), so that a byte changed anywhere else shows.
"""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import paged_jax
from tests import inputs, oracle
from tests.cases import CACHE_DTYPES, LAYOUTS

NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE = 7, 3, 4, 16
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
SKIPPED = (-1, -5, NUM_SLOTS, NUM_SLOTS + 3, 2**31 - 1, -(2**31))
SCALES = {
    "none": None,
    "scalar": (),
    "head": (NUM_KV_HEADS,),
    "slot": (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE),
}


def random_bytes(rng, shape, dtype):
    """Makes an array of arbitrary bit patterns."""
    dtype = inputs.dtype_of(dtype)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)


def random_caches(rng, dtype, layout="hnd"):
    """Makes a key cache and a value cache of arbitrary bit patterns."""
    dims = (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    return tuple(
        random_bytes(rng, shape, dtype) for shape in inputs.cache_shapes(layout, *dims, inputs.dtype_of(dtype))
    )


def new_tokens(rng, count, dtype, size=2.0):
    """Draws the keys or values of new tokens."""
    return (size * rng.standard_normal((count, NUM_KV_HEADS, HEAD_SIZE))).astype(inputs.dtype_of(dtype))


def assert_same_bytes(actual, expected, what):
    """Checks that all bytes are equal, NaN payloads included."""
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    different = np.argwhere(actual.view(np.uint8) != expected.view(np.uint8))
    assert not different.size, f"{what}: {len(different)} bytes differ, first at {different[0].tolist()}"


def writable(source, cache_dtype):
    """Whether a write from `source` into such a cache quantises, and so may have scales."""
    return inputs.dtype_of(cache_dtype).itemsize < inputs.dtype_of(source).itemsize


def layouts_and_dtypes():
    """All pairs; one of float8 is written in the same way in each layout, so GPUs alone write some pairs."""
    on_gpus = {("hnd", "float8_e5m2"), ("nhd", "float8_e5m2"), ("vllm", "float8_e4m3fn")}
    pairs = itertools.product(LAYOUTS, CACHE_DTYPES)
    return [pytest.param(*pair, marks=[pytest.mark.gpu] * (pair in on_gpus)) for pair in pairs]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("layout", "dtype"), layouts_and_dtypes())
def test_write(layout, dtype, run):
    """One program writes from all source dtypes, with scales where they are allowed."""
    rng = inputs.rng_of(f"write-{layout}-{dtype}")
    key_cache, value_cache = random_caches(rng, dtype, layout)
    slots = np.array([5, -1, 0, *SKIPPED, NUM_SLOTS - 1, 17, 6, 16], np.int32)
    rng.shuffle(slots)
    sources, scales = {}, {}
    for source in ("float32", "float16", "bfloat16"):
        sources[source] = tuple(new_tokens(rng, len(slots), source) for _ in "kv")
        shapes = list(SCALES) if source == "float32" else ["none", "slot"]
        if dtype == "int8":  # an int8 cache needs scales
            shapes.remove("none")
        for name in shapes if writable(source, dtype) else ("none",):
            scales[f"{source}/{name}"] = {
                scale: None if name == "none" else rng.uniform(0.01, 0.9, SCALES[name]).astype(np.float32)
                for scale in ("k_scale", "v_scale")
            }

    def function(sources, caches, slots, scales, implementation):
        return {
            name: paged_jax.write_to_paged_cache(
                *sources[name.split("/")[0]],
                *caches,
                slots,
                layout=layout,
                **pair,
                implementation=implementation,
            )
            for name, pair in scales.items()
        }

    results = run(function, sources=sources, caches=(key_cache, value_cache), slots=slots, scales=scales)
    for name, result in results.items():
        key, value = sources[name.split("/")[0]]
        expected = oracle.write(key, value, key_cache, value_cache, slots, layout=layout, **scales[name])
        assert_same_bytes(result[0], expected[0], f"key cache from {name}")
        assert_same_bytes(result[1], expected[1], f"value cache from {name}")


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_write_saturates_and_rounds_to_nearest_even(dtype, run):
    huge = [1e30, 3.4e38, 70000.0, 66000.0, 65519.0, 58000.0]
    limits = [*huge, 500.0, 464.0, 460.0, 449.0, 128.0, 127.5, 127.4]
    ties = [0.5, 1.5, 2.5, 1 + 1 / 16, 1 + 3 / 16, 2.0**-7, 2.0**-10, 2.0**-17, 3 * 2.0**-10, 1e-8, 0.0]
    # A division by 61/1024 is exact in float32 and gives ties here; a multiplication by the inverse would not.
    divided = (np.arange(23) + 0.5) * 61 / 1024
    row = np.array([*limits, *ties, *divided], np.float32)
    values = np.resize(np.concatenate([row, -row]), (3, NUM_KV_HEADS, HEAD_SIZE))
    key_cache, value_cache = random_caches(np.random.default_rng(0), dtype)
    slots = np.array([4, 9, 2], np.int32)
    # A division by the tiny scale overflows most dtypes, and one by the tinier scale overflows float32. The inverse of
    # the subnormal scale does not fit into float32. A vector of zeros has scale 0.
    extreme = {"61/1024": 61 / 1024, "tiny": 2.0**-10, "tinier": 1e-37, "subnormal": 1e-40, "zero": 0.0}
    if dtype == "bfloat16":  # it holds the quotients, but XLA divides by 0 on a CPU
        del extreme["subnormal"]
    extreme = extreme if writable("float32", dtype) else {}
    plain = {"one": np.float32(1)} if dtype == "int8" else {"none": None}  # an int8 cache needs scales
    scales = plain | {name: np.float32(scale) for name, scale in extreme.items()}

    def function(values, caches, slots, scales, implementation):
        return {
            name: paged_jax.write_to_paged_cache(
                values, values, *caches, slots, k_scale=scale, v_scale=scale, implementation=implementation
            )
            for name, scale in scales.items()
        }

    results = run(function, values=values, caches=(key_cache, value_cache), slots=slots, scales=scales)
    for name, result in results.items():
        scale = scales[name]
        expected = oracle.write(values, values, key_cache, value_cache, slots, k_scale=scale, v_scale=scale)
        for cache, exact in zip(result, expected, strict=True):
            written = oracle.element(np.asarray(cache), slots // BLOCK_SIZE, slots % BLOCK_SIZE, "hnd", "key")
            assert np.isfinite(written.astype(np.float64)).all(), f"scale {name}"
            assert_same_bytes(cache, exact, f"scale {name}")


def test_write_keeps_what_is_not_a_number(run):
    values = np.resize(np.array([np.nan, 1.0, -np.nan, -2.0], np.float32), (2, NUM_KV_HEADS, HEAD_SIZE))
    dtypes = [dtype for dtype in CACHE_DTYPES if dtype != "int8"]
    caches = {dtype: random_caches(np.random.default_rng(0), dtype) for dtype in dtypes}

    def function(values, caches, slots, implementation):
        return {
            dtype: paged_jax.write_to_paged_cache(values, values, *pair, slots, implementation=implementation)
            for dtype, pair in caches.items()
        }

    slots = np.array([4, 9], np.int32)
    for dtype, pools in run(function, values=values, caches=caches, slots=slots).items():
        for cache in pools:
            written = oracle.element(np.asarray(cache), slots // BLOCK_SIZE, slots % BLOCK_SIZE, "hnd", "key")
            np.testing.assert_array_equal(written.astype(np.float32), values, err_msg=dtype)


def test_write_of_tokens_that_share_a_slot_leaves_only_theirs(run):
    rng = np.random.default_rng(3)
    caches = random_caches(rng, "bfloat16")
    slots = np.array([9, 3, 9, 9, -1, 3, 20], np.int32)
    # All elements of a token's key and value are the token's number.
    tokens = np.broadcast_to(np.arange(len(slots), dtype=np.float32)[:, None, None], (7, NUM_KV_HEADS, HEAD_SIZE))

    def function(tokens, caches, slots, implementation):
        return paged_jax.write_to_paged_cache(tokens, tokens, *caches, slots, implementation=implementation)

    result = run(function, tokens=tokens.astype(caches[0].dtype), caches=caches, slots=slots)
    for slot, candidates in {9: (0, 2, 3), 3: (1, 5), 20: (6,)}.items():
        found = {
            float(number)
            for cache in result
            for number in np.unique(oracle.element(cache, slot // 4, slot % 4, "hnd", "key").astype(np.float32))
        }
        assert found <= set(candidates)
    for before, after in zip(caches, result, strict=True):
        for slot in set(range(NUM_SLOTS)) - {9, 3, 20}:
            old, new = (oracle.element(cache, slot // 4, slot % 4, "hnd", "key") for cache in (before, after))
            assert old.tobytes() == new.tobytes()


def test_write_of_no_tokens(run):
    caches = random_caches(np.random.default_rng(4), "float8_e4m3fn", "vllm")
    empty = np.zeros((0, NUM_KV_HEADS, HEAD_SIZE), np.float32)

    def function(tokens, caches, slots, implementation):
        return paged_jax.write_to_paged_cache(
            tokens, tokens, *caches, slots, layout="vllm", implementation=implementation
        )

    result = run(function, tokens=empty, caches=caches, slots=np.zeros(0, np.int32))
    for before, after in zip(caches, result, strict=True):
        assert_same_bytes(after, before, "cache")


def test_written_tokens_are_what_attention_reads(run):
    """The write and the decode op agree on the place of a slot and the meaning of a scale, in every layout."""
    rng = np.random.default_rng(5)
    key, value = new_tokens(rng, 10, "float32"), new_tokens(rng, 10, "float32")
    query = rng.standard_normal((1, NUM_KV_HEADS, HEAD_SIZE)).astype(np.float32)
    tables = np.array([[4, 1, 5, -1]], np.int32)
    slots = (tables[0, np.arange(10) // BLOCK_SIZE] * BLOCK_SIZE + np.arange(10) % BLOCK_SIZE).astype(np.int32)
    scales = [rng.uniform(0.06, 0.09, SCALES["slot"]).astype(np.float32) for _ in "kv"]
    dims = (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE)

    def function(arrays, scales, implementation):
        query, key, value, tables, slots, lens = arrays
        outs = {}
        for layout in LAYOUTS:
            shapes = inputs.cache_shapes(layout, *dims, np.dtype(np.int8))
            empty = [jnp.full(shape, 127, jnp.int8) for shape in shapes]
            common = {"layout": layout, "implementation": implementation}
            common |= dict(zip(("k_scale", "v_scale"), scales, strict=True))
            caches = paged_jax.write_to_paged_cache(key, value, *empty, slots, **common)
            outs[layout] = paged_jax.paged_attention_v1(query, *caches, tables, lens, **common)
        return outs

    lens = np.array([10], np.int32)
    outs = run(function, arrays=(query, key, value, tables, slots, lens), scales=scales)
    exact, _ = oracle.attend(query[0], key.astype(np.float64), value.astype(np.float64), {})
    for layout, out in outs.items():
        # The error of every value is half a code, at most 0.045, and the keys add about as much.
        assert np.abs(out[0] - exact).max() < 0.1, layout


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "int8"])
def test_pools_without_blocks_have_nothing_to_copy_or_write(dtype, run):
    """The pool has no room for any pair or slot."""
    rng = np.random.default_rng(13)
    some = random_caches(rng, dtype)
    none = tuple(x[:0] for x in some)
    pairs, slots = np.array([(-1, -1), (0, 1)], np.int32), np.array([0, -1, 5], np.int32)
    tokens = new_tokens(rng, len(slots), "float32")
    scale = np.zeros((0, NUM_KV_HEADS, BLOCK_SIZE), np.float32)
    scales = {"k_scale": scale, "v_scale": scale} if writable("float32", dtype) else {}
    rows = np.zeros((len(slots), 2), np.int32), np.zeros(len(slots), np.int32)

    def function(some, none, tokens, slots, rows, pairs, scales, implementation):
        out, *written = paged_jax.write_and_attend(
            tokens, tokens, tokens, *none, *rows, slots, **scales, implementation=implementation
        )
        return out, {
            "some": paged_jax.swap_blocks(*none, *some, pairs, implementation=implementation),
            "none": [
                paged_jax.copy_blocks(*none, pairs, implementation=implementation),
                paged_jax.swap_blocks(*some, *none, pairs, implementation=implementation),
                paged_jax.write_to_paged_cache(tokens, tokens, *none, slots, **scales, implementation=implementation),
                written,
            ],
        }

    out, pools = run(function, some=some, none=none, tokens=tokens, slots=slots, rows=rows, pairs=pairs, scales=scales)
    assert not out.any()
    for after, before in zip(pools["some"], some, strict=True):
        assert_same_bytes(after, before, "destination")
    for after in jax.tree.leaves(pools["none"]):
        assert after.shape == none[0].shape


def test_write_of_bfloat16_saturates_in_float16(run):
    """bfloat16 has as many bits as float16, but larger values than float16's 65504."""
    caches = random_caches(np.random.default_rng(8), "float16")
    row = np.array([1e30, -1e30, 65536.0, 1.5, 0.0, 3e-8], np.float32).astype(ml_dtypes.bfloat16)
    values = np.resize(row, (2, NUM_KV_HEADS, HEAD_SIZE))
    slots = np.array([5, 8], np.int32)

    def function(values, caches, slots, implementation):
        return paged_jax.write_to_paged_cache(values, values, *caches, slots, implementation=implementation)

    result = run(function, values=values, caches=caches, slots=slots)
    for actual, expected in zip(result, oracle.write(values, values, *caches, slots), strict=True):
        assert_same_bytes(actual, expected, "cache")
