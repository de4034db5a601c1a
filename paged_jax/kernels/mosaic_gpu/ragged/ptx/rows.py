"""Copies of query rows, 16 bytes at a time, in PTX, and where rows and chunks of 16 bytes lie.

A warpgroup's 64 rows are its query tokens, each with all heads of the group: row = token * group + head. In global
memory the heads of a group are neighbours, and tokens are num_heads * head_size elements apart. In shared memory, rows
have the swizzled layout of wgmma's operands:

    [rows / 8, head_size / w, 8, w]     w elements are 32, 64 or 128 bytes; chunks of 16 bytes are permuted in each row

All threads of a warpgroup take part in each function.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax import Array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    SCALAR,
    add,
    address,
    as_i32,
    assembly,
    bytes_of,
    div,
    element,
    i32,
    i64,
    inline,
    less,
    mul,
    operand,
    rem,
    thread_index_read_again,
)
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP, WARPGROUP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.memory import transforms
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref
from paged_jax.kernels.problem import Problem

CHUNK = 16  # bytes of one copy of a thread
ROWS_OF_WARP = WGMMA_ROWS // (WARPGROUP // WARP)  # of S and O


class QueryRows(NamedTuple):
    """A warpgroup's rows of the query, out and lse: neighbouring tokens, each with all heads of one group."""

    first_token: Scalar
    num_tokens: Scalar
    kv_head: Scalar


class Chunk(NamedTuple):
    """16 bytes of a row. Fields are MLIR values."""

    exists: Any  # whether global memory has the row
    gmem_offset: Any  # bytes; it may lie outside of the array if global memory does not have the row
    smem_offset: Any  # bytes
    gmem_step: int = 0  # bytes, constants to be added to the offsets: they are part of an instruction
    smem_step: int = 0


def load_queries(query_gmem: Ref, query_smem: Ref, rows: QueryRows, kind: ItemKind) -> None:
    """Starts the copies of query rows to 64 rows of shared memory.

    Rows without a query become 0; of a thin item, only those whose warp has rows with a query.

    The products see them after `finish_copies` and a barrier.
    """
    layout = operand_transforms(kind.geometry.problem)

    @inline(plgpu.RefType(), plgpu.RefType(layout), *[SCALAR] * len(rows))
    def load(_, query_gmem, query_smem, *rows):
        gmem, smem = address(query_gmem), address(query_smem)
        for_chunks(values(rows), kind, lambda chunk: copy_chunk(smem, gmem, chunk), all_rows=True)

    load(query_gmem, query_smem, *rows)


def prefetch_queries(query_gmem: Ref, rows: QueryRows, kind: ItemKind) -> None:
    """Asks L2 for an item's query rows; each thread asks for its share of their lines."""
    geometry, line = kind.geometry, 128
    token_bytes = 2 * geometry.problem.head_size * geometry.problem.group  # neighbours in memory
    lines = pl.cdiv(token_bytes, line)

    @inline(plgpu.RefType(), *[SCALAR] * len(rows))
    def prefetch(_, query_gmem, *rows):
        token, num_tokens, kv_head = (x.registers.item() for x in rows)
        first = add(mul(token, geometry.problem.num_kv_heads), kv_head)
        for i in range(pl.cdiv(kind.tokens * lines, WARPGROUP)):
            number = add(thread_index_read_again(), i32(WARPGROUP * i))
            own = div(number, lines)
            index = add(first, mul(own, geometry.problem.num_kv_heads))
            offset = arith.addi(bytes_of(index, token_bytes), bytes_of(rem(number, lines), line))
            assembly(
                "{ .reg .pred exists; setp.ne.b32 exists, $0, 0; @exists prefetch.global.L2 [$1]; }",
                "r,l",
                as_i32(less(own, num_tokens)),
                add(address(query_gmem), offset),
            )

    prefetch(query_gmem, *rows)


