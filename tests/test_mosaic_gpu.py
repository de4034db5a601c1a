"""Tests the Mosaic GPU kernels without a GPU: in Pallas's interpreter, and lowered for CUDA.

The interpreter simulates shared memory and barriers, and looks for races. On a GPU the tests of the operations run
these kernels too.
"""

import contextlib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

import paged_jax
from paged_jax import _validate
from paged_jax.kernels import mosaic_gpu
from paged_jax.kernels.mosaic_gpu.decode import choose, merge
from tests import inputs, oracle, plain, test_decode
from tests.cases import DECODE_CASES, Case
from tests.mosaic_interpreter import MIDDLE_GPU, OPS, SMALL_GPU, TINY_GPU, as_for, call
from tests.test_cache_ops import assert_same_bytes

BY_NAME = {case.name: case for case in DECODE_CASES}


def small(name, *shape, seq_lens=(37, 0, 130), **options):
    return Case(name, *shape, seq_lens=seq_lens, query_lens=None, **options)


# Every option, layout, granularity of scales and dtype occurs, in as few small cases as possible.
INTERPRETED = [
    ("v1", small("plain", 4, 2, 64, 16, "bfloat16")),
    ("v2", small("plain", 4, 2, 64, 16, "bfloat16")),
    ("auto", small("plain", 4, 2, 64, 16, "bfloat16")),
    ("v2", small("window", 2, 1, 128, 8, "float16", layout="nhd", sliding_window=70, k_scale="scalar")),
    ("auto", small("options", 7, 1, 64, 32, "bfloat16", alibi=True, sinks=True, v_scale="scalar", scale="traced")),
    ("auto", small("capped", 8, 2, 64, 16, "float16", layout="nhd", logits_soft_cap=2.0, sliding_window=90)),
    ("v1", small("capped-far-away", 4, 2, 64, 16, "bfloat16", logits_soft_cap=1e6)),
    ("v1", small("slices", 6, 2, 80, 16, "float16", sinks=True, k_scale="head", v_scale="head", max_seq_len=100)),
    ("v2", small("slices", 8, 1, 96, 32, "bfloat16", layout="nhd", v_scale="head", seq_lens=(130, 3), max_seq_len=100)),
    ("v2", small("sinks", 8, 2, 64, 16, "bfloat16", sinks=True, logits_soft_cap=5.0, alibi=True, max_seq_len=130)),
    ("auto", small("large-blocks", 2, 1, 64, 256, "bfloat16", seq_lens=(300, 5), sliding_window=100)),
    ("auto", small("huge", 2, 1, 64, 16, "bfloat16", logits="huge", scale=1.0)),
    # There are more tiles than stages, and splits begin anywhere in the ring.
    ("auto", small("ring", 2, 1, 64, 128, "bfloat16", seq_lens=(1300, 0, 1100))),
    ("v1", small("e4m3", 4, 2, 64, 16, "bfloat16", "float8_e4m3fn", k_scale="head", v_scale="head")),
    ("auto", small("e4m3", 8, 1, 128, 32, "float16", "float8_e4m3fn", layout="nhd", sliding_window=70)),
    ("v2", small("e5m2", 5, 1, 128, 8, "bfloat16", "float8_e5m2", k_scale="scalar", alibi=True, sinks=True)),
    ("auto", small("e5m2", 4, 2, 64, 8, "float16", "float8_e5m2", k_scale="slot", v_scale="slot")),
    ("v2", small("int8", 4, 2, 64, 128, "bfloat16", "int8", layout="nhd", k_scale="slot", v_scale="slot")),
    ("v1", small("int8", 7, 1, 64, 16, "float16", "int8", v_scale="scalar", logits_soft_cap=2.0, max_seq_len=100)),
    ("v1", small("int8-ring", 2, 1, 64, 64, "float16", "int8", seq_lens=(1300,))),
    ("v1", small("slot", 2, 1, 64, 16, "float16", k_scale="slot", v_scale="slot", sliding_window=50)),
    ("auto", small("cluster", 8, 1, 128, 16, "bfloat16", seq_lens=(300,), sinks=True, sliding_window=290)),
    ("auto", small("cluster-in-slices", 3, 1, 80, 32, "float16", seq_lens=(260,), logits_soft_cap=3.0)),
    ("auto", small("cluster-int8", 2, 1, 64, 16, "bfloat16", "int8", seq_lens=(511,), k_scale="slot", v_scale="slot")),
    ("v1", small("vllm", 4, 2, 64, 16, "bfloat16", layout="vllm", k_scale="head", sliding_window=70)),
    ("v2", small("vllm", 2, 1, 128, 8, "float16", layout="vllm", sinks=True, alibi=True, logits_soft_cap=3.0)),
    ("auto", small("vllm", 9, 1, 64, 64, "bfloat16", layout="vllm", v_scale="slot", seq_lens=(300, 5))),
    ("auto", small("vllm-cluster", 8, 1, 128, 32, "bfloat16", layout="vllm", seq_lens=(300,))),
    ("v1", small("vllm-e4m3", 18, 2, 64, 16, "bfloat16", "float8_e4m3fn", layout="vllm", sliding_window=70)),
    ("v2", small("vllm-e5m2", 7, 1, 128, 64, "float16", "float8_e5m2", layout="vllm", k_scale="head", v_scale="head")),
    ("auto", small("vllm-int8", 12, 1, 64, 32, "bfloat16", "int8", layout="vllm", k_scale="slot", v_scale="slot")),
    ("auto", small("heads-of-512", 4, 2, 512, 16, "bfloat16", sliding_window=90, sinks=True)),
    ("auto", small("all-empty", 4, 2, 64, 16, "float16", seq_lens=(0, 0), sinks=True)),
]


