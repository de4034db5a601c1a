"""Tests the tunings that ragged attention in Mosaic GPU gets."""

import pytest

from paged_jax.kernels.mosaic_gpu.ragged import choose
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import kinds_of
from paged_jax.kernels.mosaic_gpu.ragged.refs import shared_memory_bytes
from paged_jax.kernels.problem import Device, Problem
from tests import inputs
from tests.test_mosaic_gpu_ragged import operands_of, small


@pytest.mark.parametrize("group", [1, 64])
@pytest.mark.parametrize("scale", ["scalar", "slot"])
@pytest.mark.parametrize(
    ("head_size", "dtype"), [(64, "int8"), (128, "int8"), (224, "int8"), (128, "bfloat16"), (208, "bfloat16")]
)
def test_tilings_fit_in_shared_memory(head_size, dtype, scale, group):
    """A program may have 227 KiB; 128 rows of 208 elements with their scales would take a little more."""
    scales = {"k_scale": scale or "scalar", "v_scale": scale or "scalar"} if dtype == "int8" or scale else {}
    operands = operands_of(
        case := small("fit", group, 1, head_size, 16, "bfloat16", dtype, **scales), inputs.make(case)
    )
    problem = Problem.of_call(*operands[:4], operands.options)
    assert shared_memory_bytes(Geometry(problem, choose.tune(problem, Device()))) <= 227 * 1024


@pytest.mark.parametrize(
    ("head_size", "dtype", "group", "most_queries", "warpgroups"),
    [
        (64, "bfloat16", 1, 65, 3),
        (64, "bfloat16", 1, 64, 2),
        (64, "bfloat16", 5, 13, 3),
        (64, "bfloat16", 5, 12, 2),
        (16, "bfloat16", 64, 2, 3),
        (80, "bfloat16", 1, 65, 2),
        (128, "bfloat16", 1, 65, 2),
        (64, "int8", 1, 65, 3),
        (64, "float8_e4m3fn", 5, 12, 2),
        (80, "float8_e4m3fn", 1, 65, 2),
    ],
)
def test_three_warpgroups_compute_for_small_heads(head_size, dtype, group, most_queries, warpgroups):
    """There must be wide items, of more than 64 rows."""
    scales = {} if dtype == "bfloat16" else {"k_scale": "scalar", "v_scale": "scalar"}
    lens = {"seq_lens": (70,), "query_lens": (70,)}
    case = small("warpgroups", group, 1, head_size, 16, "bfloat16", dtype, **lens, **scales)
    operands = operands_of(case, inputs.make(case), max_query_len=most_queries)
    problem = Problem.of_call(*operands[:4], operands.options)
    assert choose.tune(problem, Device()).computing_warpgroups == warpgroups


@pytest.mark.parametrize(
    ("head_size", "most_queries", "stages", "raw_tiles", "prefetches", "lanes_hold_blocks"),
    [
        (64, 65, 2, 6, False, True),
        (64, 64, 4, 6, False, False),
        (80, 65, 2, 6, False, False),
        (96, 65, 2, 3, True, False),
        (128, 65, 2, 3, True, False),
        (32, 65, 2, 6, True, True),
    ],
)
def test_raw_tiles_that_are_in_flight(head_size, most_queries, stages, raw_tiles, prefetches, lanes_hold_blocks):
    """Where 40 KiB are in flight, nothing is prefetched. Beside three computing warpgroups registers are few."""
    lens = {"seq_lens": (70,), "query_lens": (70,)}
    case = small("raw", 1, 1, head_size, 16, "bfloat16", "float8_e4m3fn", **lens, k_scale="scalar", v_scale="scalar")
    operands = operands_of(case, inputs.make(case), max_query_len=most_queries)
    problem = Problem.of_call(*operands[:4], operands.options)
    tuning = choose.tune(problem, Device())
    wide, thin = kinds_of(geometry := Geometry(problem, tuning))
    assert (tuning.stages, tuning.raw_tiles, geometry.lanes_hold_blocks) == (stages, raw_tiles, lanes_hold_blocks)
    assert (thin.raw_stages, thin.prefetches) == (raw_tiles, prefetches)
    assert (wide.raw_stages, wide.prefetches) == (2, False)
