"""How arrays lie in shared memory."""

import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp


def transforms(head_size: int, dtype: str) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """How rows of head_size lie in shared memory: as wgmma wants it, and free of bank conflicts."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = math.gcd(head_size * itemsize, 128)  # bytes
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