# NumPy gives this warning when arithmetic meets the poison, which is NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


# Other cases test the same in other combinations, so the first of these are slow, and only GPUs run the others.
MORE_INTERPRETED = {
    *("v1-vllm", "v2-int8", "v2-slices", "v2-window"),
    *("auto-vllm-int8", "auto-cluster-int8", "auto-heads-of-512", "auto-all-empty", "auto-ring"),
}
NOT_INTERPRETED = {
    *("auto-capped", "v2-vllm"),
    *("v2-plain", "auto-plain", "v1-capped-far-away", "auto-huge", "auto-e4m3", "v2-e5m2", "v1-int8", "v1-int8-ring"),
    *("auto-cluster-in-slices", "auto-vllm-cluster", "v2-vllm-e5m2", "v2-sinks", "auto-large-blocks", "v1-slices"),
    *("auto-vllm", "auto-e5m2", "v1-slot", "v1-e4m3", "auto-cluster"),
}


def interpreted(cases, slow, without):
    """Parameters (op, case). Cases named in `without` are left out; those named in `slow` are slow."""
    by_name = {f"{op}-{case}": (op, case) for op, case in cases}
    assert slow | without <= set(by_name), slow | without - set(by_name)
    kept = {name: each for name, each in by_name.items() if name not in without}
    return [pytest.param(*each, id=name, marks=[pytest.mark.slow] * (name in slow)) for name, each in kept.items()]


@pytest.mark.parametrize(("op", "case"), interpreted(INTERPRETED, MORE_INTERPRETED, NOT_INTERPRETED))
def test_in_the_interpreter(op, case):
    made = inputs.make(case)
    static = test_decode.op_options(made.static) | {"max_seq_len": case.max_seq_len}
    check_decode(op, case, made, call(op, made.decode, made.arrays, static, case.partition_size))
    assert not interpret_pallas_call.get_races().races_found


def check_decode(op, case, made, results):
    """Compares the results of an op with the oracle's."""
    out, lse, *residuals = results
    bounded = made.decode
    if case.max_seq_len is not None:  # the oracle does not know this option
        assert not case.alibi or case.max_seq_len >= max(case.seq_lens)
        bounded = bounded | {"seq_lens": np.minimum(bounded["seq_lens"], case.max_seq_len)}
    exact, rough = (module.decode(**bounded, **made.arrays, **made.static) for module in (oracle, plain))
    plain.assert_close(out, exact[0], rough[0], "out")
    plain.assert_close(lse, exact[1], rough[1], "lse")
    if op == "v2":
        test_decode.check_residuals(case, SimpleNamespace(**vars(made) | {"decode": bounded}), residuals, exact, rough)


