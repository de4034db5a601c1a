"""Tests swaps and copies of pools in pinned host memory, bit for bit, and what other ops say of such pools."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from tests import oracle
from tests.test_cache_ops import HEAD_SIZE, NUM_KV_HEADS, assert_same_bytes, random_caches

PAIRS = np.array([(0, 6), (6, 1), (-1, 2), (5, 5)], np.int32)


def place(caches, kind, device):
    """Puts a layer's caches into the device's memory or the host's."""
    return jax.device_put(caches, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))


@pytest.mark.parametrize(("source_kind", "kind"), [("device", "pinned_host"), ("pinned_host", "device")])
def test_swap_blocks_between_memories(source_kind, kind, implementation, device, skip_lacking):
    rng = np.random.default_rng(7)
    source, destination = random_caches(rng, "float8_e5m2"), random_caches(rng, "float8_e5m2")
    swap = partial(paged_jax.swap_blocks, implementation=implementation)
    for function in (swap, jax.jit(swap)):
        with skip_lacking():
            caches = *place(source, source_kind, device), *place(destination, kind, device)
            result = function(*caches, jax.device_put(PAIRS, device))
        for before, from_, after in zip(destination, source, result, strict=True):
            assert after.sharding.memory_kind == kind
            assert_same_bytes(after, oracle.swap(from_, before, PAIRS), "destination")


@pytest.mark.parametrize("chosen", [False, True])
def test_copy_blocks_in_host_memory(chosen, implementation, device, skip_lacking):
    """Also the library's own choice is tested on a CPU: JAX traces all branches of it."""
    before = random_caches(np.random.default_rng(12), "float8_e5m2")
    caches = place(before, "pinned_host", device)
    copy = partial(paged_jax.copy_blocks, implementation=None if chosen else implementation)
    for function in (copy, jax.jit(copy)):
        with skip_lacking():
            result = function(*caches, jax.device_put(PAIRS, device))
        for x, after in zip(before, result, strict=True):
            assert after.sharding.memory_kind == "pinned_host"
            assert_same_bytes(after, oracle.copy(x, PAIRS), "cache")


@pytest.mark.parametrize("implementation", [None, "triton"])
def test_copies_and_swaps_in_host_memory_lower_for_cuda(implementation):
    """The branch of other platforms must have results in the same memory, although it refuses."""
    device = jax.devices("cpu")[0]
    caches = place(random_caches(np.random.default_rng(15), "float8_e5m2"), "pinned_host", device)
    copy = partial(paged_jax.copy_blocks, implementation=implementation)
    swap = partial(paged_jax.swap_blocks, implementation=implementation)
    for function, arrays in ((copy, caches), (swap, (*caches, *caches))):
        traced = jax.jit(function).trace(*arrays, PAIRS)
        assert [x.memory_space for x in traced.jaxpr.out_avals] == [jax.memory.Space.Host] * 2
        assert "triton_kernel_call" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_layers_caches_are_in_one_memory():
    device = jax.devices("cpu")[0]
    caches = place(random_caches(np.random.default_rng(16), "bfloat16"), "device", device)
    key, value = caches[0], place(caches[1], "pinned_host", device)
    for call, name in (
        (lambda: paged_jax.copy_blocks(key, value, PAIRS), "{}_cache"),
        (lambda: paged_jax.copy_blocks([key], [value], PAIRS), "{}_cache[0]"),
        (lambda: paged_jax.swap_blocks(key, value, *caches, PAIRS), "src_{}_cache"),
        (lambda: paged_jax.swap_blocks(*caches, key, value, PAIRS), "dst_{}_cache"),
    ):
        of_value, of_key = name.format("value"), name.format("key")
        message = f"{of_value} must be in {of_key}'s device memory, got one in host memory"
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_attention_and_writes_refuse_pools_in_host_memory():
    caches = [jnp.asarray(x) for x in random_caches(np.random.default_rng(14), "bfloat16")]
    caches[1] = jax.device_put(caches[1], caches[1].sharding.with_memory_kind("pinned_host"))
    new = jnp.ones((2, NUM_KV_HEADS, HEAD_SIZE))
    rows = np.zeros((2, 3), np.int32), np.ones(2, np.int32)
    for call in (
        lambda: paged_jax.paged_attention(new, *caches, *rows),
        lambda: paged_jax.write_to_paged_cache(new, new, *caches, rows[1]),
    ):
        with pytest.raises(ValueError, match="value_cache must be in device memory, got one in host memory"):
            call()
