"""Tests that every kernel lowers under `jax_enable_x64`: there a number of Python's in a kernel may become 64 bits."""

import jax
import pytest

from paged_jax.kernels.mosaic_gpu.ragged import call as ragged
from paged_jax.kernels.problem import Device
from tests import inputs, test_mosaic_gpu, test_mosaic_gpu_compiled, test_mosaic_gpu_ragged, test_mosaic_gpu_sparse
from tests.cases import Case, Sparse
from tests.test_triton import needs_triton
from tests.test_triton_compiled import COMPILED_CASES, call

ALL = {"alibi": True, "sinks": True, "logits_soft_cap": 30.0, "sliding_window": 100, "scale": "traced"}
BY_HEAD, BY_SLOT = {"k_scale": "head", "v_scale": "head"}, {"k_scale": "slot", "v_scale": "slot"}
DECODE = [
    ("auto", test_mosaic_gpu.small("queues", 8, 2, 128, 16, "bfloat16", seq_lens=(700, 3) * 40, **ALL, **BY_HEAD)),
    ("auto", test_mosaic_gpu.small("cluster", 4, 1, 80, 16, "float16", seq_lens=(600,), **ALL)),
    ("v2", test_mosaic_gpu.small("slots", 4, 4, 64, 32, "bfloat16", "int8", seq_lens=(700, 3), **ALL, **BY_SLOT)),
    ("v1", test_mosaic_gpu.small("vllm", 5, 1, 128, 16, "float16", "float8_e4m3fn", "vllm", **ALL, **BY_SLOT)),
]
LENS = {"seq_lens": (20,) * 1100, "query_lens": (1,) * 1100}
RAGGED = test_mosaic_gpu_ragged.small("many-slots", 4, 2, 64, 16, "bfloat16", "int8", alibi=True, **LENS, **BY_SLOT)
PREFIX = test_mosaic_gpu_ragged.small(
    "all", 4, 2, 64, 16, "bfloat16", "float8_e4m3fn", block_sparse=Sparse(1, 3, 32, 1), **ALL, **BY_HEAD
)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def lowered(trace):
    """Lowers what `trace` gives for shapes, for CUDA."""
    return trace(lambda x: x).lower(lowering_platforms=("cuda",)).as_text()


def some(cases):
    """Parameters; those that test little more than others are marked slow."""
    few = "cluster", "slots", "vllm"
    return [pytest.param(*case, id=str(case[-1]), marks=[pytest.mark.slow] * (str(case[-1]) in few)) for case in cases]


@pytest.mark.parametrize(("op", "case"), some(DECODE))
def test_decode_lowers(op, case):
    assert "@mosaic_gpu" in lowered(lambda on_device: test_mosaic_gpu.traced(op, case, on_device=on_device))


@pytest.mark.slow
def test_ragged_attention_lowers():
    operands = test_mosaic_gpu_ragged.operands_of(RAGGED, inputs.make(RAGGED))
    assert "@mosaic_gpu" in lowered(lambda _: jax.jit(ragged.ragged_paged_attention).trace(*operands))


@pytest.mark.slow
def test_prefix_attention_lowers():
    operands = test_mosaic_gpu_sparse.prefix_operands_of(PREFIX, inputs.make(PREFIX))
    assert "@mosaic_gpu" in lowered(lambda _: jax.jit(ragged.prefix_attention).trace(*operands))


@pytest.mark.slow
def test_decode_that_writes_lowers():
    for _, trace in test_mosaic_gpu_compiled.writing_cases(3):
        assert "@mosaic_gpu" in lowered(trace)


TRITON = [
    *((op, "everything") for op in ("v1", "v2", "auto", "ragged", "prefix", "fused")),
    *(("ragged", "long"), ("not-causal", "hnd-e5m2"), ("fused", "narrow"), ("write", "narrow"), ("copy", "narrow")),
    ("swap", "narrow"),
]


@needs_triton
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("op", "name"), TRITON)
def test_triton_kernels_are_the_same(op, name):
    """They take arguments of the same types, and the same compile-time argument."""
    from tests import triton_interpreter

    narrow = Case("narrow", 4, 2, 64, 16, "bfloat16", "float8_e4m3fn", k_scale="head", v_scale="slot")
    case = narrow if name == narrow.name else COMPILED_CASES[name]

    def told(x64):
        launches = []
        with jax.enable_x64(x64), triton_interpreter.recorded(launches, Device()):
            call(op, case)
        return [(made.kernel, triton_interpreter.signature(made), made.config) for made in launches]

    assert told(True) == told(False) != []
