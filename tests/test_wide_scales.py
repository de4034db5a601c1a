"""Tests that one rule of scales holds for every op, dtype and layout.

A scale is a factor of what a cache holds. A write divides by it where the cache's dtype has fewer bytes than the new
tokens', and otherwise stores these as they are.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import (
    PagedKVCache,
    PagedLatentCache,
    _checks,
    paged_attention,
    write_to_latent_cache,
    write_to_paged_cache,
)
from tests import inputs, oracle, plain
from tests.cases import CACHE_DTYPES, LAYOUTS, Case
from tests.test_cache_ops import assert_same_bytes

SLOTS = np.array([9, 3, -1], np.int32)
# A cache of int8 meets every way to store scales, by which a write to 8 bits divides; the others meet one or two each.
WAYS = [
    (dtype, layout, granularity)
    for i, dtype in enumerate(CACHE_DTYPES)
    for j, (layout, granularity) in enumerate(zip(LAYOUTS, ("cache", "head", "slot"), strict=True))
    if dtype == "int8" or i % 3 == j or (i == 3 and j == 2)
]


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def default_device(request):
    with jax.default_device(jax.devices(request.param)[0]):
        yield


def scales_of(granularity):
    rng = np.random.default_rng(1)
    shape = {"cache": (), "head": (2,), "slot": (4, 2, 8)}[granularity]
    return {name: rng.uniform(0.5, 2.0, shape).astype(np.float32) for name in ("k_scale", "v_scale")}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("cache_dtype", "layout", "granularity"), WAYS)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.gpu)])
@pytest.mark.usefixtures("default_device")
def test_every_write_follows_the_rule(dtype, cache_dtype, granularity, layout):
    rng, scales = np.random.default_rng(0), scales_of(granularity)
    key, value = (rng.standard_normal((3, 2, 16), np.float32).astype(inputs.dtype_of(dtype)) for _ in "kv")
    cache = PagedKVCache.create(4, 8, 2, 16, dtype=cache_dtype, layout=layout, **scales)
    is_narrower = inputs.dtype_of(cache_dtype).itemsize < key.dtype.itemsize
    pools = [np.asarray(x) for x in (cache.key_cache, cache.value_cache)]
    wanted = oracle.write(key, value, *pools, SLOTS, layout=layout, **(scales if is_narrower else {}))
    arrays = [jnp.asarray(x) for x in (key, value)]
    written = cache.write(*arrays, SLOTS)
    one_op = cache.write_and_attend(
        jnp.zeros((3, 4, 16), dtype), *arrays, np.array([[1], [0], [2]], np.int32), np.array([2, 4, 0], np.int32), SLOTS
    )[1]
    plain = write_to_paged_cache(*arrays, cache.key_cache, cache.value_cache, SLOTS, layout=layout, **scales)
    for pools in ((written.key_cache, written.value_cache), (one_op.key_cache, one_op.value_cache), plain):
        for actual, expected in zip(pools, wanted, strict=True):
            assert_same_bytes(np.asarray(actual), expected, layout)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.usefixtures("default_device")
def test_latents_follow_it_too(cache_dtype):
    latent = jnp.asarray(np.random.default_rng(0).standard_normal((3, 32), np.float32), jnp.bfloat16)
    cache = PagedLatentCache.create(4, 8, 32, dtype=cache_dtype, latent_scale=0.5)
    divided = latent / 0.5 if cache.latent_cache.dtype.itemsize < 2 else latent
    wanted = write_to_latent_cache(divided, cache.latent_cache, SLOTS, scale=1.0)
    written = cache.write(latent, SLOTS).latent_cache
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (written, wanted)))


def test_a_scale_of_numpy_may_change_after_the_call():
    """On a CPU JAX may read an aligned array where it lies, and late."""
    memory = np.ones(64, np.float32)
    scale = memory[-memory.ctypes.data % 64 // 4 :][:32]
    taken = _checks.floating("k_scale", scale)
    scale[:] = 9
    np.testing.assert_array_equal(taken, np.ones(32))


def test_a_factor_of_zero(run):
    hold_a_factor_of_zero(run)


def hold_a_factor_of_zero(run):
    """All logits are 0, also of tokens behind the end, which are masked."""
    made = inputs.make(Case("zero", 4, 2, 32, 16, "float16", seq_lens=(37, 20, 9), query_lens=None))

    def function(arrays, implementation):
        return paged_attention(**arrays, scale=0.0, return_lse=True, implementation=implementation)

    out, lse = run(function, arrays=made.decode)
    exact, rough = oracle.decode(**made.decode, scale=0.0), plain.decode(**made.decode, scale=0.0)
    plain.assert_close(out, exact[0], rough[0], "out")
    plain.assert_close(lse, exact[1], rough[1], "lse")
