"""Stores of the MLA kernel: out and lse of a whole item's row block, or the partial result of a split."""

from collections.abc import Sequence

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import QUERY_ROWS, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.memory import Slice
from paged_jax.kernels.mosaic_gpu.hopper.registers import layout
from paged_jax.kernels.mosaic_gpu.mla.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.mla.plan import Split
from paged_jax.kernels.mosaic_gpu.mla.ptx import rows
from paged_jax.kernels.mosaic_gpu.mla.refs import Refs


def store_out(
    out: list[Array], parts: Sequence[Slice], split: Split, block: Scalar, refs: Refs, geometry: Geometry
) -> None:
    """Stores a warpgroup's parts of normalised O: as out if the item is whole, otherwise as a partial result."""
    columns = pl.ds(parts[0].first, sum(part.size for part in parts))

    @pl.when(split.is_whole)
    def store_whole():
        for x, part in zip(out, parts, strict=True):
            refs.smem.query.at[:, pl.ds(*part)][...] = layout(x.astype(geometry.problem.query_dtype))
        plgpu.commit_smem()
        for i in range(0, WGMMA_ROWS, QUERY_ROWS):

            @pl.when(i < split.num_rows)
            def copy(i=i):
                some_rows = pl.ds(pl.multiple_of(split.row + i, QUERY_ROWS), QUERY_ROWS)
                rows_smem = refs.smem.query.at[pl.ds(i, QUERY_ROWS), columns]
                plgpu.copy_smem_to_gmem(rows_smem, refs.outputs_gmem.out.at[some_rows, columns])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(~split.is_whole)
    def store_partial():
        partial_gmem = refs.outputs_gmem.partials.out.at[split.partial, block]
        for x, part in zip(out, parts, strict=True):
            rows.store_partial(partial_gmem, x, part.first, split.num_rows, geometry)


def store_sums(lse: Array, log_sums: Array, split: Split, block: Scalar, refs: Refs) -> None:
    """Stores the lse of a whole item's row block, or the logarithms of a partial result's sums."""

    @pl.when(split.is_whole)
    def store_whole():
        refs.smem.lse[...] = lse
        rows.store_lse(refs.smem.lse, refs.outputs_gmem.lse, split.row, split.num_rows)

    @pl.when(~split.is_whole)
    def store_partial():
        refs.outputs_gmem.partials.log_sums.at[split.partial, block][...] = log_sums
