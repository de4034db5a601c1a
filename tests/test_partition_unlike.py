"""Tests ops whose operands are split unlike each other: heads over whole pools, one pool of two, batches of calls."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.test_partition import (
    HEADS_AXIS,
    assert_nothing_is_exchanged,
    assert_same,
    bind,
    expected,
    make_mesh,
    place,
    specs_of,
)

EXPLICIT = AxisType.Explicit


def of_one_kv_head(names, arrays):
    """The same arrays with a single kv head, so that all query heads are one group."""
    head_axes = [None if n in ("query", "tokens", "alibi_slopes") else HEADS_AXIS.get(n) for n in names]
    return [x if axis is None else x.take([0], axis) for x, axis in zip(arrays, head_axes, strict=True)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("op", "heads", "axis_type"),
    [
        *(("paged_attention", heads, axis_type) for heads in (None, "tp") for axis_type in (AxisType.Auto, EXPLICIT)),
        *(("ragged_paged_attention", "tp", axis_type) for axis_type in (AxisType.Auto, EXPLICIT)),
        *(("write_and_attend", heads, EXPLICIT) for heads in (None, "tp")),
    ],
)
def test_heads_of_one_kv_head_are_split(op, heads, axis_type):
    """Every device has the whole pools and some query heads. Every device writes the new tokens."""
    fun, names, arrays = bind(op)
    arrays = of_one_kv_head(names, arrays)
    of_heads = {"query": P(None, heads), "tokens": P(None, heads), "alibi_slopes": P(heads)}
    placed = place(arrays, [of_heads.get(name, P()) for name in names], make_mesh(axis_type))
    compiled = jax.jit(fun).lower(*placed).compile()
    assert_nothing_is_exchanged(compiled)
    results = compiled(*placed)
    for actual, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(jax.jit(fun)(*arrays)), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-6, atol=1e-6)
    out, *pools = jax.tree.leaves(results)
    assert out.sharding.is_equivalent_to(placed[0].sharding, 3)
    if op == "write_and_attend":
        assert all(pool.sharding.is_fully_replicated for pool in pools)


def test_pools_that_the_user_s_shard_map_replicates_stay_so():
    """New tokens and their slots are the same on every device, even if the devices have different heads."""
    fun, names, arrays = bind("write_and_attend")
    arrays = of_one_kv_head(names, arrays)
    of_heads = {"query": P(None, "tp"), "alibi_slopes": P("tp")}
    specs = tuple(of_heads.get(name, P()) for name in names)
    mapped = jax.shard_map(fun, mesh=make_mesh(), in_specs=specs, out_specs=(P(None, "tp"), P(), P()))
    for actual, wanted in zip(jax.jit(mapped)(*arrays), jax.jit(fun)(*arrays), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("op", ["copy_blocks", "swap_blocks"])
def test_pools_of_one_call_may_be_split_differently(op):
    fun, _, arrays = bind(op)
    pools = [P(None, "tp"), P()] * (2 if op == "swap_blocks" else 1)  # keys and values
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        placed = place(arrays, [*pools, P()], make_mesh(axis_type))
        results = jax.jit(fun)(*placed)
        assert_same(results, expected(op))
        if axis_type is AxisType.Explicit:  # XLA may share out what every device has
            keys, values = (x.sharding for x in jax.tree.leaves(results))
            assert keys.spec[1] == "tp"
            assert values.is_fully_replicated


@pytest.mark.parametrize("is_split", [False, True])
def test_blocks_go_to_where_the_destination_of_a_swap_lies(is_split):
    fun, _, arrays = bind("swap_blocks")
    source, destination = (P(), P(None, "tp")) if is_split else (P(None, "tp"), P())
    placed = place(arrays, [source] * 2 + [destination] * 2 + [P()], make_mesh(AxisType.Explicit))
    results = jax.jit(fun)(*placed)
    assert_same(results, expected("swap_blocks"))
    assert [x.sharding.is_fully_replicated for x in jax.tree.leaves(results)] == [not is_split] * 2


def test_blocks_of_a_swap_are_not_split():
    fun, names, arrays = bind("swap_blocks")
    placed = place(arrays, [P("dp") if "cache" in name else P() for name in names], make_mesh())
    assert_same(jax.jit(fun)(*placed), expected("swap_blocks"))


@pytest.mark.parametrize("op", ["ragged_paged_attention", "paged_attention"])
def test_a_batch_of_calls_that_is_split_by_its_type(op):
    fun, names, arrays = bind(op)
    mesh = make_mesh(AxisType.Explicit)
    rest = place(arrays[1:], specs_of(op, names, None, "tp")[1:], mesh)
    queries = jax.device_put(np.stack([arrays[0]] * 2), NamedSharding(mesh, P("dp", None, "tp")))
    results = jax.jit(jax.vmap(fun, in_axes=(0, *[None] * len(rest))))(queries, *rest)
    for i in range(2):
        assert_same(jax.tree.map(lambda x, i=i: np.asarray(x)[i], results), expected(op))
