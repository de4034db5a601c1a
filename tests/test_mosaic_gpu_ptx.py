"""Tests what the Hopper kernels do in MLIR and PTX without a GPU: a warpgroup in NumPy runs it (`warpgroup.py`)."""

from dataclasses import replace
from types import SimpleNamespace

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
import pytest
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith

from paged_jax import BlockSparse
from paged_jax.kernels.mosaic_gpu.hopper import inline, lanes
from paged_jax.kernels.mosaic_gpu.mla.ptx import rows as mla_rows
from paged_jax.kernels.mosaic_gpu.mla.ptx import warps
from paged_jax.kernels.mosaic_gpu.ragged import kinds
from paged_jax.kernels.mosaic_gpu.ragged.plan import Item
from paged_jax.kernels.mosaic_gpu.ragged.ptx import ahead, blocks, items, results, rows, tiles
from tests.inputs import dtype_of
from tests.test_mosaic_gpu_ragged_plan import planned
from tests.warpgroup import SHARED, THREADS, InLayout, OfWarps

HEAD_SIZES = 64, 80, 96, 128, 256  # rows of shared memory have swizzles of 32, 64 and 128 bytes
BFLOAT16 = dtype_of("bfloat16")


def kinds_of(head_size, group=4, *, options=None, **others):
    """The wide and the thin items of a problem with 2 kv heads."""
    geometry, *_ = planned((40,), (900,), 2 * group, 2, head_size, None, options=options, **others)
    return kinds.kinds_of(geometry)


def values(rng, *shape):
    """Numbers that bfloat16 holds."""
    return rng.integers(-99, 99, shape).astype(BFLOAT16)