@pytest.mark.slow
def test_far_apart_scales_of_values():
    """Products are in float16, in which a weight times one of these scales would overflow."""
    case = small("far-apart", 2, 1, 64, 16, "bfloat16", "int8", v_scale="slot", seq_lens=(150, 20))
    made = inputs.make(case)
    far = np.where(np.arange(made.arrays["v_scale"].size) % 3, 1e-3, -1e9).reshape(made.arrays["v_scale"].shape)
    arrays = made.arrays | {"v_scale": (made.arrays["v_scale"] * far).astype(np.float32)}
    out, lse = call("v1", made.decode, arrays, test_decode.op_options(made.static), 0)
    exact, rough = (module.decode(**made.decode, **arrays, **made.static) for module in (oracle, plain))
    assert np.abs(exact[0]).max() > 1e7
    plain.assert_close(out, exact[0], rough[0], "out")
    plain.assert_close(lse, exact[1], rough[1], "lse")


UNEVEN = [
    small("uneven", 4, 1, 64, 16, "bfloat16", seq_lens=(700, 30, 0, 130), sinks=True),
    small("uneven-window", 2, 1, 128, 16, "float16", layout="vllm", seq_lens=(600, 5, 70, 9), sliding_window=400),
    small("uneven-vllm-e4m3", 8, 1, 128, 16, "bfloat16", "float8_e4m3fn", layout="vllm", seq_lens=(600, 5, 70, 9)),
    small("uneven-int8", 2, 2, 64, 32, "bfloat16", "int8", seq_lens=(900, 64), k_scale="slot", max_seq_len=800),
]
# Three waves of items. Items of equal lengths would stay whole; these get queues if contexts take long enough.
WAVES = [
    small("waves", 4, 2, 64, 16, "bfloat16", seq_lens=(700, 30, 0), sinks=True),
    small("waves-vllm", 6, 3, 128, 8, "bfloat16", layout="vllm", seq_lens=(9, 900), sliding_window=800),
]
# Queues cut these items even if their lengths are alike: they fill less than a wave or, over 8 bits, several waves. The
# number of tiles is not a multiple of the number of queues.
LINES = [
    small("line", 4, 1, 64, 16, "bfloat16", seq_lens=(600,) * 5, sinks=True),
    small("waves-e4m3", 8, 2, 64, 32, "float16", "float8_e4m3fn", layout="nhd", seq_lens=(20, 600, 40), alibi=True),
    small("line-window", 4, 1, 128, 16, "float16", seq_lens=(900, 0, 330), sliding_window=700),
    small("line-e4m3", 8, 1, 128, 32, "bfloat16", "float8_e4m3fn", layout="nhd", seq_lens=(360, 359, 361), alibi=True),
]
FOLDED = [  # items of 4 heads, and of 2
    small("fold", 8, 8, 64, 16, "bfloat16", seq_lens=(37, 0, 130), sinks=True, k_scale="scalar"),
    small("fold-int8", 8, 4, 64, 16, "float16", "int8", seq_lens=(37, 64), sliding_window=50),
    small("fold-two", 8, 4, 128, 32, "bfloat16", seq_lens=(3, 150), alibi=True, v_scale="scalar"),
    small("fold-vllm-int8", 8, 4, 128, 16, "float16", "int8", layout="vllm", seq_lens=(70, 0, 5), sliding_window=40),
    small("fold-vllm", 8, 4, 64, 8, "float16", layout="vllm", seq_lens=(70, 0, 5), sliding_window=40),
]
FOLDED_QUEUES = [  # items of 4 heads, and of 2, which fill one wave
    small("fold-queues", 8, 8, 64, 16, "bfloat16", seq_lens=(700, 30), sinks=True),
    small("fold-queues-int8", 8, 4, 128, 32, "float16", "int8", seq_lens=(50, 900), sliding_window=800),
    small("fold-queues-vllm", 8, 4, 128, 8, "bfloat16", layout="vllm", seq_lens=(600, 9), alibi=True),
    # A copy for each kv head: blocks of layout "nhd", and blocks that are longer than a run.
    small("fold-nhd", 4, 4, 64, 16, "bfloat16", layout="nhd", seq_lens=(37, 0, 130, 64), sinks=True, v_scale="scalar"),
    small("fold-nhd-e4m3", 8, 4, 128, 16, "bfloat16", "float8_e4m3fn", layout="nhd", seq_lens=(600, 9), sinks=True),
    small("fold-nhd-e5m2", 8, 4, 128, 64, "float16", "float8_e5m2", layout="nhd", seq_lens=(150, 3), sliding_window=70),
    small("fold-long-blocks", 4, 4, 64, 128, "float16", seq_lens=(140, 0, 260, 9), sliding_window=50, alibi=True),
]


