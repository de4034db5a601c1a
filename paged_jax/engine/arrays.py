"""The arrays that an engine's runner works on: pools, their scales, and copies and swaps of whole blocks."""

import collections.abc
import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from paged_jax.cache import PagedKVCache
from paged_jax.cache_ops import copy_blocks
from paged_jax.engine.batch import Cache, Caches
from paged_jax.engine.groups import Group

POOLS = "key_cache", "value_cache", "latent_cache"  # members of caches
SCALES = "k_scale", "v_scale", "latent_scale"


def change_tables(tables: tuple[jax.Array, ...], entries: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Changes entries of each group's tables: i32 [n, 3] of seats, columns and blocks."""
    return tuple(
        table.at[some[:, 0], some[:, 1]].set(some[:, 2], mode="drop")
        for table, some in zip(tables, entries, strict=True)
    )


def copy_all(caches: Caches, pairs: tuple[jax.Array, ...], groups: tuple[Group, ...]) -> Caches:
    """Copies blocks in the caches of each group of layers, by the group's pairs."""
    copied = list(caches)
    for group, some in zip(groups, pairs, strict=True):
        for layer, cache in zip(group.layers, _copy(tuple(caches[i] for i in group.layers), some), strict=True):
            copied[layer] = cache
    return tuple(copied)


def _copy(caches: Caches, pairs: jax.Array) -> Caches:
    with_values = [cache for cache in caches if isinstance(cache, PagedKVCache)]
    if len(with_values) < len(caches):
        return tuple(cache.copy_blocks(pairs) for cache in caches)
    keys, values = copy_blocks([c.key_cache for c in with_values], [c.value_cache for c in with_values], pairs)
    return tuple(
        dataclasses.replace(cache, key_cache=key, value_cache=value)
        for cache, key, value in zip(with_values, keys, values, strict=True)
    )


def swap_all(source: Caches, destination: Caches, pairs: tuple[jax.Array, ...], groups: tuple[Group, ...]) -> Caches:
    """Copies blocks from one memory's caches to the other's, by the pairs of each group of layers."""
    pairs_of = {layer: some for group, some in zip(groups, pairs, strict=True) for layer in group.layers}
    return tuple(
        src.swap_blocks_to(cast(Any, dst), pairs_of[layer])
        for layer, (src, dst) in enumerate(zip(source, destination, strict=True))
    )


def usable(array: jax.Array) -> jax.Array:
    """The array, or zeros like it if it was donated to a program that failed, or comes from one."""
    try:
        return jax.block_until_ready(array)
    except RuntimeError:
        # Unlike `device_put`, this asks no other process whether it does the same.
        return jax.make_array_from_callback(
            array.shape, array.sharding, lambda index: np.zeros(_shape_of(index, array.shape), array.dtype)
        )


def _shape_of(index: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a part of an array."""
    return tuple(len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True))


def check_caches(caches: Caches) -> None:
    for layer, cache in enumerate(caches):
        if any(scale is not None and np.ndim(scale) == 3 for scale in members(cache, SCALES).values()):
            raise ValueError(
                f"layer {layer} has a scale for each token's place in the pool; blocks move between requests, so that "
                "an engine takes scales for the whole cache or per kv head"
            )


def num_parts(sharding: Any, axis: int) -> int:
    """Into how many parts an axis of the pools is split."""
    if not isinstance(sharding, NamedSharding) or axis >= len(sharding.spec):
        return 1
    names = sharding.spec[axis] or ()
    return math.prod(sharding.mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))


def replicated(sharding: Any) -> Any:
    """The sharding of small arrays: every device that holds a part of the caches has a copy."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def logits_at(cache: Cache, vocab_size: int) -> Any:
    """The sharding of logits: their vocabulary is split over the same mesh axis as the cache's heads, if it can be."""
    at = pool(cache).sharding
    if not isinstance(at, NamedSharding):
        return at
    axis = next((axis for axis in range(1, len(at.spec)) if at.spec[axis] is not None), None)
    if axis is None or vocab_size % num_parts(at, axis):
        return replicated(at)
    return NamedSharding(at.mesh, PartitionSpec(None, at.spec[axis]))


def on_host(cache: Cache, num_blocks: int) -> Cache:
    """Makes a cache like `cache` with `num_blocks` blocks in pinned host memory."""

    def place(pool):
        zeros = np.zeros((num_blocks, *pool.shape[1:]), pool.dtype)
        return jax.device_put(zeros, pool.sharding.with_memory_kind("pinned_host"))

    return dataclasses.replace(cache, **{name: place(pool) for name, pool in members(cache, POOLS).items()})


def members(cache: Cache, names: tuple[str, ...]) -> dict[str, Any]:
    """The members of a cache that have one of these names."""
    return {field.name: getattr(cache, field.name) for field in dataclasses.fields(cache) if field.name in names}


def pool(cache: Cache) -> jax.Array:
    """One of the cache's pools; where there are two, both lie on the same devices."""
    return next(iter(members(cache, POOLS).values()))


def with_own_scales(caches: Caches, scales: Any) -> Caches:
    """The caches with copies of these scales: a program that updates a cache in place takes its scales too."""
    copies = jax.tree.map(jnp.array, scales)
    return tuple(dataclasses.replace(cache, **members) for cache, members in zip(caches, copies, strict=True))


def in_calls(
    lists: collections.abc.Sequence[collections.abc.Sequence[tuple[int, ...]]], shape: tuple[int, int], padding: int
) -> collections.abc.Iterator[tuple[np.ndarray, ...]]:
    """Splits each group's list into arrays of one shape, padded at the end; there are as many as the longest needs."""
    for start in range(0, max(map(len, lists)), shape[0]):
        arrays = tuple(np.full(shape, padding, np.int32) for _ in lists)
        for array, items in zip(arrays, lists, strict=True):
            if some := items[start : start + shape[0]]:
                array[: len(some)] = some
        yield arrays
