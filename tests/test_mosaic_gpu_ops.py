"""Tests which Mosaic GPU kernel runs ragged attention (single queries are decode), and where it comes first."""

from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from paged_jax import _dispatch, _validate
from paged_jax.kernels import mosaic_gpu
from paged_jax.kernels.mosaic_gpu.decode import call as decode
from paged_jax.kernels.mosaic_gpu.decode import choose
from paged_jax.kernels.mosaic_gpu.decode.tuning import Merge
from paged_jax.kernels.mosaic_gpu.ops import is_decode
from paged_jax.kernels.mosaic_gpu.ragged import call as ragged
from paged_jax.kernels.problem import Device, Problem
from tests import inputs, oracle, plain
from tests.cases import Sparse
from tests.mosaic_interpreter import MIDDLE_GPU, SMALL_GPU, TINY_GPU, run_op
from tests.ragged_interpreter import call
from tests.test_cache_ops import assert_same_bytes
from tests.test_mosaic_gpu_ragged import TINY_TILES, check, operands_of, prefix_operands_of, small

# NumPy gives this warning when arithmetic meets the poison, which is NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

ONE_QUERY = [
    small("query", 4, 2, 64, 16, "bfloat16", seq_lens=(130,), query_lens=(1,), padding=0),
    small("padding", 4, 2, 64, 16, "bfloat16", seq_lens=(130,), query_lens=(0,), padding=1),
    small("empty", 4, 2, 64, 16, "bfloat16", seq_lens=(0,), query_lens=(0,), padding=1, sinks=True),
    small("options", 7, 1, 64, 32, "bfloat16", "int8", seq_lens=(150,), query_lens=(1,), padding=0, alibi=True,
          sinks=True, k_scale="head", v_scale="scalar", sliding_window=90, logits_soft_cap=2.0, max_seq_len=150),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ONE_QUERY, ids=str)
def test_one_query_in_the_interpreter(case):
    made = inputs.make(case)
    with mock.patch.object(ragged, "ragged_paged_attention", side_effect=AssertionError("the ragged kernel runs")):
        check(case, made, run_op("ragged_paged_attention", SMALL_GPU, *operands_of(case, made)))
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*ONE_QUERY, replace(ONE_QUERY[0], name="long", seq_lens=(70_000,))], ids=str)
def test_one_query_on_a_gpu(case):
    made = inputs.make(case)
    operands = jax.device_put(operands_of(case, made), jax.devices("gpu")[0])
    function = jax.jit(mosaic_gpu.ragged_paged_attention)
    results, again = (jax.tree.map(np.asarray, function(*operands)) for _ in range(2))
    check(case, made, results)
    for actual, wanted in zip(again, results, strict=True):
        assert_same_bytes(actual, wanted, "a second run")


SINGLE = {"seq_lens": (9, 130, 0, 70, 33), "query_lens": (1, 0, 0, 1, 1), "padding": 2}
SINGLE_QUERIES = [
    small("more-sequences", 8, 2, 64, 16, "bfloat16", **SINGLE | {"padding": 0}, sinks=True),
    small("some-padding", 6, 2, 64, 16, "bfloat16", **SINGLE | {"padding": 1}),
    small("one-row", 4, 2, 64, 16, "bfloat16", seq_lens=(9, 130, 70), query_lens=(0, 1, 0), padding=0),
    small("options", 4, 1, 64, 32, "bfloat16", "int8", **SINGLE, alibi=True, k_scale="head", v_scale="scalar",
          sliding_window=40, logits_soft_cap=2.0),
]  # fmt: skip

