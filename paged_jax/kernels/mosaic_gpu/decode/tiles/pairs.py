"""Tiles of 8 bits from one pool, where K and V of neighbouring heads lie side by side: one copy brings them all.

A row of the ring is a token, with K and V of the item's heads. TMA tiles it in 8 rows of 128 bytes, or of a head if it
is smaller. So 8 tokens of K of the first head come first, then the same tokens of V, of K of the next head, and so on.
K alone has rows at equal distances there, if heads alternate every 8 rows (`Geometry.rows_of_head`), and so has V.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl

from paged_jax.kernels.mosaic_gpu.decode.tiles.eight_bit import EightBitTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.plain import tokens_of_run
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.memory import Slice


class EightBitPairTiles(EightBitTiles):
    """Tiles of K and V together, with the operands of `EightBitTiles`."""

    def key_ring(self) -> Any:
        """The ring of K and V: [stages, tokens of a tile, elements of a token]."""
        geometry = self.geometry
        shape = geometry.tuning.stages, geometry.tile_tokens, geometry.pair_size
        return self.swizzled(shape, geometry.problem.cache_dtype)

    def value_rings(self) -> tuple[Any, ...]:
        """No rings: the ring of K has V, too."""
        return ()

    def view(self, cache: Any) -> Any:
        """Reshapes the pool: K and V of an item's heads become one row."""
        return cache.reshape(*cache.shape[:2], self.geometry.items_per_seq, self.geometry.pair_size)

    def run_gmem(self, cache_gmem, block, offset, kv_head, head_slice: Slice) -> Any:
        """The run at `offset` in a block; `kv_head` counts items."""
        return cache_gmem.at[block, tokens_of_run(offset, self.geometry), kv_head]

    def run_rows(self, copy: Scalar) -> Any:
        """The tokens of a copy in its tile."""
        return pl.ds(copy * self.geometry.run_tokens, self.geometry.run_tokens)

    def some_rows(self, first: int) -> Any:
        """The tokens of `WGMMA_ROWS` rows in a tile of the ring."""
        fold = self.geometry.tuning.fold
        return pl.ds(first // fold, WGMMA_ROWS // fold)

    def part(self, tile_smem, values: int):
        """The rows of K or of V: [tokens / 8, heads, 8 rows] and the elements of one head."""
        fold = self.geometry.tuning.fold
        tile = mgpu.memref_unfold(tile_smem, 1, (fold, 2, None))
        return mgpu.memref_fold(mgpu.memref_slice(tile, (slice(None), slice(None), values)), 0, 2)
