"""8-bit tiles as float16 operands of wgmma, in registers: device code below what Pallas has words for.

wgmma takes its operand A from registers, in pairs of neighbours along what is summed: of every [64, 16] of A, lane
4 * g + t of warp w has rows 16 * w + 8 * h + g and columns 8 * a + 2 * t + b, for h, a, b of 0 and 1. Shared memory
is read in words of 4 elements, so both operands come in an order of their own.

Keys, A = K [tile, d]: words are 4 neighbouring elements of a token, taken for those columns that a lane has. Elements
of the query, B, are stored in that order (`store_query`), and sums do not mind.

Values, A = V^T [d, tile]: words are neighbouring elements of neighbouring tokens, which exchange bytes,

    token 2 * t     | e0 e1 e2 e3 |       | e0 e0' | e1 e1' |
    token 2 * t + 1 | e0'e1'e2'e3'|  ->   | e2 e2' | e3 e3' |

so that a pair of tokens is a register. Elements are taken for those rows that a lane has; `store` and
`store_transposed` put the rows of the product where they belong. Where head_size is no multiple of 128, a lane has 2
rows at a time, and words are halves.
"""

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from paged_jax.kernels.mosaic_gpu.config import Config, transforms
from paged_jax.kernels.mosaic_gpu.inline import (
    add,
    array,
    i32,
    if_within,
    inline,
    operand,
    over,
    rest,
    thread,
    times,
    token_of,
    within,
)

# From each register of bytes: two of float16, exactly.
_CONVERT = {
    "float8_e4m3fn": """{ .reg .b16 low, high; mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }""",
    "float8_e5m2": "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;",
    # 0x6400 is 1024 in float16, where a unit is the last bit.
    "int8": """{ .reg .b32 u, zero; xor.b32 u, $2, 0x80808080; mov.b32 zero, 0x64806480;
        prmt.b32 $0, u, 0x64646464, 0x4140; prmt.b32 $1, u, 0x64646464, 0x4342;
        sub.f16x2 $0, $0, zero; sub.f16x2 $1, $1, zero; }""",
}


def keys(tile_smem, cfg: Config) -> Array:
    """K [tile, d], in float16, elements in the order of `store_query`."""
    shape = cfg.tile, cfg.head_size

    @inline(plgpu.RefType(_transforms(cfg)), returns=shape)
    def body(_, tile_smem):
        words = _load(tile_smem, mgpu.WGMMA_LAYOUT_8BIT, cfg).reshape(-1, 2)  # [.., h]
        halves = np.empty((len(words), 2, 2), object)  # [.., a, h]
        for i, h in np.ndindex(words.shape):
            halves[i, :, h] = _asm(_CONVERT[cfg.cache_dtype], 2, words[i, h])
        return operand(halves, shape, "float16")

    return body(tile_smem)


