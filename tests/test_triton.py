"""Tests the Triton kernels without a GPU: in Triton's interpreter, lowered for CUDA, and their refusals.

test_triton_compiled.py compiles the kernels. On a GPU the tests of the operations also run them. Without triton, the
tests are skipped.
"""

import concurrent.futures
import dataclasses
import importlib.util
import inspect
import os
import subprocess
import sys
import threading
import types
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from benchmarks import bench_step
from paged_jax.kernels.problem import Device, Pool, Problem, Unsupported
from paged_jax.kernels.triton import cache_tuning, launch, tuning
from tests import inputs, test_ragged
from tests.cases import DECODE_CASES, Case

BY_NAME = {case.name: case for case in DECODE_CASES}


def installed():
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


needs_triton = pytest.mark.skipif(not installed(), reason="triton is not installed: pip install triton")

# Every option, layout, granularity of scales, and pair of compute and cache dtype occurs, in as few cases as possible.
INTERPRETED = [
    *("hnd-e4m3", "everything", "sparse-step", "ranked", "items"),
    *("write-hnd-bfloat16", "fused-nhd-e5m2", "fused-unsplit", "split-everything", "latent-int8", "rpa-padded-rows"),
]
INTERPRETED_TOO = [
    *(
        "vllm-e4m3",
        "all-empty",
        "query-float16-cache-bfloat16",
        "all-of-it",
        "cut",
        "scales-of-any-sign",
        "not-a-number",
        "many-sequences",
        "offsets",
    ),
    *("heads-of-328-int8", "sparse-negative-step", "sparse-partitions", "sparse-shifts", "edges"),
    *("write-hnd-int8", "write-nhd-float8_e5m2", "write-vllm-float8_e4m3fn", "copy-bfloat16"),
    *("fused-hnd-bfloat16", "fused-unfilled-heads", "fused-scale-on-a-wide-cache", "fused-large-group"),
    *("fused-vllm-int8", "fused-everything", "split-hnd-bfloat16"),
    *("rpa-padded-lanes", "rpa-new-tokens-wider", "rpa-plain-packed", "rpa-padded-hd64-e5m2"),
    *("rpa-q-scale", "latent-e4m3", "latent-float32", "latent-everything", "latent-all-of-it"),
    *("latent-huge-logits", "split-latents"),
    *("moved-latents-bfloat16", "moved-latents-float8_e5m2", "moved-latents-int8"),
]