# Only GPUs run `ON_GPUS`; the other cases have each class of tiles and each option at least once. `MORE` are slow.
MORE = "fold-vllm-int8", "fold-long-blocks", "line-e4m3", "fold-queues", "fold-nhd-e4m3"
ON_GPUS = (
    *("uneven-int8", "waves", "line", "fold"),
    *("uneven-window", "uneven-vllm-e4m3", "waves-vllm", "waves-e4m3", "line-window", "fold-int8", "fold-two"),
    *("fold-vllm", "fold-queues-vllm", "fold-queues-int8", "fold-nhd-e5m2", "fold-nhd"),
)


@pytest.mark.parametrize(
    ("case", "device", "chosen"),
    [
        pytest.param(case, device, chosen, marks=[pytest.mark.slow] * (case.name in MORE))
        for device, chosen, cases in (
            (MIDDLE_GPU, "parts", UNEVEN),
            (TINY_GPU, "items", WAVES),
            (SMALL_GPU, "line of items", LINES),
            (TINY_GPU, "fold", FOLDED),
            (SMALL_GPU, "folded items", FOLDED_QUEUES),
        )
        for case in cases
        if case.name not in ON_GPUS
    ],
    ids=str,
)
def test_what_depends_on_the_gpu(case, device, chosen):
    """Some calls get queues, whether or not items would be split if lengths were alike, and some get folded heads."""
    made = inputs.make(case)
    static = test_decode.op_options(made.static) | {"max_seq_len": case.max_seq_len}
    with long_items_if("items" in chosen), tunings() as chosen_tunings:
        results = call("auto", made.decode, made.arrays, static, 0, device)
    check_chosen(chosen, *chosen_tunings)
    check_decode("auto", case, made, results)
    assert not interpret_pallas_call.get_races().races_found


@contextlib.contextmanager
def long_items_if(condition):
    """If the condition holds, all contexts seem to take long, and each program of the merge gets several items."""
    with contextlib.ExitStack() as stack:
        if condition:
            stack.enter_context(mock.patch.object(choose, "_item_time", return_value=1000.0))
            stack.enter_context(mock.patch.object(merge, "_ITEM_PROGRAMS", 2))
        yield


@contextlib.contextmanager
def tunings():
    """Gives a list to which every result of `choose.balanced` is added."""
    made, balanced = [], choose.balanced

    def record(*args, **keywords):
        made.append(balanced(*args, **keywords))
        return made[-1]

    with mock.patch.object(choose, "balanced", record):
        yield made


def check_chosen(chosen, made):
    """Checks that the case gets the tuning that it is meant to test."""
    chosen_for = {
        "": True,
        "parts": made.queues and made.splits > 1,
        "items": made.queues and made.splits == 1,
        "line of items": made.queues and made.splits == 0,
        "fold": made.fold > 1,
        "folded items": made.fold > 1 and made.queues and made.splits == 1,
    }
    assert chosen_for[chosen], made


MANY = [  # many items, whole or split, for a large GPU
    small("most", 8, 8, 128, 16, "bfloat16", seq_lens=(12_000, *range(10, 1300, 100)), sinks=True),
    small("many", 6, 3, 64, 16, "float16", seq_lens=(*range(0, 840, 10), 7000, 1, 5000, 900)),
    small("many-int8", 8, 8, 128, 32, "bfloat16", "int8", seq_lens=(9, 7000, 3, *range(0, 600, 20)), k_scale="scalar"),
]
LONG = [
    small("long", 4, 1, 128, 16, "bfloat16", seq_lens=(100_000, 0, 1, 65_537, 33)),
    small("long-vllm", 8, 1, 64, 16, "float16", layout="vllm", seq_lens=(0, 100_000, 70_001, 16)),
    small("long-e4m3", 8, 2, 128, 32, "bfloat16", "float8_e4m3fn", seq_lens=(99_999, 1, 0)),
    # Few work items with many splits each.
    small("long-alone", 7, 1, 128, 16, "bfloat16", seq_lens=(40_000,), sinks=True),
    small("long-in-slices", 12, 1, 80, 16, "float16", seq_lens=(30_000, 20), v_scale="scalar"),
    small("long-group-of-16", 16, 1, 256, 16, "bfloat16", seq_lens=(9_000, 8_000)),
]


