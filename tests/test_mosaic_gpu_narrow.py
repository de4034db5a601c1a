"""Tests 8-bit tiles in registers (`eight_bit.py`, `converted.py`) without a GPU.

A register of all threads is an array [128, elements]. Mosaic's layouts say which elements of an array each thread has.
NumPy interprets the assembly.
"""

import re
from types import SimpleNamespace
from unittest import mock

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.tiles import converted, eight_bit, slot_scales
from paged_jax.kernels.mosaic_gpu.decode.tuning import Tuning
from paged_jax.kernels.problem import Granularity, Problem
from paged_jax.options import PerHead
from tests.inputs import dtype_of


def elements(layout, shape):
    """Flat indices of the elements of an array in each thread's registers: [registers ..., 128 threads, vector]."""
    tiled = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        start = tiled.ndim - len(tile)
        split = [x for size, t in zip(tiled.shape[start:], tile, strict=True) for x in (size // t, t)]
        order = [*range(start), *range(start, start + len(split), 2), *range(start + 1, start + len(split), 2)]
        tiled = tiled.reshape(*tiled.shape[:start], *split).transpose(order)
    threads = [tiled.ndim + d for d in (*layout.warp_dims, *layout.lane_dims)]
    vector = tiled.ndim + layout.vector_dim
    registers = [d for d in range(tiled.ndim) if d not in (*threads, vector)]
    tiled = tiled.transpose(*registers, *threads, vector)
    return tiled.reshape(*tiled.shape[: len(registers)], 128, -1)


def registers_of(array, layout):
    """An array of objects, one for each register: the register's elements as an array [128 threads, vector]."""
    found = array.reshape(-1)[elements(layout, array.shape)]
    registers = np.empty(found.shape[:-2], object)
    for i in np.ndindex(registers.shape):
        registers[i] = found[i]
    return registers.reshape(-1)


def array_of(registers, layout, shape):
    at = elements(layout, shape)
    values = np.stack(list(registers.reshape(-1))).reshape(at.shape)
    result = np.zeros(shape, values.dtype)
    result.reshape(-1)[at] = values
    return result


def run(code, results, *operands):
    """Interprets assembly; an operand is an array of 128 words, one for each thread."""
    words = {f"${results + i}": x for i, x in enumerate(operands)}

    def value(name):
        return words[name] if name in words else np.full(128, int(name, 0), np.uint32)

    def halves(x):
        return np.ascontiguousarray(x.astype(np.uint32)).view(np.float16)

    for line in re.sub(r"\s+", " ", code.strip(" {}")).split(";"):
        op, _, rest = line.strip().partition(" ")
        if not op or op == ".reg":
            continue
        if "{low, high}" in rest:
            x = value(rest.rpartition(" ")[2])
            words["low"], words["high"] = x & 0xFFFF, x >> 16
            continue
        to, *names = (x.strip() for x in rest.split(","))
        args = [value(name) for name in names]
        if op == "mov.b32":
            words[to] = args[0]
        elif op == "xor.b32":
            words[to] = args[0] ^ args[1]
        elif op == "prmt.b32":
            both = np.stack(args[:2], 1).astype("<u4").view(np.uint8)
            chosen = [both[:, int(names[2], 0) >> 4 * i & 7] for i in range(4)]
            words[to] = np.stack(chosen, 1).copy().view("<u4")[:, 0]
        elif op == "sub.f16x2":
            words[to] = (halves(args[0]) - halves(args[1])).view(np.uint32)
        elif op == "cvt.rn.f16x2.e4m3x2":
            pair = np.stack([args[0] & 0xFF, args[0] >> 8], 1).astype(np.uint8)
            words[to] = pair.view(dtype_of("float8_e4m3fn")).astype(np.float16).view(np.uint32)[:, 0]
        else:
            raise AssertionError(op)
    outs = [words[f"${i}"] for i in range(results)]
    return outs[0] if results == 1 else outs


class Stored(SimpleNamespace):
    """Stands in for a fragmented array that is only stored."""

    def store_untiled(self, ref, optimized):
        ref[...] = array_of(self.registers, self.layout, self.shape)

    def store_tiled(self, ref, swizzle, optimized=True):
        self.store_untiled(ref, optimized)


class WithType(np.ndarray):
    type = None


class Bound(SimpleNamespace):
    """Stands in for a scalar fragmented array from which the first token of some rows can be subtracted."""

    def __init__(self, x):
        super().__init__(registers=np.array(x))

    def __sub__(self, start):
        return Bound(self.registers - start)


def load(tile, layout, geometry):
    words = registers_of(tile.view(np.uint8), layout)
    wide = [np.pad(x, ((0, 0), (0, 4 - x.shape[1]))).copy().view("<u4")[:, 0] for x in words]
    result = np.empty(len(wide), object)
    result[:] = wide
    return result


def operand(halves, shape, _):
    pairs = np.empty(halves.size, object)
    pairs[:] = [np.ascontiguousarray(x.astype(np.uint32)).view(np.float16).reshape(128, 2) for x in halves.flat]
    return array_of(pairs, mgpu.WGMMA_LAYOUT, shape)


def inline(*_, **__):
    return lambda body: lambda *args: body(None, *args)


@pytest.fixture
def emulated():
    fakes = {
        "_load": load,
        "on_words": run,
        "operand": operand,
        "inline": inline,
        "array": lambda registers, layout, shape, _=None: Stored(registers=registers, layout=layout, shape=shape),
        "vector": SimpleNamespace(
            extract=lambda x, _, at: x[:, at[0]],
            from_elements=lambda _, values: np.stack(values, 1),
            broadcast=lambda _, x: (x if x.dtype == np.float32 else x.astype("<u4"))[:, None],
            bitcast=lambda _, x: x.view(np.uint8),
        ),
        "arith": SimpleNamespace(
            remui=np.mod, divui=np.floor_divide, addi=np.add, muli=np.multiply, select=np.where,
            CmpIPredicate=SimpleNamespace(sge=np.greater_equal),
            cmpi=lambda compare, x, y: compare(x, y), index_cast=lambda _, x: x,
        ),
        "ir": mock.MagicMock(),
    }  # fmt: skip
    memref = SimpleNamespace(load=lambda ref, at: ref[tuple(at)])
    of_scales = {name: fakes[name] for name in ("inline", "array", "vector", "arith", "ir")}
    of_all = {name: fakes[name] for name in ("on_words", "inline", "array", "vector", "ir")}
    threads = mock.patch.multiple(mgpu, thread_idx=lambda: np.arange(128, 256), c=lambda x, _: x)
    below = mock.patch.multiple(
        "paged_jax.kernels.mosaic_gpu.hopper.inline", arith=fakes.pop("arith"), ir=mock.MagicMock()
    )
    scales = mock.patch.multiple(slot_scales, memref=memref, **of_scales)
    both = mock.patch.multiple(converted, **of_all)
    with mock.patch.multiple(eight_bit, **fakes), both, below, scales, threads:
        yield


def geometry_of(*, cache_dtype, head_size, block_size=16, layout="hnd", num_heads=8, num_kv_heads=1, **chosen):
    """The geometry of a small problem with queries in float16."""
    problem = Problem(
        num_kv_heads=num_kv_heads, head_size=head_size, block_size=block_size, layout=layout, cache_dtype=cache_dtype,
        k_scale=Granularity.NONE, v_scale=Granularity.NONE, num_heads=num_heads, query_dtype="float16",
        per_head=PerHead(), sliding_window=None, logits_soft_cap=None, block_sparse=None, causal=True,
        num_seqs=1, num_tokens=1, num_blocks=9, max_blocks_per_seq=8, max_seq_len=128, max_query_len=1,
    )  # fmt: skip
    return Geometry(problem, Tuning(**chosen))


@pytest.mark.parametrize("columns", [8, 16])
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("head_size", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.usefixtures("emulated")
def test_products(dtype, head_size, tile, columns):
    geometry = geometry_of(cache_dtype=dtype, head_size=head_size, num_heads=columns, tile=tile)
    tiles = eight_bit.EightBitTiles(geometry)
    assert geometry.columns == columns
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (tile, head_size), np.uint8).view(dtype_of(dtype))
    cache = np.where(np.isfinite(codes.astype(np.float32)), codes, np.zeros_like(codes))
    exact = cache.astype(np.float16)

    query = rng.integers(-9, 9, (head_size, columns)).astype(np.float16)
    stored = np.zeros((columns, head_size), np.float16)
    of_query = SimpleNamespace(registers=registers_of(query, mgpu.WGMMA_LAYOUT), mlir_dtype=None, dtype=jnp.float16)
    of_query.shape = query.shape
    tiles.store_query(stored, of_query)
    np.testing.assert_array_equal(tiles.keys(cache).astype(np.float64) @ stored.T, exact.astype(np.float64) @ query)

    weights = rng.integers(0, 9, (tile, columns)).astype(np.float64)
    product = tiles.values(cache).astype(np.float64) @ weights
    of_product = SimpleNamespace(registers=registers_of(product, mgpu.WGMMA_LAYOUT), mlir_dtype=None)
    of_product.shape = product.shape
    out = np.zeros((head_size, columns))
    transposed = np.zeros((columns, head_size))
    tiles.store_partial_out(out, of_product, 0)
    tiles.store_out(transposed, of_product)
    np.testing.assert_array_equal(out, exact.astype(np.float64).T @ weights)
    np.testing.assert_array_equal(transposed, out.T)


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.usefixtures("emulated")
def test_zero_rows(head_size):
    rows = np.random.default_rng(0).integers(1, 256, (64, head_size)).astype(np.uint8)
    for low, high in ((-3, 70), (5, 40), (9, 9), (-9, 1)):
        for fold, run in ((1, 8), (2, 16), (2, 32), (4, 16)):
            geometry = geometry_of(
                cache_dtype="int8", head_size=head_size, block_size=run, num_kv_heads=fold, fold=fold
            )
            token = np.tile(np.arange(64 // fold).reshape(-1, 1, run), (1, fold, 1)).reshape(-1, 1)
            for start in (0, 64 // fold):  # the first and the second half of a tile of 128 rows
                rows_smem, bounds = rows.copy().view(WithType), (Bound(low + start // 2), Bound(high + start // 2))
                eight_bit.EightBitTiles(geometry).zero_rows(rows_smem, start, *bounds)
                seen = (token + start >= low + start // 2) & (token + start < high + start // 2)
                np.testing.assert_array_equal(rows_smem, np.where(seen, rows, 0))


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("run", [8, 16, 32, 64])
@pytest.mark.usefixtures("emulated")
def test_token_scales(run, tile):
    scales = np.full((tile // run, max(run, 32)), np.nan, np.float32)
    scales[:, :run] = np.arange(tile).reshape(-1, run)
    geometry = geometry_of(cache_dtype="int8", head_size=64, block_size=run, tile=tile)
    found = eight_bit.EightBitTiles(geometry).slot_scales(scales)
    at = row_elements(tile)
    np.testing.assert_array_equal(np.stack(list(found.registers.reshape(-1))).reshape(at.shape), at)


def row_elements(tile):
    """The rows of a product in each thread's registers, [registers, 128 threads, 1]."""
    rows = elements(mgpu.WGMMA_LAYOUT, (tile, 8)).reshape(tile // 64, 2, 128, 2)[..., :1]
    return rows // 8
