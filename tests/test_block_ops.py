"""Tests copy_blocks and swap_blocks, bit for bit, over pools of random bytes (test_cache_ops.py)."""

import jax
import numpy as np
import pytest

import paged_jax
from tests import inputs, oracle
from tests.cases import CACHE_DTYPES, LAYOUTS
from tests.test_cache_ops import assert_same_bytes, random_bytes, random_caches

PAIRS = {
    "plain": [(0, 3), (5, 6)],
    "fork": [(0, 3), (0, 4), (0, 5)],
    "chain": [(0, 1), (1, 2), (2, 3)],
    "exchange": [(3, 4), (4, 3), (0, 0)],
    "ring": [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 0)],
    "contested": [(0, 3), (1, 3), (3, 2), (3, 3), (5, 5), (6, 5)],
    "skipped": [(6, 1), (-1, -1), (-1, 1), (4, -1), (7, 2), (2, 7), (2**31 - 1, 0), (0, -(2**31))],
    "none": [],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_copy_blocks(dtype, run):
    caches = {layout: random_caches(inputs.rng_of(dtype + layout), dtype, layout) for layout in LAYOUTS}
    # Skipped pairs pad all mappings to one shape, so that they share one program.
    mappings = {name: np.array([*pairs, *[(-1, -1)] * (8 - len(pairs))], np.int32) for name, pairs in PAIRS.items()}

    def function(caches, mappings, implementation):
        return {
            name: {
                layout: paged_jax.copy_blocks(*pair, mapping, implementation=implementation)
                for layout, pair in caches.items()
                if layout == "vllm" or name != "plain"
            }
            for name, mapping in mappings.items()
        }

    results = run(function, caches=caches, mappings=mappings)
    for name, layouts in results.items():
        for layout, result in layouts.items():
            for before, after in zip(caches[layout], result, strict=True):
                expected = oracle.copy(before, mappings[name])
                assert_one_of_the_sources(after, before, expected, mappings[name], f"{name}, {layout}")


def assert_one_of_the_sources(after, before, expected, mapping, what):
    """Checks for `expected`; a destination that has several sources must be a whole block of any of them."""
    after, settled = np.asarray(after), expected.copy()
    pairs = mapping[(mapping[:, 0] >= 0) & (mapping[:, 0] < len(before)) & (mapping[:, 1] != -1)]
    destinations, counts = np.unique(pairs[:, 1], return_counts=True)
    for destination in destinations[counts > 1]:
        sources = pairs[pairs[:, 1] == destination, 0]
        candidates = [before[s] for s in sources if before[s].tobytes() == after[destination].tobytes()]
        assert candidates, f"{what}: block {destination} is none of its sources"
        settled[destination] = candidates[0]
    assert_same_bytes(after, settled, what)


def test_copy_blocks_of_many_layers(run):
    rng = np.random.default_rng(9)
    # All that layers must have in common is the number of blocks.
    layers = [random_caches(rng, "bfloat16"), random_caches(rng, "int8", "vllm"), random_caches(rng, "float32")]
    mapping = np.array([(0, 1), (1, 0), (-1, 2), (1, 6)], np.int32)

    def function(key_caches, value_caches, mapping, implementation):
        return paged_jax.copy_blocks(key_caches, value_caches, mapping, implementation=implementation)

    keys, values = zip(*layers, strict=True)
    caches = [list(keys), values]
    results = run(function, key_caches=caches[0], value_caches=caches[1], mapping=mapping)
    assert [type(side) for side in results] == [list, tuple]
    for befores, afters in zip(caches, results, strict=True):
        for layer, (before, after) in enumerate(zip(befores, afters, strict=True)):
            assert_same_bytes(after, oracle.copy(before, mapping), f"layer {layer}")


def test_copy_blocks_of_no_layers(implementation, device, skip_lacking):
    with jax.default_device(device), skip_lacking():
        assert paged_jax.copy_blocks((), (), np.zeros((2, 2), np.int32), implementation=implementation) == ((), ())


