"""Tests the tunings that ragged attention in Mosaic GPU gets, and tiles of two sizes."""

from dataclasses import replace

import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.mosaic.gpu import core

from paged_jax.kernels.mosaic_gpu.ragged import call as ragged
from paged_jax.kernels.mosaic_gpu.ragged import choose
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import kinds_of
from paged_jax.kernels.mosaic_gpu.ragged.refs import shared_memory_bytes
from paged_jax.kernels.problem import Device, Problem
from tests import inputs
from tests.ragged_interpreter import call
from tests.test_mosaic_gpu_ragged import SLOTS, check, check_prefix, operands_of, prefix_operands_of, small

# NumPy gives this warning when arithmetic meets the poison, which is NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
TWO_SIZES = {"tile": 128, "thin_tile": 64, "stages": 2, "least_split": 2, "computing_warpgroups": 2}


def geometry_of(case, max_query_len=None):
    """The geometry of a case on an H200."""
    operands = operands_of(case, inputs.make(case), max_query_len=max_query_len)
    arrays = operands.query, operands.key_cache, operands.value_cache, operands.block_tables
    problem = Problem.of_call(*arrays, operands.options)
    return Geometry(problem, choose.tune(problem, Device()))


@pytest.mark.parametrize("group", [1, 64])
@pytest.mark.parametrize("scale", ["scalar", "slot"])
@pytest.mark.parametrize(
    ("head_size", "dtype"), [(64, "int8"), (128, "int8"), (224, "int8"), (128, "bfloat16"), (208, "bfloat16")]
)
def test_tilings_fit_in_shared_memory(head_size, dtype, scale, group):
    """A program may have 227 KiB; 128 rows of 208 elements with their scales would take a little more."""
    scales = {"k_scale": scale or "scalar", "v_scale": scale or "scalar"} if dtype == "int8" or scale else {}
    geometry = geometry_of(small("fit", group, 1, head_size, 16, "bfloat16", dtype, **scales))
    assert shared_memory_bytes(geometry) <= 227 * 1024


@pytest.mark.parametrize(
    ("head_size", "dtype", "sizes"),
    [
        (64, "bfloat16", (128, 128)),
        (112, "bfloat16", (128, 128)),
        (128, "float16", (128, 64)),
        (144, "bfloat16", (128, 64)),
        (160, "bfloat16", (64, 64)),
        (128, "int8", (128, 128)),
        (256, "int8", (64, 64)),
    ],
)
def test_thin_tiles_have_16_kb_of_keys(head_size, dtype, sizes):
    scales = {"k_scale": "scalar", "v_scale": "scalar"} if dtype == "int8" else {}
    query_dtype = "bfloat16" if dtype == "int8" else dtype
    tuning = geometry_of(small("sizes", 1, 1, head_size, 16, query_dtype, dtype, **scales)).tuning
    assert (tuning.tile, tuning.thin_tile) == sizes


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("ragged_paged_attention", {}),
        pytest.param("ragged_paged_attention", {"cache_dtype": "int8"} | SLOTS, marks=pytest.mark.slow),
        pytest.param("prefix_attention", {"sliding_window": 90}, marks=pytest.mark.slow),
    ],
    ids=["plain", "slots", "window"],
)
def test_two_thin_tiles_lie_in_a_wide_one(op, options):
    """Programs that have taken wide items take thin ones. These have the same memory for tiles, but other barriers."""
    lens = {"seq_lens": (300, 37, 200, 70), "query_lens": (40, 1, 20, 3)}
    case = small("sizes", 4, 2, 16, 16, "bfloat16", **lens, **options)
    made = inputs.make(case)
    if op == "prefix_attention":
        check_prefix(made, call(op, prefix_operands_of(case, made), **TWO_SIZES))
    else:
        check(case, made, call(op, operands_of(case, made), **TWO_SIZES))
    assert not interpret_pallas_call.get_races().races_found


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
    assert geometry_of(case, most_queries).tuning.computing_warpgroups == warpgroups


@pytest.mark.parametrize(
    ("head_size", "most_queries", "stages", "raw_tiles", "prefetches", "lanes_hold_blocks"),
    [
        (64, 65, 2, 6, False, True),
        (64, 64, 4, 6, False, False),
        (80, 65, 2, 6, False, False),
        (96, 65, 2, 6, False, False),
        (128, 65, 2, 3, True, False),
        (32, 65, 2, 6, True, True),
        (240, 65, 2, 2, True, False),
        (256, 65, 2, 1, True, False),
    ],
)
def test_raw_tiles_that_are_in_flight(head_size, most_queries, stages, raw_tiles, prefetches, lanes_hold_blocks):
    """Where 40 KiB are in flight, nothing is prefetched. Beside three computing warpgroups registers are few."""
    lens = {"seq_lens": (70,), "query_lens": (70,)}
    case = small("raw", 1, 1, head_size, 16, "bfloat16", "float8_e4m3fn", **lens, k_scale="scalar", v_scale="scalar")
    geometry = geometry_of(case, most_queries)
    tuning, (wide, thin) = geometry.tuning, kinds_of(geometry)
    assert (tuning.stages, tuning.raw_tiles, geometry.lanes_hold_blocks) == (stages, raw_tiles, lanes_hold_blocks)
    assert (thin.raw_stages, thin.prefetches) == (raw_tiles, prefetches)
    assert (wide.raw_stages, wide.prefetches) == (min(raw_tiles, 2), False)


@pytest.mark.parametrize(("head_size", "reads"), [(192, True), (224, True), (240, False), (256, False)])
def test_the_largest_heads_leave_no_registers_for_queries(head_size, reads):
    """Rows of 240 elements are no multiple of what four lanes read; rows of 256 would be spilled."""
    case = small("reads", 1, 1, head_size, 16, "bfloat16", "int8", k_scale="scalar", v_scale="scalar")
    geometry = geometry_of(case)
    assert replace(geometry, tuning=replace(geometry.tuning, queries=1)).reads_own_queries == reads


def test_many_sequences_of_large_heads_over_8_bits_are_counted_by_xla():
    """The counts of 500 sequences do not fit beside the only raw tile."""
    lens = {"seq_lens": (9,) * 500, "query_lens": (1,) * 500}
    case = small("many", 1, 1, 256, 16, "bfloat16", "int8", k_scale="scalar", v_scale="scalar", **lens)
    assert not geometry_of(case).tuning.counts_in_kernel


@pytest.mark.parametrize(
    "case",
    [
        small("bf16", 4, 2, 64, 16, "bfloat16"),
        small("slots", 4, 2, 64, 16, "bfloat16", "int8", k_scale="slot", v_scale="slot"),
        small("e4m3", 4, 2, 256, 16, "bfloat16", "float8_e4m3fn", k_scale="scalar", v_scale="scalar"),
    ],
    ids=str,
)
def test_shared_memory_is_what_pallas_takes(case):
    """So no tiling is refused that would fit."""
    operands = operands_of(case, inputs.make(case))
    taken = shared_memory_bytes(geometry_of(case))
    with core.artificial_shared_memory_limit(taken - 1), pytest.raises(ValueError, match=f"smem_bytes={taken} >"):
        jax.jit(ragged.ragged_paged_attention).trace(*operands).lower(lowering_platforms=("cuda",))
