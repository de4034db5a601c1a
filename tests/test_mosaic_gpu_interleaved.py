"""Tests the Mosaic GPU kernels over one pool of keys and values: in Pallas's interpreter, and lowered for CUDA."""

import dataclasses
import functools
import re
from unittest import mock

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from paged_jax import _dispatch
from paged_jax.kernels import xla
from paged_jax.kernels.mosaic_gpu import leads
from paged_jax.kernels.mosaic_gpu.ops import is_decode
from tests import ragged_interpreter, rpa_cases
from tests.mosaic_interpreter import SMALL_GPU, as_for, run_op
from tests.test_mosaic_gpu import long_items_if, tunings

FOLDING_GPU = dataclasses.replace(SMALL_GPU, num_multiprocessors=3)
"""If the two kv heads of the cases' six rows are folded, their items fill one wave of this GPU."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case.name != "hopper-decode-pairs"))
        for case in rpa_cases.HOPPER
        # Only GPUs run two of them: the decode case also reads 8 bits, and has heads of 64, too.
        if case.name not in ("hopper-ragged-8-bits", "hopper-decode-hd64")
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy warns when it meets poison
def test_in_the_interpreter(case):
    kernels = []

    def call(op, operands, *, implementation=None, **static):
        if op == "write_to_paged_cache":
            return xla.write_to_paged_cache(*operands, **static)
        kernels.append("decode" if is_decode(*operands[:5], operands.options) else "ragged")
        if kernels[-1] == "decode":
            with long_items_if(case.kv_dtype), tunings() as chosen:
                result = run_op(op, FOLDING_GPU if case.kv_dtype else SMALL_GPU, *operands)
            assert [tuning.fold for tuning in chosen] == [2 if case.kv_dtype else 1]
            return result
        return ragged_interpreter.call(op, operands, tile=64, thin_tile=64, stages=2)

    def run(function, *arrays, **options):
        return jax.tree.map(np.asarray, function(*arrays, **options))

    with mock.patch.object(_dispatch, "call", call):
        rpa_cases.hold(case, run)
    assert kernels == [case.name.split("-")[1]]
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hopper-decode", "hopper-decode-8-bits", "hopper-decode-pairs"])
def test_folded_heads_on_a_gpu(name):
    """All cases fold their two kv heads."""
    dispatch = _dispatch.call

    def call(op, operands, **options):
        writes = op == "write_to_paged_cache"
        return dispatch(op, operands, **options | {"implementation": None if writes else "mosaic_gpu"})

    def run(function, *arrays, **options):
        jitted = jax.jit(functools.partial(function, **options), donate_argnums=3)
        return jax.tree.map(np.asarray, jitted(*arrays))

    small, calls = as_for(FOLDING_GPU), mock.patch.object(_dispatch, "call", call)
    with small, calls, long_items_if(True), tunings() as chosen:
        rpa_cases.hold(rpa_cases.BY_NAME[name], run)
    assert [tuning.fold for tuning in chosen] == [2]


# `test_compat_rpa.py` compiles other cases, if it can.
@pytest.mark.parametrize("name", ["hopper-decode-hd64", pytest.param("hopper-ragged-8-bits", marks=pytest.mark.slow)])
def test_lowers_for_cuda(name):
    case = rpa_cases.BY_NAME[name]
    made = rpa_cases.make(case)
    call = functools.partial(rpa_cases.function(case), **made.options, implementation="mosaic_gpu")
    made.options["update_kv_cache"] = False
    call = functools.partial(call, update_kv_cache=False)
    text = jax.jit(call).trace(*made.arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert re.search("custom_call @mosaic_gpu", text)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", [*rpa_cases.HOPPER, *rpa_cases.SMALL[:-1]], ids=str)
def test_it_leads_where_it_leads_over_separate_pools(case):
    compared = []

    def call(op, operands, **_):
        if op == "write_to_paged_cache":
            return operands.key_cache, None
        heads = slice(2 * case.num_heads[1])
        key_cache, value_cache = (operands.key_cache[:, :, heads][:, :, i::2, : case.head_dim] for i in (0, 1))
        options = dataclasses.replace(operands.options, layout="nhd")
        separate = operands._replace(key_cache=key_cache, value_cache=value_cache, options=options)
        compared.append((leads(op, operands), leads(op, separate)))
        return operands.query, None

    made = rpa_cases.make(case)
    with mock.patch.object(_dispatch, "call", call):  # shapes and options decide, so that nothing is computed
        jax.eval_shape(functools.partial(rpa_cases.function(case), **made.options), *made.arrays)
    ((over_one_pool, over_two),) = compared
    assert over_one_pool == over_two
