"""The products of the MLA kernel."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp


def scores(query_smem, tile):
    """S. The interpreter multiplies with NumPy, which would warn of NaNs in rows that no result uses."""
    for ready in tile.ready:
        plgpu.barrier_wait(ready)
    query, *latents = (x[...].astype(jnp.float32) for x in (query_smem, *tile.smem))
    plgpu.commit_smem()
    parts = zip(tile.parts, latents, strict=True)
    return sum(query[:, part.first : part.first + part.size] @ of_part.T for part, of_part in parts)


def accumulate(out, weights_smem, values_smem, release):
    weights, *values = (x[...].astype(jnp.float32) for x in (weights_smem, *values_smem))
    plgpu.commit_smem()  # without this fence the interpreter sees a race between these reads and later writes
    for part in range(len(values)):
        release(part)
    return [x + jnp.dot(weights, of_part) for x, of_part in zip(out, values, strict=True)]


def score_and_accumulate(out, weights_smem, values_smem, release, query_smem, next_tile, then):
    result = then(scores(query_smem, next_tile))
    return accumulate(out, weights_smem, values_smem, release), result
