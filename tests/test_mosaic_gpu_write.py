"""Tests `write_and_attend` of Mosaic GPU: in Pallas's interpreter, lowered for CUDA, and on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

import paged_jax
from paged_jax import _validate
from paged_jax.kernels import mosaic_gpu
from tests import oracle, plain, test_decode, test_write_and_attend
from tests.mosaic_interpreter import MIDDLE_GPU, SMALL_GPU, TINY_GPU, as_for, run_op
from tests.test_cache_ops import assert_same_bytes
from tests.test_mosaic_gpu import check_chosen, long_items_if, small, tunings

# NumPy gives this warning when arithmetic meets the poison, which is NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

WRITING = [
    small("write", 4, 2, 128, 16, "bfloat16", seq_lens=(37, 0, 130, 64, 128), alibi=True, v_scale="head"),
    small(
        "write-nhd", 2, 1, 128, 32, "float16", layout="nhd", seq_lens=(300, 33), sliding_window=70, logits_soft_cap=3.0
    ),
    small("write-cluster", 2, 1, 64, 16, "bfloat16", seq_lens=(129,), sinks=True, k_scale="scalar"),
    small("write-group", 12, 1, 64, 16, "float16", seq_lens=(65, 0, 1), sinks=True),
    small("write-past-max", 2, 1, 128, 8, "bfloat16", seq_lens=(150, 20), max_seq_len=100),
]
UNEVENLY_WRITING = [
    small("write-uneven", 4, 1, 64, 16, "bfloat16", seq_lens=(700, 30, 1, 130), sinks=True),
    small("write-unevenly-past-max", 2, 1, 128, 32, "float16", seq_lens=(700, 0, 3, 400), max_seq_len=650),
]
WRITING_IN_WAVES = small("write-waves", 4, 2, 64, 16, "bfloat16", seq_lens=(700, 30, 0), alibi=True)


ALL_WRITING = [
    *((case, SMALL_GPU, "") for case in WRITING),
    *((case, MIDDLE_GPU, "parts") for case in UNEVENLY_WRITING),
    (WRITING_IN_WAVES, TINY_GPU, "items"),
]


# Attention alone has cases of large groups, "nhd" and clusters.
ON_GPUS = "write-group", "write-nhd", "write-cluster", "write-unevenly-past-max"
SLOW = "write-past-max", "write-waves", "write-uneven"


@pytest.mark.parametrize(
    ("case", "device", "chosen"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] * (each[0].name in SLOW))
        for each in ALL_WRITING
        if each[0].name not in ON_GPUS
    ],
    ids=str,
)
def test_writes_in_the_interpreter(case, device, chosen):
    with long_items_if("items" in chosen):
        check_writes(case, partial(run_op, "write_and_attend", device), chosen)
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "device", "chosen"), ALL_WRITING, ids=str)
def test_writes_on_a_gpu(case, device, chosen):
    def run(*operands):
        return jax.tree.map(np.asarray, jax.jit(function)(*jax.device_put(operands, gpu)))

    gpu = jax.devices("gpu")[0]
    function = mosaic_gpu.write_and_attend
    with as_for(device), long_items_if("items" in chosen):
        check_writes(case, run, chosen)


BESIDE = [
    small("beside", 4, 2, 64, 16, "bfloat16", seq_lens=(20, 0, 130, 0), sinks=True),
    small("beside-nhd", 2, 1, 128, 32, "float16", layout="nhd", seq_lens=(33, 0, 300), sliding_window=70),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", BESIDE, ids=str)
def test_it_does_not_matter_when_a_token_is_written(case):
    """A tile's copy may read another program's new token in a slot, or the slot's old content; both are masked.

    The slot is a sequence's own, or is in a block that another sequence fills in part. In the second case the
    interpreter would report that the copy and the write race. They do, but both orders give the same result.
    """
    made = test_write_and_attend.with_new_tokens(case)
    made.slots[1] = made.decode["block_tables"][0, 1] * case.block_size + 9  # row 0 has fewer tokens in this block
    made.key[1] = made.value[1] = np.nan
    caches = made.decode["key_cache"], made.decode["value_cache"]
    written = oracle.write(made.key, made.value, *caches, made.slots, layout=case.layout)
    options = test_decode.op_options(made.static)
    results = []
    for key_cache, value_cache in (caches, written):
        decode = made.decode | {"key_cache": key_cache, "value_cache": value_cache}
        query, *rest, options_of_call = _validate.decode_operands(*decode.values(), made.arrays | options)
        operands = query, made.key, made.value, *rest, made.slots, options_of_call
        results.append(run_op("write_and_attend", SMALL_GPU, *operands, detect_races=False))
    before, after = results
    assert np.isfinite(before[0][np.array(case.seq_lens) > 0].astype(np.float32)).all()
    for one, other, what in zip(before, after, ("out", "lse", "key cache", "value cache"), strict=True):
        assert_same_bytes(other, one, what)


def check_writes(case, function, chosen):
    """Compares the results of `write_and_attend` with the oracle's."""
    made = test_write_and_attend.with_new_tokens(case)
    made.decode["query"][np.array(case.seq_lens) == 0] = np.nan  # rows that pad the batch may hold anything
    options = test_decode.op_options(made.static) | {"max_seq_len": case.max_seq_len}
    arrays = made.decode | {"key": made.key, "value": made.value, "slot_mapping": made.slots}
    *decode, options = _validate.decode_operands(*made.decode.values(), made.arrays | options)
    query, *rest = decode
    with tunings() as chosen_tunings:
        out, lse, *caches = function(query, arrays["key"], arrays["value"], *rest, arrays["slot_mapping"], options)
    check_chosen(chosen, *chosen_tunings)
    written = test_write_and_attend.expected_caches(case, made)
    for actual, (name, wanted) in zip(caches, written.items(), strict=True):
        assert_same_bytes(actual, wanted, name)
    after = made.decode | written
    if case.max_seq_len is not None:
        after |= {"seq_lens": np.minimum(after["seq_lens"], case.max_seq_len)}
    exact, rough = (module.decode(**after, **made.arrays, **made.static) for module in (oracle, plain))
    plain.assert_close(out, exact[0], rough[0], "out")
    plain.assert_close(lse, exact[1], rough[1], "lse")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("num_seqs", "width", "layout"),
    [(1, 8, "hnd"), (1, 500, "nhd"), (64, 20, "hnd")],
    ids=["cluster", "kernel", "unsplit"],
)
def test_write_and_attend_lowers_in_place(num_seqs, width, layout):
    cache = jax.ShapeDtypeStruct((9, 2, 16, 128) if layout == "hnd" else (9, 16, 2, 128), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((num_seqs, 2, 128), jnp.bfloat16)
    vector = jax.ShapeDtypeStruct((num_seqs,), jnp.int32)
    arrays = (
        jax.ShapeDtypeStruct((num_seqs, 8, 128), jnp.bfloat16), new, new, cache, cache,
        jax.ShapeDtypeStruct((num_seqs, width), jnp.int32), vector, vector,
    )  # fmt: skip
    op = partial(paged_jax.write_and_attend, layout=layout, implementation="mosaic_gpu")
    text = jax.jit(op, donate_argnums=(3, 4)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == (2 if width == 500 else 1)
    assert text.count("output_operand_alias<") == 2
