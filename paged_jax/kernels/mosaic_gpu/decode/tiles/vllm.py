"""Tiles in layout "vllm": their pages lie unchanged in shared memory, and `ldmatrix` loads operands from them.

A kv head's block is one run of memory, a page: K as [head_size / x, block_size, x], where x elements are 16 bytes; V as
[head_size, block_size]. wgmma takes its left operand A from registers. `ldmatrix` fills them, four matrices of 8 rows
at a time, and each lane addresses one row of 16 bytes:

    matrix 2 * i + h of [64, 2 * x] of A, warp w: rows 16 * w + 8 * h + 0..7, columns x * i + 0..x-1

For A = K [tile, head_size] a row of a matrix is x elements of a token; for A = V^T [head_size, tile] it is an element
of x tokens. Lane 4 * g + t gets a word of row g: bytes 4 * t to 4 * t + 3. With 16 bits these are the lane's elements
of A.
"""

from typing import Any, ClassVar

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm, vector

from paged_jax.kernels.mosaic_gpu.decode import mask
from paged_jax.kernels.mosaic_gpu.decode.tiles.plain import PlainTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.rows import token_of_row
from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    add,
    div,
    i32,
    inline,
    mul,
    operand,
    rem,
    select_within,
    thread_index,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP
from paged_jax.kernels.mosaic_gpu.hopper.memory import Slice

_PAGE_ROW = 128  # elements: the last dimension of a copy; TMA takes at most 256
_MATRIX_ROW_BYTES = 16


