"""Tests that the cache's methods call their ops with its pools, layout and scales, and move the scales of blocks."""

import dataclasses
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from paged_jax import PagedKVCache, PagedLatentCache
from tests.every_op import assert_same_program

NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEADS, HEAD_SIZE = 6, 4, 2, 4, 16
RNG = np.random.default_rng(3)
TABLES, LENS = np.array([[4, 1], [0, 2]], np.int32), np.array([7, 3], np.int32)
STARTS = np.array([0, 2, 3], np.int32)


def scale_of(granularity, rng):
    shape = {"scalar": (), "head": (KV_HEADS,), "slot": (NUM_BLOCKS, KV_HEADS, BLOCK_SIZE)}
    return None if granularity is None else jnp.asarray(rng.uniform(0.01, 0.02, shape[granularity]), jnp.float32)


def filled(k_granularity, v_granularity, seed=0):
    """A cache of random codes; with no scales the pools are of floats."""
    rng = np.random.default_rng(seed)
    dtype = jnp.float32 if k_granularity is v_granularity is None else jnp.int8
    shape = NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE
    key_cache, value_cache = (jnp.asarray(rng.integers(-99, 99, shape), dtype) for _ in "kv")
    return PagedKVCache(key_cache, value_cache, scale_of(k_granularity, rng), scale_of(v_granularity, rng), "nhd")


def tokens(count, heads, dtype=jnp.bfloat16):
    return jnp.asarray(RNG.standard_normal((count, heads, HEAD_SIZE)), dtype)


def assert_equal(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32), strict=True)


def test_methods_take_no_other_flag_than_a_bool():
    """The ops refuse other flags, too."""
    cache, query = filled("slot", "head"), tokens(2, HEADS)
    new, slots, starts = tokens(2, KV_HEADS), np.array([6, 2], np.int32), np.array([0, 1, 2], np.int32)
    calls = [
        lambda flag: cache.attend(query, TABLES, LENS, return_lse=flag),
        lambda flag: cache.attend_ragged(query, TABLES, LENS, starts, return_lse=flag),
        lambda flag: cache.attend_prefix(query, new, new, TABLES, LENS, starts, return_lse=flag),
        lambda flag: cache.write_and_attend(query, new, new, TABLES, LENS, slots, return_lse=flag),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="return_lse must be a static bool, got str"):
            call("no")


@pytest.mark.parametrize("return_lse", [None, False, True])
def test_methods_are_their_ops(return_lse):
    """They are traced to the ops' own programs; the ops' numbers have tests of their own."""
    cache = filled("slot", "head")
    flag = {} if return_lse is None else {"return_lse": return_lse}
    slots = np.array([1 * 4 + 2, 0 * 4 + 2], np.int32)
    query, key, value = tokens(3, HEADS), tokens(3, KV_HEADS), tokens(3, KV_HEADS)
    decode, new = (query[:2], TABLES, LENS), (key[:2], value[:2])
    ragged, prefix = (query, TABLES, LENS, STARTS), (query, key, value, TABLES, LENS, STARTS)
    options = {"implementation": "xla", "sliding_window": 5} | flag

    def hold(method, op, num_before, *arrays, **options):
        """The op takes the pools behind its first arrays, and the method returns a cache with those it wrote."""

        def of_method(cache, *arrays):
            return jax.tree.leaves(getattr(cache, method)(*arrays, **options))

        def of_op(cache, *arrays):
            contract = {"k_scale": cache.k_scale, "v_scale": cache.v_scale, "layout": "nhd"}
            before, behind = arrays[:num_before], arrays[num_before:]
            results = op(*before, cache.key_cache, cache.value_cache, *behind, **options, **contract)
            scales = [cache.k_scale, cache.v_scale] if "write" in method else []
            return jax.tree.leaves((results, scales))

        assert_same_program(of_method, of_op, cache, *arrays)

    hold("write", paged_jax.write_to_paged_cache, 2, *new, slots, implementation="xla")
    hold("attend", paged_jax.paged_attention, 1, *decode, **options)
    hold("write_and_attend", paged_jax.write_and_attend, 3, query[:2], *new, *decode[1:], slots, **options)
    for more in ({"sliding_window": 5}, {"causal": True}, {"causal": False}):
        hold("attend_ragged", paged_jax.ragged_paged_attention, 1, *ragged, **options | {"sliding_window": None} | more)
        hold("attend_prefix", paged_jax.prefix_attention, 3, *prefix, **options | {"sliding_window": None} | more)
    written = jax.eval_shape(lambda: cache.write(*new, slots, implementation="xla"))
    *results, after = jax.eval_shape(lambda: cache.write_and_attend(query[:2], *new, *decode[1:], slots, **options))
    assert written.layout == after.layout == "nhd"
    assert len(results) == 1 + bool(return_lse)
    for method, arrays in ((cache.attend, decode), (cache.attend_ragged, ragged), (cache.attend_prefix, prefix)):
        attended = jax.eval_shape(lambda method=method, arrays=arrays: method(*arrays, **options))
        assert isinstance(attended, tuple) == bool(return_lse)


