"""Tests multi-head latent attention against the float64 oracle on poisoned inputs, and the ops on latent caches."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from paged_jax import PagedLatentCache
from tests import inputs, oracle, plain
from tests.cases import CACHE_DTYPES
from tests.conftest import FULL_COMPILE
from tests.every_op import assert_same_program
from tests.latent_cases import CASES, HOPPER_CASES, make
from tests.test_cache_ops import assert_same_bytes, random_bytes, writable

RAGGED_CASES = [case for case in CASES if case.case.query_lens is not None]
LIKE_OTHERS = {
    *("one-head", "many-heads", "e4m3-without-scale", "largest", "smallest", "large-blocks", "shared-blocks"),
    *("query-bfloat16-cache-float32", "query-float32-cache-bfloat16", "context-without-query", "scale-negative"),
    *("float16", "e5m2"),
}


def some_on_gpus(cases):
    """Parameters; GPUs alone run those that are like others, and what Hopper's kernel takes, too."""
    marks = [[pytest.mark.gpu] * (case in HOPPER_CASES or str(case) in LIKE_OTHERS) for case in cases]
    return [pytest.param(case, id=str(case), marks=mark) for case, mark in zip(cases, marks, strict=True)]


def without_causal(static):
    """The options of decode, which has no causality."""
    return {name: x for name, x in static.items() if name != "causal"}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", some_on_gpus(CASES))
def test_decode(case, run):
    made = make(case)
    static = without_causal(made.static)

    def decode(arrays, options, implementation):
        flags = static | {"max_seq_len": case.case.max_seq_len, "return_lse": True, "implementation": implementation}
        return paged_jax.mla_paged_attention(**arrays, **options, **flags)

    out, lse = run(decode, arrays=made.decode, options=made.arrays)
    options = made.arrays | static | {"max_seq_len": case.case.max_seq_len}
    exact, rough = oracle.latent(**made.decode, **options), plain.latent(**made.decode, **options)
    assert out.dtype == made.decode["query"].dtype
    assert lse.dtype == np.float32
    plain.assert_close(out, exact[0], rough[0], "out")
    plain.assert_close(lse, exact[1], rough[1], "lse")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", some_on_gpus(RAGGED_CASES))
def test_ragged(case, run):
    hold_ragged(case, run)


@pytest.mark.parametrize("case", RAGGED_CASES[1:3], ids=str)
def test_ragged_with_bounded_queries(case, run):
    hold_ragged(case, run, max_query_len=max(case.case.query_lens))


def hold_ragged(case, run, **bounds):
    """Compares ragged attention with the oracle."""
    made = make(case)

    def ragged(arrays, options, implementation):
        flags = made.static | {"return_lse": True, "implementation": implementation} | bounds
        return paged_jax.ragged_mla_attention(**arrays, **options, **flags)

    out, lse = run(ragged, arrays=made.ragged, options=made.arrays)
    options = made.arrays | made.static
    exact, rough = oracle.latent(**made.ragged, **options), plain.latent(**made.ragged, **options)
    assert out.dtype == made.ragged["query"].dtype
    assert lse.dtype == np.float32
    assert np.all(out[made.num_rows :].astype(np.float32) == 0), "padding rows"
    plain.assert_close(out, exact[0], rough[0], "out")
    plain.assert_close(lse, exact[1], rough[1], "lse")


def test_queries_whose_last_elements_are_large(run):
    hold_queries_whose_last_elements_are_large(run)


def hold_queries_whose_last_elements_are_large(run):
    """Products over 8 bits are in float16, which cannot hold the elements behind the value as they are."""
    made = make(next(case for case in CASES if str(case) == "e4m3"))
    value_size, scale = made.static["value_size"], np.float32(made.arrays["scale"] * 2.0**-17)
    query = made.decode["query"].copy()
    query[..., value_size:] *= 2.0**17

    def decode(arrays, options, implementation):
        flags = {"value_size": value_size, "implementation": implementation}
        return paged_jax.mla_paged_attention(**arrays, **options, **flags)

    arrays, options = made.decode | {"query": query}, made.arrays | {"scale": scale}
    out = run(decode, arrays=arrays, options=options)
    exact, rough = (module.latent(**arrays, **options, value_size=value_size)[0] for module in (oracle, plain))
    plain.assert_close(out, exact, rough, "out")