def token_scales(scales_smem, cfg: Config) -> Array:
    """Scales of the tile's tokens, [tile], which lie a run a row."""

    @inline(plgpu.RefType(), returns=(cfg.tile,), dtype="float32", layout=plgpu.Layout.WGMMA.reduce(1))
    def body(_, scales_smem):
        f32 = ir.F32Type.get()
        loaded = np.empty((cfg.tile // 64, 2), object)  # [m, h]
        for m, h in np.ndindex(loaded.shape):
            token = add(_first_row(), i32(64 * m + 8 * h))
            at = [arith.index_cast(ir.IndexType.get(), x) for x in (over(token, cfg.run), rest(token, cfg.run))]
            loaded[m, h] = vector.broadcast(ir.VectorType.get((1,), f32), memref.load(scales_smem, at))
        return array(loaded, mgpu.WGMMA_ROW_LAYOUT, (cfg.tile,))

    return body(scales_smem)


def store_query(ref, x: Array, cfg: Config) -> None:
    """Stores Q^T [d, columns] as [columns, d], with elements in the order of `keys`."""
    transforms_ = transforms(cfg.head_size, jnp.dtype(x.dtype))

    @inline(plgpu.RefType(transforms_), plgpu.Layout.WGMMA)
    def body(_, ref, x):
        pairs = x.registers.reshape(cfg.head_size // 64, cfg.columns // 8, 2)  # [m, c, h]
        one = ir.VectorType.get((1,), x.mlir_dtype)
        singles = np.empty((*pairs.shape, 2), object)
        for (*i, b), _ in np.ndenumerate(singles):
            singles[*i, b] = vector.from_elements(one, [vector.extract(pairs[*i], [], [b])])
        stored = array(singles.swapaxes(0, 1), query_layout(), x.shape[::-1])
        stored.store_tiled(ref, transforms_[1].swizzle, optimized=False)

    body(ref, x)


def values(tile_smem, cfg: Config) -> Array:
    """V^T [d, tile], in float16, with its rows out of order."""
    shape = cfg.head_size, cfg.tile

    @inline(plgpu.RefType(_transforms(cfg)), returns=shape)
    def body(_, tile_smem):
        each = _elements(cfg)
        words = _load(tile_smem, tokens_layout(16, cfg), cfg)
        words = words.reshape(cfg.tile // 16, cfg.head_size // (32 * each), 2, 2)  # [.., .., a, b]
        halves = np.empty((cfg.head_size // (32 * each), each // 2, cfg.tile // 16, 2, 2), object)  # [.., .., .., a, h]
        for s, m, a in np.ndindex(words.shape[:3]):
            for i in range(each // 2):
                order = ("0x5140", "0x7362")[i]
                word = _asm(f"prmt.b32 $0, $1, $2, {order};", 1, *words[s, m, a])
                halves[m, i, s, a] = _asm(_CONVERT[cfg.cache_dtype], 2, word)
        return operand(halves, shape, "float16")

    return body(tile_smem)


def zero_rows(rows_smem, low, high, cfg: Config) -> None:
    """Zeroes the rows of [64, d] bytes whose tokens are not low <= token < high."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @inline(plgpu.RefType(_transforms(cfg)), scalar, scalar)
    def body(_, rows_smem, low, high):
        one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        words = _load(rows_smem, mgpu.WGMMA_LAYOUT_8BIT, cfg).reshape(-1, 2)  # [.., h]
        four = ir.VectorType.get((4,), ir.MemRefType(rows_smem.type).element_type)
        kept = np.empty_like(words)
        for i, h in np.ndindex(words.shape):
            token = token_of(add(_first_row(), i32(8 * h)), cfg)
            seen = within(low.registers.item(), token, high.registers.item())
            word = if_within(seen, words[i, h], i32(0))
            kept[i, h] = vector.bitcast(four, vector.broadcast(one, word))
        stored = array(kept, mgpu.WGMMA_LAYOUT_8BIT, (64, cfg.head_size), _is_signed(cfg))
        stored.store_tiled(rows_smem, _transforms(cfg)[1].swizzle)

    body(rows_smem, low, high)


def store(ref, x: Array, cfg: Config) -> None:
    """Stores a product with `values`, [d, columns], with its rows where they belong."""

    @inline(plgpu.RefType(), plgpu.Layout.WGMMA)
    def body(_, ref, x):
        registers = _by_rows(x, cfg)  # [m, i, c, h]
        array(registers.swapaxes(1, 2), rows_layout(cfg), x.shape).store_untiled(ref, optimized=False)

    body(ref, x)


def store_transposed(ref, x: Array, cfg: Config) -> None:
    """`store`, as [columns, d]."""

    @inline(plgpu.RefType(), plgpu.Layout.WGMMA)
    def body(_, ref, x):
        each = _elements(cfg)
        vectors = np.empty((cfg.columns // 8, cfg.head_size // (32 * each), 2), object)
        for c, m, b in np.ndindex(vectors.shape):
            elements = [vector.extract(pair, [], [b]) for pair in _by_rows(x, cfg)[m, :, c].flat]
            vectors[c, m, b] = vector.from_elements(ir.VectorType.get((each,), x.mlir_dtype), elements)
        array(vectors, tokens_layout(8, cfg), x.shape[::-1]).store_untiled(ref, optimized=False)

    body(ref, x)


def query_layout() -> mgpu.TiledLayout:
    """Of [columns, d]: a lane's columns of a product, and where elements 16 * w + 8 * h + g go: g2 g1 h g0 of 1 3 2 0.

    An element 4 * t + 2 * a + b is one of 8 * a + 2 * t + b in a column of `keys`; here t is h and g2.
    """
    tiles = ((8, 64), (8, 16), (8, 8), (8, 4), (8, 2), (2, 1), (1, 1))
    return _layout(tiles, warp=-13, lanes=(-7, -11, -5, -6))


def tokens_layout(group: int, cfg: Config) -> mgpu.TiledLayout:
    """Of [tokens, d]: of each group of tokens 8 * a + 2 * t + b, of 32 * _elements elements the w-th and then g-th."""
    each = _elements(cfg)
    return _layout(((group, 32 * each), (8, 8 * each), (2, each), (1, each)), warp=-7, lanes=(-5, -6))


def rows_layout(cfg: Config) -> mgpu.TiledLayout:
    """Of [d, columns]: the rows of `values` and the columns of a product."""
    each = _elements(cfg)
    tiles = ((32 * each, 8), (8 * each, 8), (each, 8), *([(2, 8)] if each == 4 else []), (1, 2))
    return _layout(tiles, warp=-2 * len(tiles), lanes=(2 - 2 * len(tiles), -3))


def _elements(cfg: Config) -> int:
    """Neighbouring elements of V that a lane reads at once."""
    return 4 if cfg.head_size % 128 == 0 else 2


def _layout(tiles, warp: int, lanes: tuple[int, ...]) -> mgpu.TiledLayout:
    return mgpu.TiledLayout(plgpu.Tiling(tiles), (warp,), lanes, -1, _check_canonical=False).canonicalize()


def _transforms(cfg: Config):
    return transforms(cfg.head_size, jnp.dtype(cfg.cache_dtype))


def _first_row():
    """16 * w + g."""
    return add(times(over(thread(), 32), 16), over(rest(thread(), 32), 4))


def _load(tile_smem, layout, cfg: Config) -> np.ndarray:
    """The tile's bytes in a layout, each register as an integer."""
    swizzle = _transforms(cfg)[1].swizzle
    registers = mgpu.FragmentedArray.load_tiled(tile_smem, swizzle, is_signed=_is_signed(cfg), layout=layout).registers
    words = np.empty(registers.shape, object)
    for i, x in np.ndenumerate(registers):
        words[i] = _bitcast(x, 8 * ir.VectorType(x.type).shape[0])
    return words


def _by_rows(x: mgpu.FragmentedArray, cfg: Config) -> np.ndarray:
    """Registers of a product, by run of rows that `tokens_layout` spreads, half of `_elements`, columns and h."""
    each = _elements(cfg)
    return x.registers.reshape(cfg.head_size // (32 * each), each // 2, cfg.columns // 8, 2)


def _is_signed(cfg: Config) -> bool | None:
    """As Mosaic has it, of integers."""
    return True if cfg.cache_dtype == "int8" else None


def _bitcast(x, bits: int):
    """A vector of bytes as an integer of at least 32 bits, which assembly wants."""
    word = ir.IntegerType.get_signless(32)
    x = vector.bitcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(bits)), x)
    x = vector.extract(x, [], [0])
    return x if bits == 32 else llvm.zext(word, x)


def _asm(code: str, results: int, *operands):
    word = ir.IntegerType.get_signless(32)
    constraints = ",".join(["=&r"] * results + ["r"] * len(operands))
    if results == 1:
        return llvm.inline_asm(word, operands, code, constraints)
    struct = llvm.inline_asm(llvm.StructType.get_literal([word] * results), operands, code, constraints)
    return [llvm.extractvalue(word, struct, [i]) for i in range(results)]
