"""Sorts of a batch's sequences."""

import jax.experimental.pallas as pl
import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP
from tests.interpreted_ptx.scan import store


def places_largest_first(values, values_smem, count):
    return _ranks(-values)


def places_by_class(parts, sums_smem):
    """Sorts by sign alone, the last ones first: within a class any order will do."""
    values = jnp.concatenate(parts)
    ranks = _ranks(jnp.where(values < 0, len(values), 0) - jnp.arange(len(values)))
    return list(ranks.reshape(len(parts), WARPGROUP))


def keep(arrays, arrays_smem, order_smem):
    order_smem[pl.ds(0, WARPGROUP)] = jnp.arange(WARPGROUP, dtype=jnp.int32)
    store(arrays, arrays_smem, 0)


def moved(parts, places, arrays_smem, order_smem):
    order = jnp.argsort(jnp.concatenate(places))
    order_smem[pl.ds(0, len(order))] = order
    whole = {row: jnp.concatenate([part[row] for part in parts])[order] for row in parts[0]}
    result = [{row: x[i * WARPGROUP : (i + 1) * WARPGROUP] for row, x in whole.items()} for i in range(len(parts))]
    for i, part in enumerate(result):
        store(part, arrays_smem, i * WARPGROUP)
    return result


def _ranks(keys):
    return jnp.argsort(jnp.argsort(keys, stable=True), stable=True).astype(jnp.int32)
