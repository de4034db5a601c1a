"""Tiles of 16 bits in layouts "hnd" and "nhd": wgmma reads them directly from shared memory."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from paged_jax.kernels.mosaic_gpu.decode import mask
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.tiles import slot_scales
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.memory import Slice, transforms
from paged_jax.kernels.mosaic_gpu.hopper.products import product
from paged_jax.kernels.mosaic_gpu.hopper.registers import layout, store

_MOST_AT_ONCE, _AT_A_TIME = 256, 64
"""Rows of at most so many elements are zeroed at once; longer ones by as many columns at a time, or registers spill."""


@dataclass(frozen=True)
class PlainTiles:
    """The interface of tiles, for the simplest case: rows of a tile are rows of shared memory."""

    in_registers: ClassVar[bool] = False

    geometry: Geometry

    # Shared memory.

    @property
    def operand_dtype(self) -> str:
        """The dtype of the products' operands."""
        return self.geometry.problem.query_dtype

    def swizzled(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Shared memory of this shape in the layout of wgmma's operands, free of bank conflicts."""
        return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms(self.geometry.problem.head_size, dtype))

    def key_ring(self) -> Any:
        """The ring of K: [stages, ...]."""
        tuning, problem = self.geometry.tuning, self.geometry.problem
        return self.swizzled((tuning.stages, tuning.tile, problem.head_size), problem.cache_dtype)

    def value_rings(self) -> tuple[Any, ...]:
        """The rings of V, one for each head slice."""
        tuning, problem = self.geometry.tuning, self.geometry.problem
        shapes = [(tuning.stages, tuning.tile, part.size) for part in self.geometry.head_slices]
        return tuple(self.swizzled(shape, problem.cache_dtype) for shape in shapes)

    def query_operand_type(self) -> Any | None:
        """Shared memory for the converted query, or None if it needs no conversion."""
        return None

    # Copies.

    def view(self, cache: Any) -> Any:
        """Reshapes a cache for copies of runs: neighbouring runs of folded kv heads become one."""
        problem, fold = self.geometry.problem, self.geometry.tuning.fold
        if fold == self.geometry.copies_per_run:
            return cache
        rows = fold * problem.block_size
        return cache.reshape(cache.shape[0], self.geometry.items_per_seq, rows, problem.head_size)

    def run_gmem(self, cache_gmem, block, offset, kv_head, head_slice: Slice) -> Any:
        """The source of one copy: a head slice of the run at `offset` in a block.

        If one copy brings all folded kv heads, `kv_head` counts groups of them. In an `Interleaved` pool it is the row
        of the kv head's keys, or of its values.
        """
        problem = self.geometry.problem
        if self.geometry.tuning.fold > self.geometry.copies_per_run:
            return cache_gmem.at[block, kv_head]
        tokens = tokens_of_run(offset, self.geometry)
        elements = slice(None) if head_slice.size == cache_gmem.shape[-1] else pl.ds(*head_slice)
        if problem.layout == "nhd" or problem.interleaved:
            return cache_gmem.at[block, tokens, kv_head, elements]
        return cache_gmem.at[block, kv_head, tokens, elements]

    def run_rows(self, copy: Scalar) -> Any:
        """The rows of a copy in its tile."""
        rows = self.geometry.run_tokens * self.geometry.tuning.fold // self.geometry.copies_per_run
        return pl.ds(copy * rows, rows)

    # Products.

    def query_operand(self, query_smem, operand_smem) -> tuple[Any, Any]:
        """Returns the query as an operand, [columns, head_size], and the divisor of each of its rows."""
        return query_smem, 1.0

    def keys(self, tile_smem) -> Any:
        """K [tile, head_size] as an operand, in shared memory or in registers."""
        return tile_smem

    def values(self, tile_smem) -> Any:
        """V^T [head_size, tile] as an operand, in shared memory or in registers."""
        return tile_smem.T

    def store_weights(self, weights_smem, weights: Array) -> None:
        """Stores P^T [tile, columns] as the right operand of `values`, [columns, tile]."""
        weights_smem.T[...] = layout(weights)

    def product(self, a, b_smem) -> Array:
        """The product of two operands; the left one may be in registers."""
        return layout(product(a, b_smem))

    def slot_scales(self, scales_smem) -> Array:
        """The scale of each row of a tile, [tile], from the scales of its runs in shared memory."""
        return slot_scales.of_rows(scales_smem, self.geometry)

    def zero_unseen(self, tiles_smem, low, high) -> None:
        """Zeroes the rows of V whose tokens are outside low <= token < high: 0 * NaN would be NaN."""
        for row in range(0, self.geometry.tuning.tile, WGMMA_ROWS):
            self._zero_unseen_rows(tiles_smem, row, low, high)

    def _zero_unseen_rows(self, tiles_smem, row: int, low, high) -> None:
        """Zeroes the unseen rows among `WGMMA_ROWS` rows, if there are any."""
        fold, problem = self.geometry.tuning.fold, self.geometry.problem
        start = row // fold

        @pl.when(mask.some_unseen(low, high, start, WGMMA_ROWS // fold, problem))
        def zero():
            for tile_smem in tiles_smem:
                self.zero_rows(tile_smem.at[self.some_rows(row)], start, low, high)
            plgpu.commit_smem()

    def some_rows(self, first: int) -> Any:
        """The place of `WGMMA_ROWS` rows in a tile of the ring."""
        return pl.ds(first, WGMMA_ROWS)

    def zero_rows(self, rows_smem, start: int, low, high) -> None:
        """Zeroes those of `WGMMA_ROWS` rows, from token `start` on, whose tokens are outside low <= token < high."""
        size = rows_smem.shape[1]
        at_a_time = size if size <= _MOST_AT_ONCE else _AT_A_TIME
        for first in range(0, size, at_a_time):
            part_smem = rows_smem if at_a_time == size else rows_smem.at[:, pl.ds(first, at_a_time)]
            rows = layout(part_smem[...])
            seen = mask.seen(low - start, high - start, rows.shape, self.geometry)
            part_smem[...] = jnp.where(seen, rows, jnp.zeros_like(rows))

    # Results.

    def store_out(self, out_smem, out: Array) -> None:
        """Stores O^T [head_size, columns] as [columns, head_size]."""
        store(out_smem.T, out)

    def store_partial_out(self, partial, out: Array, row: int) -> None:
        """Stores O^T, or a head slice of it, from row `row` on, in shared or global memory."""
        store(partial.at[pl.ds(row, out.shape[0])], out)


def tokens_of_run(offset, geometry: Geometry) -> Any:
    """The run at `offset`, as an index into the tokens of its block."""
    size = geometry.run_tokens
    return slice(None) if size == geometry.problem.block_size else pl.ds(pl.multiple_of(offset, size), size)
