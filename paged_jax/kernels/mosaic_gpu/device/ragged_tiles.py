"""Device code of tiles below what Pallas has words for: what the loading warpgroup does beside copies by TMA.

Rows of a tile lie as `ragged_rows.py` has them.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from paged_jax.kernels.mosaic_gpu.device.inline import inline
from paged_jax.kernels.mosaic_gpu.device.ragged_rows import address, assembly, i32, i64, place_of, thread, wide, word
from paged_jax.kernels.mosaic_gpu.device.tiles.eight_bit import CONVERT
from paged_jax.kernels.mosaic_gpu.device.tiles.plain import transforms
from paged_jax.kernels.mosaic_gpu.ragged_tuning import Config, Line

_SCALAR = plgpu.Layout.WG_SPLAT(())


def load_new(new_gmem, tile_smem, first_row, low, high, kv_head, line: Line, cfg: Config) -> None:
    """Starts to copy rows of new tokens' keys or values to a tile; 0 in rows that are not low <= row < high.

    The first row of the tile is `first_row` of the array. The products see it after `finish_copies` and a barrier.
    """
    problem = cfg.problem
    d = problem.head_size
    layout = transforms(d, problem.query_dtype)

    @inline(plgpu.RefType(), plgpu.RefType(layout), *[_SCALAR] * 4)
    def body(_, new_gmem, tile_smem, *scalars):
        first_row, low, high, kv_head = (x.registers.item() for x in scalars)
        gmem, smem, of_row, first = address(new_gmem), address(tile_smem), d // 8, thread()
        for i in range(line.tile * of_row // 128):
            chunk = arith.addi(first, i32(128 * i))
            row, column = arith.divui(chunk, i32(of_row)), arith.remui(chunk, i32(of_row))
            seen = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, row, low), arith.cmpi(arith.CmpIPredicate.slt, row, high)
            )
            index = arith.addi(arith.muli(arith.addi(first_row, row), i32(problem.num_kv_heads)), kv_head)
            offset = arith.addi(arith.muli(wide(index), i64(2 * d)), arith.muli(wide(column), i64(16)))
            assembly(
                "cp.async.cg.shared.global [$0], [$1], 16, $2;",
                "r,l,r",
                0,
                arith.addi(smem, place_of(row, column, d, layout[1].swizzle)),
                arith.addi(gmem, arith.select(seen, offset, i64(0))),
                arith.select(seen, i32(16), i32(0)),
            )

    body(new_gmem, tile_smem, first_row, low, high, kv_head)


def zero_tokens(v_smem, low, high, line: Line, cfg: Config) -> None:
    """Zeroes the rows of a tile whose tokens are not low <= token < high; the products see it after a barrier."""
    d = cfg.problem.head_size
    layout = transforms(d, cfg.problem.query_dtype)
    swizzle = layout[1].swizzle
    columns = 2 * d // swizzle

    @inline(plgpu.RefType(layout), _SCALAR, _SCALAR)
    def body(_, v_smem, low, high):
        smem, low, high = address(v_smem), low.registers.item(), high.registers.item()
        lanes = swizzle // 16  # of a row of a column of tiles
        first = thread()
        for i in range(line.tile * lanes // 128):
            chunk = arith.addi(first, i32(128 * i))
            row = arith.divui(chunk, i32(lanes))
            seen = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, row, low), arith.cmpi(arith.CmpIPredicate.slt, row, high)
            )
            # Of each 8 rows, all columns of tiles lie one after the other.
            place = arith.addi(
                arith.muli(arith.divui(row, i32(8)), i32(8 * swizzle * columns)),
                arith.muli(arith.remui(chunk, i32(8 * lanes)), i32(16)),
            )
            for column in range(columns):
                assembly(
                    """{ .reg .pred seen; setp.ne.b32 seen, $0, 0;
                    @!seen st.shared.v4.b32 [$1], {$2, $2, $2, $2}; }""",
                    "r,r,r",
                    0,
                    word(seen),
                    arith.addi(smem, arith.addi(place, i32(8 * swizzle * column))),
                    i32(0),
                )
        assembly("fence.proxy.async.shared::cta;", "", 0)

    body(v_smem, low, high)


def convert_tile(raw_smem, tile_smem, low, high, line: Line, cfg: Config) -> None:
    """Converts a tile of 8 bits to the query's dtype, exactly; tokens that are not low <= token < high become zeros.

    A thread makes 16 bytes of 8 at a time. The products see the tile after a barrier.
    """
    problem = cfg.problem
    d = problem.head_size
    layout = transforms(d, problem.query_dtype)

    @inline(plgpu.RefType(), plgpu.RefType(layout), _SCALAR, _SCALAR)
    def body(_, raw_smem, tile_smem, low, high):
        raw, smem, low, high = address(raw_smem), address(tile_smem), low.registers.item(), high.registers.item()
        of_row, first = d // 8, thread()
        for i in range(line.tile * of_row // 128):
            chunk = arith.addi(first, i32(128 * i))
            row, column = arith.divui(chunk, i32(of_row)), arith.remui(chunk, i32(of_row))
            seen = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, row, low), arith.cmpi(arith.CmpIPredicate.slt, row, high)
            )
            place = arith.addi(smem, place_of(row, column, d, layout[1].swizzle))
            assembly(_conversion(problem), "r,r,r", 0, place, arith.addi(raw, arith.muli(chunk, i32(8))), word(seen))
        assembly("fence.proxy.async.shared::cta;", "", 0)

    body(raw_smem, tile_smem, low, high)


def _conversion(problem) -> str:
    """Assembly that converts 8 bytes at $1 to 16 at $0, or to zeros where $2 is 0."""
    code = "{ .reg .pred seen; .reg .b32 in<2>, out<4>; ld.shared.v2.b32 {in0, in1}, [$1]; setp.ne.b32 seen, $2, 0;"
    for i in range(2):
        names = {"$0": f"out{2 * i}", "$1": f"out{2 * i + 1}", "$2": f"in{i}"}
        part = CONVERT[problem.cache_dtype]
        for old, new in names.items():
            part = part.replace(old, new)
        code += part
    if problem.query_dtype == "bfloat16":
        for i in range(4):
            code += f"""{{ .reg .b16 low, high; .reg .f32 first, second; mov.b32 {{low, high}}, out{i};
            cvt.f32.f16 first, low; cvt.f32.f16 second, high; cvt.rn.bf16x2.f32 out{i}, second, first; }}"""
    code += "".join(f"selp.b32 out{i}, out{i}, 0, seen;" for i in range(4))
    return code + "st.shared.v4.b32 [$0], {out0, out1, out2, out3}; }"


def load_scales(scale_gmem, tables_gmem, scales_smem, seq, kv_head, start, low, high, line: Line, cfg: Config) -> None:
    """Copies the scales of a tile's slots, [tile], its first token at `start`; 0 unless low <= token < high.

    A thread copies one. Others see them after a barrier.
    """
    problem = cfg.problem
    size = 4 * problem.num_kv_heads * problem.block_size  # bytes of a block's scales

    @inline(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), *[_SCALAR] * 5)
    def body(_, scale_gmem, tables_gmem, scales_smem, *scalars):
        seq, kv_head, start, low, high = (x.registers.item() for x in scalars)
        row = thread()
        seen = arith.andi(arith.cmpi(arith.CmpIPredicate.sge, row, low), arith.cmpi(arith.CmpIPredicate.slt, row, high))
        token = arith.select(seen, arith.addi(start, row), i32(0))
        entry = arith.addi(
            arith.muli(wide(seq), i64(problem.max_blocks_per_seq)), wide(arith.divui(token, i32(problem.block_size)))
        )
        of_block = arith.addi(arith.muli(kv_head, i32(problem.block_size)), arith.remui(token, i32(problem.block_size)))
        assembly(
            f"""{{ .reg .pred seen, own; .reg .b32 block; .reg .b64 at; .reg .f32 scale; mov.f32 scale, 0f00000000;
            setp.ne.b32 seen, $0, 0; setp.lt.u32 own, $1, {line.tile}; and.pred seen, seen, own;
            @seen ld.global.b32 block, [$2]; @seen mad.wide.s32 at, block, {size}, $3;
            @seen ld.global.f32 scale, [at]; @own st.shared.f32 [$4], scale; }}""",
            "r,r,l,l,r",
            0,
            word(seen),
            row,
            arith.addi(address(tables_gmem), arith.muli(entry, i64(4))),
            arith.addi(address(scale_gmem), arith.muli(wide(of_block), i64(4))),
            arith.addi(address(scales_smem), arith.muli(row, i32(4))),
        )

    body(scale_gmem, tables_gmem, scales_smem, seq, kv_head, start, low, high)
