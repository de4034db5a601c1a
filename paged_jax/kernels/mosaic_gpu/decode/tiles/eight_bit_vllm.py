"""Tiles of 8 bits in layout "vllm": `ldmatrix` loads words of their pages, and registers convert them to float16.

In both products a word has 4 neighbours along k: elements of a token of K, or an element of 4 tokens of V. So the query
and P^T are stored in word order (`converted.py`), and results have their rows in order.
"""

import numpy as np
from jax import Array

from paged_jax.kernels.mosaic_gpu.decode.tiles.converted import ConvertedTiles, store_in_word_order, to_float16
from paged_jax.kernels.mosaic_gpu.decode.tiles.vllm import VllmTiles


class EightBitVllmTiles(VllmTiles, ConvertedTiles):
    """Tiles with the layout of `VllmTiles`, and operands of `ConvertedTiles`.

    A row of V in a page has one row of `ldmatrix` or several, because blocks have 16 tokens or more.
    """

    def of_wgmma(self, words: np.ndarray) -> np.ndarray:
        """Converts each word to two registers of 16 columns of A."""
        registers = np.empty((*words.shape[:3], 2, 2), object)  # [m, s, i, a, h]
        for *at, h in np.ndindex(words.shape):
            registers[*at, :, h] = to_float16(words[*at, h], self.geometry.problem.cache_dtype)
        return registers

    def store_weights(self, weights_smem, weights: Array) -> None:
        """Stores P^T in word order. All threads have read the previous P, because they have exchanged maxima since."""
        store_in_word_order(weights_smem, weights, self.geometry)
