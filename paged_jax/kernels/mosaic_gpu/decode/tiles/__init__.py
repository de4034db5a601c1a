"""Four classes of tiles of K and V: their layout in shared memory, and their conversion to operands of wgmma."""

from paged_jax.kernels.mosaic_gpu.decode.tiles.eight_bit import EightBitTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.eight_bit_vllm import EightBitVllmTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.pairs import EightBitPairTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.plain import PlainTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.vllm import VllmTiles
from paged_jax.kernels.problem import Problem

Tiles = PlainTiles
"""The interface of tiles. The other classes override methods of `PlainTiles`."""


def class_of(problem: Problem) -> type[Tiles]:
    """The class of a problem's tiles. The tests replace this function to give the interpreter classes of its own."""
    eight_bit = problem.cache_itemsize == 1
    if problem.layout == "vllm":
        return EightBitVllmTiles if eight_bit else VllmTiles
    if eight_bit and problem.has_pairs:
        return EightBitPairTiles
    return EightBitTiles if eight_bit else PlainTiles
