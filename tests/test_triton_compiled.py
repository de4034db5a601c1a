"""Compiles the Triton kernels for every architecture, without a GPU, and checks PTX and shared memory."""

import importlib
import re
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from paged_jax.kernels.problem import Device
from paged_jax.kernels.triton import tuning
from tests import inputs, latent_cases, rpa_cases, test_decode, test_ragged
from tests.cases import Case, Sparse
from tests.test_triton import BY_NAME, needs_triton, on_a_gpu

# (architecture, op, case): every op, dtype, layout, head size and option occurs, and each architecture has a prefill.
COMPILED = [
    (80, "ragged", "hnd-bfloat16"),
    (80, "write", "nhd-e5m2"),
    (80, "fused", "nhd-e5m2"),
    (86, "v1", "small-blocks"),
    (89, "v1", "hnd-e4m3"),
    (89, "ragged", "nhd-e4m3"),
    (89, "auto", "phi-3-small"),
    (89, "write", "vllm-e4m3"),
    (90, "ragged", "everything"),
    (90, "not-causal", "hnd-e5m2"),
    (90, "v2", "everything"),
    (90, "v1", "hnd-int8"),
    (90, "write", "vllm-int8"),
    (89, "fused", "everything"),
    (100, "swap", "hnd-bfloat16"),
    (120, "copy", "vllm-int8"),
    (90, "prefix", "split-everything"),
    (120, "ragged", "split"),
    (90, "rpa", "padded-lanes"),
    (120, "rpa", "padded-hd64"),
]
COMPILED_CASES = {
    **rpa_cases.BY_NAME,
    **BY_NAME,
    **{case.name: case for case in test_ragged.SPLIT},
    "small-blocks": Case("small-blocks", 142, 2, 24, 1, "float16", "bfloat16", seq_lens=(9,), query_lens=None),
    "gemma-2-9b": Case(
        "gemma-2-9b", 16, 8, 256, 16, "bfloat16", seq_lens=(99,), query_lens=(99,), logits_soft_cap=50.0
    ),
}


# LLVM mixed up the tokens of these cases when it could see how their numbers are computed (`tiles.numbers`).
# On a GPU the first case read outside of its memory, and the second attended to the wrong tokens.
WILD = [
    Case(
        "wild-read", 40, 8, 72, 16, "float32", "float8_e5m2", "nhd", (15, 37, 130, 15, 513), None, 128,
        sinks=True, sliding_window=7, block_sparse=Sparse(4, 3, 128), k_scale="slot", v_scale="slot",
    ),
    Case(
        "wild-mask", 28, 4, 72, 4, "float32", "float8_e5m2", "hnd", (513,), None,
        logits_soft_cap=5.0, sliding_window=16, block_sparse=Sparse(2, 3, 16, -3), k_scale="slot", v_scale="slot",
    ),
]  # fmt: skip
# Compiled by default: most ops, and each architecture except 8.6 and 10.0, which are much like 8.0 and 12.0.
BY_DEFAULT = {
    *((80, "ragged", "hnd-bfloat16"), (89, "v1", "hnd-e4m3"), (89, "write", "vllm-e4m3")),
    *((90, "v2", "everything"), (120, "copy", "vllm-int8"), (80, "swap", "hnd-bfloat16")),
}
ON_HOPPER_TOO = (90, "auto", "wild-mask"), (90, "rpa", "padded-lanes")
COMPILED += [(90, "v2", "wild-read"), (90, "auto", "wild-mask")]
COMPILED_CASES |= {case.name: case for case in WILD}

# Further pairs of an op and an architecture.
COMPILED += [
    *((120, "v2", "hnd-float16"), (89, "prefix", "nhd-float16"), (90, "copy", "hnd-bfloat16")),
    *((80, "swap", "hnd-bfloat16"), (90, "swap", "hnd-bfloat16")),
]


def parameters(cases, by_default):
    """The cases as parameters. Cases outside `by_default` are slow, or left out where Hopper's GPUs run them."""
    kept = [case for case in cases if case[0] != 90 or case in by_default or case in ON_HOPPER_TOO]
    return [pytest.param(*case, marks=[pytest.mark.slow] * (case not in by_default)) for case in kept]