@pytest.mark.parametrize("num_new", [0, 2])
def test_ragged_attention_is_causal_unless_it_is_told_otherwise(num_new):
    cache, new = filled("slot", "head"), [tokens(3, KV_HEADS) for _ in range(num_new)]
    arrays = tokens(3, HEADS), *new, TABLES, LENS, STARTS
    method = cache.attend_prefix if new else cache.attend_ragged

    def program(**causal):
        return str(jax.make_jaxpr(lambda *arrays: method(*arrays, implementation="xla", **causal))(*arrays))

    assert program() == program(causal=True) != program(causal=False)


GRANULARITIES = [(None, None), ("scalar", "head"), ("slot", "scalar"), ("head", "slot"), ("slot", "slot")]


@pytest.mark.parametrize("granularities", GRANULARITIES, ids=str)
def test_blocks_move_with_the_scales_of_their_slots(granularities):
    cache, other = filled(*granularities), filled(*granularities, seed=1)
    mapping = np.array([[4, 1], [-1, -1], [0, 5]], np.int32)
    copied = cache.copy_blocks(mapping, implementation="xla")
    swapped = cache.swap_blocks_to(other, mapping, implementation="xla")
    for after, before in ((copied, cache), (swapped, other)):
        assert after.layout == "nhd"
        for name in ("key_cache", "value_cache", "k_scale", "v_scale"):
            wanted, source = getattr(before, name), getattr(cache, name)
            if wanted is not None and wanted.ndim >= 3:
                wanted = np.array(wanted)
                wanted[[1, 5]] = np.asarray(source)[[4, 0]]
            assert_equal(getattr(after, name), wanted)


@pytest.mark.parametrize("granularities", [(None, None), ("slot", "scalar")], ids=str)
def test_a_cache_in_host_memory_copies_blocks(granularities):
    cache, mapping = filled(*granularities), np.array([[4, 1], [-1, -1]], np.int32)
    on_host = cache.key_cache.sharding.with_memory_kind("pinned_host")
    pools = {name: jax.device_put(getattr(cache, name), on_host) for name in ("key_cache", "value_cache")}
    copied = dataclasses.replace(cache, **pools).copy_blocks(mapping)
    assert copied.key_cache.sharding.memory_kind == copied.value_cache.sharding.memory_kind == "pinned_host"
    assert_equal(copied, cache.copy_blocks(mapping))


def test_unlike_caches_swap_nothing():
    mapping = np.array([[4, 1]], np.int32)
    for one, two in (("slot", "head"), ("head", "slot")), (("slot", "scalar"), ("slot", "head")):
        with pytest.raises(ValueError, match="other must have this cache's layout and granularities of scales"):
            filled(*one).swap_blocks_to(filled(*two), mapping)


@pytest.mark.parametrize("implementation", [None, "triton"])
@pytest.mark.parametrize("kind", [PagedKVCache, PagedLatentCache])
def test_every_method_hands_its_implementation_on(kind, implementation, monkeypatch):
    class Called(Exception):
        pass

    def op(*_, implementation, **others):
        raise Called(implementation)

    module = inspect.getmodule(kind)
    for name in ("ops", "cache_ops"):
        names = [op for op in dir(getattr(module, name)) if not op.startswith("_")]
        monkeypatch.setattr(module, name, SimpleNamespace(**dict.fromkeys(names, op)))
    cache = PagedKVCache.create(2, 4, 1, 16) if kind is PagedKVCache else PagedLatentCache.create(2, 4, 16)
    methods = inspect.getmembers(cache, inspect.ismethod)
    taking = {name: inspect.signature(method).parameters for name, method in methods if not name.startswith("_")}
    taking = {name: parameters for name, parameters in taking.items() if "implementation" in parameters}
    assert len(taking) == (7 if kind is PagedKVCache else 5)
    for name, parameters in taking.items():
        needed = [p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        options = {p.name: 1 for p in parameters.values() if p.default is p.empty and p.kind is p.KEYWORD_ONLY}
        with pytest.raises(Called) as called:
            getattr(cache, name)(*[cache for _ in needed], **options, implementation=implementation)
        assert called.value.args == (implementation,), name
