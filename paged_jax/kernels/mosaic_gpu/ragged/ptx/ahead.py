"""Prefetches into L2 by the computing warpgroups, before the loading one asks for anything.

They also load factors into L1: a load that follows the copies of the first tiles would wait for these.
"""

import math
from typing import NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array
from jaxlib.mlir.dialects import arith, llvm

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    as_i32,
    as_i64,
    assembly,
    bytes_of,
    div,
    element,
    i32,
    i64,
    inline,
    less,
    mul,
    rem,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths, Ref
from paged_jax.kernels.mosaic_gpu.hopper.threads import LAYOUT, of_threads
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind

_LINE = 128  # bytes that a prefetch brings
# Of the first two computing warpgroups. A third one asks again for what the next program's first one asks for.
_WARPS = 2 * WARPGROUP // WARP


class Tiles(NamedTuple):
    """Neighbouring tiles of K and V."""

    seq: Scalar
    kv_head: Scalar
    first_token: Scalar
    num_tiles: Scalar
    end: Scalar  # later tokens have no block


def prefetch_queries(query_gmem: Ref, starts_gmem: Ref, program: Scalar) -> None:
    """Prefetches the first queries into L2, a line in each computing thread of all programs.

    The queries would arrive late if they were asked for after the first tiles of all programs.
    """
    num_rows, *sizes = query_gmem.shape
    lines, last = -(-2 * math.prod(sizes) // _LINE), starts_gmem.shape[0] - 1

    @inline(plgpu.RefType(), plgpu.RefType(), SCALAR)
    def prefetch(_, query_gmem, starts_gmem, program):
        number = add(mul(program.registers.item(), 2 * WARPGROUP), mgpu.thread_idx())
        code = """{ .reg .pred used; .reg .b32 end; setp.lt.s32 used, $0, $1; mov.b32 end, 0;
        @used ld.global.b32 end, [$2]; setp.lt.and.s32 used, $0, end, used; @used prefetch.global.L2 [$3]; }"""
        end = add(address(starts_gmem), i64(4 * last))
        place = add(address(query_gmem), bytes_of(number, _LINE))
        assembly(code, "r,r,l,l", div(number, lines), i32(num_rows), end, place)

    prefetch(query_gmem, starts_gmem, program)


def load_factors(factors_gmem: Ref) -> Array:
    """Loads factors into L1, a word in each computing thread; returns what `wait_for_factors` waits for.

    A load that follows the copies of the first tiles returns only when these have arrived, unless L1 has its words.
    """
    (size,) = factors_gmem.shape

    @inline(plgpu.RefType(), returns=(WARPGROUP,), dtype="int32", layout=LAYOUT)
    def load(_, factors_gmem):
        at, words = address(factors_gmem), i32(0)
        for first in range(0, size, WARPGROUP):
            number = add(thread_index_read_again(), i32(first))
            code = """{ .reg .pred exists; setp.lt.s32 exists, $1, $2; mov.b32 $0, 0;
            @exists ld.global.b32 $0, [$3]; }"""
            operands = number, i32(size), add(at, bytes_of(number, 4))
            word = llvm.inline_asm(words.type, operands, code, "=&r,r,r,l,~{memory}", has_side_effects=True)
            words = arith.ori(words, word)
        return of_threads(words)

    return load(factors_gmem)


def wait_for_factors(words: Array, factors_gmem: Ref) -> None:
    """Waits for what `load_factors` has loaded: ptxas leaves out loads whose result decides about nothing."""

    @inline(LAYOUT, plgpu.RefType())
    def wait(_, words, factors_gmem):
        code = "{ .reg .pred some; setp.ne.b32 some, $0, 0; @some prefetch.global.L2 [$1]; }"
        assembly(code, "r,l", element(words.registers.item(), 0), address(factors_gmem))

    wait(words, factors_gmem)


def prefetch_tables(tables_gmem: Ref, lengths: Lengths, program: Scalar, block_size: int) -> None:
    """Prefetches the used part of the block tables into L2, a line in each computing thread of all programs."""
    num_seqs, columns = tables_gmem.shape
    lines, blocks_of_line = -(-4 * columns // _LINE), _LINE // 4

    @inline(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), SCALAR)
    def prefetch(_, tables_gmem, starts_gmem, lens_gmem, program):
        number = add(mul(program.registers.item(), 2 * WARPGROUP), mgpu.thread_idx())
        seq, line = div(number, lines), rem(number, lines)
        offset = add(mul(seq, 4 * columns), mul(line, _LINE))
        code = """{ .reg .pred used; .reg .b32 start, end, len; setp.lt.s32 used, $0, $1; mov.b32 len, 0;
        mov.b32 start, 0; mov.b32 end, 0; @used ld.global.b32 len, [$2]; @used ld.global.b32 start, [$3];
        @used ld.global.b32 end, [$3+4]; setp.gt.and.s32 used, end, start, used; setp.gt.and.s32 used, len, $4, used;
        @used prefetch.global.L2 [$5]; }"""
        lens, starts = (add(address(x), bytes_of(seq, 4)) for x in (lens_gmem, starts_gmem))
        token = mul(line, blocks_of_line * block_size)
        place = add(address(tables_gmem), as_i64(offset))
        assembly(code, "r,r,l,l,r,l", seq, i32(num_seqs), lens, starts, token, place)

    prefetch(tables_gmem, lengths.query_start_loc, lengths.seq_lens, program)


def prefetch_tiles(keys_gmem: Ref, values_gmem: Ref, tables_gmem: Ref, tiles: Tiles, kind: ItemKind) -> None:
    """Prefetches tiles into L2: K of the first tile in the first warp, V in the second one, and so on.

    If there are more tiles than pairs of warps, only the first one is prefetched: memory is then busy long enough.
    """
    problem, columns, tile = kind.geometry.problem, tables_gmem.shape[1], kind.tile
    row_bytes, block_size = problem.head_size * problem.cache_itemsize, problem.block_size
    is_nhd = problem.layout == "nhd"
    tokens = 1 if is_nhd else min(block_size, tile)  # neighbours in memory

    @inline(*[plgpu.RefType()] * 3, *[SCALAR] * len(tiles))
    def prefetch(_, keys_gmem, values_gmem, tables_gmem, *tiles):
        seq, kv_head, first_token, num_tiles, end = (x.registers.item() for x in tiles)
        warp, lane = div(mgpu.thread_idx(), WARP), rem(mgpu.thread_idx(), WARP)
        number, is_value = div(warp, 2), arith.cmpi(arith.CmpIPredicate.ne, rem(warp, 2), i32(0))
        most = arith.select(less(i32(_WARPS // 2), num_tiles), i32(1), num_tiles)
        cache = arith.select(is_value, address(values_gmem), address(keys_gmem))
        tables = add(address(tables_gmem), bytes_of(mul(seq, columns), 4))
        for i in range(0, tile // tokens, WARP):
            run = add(lane, i32(i))
            token = add(first_token, add(mul(number, tile), mul(run, tokens)))
            exists = arith.andi(less(number, most), arith.andi(less(run, i32(tile // tokens)), less(token, end)))
            code = f"""{{ .reg .pred exists; .reg .b32 block; .reg .b64 place; setp.ne.b32 exists, $0, 0;
            mov.b32 block, 0; @exists ld.global.b32 block, [$1];
            mul.wide.s32 place, block, {problem.num_kv_heads * block_size * row_bytes}; add.s64 place, place, $2;
            @exists cp.async.bulk.prefetch.L2.global [place], $3; }}"""
            entry = add(tables, bytes_of(div(token, block_size), 4))
            slot = rem(token, block_size)
            row = add(mul(slot, problem.num_kv_heads), kv_head) if is_nhd else add(mul(kv_head, block_size), slot)
            size = mul(arith.minsi(arith.subi(end, token), i32(tokens)), row_bytes)
            assembly(code, "r,l,l,r", as_i32(exists), entry, add(cache, bytes_of(row, row_bytes)), size)

    prefetch(keys_gmem, values_gmem, tables_gmem, *tiles)
