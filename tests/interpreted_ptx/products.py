"""Products with accumulators that stay in registers."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.products import product


def score_and_accumulate(query_smem, keys_smem, out, weights, values_smem, then, meanwhile, *, in_halves):
    scores = product(query_smem, keys_smem.T, None if in_halves else then)
    results = meanwhile(scores, then if in_halves else lambda: None)
    return results, accumulate(out, weights, values_smem)


def accumulate(out, weights, values_smem, then=None):
    if then is not None:
        then()
    values = values_smem[...]
    plgpu.commit_smem()  # without this fence the interpreter sees a race between this read and later copies
    return out + jnp.dot(weights.astype(jnp.float32), values.astype(jnp.float32))