@needs_triton
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(INTERPRETED, id="these"),
        pytest.param(INTERPRETED_TOO, id="others", marks=pytest.mark.slow),
    ],
)
def test_in_the_interpreter(names):
    """It runs in a process of its own, because the interpreter is chosen when triton is imported."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.run_triton", *names],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    done = [line.removesuffix(" ok") for line in process.stdout.splitlines()]
    assert done == names, process.stderr[-4000:]


@pytest.mark.parametrize("step", [0, 1])
def test_a_block_sparse_stride_beyond_32_bits_is_refused(step):
    made = inputs.make(Case("stride", 4, 2, 64, 16, seq_lens=(70,), query_lens=(3,)))
    sparse = paged_jax.BlockSparse(1, 2**31 // 6 + 1, 64, step)
    options = {"block_sparse": sparse, "implementation": "triton"}
    for call in (
        lambda: paged_jax.paged_attention(*made.decode.values(), **options),
        lambda: paged_jax.ragged_paged_attention(*made.ragged.values(), **options),
    ):
        with pytest.raises(Unsupported, match="lacks a vert_stride of 357913942 for 4 heads, beyond 32 bits"):
            jax.eval_shape(call)


def on_a_gpu(function, *, quick=True, **arrays):
    """Replaces the fixture `run` of the tests of every implementation."""
    return jax.tree.map(np.asarray, jax.jit(partial(function, implementation="triton"))(**arrays))


@pytest.mark.gpu
def test_sequences_may_come_in_any_order():
    pytest.importorskip("jax_triton", exc_type=ImportError)
    test_ragged.hold_in_any_order(on_a_gpu)


@pytest.mark.gpu
def test_a_decode_step_is_one_command_buffer():
    jax_triton = pytest.importorskip("jax_triton", exc_type=ImportError)
    if "out_type" not in inspect.signature(jax_triton.triton_call).parameters:
        pytest.skip("jax-triton 0.3 launches each kernel by itself")
    stack = bench_step.Stack(num_layers=3)
    _, captured = bench_step.compile_step(stack, bench_step.make(stack))
    assert captured


@pytest.fixture
def lowered():
    """Lowers a call of a function for CUDA, and returns the text."""
    pytest.importorskip("jax_triton", exc_type=ImportError)
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        pytest.skip("JAX's CUDA plugin is not installed: pip install 'jax[cuda13]'")
    return lambda function, *args: jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_lowers_for_cuda_with_no_gpu(lowered):
    # XLA makes everything else that an op runs, so the number of Triton calls is the number of kernels.
    arrays = inputs.make(BY_NAME["hnd-bfloat16"]).ragged.values()
    assert lowered(paged_jax.ragged_paged_attention, *arrays).count("@triton_kernel_call") == 1


@pytest.mark.slow
def test_other_ops_lower_for_cuda_with_no_gpu(lowered):
    case = BY_NAME["hnd-bfloat16"]
    made = inputs.make(case)
    long = inputs.make(test_ragged.SPLIT[0]).ragged.values()
    text = lowered(paged_jax.ragged_paged_attention, *long)
    assert text.count("@triton_kernel_call") == 3  # the plan, the splits, and the reduce, which works in place
    assert text.count("#stablehlo.output_operand_alias") == 2
    assert lowered(paged_jax.paged_attention_v2, *made.decode.values()).count("@triton_kernel_call") == 2
    caches = made.decode["key_cache"], made.decode["value_cache"]
    text = lowered(paged_jax.write_to_paged_cache, *[made.prefix["key"][:2]] * 2, *caches, np.arange(2, dtype=np.int32))
    assert text.count("@triton_kernel_call") == 1
    assert text.count("#stablehlo.output_operand_alias") == 2
    text = lowered(paged_jax.copy_blocks, *caches, np.zeros((2, 2), np.int32))
    assert text.count("@triton_kernel_call") == 2
    assert text.count("#stablehlo.output_operand_alias") == 2
    new = [made.prefix["key"][: len(case.seq_lens)]] * 2
    slots = np.zeros(len(case.seq_lens), np.int32)
    query, *rest = made.decode.values()
    text = lowered(paged_jax.write_and_attend, query, *new, *rest, slots)
    assert text.count("@triton_kernel_call") == 2  # the splits and the reduce
    assert text.count("#stablehlo.output_operand_alias") == 2


def test_importing_it_imports_neither_triton_nor_jax_triton():
    code = "import sys, paged_jax.kernels.triton; assert not {'triton', 'jax_triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)


@needs_triton
@pytest.mark.parametrize("width", [0, 2, 8, 32, 2048])
def test_empty_batches_launch_nothing(width):
    from tests import triton_interpreter

    launches = []
    query, cache = jnp.zeros((0, 32, 128), jnp.bfloat16), jnp.zeros((4, 8, 16, 128), jnp.bfloat16)
    rest = jnp.zeros((0, width), jnp.int32), jnp.zeros(0, jnp.int32)
    with triton_interpreter.recorded(launches):
        for op in (paged_jax.paged_attention, paged_jax.paged_attention_v1, paged_jax.paged_attention_v2):
            assert op(query, cache, cache, *rest).shape == query.shape
        new = jnp.zeros((0, 8, 128), jnp.bfloat16)
        assert paged_jax.write_and_attend(query, new, new, cache, cache, *rest, rest[1])[0].shape == query.shape
    assert not launches


@needs_triton
def test_without_partitions_there_is_no_context():
    from tests import triton_interpreter

    arrays, launches = inputs.make(BY_NAME["hnd-bfloat16"]).decode, []
    flags = {"max_seq_len": 0, "return_lse": True, "return_residuals": True}
    with triton_interpreter.recorded(launches):
        out, lse, exp_sums, *_ = paged_jax.paged_attention_v2(**arrays, **flags)
    assert not launches
    assert not out.any()
    assert (lse == -jnp.inf).all()
    assert exp_sums.size == 0


def test_float8_is_rounded_by_instructions_that_the_gpu_has():
    pool = Pool.of(jnp.zeros((1, 2, 16, 64), "float8_e5m2"), 64, "hnd", None, None)
    native = {c: cache_tuning.quantisation("bfloat16", pool, Device(c)).native for c in (80, 86, 87, 89, 90, 120)}
    assert native == {80: False, 86: False, 87: False, 89: True, 90: True, 120: True}


@needs_triton
def test_threads_may_launch_at_the_same_time():
    """XLA compiles in threads. All of them hide jax-triton's warning, although one restores the filters of all."""
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def triton_call(array, unused, number, updated, *, out_type, **_):
        if number == 1:
            first_is_in.set()
            second_is_in.wait(0.5)
        else:
            second_is_in.set()
            first_is_out.wait(0.5)
        warnings.warn("input_output_aliases is deprecated", DeprecationWarning, stacklevel=2)
        return [updated]

    def launched(number):
        config = cache_tuning.CopyKernel(key_words=4, value_words=4, within=True)
        result = jax.ShapeDtypeStruct((1,), jnp.float32)
        launch.call("copy", "copy_kernel", config, 1, [jnp.zeros(1)], [number], [result], Device(), [jnp.ones(1)])
        first_is_out.set()

    with (
        mock.patch.dict(sys.modules, {"jax_triton": types.SimpleNamespace(triton_call=triton_call)}),
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        first = pool.submit(launched, 1)
        first_is_in.wait(10)
        pool.submit(launched, 2).result()
        first.result()


def test_pools_written_in_place_are_the_first_results_and_stay_apart_from_loops(monkeypatch):
    """jax-triton 0.3 and 0.4 take them in different places. `in_place.py` says what XLA would do without a barrier."""
    seen = []

    def of_03(*inputs, out_shape, input_output_aliases, **_):
        seen.append((len(inputs), input_output_aliases))
        return [inputs[1] + 1, jnp.zeros(out_shape[1].shape)]

    def of_04(*inputs, out_type, input_output_aliases, **_):
        seen.append((len(inputs), input_output_aliases))
        return [jnp.zeros(out_type[0].shape), inputs[-1] + 1]

    config = cache_tuning.CopyKernel(key_words=4, value_words=4, within=True)
    shapes = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (3, 2)]

    def launched(array, pool):
        device_code = types.SimpleNamespace(some_kernel=None)
        monkeypatch.setitem(sys.modules, "paged_jax.kernels.triton.device.made_up", device_code)
        return launch.call("made_up", "some_kernel", config, 1, [array], [7], shapes, Device(), [pool])

    for triton_call in (of_03, of_04):
        monkeypatch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_call=triton_call))
        pool, other = launched(jnp.ones(4), jnp.ones(3))
        assert (pool.tolist(), other.tolist()) == ([2, 2, 2], [0, 0])
        text = str(jax.make_jaxpr(launched)(jnp.ones(4), jnp.ones(3)))
        assert text.count("optimization_barrier") == 2
    assert seen[::2] == [(3, {1: 0}), (4, {3: 1})]