def test_queries_of_one_sequence_each_are_decode(run):
    """The two ops agree where each sequence has one query."""
    made = make(next(case for case in CASES if str(case) == "bfloat16"))
    starts = np.arange(len(made.decode["seq_lens"]) + 1, dtype=np.int32)

    def both(arrays, starts, implementation):
        flags = without_causal(made.static) | {"return_lse": True, "implementation": implementation}
        return (
            paged_jax.mla_paged_attention(**arrays, **flags),
            paged_jax.ragged_mla_attention(**arrays, query_start_loc=starts, **flags),
        )

    (out, lse), (out2, lse2) = run(both, arrays=made.decode, starts=starts)
    np.testing.assert_allclose(out2.astype(np.float32), out.astype(np.float32), atol=1e-2, rtol=1e-2)
    np.testing.assert_allclose(lse2, lse, atol=1e-4, rtol=1e-5)


def test_two_runs_give_the_same_bits(run):
    made = make(next(case for case in CASES if str(case) == "long"))

    def both(decode, ragged, implementation):
        flags = made.static | {"return_lse": True, "implementation": implementation}
        return paged_jax.mla_paged_attention(**decode, **flags), paged_jax.ragged_mla_attention(**ragged, **flags)

    first, second = (run(both, decode=made.decode, ragged=made.ragged) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.tobytes() == b.tobytes()


def test_bits_of_one_sequence_at_a_time(run):
    """Calls for one sequence at a time give a row the same bits alone and in any batch, at any place."""
    made = make(next(case for case in CASES if str(case) == "deepseek-8-heads"))
    arrays, static = made.decode, without_causal(made.static)

    def one_at_a_time(query, latent_cache, block_tables, seq_lens, implementation):
        def one(arrays):
            query, table, length = (x[None] for x in arrays)
            return paged_jax.mla_paged_attention(
                query, latent_cache, table, length, **static, return_lse=True, implementation=implementation
            )

        return jax.lax.map(one, (query, block_tables, seq_lens))

    def rows(order):
        own = {name: x if name == "latent_cache" else x[np.array(order)] for name, x in arrays.items()}
        return jax.tree.leaves(run(one_at_a_time, **own))

    for batch, alone in zip(rows([0, 1, 0]), rows([0]), strict=True):
        assert batch[0].tobytes() == batch[2].tobytes() == alone[0].tobytes()


NUM_BLOCKS, BLOCK_SIZE, LATENT_SIZE = 7, 4, 48
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
SLOTS = np.array([5, -1, 0, -5, NUM_SLOTS, NUM_SLOTS + 3, 2**31 - 1, -(2**31), NUM_SLOTS - 1, 17, 6, 16], np.int32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_write(dtype, run):
    """One program writes from all source dtypes, with a scale where it is allowed; all other bytes stay."""
    rng = inputs.rng_of(f"write-latents-{dtype}")
    cache = random_bytes(rng, (NUM_BLOCKS, BLOCK_SIZE, LATENT_SIZE), dtype)
    latents, scales = {}, {}
    for source in ("float32", "float16", "bfloat16"):
        # Some elements are beyond the range of narrow dtypes.
        latents[source] = (8 * rng.standard_normal((len(SLOTS), LATENT_SIZE)) ** 3).astype(inputs.dtype_of(source))
        choices = [np.float32(0.03), None] if writable(source, dtype) else [None]
        for scale in choices if dtype != "int8" else choices[:1]:
            scales[f"{source}/{scale}"] = scale

    def function(latents, cache, slots, scales, implementation):
        return {
            name: paged_jax.write_to_latent_cache(
                latents[name.split("/")[0]], cache, slots, scale=scale, implementation=implementation
            )
            for name, scale in scales.items()
        }

    results = run(function, latents=latents, cache=cache, slots=SLOTS, scales=scales)
    for name, result in results.items():
        expected = oracle.write_latent(latents[name.split("/")[0]], cache, SLOTS, scale=scales[name])
        assert_same_bytes(result, expected, f"cache from {name}")


PAIRS = np.array([[0, 5], [5, 6], [-1, 3], [2, 2**31 - 1], [9, 1]], np.int32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "int8"])
def test_copy_and_swap_blocks(dtype, run):
    rng = inputs.rng_of(f"copy-latents-{dtype}")
    counts = (NUM_BLOCKS, NUM_BLOCKS, 9)
    source, layer, other = (random_bytes(rng, (count, BLOCK_SIZE, LATENT_SIZE), dtype) for count in counts)

    def function(source, layer, other, pairs, implementation):
        keywords = {"implementation": implementation}
        copied, values = paged_jax.copy_blocks([source, layer], None, pairs, **keywords)
        swapped, swapped_values = paged_jax.swap_blocks(source, None, other, None, pairs, **keywords)
        assert values is swapped_values is None
        return *copied, swapped

    first, second, swapped = run(function, source=source, layer=layer, other=other, pairs=PAIRS)
    assert_same_bytes(first, oracle.copy(source, PAIRS), "copy")
    assert_same_bytes(second, oracle.copy(layer, PAIRS), "copy of the second layer")
    assert_same_bytes(swapped, oracle.swap(source, other, PAIRS), "swap")


def test_methods_are_their_ops():
    """They are traced to the ops' own programs; the ops' numbers have tests of their own."""
    rng = inputs.rng_of("latent-methods")
    codes = jnp.asarray(rng.integers(-99, 99, (NUM_BLOCKS, BLOCK_SIZE, LATENT_SIZE)), jnp.int8)
    cache = PagedLatentCache(codes, jnp.float32(0.02))
    tables, lens, starts = np.array([[4, 1], [0, 2]], np.int32), np.array([7, 3], np.int32), np.array([0, 2, 3])
    starts = starts.astype(np.int32)
    flags = {"value_size": 32, "scale": 0.2, "implementation": "xla", "logits_soft_cap": 2.0}

    def hold(method, op, *arrays, **flags):
        def of_op(cache, query, *rest):
            return op(query, cache.latent_cache, *rest, latent_scale=cache.latent_scale, **flags)

        assert_same_program(lambda cache, *arrays: getattr(cache, method)(*arrays, **flags), of_op, cache, *arrays)

    query = jnp.asarray(rng.standard_normal((3, 4, LATENT_SIZE)), jnp.bfloat16)
    for lse in ({}, {"return_lse": False}, {"return_lse": True}):
        hold("attend", paged_jax.mla_paged_attention, query[:2], tables, lens, **flags, **lse)
        for causal in ({}, {"causal": True}, {"causal": False}):
            arrays = query, tables, lens, starts
            hold("attend_ragged", paged_jax.ragged_mla_attention, *arrays, **flags, **lse, **causal)

    latent, slots = query[:, 0], np.array([5, -1, 9], np.int32)
    written = cache.write(latent, slots, implementation="xla")
    np.testing.assert_array_equal(
        written.latent_cache, paged_jax.write_to_latent_cache(latent, codes, slots, scale=0.02)
    )
    assert written.latent_scale == cache.latent_scale
    copied = cache.copy_blocks(PAIRS, implementation="xla")
    np.testing.assert_array_equal(copied.latent_cache, oracle.copy(np.asarray(codes), PAIRS))
    other = PagedLatentCache(codes[:3], jnp.float32(0.02))
    swapped = other.swap_blocks_to(cache, PAIRS, implementation="xla")
    np.testing.assert_array_equal(swapped.latent_cache, oracle.swap(np.asarray(codes[:3]), np.asarray(codes), PAIRS))
    assert swapped.latent_scale is cache.latent_scale
    with pytest.raises(ValueError, match="other must have a scale, as this cache has, got one with no scale"):
        cache.swap_blocks_to(PagedLatentCache(codes), PAIRS)
    with pytest.raises(TypeError, match="return_lse must be a static bool, got str"):
        cache.attend(query[:2], tables, lens, return_lse="no", **flags)  # type: ignore[call-overload]


def test_create():
    cache = PagedLatentCache.create(np.int8(100), np.int8(64), 576, dtype=jnp.float8_e4m3fn, latent_scale=0.5)
    assert (cache.num_blocks, cache.block_size, cache.latent_size) == (100, 64, 576)
    assert (cache.dtype, cache.nbytes) == (jnp.float8_e4m3fn, 100 * 64 * 576)
    assert not np.asarray(cache.latent_cache).astype(np.float32).any()
    assert [PagedLatentCache.create(1, 1, size).latent_size for size in (16, 1024)] == [16, 1024]
    wrong = [
        ({"num_blocks": 0}, ValueError, "num_blocks"),
        ({"block_size": 48}, ValueError, "block_size must be one of"),
        ({"block_size": 2.0}, TypeError, "block_size must be an int, got 2.0"),
        ({"latent_size": 568}, ValueError, "latent_size must be a multiple of 16 up to 1024, got 568"),
        ({"latent_size": 1040}, ValueError, "latent_size must be a multiple of 16 up to 1024, got 1040"),
        ({"dtype": jnp.int32}, ValueError, "the cache's dtype must be one of"),
        ({"latent_scale": [1.0]}, ValueError, r"latent_scale must have one of the shapes \(\(\),\), got \(1,\)"),
    ]
    for changes, error, message in wrong:
        with pytest.raises(error, match=message):
            PagedLatentCache.create(**{"num_blocks": 2, "block_size": 16, "latent_size": 64} | changes)


def call_arrays(**changes):
    arrays = {
        "query": jnp.zeros((2, 4, 48), jnp.bfloat16),
        "latent_cache": jnp.zeros((5, 8, 48), jnp.bfloat16),
        "block_tables": jnp.zeros((2, 3), jnp.int32),
        "seq_lens": jnp.zeros((2,), jnp.int32),
        "value_size": 32,
        "scale": 0.2,
    }
    return arrays | changes


WRONG = [
    ({"query": 3}, TypeError, "query must be an array, got int"),
    (
        {"query": jnp.zeros((2, 48), jnp.bfloat16)},
        ValueError,
        "query must have shape [num_seqs, num_heads, latent_size]",
    ),
    ({"query": jnp.zeros((2, 4, 48), jnp.int8)}, TypeError, "query must have dtype float16 or bfloat16 or float32"),
    ({"query": jnp.zeros((2, 0, 48), jnp.bfloat16)}, ValueError, "num_heads must be at least 1, got 0"),
    (
        {"query": jnp.zeros((2, 4, 40), jnp.bfloat16)},
        ValueError,
        "latent_size must be a multiple of 16 up to 1024, got 40",
    ),
    ({"query": jnp.zeros((2, 4, 64), jnp.bfloat16)}, ValueError, "latent_size] = (5, 8, 64), got (5, 8, 48)"),
    ({"latent_cache": jnp.zeros((5, 8, 48), jnp.int32)}, TypeError, "latent_cache must have dtype"),
    ({"latent_cache": jnp.zeros((5, 8, 1, 48))}, ValueError, "latent_cache must have shape [num_blocks, block_size"),
    ({"latent_cache": jnp.zeros((5, 3, 48))}, ValueError, "block_size must be one of"),
    ({"latent_cache": jnp.zeros((5, 8, 48), jnp.int8)}, ValueError, "latent_scale must be given for caches of int8"),
    ({"block_tables": jnp.zeros((2, 3))}, TypeError, "block_tables must have dtype int32"),
    ({"seq_lens": jnp.zeros((3,), jnp.int32)}, ValueError, "seq_lens must have shape [num_seqs] = (2,), got (3,)"),
    ({"value_size": 40}, ValueError, "value_size must be a multiple of 16 up to latent_size = 48, got 40"),
    ({"value_size": 64}, ValueError, "value_size must be a multiple of 16 up to latent_size = 48, got 64"),
    ({"value_size": 0}, ValueError, "value_size must be at least 1, got 0"),
    ({"value_size": None}, TypeError, "value_size must be an int, got None"),
    ({"scale": None}, TypeError, "scale must be a number or an array of floats, got NoneType"),
    ({"scale": jnp.zeros(2)}, ValueError, "scale must have shape (), got (2,)"),
    ({"latent_scale": jnp.zeros(5)}, ValueError, "latent_scale must have shape (), got (5,)"),
    ({"sinks": jnp.zeros(3)}, ValueError, "sinks must have shape [num_heads] = (4,), got (3,)"),
    ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap must be from"),
    ({"max_seq_len": -1}, ValueError, "max_seq_len must be at least 0, got -1"),
    ({"max_query_len": 1.0}, TypeError, "max_query_len must be an int, got 1.0"),
    ({"sliding_window": 4}, TypeError, "unexpected keyword argument 'sliding_window'; options are sinks, "),
    ({"return_lse": 1}, TypeError, "return_lse must be a static bool, got int"),
    ({"implementation": "cuda"}, ValueError, "implementation must be one of"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=lambda x: "-".join(x) if type(x) is dict else "")
def test_wrong_calls(changes, error, message):
    with pytest.raises(error) as raised:
        paged_jax.mla_paged_attention(**call_arrays(**changes))
    assert message in str(raised.value)
    if "seq_lens" in changes:
        return
    with pytest.raises(error) as raised:
        paged_jax.ragged_mla_attention(**call_arrays(**changes), query_start_loc=jnp.zeros(3, jnp.int32))
    assert message.replace("num_seqs, num_heads", "num_tokens, num_heads") in str(raised.value)


def test_wrong_writes_and_copies():
    latent, cache = jnp.zeros((3, 48), jnp.bfloat16), jnp.zeros((5, 8, 48), jnp.bfloat16)
    slots, pairs, pool = jnp.zeros(3, jnp.int32), jnp.zeros((1, 2), jnp.int32), jnp.zeros((5, 2, 8, 16))
    write, copy, swap = paged_jax.write_to_latent_cache, paged_jax.copy_blocks, paged_jax.swap_blocks
    wrong = [
        (lambda: write(latent[0], cache, slots), "latent must have shape [num_tokens, latent_size], got (48,)"),
        (lambda: write(latent, cache[..., :32], slots), "latent_size] = (5, 8, 48), got (5, 8, 32)"),
        (lambda: write(latent, cache, slots[:2]), "slot_mapping must have shape [num_tokens] = (3,), got (2,)"),
        (lambda: write(latent, cache.astype("int8"), slots), "scale must be given for caches of int8, got None"),
        (lambda: copy(pool, None, pairs), "key_cache must be a latent cache [num_blocks, block_size, latent_size]"),
        (lambda: copy([cache, pool], None, pairs), "key_cache[1] must be a latent cache"),
        (lambda: copy([cache, cache[:4]], None, pairs), "key_cache[1] must have num_blocks = 5, got 4"),
        (lambda: swap(cache, None, cache[:, :4], None, pairs), "dst_key_cache must have the blocks of src_key_cache"),
        (lambda: swap(cache, None, cache, pool, pairs), "src_key_cache must have 4 or 5 axes"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            call()
        assert message in str(raised.value)


def test_a_batch_of_decode_calls_is_one_call():
    made = make(next(case for case in CASES if str(case) == "float32"))
    call = partial(paged_jax.mla_paged_attention, value_size=32, scale=0.2)
    arrays = [jnp.asarray(x) for x in made.decode.values()]
    names = list(made.decode)

    def fun(*arrays):
        return call(**dict(zip(names, arrays, strict=True)))

    def loops(fun, *arrays):
        return str(jax.make_jaxpr(fun)(*arrays)).count("scan[")

    stacked = [jnp.stack([x, x]) for x in arrays]
    assert loops(jax.vmap(fun), *stacked) == loops(fun, *arrays)


@pytest.mark.slow_on_cpu  # it fills 2.5 GB
def test_high_block_ids(implementation, device, skip_lacking):
    """The context is in the last blocks; their offsets would wrap around, at 32 bits, into the first ones."""
    num_blocks, block_size, latent_size, seq_len = 2**16 + 8, 128, 288, 200
    assert num_blocks * block_size * latent_size > 2**31
    rng = np.random.default_rng(0)
    # On a CPU an element has one byte, because half of the memory is filled in half of the time.
    cache_dtype, one = (jnp.int8, 32) if implementation == "xla" else (jnp.bfloat16, 1)
    scale = np.float32(1 / one) if one > 1 else None
    latents = (rng.integers(-100, 101, (seq_len, latent_size)) / 32).astype(jnp.bfloat16)
    query = rng.standard_normal((1, 16, latent_size)).astype(jnp.bfloat16)
    tables, lens = np.array([[num_blocks - 1, num_blocks - 3]], np.int32), np.array([seq_len], np.int32)
    slots = tables[0, np.arange(seq_len) // block_size] * block_size + np.arange(seq_len, dtype=np.int32) % block_size
    options = {"value_size": 256, "scale": 0.1, "latent_scale": scale}
    flags = options | {"implementation": implementation}

    @partial(jax.jit, donate_argnums=0)
    def write(cache):
        return paged_jax.write_to_latent_cache(latents, cache, slots, scale=scale)

    @jax.jit
    def attend(cache):
        starts = np.array([0, 1], np.int32)
        decode = paged_jax.mla_paged_attention(query, cache, tables, lens, **flags)
        return decode, paged_jax.ragged_mla_attention(query, cache, tables, lens, starts, **flags)

    with skip_lacking(), jax.default_device(device):
        zeros = jax.jit(jnp.zeros, static_argnums=(0, 1), compiler_options=FULL_COMPILE)  # twice as fast
        cache = write(zeros((num_blocks, block_size, latent_size), cache_dtype))
        outs = attend(cache)
        assert not np.asarray(cache[:8]).any()
    small = np.zeros((2, block_size, latent_size), cache_dtype)
    small.reshape(-1, latent_size)[:seq_len] = (latents.astype(np.float32) * one).astype(cache_dtype)
    arrays = {"query": query, "latent_cache": small, "block_tables": np.array([[0, 1]], np.int32), "seq_lens": lens}
    exact, rough = (each.latent(**arrays, **options) for each in (oracle, plain))
    for out in outs:
        plain.assert_close(np.asarray(out), exact[0], rough[0], "out")
