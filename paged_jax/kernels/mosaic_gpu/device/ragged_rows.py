"""Device code below what Pallas has words for: rows of queries and results, and the next work item's number.

A warpgroup's 64 rows are its query tokens, each with all heads of the group: row = token * group + head. In global
memory the heads of a group are neighbours, and tokens are num_heads * head_size elements apart. 16 bytes at a time go
to and from shared memory, where rows lie as wgmma wants them:

    [rows / 8, head_size / w, 8, w]     w elements are 32, 64 or 128 bytes, of which 16 bytes change places row by row
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from paged_jax.kernels.mosaic_gpu.device.inline import inline
from paged_jax.kernels.mosaic_gpu.device.tiles.plain import transforms
from paged_jax.kernels.mosaic_gpu.ragged_tuning import ROWS, Config

_SCALAR = plgpu.Layout.WG_SPLAT(())


class _Chunk(NamedTuple):
    """16 bytes of a row: whether the row is one of the query, where it is there, and where it is in shared memory."""

    own: ir.Value
    row: ir.Value
    offset: ir.Value
    smem: ir.Value


def load_queries(query_gmem, q_smem, first_token, tokens, head, cfg: Config) -> None:
    """Starts to copy the query of some tokens and a kv head's group to 64 rows; 0 in rows that are nobody's.

    All threads of a warpgroup take part. The products see it after `finish_copies` and a barrier.
    """
    layout = transforms(cfg.problem.head_size, cfg.problem.query_dtype)

    @inline(plgpu.RefType(), plgpu.RefType(layout), _SCALAR, _SCALAR, _SCALAR)
    def body(_, query_gmem, q_smem, *scalars):
        gmem, smem = address(query_gmem), address(q_smem)
        for chunk in _chunks(*(x.registers.item() for x in scalars), cfg):  # pyright: ignore[reportCallIssue]
            size = arith.select(chunk.own, i32(16), i32(0))
            offset = arith.select(chunk.own, chunk.offset, i64(0))
            assembly(
                "cp.async.cg.shared.global [$0], [$1], 16, $2;",
                "r,l,r",
                0,
                arith.addi(smem, chunk.smem),
                arith.addi(gmem, offset),
                size,
            )

    body(query_gmem, q_smem, first_token, tokens, head)


def finish_copies() -> None:
    """Waits until all that this warpgroup began to copy has arrived."""

    @inline()
    def body(_):
        assembly("cp.async.wait_all;", "", 0)
        assembly("fence.proxy.async.shared::cta;", "", 0)

    body()


def store_rows(out_smem, lse_smem, out_gmem, lse_gmem, first_token, tokens, head, cfg: Config) -> None:
    """Stores the results of a warpgroup's rows, those of its `tokens`; all of its threads take part."""
    layout = transforms(cfg.problem.head_size, cfg.problem.query_dtype)

    @inline(plgpu.RefType(layout), *[plgpu.RefType()] * 3, *[_SCALAR] * 3)
    def body(_, out_smem, lse_smem, out_gmem, lse_gmem, *scalars):
        scalars = [x.registers.item() for x in scalars]
        gmem, smem = address(out_gmem), address(out_smem)
        for chunk in _chunks(*scalars, cfg):  # pyright: ignore[reportCallIssue]
            assembly(
                """{ .reg .pred own; .reg .b32 a, b, c, d; setp.ne.b32 own, $0, 0;
                ld.shared.v4.b32 {a, b, c, d}, [$1]; @own st.global.v4.b32 [$2], {a, b, c, d}; }""",
                "r,r,l",
                0,
                word(chunk.own),
                arith.addi(smem, chunk.smem),
                arith.addi(gmem, chunk.offset),
            )
        of_rows = thread()
        row = arith.remui(of_rows, i32(ROWS))
        own, index = _row_of_query(row, *scalars, cfg)  # pyright: ignore[reportCallIssue]
        own = arith.andi(own, arith.cmpi(arith.CmpIPredicate.ult, of_rows, i32(ROWS)))
        assembly(
            """{ .reg .pred own; .reg .b32 a; setp.ne.b32 own, $0, 0;
            ld.shared.b32 a, [$1]; @own st.global.b32 [$2], a; }""",
            "r,r,l",
            0,
            word(own),
            arith.addi(address(lse_smem), arith.muli(row, i32(4))),
            arith.addi(address(lse_gmem), arith.muli(wide(index), i64(4))),
        )

    body(out_smem, lse_smem, out_gmem, lse_gmem, first_token, tokens, head)


