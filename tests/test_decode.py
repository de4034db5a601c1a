"""Tests paged_attention_v1, _v2 and paged_attention against the float64 oracle, on poisoned inputs."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from paged_jax.shapes import QUERY_DTYPES
from tests import inputs, oracle, plain
from tests.cases import DECODE_CASES, MODELS, Case, Sparse

BY_NAME = {case.name: case for case in DECODE_CASES}


def op_options(static):
    """Gives the static options in the library's types."""
    pattern = static["block_sparse"]
    return static | {"block_sparse": pattern and paged_jax.BlockSparse(**pattern._asdict())}


def partition_count(case, tables):
    """How many partitions v2's residuals have."""
    max_seq_len = case.max_seq_len or tables.shape[1] * case.block_size
    return -(-max_seq_len // case.partition_size)


def marked(cases, is_like_others, mark):
    """Parameters, with a mark where the case is like others. GPUs alone run `ON_GPUS` and the shapes of real models."""
    marks = [pytest.mark.gpu if case in MODELS or case.name in ON_GPUS else mark for case in cases]
    return [
        pytest.param(case, id=str(case), marks=[mark] * (case in MODELS or is_like_others(case)))
        for case, mark in zip(cases, marks, strict=True)
    ]


# These cases of `LIKE_OTHERS` run on GPUs only. XLA converts a gathered tile, and brings it into order, apart from each
# other: the cases that stay have each layout and each dtype, and `tests.fuzz` draws their pairs.
ON_GPUS = {
    *("hnd-float32", "hnd-bfloat16", "hnd-e5m2", "nhd-float16", "nhd-bfloat16", "nhd-e4m3", "nhd-int8"),
    *("vllm-float32", "vllm-float16", "vllm-e5m2", "scales-of-two-shapes", "tiny-scales"),
    *("window-of-everything", "scale", "sparse-off", "one-sequence", "one-query", "context-without-query"),
    *("huge-logits-capped", "scale-negative-bfloat16", "farthest-corner-e5m2", "sparse-vllm-e4m3", "tiny-scales"),
    *("sparse-vllm-bfloat16", "scales-of-two-shapes-2", "scale-on-a-wide-cache", "query-float32-cache-bfloat16"),
    "query-float16-cache-bfloat16",
}

# XLA masks logits and adds up a tile in one place for all ops (xla/softmax.py): on a CPU, test_ragged.py alone runs
# these, or cases with their options. What decode does by itself, the cases that stay have.
IN_RAGGED = {
    *("alibi", "soft-cap", "sinks", "scale-traced", "sparse", "sparse-large-blocks", "huge-logits"),
    *("values-near-overflow", "hnd-float16", "nhd-float32", "vllm-e4m3", "vllm-bfloat16", "vllm-int8", "hnd-int8"),
    *("heads-of-328-int8", "shared-blocks", "max-seq-len"),
}
ON_GPUS |= IN_RAGGED

# Other cases have the options of these in other combinations.
LIKE_OTHERS = {
    *("hnd-float32", "hnd-bfloat16", "hnd-e5m2", "nhd-float16", "nhd-e4m3", "nhd-int8", "vllm-float32", "vllm-e5m2"),
    *("vllm-bfloat16", "heads-of-328-int8", "window-of-everything", "scale", "sparse-off", "sparse-large-blocks"),
    *("sparse-vllm-e4m3", "sparse-vllm-bfloat16", "scales-of-two-shapes-2", "query-bfloat16-cache-float32"),
    *("query-float16-cache-bfloat16", "farthest-corner-e5m2", "one-sequence", "one-query", "context-without-query"),
    *("long-window", "huge-logits-capped", "scale-negative-bfloat16"),
    *("scales-of-two-shapes", "tiny-scales", "vllm-float16", "nhd-bfloat16", "scale-on-a-wide-cache"),
    "query-float32-cache-bfloat16",
}


SLOW = LIKE_OTHERS | IN_RAGGED


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", marked(DECODE_CASES, lambda case: case.name in SLOW, pytest.mark.slow_on_cpu))
def test_decode(case, run):
    made = inputs.make(case)
    static = op_options(made.static) | {"max_seq_len": case.max_seq_len, "return_lse": True}

    def both(arrays, options, implementation):
        flags = arrays | options | static | {"implementation": implementation}
        one = paged_jax.paged_attention_v1(**flags)
        two = paged_jax.paged_attention_v2(**flags, partition_size=case.partition_size, return_residuals=True)
        return one, two

    (out, lse), (out2, lse2, exp_sums, max_logits, tmp_out) = run(both, arrays=made.decode, options=made.arrays)
    options = made.arrays | made.static
    exact, rough = oracle.decode(**made.decode, **options), plain.decode(**made.decode, **options)
    assert out.dtype == out2.dtype == made.decode["query"].dtype
    assert lse.dtype == lse2.dtype == exp_sums.dtype == max_logits.dtype == np.float32
    plain.assert_close(out, exact[0], rough[0], "v1 out")
    plain.assert_close(lse, exact[1], rough[1], "v1 lse")
    plain.assert_close(out2, exact[0], rough[0], "v2 out")
    plain.assert_close(lse2, exact[1], rough[1], "v2 lse")
    check_residuals(case, made, (exp_sums, max_logits, tmp_out), exact, rough)


def check_residuals(case, made, residuals, exact_decode, rough_decode):
    """Compares each partition with the oracle, and the reduced residuals with the result."""
    count = partition_count(case, made.decode["block_tables"])
    options = made.arrays | made.static | {"partition_size": case.partition_size, "num_partitions": count}
    exact, rough = oracle.residuals(**made.decode, **options), plain.residuals(**made.decode, **options)
    # The sum of an empty partition is 0 and every other one at least 1, so the test compares relative errors.
    unit = np.maximum(exact[0], 1)
    plain.assert_close(residuals[0] / unit, exact[0] / unit, rough[0] / unit, "exp_sums")
    plain.assert_close(residuals[1], exact[1], rough[1], "max_logits")
    plain.assert_close(residuals[2], exact[2], rough[2], "tmp_out")
    empty = exact[0] == 0
    assert np.all(residuals[0][empty] == 0)
    assert np.all(residuals[1][empty] == -np.inf)
    assert np.all(residuals[2][empty].astype(np.float32) == 0)
    if not case.sinks:
        reduced = oracle.reduce_partitions(*(array.astype(np.float64) for array in residuals))
        plain.assert_close(reduced, exact_decode[0], rough_decode[0], "reduced residuals")


def test_scales_may_be_negative_or_zero(run):
    hold_scales_of_any_sign(run)


def hold_scales_of_any_sign(run):
    """Compares with the oracle where factors of tokens are negative or 0, or all 0 as in the second sequence."""
    case = Case(
        "signs", 4, 2, 32, 16, "float32", "int8", k_scale="head", v_scale="slot", seq_lens=(37, 20, 9), query_lens=None
    )
    hold_scaled(run, case, -1)
    # A weight times a negative scale, divided by the largest one of other tokens, would overflow float16.
    hold_scaled(run, replace(case, dtype="bfloat16"), -1e6)


def hold_scaled(run, case, factor):
    made = inputs.make(case)
    k_scale, v_scale = made.arrays["k_scale"].copy(), made.arrays["v_scale"].copy()
    k_scale[1] *= -1
    v_scale[..., ::2] *= factor
    v_scale[..., ::5] *= 0
    v_scale[made.decode["block_tables"][1, :2]] *= 0
    options = {"k_scale": k_scale, "v_scale": v_scale}

    def function(arrays, options, implementation):
        return paged_jax.paged_attention(**arrays, **options, return_lse=True, implementation=implementation)

    out, lse = run(function, arrays=made.decode, options=options)
    options = options | made.static
    exact, rough = oracle.decode(**made.decode, **options), plain.decode(**made.decode, **options)
    plain.assert_close(out, exact[0], rough[0], "out")
    plain.assert_close(lse, exact[1], rough[1], "lse")
    assert np.all(out[1] == 0)


@pytest.mark.slow_on_cpu
def test_block_sparse_shifts_may_be_beyond_32_bits(run):
    hold_shifts_beyond_32_bits(run)


def hold_shifts_beyond_32_bits(run):
    """Compares with the oracle where the step, the rank or their product with the number of heads is beyond int32."""
    case = Case("shifts", 4, 2, 64, 8, "bfloat16", seq_lens=(70, 33), query_lens=(3, 1))
    made = inputs.make(case)
    pairs = (2**30, 0), (-(2**31), 0), (1, 2**31 - 1), (3, 2**29), (2**29, 2**29)
    patterns = [Sparse(1, 5, 8, step, rank) for step, rank in pairs]

    def function(decode, ragged, implementation):
        options = [op_options({"block_sparse": pattern}) | {"implementation": implementation} for pattern in patterns]
        decoded = [paged_jax.paged_attention_v1(**decode, **each) for each in options]
        return decoded, [paged_jax.ragged_paged_attention(**ragged, **each) for each in options]

    results = run(function, decode=made.decode, ragged=made.ragged)
    for name, outs in zip(("decode", "ragged"), results, strict=True):
        arrays = getattr(made, name)
        for pattern, out in zip(patterns, outs, strict=True):
            exact, rough = (getattr(each, name)(**arrays, block_sparse=pattern) for each in (oracle, plain))
            plain.assert_close(out, exact[0], rough[0], f"{name}, {pattern}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["hnd-bfloat16", "farthest-corner", "all-empty", "equal-logits-over-100k"])
def test_paged_attention_picks_one_of_them(name, run):
    case = BY_NAME[name]
    made = inputs.make(case)
    static = op_options(made.static) | {"max_seq_len": case.max_seq_len}

    def function(arrays, options, implementation):
        return paged_jax.paged_attention(**arrays, **options, **static, return_lse=True, implementation=implementation)

    out, lse = run(function, arrays=made.decode, options=made.arrays)
    options = made.arrays | made.static
    exact, rough = oracle.decode(**made.decode, **options), plain.decode(**made.decode, **options)
    plain.assert_close(out, exact[0], rough[0], "out")
    plain.assert_close(lse, exact[1], rough[1], "lse")


def test_v2_does_not_depend_on_the_partition_size_but_for_rounding(run):
    case = BY_NAME["hnd-float32"]
    made = inputs.make(case)

    def function(arrays, implementation):
        return [
            paged_jax.paged_attention_v2(**arrays, partition_size=size, implementation=implementation)
            for size in (16, 48, 512)
        ]

    exact, rough = oracle.decode(**made.decode), plain.decode(**made.decode)
    for out in run(function, arrays=made.decode):
        plain.assert_close(out, exact[0], rough[0], "v2 out")


def test_random_lengths_in_one_compiled_program(implementation, device, skip_lacking):
    """Lengths and tables are data, so one program computes random batches at and near all boundaries."""
    traces = []

    @jax.jit
    def function(arrays):
        traces.append(1)
        return paged_jax.paged_attention_v2(**arrays, partition_size=32, return_lse=True, implementation=implementation)

    rng = np.random.default_rng(0)
    boundaries = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128]
    for trial in range(20):
        lengths = tuple(int(n) for n in rng.choice(boundaries, 4))
        made = inputs.make(Case(f"lengths-{trial}", head_size=16, seq_lens=lengths, query_lens=None))
        arrays = fixed_shapes(made.decode, num_blocks=40, width=8)
        with skip_lacking():
            out, lse = function(jax.device_put(arrays, device))
        exact, rough = oracle.decode(**arrays), plain.decode(**arrays)
        plain.assert_close(out, exact[0], rough[0], f"out of {lengths}")
        plain.assert_close(lse, exact[1], rough[1], f"lse of {lengths}")
    assert len(traces) == 1


def fixed_shapes(arrays, num_blocks, width):
    """Extends the inputs to a pool of `num_blocks` and to tables of `width` columns, with poison."""
    arrays = dict(arrays)
    for name in ("key_cache", "value_cache"):
        cache = arrays[name]
        arrays[name] = np.full((num_blocks, *cache.shape[1:]), np.nan, cache.dtype)
        arrays[name][: len(cache)] = cache
    tables = arrays["block_tables"][:, :width]
    arrays["block_tables"] = np.full((len(tables), width), -1, np.int32)
    arrays["block_tables"][:, : tables.shape[1]] = tables
    return arrays


@pytest.mark.parametrize("name", ["opt-125m", "opt-30b"])
def test_real_opt_shapes(name):
    """The ops take the shapes with which vLLM decoded OPT; the cases above test the numbers."""
    golden = json.loads((Path(__file__).parent / "golden" / "opt_shapes.json").read_text())[name]
    case = BY_NAME[name]
    for field in ("num_heads", "num_kv_heads", "head_size", "block_size"):
        assert getattr(case, field) == golden[field]
    arrays = {key: jax.ShapeDtypeStruct(golden[key], jnp.float16) for key in ("query", "key_cache", "value_cache")}
    arrays["block_tables"] = jax.ShapeDtypeStruct(golden["block_tables"], jnp.int32)
    arrays["seq_lens"] = jax.ShapeDtypeStruct((len(golden["seq_lens"]),), jnp.int32)
    for operation in (paged_jax.paged_attention, paged_jax.paged_attention_v1, paged_jax.paged_attention_v2):
        flags = {"layout": "vllm", "scale": golden["scale"], "max_seq_len": golden["max_seq_len"]}
        out = jax.eval_shape(lambda arrays: operation(**arrays, **flags), arrays)  # noqa: B023
        assert out.shape == tuple(golden["query"])


def test_what_the_flags_return():
    made = inputs.make(Case("flags", dtype="bfloat16"))

    def shapes(operation, **flags):
        results = jax.eval_shape(lambda arrays: operation(**arrays, **flags), made.decode)
        return jax.tree.map(lambda result: (result.shape, result.dtype), results)

    out = ((6, 4, 32), jnp.bfloat16)
    lse = sums = ((6, 4), jnp.float32)
    for operation in (paged_jax.paged_attention, paged_jax.paged_attention_v1, paged_jax.paged_attention_v2):
        assert shapes(operation) == out
        assert shapes(operation, return_lse=True) == (out, lse)
    sums = ((6, 4, 3), jnp.float32)
    flags = {"partition_size": 64, "return_residuals": True}
    *head, tmp_out = shapes(paged_jax.paged_attention_v2, **flags)
    assert head == [out, sums, sums]
    assert tmp_out[0] == (6, 4, 3, 32)
    *head, tmp_out = shapes(paged_jax.paged_attention_v2, **flags, return_lse=True)
    assert head == [out, lse, sums, sums]
    assert tmp_out[0] == (6, 4, 3, 32)


def test_what_is_not_a_number_shows():
    """NaN in an input must show in the result: a diverged model must not look like a row without tokens."""
    made = inputs.make(Case("nan", seq_lens=(5, 9), query_lens=None))
    made.decode["query"][0, 0, 0] = np.nan
    for op in (paged_jax.paged_attention_v1, paged_jax.paged_attention_v2):
        out, lse = op(**made.decode, return_lse=True, implementation="xla")
        assert np.isnan(out[0, 0].astype(np.float32)).all()
        assert np.isnan(lse[0, 0])
        assert np.isfinite(out[1].astype(np.float32)).all()


NOT_NUMBERS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cache_dtype", NOT_NUMBERS)
def test_what_a_cache_has_that_is_not_a_number_shows(cache_dtype, run):
    hold_what_is_not_a_number(run, cache_dtype)


def hold_what_is_not_a_number(run, cache_dtype, head_size=64):
    """NaN in a slot that a query sees must reach each head, or each element, that is computed from it."""
    dtype = cache_dtype if cache_dtype in QUERY_DTYPES else "bfloat16"
    case = Case("nan", 4, 2, head_size, 16, dtype, cache_dtype, seq_lens=(37, 20, 9), query_lens=None)
    made = inputs.make(case)
    tables = made.decode["block_tables"]
    made.decode["key_cache"][tables[0, 1], 1, 3, 5] = np.nan
    made.decode["value_cache"][tables[1, 0], 0, 7, 9] = np.nan

    def function(arrays, implementation):
        return paged_jax.paged_attention(**arrays, return_lse=True, implementation=implementation)

    out, lse = (x.astype(np.float32) for x in run(function, arrays=made.decode))
    wrong = np.zeros(out.shape, bool)
    wrong[0, 2:] = wrong[1, :2, 9] = True
    np.testing.assert_array_equal(np.isnan(out), wrong)
    np.testing.assert_array_equal(np.isnan(lse), [[False, False, True, True], [False] * 4, [False] * 4])


def test_huge_logits_of_partitions(run):
    hold_huge_logits_of_partitions(run)


def hold_huge_logits_of_partitions(run):
    """Logits near 131072 grow by 1/2 from partition to partition. Their rounding errors must not become weights."""
    case = Case("huge", 1, 1, 64, 16, "float16", seq_lens=(64,), query_lens=None)
    made = inputs.make(case)
    arrays = made.decode | {name: np.zeros_like(made.decode[name]) for name in ("query", "key_cache")}
    arrays["query"][..., :2] = 2048
    arrays["key_cache"][..., 0] = 32
    for i, block in enumerate(arrays["block_tables"][0, :4]):
        arrays["key_cache"][block, ..., 1] = i * 2.0**-13
    op = partial(paged_jax.paged_attention_v2, partition_size=16, scale=2.0)
    out = run(op, **arrays)
    exact, rough = (module.decode(**arrays, scale=2.0)[0] for module in (oracle, plain))
    plain.assert_close(out, exact, rough, "out")


def test_v2_has_partitions_of_512_tokens_unless_it_is_told_otherwise():
    arrays = inputs.make(Case("partitions", 2, 1, 8, 256, seq_lens=(1024,), query_lens=None, spare_columns=0)).decode
    op = partial(paged_jax.paged_attention_v2, return_residuals=True)
    assert jax.eval_shape(op, **arrays)[2].shape == (1, 2, 2)


def test_partitions_longer_than_every_context(run):
    """A partition may be longer than memory; the part past the table takes none."""
    made = inputs.make(Case("long-partition", seq_lens=(5, 30), query_lens=None))
    v2 = partial(paged_jax.paged_attention_v2, partition_size=2**31 - 16, return_residuals=True)
    out, exp_sums, *_ = run(v2, **made.decode)
    exact, rough = oracle.decode(**made.decode), plain.decode(**made.decode)
    plain.assert_close(out, exact[0], rough[0], "out")
    assert exp_sums.shape == (2, 4, 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("max_seq_len", [0, 10, 16])
def test_v1_and_v2_stop_at_max_seq_len(max_seq_len):
    made = inputs.make(Case("bound", seq_lens=(5, 30), query_lens=None))
    v1, v2 = (
        op(**made.decode, max_seq_len=max_seq_len, return_lse=True, implementation="xla")
        for op in (paged_jax.paged_attention_v1, partial(paged_jax.paged_attention_v2, partition_size=16))
    )
    for one, two in zip(v1, v2, strict=True):
        np.testing.assert_allclose(one.astype(np.float32), two.astype(np.float32), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("sliding_window", [None, 40])
def test_max_seq_len_cuts_a_sequence_whose_query_stays_at_its_end(sliding_window, run):
    hold_cut_sequences(sliding_window, run)


def hold_cut_sequences(sliding_window, run):
    """Windows and ALiBi count from the query, which may be behind all that it sees, or see nothing."""
    lens = (50, 20, 90, 100, 130)
    case = Case("cut", 4, 2, 64, 16, "bfloat16", seq_lens=lens, query_lens=None, alibi=True)
    made = inputs.make(replace(case, sliding_window=sliding_window))

    def function(arrays, options, implementation):
        flags = arrays | options | op_options(made.static) | {"max_seq_len": 60, "implementation": implementation}
        v2 = partial(paged_jax.paged_attention_v2, partition_size=16)
        return [op(**flags, return_lse=True) for op in (paged_jax.paged_attention_v1, v2)]

    options = made.arrays | made.static
    out, lse = oracle.ragged(**made.decode, query_start_loc=np.arange(len(lens) + 1), max_seq_len=60, **options)
    for results in run(function, arrays=made.decode, options=made.arrays):
        np.testing.assert_allclose(results[0].astype(np.float32), out, rtol=2e-2, atol=1e-2)
        np.testing.assert_allclose(results[1], lse, rtol=1e-2, atol=1e-2)


def test_a_head_whose_sink_is_off(run):
    """A sink of -inf adds nothing to its head's sum, and changes no other head."""
    made = inputs.make(Case("sink-off", 4, 2, 64, 16, "bfloat16", seq_lens=(40, 7), query_lens=None, sinks=True))
    sinks = np.array([0.5, -np.inf, -np.inf, 1.0], np.float32)

    def function(arrays, sinks, implementation):
        v1 = paged_jax.paged_attention_v1(**arrays, sinks=sinks, implementation=implementation)
        return v1, paged_jax.paged_attention_v2(**arrays, sinks=sinks, partition_size=16, implementation=implementation)

    options = made.arrays | {"sinks": sinks} | made.static
    exact, rough = oracle.decode(**made.decode, **options), plain.decode(**made.decode, **options)
    for out in run(function, arrays=made.decode, sinks=sinks):
        plain.assert_close(out, exact[0], rough[0], "out")
