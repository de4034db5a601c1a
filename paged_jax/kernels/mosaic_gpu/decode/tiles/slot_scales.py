"""Loads scales of slots for a tile's rows, from [runs_per_tile, tokens] in shared memory."""

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.tiles.rows import first_row
from paged_jax.kernels.mosaic_gpu.hopper.inline import add, array, div, i32, inline, rem


def of_rows(scales_smem, geometry: Geometry) -> Array:
    """The scale of each row, [tile]. A row is a token, because kv heads with such scales are never folded."""
    tile, run_tokens = geometry.tuning.tile, geometry.run_tokens

    @inline(plgpu.RefType(), returns=(tile,), dtype="float32", layout=plgpu.Layout.WGMMA.reduce(1))
    def load(_, scales_smem):
        f32 = ir.F32Type.get()
        loaded = np.empty((tile // 64, 2), object)  # [m, h]: rows 64 * m + 8 * h + first_row
        for m, h in np.ndindex(loaded.shape):
            token = add(first_row(), i32(64 * m + 8 * h))
            at = [arith.index_cast(ir.IndexType.get(), x) for x in (div(token, run_tokens), rem(token, run_tokens))]
            loaded[m, h] = vector.broadcast(ir.VectorType.get((1,), f32), memref.load(scales_smem, at))
        return array(loaded, mgpu.WGMMA_ROW_LAYOUT, (tile,))

    return load(scales_smem)
