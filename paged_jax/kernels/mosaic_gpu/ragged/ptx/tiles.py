"""The loading warpgroup's work on tiles, except copies by TMA, in PTX.

Rows of a tile have the layout of `rows.py`. All threads of the warpgroup take part in each function, except in
`zero_rows` and `convert_rows`, which one warp calls.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from paged_jax.kernels.mosaic_gpu.hopper.convert import CONVERT
from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    as_i32,
    as_i64,
    assembly,
    bytes_of,
    div,
    i32,
    i64,
    inline,
    less,
    mul,
    rem,
    thread_index_read_again,
    within,
)
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.plan import Item
from paged_jax.kernels.mosaic_gpu.ragged.ptx.rows import (
    CHUNK,
    Chunk,
    chunks_of_thread,
    copy_chunk,
    operand_transforms,
    swizzled_offset,
)
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref
from paged_jax.kernels.problem import Problem

# Chunks that a lane converts together, so that their loads overlap. There are fewer beside three computing warpgroups,
# if a warp has several runs: a lane's registers would not suffice for the addresses of these, too.
_CHUNKS_AT_ONCE = 8
_CHUNKS_AT_ONCE_OF_SEVERAL_RUNS = 4


class Range(NamedTuple):
    """The rows begin <= row < end of a tile."""

    begin: Scalar
    end: Scalar


def load_new(
    new_gmem: Ref, tile_smem: Ref, item: Item, first_rows: Sequence[Scalar], kept: Range, kind: ItemKind
) -> None:
    """Starts the copies of new tokens' keys or values to a tile; rows that are not `kept` become 0.

    Row r of the tile, in segment s, is row `first_rows[s]` + r of the array. The products see the tile after
    `finish_copies` and a barrier.
    """
    problem = kind.geometry.problem
    row_bytes = 2 * problem.head_size

    @inline(plgpu.RefType(), plgpu.RefType(operand_transforms(problem)), *[SCALAR] * (len(first_rows) + 3))
    def load(_, new_gmem, tile_smem, *scalars):
        *first_rows, begin, end, kv_head = (x.registers.item() for x in scalars)
        gmem, smem = address(new_gmem), address(tile_smem)
        for _, row, column in chunks_of_thread(kind.tile, row_bytes // CHUNK):
            exists = within(row, begin, end)
            first_row = _of_segment(first_rows, row, kind)
            index = add(mul(add(first_row, row), problem.num_kv_heads), kv_head)
            offset = arith.addi(bytes_of(index, row_bytes), bytes_of(column, CHUNK))
            copy_chunk(smem, gmem, Chunk(exists, offset, swizzled_offset(row, column, problem)))

    load(new_gmem, tile_smem, *first_rows, *kept, item.kv_head)


def _of_segment(values: Sequence[Any], row, kind: ItemKind):
    """Selects the value of the segment that contains the row."""
    value = values[0]
    for i, following in enumerate(values[1:], 1):
        value = arith.select(less(row, i32(i * kind.segment_tokens)), value, following)
    return value


def zero_rows(tile_smem: Ref, kept: Range, first_row: Scalar, kind: ItemKind) -> None:
    """Zeroes a warp's rows that are not `kept`; a lane zeroes a row. The products see the zeros after a barrier."""
    problem = kind.geometry.problem

    @inline(plgpu.RefType(operand_transforms(problem)), SCALAR, SCALAR, SCALAR)
    def zero(_, tile_smem, begin, end, first_row):
        lane = rem(thread_index_read_again(), WARP)
        row = add(first_row.registers.item(), lane)
        is_kept = within(row, begin.registers.item(), end.registers.item())
        is_others = arith.cmpi(arith.CmpIPredicate.uge, lane, i32(kind.rows_of_warp))
        _zero_row(tile_smem, row, arith.ori(is_kept, is_others), problem)

    zero(tile_smem, *kept, first_row)


def zero_rows_from(tile_smem: Ref, end: Scalar, kind: ItemKind) -> None:
    """Zeroes the rows of a tile from `end` on; a thread zeroes a row. This warpgroup's next product sees the zeros."""
    problem = kind.geometry.problem

    @inline(plgpu.RefType(operand_transforms(problem)), SCALAR)
    def zero(_, tile_smem, end):
        row = thread_index_read_again()
        is_others = arith.cmpi(arith.CmpIPredicate.uge, row, i32(kind.tile))
        _zero_row(tile_smem, row, arith.ori(less(row, end.registers.item()), is_others), problem)
        mgpu.warpgroup_barrier()

    zero(tile_smem, end)