def store_part(part_gmem, acc: Array, tokens, cfg: Config) -> None:
    """Stores a warpgroup's sums [64, head_size], in registers, to the part's rows: those of its `tokens`."""
    d = cfg.problem.head_size

    @inline(plgpu.RefType(), plgpu.Layout.WGMMA, _SCALAR)
    def body(_, part_gmem, acc, tokens):
        index = thread()
        lane, warp = arith.remui(index, i32(32)), arith.divui(index, i32(32))
        used = arith.muli(tokens.registers.item(), i32(cfg.problem.group))
        pairs = acc.registers.reshape(d // 8, 2)  # of columns 8 * c + 2 * (lane % 4) + 0..1, rows + 8 * h
        gmem = address(part_gmem)
        for h in range(2):
            row = arith.addi(arith.muli(warp, i32(16)), arith.addi(arith.divui(lane, i32(4)), i32(8 * h)))
            own = arith.cmpi(arith.CmpIPredicate.slt, row, used)
            column = arith.muli(arith.remui(lane, i32(4)), i32(2))
            first = arith.addi(arith.muli(row, i32(d)), column)
            start = arith.addi(gmem, arith.muli(wide(first), i64(4)))
            for c in range(d // 8):
                values = [extract(pairs[c, h], i) for i in range(2)]
                assembly(
                    "{ .reg .pred own; setp.ne.b32 own, $0, 0; @own st.global.v2.f32 [$1], {$2, $3}; }",
                    "r,l,f,f",
                    0,
                    word(own),
                    arith.addi(start, i64(32 * c)),
                    *values,
                )

    body(part_gmem, acc, tokens)


def store_words(words_smem, row, values) -> None:
    """Stores 32-bit integers to a row of shared memory, which this warpgroup sees at once, others after a barrier."""
    shape = words_smem.shape

    @inline(plgpu.RefType(), *[_SCALAR] * (len(values) + 1))
    def body(_, words_smem, row, *values):
        first = arith.addi(address(words_smem), arith.muli(row.registers.item(), i32(4 * shape[1])))
        for i, value in enumerate(values):
            assembly(
                "{ .reg .pred first; setp.eq.u32 first, $0, 0; @first st.shared.b32 [$1], $2; }",
                "r,r,r", 0, thread(), arith.addi(first, i32(4 * i)), value.registers.item(),
            )  # fmt: skip

        mgpu.warpgroup_barrier()

    body(words_smem, row, *values)


def claim(counts_gmem, claim_smem, line: int) -> Any:
    """The next number of a line, the first of which is 0: each is given to one program only."""

    @inline(plgpu.RefType(), plgpu.RefType())
    def body(_, counts_gmem, claim_smem):
        mgpu.warpgroup_barrier()  # all have read the number before
        assembly(
            """{ .reg .pred first; .reg .b32 number; setp.eq.u32 first, $0, 0;
            mov.b32 number, 0; @first atom.global.add.u32 number, [$1], 1; @first st.shared.b32 [$2], number; }""",
            "r,l,r",
            0,
            thread(),
            arith.addi(address(counts_gmem), i64(4 * line)),
            address(claim_smem),
        )
        mgpu.warpgroup_barrier()

    body(counts_gmem, claim_smem)
    return claim_smem[0]


def _chunks(first_token, tokens, head, cfg: Config) -> Iterator[_Chunk]:
    """The 16-byte pieces of a warpgroup's rows that this thread copies."""
    d, itemsize = cfg.problem.head_size, jnp.dtype(cfg.problem.query_dtype).itemsize
    swizzle = transforms(d, cfg.problem.query_dtype)[1].swizzle
    of_row = d * itemsize // 16
    first = thread()
    for i in range(ROWS * of_row // 128):
        chunk = arith.addi(first, i32(128 * i))
        row, column = arith.divui(chunk, i32(of_row)), arith.remui(chunk, i32(of_row))
        own, index = _row_of_query(row, first_token, tokens, head, cfg)
        offset = arith.addi(arith.muli(wide(index), i64(d * itemsize)), arith.muli(wide(column), i64(16)))
        yield _Chunk(own, row, offset, place_of(row, column, d, swizzle))


def place_of(row, column, d: int, swizzle: int):
    """Where the 16 bytes in a column of a row of d elements of 16 bits are, in shared memory."""
    lanes = swizzle // 16
    place = arith.addi(
        arith.muli(arith.divui(row, i32(8)), i32(16 * d)),
        arith.addi(
            arith.muli(arith.divui(column, i32(lanes)), i32(8 * swizzle)),
            arith.addi(
                arith.muli(arith.remui(row, i32(8)), i32(swizzle)),
                arith.muli(arith.remui(column, i32(lanes)), i32(16)),
            ),
        ),
    )
    changed = arith.andi(arith.shrui(place, i32(3)), i32(16 * (lanes - 1)))
    return arith.xori(place, changed)


def _row_of_query(row, first_token, tokens, head, cfg: Config):
    """Whether a row of the warpgroup's is one of the tokens', and which of the query's [num_tokens * num_heads]."""
    group = cfg.problem.group
    token = arith.divui(row, i32(group))
    own = arith.cmpi(arith.CmpIPredicate.slt, token, tokens)
    if cfg.half * group < ROWS:
        own = arith.andi(own, arith.cmpi(arith.CmpIPredicate.ult, row, i32(cfg.half * group)))
    head = arith.addi(arith.muli(head, i32(group)), arith.remui(row, i32(group)))
    index = arith.addi(arith.muli(arith.addi(first_token, token), i32(cfg.problem.num_heads)), head)
    return own, index


def address(ref) -> ir.Value:
    """Of global memory 64 bits, of shared memory 32."""
    bits = 32 if mgpu.utils.get_memref_llvm_address_space(ir.MemRefType(ref.type)) == 3 else 64
    return llvm.ptrtoint(ir.IntegerType.get_signless(bits), mgpu.utils.memref_ptr(ref))


def thread() -> ir.Value:
    """Each thread's index in its warpgroup. Read anew, it keeps no register busy over loops."""
    word = ir.IntegerType.get_signless(32)
    index = llvm.inline_asm(word, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True)
    return arith.remui(index, i32(128))


def extract(pair, i: int) -> ir.Value:
    return llvm.extractelement(pair, i32(i))


def word(condition) -> ir.Value:
    return arith.extui(ir.IntegerType.get_signless(32), condition)


def wide(x) -> ir.Value:
    return arith.extsi(ir.IntegerType.get_signless(64), x)


def i32(n: int) -> ir.Value:
    return mgpu.c(n, ir.IntegerType.get_signless(32))


def i64(n: int) -> ir.Value:
    return mgpu.c(n, ir.IntegerType.get_signless(64))


def assembly(code: str, constraints: str, results: int, *operands: Any) -> list:
    """Inline PTX with so many float32 results, in its place among all that has effects."""
    clobbers = ",".join(x for x in (constraints, "~{memory}") if x)
    f32 = ir.F32Type.get()
    if results == 0:
        llvm.inline_asm(None, operands, code, clobbers, has_side_effects=True)
        return []
    if results == 1:
        return [llvm.inline_asm(f32, operands, code, clobbers, has_side_effects=True)]
    struct = llvm.StructType.get_literal([f32] * results)
    result = llvm.inline_asm(struct, operands, code, clobbers, has_side_effects=True)
    return [llvm.extractvalue(f32, result, [i]) for i in range(results)]