def swizzled(array):
    """The bytes of rows [rows, head_size] of 16 bits in shared memory, as wgmma reads its operands."""
    num_rows, head_size = array.shape
    width = np.gcd(2 * head_size, 128)
    chunks = (
        np.ascontiguousarray(array).view(np.uint8).reshape(num_rows // 8, 8, 2 * head_size // width, width // 16, 16)
    )
    placed = np.empty_like(chunks.swapaxes(1, 2))
    for i, row, column, lane in np.ndindex(chunks.shape[:-1]):
        placed[i, column, row, lane ^ (row * width // 128 % (width // 16))] = chunks[i, row, column, lane]
    return placed.reshape(-1)


def assert_swizzled(smem, wanted):
    """Compares the first rows of shared memory."""
    expected = swizzled(wanted)
    np.testing.assert_array_equal(smem.get().view(np.uint8).reshape(-1)[: expected.size], expected)


def item_of(**fields):
    return Item(**dict.fromkeys(Item._fields, np.int32(0)) | {name: np.int32(x) for name, x in fields.items()})


def test_offsets_have_64_bits(gpu):
    """A row of queries may begin more than 4 GiB after the first one."""
    rows, places = np.arange(THREADS, dtype=np.int32)[::-1] << 19, np.arange(THREADS, dtype=np.int32)
    found = gpu.empty((2 * THREADS,), np.int32)

    def store(_, found, rows, places):
        row, place = (inline.element(x.registers.item(), 0) for x in (rows, places))
        place = inline.add(inline.address(found), inline.bytes_of(place, 8))
        inline.assembly("st.global.v2.b32 [$0], {$1, $2};", "l,r,r", place, *halves(inline.bytes_of(row, 1 << 14)))

    def halves(offset):
        i32 = ir.IntegerType.get_signless(32)
        return [arith.trunci(i32, x) for x in (offset, arith.shrui(offset, inline.i64(32)))]

    gpu.call(store, [found, rows, places])
    np.testing.assert_array_equal(found.get().view(np.int64), rows.astype(np.int64) << 14)


def test_descriptions_of_items(gpu):
    fields = gpu.put(np.full((2, 20), -1, np.int32), SHARED)
    items.store_fields(fields, np.int32(1), [*np.arange(100, 117, dtype=np.int32)])
    np.testing.assert_array_equal(fields.get(), [[-1] * 20, [*range(100, 117), 0, 0, 0]])


@pytest.mark.parametrize("of_kind", [0, 1], ids=["wide", "thin"])
@pytest.mark.parametrize(("head_size", "group"), [*zip(HEAD_SIZES, (1, 3, 8, 64, 7), strict=True)])
def test_rows_of_queries_and_of_results(gpu, head_size, group, of_kind):
    kind = kinds_of(head_size, group)[of_kind]
    rng, first, kv_head, num_heads = np.random.default_rng(0), 3, 1, 2 * group
    most = kind.geometry.band_tokens
    for count in {most, max(most // 2 - 1, 1), 0, *([most + 5] if kind.is_wide else [])}:
        num_tokens = min(count, most)
        shape = first + count, num_heads, head_size
        query, found = gpu.put(values(rng, *shape)), rows.QueryRows(*map(np.int32, (first, count, kv_head)))
        query_smem = gpu.empty((64, head_size), BFLOAT16, SHARED)
        rows.load_queries(query, query_smem, found, kind)
        rows.finish_copies()
        assert gpu.is_fenced
        wanted, heads = np.zeros((64, head_size), BFLOAT16), slice(kv_head * group, kv_head * group + group)
        wanted[: num_tokens * group] = query.get()[first : first + num_tokens, heads].reshape(-1, head_size)
        some = -(-num_tokens * group // 16) * 16  # the rows of warps that have a query
        assert_swizzled(query_smem, wanted if kind.is_wide else wanted[:some])
        rows.prefetch_queries(query, found, kind)
        elements = np.arange(np.prod(shape)).reshape(shape)[first:, heads][: kind.tokens]
        read = {*(query.address + 2 * elements).reshape(-1).tolist()}
        assert {x for line in gpu.prefetched for x in range(line, line + 128, 2)} >= read
        assert {*gpu.prefetched} <= read, "other heads"
        gpu.prefetched.clear()
        if head_size % 32 == 0:
            query_smem = gpu.empty((64, head_size), BFLOAT16, SHARED)
            in_registers = InLayout(rows.read_queries(query, found, kind.geometry), mgpu.WGMMA_LAYOUT)
            divisors, divisors_smem = np.arange(64, dtype=np.float32), gpu.empty((64,), np.float32, SHARED)
            by_row = InLayout(divisors, mgpu.WGMMA_ROW_LAYOUT)
            rows.write_queries(in_registers, by_row, query_smem, divisors_smem, kind.geometry)
            assert_swizzled(query_smem, wanted)
            np.testing.assert_array_equal(divisors_smem.get(), divisors)

        out, lse = values(rng, 64, head_size), rng.standard_normal(64).astype(np.float32)
        smem = results.Results(gpu.put(swizzled(out).view(BFLOAT16), SHARED), gpu.put(lse, SHARED))
        gmem = results.Results(gpu.put(np.zeros(shape, BFLOAT16)), gpu.put(np.zeros(shape[:2], np.float32)))
        results.store_rows(smem, gmem, found, kind)
        also = results.Results(*(gpu.put(np.zeros_like(x.get())) for x in gmem))
        if head_size % 32 == 0:
            in_registers = InLayout(out, mgpu.WGMMA_LAYOUT), InLayout(lse, mgpu.WGMMA_ROW_LAYOUT)
            results.store_from_registers(*in_registers, also, found, kind.geometry)
        for stored, other, x in zip(gmem, also, (out, lse), strict=True):
            wanted = np.zeros(stored.shape, stored.dtype)
            wanted[first : first + num_tokens, heads] = x[: num_tokens * group].reshape(num_tokens, group, *x.shape[1:])
            np.testing.assert_array_equal(stored.get(), wanted)
            if head_size % 32 == 0:
                np.testing.assert_array_equal(other.get(), wanted)


@pytest.mark.parametrize(("head_size", "first_token"), [(64, 0), (80, 5), (256, 36), (64, 43)])
def test_rows_of_padding(gpu, head_size, first_token):
    problem = kinds_of(head_size, 3)[1].geometry.problem
    shape = problem.num_tokens, problem.num_heads, head_size
    gmem = results.Results(gpu.put(np.ones(shape, BFLOAT16)), gpu.put(np.ones(shape[:2], np.float32)))
    for worker in range(3):
        results.clear_rows(gmem, np.int32(first_token), np.int32(worker), 3, problem)
    for stored, value in zip(gmem, (0, -np.inf), strict=True):
        wanted = np.ones(stored.shape, stored.dtype)
        wanted[first_token:] = value
        np.testing.assert_array_equal(stored.get(), wanted)


@pytest.mark.parametrize("group", [1, 3])
def test_partial_results(gpu, group):
    kind, rng = kinds_of(64, group)[0], np.random.default_rng(0)
    out, num_tokens = rng.standard_normal((64, 64)).astype(np.float32), 5
    partial = gpu.put(np.zeros((64, 64), np.float32))
    results.store_partial(partial, InLayout(out, mgpu.WGMMA_LAYOUT), np.int32(num_tokens), kind.geometry)
    wanted = np.where(np.arange(64)[:, None] < num_tokens * group, out, 0)
    np.testing.assert_array_equal(partial.get(), wanted)


SPARSE = {"block_sparse": BlockSparse(1, 4, 64)}


@pytest.mark.parametrize("of_kind", [0, 1], ids=["wide", "thin"])
@pytest.mark.parametrize(("head_size", "options"), [*((d, None) for d in HEAD_SIZES), (128, SPARSE)])
def test_tiles_of_new_tokens(gpu, head_size, options, of_kind):
    kind, rng, kv_head = kinds_of(head_size, options=options, prefix=True)[of_kind], np.random.default_rng(0), 1
    segments = kind.tile // kind.segment_tokens
    first_rows = [np.int32(40 * i - kind.segment_tokens * i + 20) for i in range(segments)]
    new = gpu.put(values(rng, 20 + 40 * segments + kind.tile, 2, head_size))
    for begin, end in ((0, kind.tile), (7, kind.tile - 9), (12, 12), (-5, 3)):
        tile = gpu.empty((kind.tile, head_size), BFLOAT16, SHARED)
        kept = tiles.Range(np.int32(begin), np.int32(end))
        tiles.load_new(new, tile, item_of(kv_head=kv_head), first_rows, kept, kind)
        rows.finish_copies()
        row = np.arange(kind.tile)
        wanted = new.get()[np.array(first_rows)[row // kind.segment_tokens] + row, kv_head]
        assert_swizzled(tile, np.where(((row >= begin) & (row < end))[:, None], wanted, np.zeros_like(wanted)))


@pytest.mark.parametrize("of_kind", [0, 1], ids=["wide", "thin"])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_zero_rows(gpu, head_size, of_kind):
    kind = kinds_of(head_size)[of_kind]
    tile = values(np.random.default_rng(0), kind.tile, head_size) + np.array(100, BFLOAT16)
    row, first_rows = np.arange(kind.tile)[:, None], OfWarps([kind.rows_of_warp * warp for warp in range(4)])
    for begin, end in ((0, kind.tile), (7, kind.tile - 9), (12, 12), (-5, 3)):
        smem = gpu.put(swizzled(tile).view(BFLOAT16), SHARED)
        tiles.zero_rows(smem, tiles.Range(np.int32(begin), np.int32(end)), first_rows, kind)
        assert gpu.is_fenced
        assert_swizzled(smem, np.where((row >= begin) & (row < end), tile, np.zeros_like(tile)))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_rows_are_zeroed_by_who_reads_them(gpu, head_size):
    _, kind = kinds_of(head_size)
    tile = values(np.random.default_rng(0), kind.tile, head_size) + np.array(100, BFLOAT16)
    for end in (1, kind.tile // 2, kind.tile - 1, -5):
        smem = gpu.put(swizzled(tile).view(BFLOAT16), SHARED)
        tiles.zero_rows_from(smem, np.int32(end), kind)
        assert gpu.is_fenced
        assert_swizzled(smem, np.where(np.arange(kind.tile)[:, None] < end, tile, np.zeros_like(tile)))


@pytest.mark.parametrize("operand_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize(("head_size", "of_kind"), [(64, 1), (80, 0), (96, 0), (128, 1), (192, 0)])
def test_converted_rows(gpu, head_size, of_kind, cache_dtype, operand_dtype):
    options = {"k_scale": np.float32(1), "v_scale": np.float32(1)}
    others = {"prefix": operand_dtype == "bfloat16", "cache_dtype": cache_dtype, "options": options}
    others["computing_warpgroups"] = 3 if head_size == 64 else 2  # with three, some are converted by fewer chunks
    kind = kinds_of(head_size, **others)[of_kind]
    assert kind.geometry.operand_dtype == operand_dtype
    codes = np.random.default_rng(0).integers(0, 256, (kind.tile, head_size), np.uint8).view(dtype_of(cache_dtype))
    raw = np.where(np.isfinite(codes.astype(np.float32)), codes, np.zeros_like(codes))
    raw_smem = gpu.put(raw, SHARED)
    tile = gpu.empty((kind.tile, head_size), dtype_of(operand_dtype), SHARED)
    first_rows = OfWarps([kind.rows_of_warp * warp for warp in range(4)])
    tiles.convert_rows(raw_smem, tile, first_rows, kind)
    assert gpu.is_fenced == kind.is_wide
    rows.see_copies()
    assert gpu.is_fenced
    assert_swizzled(tile, raw.astype(dtype_of(operand_dtype)))
    first_words = raw_smem.address + np.repeat(first_rows.values, 32) * head_size
    zeros = np.zeros((THREADS, 4), np.uint8)
    gpu.memories[SHARED].store(first_words, zeros, np.arange(THREADS) % 32 == 7)  # later copies may overwrite the bytes


@pytest.mark.parametrize("of_kind", [0, 1], ids=["wide", "thin"])
@pytest.mark.parametrize("sparse", [{}, SPARSE], ids=["plain", "sparse"])
def test_scales_of_slots(gpu, sparse, of_kind):
    kind, rng, seq, kv_head = kinds_of(64, options=sparse)[of_kind], np.random.default_rng(0), 1, 1
    problem = kind.geometry.problem
    tables = np.full((2, problem.max_blocks_per_seq), 2**31 - 1, np.int32)
    tables[seq] = rng.permutation(problem.max_blocks_per_seq)
    scales = rng.standard_normal((problem.max_blocks_per_seq, 2, problem.block_size)).astype(np.float32)
    segments = kind.tile // kind.segment_tokens
    starts = [np.int32(192 * (i + 1) - kind.segment_tokens * i) for i in range(segments)]
    refs = gpu.put(scales), gpu.put(tables)
    row = np.arange(kind.tile)
    token = np.array(starts)[row // kind.segment_tokens] + row
    wanted = scales[tables[seq, token // problem.block_size], kv_head, token % problem.block_size]
    for begin, end in ((0, kind.tile), (7, kind.tile - 9), (12, 12)):
        found, kept = gpu.empty((kind.tile,), np.float32, SHARED), tiles.Range(np.int32(begin), np.int32(end))
        tiles.load_scales(*refs, found, item_of(seq=seq, kv_head=kv_head), starts, kept, kind)
        np.testing.assert_array_equal(found.get(), np.where((row >= begin) & (row < end), wanted, 0))


@pytest.mark.parametrize("num_runs", [1, 2, 5, 32])
def test_lanes_hold_the_blocks_of_runs(gpu, num_runs):
    gpu.lanes_may_differ = True
    tables = np.random.default_rng(0).integers(0, 2**31, (3, 200)).astype(np.int32)
    columns = [OfWarps([3 + 45 * warp + run for warp in range(4)]) for run in range(num_runs)]
    found = blocks.of_lanes(gpu.put(tables), np.int32(1), columns)
    for run, column in enumerate(columns):
        np.testing.assert_array_equal(blocks.of_run(found, run).values, np.repeat(tables[1, column.values], 32))


@pytest.mark.parametrize(("head_size", "group"), [*zip(HEAD_SIZES, (1, 5, 64, 4, 7), strict=True)])
@pytest.mark.parametrize("share", [0.1, 0.5, 1])
def test_a_softmax_is_handed_over(gpu, head_size, group, share):
    geometry, rng = kinds_of(head_size, group)[1].geometry, np.random.default_rng(0)
    num_tokens = max(int(share * geometry.band_tokens), 1)
    rows = group * num_tokens
    out, other = rng.standard_normal((2, 64, head_size), np.float32)
    rescale, other_rescale = rng.random((2, 64), np.float32)
    places = gpu.empty((3, 64, head_size), BFLOAT16, SHARED)
    results.hand_over(InLayout(other, mgpu.WGMMA_LAYOUT), places, np.int32(num_tokens), geometry)
    by_row = [InLayout(x, mgpu.WGMMA_ROW_LAYOUT) for x in (rescale, other_rescale)]
    found = results.take_over(InLayout(out, mgpu.WGMMA_LAYOUT), *by_row, places, np.int32(num_tokens), geometry)
    wanted = out * rescale[:, None] + other * other_rescale[:, None]
    np.testing.assert_allclose(found[:rows], wanted[:rows], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("layout", "block_size"), [("hnd", 16), ("hnd", 128), ("nhd", 16)])
@pytest.mark.parametrize(("first_token", "end"), [(0, 300), (128, 300), (0, 1000), (0, 1)])
def test_first_tiles_are_prefetched_up_to_the_end(gpu, layout, block_size, first_token, end):
    """All tiles of a short item, of one of many tiles the first one; nothing past the end, and of one kv head."""
    geometry = kinds_of(128, block_size=block_size)[1].geometry
    _, kind = kinds.kinds_of(replace(geometry, problem=replace(geometry.problem, layout=layout)))
    shape = (20, 2, block_size, 128) if layout == "hnd" else (20, block_size, 2, 128)
    keys, values_of = (gpu.empty(shape, np.uint16) for _ in range(2))
    table = np.random.default_rng(0).permutation(20)[None, : -(-1000 // block_size)].astype(np.int32)
    num_tiles = -(-(end - first_token) // kind.tile)
    item = ahead.Tiles(*map(np.int32, (0, 1, first_token, num_tiles, end)))
    tables_gmem = gpu.put(np.resize(table, (1, 1000 // block_size + 1)))
    for first_thread in (0, THREADS):
        gpu.first_thread = first_thread
        ahead.prefetch_tiles(keys, values_of, tables_gmem, item, kind)
    last = min(end, first_token + kind.tile * (num_tiles if num_tiles <= 4 else 1))
    expected = set()
    for token in range(first_token, last):
        block, slot = int(tables_gmem.get()[0, token // block_size]), token % block_size
        row = (2 * block + 1) * block_size + slot if layout == "hnd" else (block_size * block + slot) * 2 + 1
        expected |= {cache.address + 256 * row for cache in (keys, values_of)}
    assert expected == {at for first, size in gpu.bulk_prefetches for at in range(first, first + size, 256)}


@pytest.mark.parametrize("size", [1, 40, 200])
def test_factors_are_loaded_and_waited_for(gpu, size):
    """Each word is loaded, and none past the end. ptxas keeps the loads, because a prefetch depends on them."""
    factors = np.random.default_rng(0).integers(1, 99, size).astype(np.int32)
    gmem = gpu.put(factors)
    words = ahead.load_factors(gmem)
    expected = np.bitwise_or.reduce(np.append(factors, [0] * (-size % THREADS)).reshape(-1, THREADS)).astype(np.int32)
    np.testing.assert_array_equal(words, expected)
    ahead.wait_for_factors(words, gmem)
    assert gpu.prefetched == [gmem.address] * np.count_nonzero(expected)


def test_lanes_of_a_warp(gpu):
    numbers = np.tile(np.random.default_rng(0).integers(-9, 99, 32), 4).astype(np.int32)
    assert warps.lane_numbers().tolist() == [*range(32)] * 4
    np.testing.assert_array_equal(warps.sums_to_here(numbers), np.tile(np.cumsum(numbers[:32]), 4))
    assert (warps.total(numbers), warps.largest(numbers)) == (numbers[:32].sum(), numbers.max())
    values = np.arange(100, 120, dtype=np.int32)
    found = warps.gather(gpu.put(values), np.tile(np.arange(32), 4).astype(np.int32), 19)
    np.testing.assert_array_equal(found, np.tile(values[np.minimum(np.arange(32), 19)], 4))


def test_rows_of_latent_attention(gpu, monkeypatch):
    monkeypatch.setattr(mla_rows.plgpu, "commit_smem", lambda: None)
    rng, lse = np.random.default_rng(0), np.arange(64, dtype=np.float32)
    lse_gmem, partial = gpu.put(np.zeros(100, np.float32)), gpu.put(np.zeros((64, 128), np.float32))
    mla_rows.store_lse(gpu.put(lse, SHARED), lse_gmem, np.int32(7), np.int32(20))
    np.testing.assert_array_equal(lse_gmem.get(), [*[0] * 7, *lse[:20], *[0] * 73])
    out = rng.standard_normal((64, 32)).astype(np.float32)
    geometry = SimpleNamespace(problem=SimpleNamespace(head_size=128))
    mla_rows.store_partial(partial, InLayout(out, mgpu.WGMMA_LAYOUT), 32, np.int32(24), geometry)
    wanted = np.zeros((64, 128), np.float32)
    wanted[:24, 32:64] = out[:24]
    np.testing.assert_array_equal(partial.get(), as_stored(wanted))


def as_stored(partial):
    """A partial result [..., 64, columns] of latent attention in the order in which lanes store its elements."""
    *outer, _, columns = partial.shape
    split = partial.reshape(*outer, 8, 8, columns // 16, 2, 4, 2)  # of 8 rows, row; of 16 columns, half, lane, element
    axes = len(outer)
    order = [*range(axes), *(axes + i for i in (0, 2, 1, 4, 3, 5))]
    return split.transpose(order).reshape(partial.shape)


def test_scalars_in_rows(gpu):
    np.testing.assert_array_equal(lanes.in_each_lane(np.float32(-1.7)), np.full(64, -1.7, np.float32))
    unused = gpu.put(np.array([7], np.float32), SHARED)
    lanes.settle(InLayout(np.arange(64, dtype=np.float32), mgpu.WGMMA_ROW_LAYOUT), unused)
    assert unused.get().item() == 7
