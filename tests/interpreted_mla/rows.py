"""Stores of some of 64 rows."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu


def store_lse(lse_smem, lse_gmem, row, num_rows):
    plgpu.commit_smem()
    lse = lse_smem[...]

    @pl.loop(0, num_rows)
    def _(i):
        lse_gmem[row + i] = jax.lax.dynamic_index_in_dim(lse, i, keepdims=False)


def store_partial(partial_gmem, out, first, num_rows, geometry):
    columns = pl.ds(first, out.shape[1])

    @pl.loop(0, num_rows)
    def _(i):
        partial_gmem[i, columns] = jax.lax.dynamic_index_in_dim(out, i, keepdims=False)