MANY_QUERIES = [
    small(f"{num_seqs}-sequences", 8, 2, 64, 16, "bfloat16", seq_lens=tuple(37 * i % 200 for i in range(num_seqs)),
          query_lens=tuple(int(i % 5 < 3 and 37 * i % 200 > 0) for i in range(num_seqs)), padding=9)
    for num_seqs in (270, 520)
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", SINGLE_QUERIES, ids=str)
def test_single_queries_in_the_interpreter(case):
    """Decode runs sequences that are known to have one query or none, wherever their rows of the query are."""
    made = inputs.make(case)
    operands = operands_of(case, made, max_query_len=1)
    with mock.patch.object(ragged, "ragged_paged_attention", side_effect=AssertionError("the ragged kernel runs")):
        check(case, made, run_op("ragged_paged_attention", SMALL_GPU, *operands))
    assert not interpret_pallas_call.get_races().races_found


TUNINGS = [
    (2, TINY_GPU, {"fold": 2}),
    (1, MIDDLE_GPU, {"queues": 10, "merge": Merge.KERNEL}),
    (1, Device(90, 16), {"merge": Merge.CLUSTER}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("num_kv_heads", "gpu", "chosen"), TUNINGS, ids=["folded", "queues", "cluster"])
def test_single_queries_of_each_tuning(num_kv_heads, gpu, chosen):
    """A program, or a merge, stores results in the rows of the queries, and stores nothing elsewhere."""
    case = small("tuning", 4, num_kv_heads, 64, 16, "bfloat16", **SINGLE | {"padding": 1}, sinks=True)
    made = inputs.make(case)
    operands = operands_of(case, made, max_query_len=1)
    arrays = operands.query, operands.key_cache, operands.value_cache, operands.block_tables
    problem = Problem.of_call(*arrays, operands.options)
    tuned = choose.balanced(problem, gpu)
    assert {name: getattr(tuned, name) for name in chosen} == chosen
    check(case, made, run_op("ragged_paged_attention", gpu, *operands))
    assert not interpret_pallas_call.get_races().races_found


def test_more_single_queries_than_said():
    """If a sequence has more queries than `max_query_len` says, the other sequences' results are still right."""
    lens = {"seq_lens": (9, 130, 70, 0, 33), "query_lens": (1, 2, 1, 0, 0), "padding": 1}
    case = small("more", 4, 2, 64, 16, "bfloat16", **lens)
    made = inputs.make(case)
    results = run_op("ragged_paged_attention", SMALL_GPU, *operands_of(case, made, max_query_len=1))
    exact, rough = (module.ragged(**made.ragged, **made.arrays, **made.static) for module in (oracle, plain))
    rows = np.array([0, 3])  # the queries of the first and the third sequence
    for found, wanted, yardstick, what in zip(results, exact, rough, ("out", "lse"), strict=True):
        plain.assert_close(found[rows], wanted[rows], yardstick[rows], what)
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.slow
def test_no_queries():
    """All rows are padding, whether the bound says so or not."""
    case = small("none", 4, 2, 64, 16, "bfloat16", **SINGLE | {"query_lens": (0, 0, 0, 0, 0), "padding": 4})
    made = inputs.make(case)
    check(case, made, call("ragged_paged_attention", operands_of(case, made, max_query_len=0), **TINY_TILES))
    check(case, made, run_op("ragged_paged_attention", SMALL_GPU, *operands_of(case, made, max_query_len=1)))
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize(("most", "padding"), [(1, 3), (2, 2)])
def test_not_decode(most, padding):
    """The ragged kernel runs if there are more rows than sequences, or if a sequence may have two queries."""
    case = small("ragged", 4, 2, 64, 16, "bfloat16", **SINGLE | {"padding": padding})
    operands = operands_of(case, inputs.make(case), max_query_len=most)
    results = operands.query, np.zeros(operands.query.shape[:2], np.float32)
    with mock.patch.object(ragged, "ragged_paged_attention", return_value=results) as kernel:
        run_op("ragged_paged_attention", SMALL_GPU, *operands)
    kernel.assert_called_once()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SINGLE_QUERIES, *MANY_QUERIES], ids=str)
@pytest.mark.parametrize("most", [1, 4])
def test_single_queries_on_a_gpu(case, most):
    """Decode runs few sequences of up to one query; thin items run many, or up to four queries."""
    made = inputs.make(case)
    operands = jax.device_put(operands_of(case, made, max_query_len=most), jax.devices("gpu")[0])
    check(case, made, jax.tree.map(np.asarray, jax.jit(mosaic_gpu.ragged_paged_attention)(*operands)))


