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
    """Stores the first `num_rows` rows of a part of O, from column `first` on, in a partial result [64, value_size].

    The elements lie in the order in which lanes have them, so that a warp stores 512 neighbouring bytes: for each 8
    rows and 16 columns, each lane's elements of columns 2 * (lane % 4) + 0, 1, 8, 9 of row lane // 4. The merge reads
    them in this order.
    """

    @inline(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR)
    def store(_, partial_gmem, out, num_rows):
        index, end = thread_index_read_again(), num_rows.registers.item()
        lane, warp = rem(index, WARP), div(index, WARP)
        code = "{ .reg .pred exists; setp.ne.b32 exists, $0, 0; @exists st.global.v4.f32 [$1], {$2, $3, $4, $5}; }"
        pairs = out.registers.reshape(-1, 2)
        for h in range(2):
            eight = add(mul(warp, 2), i32(h))
            exists = as_i32(less(mul(eight, 8), end))
            place = add(mul(eight, 8 * geometry.problem.head_size), add(mul(lane, 4), i32(8 * first)))
            start = add(address(partial_gmem), bytes_of(place, 4))
            for c in range(0, len(pairs), 2):
                values = [element(pairs[c + j, h], i) for j in range(2) for i in range(2)]
                assembly(code, "r,l,f,f,f,f", exists, add(start, i64(4 * WARP * 4 * (c // 2))), *values)

    store(partial_gmem, out, num_rows)
