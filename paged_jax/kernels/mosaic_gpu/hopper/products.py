"""The matrix product of a warpgroup, on the matrix units (wgmma)."""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

Then = Callable[[], None] | None


def product(a: Any, b_smem: Any, then: Then = None) -> Array:
    """a @ b in float32; a is in registers or in shared memory, b in shared memory. `then` runs under the product."""

    def multiply(acc):
        plgpu.wgmma(acc, a, b_smem)
        if then is not None:
            then()
        return acc[...]

    return pl.run_scoped(multiply, accumulator((a.shape[0], b_smem.shape[1])))


def accumulate(out: Array, a: Any, b_smem: Any, then: Then = None) -> Any:
    """out + a @ b, in the registers of `out`; a is in registers, b in shared memory. `then` runs under the product."""

    def multiply(acc):
        plgpu.wgmma(acc, a, b_smem)
        if then is not None:
            then()

    return pl.run_state(multiply)(plgpu.ACC.init(out))  # pyright: ignore[reportPrivateImportUsage]


def accumulator(shape: Any) -> Any:
    """Registers for the result of a product."""
    return plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