class VllmTiles(PlainTiles):
    """A tile is a sequence of pages, one for each run."""

    in_registers: ClassVar[bool] = True

    @property
    def page_shape(self) -> tuple[int, int]:
        """The shape of one copy: the pages of a block, for all kv heads of an item."""
        problem = self.geometry.problem
        return self.geometry.tuning.fold * problem.block_size * problem.head_size // _PAGE_ROW, _PAGE_ROW

    @property
    def page_size(self) -> int:
        """Elements of a page."""
        return self.geometry.problem.head_size * self.geometry.problem.block_size

    @property
    def matrix_row(self) -> int:
        """Elements of a row of `ldmatrix`, x."""
        return _MATRIX_ROW_BYTES // self.geometry.problem.cache_itemsize

    def key_ring(self) -> Any:
        """The ring of K, as pages."""
        shape = self.geometry.tuning.stages, self.geometry.runs_per_tile, *self.page_shape
        return plgpu.SMEM(shape, jnp.dtype(self.geometry.problem.cache_dtype))

    def value_rings(self) -> tuple[Any, ...]:
        """The ring of V, as pages."""
        return (self.key_ring(),)

    def view(self, cache: Any) -> Any:
        """A cache as the pages of its blocks."""
        return cache.reshape(cache.shape[0], self.geometry.items_per_seq, *self.page_shape)

    def run_gmem(self, cache_gmem, block, offset, kv_head, head_slice: Slice) -> Any:
        """A run is a whole block."""
        return cache_gmem.at[block, kv_head]

    def run_rows(self, run: Scalar) -> Any:
        """The page of a run."""
        return run

    def keys(self, tile_smem) -> Array:
        """K [tile, head_size] in registers."""
        problem, tile, page, x = self.geometry.problem, self.geometry.tuning.tile, self.page_size, self.matrix_row
        block_size, shape = problem.block_size, (tile, problem.head_size)

        @inline(plgpu.RefType(), returns=shape, dtype=self.operand_dtype)
        def load(_, tile_smem):
            row, column = self.named_row()
            at = add(mul(div(row, block_size), page), mul(rem(row, block_size), x))
            start = add(at, mul(column, block_size))
            words = np.empty((tile // 64, problem.head_size // (2 * x), 2, 2), object)  # [m, s, i, h]
            for m, s in np.ndindex(words.shape[:2]):
                offset = 64 * m // block_size * page + 2 * x * s * block_size
                words[m, s] = _matrices(tile_smem, start, offset)
            return operand(self.of_wgmma(words), shape, self.operand_dtype)

        return load(tile_smem)

    def values(self, tile_smem) -> Array:
        """V^T [head_size, tile] in registers."""
        problem, tile, page, x = self.geometry.problem, self.geometry.tuning.tile, self.page_size, self.matrix_row
        block_size, shape = problem.block_size, (problem.head_size, tile)

        @inline(plgpu.RefType(), returns=shape, dtype=self.operand_dtype)
        def load(_, tile_smem):
            row, column = self.named_row()
            at = add(mul(div(column, block_size), page), rem(column, block_size))
            start = add(at, mul(row, block_size))
            words = np.empty((problem.head_size // 64, tile // (2 * x), 2, 2), object)  # [m, s, i, h]
            for m, s in np.ndindex(words.shape[:2]):
                offset = 2 * x * s // block_size * page + 2 * x * s % block_size + 64 * m * block_size
                words[m, s] = _matrices(tile_smem, start, offset)
            return operand(self.of_wgmma(words), shape, self.operand_dtype)

        return load(tile_smem)

    def of_wgmma(self, words: np.ndarray) -> np.ndarray:
        """Makes a lane's registers of A from its words [.., i, h]: [.., a, h] for each 16 columns."""
        return words

    def named_row(self):
        """The row of [64, 2 * x] that this lane addresses, and the first of its x columns."""
        lane = rem(thread_index(), WARP)
        matrix = div(lane, 8)
        row = add(mul(div(thread_index(), WARP), 16), mul(rem(matrix, 2), 8))
        return add(row, rem(lane, 8)), mul(div(matrix, 2), self.matrix_row)

    def zero_unseen(self, tiles_smem, low, high) -> None:
        """Zeroes the elements of a tile of V whose tokens are outside low <= token < high."""

        @pl.when(mask.some_unseen(low, high, 0, self.geometry.tile_tokens, self.geometry.problem))
        def zero():
            for tile_smem in tiles_smem:
                self.zero_pages(tile_smem, low, high)
            plgpu.commit_smem()

    def zero_pages(self, tile_smem, low, high) -> None:
        """Zeroes, in all pages of a tile, the elements whose tokens are outside low <= token < high.

        Each thread takes x neighbours at a time: the same element of x tokens. The accesses are volatile, so that they
        follow one another. This code rarely runs, and must not decide how many registers the kernel uses.
        """
        geometry, scalar, page, x = self.geometry, plgpu.Layout.WG_SPLAT(()), self.page_size, self.matrix_row
        block_size = geometry.problem.block_size

        @inline(plgpu.RefType(), scalar, scalar)
        def zero(_, tile_smem, low, high):
            element = _bits_of_element(tile_smem)
            neighbours, zero = ir.VectorType.get((x,), element), mgpu.c(0, element)
            start = mul(thread_index_read_again(), x)
            for i in range(geometry.tuning.tile * geometry.problem.head_size // (x * WARPGROUP)):
                at = add(start, i32(x * WARPGROUP * i))
                run, offset = div(at, page), rem(at, block_size)
                first = token_of_row(add(mul(run, block_size), offset), geometry)
                pointer = _pointer(tile_smem, at, 0)
                loaded = llvm.load(neighbours, pointer, volatile_=True)
                kept = []
                for j in range(x):
                    token, value = add(first, i32(j)), vector.extract(loaded, [], [j])
                    kept.append(select_within(token, low.registers.item(), high.registers.item(), value, zero))
                llvm.store(vector.from_elements(neighbours, kept), pointer, volatile_=True)

        zero(tile_smem, low, high)


def _matrices(tile_smem, start, offset: int) -> np.ndarray:
    """Loads four matrices with `ldmatrix`: a lane's words [i, h]. Each lane addresses element start + offset."""
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


def _pointer(tile_smem, start, offset: int):
    """A pointer to element start + offset."""
    element = _bits_of_element(tile_smem)
    pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(tile_smem), [start], element)
    return mgpu.utils.getelementptr(pointer, [offset], element)


def _bits_of_element(tile_smem):
    """The integer type with the size of an element; LLVM has no float8."""
    return ir.IntegerType.get_signless(mgpu.utils.bitwidth(ir.MemRefType(tile_smem.type).element_type))