def test_without_jax_triton_it_says_what_to_install():
    arrays = inputs.make(BY_NAME["alibi"]).decode.values()
    trace = jax.make_jaxpr(lambda *args: paged_jax.paged_attention(*args, implementation="triton"))
    with (
        mock.patch.dict(sys.modules, {"jax_triton": None}),
        pytest.raises(NotImplementedError, match=r"'triton' .*needs jax-triton: pip install jax-triton"),
    ):
        trace(*arrays)


def test_refusals_name_every_reason():
    with (
        mock.patch.dict(sys.modules, {"jax_triton": None}),
        pytest.raises(Unsupported, match=r"needs jax-triton.*; float8_e4m3fn caches need .* 8\.9.* has 8\.6"),
    ):
        launch.check(Device(86, 84), "float8_e4m3fn")
    with pytest.raises(Unsupported, match=r"^implementation 'triton' .*8\.0 or newer, this GPU has 7\.5"):
        launch.check(Device(75, 40), "bfloat16")


@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("num_seqs", [1, 8, 64, 1000])
def test_splits_fill_the_gpu_and_no_more(num_seqs, group):
    query = jnp.zeros((num_seqs, 8 * group, 128), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((99, 8, 16, 128), jnp.bfloat16)
    options = paged_jax.options.AttentionOptions(
        scale=jnp.float32(1), per_head=paged_jax.options.PerHead(), k_scale=None, v_scale=None, layout="hnd",
        max_seq_len=32768, max_query_len=1, sliding_window=None, logits_soft_cap=None, block_sparse=None,
    )  # fmt: skip
    gpu = Device()
    tables = jnp.zeros((num_seqs, 2048), jnp.int32)
    problem = Problem.of_call(query, cache, cache, tables, options)
    tuned = tuning.attention(problem, gpu)
    splits = tuning.num_splits(problem, tuned, gpu)
    target = gpu.num_multiprocessors * (2 if group >= 8 else 4)
    assert splits == 1 or target // 2 < splits * num_seqs * 8 <= target
    assert tuning.num_splits(dataclasses.replace(problem, max_seq_len=1), tuned, gpu) == 1