@pytest.mark.slow
# On GPUs `test_v2_batches.py` holds this for more shapes.
@pytest.mark.parametrize("case", [small("bits", 2, 1, 64, 16, "bfloat16", seq_lens=(33, 130))], ids=str)
def test_v2_row_is_bit_equal_alone_and_in_a_batch(case):
    made = inputs.make(case)

    def results(rows, width):
        tables = np.pad(made.decode["block_tables"], ((0, 0), (0, 9)), constant_values=-1)[rows, :width]
        chosen = {name: made.decode[name][rows] for name in ("query", "seq_lens")} | {"block_tables": tables}
        return call("v2", made.decode | chosen, {}, {}, 32)

    alone, batch = results([1], 9), results([0, 1], 14)
    for one, both in zip(alone, batch, strict=True):
        mine = both[1][:, : one.shape[2]] if one.ndim > 2 and one.shape != both[:1].shape else both[1]
        assert mine.tobytes() == one[0].tobytes()


def lowered(op, case, num_blocks=10):
    """Lowers an op for CUDA, and returns the text."""
    return traced(op, case, num_blocks).lower(lowering_platforms=("cuda",)).as_text()


def traced(op, case, num_blocks=10, on_device=lambda x: x):
    """Traces an op for arrays' shapes, which are passed through `on_device`."""
    dtype, cache_dtype = jnp.dtype(case.dtype), jnp.dtype(case.cache_dtype or case.dtype)
    shape = num_blocks, case.num_kv_heads, case.block_size, case.head_size
    key_shape, value_shape = inputs.cache_shapes(case.layout, *shape, cache_dtype)
    num_seqs, heads = len(case.seq_lens), np.ones(case.num_heads, np.float32)
    slots = np.ones((num_blocks, case.num_kv_heads, case.block_size), np.float32)
    scales = {"scalar": np.float32(2), "head": np.ones(case.num_kv_heads, np.float32), "slot": slots, None: None}
    options = {
        "scale": np.float32(1),
        "alibi_slopes": heads if case.alibi else None,
        "sinks": heads if case.sinks else None,
        "k_scale": scales[case.k_scale],
        "v_scale": scales[case.v_scale],
    }
    static = {name: getattr(case, name) for name in ("layout", "sliding_window", "logits_soft_cap", "max_seq_len")}
    if op == "v2":
        static |= {"partition_size": max(case.partition_size, case.block_size), "return_residuals": True}
    arrays = (
        jax.ShapeDtypeStruct((num_seqs, case.num_heads, case.head_size), dtype),
        jax.ShapeDtypeStruct(key_shape, cache_dtype),
        jax.ShapeDtypeStruct(value_shape, cache_dtype),
        jax.ShapeDtypeStruct((num_seqs, -(-max(case.seq_lens) // case.block_size)), jnp.int32),
        jax.ShapeDtypeStruct((num_seqs,), jnp.int32),
    )

    def function(arrays, options):
        return getattr(paged_jax, OPS[op])(*arrays, **options, **static, implementation="mosaic_gpu")

    return jax.jit(function).trace(*jax.tree.map(on_device, (arrays, options)))


def pairs():
    """Cases with every pair of head size and cache dtype. Layouts, ops, block sizes, groups and options take turns."""
    ops, block_sizes, groups = ("v1", "v2", "auto"), (8, 16, 32, 64, 128, 256), (1, 2, 3, 4, 5, 7, 8, 12, 16, 64)
    for j, head_size in enumerate((64, 80, 96, 112, 128, 144, 160, 192, 208, 240, 256)):
        for i, dtype in enumerate(("float16", "bfloat16")):
            n = 2 * j + i
            layout, group = ("hnd", "nhd")[(i + j) % 2], groups[n % len(groups)]
            options = {
                "alibi": n % 5 == 0,
                "sinks": n % 4 == 1,
                "sliding_window": 100 if n % 3 == 0 else None,
                "logits_soft_cap": 30.0 if n % 6 == 5 else None,
                "k_scale": (None, "scalar", "head")[n % 3],
                "v_scale": (None, "head", "scalar")[n // 2 % 3],
            }
            shape = 2 * group, 2, head_size, block_sizes[n % len(block_sizes)], dtype, dtype, layout
            op = ops[n // 2 % 3]
            yield op, small(f"{layout}-{dtype}-{head_size}-{group}", *shape, seq_lens=(700, 3), **options)
    granularities = (None, None), ("head", "scalar"), ("slot", "slot")
    for j, head_size in enumerate((64, 128, 192, 256)):
        for i, cache_dtype in enumerate(("float8_e4m3fn", "float8_e5m2", "int8")):
            n = 3 * j + i
            group, block_size = (1, 12, 4, 5, 32, 8, 64)[n % 7], (32, 16, 8, 64)[j]
            dtype = ("float16", "bfloat16")[n % 2]
            k_scale, v_scale = granularities[(i + j) % 3]
            options = {"alibi": n % 5 == 0, "sliding_window": 100 if n % 3 == 0 else None}
            options |= {"seq_lens": (700, 3), "k_scale": k_scale, "v_scale": v_scale}
            name, shape = f"{cache_dtype}-{dtype}-{head_size}-{group}", (2 * group, 2, head_size)
            layout = ("hnd", "nhd")[(i + j) % 2]
            yield ops[(i + j) % 3], small(name, *shape, block_size, dtype, cache_dtype, layout, **options)
            block_size = max(16, block_size)
            yield ops[(i + j) % 3], small(f"vllm-{name}", *shape, block_size, dtype, cache_dtype, "vllm", **options)


def some(cases):
    """Every sixteenth case as parameters; GPUs run all of them."""
    return [pytest.param(*each) for each in list(cases)[::16]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("op", "case"), some(pairs()), ids=str)
def test_lowers_for_cuda(op, case):
    text = lowered(op, case)
    assert text.count("@mosaic_gpu_v2") == (2 if op == "v2" else 1)
    # Profiles show this name.
    assert f"decode_hd{case.head_size}_g{case.num_heads // case.num_kv_heads}_mosaic_gpu" in text


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "case", "device", "chosen"),
    [(op, case, None, "") for op, case in (*INTERPRETED, *pairs())]
    + [(op, case, SMALL_GPU, "") for op, case in INTERPRETED if op == "auto"]
    + [("auto", case, MIDDLE_GPU, "parts") for case in UNEVEN]
    + [("auto", case, TINY_GPU, "items") for case in WAVES]
    + [("auto", case, SMALL_GPU, "line of items") for case in LINES]
    + [("auto", case, TINY_GPU, "fold") for case in FOLDED]
    + [("auto", case, SMALL_GPU, "folded items") for case in FOLDED_QUEUES]
    + [(op, case, None, "") for op in OPS for case in (*LONG, *MANY)],
    ids=str,
)
def test_on_a_gpu(op, case, device, chosen):
    """Runs calls with the tunings of this GPU and of smaller ones; results are the same in every run."""
    case = replace(case, partition_size=max(case.partition_size, case.block_size))
    made = inputs.make(case)
    options = made.arrays | test_decode.op_options(made.static) | {"max_seq_len": case.max_seq_len}
    operands = jax.device_put(_validate.decode_operands(*made.decode.values(), options), jax.devices("gpu")[0])
    keywords = {"partition_size": case.partition_size} if op == "v2" else {}
    function = jax.jit(partial(getattr(mosaic_gpu, OPS[op]), **keywords))
    with as_for(device), long_items_if("items" in chosen):
        results, again = (jax.tree.map(np.asarray, function(*operands)) for _ in range(2))
    check_decode(op, case, made, results)
    for actual, wanted in zip(again, results, strict=True):
        assert_same_bytes(actual, wanted, "a second run")
