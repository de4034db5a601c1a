"""Claims of work items, and their descriptions in shared memory."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    as_i64,
    assembly,
    i32,
    i64,
    inline,
    mul,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref
from paged_jax.kernels.mosaic_gpu.ragged.geometry import ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.refs import Refs


def number_after(number: Scalar, unclaimed: Scalar, kind: ItemKind, refs: Refs) -> Scalar:
    """Claims the next item of a kind; returns its number.

    Programs take the first `unclaimed` items without a claim. An atomic counter hands out the others in order. `number`
    is the program's previous item; only the interpreter's substitute for this function reads it.
    """

    @inline(plgpu.RefType(), plgpu.RefType())
    def increase(_, counts_gmem, claimed_smem):
        mgpu.warpgroup_barrier()  # all threads have read the previous number
        assembly(
            """{ .reg .pred first; .reg .b32 number; setp.eq.u32 first, $0, 0;
            mov.b32 number, 0; @first atom.global.add.u32 number, [$1], 1; @first st.shared.b32 [$2], number; }""",
            "r,l,r",
            thread_index_read_again(),
            add(address(counts_gmem), i64(4 * (0 if kind.is_wide else 1))),
            address(claimed_smem),
        )
        mgpu.warpgroup_barrier()

    increase(refs.inputs_gmem.claimed, refs.smem.claimed)
    return unclaimed + refs.smem.claimed[0]


def store_fields(fields_smem: Ref, row: Scalar, values: Any) -> None:
    """Stores 32-bit integers in a row of shared memory. This warpgroup sees them afterwards, others after a barrier."""
    columns = fields_smem.shape[1]
    assert len(values) % 4 == 0

    @inline(plgpu.RefType(), *[SCALAR] * (len(values) + 1))
    def store(_, fields_smem, row, *values):
        first = add(address(fields_smem), mul(row.registers.item(), 4 * columns))
        code = "{ .reg .pred first; setp.eq.u32 first, $0, 0; @first st.shared.v4.b32 [$1], {$2, $3, $4, $5}; }"
        for i in range(0, len(values), 4):
            words = [value.registers.item() for value in values[i : i + 4]]
            assembly(code, "r,r,r,r,r,r", thread_index_read_again(), add(first, i32(4 * i)), *words)
        mgpu.warpgroup_barrier()

    store(fields_smem, row, *values)


def prefetch_block(tables_gmem: Ref, seq: Scalar, column: Scalar) -> None:
    """Prefetches an entry of the block tables, and its neighbours."""
    columns = tables_gmem.shape[1]

    @inline(plgpu.RefType(), SCALAR, SCALAR)
    def prefetch(_, tables_gmem, seq, column):
        entry = arith.addi(arith.muli(as_i64(seq.registers.item()), i64(columns)), as_i64(column.registers.item()))
        assembly("prefetch.global.L1 [$0];", "l", add(address(tables_gmem), arith.muli(entry, i64(4))))

    prefetch(tables_gmem, seq, column)