@pytest.mark.parametrize(
    ("key_shape", "value_shape"),
    [((5, 1, 1, 8), (5, 3, 1, 8)), ((5, 9, 3, 1000), (5, 1, 1, 16)), ((5, 1, 1, 3), (5, 1, 7, 1))],
    ids=str,
)
def test_copy_blocks_of_odd_sizes(key_shape, value_shape, run):
    """Block sizes need not be multiples of 16 or even of 2 bytes, and key blocks may differ from value blocks."""
    rng = np.random.default_rng(10)
    mapping = np.array([(0, 1), (2, 4), (4, 2)], np.int32)
    caches = tuple(random_bytes(rng, shape, "int8") for shape in (key_shape, value_shape))

    def function(caches, mapping, implementation):
        return paged_jax.copy_blocks(*caches, mapping, implementation=implementation)

    for before, after in zip(caches, run(function, caches=caches, mapping=mapping), strict=True):
        assert_same_bytes(after, oracle.copy(before, mapping), str(before.shape))


@pytest.mark.parametrize("count", [3000])
def test_copy_blocks_of_many_pairs(run, count):
    """A permutation of all blocks, and all blocks to one: more pairs than a kernel takes at a time."""
    rng = np.random.default_rng(11)
    caches = tuple(random_bytes(rng, (count, 1, 2, 8), "int8") for _ in "kv")
    permutation = np.stack([np.arange(count), rng.permutation(count)], 1).astype(np.int32)
    contested = np.stack([np.arange(count), np.full(count, 17)], 1).astype(np.int32)

    def function(caches, mapping, implementation):
        return paged_jax.copy_blocks(*caches, mapping, implementation=implementation)

    for name, mapping in (("permutation", permutation), ("contested", contested)):
        for before, after in zip(caches, run(function, caches=caches, mapping=mapping), strict=True):
            assert_one_of_the_sources(after, before, oracle.copy(before, mapping), mapping, name)


def test_copy_blocks_of_an_empty_mapping(run):
    caches = random_caches(np.random.default_rng(6), "bfloat16")

    def function(caches, mapping, implementation):
        return paged_jax.copy_blocks(*caches, mapping, implementation=implementation)

    for before, after in zip(caches, run(function, caches=caches, mapping=np.zeros((0, 2), np.int32)), strict=True):
        assert_same_bytes(after, before, "cache")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_swap_blocks_round_trip(layout, dtype, run):
    rng = inputs.rng_of(f"swap-{layout}-{dtype}")
    device, host = random_caches(rng, dtype, layout), random_caches(rng, dtype, layout)
    host = tuple(np.concatenate([cache, cache[:2]]) for cache in host)
    fresh = random_caches(rng, dtype, layout)
    pairs = np.array([(0, 8), (3, 1), (-1, 2), (2, -1), (6, 0), (9, 3), (1, 9)], np.int32)

    def function(device, host, fresh, pairs, implementation):
        out = paged_jax.swap_blocks(*device, *host, pairs, implementation=implementation)
        back = paged_jax.swap_blocks(*out, *fresh, pairs[:, ::-1], implementation=implementation)
        return out, back

    out, back = run(function, device=device, host=host, fresh=fresh, pairs=pairs)
    moved = [block for block, to in pairs.tolist() if 0 <= block < len(device[0]) and 0 <= to < len(host[0])]
    for source, before, new, after, returned in zip(device, host, fresh, out, back, strict=True):
        assert_same_bytes(after, oracle.swap(source, before, pairs), "destination")
        assert_same_bytes(returned[moved], source[moved], "blocks after a round trip")
        rest = np.setdiff1d(np.arange(len(source)), moved)
        assert_same_bytes(returned[rest], new[rest], "blocks that did not travel")
        assert returned[moved].tobytes() != new[moved].tobytes()
