"""Matrix products of a warpgroup, on the matrix units (wgmma).

The warpgroup may do other work while the matrix units multiply: the functions `then` and `meanwhile`.
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref

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


def score_and_accumulate(
    query_smem: Ref,
    keys_smem: Ref,
    out: Array,
    weights: Array,
    values_smem: Ref,
    then: Callable[[], None],
    meanwhile: Callable[[Array, Callable[[], None]], Any],
    *,
    in_halves: bool,
) -> tuple[Any, Any]:
    """S = Q K^T, followed by O + P V. Returns the result of `meanwhile`, and O.

    `meanwhile` runs under the second product. Its arguments are S and a function. `then` runs once both products have
    started. If `in_halves`, only the first half of the second product starts at once; `meanwhile` calls its second
    argument to run `then` and to start the second half.
    """
    tile = weights.shape[1]
    early = tile // 2 if in_halves else tile

    def multiply(scores_acc, out_acc):
        def add(begin: int, end: int):
            plgpu.wgmma(out_acc, weights[:, begin:end], values_smem.at[pl.ds(begin, end - begin)])

        def go_on():
            if in_halves:
                then()
                add(early, tile)

        out_acc[...] = out
        plgpu.wgmma(scores_acc, query_smem, keys_smem.T)
        add(0, early)
        if not in_halves:
            then()
        results = meanwhile(plgpu.wgmma_accumulator_load(scores_acc, wait_n=1), go_on)
        return results, out_acc[...]

    return pl.run_scoped(multiply, accumulator((WGMMA_ROWS, keys_smem.shape[0])), accumulator(out.shape))


def accumulator(shape: Any) -> Any:
    """Registers for the result of a product."""
    return plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
