"""Tests tiles of layout "vllm" in registers (`vllm.py`, `eight_bit_vllm.py`) without a GPU.

All threads' registers are NumPy arrays, as in test_mosaic_gpu_narrow.py. A function here replaces `ldmatrix`, and
shared memory is a flat array.
"""

from types import SimpleNamespace
from unittest import mock

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
import pytest

from paged_jax.kernels.mosaic_gpu.decode.tiles import converted, eight_bit_vllm, vllm
from tests.inputs import dtype_of
from tests.test_mosaic_gpu_narrow import (
    Bound,
    Stored,
    WithType,
    geometry_of,
    inline,
    operand,
    registers_of,
    run,
)


def ldmatrix(pointer, **_):
    """Loads four matrices of 8 rows of 16 bytes. Lane i addresses row i; lane 4 * g + t gets word t of each row g."""
    memory, start = pointer
    start = start * memory.itemsize
    assert not (start % 16).any()  # bytes
    rows = memory.reshape(-1).view(np.uint8)[start[:, None] + np.arange(16)]
    return rows.view("<u4").reshape(4, 4, 32).swapaxes(0, 1).reshape(4, 128)  # [matrix, thread]


def load(_, pointer, **__):
    memory, start = pointer
    return memory.reshape(-1)[start[:, None] + np.arange(16 // memory.itemsize)]


def store(x, pointer, **_):
    memory, start = pointer
    memory.reshape(-1)[start[:, None] + np.arange(16 // memory.itemsize)] = x


@pytest.fixture
def emulated():
    arith = SimpleNamespace(
        remui=np.mod, divui=np.floor_divide, addi=np.add, muli=np.multiply, select=np.where,
        CmpIPredicate=SimpleNamespace(sge=np.greater_equal), cmpi=lambda compare, x, y: compare(x, y),
    )  # fmt: skip
    vector = SimpleNamespace(extract=lambda x, _, at: x[:, at[0]], from_elements=lambda _, xs: np.stack(xs, 1))
    fakes = {
        "inline": inline,
        "operand": operand,
        "llvm": SimpleNamespace(extractvalue=lambda _, x, at: x[at[0]], load=load, store=store),
        "nvvm": mock.MagicMock(ldmatrix=ldmatrix),
        "vector": vector,
        "_pointer": lambda memory, start, offset: (memory, start + offset),
        "_bits_of_element": mock.MagicMock(),
        "ir": mock.MagicMock(),
    }
    of_words = {
        "inline": inline,
        "array": lambda registers, layout, shape: Stored(registers=registers, layout=layout, shape=shape),
        "vector": vector,
        "on_words": run,
        "ir": mock.MagicMock(),
    }
    thread_idx = np.arange(128, 256)
    threads = mock.patch.multiple(mgpu, thread_idx=lambda: thread_idx, c=lambda x, _: x)
    anew = SimpleNamespace(inline_asm=lambda _, __, text, *___, **____: {"mov.u32 $0, %tid.x;": thread_idx}[text])
    below = mock.patch.multiple(
        "paged_jax.kernels.mosaic_gpu.hopper.inline", arith=arith, ir=mock.MagicMock(), llvm=anew
    )
    with mock.patch.multiple(vllm, **fakes), mock.patch.multiple(converted, **of_words), below, threads:
        yield


def pages_of(tokens, block_size):
    """The pages of K and of V that hold these tokens [tile, head_size]."""
    x = 16 // tokens.itemsize
    blocks = tokens.reshape(-1, block_size, tokens.shape[1])
    keys = blocks.reshape(*blocks.shape[:2], -1, x).swapaxes(1, 2)
    return np.ascontiguousarray(keys), np.ascontiguousarray(blocks.swapaxes(1, 2))


def check_zeroes(tiles, tokens, values, block_size, fold):
    """Checks the pages of V after `zero_pages`. Blocks of folded heads alternate in them."""
    token = np.tile(np.arange(len(tokens) // fold).reshape(-1, 1, block_size), (1, fold, 1)).reshape(-1, 1)
    for low, high in ((-3, 500), (5, 12), (9, 9), (-9, 1)):
        kept = values.copy().view(WithType)
        tiles.zero_pages(kept, *(Bound(x) for x in (low, high)))
        seen = np.where((token >= low) & (token < high), tokens, 0)
        np.testing.assert_array_equal(kept, pages_of(seen, block_size)[1])


@pytest.mark.parametrize(("block_size", "fold"), [(8, 1), (8, 4), (16, 1), (16, 2), (32, 2), (64, 1)])
@pytest.mark.parametrize(("head_size", "tile"), [(64, 128), (128, 64), (256, 64)])
@pytest.mark.usefixtures("emulated")
def test_operands(head_size, tile, block_size, fold):
    shape = {"head_size": head_size, "block_size": block_size, "num_kv_heads": fold}
    tiles = vllm.VllmTiles(geometry_of(cache_dtype="float16", layout="vllm", **shape, tile=tile, fold=fold))
    tokens = np.random.default_rng(0).normal(size=(tile, head_size)).astype(np.float16)
    keys, values = pages_of(tokens, block_size)
    np.testing.assert_array_equal(tiles.keys(keys), tokens)
    np.testing.assert_array_equal(tiles.values(values), tokens.T)
    check_zeroes(tiles, tokens, values, block_size, fold)


@pytest.mark.parametrize(("block_size", "fold"), [(16, 1), (16, 4), (32, 2), (64, 1)])
@pytest.mark.parametrize(("head_size", "tile"), [(64, 128), (128, 64), (192, 64), (256, 64)])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.usefixtures("emulated")
def test_products_of_eight_bits(dtype, head_size, tile, block_size, fold):
    """Operands in registers and in shared memory have the same order along k, so products are right."""
    columns = 16 if tile == 64 else 8
    shape = {"head_size": head_size, "block_size": block_size, "num_kv_heads": fold, "num_heads": columns}
    geometry = geometry_of(cache_dtype=dtype, layout="vllm", **shape, tile=tile, fold=fold)
    tiles = eight_bit_vllm.EightBitVllmTiles(geometry)
    assert geometry.columns == columns
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (tile, head_size), np.uint8).view(dtype_of(dtype))
    tokens = np.where(np.isfinite(tokens.astype(np.float32)), tokens, np.zeros_like(tokens))
    exact = tokens.astype(np.float64)
    keys, values = pages_of(tokens, block_size)
    for left, store, operand_of, wanted in (
        (tiles.keys(keys), tiles.store_query, exact, "keys"),
        (tiles.values(values), tiles.store_weights, exact.T, "values"),
    ):
        right = rng.integers(-9, 9, (operand_of.shape[1], columns)).astype(np.float16)
        in_registers = SimpleNamespace(
            registers=registers_of(right, mgpu.WGMMA_LAYOUT), mlir_dtype=None, shape=right.shape
        )
        stored = np.full(right.shape[::-1], np.nan, np.float16)
        store(stored, in_registers)
        np.testing.assert_array_equal(left.astype(np.float64) @ stored.T, operand_of @ right, wanted)


@pytest.mark.parametrize(("block_size", "fold"), [(16, 1), (16, 4), (32, 2), (64, 1)])
@pytest.mark.parametrize(("head_size", "tile"), [(64, 128), (128, 64)])
@pytest.mark.usefixtures("emulated")
def test_zeroes_of_eight_bits(head_size, tile, block_size, fold):
    shape = {"head_size": head_size, "block_size": block_size, "num_kv_heads": fold}
    tiles = eight_bit_vllm.EightBitVllmTiles(
        geometry_of(cache_dtype="int8", layout="vllm", **shape, tile=tile, fold=fold)
    )
    tokens = np.random.default_rng(0).integers(1, 100, (tile, head_size)).astype(np.int8)
    check_zeroes(tiles, tokens, pages_of(tokens, block_size)[1], block_size, fold)
