"""Counters of work items, and descriptions of items in shared memory."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    assembly,
    bytes_of,
    i32,
    i64,
    inline,
    mul,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.refs import Refs


def number_after(number: Scalar, unclaimed: Scalar, kind: ItemKind, refs: Refs) -> Scalar:
    """Claims the next item of a kind; returns its number.

    Programs take the first `unclaimed` items without a claim. An atomic counter hands out the others in order. `number`
    is the program's previous item; only the interpreter's substitute for this function reads it.
    """

    @inline(plgpu.RefType(), plgpu.RefType())
    def claim(_, counters_gmem, drawn_smem):
        counter = add(address(counters_gmem), i64(4 * (0 if kind.is_wide else 1)))
        _increase(counter, address(drawn_smem), "atom")

    claim(refs.inputs_gmem.counters, refs.smem.drawn)
    return unclaimed + refs.smem.drawn[0]


def stored_before(counter: Scalar, warpgroup: Scalar, refs: Refs) -> Scalar:
    """Counts that this warpgroup has stored a partial result; returns how many were counted before.

    This warpgroup then sees the partial results that were counted before. The barrier orders the stores of all threads
    before the atomic addition of one of them, which orders them before later additions to this counter.
    """

    @inline(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR)
    def count(_, counters_gmem, drawn_smem, counter, warpgroup):
        counter, warpgroup = counter.registers.item(), warpgroup.registers.item()
        counter = add(address(counters_gmem), bytes_of(counter, 4))
        _increase(counter, add(address(drawn_smem), mul(add(warpgroup, i32(1)), 4)), "atom.acq_rel.gpu")

    count(refs.inputs_gmem.counters, refs.smem.drawn, counter, warpgroup)
    return refs.smem.drawn[1 + warpgroup]


def _increase(counter, drawn, atom: str) -> None:
    """Increases a counter in global memory in one thread, and writes its old value to shared memory for all threads."""
    mgpu.warpgroup_barrier()  # all threads have read the previous value, and have stored what is counted
    assembly(
        f"""{{ .reg .pred first; .reg .b32 number; setp.eq.u32 first, $0, 0;
        mov.b32 number, 0; @first {atom}.global.add.u32 number, [$1], 1; @first st.shared.b32 [$2], number; }}""",
        "r,l,r",
        thread_index_read_again(),
        counter,
        drawn,
    )
    mgpu.warpgroup_barrier()


def store_fields(fields_smem: Ref, row: Scalar, values: Any) -> None:
    """Stores 32-bit integers in a row of shared memory. This warpgroup sees them afterwards, others after a barrier."""
    columns = fields_smem.shape[1]
    assert columns % 4 == 0

    @inline(plgpu.RefType(), *[SCALAR] * (len(values) + 1))
    def store(_, fields_smem, row, *values):
        first = add(address(fields_smem), mul(row.registers.item(), 4 * columns))
        code = "{ .reg .pred first; setp.eq.u32 first, $0, 0; @first st.shared.v4.b32 [$1], {$2, $3, $4, $5}; }"
        for i in range(0, len(values), 4):
            words = [*(value.registers.item() for value in values[i : i + 4]), *[i32(0)] * 3][:4]
            assembly(code, "r,r,r,r,r,r", thread_index_read_again(), add(first, i32(4 * i)), *words)
        mgpu.warpgroup_barrier()

    store(fields_smem, row, *values)