def read_queries(query_gmem: Ref, rows: QueryRows, geometry: Geometry) -> Array:
    """Reads 64 query rows into registers, [64, head_size]; rows without a query are 0.

    A lane reads 16 bytes at a time. So the columns are permuted within the layout of wgmma's results. Only
    `write_queries` and functions of whole rows may use the array.
    """
    problem = geometry.problem
    row_bytes = 2 * problem.head_size
    shape = WGMMA_ROWS, problem.head_size

    @inline(plgpu.RefType(), *[SCALAR] * len(rows), returns=shape, dtype=problem.query_dtype)
    def read(_, query_gmem, *rows):
        gmem, query_rows, words = address(query_gmem), values(rows), np.empty((problem.head_size // 8, 2), object)
        for h, row in enumerate(rows_of_thread()):
            exists, index = row_of_query(row, query_rows, geometry)
            offset = arith.select(exists, bytes_of(index, row_bytes), i64(0))
            start = add(gmem, arith.addi(offset, bytes_of(rem(thread_index_read_again(), 4), CHUNK)))
            for i in range(0, len(words), 4):
                words[i : i + 4, h] = assembly(
                    """{ .reg .pred exists; .reg .b32 a, b, c, d; setp.ne.b32 exists, $5, 0;
                    mov.b32 a, 0; mov.b32 b, 0; mov.b32 c, 0; mov.b32 d, 0;
                    @exists ld.global.L1::no_allocate.v4.b32 {a, b, c, d}, [$4];
                    mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d; }""",
                    "=f,=f,=f,=f,l,r",
                    add(start, i64(CHUNK * i)),
                    as_i32(exists),
                    results=4,
                )
        return operand(words, shape, problem.query_dtype)

    return read(query_gmem, *rows)


def write_queries(
    query: Array, divisors: Array | None, query_smem: Ref, divisors_smem: Ref, geometry: Geometry
) -> None:
    """Writes rows that `read_queries` has read, in 16 bits, to shared memory, and their divisors [64], if any.

    The products see the rows after a barrier.
    """
    problem = geometry.problem
    arrays, layouts = [query], [plgpu.Layout.WGMMA]
    if divisors is not None:
        arrays, layouts = [query, divisors], [plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)]

    @inline(plgpu.RefType(operand_transforms(problem)), plgpu.RefType(), *layouts)
    def write(_, query_smem, divisors_smem, query, *divisors):
        smem, pairs, word = address(query_smem), query.registers.reshape(-1, 2), ir.IntegerType.get_signless(32)
        lane = rem(thread_index_read_again(), 4)
        mgpu.warpgroup_barrier()  # other threads have read what lies there
        for h, row in enumerate(rows_of_thread()):
            for i in range(0, len(pairs), 4):
                assembly(
                    "st.shared.v4.b32 [$0], {$1, $2, $3, $4};",
                    "r,r,r,r,r",
                    add(smem, swizzled_offset(row, add(lane, i32(i)), problem)),
                    *(llvm.bitcast(word, pair) for pair in pairs[i : i + 4, h]),
                )
            for of_rows in divisors:
                assembly(
                    "{ .reg .pred first; setp.eq.u32 first, $0, 0; @first st.shared.b32 [$1], $2; }",
                    "r,r,r",
                    lane,
                    add(address(divisors_smem), mul(row, 4)),
                    arith.bitcast(word, element(of_rows.registers.flat[h], 0)),
                )

    write(query_smem, divisors_smem, *arrays)


def copy_words(gmem: Ref, smem: Ref) -> None:
    """Starts the copies of a few words to shared memory."""
    (size,) = smem.shape

    @inline(plgpu.RefType(), plgpu.RefType())
    def copy(_, gmem, smem):
        for first in range(0, size, WARPGROUP):
            word = add(thread_index_read_again(), i32(first))
            assembly(
                """{ .reg .pred exists; setp.ne.b32 exists, $0, 0;
                @exists cp.async.ca.shared.global [$2], [$1], 4; }""",
                "r,l,r",
                as_i32(less(word, i32(size))),
                add(address(gmem), bytes_of(word, 4)),
                add(address(smem), mul(word, 4)),
            )

    copy(gmem, smem)


def finish_copies() -> None:
    """Waits for all copies that this warpgroup has started."""

    @inline()
    def wait(_):
        assembly("cp.async.wait_all;", "")
        assembly("fence.proxy.async.shared::cta;", "")

    wait()


def see_copies() -> None:
    """Lets this warpgroup's products see what threads have stored before a barrier."""

    @inline()
    def fence(_):
        assembly("fence.proxy.async.shared::cta;", "")

    fence()


def operand_transforms(problem: Problem) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """The layout in shared memory of rows of head_size elements in the query's dtype."""
    return transforms(problem.head_size, problem.query_dtype)


def copy_chunk(smem, gmem, chunk: Chunk) -> None:
    """Starts the copy of a chunk to shared memory, or fills it with zeros if the chunk does not exist."""
    size = arith.select(chunk.exists, i32(CHUNK), i32(0))  # with 0, it does not read
    code = f"cp.async.cg.shared.global [$0+{chunk.smem_step}], [$1+{chunk.gmem_step}], 16, $2;"
    assembly(code, "r,l,r", add(smem, chunk.smem_offset), add(gmem, chunk.gmem_offset), size)


def chunks_of_thread(num_rows: int, chunks_per_row: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yields (chunk, row, column) for each chunk of this thread."""
    first = thread_index_read_again()
    for i in range(num_rows * chunks_per_row // WARPGROUP):
        chunk = add(first, i32(WARPGROUP * i))
        yield chunk, div(chunk, chunks_per_row), rem(chunk, chunks_per_row)


def swizzled_offset(row, column, problem: Problem):
    """The swizzled offset of a chunk in shared memory, in bytes."""
    _, swizzle = operand_transforms(problem)
    lanes = swizzle.swizzle // CHUNK
    place = add(
        mul(div(row, 8), 16 * problem.head_size),
        add(
            mul(div(column, lanes), 8 * swizzle.swizzle),
            add(mul(rem(row, 8), swizzle.swizzle), mul(rem(column, lanes), CHUNK)),
        ),
    )
    changed = arith.andi(arith.shrui(place, i32(3)), i32(CHUNK * (lanes - 1)))
    return arith.xori(place, changed)


def for_chunks(rows: QueryRows, kind: ItemKind, do: Callable[[Chunk], None], *, all_rows: bool) -> None:
    """Calls `do` with each of this thread's chunks: those of rows with a query and, with `all_rows`, those after them.

    A thin item may have few rows, so its code is a loop. It leaves out the rows of warps without a query: nobody reads
    their results, and a warp's rows do not change other warps' rows. A wide item mostly has all rows, so its
    code is unrolled, for all 64 rows.

    In a wide item, a chunk often has the same column and head as an earlier one of the same thread, and the same place
    among 8 rows. Then their offsets differ by constants, which saves some twenty instructions. One warp alone takes 5
    to 9 cycles for each (benchmarks/LOG.md, "The start of a call").
    """
    geometry, row_bytes = kind.geometry, 2 * kind.geometry.problem.head_size
    chunks_per_row, group = row_bytes // CHUNK, kind.geometry.problem.group

    def do_chunk(row, column):
        exists, index = row_of_query(row, rows, geometry)
        offset = arith.addi(bytes_of(index, row_bytes), bytes_of(column, CHUNK))
        chunk = Chunk(exists, offset, swizzled_offset(row, column, geometry.problem))
        do(chunk)
        return chunk, div(row, group)

    if kind.is_wide:
        similar_rows = math.lcm(8, group)
        similar_rows *= WARPGROUP // math.gcd(WARPGROUP, similar_rows * chunks_per_row)
        period, firsts = similar_rows * chunks_per_row // WARPGROUP, []
        num_tokens = arith.minsi(rows.num_tokens, i32(geometry.band_tokens))
        for i, (_, row, column) in enumerate(chunks_of_thread(WGMMA_ROWS, chunks_per_row)):
            if i < period:
                firsts.append(do_chunk(row, column))
                continue
            (first, token), later_rows = firsts[i % period], i // period * similar_rows
            later_tokens = later_rows // group
            exists = less(token, arith.subi(num_tokens, i32(later_tokens)))
            gmem_step = later_tokens * geometry.problem.num_heads * row_bytes
            assert gmem_step < 1 << 31, "an instruction has a constant of 32 bits"
            do(first._replace(exists=exists, gmem_step=gmem_step, smem_step=later_rows * row_bytes))
        return
    num_rows = mul(rows.num_tokens, geometry.problem.group)
    if all_rows:
        num_rows = mul(div(add(num_rows, i32(ROWS_OF_WARP - 1)), ROWS_OF_WARP), ROWS_OF_WARP)
    steps = div(add(mul(num_rows, chunks_per_row), i32(WARPGROUP - 1)), WARPGROUP)
    loop = scf.ForOp(i32(0), steps, i32(1))  # pyright: ignore[reportCallIssue]
    with ir.InsertionPoint(loop.body):
        assembly('.pragma "nounroll";', "")
        chunk = add(thread_index_read_again(), mul(loop.induction_variable, WARPGROUP))
        do_chunk(div(chunk, chunks_per_row), rem(chunk, chunks_per_row))
        scf.yield_([])


def rows_of_thread() -> list:
    """The two rows whose elements this thread holds in the layout of wgmma's results."""
    index = thread_index_read_again()
    first = add(mul(div(index, WARP), WGMMA_ROWS // 4), div(rem(index, WARP), 4))
    return [first, add(first, i32(8))]


def row_of_query(row, rows: QueryRows, geometry: Geometry) -> tuple[Any, Any]:
    """Whether a row has a query, and its index among the num_tokens * num_heads rows of the query."""
    group = geometry.problem.group
    token = div(row, group)
    exists = less(token, rows.num_tokens)
    if geometry.band_tokens * group < WGMMA_ROWS:
        used = arith.cmpi(arith.CmpIPredicate.ult, row, i32(geometry.band_tokens * group))
        exists = arith.andi(exists, used)
    head = add(mul(rows.kv_head, group), rem(row, group))
    return exists, add(mul(add(rows.first_token, token), geometry.problem.num_heads), head)


def values(rows) -> QueryRows:
    """`QueryRows` of MLIR values."""
    return QueryRows(*(x.registers.item() for x in rows))
