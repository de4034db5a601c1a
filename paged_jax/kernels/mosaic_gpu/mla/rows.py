"""Stores of some of 64 rows, below what Pallas has words for. All threads of a warpgroup take part."""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array
from jaxlib.mlir.dialects import arith

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    as_i32,
    assembly,
    bytes_of,
    div,
    element,
    i32,
    i64,
    inline,
    less,
    mul,
    rem,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref
from paged_jax.kernels.mosaic_gpu.mla.geometry import Geometry


def store_lse(lse_smem: Ref, lse_gmem: Ref, row: Scalar, num_rows: Scalar) -> None:
    """Stores the first `num_rows` of 64 numbers from shared memory to those from `row` on."""
    plgpu.commit_smem()  # all threads have written theirs

    @inline(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR)
    def store(_, lse_smem, lse_gmem, row, num_rows):
        thread = thread_index_read_again()
        exists = less(thread, num_rows.registers.item())
        thread_row = arith.select(exists, thread, i32(0))
        assembly(
            """{ .reg .pred exists; .reg .b32 a; setp.ne.b32 exists, $0, 0;
            ld.shared.b32 a, [$1]; @exists st.global.b32 [$2], a; }""",
            "r,r,l",
            as_i32(exists),
            add(address(lse_smem), mul(thread_row, 4)),
            add(address(lse_gmem), bytes_of(add(row.registers.item(), thread_row), 4)),
        )

    store(lse_smem, lse_gmem, row, num_rows)


def store_partial(partial_gmem: Ref, out: Array, first: int, num_rows: Scalar, geometry: Geometry) -> None:
    """Stores the first `num_rows` rows of a part of O, from column `first` on, from registers to [64, value_size]."""
    columns, value_size = out.shape[1], geometry.problem.head_size

    @inline(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR)
    def store(_, partial_gmem, out, num_rows):
        index = thread_index_read_again()
        lane, warp = rem(index, WARP), div(index, WARP)
        pairs = out.registers.reshape(columns // 8, 2)  # of columns 8 * c + 2 * (lane % 4) + 0..1, rows + 8 * h
        gmem = address(partial_gmem)
        for h in range(2):
            row = add(mul(warp, 16), add(div(lane, 4), i32(8 * h)))
            exists = less(row, num_rows.registers.item())
            column = add(mul(rem(lane, 4), 2), i32(first))
            start = add(gmem, bytes_of(add(mul(row, value_size), column), 4))
            for c in range(columns // 8):
                values = [element(pairs[c, h], i) for i in range(2)]
                assembly(
                    "{ .reg .pred exists; setp.ne.b32 exists, $0, 0; @exists st.global.v2.f32 [$1], {$2, $3}; }",
                    "r,l,f,f",
                    as_i32(exists),
                    add(start, i64(32 * c)),
                    *values,
                )

    store(partial_gmem, out, num_rows)
