"""Base class for tiles of 8 bits: their elements become float16 in registers, permuted along the summed dimension (k).

wgmma takes its left operand A from registers. Of every [64, 16] of A, lane 4 * g + t of warp w holds rows
16 * w + 8 * h + g and columns 8 * a + 2 * t + b, for h, a, b in {0, 1}. A lane reads shared memory in words of 4
elements. If these are neighbours along k, they are elements 4 * t + 2 * a + b of 16, but wgmma takes them for the
lane's 4 columns. This permutation is the word order. `store_in_word_order` permutes the right operand in the same way,
so the sums do not change.
"""

from typing import Any, ClassVar

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.tiles.plain import PlainTiles
from paged_jax.kernels.mosaic_gpu.hopper.convert import CONVERT
from paged_jax.kernels.mosaic_gpu.hopper.inline import array, inline
from paged_jax.kernels.mosaic_gpu.hopper.memory import transforms
from paged_jax.kernels.mosaic_gpu.hopper.registers import layout, power_of_two, wide

_SMALLEST = 1e-30  # the peak that a query row of zeros counts as having


class ConvertedTiles(PlainTiles):
    """Operands are float16, and the query is stored in word order."""

    in_registers: ClassVar[bool] = True

    @property
    def operand_dtype(self) -> str:
        """float16 holds every value of 8 bits, and is the only target of Hopper's conversion from float8."""
        return "float16"

    def query_operand_type(self) -> Any:
        """Shared memory for the query in float16 and word order."""
        return self.swizzled((self.geometry.columns, self.geometry.problem.head_size), self.operand_dtype)

    def query_operand(self, query_smem, operand_smem) -> tuple[Any, Any]:
        """Divides each row of a query in bfloat16 by a power of two, exactly, and converts it to float16.

        An element loses bits only if it is more than 2 ** 17 times smaller than the row's largest element.
        """
        query, divisor = layout(query_smem.T[...]), 1.0
        if self.geometry.problem.query_dtype != self.operand_dtype:
            query = query.astype(jnp.float32)
            peak = lax.max(jnp.abs(query).max(axis=0), jnp.float32(_SMALLEST))
            divisor = power_of_two(peak)
            query = (query / wide(divisor, self.geometry.problem.head_size)).astype(self.operand_dtype)
        self.store_query(operand_smem, query)
        plgpu.commit_smem()
        return operand_smem, divisor

    def store_query(self, operand_smem, query: Array) -> None:
        """Stores Q^T [head_size, columns] as [columns, head_size], in word order."""
        store_in_word_order(operand_smem, query, self.geometry)


def store_in_word_order(operand_smem, operand: Array, geometry: Geometry) -> None:
    """Stores a right operand in float16, [n, columns], as [columns, n], with n in word order.

    It does not wait: all threads must have read the previous content before.
    """
    summed, columns = operand.shape
    transforms_ = transforms(geometry.problem.head_size, "float16")

    @inline(plgpu.RefType(transforms_), plgpu.Layout.WGMMA)
    def store(_, operand_smem, operand):
        shape = summed // 64, columns // 8, 2  # [m, c, h]
        pairs = operand.registers.reshape(shape)
        one = ir.VectorType.get((1,), operand.mlir_dtype)
        singles = np.empty((*shape, 2), object)
        for (*i, b), _ in np.ndenumerate(singles):
            singles[*i, b] = vector.from_elements(one, [vector.extract(pairs[*i], [], [b])])
        stored = array(singles.swapaxes(0, 1), word_order_layout(), (columns, summed))
        stored.store_tiled(operand_smem, transforms_[1].swizzle, optimized=False)

    store(operand_smem, operand)


def word_order_layout() -> mgpu.TiledLayout:
    """The layout of [columns, n] in which a lane stores its columns of a right operand in word order.

    Element 4 * t + 2 * a + b of 16 goes to index 8 * a + 2 * t + b. A lane has elements 16 * w + 8 * h + g of its
    columns: bits h, g2, g1, g0 of the element's index, highest first, become bits 2, 1, 3, 0 of the new index.
    """
    tiles = ((8, 64), (8, 16), (8, 8), (8, 4), (8, 2), (2, 1), (1, 1))
    return tiled_layout(tiles, warp=-13, lanes=(-7, -11, -5, -6))


def tiled_layout(tiles, warp: int, lanes: tuple[int, ...]) -> mgpu.TiledLayout:
    """The layout with warps and lanes in these dimensions of an array's tiles."""
    return mgpu.TiledLayout(plgpu.Tiling(tiles), (warp,), lanes, -1, _check_canonical=False).canonicalize()


def to_float16(word, cache_dtype: str) -> list:
    """Converts a register of four elements of 8 bits to two registers of two float16 each."""
    return on_words(CONVERT[cache_dtype], 2, word)


def on_words(code: str, results: int, *operands):
    """Runs PTX on registers of 32 bits: its results are $0, $1, ..., and the operands follow."""
    word = ir.IntegerType.get_signless(32)
    constraints = ",".join(["=&r"] * results + ["r"] * len(operands))
    if results == 1:
        return llvm.inline_asm(word, operands, code, constraints)
    struct = llvm.inline_asm(llvm.StructType.get_literal([word] * results), operands, code, constraints)
    return [llvm.extractvalue(word, struct, [i]) for i in range(results)]
