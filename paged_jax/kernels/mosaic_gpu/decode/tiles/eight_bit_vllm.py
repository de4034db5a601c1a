"""Tiles of 8 bits in layout "vllm": `ldmatrix` makes words of their pages, which become float16 in registers.

A word has 4 neighbours along what is summed, in both products: of K, elements of a token; of V, an element of 4 tokens.
So the query goes with the keys, and P^T with the values, in the order of words (`converted.py`), and results have their
rows where they belong.
"""

import numpy as np
from jax import Array

from paged_jax.kernels.mosaic_gpu.decode.tiles.converted import ConvertedTiles, store_in_word_order, to_float16
from paged_jax.kernels.mosaic_gpu.decode.tiles.vllm import VllmTiles


class EightBitVllmTiles(VllmTiles, ConvertedTiles):
    """Tiles lie as `VllmTiles` has them, and become operands as those of `ConvertedTiles` do.

    A row of V in a page is a row of `ldmatrix`, or several: blocks have 16 tokens or more.
    """

    def of_wgmma(self, words: np.ndarray) -> np.ndarray:
        """Each word becomes two registers, whose columns are 16 of A."""
        registers = np.empty((*words.shape[:3], 2, 2), object)  # [m, s, i, a, h]
        for *at, h in np.ndindex(words.shape):
            registers[*at, :, h] = to_float16(words[*at, h], self.geometry.problem.cache_dtype)
        return registers

    def store_weights(self, weights_smem, weights: Array) -> None:
        """Stores P^T with its tokens in the order of words. Since the last product with P, warps have shared maxima."""
        store_in_word_order(weights_smem, weights, self.geometry)
