"""Stores of result rows in PTX: from shared memory, where they lie like queries (`rows.py`), or from registers.

All threads of a warpgroup take part in each function.
"""

from typing import NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from paged_jax.kernels.mosaic_gpu.hopper import rows as hopper_rows
from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    array,
    as_i32,
    as_index,
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
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.ptx.rows import (
    CHUNK,
    ROWS_OF_WARP,
    Chunk,
    QueryRows,
    for_chunks,
    operand_transforms,
    row_of_query,
    rows_of_thread,
    values,
)
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref
from paged_jax.kernels.problem import Problem


class Results(NamedTuple):
    """Out and lse: all of them in global memory, or a warpgroup's rows in shared memory."""

    out: Ref
    lse: Ref


def store_rows(smem: Results, gmem: Results, rows: QueryRows, kind: ItemKind) -> None:
    """Stores the results of a warpgroup's rows, except rows without a query."""
    problem = kind.geometry.problem
    layout = operand_transforms(problem)

    @inline(plgpu.RefType(layout), *[plgpu.RefType()] * 3, *[SCALAR] * len(rows))
    def store(_, out_smem, lse_smem, out_gmem, lse_gmem, *rows):
        query_rows = values(rows)
        out, out_place = address(out_gmem), address(out_smem)

        def store_chunk(chunk: Chunk):
            assembly(
                f"""{{ .reg .pred exists; .reg .b32 a, b, c, d; setp.ne.b32 exists, $0, 0;
                ld.shared.v4.b32 {{a, b, c, d}}, [$1+{chunk.smem_step}];
                @exists st.global.v4.b32 [$2+{chunk.gmem_step}], {{a, b, c, d}}; }}""",
                "r,r,l",
                as_i32(chunk.exists),
                add(out_place, chunk.smem_offset),
                add(out, chunk.gmem_offset),
            )

        for_chunks(query_rows, kind, store_chunk, all_rows=kind.is_wide)
        _store_lse(lse_smem, lse_gmem, query_rows, kind.geometry)

    store(*smem, *gmem, *rows)


def store_from_registers(out: Array, lse: Array, gmem: Results, rows: QueryRows, geometry: Geometry) -> None:
    """Stores the results of a warpgroup's rows, except rows without a query, from registers.

    The four lanes of a row exchange words, so that each has 16 bytes of every 64 bytes of the row.
    """

    @inline(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.RefType(), plgpu.RefType(), *[SCALAR] * len(rows))
    def store(_, out, lse, out_gmem, lse_gmem, *rows):
        query_rows, pairs = values(rows), out.registers.reshape(-1, 2)
        lane, word = rem(thread_index_read_again(), 4), ir.IntegerType.get_signless(32)
        first_of_row = arith.cmpi(arith.CmpIPredicate.eq, lane, i32(0))
        for h, row in enumerate(rows_of_thread()):
            exists, index = row_of_query(row, query_rows, geometry)
            start = add(
                address(out_gmem), arith.addi(bytes_of(index, 2 * geometry.problem.head_size), bytes_of(lane, CHUNK))
            )
            for i in range(0, len(pairs), 4):
                words = _transposed([llvm.bitcast(word, pair) for pair in pairs[i : i + 4, h]], lane)
                assembly(
                    """{ .reg .pred exists; setp.ne.b32 exists, $0, 0;
                    @exists st.global.v4.b32 [$1], {$2, $3, $4, $5}; }""",
                    "r,l,r,r,r,r",
                    as_i32(exists),
                    add(start, i64(CHUNK * i)),
                    *words,
                )
            assembly(
                "{ .reg .pred exists; setp.ne.b32 exists, $0, 0; @exists st.global.b32 [$1], $2; }",
                "r,l,r",
                as_i32(arith.andi(exists, first_of_row)),
                add(address(lse_gmem), bytes_of(index, 4)),
                arith.bitcast(word, element(lse.registers.flat[h], 0)),
            )

    store(out, lse, *gmem, *rows)


def _transposed(words: list, lane) -> list:
    """Transposes the words of four lanes: lane i of four, with words a[0] to a[3], gets a[i] of each lane."""
    words = list(words)
    for distance in (1, 2):
        is_later = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, i32(distance)), i32(0))
        for i in (j for j in range(4) if not j & distance):
            first, second = words[i], words[i + distance]
            other = mgpu.utils.shfl_bfly(arith.select(is_later, first, second), distance)
            words[i], words[i + distance] = (
                arith.select(is_later, other, first),
                arith.select(is_later, second, other),
            )
    return words


def clear_rows(gmem: Results, first_token: Scalar, worker: Scalar, workers: int, problem: Problem) -> None:
    """Stores out 0 and lse -inf in a worker's share of the rows from `first_token` on.

    A worker is a warpgroup; there are `workers` of them. A thread stores 16 bytes of a row at a time.
    """
    row_bytes = 2 * problem.head_size
    chunks = row_bytes // CHUNK
    rows_at_once = WARPGROUP // chunks

    @inline(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR)
    def clear(_, out_gmem, lse_gmem, first_token, worker):
        thread, first = thread_index_read_again(), mul(first_token.registers.item(), problem.num_heads)
        own, column = div(thread, chunks), rem(thread, chunks)
        out = add(address(out_gmem), bytes_of(column, CHUNK))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, column, i32(0))
        end = i32(problem.num_tokens * problem.num_heads)
        begin = add(first, mul(worker.registers.item(), rows_at_once))
        loop = scf.ForOp(*map(as_index, (begin, end, i32(workers * rows_at_once))))  # pyright: ignore[reportCallIssue]
        with ir.InsertionPoint(loop.body):
            row = add(arith.index_cast(ir.IntegerType.get_signless(32), loop.induction_variable), own)
            exists = arith.andi(less(row, end), less(own, i32(rows_at_once)))
            assembly(
                "{ .reg .pred e; setp.ne.b32 e, $0, 0; @e st.global.v4.b32 [$1], {$2, $2, $2, $2}; }",
                "r,l,r",
                as_i32(exists),
                add(out, bytes_of(row, row_bytes)),
                i32(0),
            )
            assembly(
                "{ .reg .pred e; setp.ne.b32 e, $0, 0; @e st.global.b32 [$1], $2; }",
                "r,l,r",
                as_i32(arith.andi(exists, is_first)),
                add(address(lse_gmem), bytes_of(row, 4)),
                i32(-(1 << 23)),  # the bits of -inf
            )
            scf.yield_([])

    clear(*gmem, first_token, worker)


