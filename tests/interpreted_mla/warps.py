"""Arrays with an element for each lane of a warp: here four times the same 32 elements."""

import jax.numpy as jnp


def lane_numbers():
    return jnp.tile(jnp.arange(32), 4)


def gather(values_gmem, indices, last):
    return values_gmem[...][jnp.minimum(indices, last)]


def sums_to_here(x):
    return jnp.tile(jnp.cumsum(x[:32]), 4)


def _reduced(x, operation):
    return {"add": jnp.sum, "max": jnp.max}[operation](x[:32])