def test_one_query_that_sees_all_tokens():
    """A single query sees all tokens in any case, so decode needs no keyword `causal`."""
    made = inputs.make(ONE_QUERY[0])
    seen, all_seen = (
        run_op("ragged_paged_attention", SMALL_GPU, *operands_of(ONE_QUERY[0], made, causal=causal))
        for causal in (True, False)
    )
    for actual, wanted in zip(all_seen, seen, strict=True):
        assert_same_bytes(actual, wanted, "causal=False")


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (ONE_QUERY[0], "decode"),
        (small("two-queries", 4, 2, 64, 16, "bfloat16", seq_lens=(130,), query_lens=(2,), padding=0), "ragged"),
        (small("two-sequences", 4, 2, 64, 16, "bfloat16", seq_lens=(9, 9), query_lens=(1, 1), padding=0), "ragged"),
        (small("small-heads", 4, 2, 32, 16, "bfloat16", seq_lens=(130,), query_lens=(1,), padding=0), "ragged"),
        (
            small("sparse", 4, 2, 64, 16, "bfloat16", seq_lens=(130,), query_lens=(1,), padding=0,
                  block_sparse=Sparse(1, 3)),
            "ragged",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_which_kernel_runs_ragged_attention(case, kernel):
    def instead(module, name):
        return mock.patch.object(module, "attend", side_effect=InterruptedError(name))

    with instead(decode, "decode"), instead(ragged, "ragged"), pytest.raises(InterruptedError, match=kernel):
        jax.eval_shape(mosaic_gpu.ragged_paged_attention, *operands_of(case, inputs.make(case)))


@pytest.mark.parametrize(
    ("num_seqs", "head_size", "cache_dtype", "layout", "expected"),
    [
        (264, 128, "bfloat16", "hnd", True),
        (265, 128, "bfloat16", "hnd", False),
        (265, 256, "bfloat16", "hnd", True),
        (265, 128, "float8_e4m3fn", "hnd", True),
        (265, 128, "bfloat16", "vllm", True),
    ],
)
def test_few_single_queries_are_decode(num_seqs, head_size, cache_dtype, layout, expected):
    """Many over 16 bits are thin items of the ragged kernel, if it takes the call: it lacks layout "vllm"."""
    shapes = {"hnd": [(9, 2, 16, head_size)] * 2, "vllm": [(9, 2, head_size // 8, 16, 8), (9, 2, head_size, 16)]}
    arrays = (
        jax.ShapeDtypeStruct((num_seqs, 8, head_size), jnp.bfloat16),
        *(jax.ShapeDtypeStruct(shape, jnp.dtype(cache_dtype)) for shape in shapes[layout]),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((num_seqs, 4), (num_seqs,), (num_seqs + 1,))),
    )
    options = {"layout": layout, "max_query_len": 1}
    operands = jax.eval_shape(lambda *x: _validate.ragged_operands(*x, causal=True, options=options), *arrays)
    assert is_decode(*operands[:5], operands.options) == expected


@pytest.mark.parametrize(
    ("head_size", "block_sparse", "first"),
    [(128, None, "mosaic_gpu"), (128, Sparse(1, 3), "triton"), (32, None, "triton")],
    ids=str,
)
def test_one_query_that_decode_does_not_take_is_not_its_to_lead(head_size, block_sparse, first):
    """The ragged kernel runs calls with a pattern or small heads; for one query Triton's kernel is faster."""
    case = small("leads", 32, 8, head_size, 16, "bfloat16", seq_lens=(900,), query_lens=(1,), padding=0)
    case = replace(case, block_sparse=block_sparse)
    with mock.patch.object(jax, "local_devices"):
        assert _dispatch._on_cuda("ragged_paged_attention", operands_of(case, inputs.make(case)))[0] == first


@pytest.mark.parametrize(
    ("queries", "num_seqs", "cache_dtype", "first"),
    [
        (1, 2, "bfloat16", "mosaic_gpu"),
        (4, 1, "bfloat16", "triton"),
        (5, 1, "bfloat16", "mosaic_gpu"),
        (2, 1, "float8_e4m3fn", "mosaic_gpu"),
        (4, 2, "float8_e4m3fn", "mosaic_gpu"),
        (5, 2, "float8_e4m3fn", "mosaic_gpu"),
        (700, 2, "bfloat16", "mosaic_gpu"),
    ],
)
def test_leads_but_for_few_queries_of_one_sequence_over_16_bits(queries, num_seqs, cache_dtype, first):
    lens = {"seq_lens": (900, 700)[:num_seqs], "query_lens": (queries,) * num_seqs}
    case = small("leads", 8, 2, 64, 16, "bfloat16", cache_dtype, **lens, padding=0)
    made = inputs.make(case)
    with mock.patch.object(jax, "local_devices"):
        assert _dispatch._on_cuda("ragged_paged_attention", operands_of(case, made))[0] == first
        if cache_dtype == "bfloat16":
            assert _dispatch._on_cuda("prefix_attention", prefix_operands_of(case, made))[0] == first


@pytest.mark.parametrize(("queries", "first"), [(4, "triton"), (5, "mosaic_gpu")])
def test_few_queries_over_8_bits_that_warps_cannot_convert_alone(queries, first):
    lens = {"seq_lens": (900, 700), "query_lens": (queries,) * 2}
    made = inputs.make(small("prefix", 8, 2, 64, 16, "bfloat16", "float8_e4m3fn", **lens, padding=0))
    slots = small("slots", 8, 2, 64, 16, "bfloat16", "int8", k_scale="slot", **lens, padding=0)
    with mock.patch.object(jax, "local_devices"):
        assert _dispatch._on_cuda("prefix_attention", prefix_operands_of(slots, made))[0] == first
        assert _dispatch._on_cuda("ragged_paged_attention", operands_of(slots, inputs.make(slots)))[0] == first
