"""Tests tiles of layout "vllm" in registers (`vllm.py`) without a GPU. All threads' registers are NumPy arrays, as in
test_mosaic_gpu_narrow.py; a function here stands in for `ldmatrix`, and shared memory is a flat array.
"""

from types import SimpleNamespace
from unittest import mock

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
import pytest

from paged_jax.kernels.mosaic_gpu.device.tiles import vllm
from tests.test_mosaic_gpu_narrow import Bound, WithType, array_of, geometry_of, inline


def ldmatrix(pointer, **_):
    """Loads four matrices of 8 x 8. Lane g names row g; lane 4 * g + t gets its elements 2 * t and 2 * t + 1."""
    memory, start = pointer
    assert not (start % 8).any()  # rows are aligned to 16 bytes
    rows = memory.reshape(-1)[start[:, None] + np.arange(8)].reshape(4, 4, 8, 8)  # warp, matrix, row, element
    return rows.transpose(1, 0, 2, 3).reshape(4, 128, 2)


def operand(halves, shape, dtype):
    return array_of(halves.reshape(-1), mgpu.WGMMA_LAYOUT, shape)


def load(_, pointer, **__):
    memory, start = pointer
    return memory.reshape(-1)[start[:, None] + np.arange(8)]


def store(x, pointer, **_):
    memory, start = pointer
    memory.reshape(-1)[start[:, None] + np.arange(8)] = x


@pytest.fixture
def emulated():
    arith = SimpleNamespace(
        remui=np.mod, divui=np.floor_divide, addi=np.add, muli=np.multiply, select=np.where,
        CmpIPredicate=SimpleNamespace(sge=np.greater_equal), cmpi=lambda compare, x, y: compare(x, y),
        constant=lambda _, x: 0,
    )  # fmt: skip
    fakes = {
        "inline": inline,
        "operand": operand,
        "arith": arith,
        "llvm": SimpleNamespace(extractvalue=lambda _, x, at: x[at[0]], load=load, store=store),
        "nvvm": mock.MagicMock(ldmatrix=ldmatrix),
        "vector": SimpleNamespace(extract=lambda x, _, at: x[:, at[0]], from_elements=lambda _, xs: np.stack(xs, 1)),
        "_pointer": lambda memory, start, offset: (memory, start + offset),
        "ir": mock.MagicMock(),
    }
    thread_idx = np.arange(128, 256)
    threads = mock.patch.multiple(mgpu, thread_idx=lambda: thread_idx, c=lambda x, _: x)
    anew = SimpleNamespace(inline_asm=lambda _, __, text, *___, **____: {"mov.u32 $0, %tid.x;": thread_idx}[text])
    below = mock.patch.multiple(
        "paged_jax.kernels.mosaic_gpu.device.inline", arith=arith, ir=mock.MagicMock(), llvm=anew
    )
    with mock.patch.multiple(vllm, **fakes), below, threads:
        yield


@pytest.mark.parametrize(("block_size", "fold"), [(8, 1), (8, 4), (16, 1), (16, 2), (32, 2), (64, 1)])
@pytest.mark.parametrize(("head_size", "tile"), [(64, 128), (128, 64), (256, 64)])
@pytest.mark.usefixtures("emulated")
def test_operands(head_size, tile, block_size, fold):
    shape = {"head_size": head_size, "block_size": block_size, "num_kv_heads": fold}
    tiles = vllm.VllmTiles(geometry_of(cache_dtype="float16", layout="vllm", **shape, tile=tile, fold=fold))
    tokens = np.random.default_rng(0).normal(size=(tile // block_size, block_size, head_size)).astype(np.float16)
    keys = tokens.reshape(-1, block_size, head_size // 8, 8).swapaxes(1, 2).copy()
    values = tokens.swapaxes(1, 2).copy()
    tokens = tokens.reshape(tile, head_size)
    np.testing.assert_array_equal(tiles.keys(keys), tokens)
    np.testing.assert_array_equal(tiles.values(values), tokens.T)

    # The blocks of the folded heads alternate.
    token = np.tile(np.arange(tile // fold).reshape(-1, 1, block_size), (1, fold, 1)).reshape(-1, 1)
    for low, high in ((-3, 500), (5, 12), (9, 9), (-9, 1)):
        kept = values.copy().view(WithType)
        tiles.zero_pages(kept, *(Bound(x) for x in (low, high)))
        seen = np.where((token >= low) & (token < high), tokens, 0)
        np.testing.assert_array_equal(kept, seen.reshape(-1, block_size, head_size).swapaxes(1, 2))
