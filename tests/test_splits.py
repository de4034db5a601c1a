"""Tests which mesh axes a call's factors are split over, in cases that whole programs never reach."""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from paged_jax import _splits, _validate
from tests import split_tables

NUM_SEQS, NUM_KV_HEADS = 6, 4


def call_axes(num_heads=8, num_kv_heads=NUM_KV_HEADS):
    """The axes of a call of decode."""
    pool = jnp.zeros((3, num_kv_heads, 8, 16))
    tables, lens = jnp.zeros((NUM_SEQS, 2), jnp.int32), jnp.zeros(NUM_SEQS, jnp.int32)
    operands = _validate.decode_operands(jnp.zeros((NUM_SEQS, num_heads, 16)), pool, pool, tables, lens, {})
    return _splits.CallAxes("paged_attention", operands, {})


def choose(specs, sizes):
    """Returns the mesh axes of each factor; operands that `specs` does not name are not split."""
    axes = call_axes()
    return axes.choose([specs.get(name, P()) for name in axes.names], sizes).axes


@pytest.mark.parametrize(("size", "chosen"), [(2, ("tp",)), (3, ()), (8, ())])
def test_a_factor_is_split_only_into_even_parts(size, chosen):
    pools = dict.fromkeys(("key_cache", "value_cache"), P(None, "tp"))
    assert choose(pools, {"tp": size})["h"] == chosen


@pytest.mark.parametrize(("kv_parts", "group"), [(2, ()), (4, ("b",))])
def test_a_group_is_split_only_where_a_device_has_one_kv_head(kv_parts, group):
    specs = dict.fromkeys(("key_cache", "value_cache"), P(None, "a")) | {"query": P(None, ("a", "b"))}
    assert choose(specs, {"a": kv_parts, "b": 2}) == {"h": ("a",), "g": group, "n": (), "b": ()}


def test_ops_are_split_as_the_table_says():
    kept = split_tables.KEPT.read_text(encoding="utf-8").splitlines()
    assert split_tables.table().splitlines() == kept, "python -m tests.split_tables > tests/split_tables.txt"


def test_operands_without_a_sharding_are_not_split():
    assert choose({}, {"tp": 2}) == {"h": (), "g": (), "n": (), "b": ()}


def test_a_group_of_one_query_head_is_no_factor():
    """Shardy wants the size of each factor that is no axis by itself."""
    rule, sizes = call_axes(num_heads=8).shardy_rule()
    assert "(h g)" in rule
    assert sizes == {"g": 2}
    rule, sizes = call_axes(num_heads=NUM_KV_HEADS).shardy_rule()
    assert "g" not in rule
    assert sizes == {}


@pytest.mark.parametrize(("num_heads", "word"), [(8, "g"), (1, "h")])
def test_one_kv_head_is_no_factor_beside_its_group(num_heads, word):
    """Shardy refuses factors of one element beside others."""
    rule, sizes = call_axes(num_heads, num_kv_heads=1).shardy_rule()
    assert rule.startswith(f"n {word} ")
    assert "(" not in rule
    assert sizes == {}


def test_heads_and_sequences_over_one_mesh_axis():
    """Heads take it, and the sequences of the other operands are gathered: no array is split twice over one axis."""
    pools = dict.fromkeys(("key_cache", "value_cache"), P(None, "a"))
    rows = {"query": P("a"), "block_tables": P("a"), "seq_lens": P("a")}
    assert choose(pools | rows, {"a": 2}) == {"h": ("a",), "g": (), "n": (), "b": ()}
    assert choose(pools | {"block_tables": P(("a", "b"))}, {"a": 2, "b": 3})["n"] == ("b",)


def test_sequences_of_a_call_that_writes_are_not_split():
    """A kernel finds a row's new token by the row's number, and every copy of a pool needs all rows."""
    pool, new = jnp.zeros((3, NUM_KV_HEADS, 8, 16)), jnp.zeros((NUM_SEQS, NUM_KV_HEADS, 16))
    tables, lens = jnp.zeros((NUM_SEQS, 2), jnp.int32), jnp.zeros(NUM_SEQS, jnp.int32)
    query = jnp.zeros((NUM_SEQS, 8, 16))
    operands = _validate.write_and_attend_operands(query, new, new, pool, pool, tables, lens, lens, {})
    axes = _splits.CallAxes("write_and_attend", operands, {})
    rows = {"query": P("a"), "block_tables": P("a"), "seq_lens": P("a")}
    assert axes.choose([rows.get(name, P()) for name in axes.names], {"a": 2}).of("nhgb") == ()
