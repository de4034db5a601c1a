"""Stores whose rows are an array's columns, which Pallas cannot express."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from paged_jax.kernels.mosaic_gpu.hopper.inline import SCALAR, add, address, as_i64, assembly, bytes_of, i64, inline
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref

_FLOAT32 = 4  # bytes


def store_columns(out_gmem: Ref, x: Array, row: Scalar, first: int) -> None:
    """Stores x^T in `out_gmem`, from row `row` and element `first` on; x has wgmma's layout.

    Eight lanes hold neighbouring elements of a row, 32 bytes.
    """
    row_size = out_gmem.shape[1]

    @inline(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR)
    def store(_, out: Any, x: mgpu.FragmentedArray, row: Any):
        begin = add(address(out), bytes_of(row.registers.item(), _FLOAT32 * row_size))
        begin = arith.addi(begin, i64(_FLOAT32 * first))

        def store_element(value, index):
            element, column = (arith.index_cast(ir.IntegerType.get_signless(32), i) for i in index)
            offset = arith.addi(bytes_of(column, _FLOAT32 * row_size), arith.muli(as_i64(element), i64(_FLOAT32)))
            assembly("st.global.f32 [$0], $1;", "l,f", add(begin, offset), value)

        x.foreach(store_element)

    store(out_gmem, x, row)


def mark(marks_gmem, slot):
    """Stores the time."""
    from jax import lax
    import jax.numpy as jnp
    place = lax.axis_index("program") * 32 + slot

    @inline(plgpu.RefType(), SCALAR)
    def store(_, marks, place):
        assembly("{ .reg .u32 t; mov.u32 t, %globaltimer_lo; st.global.u32 [$0], t; }", "l", add(address(marks), bytes_of(place.registers.item(), 4)))

    store(marks_gmem, place)
