"""Tests the cache: shapes of its layouts, sizes, sharding, and flat pools that are split into two caches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from paged_jax import PagedKVCache, get_kv_cache_shape, split_kv_cache

LAYOUTS = ("hnd", "nhd", "vllm")
DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")


def shapes(layout, itemsize, num_blocks=7, block_size=4, num_kv_heads=3, head_size=32):
    """The shapes of every layout, written out."""
    x = 16 // itemsize
    return {
        "hnd": ((num_blocks, num_kv_heads, block_size, head_size),) * 2,
        "nhd": ((num_blocks, block_size, num_kv_heads, head_size),) * 2,
        "vllm": (
            (num_blocks, num_kv_heads, head_size // x, block_size, x),
            (num_blocks, num_kv_heads, head_size, block_size),
        ),
    }[layout]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_create(layout, dtype):
    cache = PagedKVCache.create(7, 4, 3, 32, dtype=dtype, layout=layout)
    itemsize = jnp.dtype(dtype).itemsize
    assert (cache.key_cache.shape, cache.value_cache.shape) == shapes(layout, itemsize)
    assert (cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_size) == (7, 4, 3, 32)
    assert cache.dtype == cache.key_cache.dtype == jnp.dtype(dtype)
    assert cache.nbytes == 2 * 7 * 4 * 3 * 32 * itemsize == cache.key_cache.nbytes + cache.value_cache.nbytes
    assert not cache.key_cache.astype(jnp.float32).any()
    assert not cache.value_cache.astype(jnp.float32).any()


def test_defaults():
    cache = PagedKVCache.create(2, 16, 1, 128)
    assert (cache.layout, cache.dtype, cache.k_scale, cache.v_scale) == ("hnd", jnp.bfloat16, None, None)


def test_scales_are_float32_leaves():
    k_scale, v_scale = np.full((7, 3, 4), 0.5, np.float16), 2.0
    cache = PagedKVCache.create(7, 4, 3, 32, dtype=jnp.int8, k_scale=k_scale, v_scale=v_scale)
    assert (cache.k_scale.shape, cache.k_scale.dtype) == ((7, 3, 4), jnp.float32)
    assert (cache.v_scale.shape, cache.v_scale.dtype, cache.v_scale.weak_type) == ((), jnp.float32, False)
    assert len(jax.tree.leaves(cache)) == 4
    assert len(jax.tree.leaves(PagedKVCache.create(7, 4, 3, 32))) == 2
    for shape in ((7,), (7, 3), (3, 7, 4), (1, 1, 1)):
        with pytest.raises(ValueError, match="v_scale must have one of the shapes"):
            PagedKVCache.create(7, 4, 3, 32, dtype=jnp.int8, v_scale=np.ones(shape))


def test_a_cache_can_be_donated_and_the_callers_scale_stays():
    scale = jnp.ones(3)
    cache = PagedKVCache.create(7, 4, 3, 32, dtype=jnp.int8, k_scale=scale, v_scale=scale)
    jax.jit(lambda cache: jax.tree.map(lambda x: x + 1, cache), donate_argnums=0)(cache)
    assert cache.k_scale.is_deleted()
    assert not scale.is_deleted()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pytree_through_jit_and_scan(layout):
    cache = PagedKVCache.create(7, 4, 3, 32, layout=layout, k_scale=1.0)

    def add(cache, _):
        assert (cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_size) == (7, 4, 3, 32)
        return dataclasses.replace(cache, key_cache=cache.key_cache + 1), None

    cache, _ = jax.jit(lambda cache: jax.lax.scan(add, cache, length=3))(cache)
    assert cache.layout == layout
    assert (cache.key_cache == 3).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_partition_spec(layout):
    per_slot = np.ones((7, 3, 4))
    cache = PagedKVCache.create(7, 4, 3, 32, layout=layout, k_scale=np.ones(3), v_scale=per_slot)
    specs = cache.partition_spec("heads")
    assert jax.tree.structure(specs) == jax.tree.structure(cache)

    def pick_heads(array, spec):
        """Takes the heads of shard 1 of 3."""
        split = spec.index("heads")
        assert array.shape[split] == 3
        return (*array.shape[:split], 1, *array.shape[split + 1 :])

    shard = jax.tree.map(pick_heads, cache, specs)
    assert (shard.key_cache, shard.value_cache) == shapes(layout, 2, num_kv_heads=1)
    assert (shard.k_scale, shard.v_scale) == ((1,), (7, 1, 4))
    assert dataclasses.replace(cache, k_scale=0.5, v_scale=None).partition_spec("heads").k_scale == P()
    assert PagedKVCache.create(7, 4, 3, 32, layout=layout).partition_spec("heads").k_scale is None


def test_partition_spec_serves_as_shardings():
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    cache = PagedKVCache.create(7, 4, 3, 32, k_scale=1.0)
    shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), cache.partition_spec("heads"))
    assert jax.device_put(cache, shardings).key_cache.sharding.spec == P(None, "heads")


# Flat pools.


def test_get_kv_cache_shape():
    assert get_kv_cache_shape(1000, 16, 12, 64) == (2, 1000, 16 * 12 * 64)
    assert get_kv_cache_shape(2**23, 256, 1, 8) == (2, 2**23, 2048), "the last slot is 2**31 - 1"


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_split_kv_cache(xp, layout, dtype):
    shape = get_kv_cache_shape(7, 4, 3, 32)
    flat = np.random.default_rng(0).integers(-128, 128, shape).astype(dtype)
    pool = xp.asarray(flat)
    key_cache, value_cache = split_kv_cache(pool, 3, 32, layout)
    key_shape, value_shape = shapes(layout, flat.itemsize)
    np.testing.assert_array_equal(np.asarray(key_cache), flat[0].reshape(key_shape), strict=True)
    np.testing.assert_array_equal(np.asarray(value_cache), flat[1].reshape(value_shape), strict=True)
    if xp is np:
        assert np.shares_memory(key_cache, pool)
        assert np.shares_memory(value_cache, pool)
    else:
        jitted = jax.jit(split_kv_cache, static_argnums=(1, 2, 3))
        for ours, theirs in zip(jitted(pool, 3, 32, layout), (key_cache, value_cache), strict=True):
            assert jnp.array_equal(ours, theirs)


def test_split_kv_cache_under_jit_only_slices_and_reshapes():
    pool = jax.ShapeDtypeStruct(get_kv_cache_shape(7, 4, 3, 32), jnp.bfloat16)
    for layout in LAYOUTS:
        text = str(jax.make_jaxpr(lambda pool, layout=layout: split_kv_cache(pool, 3, 32, layout))(pool))
        assert not any(name in text for name in ("transpose", "gather", "scatter", "concatenate", "dynamic"))


@pytest.mark.parametrize("block_size", [1, 256])
def test_split_kv_cache_infers_the_block_size(block_size):
    pool = np.zeros(get_kv_cache_shape(2, block_size, 1, 120), np.float16)
    assert split_kv_cache(pool, 1, 120, "nhd")[0].shape == (2, block_size, 1, 120)


# Refusals.

BAD_SIZES = {
    "num_blocks": ((0, 16, 1, 64), "num_blocks must be positive, got 0"),
    "num_kv_heads": ((2, 16, 0, 64), "num_kv_heads must be positive, got 0"),
    "block_size 24": ((2, 24, 1, 64), r"block_size must be one of \(1, 2, .* 256\), got 24"),
    "block_size 512": ((2, 512, 1, 64), "block_size must be one of .*, got 512"),
    "block_size 0": ((2, 0, 1, 64), "block_size must be one of .*, got 0"),
    "head_size 60": ((2, 16, 1, 60), "head_size must be a multiple of 8 up to 512, got 60"),
    "head_size 520": ((2, 16, 1, 520), "head_size must be a multiple of 8 up to 512, got 520"),
    "head_size 0": ((2, 16, 1, 0), "head_size must be a multiple of 8 up to 512, got 0"),
    "slots": ((2**27 + 1, 16, 1, 8), r"num_blocks \* block_size must be at most 2\*\*31"),
}


@pytest.mark.parametrize("case", BAD_SIZES)
def test_sizes_that_are_refused(case):
    sizes, message = BAD_SIZES[case]
    with pytest.raises(ValueError, match=message):
        PagedKVCache.create(*sizes)
    with pytest.raises(ValueError, match=message):
        get_kv_cache_shape(*sizes)


def test_sizes_of_few_bits_do_not_wrap_around():
    shape = get_kv_cache_shape(np.int8(2), np.int8(64), np.int8(2), np.int8(64))
    assert shape == (2, 2, 64 * 2 * 64)
    assert {type(size) for size in shape} == {int}
    assert split_kv_cache(np.zeros(shape, np.float16), np.int8(2), np.int8(64))[0].shape == (2, 2, 64, 64)
    assert PagedKVCache.create(np.int8(2), np.int8(64), np.int8(2), np.int8(64)).key_cache.shape == (2, 2, 64, 64)
    with pytest.raises(ValueError, match=r"num_blocks \* block_size must be at most 2\*\*31"):
        get_kv_cache_shape(np.int32(2**24), np.int32(256), 1, 8)


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "num_kv_heads", "head_size"])
def test_sizes_are_integers(name):
    sizes = {"num_blocks": 8, "block_size": 16, "num_kv_heads": 2, "head_size": 64}
    for make in (get_kv_cache_shape, PagedKVCache.create):
        with pytest.raises(TypeError, match=rf"{name} must be an int, got [\d.]+$"):
            make(**sizes | {name: float(sizes[name])})
    if name in ("num_kv_heads", "head_size"):
        heads = {"num_kv_heads": 2, "head_size": 64, name: float(sizes[name])}
        with pytest.raises(TypeError, match=rf"{name} must be an int, got [\d.]+$"):
            split_kv_cache(np.zeros((2, 8, 2048), np.float16), **heads)


def test_every_supported_size_is_accepted():
    for head_size in range(8, 257, 8):
        for block_size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            assert get_kv_cache_shape(2, block_size, 3, head_size) == (2, 2, block_size * 3 * head_size)


@pytest.mark.parametrize(
    ("dtype", "head_size", "x"), [("int8", 8, 16), ("float8_e5m2", 24, 16), ("int8", 120, 16), ("bfloat16", 8, 8)]
)
def test_the_vllm_layout_needs_whole_groups_of_16_bytes(dtype, head_size, x):
    pool = np.zeros(get_kv_cache_shape(2, 16, 1, head_size), dtype)
    if head_size % x == 0:
        assert PagedKVCache.create(2, 16, 1, head_size, dtype=dtype, layout="vllm").head_size == head_size
        assert split_kv_cache(pool, 1, head_size, "vllm")[0].shape == (2, 1, head_size // x, 16, x)
        return
    message = f"head_size must be a multiple of {x} for {dtype}, got {head_size}"
    with pytest.raises(ValueError, match=message):
        PagedKVCache.create(2, 16, 1, head_size, dtype=dtype, layout="vllm")
    with pytest.raises(ValueError, match=message):
        split_kv_cache(pool, 1, head_size, "vllm")


def test_dtypes_and_layouts_that_are_refused():
    with pytest.raises(ValueError, match=r"dtype must be one of float16, bfloat16, .* int8, got int32"):
        PagedKVCache.create(2, 16, 1, 64, dtype=jnp.int32)
    with pytest.raises(ValueError, match="layout must be one of hnd, nhd, vllm, got 'dhn'"):
        PagedKVCache.create(2, 16, 1, 64, layout="dhn")
    with pytest.raises(ValueError, match="layout must be one of hnd, nhd, vllm, got 'dhn'"):
        split_kv_cache(np.zeros((2, 2, 1024), np.float16), 1, 64, "dhn")


@pytest.mark.parametrize("shape", [(2, 7, 385), (3, 7, 384), (2, 384), (2, 7, 4, 96), (2, 7, 0), (2, 7, 3 * 96)])
def test_pools_that_no_block_size_explains(shape):
    with pytest.raises(ValueError, match=r"kv_cache must have shape|block_size must be one of"):
        split_kv_cache(np.zeros(shape, np.float16), 3, 32, "hnd")


def test_a_cache_cannot_be_changed():
    cache = PagedKVCache.create(2, 4, 1, 16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.layout = "nhd"
