"""The Mosaic GPU kernels with no GPU: in Pallas's interpreter, lowered for CUDA, and their refusals.

The interpreter simulates shared memory and barriers, and looks for races. On a GPU the tests of the operations run
these kernels too.
"""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from paged_jax import _validate
from paged_jax.kernels import mosaic_gpu
from paged_jax.kernels.mosaic_gpu import config
from tests import inputs, oracle, plain, test_decode
from tests.cases import DECODE_CASES, Case, Sparse

BY_NAME = {case.name: case for case in DECODE_CASES}
OPS = {"v1": "paged_attention_v1", "v2": "paged_attention_v2", "auto": "paged_attention"}


def small(name, *shape, seq_lens=(37, 0, 130), **options):
    return Case(name, *shape, seq_lens=seq_lens, query_lens=None, **options)


# Every option, layout, kind of scale and dtype somewhere, in as few small cases as that takes.
INTERPRETED = [
    ("v1", small("plain", 4, 2, 64, 16, "bfloat16")),
    ("v2", small("plain", 4, 2, 64, 16, "bfloat16")),
    ("auto", small("plain", 4, 2, 64, 16, "bfloat16")),
    ("v2", small("window", 2, 1, 128, 8, "float16", layout="nhd", sliding_window=70, k_scale="scalar")),
    ("auto", small("options", 7, 1, 64, 32, "bfloat16", alibi=True, sinks=True, v_scale="scalar", scale="traced")),
    ("auto", small("capped", 8, 2, 64, 16, "float16", layout="nhd", logits_soft_cap=2.0, sliding_window=90)),
    ("v1", small("padded", 6, 2, 80, 16, "float16", sinks=True, k_scale="head", v_scale="head", max_seq_len=100)),
    ("v2", small("sinks", 8, 2, 64, 16, "bfloat16", sinks=True, logits_soft_cap=5.0, alibi=True, max_seq_len=130)),
    ("auto", small("large-blocks", 2, 1, 64, 256, "bfloat16", seq_lens=(300, 5), sliding_window=100)),
    ("auto", small("all-empty", 4, 2, 64, 16, "float16", seq_lens=(0, 0), sinks=True)),
]


def call(op, case):
    """The implementation's function on a case's inputs, in the interpreter: its results, and whether there are races."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, params

    made = inputs.make(case)
    options = made.arrays | test_decode.op_options(made.static) | {"max_seq_len": case.max_seq_len}
    operands = _validate.decode_operands(*made.decode.values(), options)
    static = {"partition_size": case.partition_size} if op == "v2" else {}
    function = partial(getattr(mosaic_gpu, OPS[op]), **static)
    gpu = mock.patch.object(config, "device", lambda: config.Device(90, 2))  # so few that items are split
    try:
        with gpu, params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=True)):
            results = jax.tree.map(np.asarray, jax.jit(function)(*operands))
        return made, results, interpret_pallas_call.get_races().races_found
    except Exception:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        raise


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of NumPy, at the poison
@pytest.mark.parametrize(("op", "case"), INTERPRETED, ids=str)
def test_in_the_interpreter(op, case):
    made, (out, lse, *residuals), races = call(op, case)
    bounded = made.decode
    if case.max_seq_len is not None:  # which the oracle does not know
        assert not case.alibi or case.max_seq_len >= max(case.seq_lens)
        bounded = bounded | {"seq_lens": np.minimum(bounded["seq_lens"], case.max_seq_len)}
    exact, rough = (module.decode(**bounded, **made.arrays, **made.static) for module in (oracle, plain))
    plain.assert_close(out, exact[0], rough[0], "out")
    plain.assert_close(lse, exact[1], rough[1], "lse")
    if op == "v2":
        test_decode.check_residuals(case, made, residuals, exact, rough)
    assert not races


def lowered(op, case, num_blocks=10):
    """The text of an op lowered for CUDA."""
    dtype = jnp.dtype(case.dtype)
    cache = inputs.cache_shapes(case.layout, num_blocks, case.num_kv_heads, case.block_size, case.head_size, dtype)[0]
    num_seqs, heads = len(case.seq_lens), np.ones(case.num_heads, np.float32)
    scales = {"scalar": np.float32(2), "head": np.ones(case.num_kv_heads, np.float32), None: None}
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
        jax.ShapeDtypeStruct(cache, dtype),
        jax.ShapeDtypeStruct(cache, dtype),
        jax.ShapeDtypeStruct((num_seqs, -(-max(case.seq_lens) // case.block_size)), jnp.int32),
        jax.ShapeDtypeStruct((num_seqs,), jnp.int32),
    )

    def function(arrays, options):
        return getattr(paged_jax, OPS[op])(*arrays, **options, **static, implementation="mosaic_gpu")

    return jax.jit(function).trace(arrays, options).lower(lowering_platforms=("cuda",)).as_text()


def pairs():
    """Every pair of head size with dtype and with layout; block sizes, groups and options in turn."""
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


@pytest.mark.parametrize(("op", "case"), list(pairs()), ids=str)
def test_lowers_for_cuda(op, case):
    assert lowered(op, case).count("@mosaic_gpu_v2") == (1 if op == "v1" else 2)
