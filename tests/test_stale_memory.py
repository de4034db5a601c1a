"""Tests that results never depend on what memory held before a call.

Some programs of a kernel read what other programs of it have stored. If one reads too early, it gets what was there
before: mostly the same call's last results, which hide the error. So other values are put there between calls.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import paged_jax
from tests import inputs, latent_cases, test_shared_prefixes
from tests.cases import Case
from tests.test_cache_ops import assert_same_bytes

RUNS = 500

# A sequence without tokens is done first: its programs read each other's results at the start of the kernel.
SEQ_LENS = (254, 127, 0, 1115, 498, 716, 0, 1100, 305, 64, 0, 1102, 360, 576, 825, 0, 1115)
FEW = {"seq_lens": SEQ_LENS, "block_size": 64, "dtype": "bfloat16", "query_lens": None}
PIECES = {"seq_lens": (4000, 300, 0, 1115), "query_lens": (100, 3, 0, 1), "block_size": 64, "dtype": "bfloat16"}
DECODE = [
    Case("cluster", 3, 1, 128, **FEW),
    Case("cluster-192", 3, 1, 192, **FEW),
    Case("cluster-256-sinks", 3, 1, 256, **FEW, sinks=True),
    Case("cluster-512", 3, 1, 512, **FEW),
    Case("cluster-e4m3", 4, 1, 128, cache_dtype="float8_e4m3fn", **FEW),
    Case("queues", 8, 2, 128, **FEW),
]
RAGGED = [Case("split", 8, 2, 128, **PIECES), Case("split-e4m3", 8, 2, 64, cache_dtype="float8_e4m3fn", **PIECES)]
LATENT = [
    latent_cases.latent_case("latents", 16, 576, 512, 64, "bfloat16", seq_lens=(4000, 0, 300), query_lens=(2, 0, 1))
]
PREFIXES = [test_shared_prefixes.Batch("prefixes", ((20, 40),), tuple(range(100, 132)), (8, 2, 128))]


def call_of(case, implementation):
    """A call of a case, as a function of its arrays, and these arrays."""
    if isinstance(case, test_shared_prefixes.Batch):
        made = test_shared_prefixes.make(case)
        arrays = {"query": made.query, "cache": made.cache, "shared": made.shared}
        return partial(test_shared_prefixes.attend, implementation=implementation), arrays
    if case in LATENT:
        made, op = latent_cases.make(case), paged_jax.ragged_mla_attention
        static, given = made.static, made.ragged
    else:
        made = inputs.make(case)
        static = {k: x for k, x in made.static.items() if k in ("logits_soft_cap", "scale")}
        op = paged_jax.paged_attention if case.query_lens is None else paged_jax.ragged_paged_attention
        given = made.decode if case.query_lens is None else made.ragged
    static = {k: x for k, x in static.items() if x is not None}

    def attend(**arrays):
        return op(**arrays, **static, return_lse=True, implementation=implementation)

    return attend, given | made.arrays


def assert_independent(case, implementation, device, runs):
    """Runs a call over and over. Right before each, a kernel writes random bits into the memory that it will get."""
    attend, arrays = call_of(case, implementation)
    arrays = jax.device_put(arrays, device)
    attend = jax.jit(attend).lower(**arrays).compile()
    # The allocator gives what was freed last to the next one that asks for as many bytes. Nobody waits in between.
    words = attend.memory_analysis().temp_size_in_bytes // 4
    random_bits = jax.jit(lambda seed: jax.random.bits(jax.random.key(seed), (words,), jnp.uint32))
    results = []
    for seed in range(runs):
        random_bits(jax.device_put(seed, device))
        results.append(attend(**arrays))
    first, *others = jax.device_get(results)
    for i, result in enumerate(others, 1):
        jax.tree.map(partial(assert_same_bytes, what=f"run {i}"), result, first)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*DECODE, *RAGGED, *LATENT, *PREFIXES], ids=str)
def test_kernels_on_hopper(case):
    assert_independent(case, "mosaic_gpu", jax.devices("gpu")[0], RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*DECODE, *RAGGED, *LATENT], ids=str)
def test_triton_kernels(case):
    assert_independent(case, "triton", jax.devices("gpu")[0], RUNS)


@pytest.mark.parametrize("case", [DECODE[2], RAGGED[0], *LATENT, *PREFIXES], ids=str)
def test_xla(case):
    """The calls are right in themselves."""
    assert_independent(case, "xla", jax.devices("cpu")[0], runs=2)
