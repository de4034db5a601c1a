"""Tests when the ragged kernel's loading warpgroup claims items, and which factors its computing ones load early."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from paged_jax.kernels.mosaic_gpu.ragged import ahead
from paged_jax.kernels.mosaic_gpu.ragged.kinds import kinds_of
from paged_jax.kernels.mosaic_gpu.ragged.load import _ItemLoader, phases
from paged_jax.kernels.problem import Granularity, OptionArrays
from paged_jax.options import PerHead
from tests.test_mosaic_gpu_ragged_plan import planned


@pytest.mark.parametrize(
    ("query_lens", "after_wide", "after_thin"),
    [
        ((1,) * 9, 1, 1),
        ((1,) * 40, 2, 1),
        ((200,), 1, 1),
        ((200, 1, 1), 1, 1),
        ((2000, 1, 1), 2, 2),
        ((500, *[1] * 40), 2, 2),
    ],
)
def test_items_are_claimed_only_if_some_are_left(query_lens, after_wide, after_thin):
    """A program that has no item of its first kind left claims one of the other kind, unless all have been taken."""
    lens = tuple(max(300, queries) for queries in query_lens)
    geometry, counts, _ = planned(query_lens, lens, 32, 8, 128, None, table_width=1024, num_programs=132)
    rest = counts.wide_programs[0], counts, geometry
    assert [int(phases(jnp.bool_(x), *rest)) for x in (True, False)] == [after_wide, after_thin]


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_a_thin_item_has_begun_in_both_warpgroups_before_the_next_query_is_loaded(stages):
    """The next query's memory holds results until then. If it came sooner, no interpreter would see the race."""
    geometry = SimpleNamespace(merges_copies=False)
    loader = SimpleNamespace(kind=SimpleNamespace(is_wide=False, stages=stages, geometry=geometry))
    for num_tiles in range(20):
        before = int(_ItemLoader._tiles_before_next(loader, jnp.int32(num_tiles)))
        assert min(num_tiles, stages + 2) <= before <= num_tiles


@pytest.mark.parametrize(("query_lens", "before"), [((192,), [1, 2, 2, 2, 3, 7]), ((192, 1), [1, 2, 2, 2, 2, 2])])
def test_wide_items_are_claimed_late_if_there_are_no_thin_ones(query_lens, before):
    geometry, counts, _ = planned(query_lens, query_lens, 32, 8, 128, None, num_programs=132)
    loader = _ItemLoader(kinds_of(geometry)[0], counts, jnp.int32(0), None)
    assert [int(loader._tiles_before_next(jnp.int32(tiles))) for tiles in (1, 2, 3, 4, 5, 9)] == before


@pytest.mark.parametrize(("reads_own_queries", "expected"), [(False, ["k", "scale", "sinks"]), (True, ["sinks"])])
def test_which_factors_wait_in_l1(reads_own_queries, expected):
    """Those that computing warpgroups read from global memory. Scales of slots come with their tiles."""
    facts = {"k_scale": Granularity.HEAD, "v_scale": Granularity.SLOT, "per_head": PerHead(None, True)}
    problem = SimpleNamespace(num_kv_heads=2, **facts)
    geometry = SimpleNamespace(problem=problem, reads_own_queries=reads_own_queries)
    assert ahead._factors(OptionArrays("scale", PerHead("slopes", "sinks"), "k", "v"), geometry) == expected
