"""The ragged Mosaic GPU kernels with no GPU: in Pallas's interpreter, which looks for races, and lowered for CUDA."""

import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from paged_jax import _validate
from tests import inputs, oracle, plain
from tests.cases import Case
from tests.ragged_interpreter import call
from tests.test_decode import op_options


def small(name, *shape, seq_lens=(37, 0, 130, 70), query_lens=(1, 0, 40, 20), **options):
    return Case(name, *shape, seq_lens=seq_lens, query_lens=query_lens, **options)


INTERPRETED = [
    small("plain", 4, 2, 64, 16, "bfloat16"),
    small("group-of-5", 5, 1, 128, 32, "float16", layout="nhd"),
    small("window", 2, 1, 64, 8, "float16", layout="nhd", sliding_window=50, k_scale="scalar"),
    small("options", 7, 1, 64, 32, "bfloat16", alibi=True, sinks=True, v_scale="scalar", scale="traced"),
    small("capped", 8, 2, 64, 16, "float16", logits_soft_cap=2.0, k_scale="head", v_scale="head", sinks=True),
    small("negative", 4, 2, 64, 16, "bfloat16", scale=-0.3),
    small("huge", 2, 1, 64, 16, "bfloat16", logits="huge", scale=1.0, sinks=True),
    small("odd-head", 3, 1, 80, 16, "float16", max_seq_len=130),
    small("all-empty", 4, 2, 64, 16, "float16", seq_lens=(0, 0), query_lens=(0, 0), sinks=True),
    small("split", 2, 1, 64, 16, "bfloat16", seq_lens=(600, 3), query_lens=(2, 1), sinks=True, padding=0),
    small("split-wide", 2, 1, 64, 64, "float16", seq_lens=(500,), query_lens=(100,), logits_soft_cap=3.0),
]

# Of NumPy, at the poison.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def operands_of(case, made):
    options = made.arrays | op_options(made.static) | {"max_seq_len": case.max_seq_len}
    arrays = dict(made.ragged)
    query_start_loc = arrays.pop("query_start_loc")
    operands = _validate.attention_operands(*arrays.values(), options)
    return *operands[:-1], query_start_loc, operands[-1]


def check(case, made, results):
    """Results of an op against the oracle's."""
    out, lse = results
    options = made.arrays | made.static
    exact, rough = (module.ragged(**made.ragged, **options) for module in (oracle, plain))
    assert np.all(out[made.num_rows :].astype(np.float32) == 0), "padding rows"
    assert np.all(lse[made.num_rows :] == -np.inf), "padding rows"
    plain.assert_close(out, exact[0], rough[0], "out")
    plain.assert_close(lse, exact[1], rough[1], "lse")


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_in_the_interpreter(case):
    made = inputs.make(case)
    check(case, made, call("ragged_paged_attention", operands_of(case, made), tile=64, stages=2, least_split=2))
    assert not interpret_pallas_call.get_races().races_found
