"""How tiles of K and V lie in shared memory and how they become operands of wgmma: one interface, four kinds.

`kind` picks the kind of a problem, once a call; everything else asks the `Tiles` that it is given.
"""

from typing import Any, Protocol

from jax import Array

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry, HeadSlice
from paged_jax.kernels.mosaic_gpu.decode.tiles.eight_bit import EightBitTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.eight_bit_vllm import EightBitVllmTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.plain import PlainTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.vllm import VllmTiles
from paged_jax.kernels.problem import Problem


class Tiles(Protocol):
    """What the kernel asks of tiles. `PlainTiles` says what each method does, the others what they do otherwise.

    Attributes:
      in_registers: whether tiles go through registers on their way to the products.
      geometry: of the call.
    """

    in_registers: bool
    geometry: Geometry

    def __init__(self, geometry: Geometry) -> None: ...

    # Shared memory.
    @property
    def operand_dtype(self) -> str: ...
    def swizzled(self, shape: tuple[int, ...], dtype: str) -> Any: ...
    def key_ring(self) -> Any: ...
    def value_rings(self) -> tuple[Any, ...]: ...
    def query_operand_type(self) -> Any | None: ...

    # Copies.
    def view(self, cache: Any) -> Any: ...
    def run_gmem(self, cache_gmem, block, offset, kv_head, head_slice: HeadSlice) -> Any: ...
    def run_rows(self, run: int) -> Any: ...

    # Products.
    def query_operand(self, query_smem, operand_smem) -> tuple[Any, Any]: ...
    def keys(self, tile_smem) -> Any: ...
    def values(self, tile_smem) -> Any: ...
    def store_weights(self, weights_smem, weights: Array) -> None: ...
    def product(self, a, b_smem) -> Array: ...
    def slot_scales(self, scales_smem) -> Array: ...
    def zero_unseen(self, tiles_smem, low, high) -> None: ...

    # Results.
    def store_out(self, out_smem, out: Array) -> None: ...
    def store_partial_out(self, partial_smem, out: Array, row: int) -> None: ...


Kind = type[PlainTiles] | type[EightBitTiles] | type[VllmTiles] | type[EightBitVllmTiles]


def kind(problem: Problem) -> Kind:
    """The kind of a problem's tiles."""
    eight_bit = problem.cache_itemsize == 1
    if problem.layout == "vllm":
        return EightBitVllmTiles if eight_bit else VllmTiles
    return EightBitTiles if eight_bit else PlainTiles
