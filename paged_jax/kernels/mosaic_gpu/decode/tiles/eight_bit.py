"""Tiles of 8 bits in layouts "hnd" and "nhd": registers convert them to float16 for the products.

`converted.py` describes the operand A of wgmma. A lane reads words of 4 neighbouring elements of a token.

Keys, A = K [tile, head_size]: the elements are neighbours along k, and match a query in word order.

Values, A = V^T [head_size, tile]: a lane has two words, the same elements of two neighbouring tokens. The words
exchange bytes,

    token 2 * t     | e0 e1 e2 e3 |       | e0 e0' | e1 e1' |
    token 2 * t + 1 | e0'e1'e2'e3'|  ->   | e2 e2' | e3 e3' |

so that each register has pairs of tokens. This permutes the rows of V^T and of the product; `store_partial_out` and
`store_out` store the product's rows in order. If head_size is no multiple of 128, a lane reads half words.
"""

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.tiles.converted import ConvertedTiles, on_words, tiled_layout, to_float16
from paged_jax.kernels.mosaic_gpu.decode.tiles.rows import first_row, token_of_row
from paged_jax.kernels.mosaic_gpu.hopper.inline import add, array, i32, inline, operand, select_within
from paged_jax.kernels.mosaic_gpu.hopper.memory import transforms

# PTX: interleaves the bytes of two tokens ($1, $2); returns the first two pairs or the last two.
_PAIR_TOKENS = "prmt.b32 $0, $1, $2, 0x5140;", "prmt.b32 $0, $1, $2, 0x7362;"