def pairs():
    """Some pairs of a cache dtype and a head size. Layouts and architectures take turns."""
    dtypes = "float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"
    head_sizes = 32, 64, 80, 96, 112, 120, 128, 192, 256, 512
    for i, cache_dtype in enumerate(dtypes):
        capabilities = (89, 90, 100, 120) if cache_dtype == "float8_e4m3fn" else (80, 86, 89, 90, 100, 120)
        dtype = "bfloat16" if jnp.dtype(cache_dtype).itemsize == 1 else cache_dtype
        for j, head_size in list(enumerate(head_sizes))[i % 3 :: 6 if i == 3 else 12]:
            capability = capabilities[(i + 2 * j) % len(capabilities)]
            op = "ragged" if (i + j) % 6 == 0 else "v1"  # few are ragged, which take several seconds
            layout = ("hnd", "nhd", "vllm")[(i + j) % 3]
            if head_size % (16 // jnp.dtype(cache_dtype).itemsize):
                layout = "nhd"  # a head of this size cannot be cut into vectors of 16 bytes
            name = f"{layout}-{cache_dtype}-{head_size}"
            shape = 8, 2, head_size, 16, dtype, cache_dtype, layout
            case = Case(name, *shape, seq_lens=(70,), query_lens=(70,))
            yield capability, op, case


@needs_triton
@pytest.mark.parametrize(
    ("capability", "op", "case"),
    [
        *parameters(COMPILED, BY_DEFAULT),
        *parameters(pairs(), ()),
    ],
    ids=str,
)
def test_compiles(capability, op, case, tmp_path, monkeypatch):
    case = COMPILED_CASES.get(case, case)
    hold_launches(lambda: call(op, case), capability, tmp_path, monkeypatch)


def hold_launches(calls, capability, tmp_path, monkeypatch):
    """Checks that each launch compiles to a cubin that fits the architecture's shared memory."""
    from tests import triton_interpreter

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    gpu = Device(capability, 100)
    launches = []
    with triton_interpreter.recorded(launches, gpu):
        calls()
    assert launches
    for made in launches:
        result = triton_interpreter.compiled(made, capability)
        assert result.asm["cubin"]
        # No stride is that large. LLVM shifts only unused elements of vectors by 25 bits or more (`tiles.numbers`).
        factors = [int(x) for x in re.findall(r"mul\.wide\.u32 .*, (\d+);", result.asm["ptx"])]
        assert max(factors, default=0) < 2**25, made.config
        # Triton 3.6 uses this instruction for GPUs that lack it, once it has compiled for a GPU that has it.
        assert "f16x2.e5m2x2" not in result.asm["ptx"], made.config
        assert not products_joined_to_other_lanes(result.asm["ptx"]), made.config
        assert result.metadata.shared <= tuning.shared_memory(gpu), made.config


@needs_triton
def test_programs_are_those_that_are_kept():
    """`programs.txt` has what the kernels do before they are compiled."""
    programs = importlib.import_module("tests.programs")  # which imports this file
    programs.hold("triton", programs.triton())


@needs_triton
def test_nothing_is_launched_for_no_tokens_and_nothing_is_written_to_no_blocks():
    """CUDA refuses a grid of no programs, and a pool of no blocks has no memory."""
    from tests import triton_interpreter

    none, one, starts = jnp.zeros(0, jnp.int32), jnp.ones(1, jnp.int32), jnp.zeros(2, jnp.int32)
    tables, pool, query = jnp.zeros((1, 2), jnp.int32), jnp.zeros((3, 2, 8, 16)), jnp.zeros((1, 4, 16))
    token, latents, scale = jnp.zeros((1, 2, 16)), jnp.zeros((3, 8, 32)), {"value_size": 16, "scale": 0.2}
    launches = []
    with triton_interpreter.recorded(launches, Device(90, 2)):
        paged_jax.ragged_paged_attention(query[:0], pool, pool, tables, one, starts)
        paged_jax.prefix_attention(query[:0], token[:0], token[:0], pool, pool, tables, one, starts)
        paged_jax.ragged_mla_attention(jnp.zeros((0, 4, 32)), latents, tables, one, starts, **scale)
        paged_jax.paged_attention(query[:0], pool, pool, tables[:0], none)
        paged_jax.write_to_paged_cache(token[:0], token[:0], pool, pool, none)
        paged_jax.write_to_paged_cache(token, token, pool[:0], pool[:0], one)
        paged_jax.write_to_latent_cache(jnp.zeros((1, 32)), latents[:0], one)
        assert not launches
        paged_jax.write_and_attend(query, token, token, pool[:0], pool[:0], tables, one, one)
    assert {made.kernel.__name__ for made in launches} == {"decode_kernel"}


def test_shared_memory_is_what_cuda_gives_a_program():
    """The CUDA programming guide's maximum for a thread block, in KiB, by compute capability."""
    kib = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
    assert {capability: tuning.shared_memory(Device(capability)) // 1024 for capability in kib} == kib


LATENTS = [(80, "deepseek"), (89, "everything")]


@needs_triton
@pytest.mark.parametrize(("capability", "name"), parameters(LATENTS, ()))
def test_latents_compile(capability, name, tmp_path, monkeypatch):
    hold_launches(lambda: call("latents", name), capability, tmp_path, monkeypatch)


def products_joined_to_other_lanes(ptx):
    """The instructions that add another lane's rounded term to a lane's own product, which is not rounded.

    They make two lanes' sums of the same terms differ (`softmax.rounded`). CUDA's racecheck found such sums.
    """
    of_other_lanes = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%r\d+),", ptx))
    return [line for line, term in re.findall(r"(fma\..*, (%r\d+));", ptx) if term in of_other_lanes]


@pytest.mark.gpu
@pytest.mark.parametrize("case", WILD, ids=str)
def test_tokens_are_not_mixed_up(case):
    pytest.importorskip("jax_triton", exc_type=ImportError)
    test_decode.test_decode(case, on_a_gpu)
    with mock.patch.dict(test_decode.BY_NAME, {case.name: case}):
        test_decode.test_paged_attention_picks_one_of_them(case.name, on_a_gpu)


def call(op, case):
    """Calls `op` on a case's inputs."""
    if op == "rpa":
        made = rpa_cases.make(case)
        rpa_cases.function(case)(*made.arrays, **made.options)
        return
    if op == "latents":
        call_latents(next(each for each in latent_cases.CASES if str(each) == case))
        return
    made = inputs.make(case)
    options = made.arrays | test_decode.op_options(made.static) | {"max_seq_len": case.max_seq_len}
    match op:
        case "v1":
            paged_jax.paged_attention_v1(*made.decode.values(), **options)
        case "v2":
            paged_jax.paged_attention_v2(*made.decode.values(), **options, partition_size=case.partition_size)
        case "auto":
            paged_jax.paged_attention(*made.decode.values(), **options)
        case "ragged":
            paged_jax.ragged_paged_attention(*made.ragged.values(), **options)
        case "prefix":
            paged_jax.prefix_attention(*made.prefix.values(), **options)
        case "not-causal":
            paged_jax.ragged_paged_attention(*made.ragged.values(), **options, causal=False)
            paged_jax.prefix_attention(*made.prefix.values(), **options, causal=False)
        case "write":
            key_cache, value_cache = made.decode["key_cache"], made.decode["value_cache"]
            scales = {name: made.arrays.get(name) for name in ("k_scale", "v_scale")}
            tokens = np.zeros((5, case.num_kv_heads, case.head_size), np.float32)
            slots = np.arange(5, dtype=np.int32)
            paged_jax.write_to_paged_cache(tokens, tokens, key_cache, value_cache, slots, layout=case.layout, **scales)
        case "fused":
            tokens = np.zeros((len(case.seq_lens), case.num_kv_heads, case.head_size), made.decode["query"].dtype)
            slots = np.zeros(len(case.seq_lens), np.int32)
            paged_jax.write_and_attend(**made.decode, key=tokens, value=tokens, slot_mapping=slots, **options)
        case "copy":
            caches = made.decode["key_cache"], made.decode["value_cache"]
            paged_jax.copy_blocks(*caches, np.zeros((3, 2), np.int32))
        case "swap":
            caches = made.decode["key_cache"], made.decode["value_cache"]
            paged_jax.swap_blocks(*caches, *caches, np.zeros((3, 2), np.int32))


def call_latents(case):
    """Calls every op that has to do with latents on a case's inputs."""
    made = latent_cases.make(case)
    cache, options = made.decode["latent_cache"], made.arrays | made.static
    paged_jax.mla_paged_attention(**made.decode, **options)
    paged_jax.ragged_mla_attention(**made.ragged, **options)
    latents, slots = np.zeros((5, case.case.head_size), np.float32), np.arange(5, dtype=np.int32)
    paged_jax.write_to_latent_cache(latents, cache, slots, scale=made.arrays.get("latent_scale"))
    paged_jax.copy_blocks(cache, None, np.zeros((3, 2), np.int32))
