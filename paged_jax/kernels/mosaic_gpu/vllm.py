"""Tiles in layout "vllm" as operands of wgmma, in registers: device code below what Pallas has words for.

A block of a kv head is one run of memory, a page: of K, [head_size / 8, block_size, 8], where 8 elements are 16 bytes;
of V, [head_size, block_size]. Pages lie in shared memory as they came. wgmma takes its operand A from registers that
`ldmatrix` fills, four matrices of 8 x 8 at once, for which each lane names one row of 16 bytes:

    matrix 2 * a + h of [64, 16] of A, warp w: rows 16 * w + 8 * h + 0..7, columns 8 * a + 0..7

of K, A = K [tile, d], a row of a matrix is 8 elements of a token; of V, A = V^T [d, tile], an element of 8 tokens.
"""

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from paged_jax.kernels.mosaic_gpu.config import Config
from paged_jax.kernels.mosaic_gpu.inline import (
    add,
    i32,
    if_within,
    inline,
    operand,
    over,
    rest,
    thread,
    times,
    token_of,
    within,
)


def keys(tile_smem, cfg: Config) -> Array:
    """K [tile, d]."""
    page = cfg.head_size * cfg.block_size

    @inline(plgpu.RefType(), returns=(cfg.tile, cfg.head_size), dtype=cfg.dtype)
    def body(_, tile_smem):
        row, column = _matrix_row()
        at = add(times(over(row, cfg.block_size), page), times(rest(row, cfg.block_size), 8))
        start = add(at, times(column, cfg.block_size))
        halves = np.empty((cfg.tile // 64, cfg.head_size // 16, 2, 2), object)
        for m, s in np.ndindex(halves.shape[:2]):
            offset = 64 * m // cfg.block_size * page + 16 * s * cfg.block_size
            halves[m, s] = _matrices(tile_smem, start, offset)
        return operand(halves, (cfg.tile, cfg.head_size), cfg.dtype)

    return body(tile_smem)


def values(tile_smem, cfg: Config) -> Array:
    """V^T [d, tile]."""
    page = cfg.head_size * cfg.block_size

    @inline(plgpu.RefType(), returns=(cfg.head_size, cfg.tile), dtype=cfg.dtype)
    def body(_, tile_smem):
        row, column = _matrix_row()
        at = add(times(over(column, cfg.block_size), page), rest(column, cfg.block_size))
        start = add(at, times(row, cfg.block_size))
        halves = np.empty((cfg.head_size // 64, cfg.tile // 16, 2, 2), object)
        for m, s in np.ndindex(halves.shape[:2]):
            offset = 16 * s // cfg.block_size * page + 16 * s % cfg.block_size + 64 * m * cfg.block_size
            halves[m, s] = _matrices(tile_smem, start, offset)
        return operand(halves, (cfg.head_size, cfg.tile), cfg.dtype)

    return body(tile_smem)


def zero_rows(tile_smem, low, high, cfg: Config) -> None:
    """Zeroes what a tile of V has of tokens that are not low <= token < high."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @inline(plgpu.RefType(), scalar, scalar)
    def body(_, tile_smem, low, high):
        element = ir.MemRefType(tile_smem.type).element_type
        eight = ir.VectorType.get((8,), element)
        zero = arith.constant(element, ir.FloatAttr.get(element, 0.0))
        start = times(thread(anew=True), 8)
        # One after the other: this is rare, and should not decide how many registers the kernel has.
        for i in range(cfg.tile * cfg.head_size // 1024):  # each thread 8 neighbours: one element of 8 tokens
            at = add(start, i32(1024 * i))
            page, offset = over(at, cfg.head_size * cfg.block_size), rest(at, cfg.block_size)
            first = token_of(add(times(page, cfg.block_size), offset), cfg)
            pointer = _pointer(tile_smem, at, 0)
            loaded = llvm.load(eight, pointer, volatile_=True)
            kept = []
            for j in range(8):
                seen = within(low.registers.item(), add(first, i32(j)), high.registers.item())
                kept.append(if_within(seen, vector.extract(loaded, [], [j]), zero))
            llvm.store(vector.from_elements(eight, kept), pointer, volatile_=True)

    body(tile_smem, low, high)


def _matrices(tile_smem, start, offset: int) -> np.ndarray:
    """Four matrices of 8 x 8, [a, h], from the elements start + offset on that each lane names."""
    word = ir.IntegerType.get_signless(32)
    loaded = nvvm.ldmatrix(
        _pointer(tile_smem, start, offset),
        num=4,
        layout=nvvm.MMALayout.row,
        shape=ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
        elt_type=nvvm.LdStMatrixEltType.B16,
    )
    words = np.empty(4, object)
    words[:] = [llvm.extractvalue(word, loaded, [i]) for i in range(4)]
    return words.reshape(2, 2)


def _matrix_row():
    """Of [64, 16], the row, and the first of the 8 columns, that a lane names."""
    lane = rest(thread(), 32)
    matrix = over(lane, 8)
    row = add(times(over(thread(), 32), 16), times(rest(matrix, 2), 8))
    return add(row, rest(lane, 8)), times(over(matrix, 2), 8)


def _pointer(tile_smem, start, offset: int):
    """To element start + offset."""
    element = ir.MemRefType(tile_smem.type).element_type
    pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(tile_smem), [start], element)
    return mgpu.utils.getelementptr(pointer, [offset], element)
