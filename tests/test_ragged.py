"""Tests ragged_paged_attention and prefix_attention against the float64 oracle, on poisoned inputs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from tests import inputs, oracle, plain
from tests.cases import RAGGED_CASES, Case, Sparse
from tests.test_decode import fixed_shapes, marked, op_options

LIKE_OTHERS = {
    *("heads-of-328-int8", "soft-cap-far-away", "sparse-step", "sparse-large-blocks", "sparse-vllm-e4m3"),
    *("sparse-vllm-bfloat16", "one-query", "shared-blocks", "all-of-it-vllm", "split-float32", "split-vllm-int8"),
}


def is_like_others(case):
    """Whether other cases of ragged attention have the same options; test_decode.py has all pairs of them."""
    pairs = re.fullmatch(r"(hnd|nhd|vllm)-\w+|query-.*|scale-.*|scales-.*|.*-scales|farthest-corner-.*", case.name)
    kept = "hnd-float16", "scale-traced"
    like_decode = "sparse-negative-step", "long"  # test_decode.py has their options, in the same code of XLA's
    return case.name not in kept and (pairs is not None or case.name in LIKE_OTHERS or case.name in like_decode)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", marked(RAGGED_CASES, is_like_others, pytest.mark.gpu))
def test_ragged_and_prefix(case, run):
    made = inputs.make(case)
    static = op_options(made.static) | {"max_seq_len": case.max_seq_len, "return_lse": True}

    def both(ragged, prefix, options, implementation):
        flags = options | static | {"implementation": implementation}
        return (
            paged_jax.ragged_paged_attention(**ragged, **flags),
            paged_jax.prefix_attention(**prefix, **flags),
        )

    results = run(both, ragged=made.ragged, prefix=made.prefix, options=made.arrays)
    options = made.arrays | made.static
    for name, (out, lse) in zip(("ragged", "prefix"), results, strict=True):
        arrays = getattr(made, name)
        exact = getattr(oracle, name)(**arrays, **options)
        rough = getattr(plain, name)(**arrays, **options)
        assert out.dtype == arrays["query"].dtype
        assert lse.dtype == np.float32
        assert np.all(out[made.num_rows :].astype(np.float32) == 0), f"{name}: padding rows"
        plain.assert_close(out, exact[0], rough[0], f"{name} out")
        plain.assert_close(lse, exact[1], rough[1], f"{name} lse")


def test_the_tables_of_prefix_attention_may_hold_the_contexts_alone(run):
    """Sequences are then longer than their rows of the table, and all of their new tokens are attended to."""
    made = inputs.make(Case("context-tables", 2, 1, 64, 16, "bfloat16", seq_lens=(70, 33), query_lens=(40, 5)))
    arrays = made.prefix | {"block_tables": made.prefix["block_tables"][:, :2]}  # of contexts of 30 and 28 tokens
    out = run(paged_jax.prefix_attention, **arrays)
    exact, rough = (module.prefix(**made.prefix)[0] for module in (oracle, plain))
    plain.assert_close(out, exact, rough, "out")


def test_new_tokens_that_float16_cannot_hold(run):
    hold_new_tokens_that_float16_cannot_hold(run)


def hold_new_tokens_that_float16_cannot_hold(run):
    """Products with a cache of 8 bits may be in float16, but not those with new tokens beside it."""
    made = inputs.make(
        Case("beyond", 2, 1, 64, 16, "bfloat16", "float8_e4m3fn", seq_lens=(40,), query_lens=(9,), padding=0)
    )
    arrays = made.prefix | {
        "value": (made.prefix["value"].astype(np.float32) * 2.0**17).astype(inputs.dtype_of("bfloat16"))
    }
    out = run(paged_jax.prefix_attention, **arrays)
    exact, rough = (module.prefix(**arrays)[0] for module in (oracle, plain))
    plain.assert_close(out, exact, rough, "out")


NOT_CAUSAL = [
    Case("all-of-it", 4, 2, 32, 16),
    Case("all-of-it-long", 4, 1, 16, 8, "bfloat16", seq_lens=(300, 7, 129), query_lens=(200, 7, 2)),
    Case("all-of-it-int8", 4, 2, 32, 16, "float16", "int8", "nhd", k_scale="head", v_scale="slot", sinks=True),
    Case("all-of-it-vllm", 4, 2, 64, 16, "bfloat16", "float8_e4m3fn", "vllm", logits_soft_cap=3.0),
    Case("all-of-it-bounded", 4, 2, 32, 16, max_seq_len=130),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case", marked(NOT_CAUSAL, lambda case: case.name in ("all-of-it", "all-of-it-vllm"), pytest.mark.gpu)
)
def test_without_causality_every_query_sees_all_of_its_sequence(case, run):
    made = inputs.make(case)
    hold_without_causality(made, {"ragged": made.ragged, "prefix": made.prefix}, case, run)
    # The result must differ from the causal one, or the test would test nothing.
    options = made.arrays | made.static
    causal, all_of_it = (oracle.ragged(**made.ragged, **options, causal=flag)[0] for flag in (True, False))
    assert np.abs(causal - all_of_it)[: made.num_rows].max() > 0.1


def test_without_causality_there_may_be_more_queries_than_tokens(run):
    case = Case("more-queries", 4, 2, 32, 16, seq_lens=(70, 9, 33), query_lens=(70, 9, 2))
    made = inputs.make(case)
    ragged = made.ragged | {"seq_lens": np.array([6, 3, 33], np.int32)}
    hold_without_causality(made, {"ragged": ragged}, case, run)


def hold_without_causality(made, calls, case, run):
    """Compares the ops named in `calls`, with their arrays, with the oracle."""
    static = op_options(made.static) | {"max_seq_len": case.max_seq_len, "causal": False, "return_lse": True}
    functions = {"ragged": paged_jax.ragged_paged_attention, "prefix": paged_jax.prefix_attention}

    def each(calls, options, implementation):
        flags = options | static | {"implementation": implementation}
        return {name: functions[name](**arrays, **flags) for name, arrays in calls.items()}

    results = run(each, calls=calls, options=made.arrays)
    options = made.arrays | made.static | {"causal": False}
    for name, (out, lse) in results.items():
        exact = getattr(oracle, name)(**calls[name], **options)
        rough = getattr(plain, name)(**calls[name], **options)
        assert np.all(out[made.num_rows :].astype(np.float32) == 0), f"{name}: padding rows"
        plain.assert_close(out, exact[0], rough[0], f"{name} out")
        plain.assert_close(lse, exact[1], rough[1], f"{name} lse")


# These contexts are so long that GPU implementations split them over programs.
SPLIT = [
    Case("split", 4, 2, 64, 16, "bfloat16", seq_lens=(1500, 3, 700, 0), query_lens=(1, 3, 20, 0), padding=4),
    Case("split-float32", 6, 2, 32, 16, seq_lens=(900, 1300), query_lens=(2, 70), alibi=True, sinks=True, scale=-0.2),
    Case(
        "split-vllm-int8", 4, 2, 64, 16, "bfloat16", "int8", "vllm", (1100, 9), (7, 1), k_scale="head", v_scale="slot",
        sinks=True,
    ),
    Case(
        "split-everything", 8, 2, 64, 16, "bfloat16", "float8_e4m3fn", "nhd", (1500, 70, 1001), (5, 70, 1),
        max_seq_len=1504, scale="traced", alibi=True, sliding_window=1200, logits_soft_cap=4.0, sinks=True,
        block_sparse=Sparse(6, 2, 64, 1), k_scale="slot", v_scale="head",
    ),
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", marked(SPLIT, is_like_others, pytest.mark.gpu))
def test_long_contexts(case, run):
    test_ragged_and_prefix(case, run)


def hold_in_any_order(run, *, longest=1300):
    """Checks that a sequence's results have the same bits wherever it is in the batch, and in every run."""
    lens = {"seq_lens": (longest // 2, 7, 0, longest), "query_lens": (1, 7, 0, 20), "padding": 0}
    case = Case("order", 2, 1, 16, 16, "bfloat16", **lens)
    arrays = inputs.make(case).ragged
    order = np.array([3, 1, 0, 2])
    starts = arrays["query_start_loc"]
    rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
    lens = np.diff(starts)[order]
    other = arrays | {
        "query": arrays["query"][rows],
        "block_tables": arrays["block_tables"][order],
        "seq_lens": arrays["seq_lens"][order],
        "query_start_loc": np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
    }
    op = functools.partial(paged_jax.ragged_paged_attention, return_lse=True)
    out, lse = run(op, quick=False, **arrays)
    for again, taken in ((arrays, slice(None)), (other, rows)):
        again_out, again_lse = run(op, quick=False, **again)
        np.testing.assert_array_equal(again_out.astype(np.float32), out[taken].astype(np.float32))
        np.testing.assert_array_equal(again_lse, lse[taken])


def test_random_batches_in_one_compiled_program(implementation, device, skip_lacking):
    """The lengths of chunks are data, so one program computes random mixes of chunks, decodes and empty rows."""
    traces = []

    @jax.jit
    def function(arrays):
        traces.append(1)
        return paged_jax.ragged_paged_attention(**arrays, return_lse=True, implementation=implementation)

    rng = np.random.default_rng(1)
    for trial in range(15):
        contexts = rng.choice([0, 0, 1, 15, 16, 33, 60], 4)
        queries = rng.choice([0, 1, 1, 2, 8, 16, 17], 4)
        case = Case(
            f"chunks-{trial}",
            head_size=16,
            seq_lens=tuple(int(n) for n in contexts + queries),
            query_lens=tuple(int(n) for n in queries),
            padding=70 - int(queries.sum()),
        )
        arrays = fixed_shapes(inputs.make(case).ragged, num_blocks=30, width=6)
        with skip_lacking():
            out, lse = function(jax.device_put(arrays, device))
        exact, rough = oracle.ragged(**arrays), plain.ragged(**arrays)
        plain.assert_close(out, exact[0], rough[0], f"out of {case}")
        plain.assert_close(lse, exact[1], rough[1], f"lse of {case}")
    assert len(traces) == 1


def test_a_batch_of_padding_alone_has_no_sequences():
    pool, tables = jnp.ones((3, 2, 4, 8)), jnp.zeros((0, 2), jnp.int32)
    arrays = jnp.ones((5, 4, 8)), pool, pool, tables, jnp.zeros(0, jnp.int32), jnp.zeros(1, jnp.int32)
    out, lse = paged_jax.ragged_paged_attention(*arrays, return_lse=True, implementation="xla")
    assert not out.any()
    assert np.isneginf(lse).all()


def test_what_the_flags_return():
    made = inputs.make(Case("flags", dtype="bfloat16"))

    def shapes(operation, arrays, **flags):
        results = jax.eval_shape(lambda arrays: operation(**arrays, **flags), arrays)
        return jax.tree.map(lambda result: (result.shape, result.dtype), results)

    out, lse = ((107, 4, 32), jnp.bfloat16), ((107, 4), jnp.float32)
    for operation, arrays in (
        (paged_jax.ragged_paged_attention, made.ragged),
        (paged_jax.prefix_attention, made.prefix),
    ):
        assert shapes(operation, arrays) == out
        assert shapes(operation, arrays, return_lse=True) == (out, lse)


@pytest.mark.parametrize("context", [0, 4])
def test_prefix_tables_need_hold_the_context_only(context, run):
    """The op gets the new tokens' keys as arguments, so that the tables need to hold the context only."""
    made = inputs.make(Case("prefix", block_size=4, seq_lens=(context + 6,), query_lens=(6,)))
    arrays = made.prefix | {"block_tables": made.prefix["block_tables"][:, : context // 4]}
    exact, rough = oracle.prefix(**made.prefix), plain.prefix(**made.prefix)
    out = run(paged_jax.prefix_attention, **arrays)
    plain.assert_close(out, exact[0], rough[0], "out")
