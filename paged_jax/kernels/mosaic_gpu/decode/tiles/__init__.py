"""How tiles of K and V lie in shared memory and how they become operands of wgmma: one interface, four classes."""

from paged_jax.kernels.mosaic_gpu.decode.tiles.eight_bit import EightBitTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.eight_bit_vllm import EightBitVllmTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.plain import PlainTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.vllm import VllmTiles
from paged_jax.kernels.problem import Problem

Tiles = PlainTiles
"""What the kernel asks of tiles; the other classes replace what they do otherwise."""


def class_of(problem: Problem) -> type[Tiles]:
    """The class of a problem's tiles."""
    eight_bit = problem.cache_itemsize == 1
    if problem.layout == "vllm":
        return EightBitVllmTiles if eight_bit else VllmTiles
    return EightBitTiles if eight_bit else PlainTiles
