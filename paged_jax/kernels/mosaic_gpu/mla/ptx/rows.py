"""Stores of some of 64 rows, which Pallas cannot express. All threads of a warpgroup take part."""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array
from jaxlib.mlir.dialects import arith

from paged_jax.kernels.mosaic_gpu.hopper import rows
from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    as_i32,
    bytes_of,
    i32,
    inline,
    less,
    mul,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref
from paged_jax.kernels.mosaic_gpu.mla.geometry import Geometry


def store_lse(lse_smem: Ref, lse_gmem: Ref, row: Scalar, num_rows: Scalar) -> None:
    """Copies the first `num_rows` of 64 float32 from shared to global memory, from index `row` on."""
    plgpu.commit_smem()  # all threads have written their lse

    @inline(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR)
    def store(_, lse_smem, lse_gmem, row, num_rows):
        thread = thread_index_read_again()
        exists = less(thread, num_rows.registers.item())
        thread_row = arith.select(exists, thread, i32(0))
        rows.store_word(
            as_i32(exists),
            add(address(lse_smem), mul(thread_row, 4)),
            add(address(lse_gmem), bytes_of(add(row.registers.item(), thread_row), 4)),
        )

    store(lse_smem, lse_gmem, row, num_rows)


def store_partial(partial_gmem: Ref, out: Array, first: int, num_rows: Scalar, geometry: Geometry) -> None:
    """Stores the first `num_rows` rows of a part of O to columns of [64, value_size], from column `first` on."""

    @inline(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR)
    def store(_, partial_gmem, out, num_rows):
        end, row_size = num_rows.registers.item(), geometry.problem.head_size
        rows.store_first_rows(partial_gmem, out.registers, end, row_size, first_column=first)

    store(partial_gmem, out, num_rows)