def _store_lse(lse_smem, lse_gmem, rows: QueryRows, geometry: Geometry) -> None:
    """Stores lse, one thread for each row."""
    thread = thread_index_read_again()
    row = rem(thread, WGMMA_ROWS)
    exists, index = row_of_query(row, rows, geometry)
    exists = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.ult, thread, i32(WGMMA_ROWS)))
    hopper_rows.store_word(
        as_i32(exists), add(address(lse_smem), mul(row, 4)), add(address(lse_gmem), bytes_of(index, 4))
    )


def hand_over(out: Array, places_smem: Ref, num_tokens: Scalar, geometry: Geometry) -> None:
    """Stores O [64, head_size] of `num_tokens` tokens for `take_over`, in the memory of two bands of a query.

    Each thread stores its own elements side by side, as in `take_over`. Warps without a query leave theirs out.
    """

    @inline(plgpu.RefType(operand_transforms(geometry.problem)), plgpu.Layout.WGMMA, SCALAR)
    def store(_, places_smem, out, num_tokens):
        at, has_rows = _own_place(places_smem), _warp_has_rows(num_tokens.registers.item(), geometry)
        elements = [element(register, i) for register in out.registers.reshape(-1) for i in range(2)]
        for i in range(0, len(elements), 4):
            code = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.shared.v4.f32 [$1], {$2, $3, $4, $5}; }"
            place = add(at, i32(4 * i * WARPGROUP))
            assembly(code, "r,r,f,f,f,f", has_rows, place, *elements[i : i + 4])

    store(places_smem, out, num_tokens)


def take_over(
    out: Array, rescale: Array, other_rescale: Array, places_smem: Ref, num_tokens: Scalar, geometry: Geometry
) -> Array:
    """Merges O [64, head_size] with what `hand_over` has stored, each times its factor [64].

    An element is loaded just before it is merged: large heads have no registers for two O. Rows of warps without a
    query get any value. When this returns, the memory may be used again.
    """
    shape, by_row = (WGMMA_ROWS, geometry.problem.head_size), plgpu.Layout.WGMMA.reduce(1)

    @inline(
        plgpu.RefType(operand_transforms(geometry.problem)),
        *[plgpu.Layout.WGMMA, by_row, by_row, SCALAR],
        returns=shape,
        dtype="float32",
    )
    def merge(_, places_smem, out, rescale, other_rescale, num_tokens):
        at, has_rows = _own_place(places_smem), _warp_has_rows(num_tokens.registers.item(), geometry)
        factors = [[element(x, 0) for x in of_rows.registers.flat] for of_rows in (rescale, other_rescale)]
        pair, merged = ir.VectorType.get((2,), ir.F32Type.get()), np.empty(out.registers.shape, object)
        own, found = out.registers.reshape(-1, 2), merged.reshape(-1, 2)  # of two rows, registers of two columns
        for i, registers in enumerate(own):
            code = """{ .reg .pred p; .reg .b32 a, b, c, d; setp.ne.b32 p, $5, 0;
            mov.b32 a, 0; mov.b32 b, 0; mov.b32 c, 0; mov.b32 d, 0; @p ld.shared.v4.b32 {a, b, c, d}, [$4];
            mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d; }"""
            words = assembly(code, "=f,=f,=f,=f,r,r", add(at, i32(16 * i * WARPGROUP)), has_rows, results=4)
            for h, register in enumerate(registers):
                others = words[2 * h : 2 * h + 2]
                scaled = [arith.mulf(element(register, j), factors[0][h]) for j in range(2)]
                scaled_others = [arith.mulf(x, factors[1][h]) for x in others]
                found[i, h] = vector.from_elements(pair, [*map(arith.addf, scaled, scaled_others)])
        mgpu.warpgroup_barrier()  # all threads have loaded
        return array(merged, mgpu.WGMMA_LAYOUT, shape)

    return merge(places_smem, out, rescale, other_rescale, num_tokens)


def _own_place(places_smem):
    """The address of a thread's first four elements; its next four come after those of all threads."""
    return add(address(places_smem), mul(thread_index_read_again(), 16))


def _warp_has_rows(num_tokens, geometry: Geometry):
    """1 if this warp's rows hold some of so many query tokens, else 0."""
    first_row = mul(div(thread_index_read_again(), WARP), ROWS_OF_WARP)
    return as_i32(less(first_row, mul(num_tokens, geometry.problem.group)))


def store_partial(partial_gmem: Ref, out: Array, num_tokens: Scalar, geometry: Geometry) -> None:
    """Stores a warpgroup's O [64, head_size] from registers: the rows of its `num_tokens` tokens."""
    problem = geometry.problem

    @inline(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR)
    def store(_, partial_gmem, out, num_tokens):
        count, size = num_tokens.registers.item(), problem.head_size
        hopper_rows.store_first_rows(partial_gmem, out.registers, count, size, rows_of_token=problem.group)

    store(partial_gmem, out, num_tokens)