class EightBitTiles(ConvertedTiles):
    """Tiles with the layout of `PlainTiles`, and operands in registers."""

    def part(self, tile_smem, values: int):
        """The rows of K or of V in a tile of the ring, in MLIR."""
        return tile_smem

    def keys(self, tile_smem) -> Array:
        """K [tile, head_size] in float16, with its elements in word order."""
        geometry, cache_dtype = self.geometry, self.geometry.problem.cache_dtype
        shape = geometry.tuning.tile, geometry.problem.head_size

        @inline(plgpu.RefType(_transforms(geometry)), returns=shape)
        def load(_, tile_smem):
            words = _load(self.part(tile_smem, 0), mgpu.WGMMA_LAYOUT_8BIT, geometry).reshape(-1, 2)  # [.., h]
            halves = np.empty((len(words), 2, 2), object)  # [.., a, h]
            for i, h in np.ndindex(words.shape):
                halves[i, :, h] = to_float16(words[i, h], cache_dtype)
            return operand(halves, shape, self.operand_dtype)

        return load(tile_smem)

    def values(self, tile_smem) -> Array:
        """V^T [head_size, tile] in float16, with permuted rows."""
        geometry, cache_dtype = self.geometry, self.geometry.problem.cache_dtype
        tile, head_size, each = geometry.tuning.tile, geometry.problem.head_size, _elements(geometry)

        @inline(plgpu.RefType(_transforms(geometry)), returns=(head_size, tile))
        def load(_, tile_smem):
            words = _load(self.part(tile_smem, 1), tokens_layout(16, geometry), geometry)
            words = words.reshape(tile // 16, head_size // (32 * each), 2, 2)  # [.., .., a, b]
            halves = np.empty((head_size // (32 * each), each // 2, tile // 16, 2, 2), object)  # [.., .., .., a, h]
            for s, m, a in np.ndindex(words.shape[:3]):
                for i in range(each // 2):
                    word = on_words(_PAIR_TOKENS[i], 1, *words[s, m, a])
                    halves[m, i, s, a] = to_float16(word, cache_dtype)
            return operand(halves, (head_size, tile), self.operand_dtype)

        return load(tile_smem)

    def zero_rows(self, rows_smem, start: int, low, high) -> None:
        """Does the same as in `PlainTiles`, four elements of a row at a time."""
        geometry, scalar = self.geometry, plgpu.Layout.WG_SPLAT(())

        @inline(plgpu.RefType(_transforms(geometry)), scalar, scalar)
        def zero(_, rows_smem, low, high):
            one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
            rows_smem = self.part(rows_smem, 1)
            words = _load(rows_smem, mgpu.WGMMA_LAYOUT_8BIT, geometry).reshape(-1, 2)  # [.., h]
            four = ir.VectorType.get((4,), ir.MemRefType(rows_smem.type).element_type)
            kept = np.empty_like(words)
            for i, h in np.ndindex(words.shape):
                token = token_of_row(add(first_row(), i32(8 * h)), geometry)
                word = select_within(token, low.registers.item(), high.registers.item(), words[i, h], i32(0))
                kept[i, h] = vector.bitcast(four, vector.broadcast(one, word))
            shape = 64, geometry.problem.head_size
            stored = array(kept, mgpu.WGMMA_LAYOUT_8BIT, shape, _is_signed(geometry))
            stored.store_tiled(rows_smem, _transforms(geometry)[1].swizzle)

        zero(rows_smem, low - start, high - start)

    def store_partial_out(self, partial, out: Array, row: int) -> None:
        """Stores O^T [head_size, columns] with its rows in order. There is one head slice, so `row` is 0."""
        geometry = self.geometry

        @inline(plgpu.RefType(), plgpu.Layout.WGMMA)
        def store(_, partial, out):
            registers = _by_rows(out, geometry)  # [m, i, c, h]
            stored = array(registers.swapaxes(1, 2), rows_layout(geometry), out.shape)
            stored.store_untiled(partial, optimized=False)

        store(partial, out)

    def store_out(self, out_smem, out: Array) -> None:
        """Stores O^T [head_size, columns] as [columns, head_size], with its rows in order."""
        geometry, each = self.geometry, _elements(self.geometry)

        @inline(plgpu.RefType(), plgpu.Layout.WGMMA)
        def store(_, out_smem, out):
            vectors = np.empty((geometry.columns // 8, geometry.problem.head_size // (32 * each), 2), object)
            for c, m, b in np.ndindex(vectors.shape):
                elements = [vector.extract(pair, [], [b]) for pair in _by_rows(out, geometry)[m, :, c].flat]
                vectors[c, m, b] = vector.from_elements(ir.VectorType.get((each,), out.mlir_dtype), elements)
            stored = array(vectors, tokens_layout(8, geometry), out.shape[::-1])
            stored.store_untiled(out_smem, optimized=False)

        store(out_smem, out)


def tokens_layout(group: int, geometry: Geometry) -> mgpu.TiledLayout:
    """The layout of [tokens, head_size] in which a lane reads V.

    Lane 4 * g + t has tokens 8 * a + 2 * t + b of each `group` of tokens. Of 32 * _elements elements, warp w has the
    w-th quarter, and the lane the g-th eighth of that.
    """
    each = _elements(geometry)
    return tiled_layout(((group, 32 * each), (8, 8 * each), (2, each), (1, each)), warp=-7, lanes=(-5, -6))


def rows_layout(geometry: Geometry) -> mgpu.TiledLayout:
    """The layout of O^T [head_size, columns] after a product with `values`: rows are permuted, and columns are not."""
    each = _elements(geometry)
    tiles = ((32 * each, 8), (8 * each, 8), (each, 8), *([(2, 8)] if each == 4 else []), (1, 2))
    return tiled_layout(tiles, warp=-2 * len(tiles), lanes=(2 - 2 * len(tiles), -3))


def _elements(geometry: Geometry) -> int:
    """Neighbouring elements of V in one word of a lane."""
    return 4 if geometry.problem.head_size % 128 == 0 else 2


def _transforms(geometry: Geometry):
    return transforms(geometry.problem.head_size, geometry.problem.cache_dtype)


def _load(tile_smem, layout, geometry: Geometry) -> np.ndarray:
    """Loads a thread's registers of a tile of bytes in this layout, each as an integer."""
    swizzle, signed = _transforms(geometry)[1].swizzle, _is_signed(geometry)
    registers = mgpu.FragmentedArray.load_tiled(tile_smem, swizzle, is_signed=signed, layout=layout).registers
    words = np.empty(registers.shape, object)
    for i, x in np.ndenumerate(registers):
        words[i] = _bitcast(x, 8 * ir.VectorType(x.type).shape[0])
    return words


def _by_rows(out: mgpu.FragmentedArray, geometry: Geometry) -> np.ndarray:
    """A thread's registers of O^T as [head_size / (32 * _elements), _elements / 2, columns / 8, h]."""
    each = _elements(geometry)
    shape = geometry.problem.head_size // (32 * each), each // 2, geometry.columns // 8, 2
    return out.registers.reshape(shape)


def _is_signed(geometry: Geometry) -> bool | None:
    """The argument `is_signed` of Mosaic's arrays: True for integers, None for others."""
    return True if geometry.problem.cache_dtype == "int8" else None


def _bitcast(x, bits: int):
    """Bitcasts a vector of bytes to an integer, extended to 32 bits for PTX."""
    word = ir.IntegerType.get_signless(32)
    x = vector.bitcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(bits)), x)
    x = vector.extract(x, [], [0])
    return x if bits == 32 else llvm.zext(word, x)