def _zero_row(tile_smem, row, stays, problem: Problem) -> None:
    """Zeroes a row of a tile, unless it stays as it is."""
    smem, stays = address(tile_smem), as_i32(stays)
    for column in range(2 * problem.head_size // CHUNK):
        assembly(
            "{ .reg .pred stays; setp.ne.b32 stays, $0, 0; @!stays st.shared.v4.b32 [$1], {$2, $2, $2, $2}; }",
            "r,r,r",
            stays,
            add(smem, swizzled_offset(row, i32(column), problem)),
            i32(0),
        )
    assembly("fence.proxy.async.shared::cta;", "")


def convert_rows(raw_smem: Ref, tile_smem: Ref, first_row: Scalar, kind: ItemKind) -> None:
    """Converts a warp's rows of a tile from 8 to 16 bits, exactly. A lane converts 8 bytes to 16 at a time.

    Products see a wide item's rows after a barrier, and a thin one's after a barrier and `see_copies`: the loading
    warps bound thin items, the computing ones wide items (benchmarks/LOG.md, "Ragged attention over 8 bits on Hopper").
    """
    problem = kind.geometry.problem
    row_bytes = 2 * problem.head_size
    chunks_per_row, step = row_bytes // CHUNK, WARP * CHUNK
    # The swizzle repeats every 8 rows. So if two chunks of a lane are `period` apart, their offsets differ by a
    # constant.
    period = math.lcm(8 * row_bytes, step) // step
    has_several_runs = kind.geometry.lanes_hold_blocks and kind.runs_of_warp > 1
    at_once = _CHUNKS_AT_ONCE_OF_SEVERAL_RUNS if has_several_runs else _CHUNKS_AT_ONCE
    batches = list(itertools.batched(range(kind.rows_of_warp * chunks_per_row // WARP), at_once))

    @inline(plgpu.RefType(), plgpu.RefType(operand_transforms(problem)), SCALAR)
    def convert(_, raw_smem, tile_smem, first_row):
        lane, first_row = rem(thread_index_read_again(), WARP), first_row.registers.item()
        first_raw = add(address(raw_smem), add(mul(first_row, row_bytes // 2), mul(lane, CHUNK // 2)))

        def place_in_tile(i: int):
            chunk = add(lane, i32(WARP * i))
            row = add(first_row, div(chunk, chunks_per_row))
            return add(address(tile_smem), swizzled_offset(row, rem(chunk, chunks_per_row), problem))

        for batch in batches:
            places = [place_in_tile(i) for i in sorted({i % period for i in batch})]
            assembly(_conversion(batch, period, kind.geometry), ",".join("r" * (len(places) + 1)), *places, first_raw)
        if kind.is_wide:
            assembly("fence.proxy.async.shared::cta;", "")
        mgpu.utils.warp_barrier()  # later copies may overwrite what other lanes have read

    convert(raw_smem, tile_smem, first_row)


def _conversion(chunks: Sequence[int], period: int, geometry: Geometry) -> str:
    """PTX that converts these chunks of a lane.

    It loads the bytes of all chunks before it stores the first result. Otherwise each chunk would wait for the previous
    one, because ptxas cannot know that stores do not alias later loads (benchmarks/LOG.md, "Between
    items").

    The operands are addresses in shared memory: one destination for each residue of these chunks modulo `period`, and
    then the source of the lane's first raw chunk.
    """
    firsts = sorted({chunk % period for chunk in chunks})
    code = f"{{ .reg .b32 in<{2 * len(chunks)}>, out<4>;"
    for i, chunk in enumerate(chunks):
        code += f"ld.shared.v2.b32 {{in{2 * i}, in{2 * i + 1}}}, [${len(firsts)} + {WARP * CHUNK // 2 * chunk}];"
    for i, chunk in enumerate(chunks):
        for half in range(2):
            names = {"$0": f"out{2 * half}", "$1": f"out{2 * half + 1}", "$2": f"in{2 * i + half}"}
            four_bytes = CONVERT[geometry.problem.cache_dtype]
            for old, new in names.items():
                four_bytes = four_bytes.replace(old, new)
            code += four_bytes
        if geometry.operand_dtype == "bfloat16":
            for word in range(4):
                code += f"""{{ .reg .b16 low, high; .reg .f32 first, second; mov.b32 {{low, high}}, out{word};
                cvt.f32.f16 first, low; cvt.f32.f16 second, high; cvt.rn.bf16x2.f32 out{word}, second, first; }}"""
        place = f"${firsts.index(chunk % period)} + {WARP * CHUNK * (chunk // period * period)}"
        code += f"st.shared.v4.b32 [{place}], {{out0, out1, out2, out3}};"
    return code + "}"


def load_scales(
    scale_gmem: Ref,
    tables_gmem: Ref,
    scales_smem: Ref,
    item: Item,
    starts: Sequence[Scalar],
    kept: Range,
    kind: ItemKind,
) -> None:
    """Copies the scales of a tile's slots, [tile], one for each thread; scales of rows that are not `kept` become 0.

    Segment s of the tile begins at token `starts[s]`. Other threads see the scales after a barrier.
    """
    problem = kind.geometry.problem
    size = 4 * problem.num_kv_heads * problem.block_size  # bytes of a block's scales

    @inline(*[plgpu.RefType()] * 3, *[SCALAR] * (len(starts) + 4))
    def load(_, scale_gmem, tables_gmem, scales_smem, *scalars):
        seq, kv_head, *starts, begin, end = (x.registers.item() for x in scalars)
        row = thread_index_read_again()
        is_kept = within(row, begin, end)
        token = arith.select(is_kept, add(_of_segment(starts, row, kind), row), i32(0))
        row_of_table = arith.muli(as_i64(seq), i64(problem.max_blocks_per_seq))
        entry = arith.addi(row_of_table, as_i64(div(token, problem.block_size)))
        slot = add(mul(kv_head, problem.block_size), rem(token, problem.block_size))
        assembly(
            f"""{{ .reg .pred kept, own; .reg .b32 block; .reg .b64 at; .reg .f32 scale; mov.f32 scale, 0f00000000;
            setp.ne.b32 kept, $0, 0; setp.lt.u32 own, $1, {kind.tile}; and.pred kept, kept, own;
            @kept ld.global.b32 block, [$2]; @kept mad.wide.s32 at, block, {size}, $3;
            @kept ld.global.f32 scale, [at]; @own st.shared.f32 [$4], scale; }}""",
            "r,r,l,l,r",
            as_i32(is_kept),
            row,
            add(address(tables_gmem), arith.muli(entry, i64(4))),
            add(address(scale_gmem), bytes_of(slot, 4)),
            add(address(scales_smem), mul(row, 4)),
        )

    load(scale_gmem, tables_gmem, scales_smem, item.seq, item.kv_head, *starts, *kept)
