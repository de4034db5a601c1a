"""The merge of partial results, in MLIR and PTX: a thread merges some elements of one row of O.

Arguments without a type are MLIR values; references are addresses.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from paged_jax.kernels.mosaic_gpu.hopper.inline import (
    add,
    as_i32,
    as_index,
    assembly,
    bytes_of,
    i32,
    i64,
)
from paged_jax.kernels.mosaic_gpu.hopper.refs import ABSENT, Partials, Ref
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOG2E, LOWEST

ELEMENTS = 4
"""Elements of a row that a thread loads together. They are neighbours in a partial result."""


class Merged(NamedTuple):
    """A thread's part of the softmax of a row. Fields are MLIR values."""

    maximum: Any  # the maximum of logits, times log2(e)
    sum: Any
    out: list  # elements of O before the division by the sum


class OwnElements(NamedTuple):
    """The elements of a result that a thread stores. Fields are MLIR values."""

    exists: Any  # whether the thread has elements
    row: Any  # the index of the row in out and lse
    column: Any  # where the elements are in the row; 0 for the first ones


def merged(load: Callable[[Any], tuple[Any, list]], num_partials, in_flight: int, elements: int = ELEMENTS) -> Merged:
    """Merges the partial results of a row, in their order.

    `load` takes the number of a partial result. It returns the logarithm of the partial result's sum, and the thread's
    elements. `in_flight` loads are issued together; beyond the last partial result they must return -inf.
    """
    carry = [_f32(LOWEST), *[_f32(0.0)] * (1 + elements)]
    loop = scf.ForOp(as_index(i32(0)), as_index(num_partials), as_index(i32(in_flight)), carry)
    with ir.InsertionPoint(loop.body):
        first = arith.index_cast(ir.IntegerType.get_signless(32), loop.induction_variable)
        partials = [load(add(first, i32(i))) for i in range(in_flight)]
        maximum, total, out = _with_partials(_of_values(loop.inner_iter_args), partials)
        scf.yield_([maximum, total, *out])
    return _of_values(loop.results)


def _of_values(values) -> Merged:
    maximum, total, *out = values
    return Merged(maximum, total, out)


def _with_partials(merged: Merged, partials: list[tuple[Any, list]]) -> Merged:
    """Adds partial results to a softmax, in their order. Their weights do not wait for each other."""
    maximum = functools.reduce(arith.maximumf, [log_sum for log_sum, _ in partials], merged.maximum)
    rescale = _exp2(arith.subf(merged.maximum, maximum))
    total, out = arith.mulf(merged.sum, rescale), [arith.mulf(x, rescale) for x in merged.out]
    for log_sum, elements in partials:
        weight = _exp2(arith.subf(log_sum, maximum))
        total = arith.addf(total, weight)
        out = [arith.addf(x, arith.mulf(y, weight)) for x, y in zip(out, elements, strict=True)]
    return Merged(maximum, total, out)


def joined(first: Merged, second: Merged) -> Merged:
    """Merges two parts of a softmax."""
    maximum = arith.maximumf(first.maximum, second.maximum)
    keep, weight = _exp2(arith.subf(first.maximum, maximum)), _exp2(arith.subf(second.maximum, maximum))

    def join(x, y):
        return arith.addf(arith.mulf(x, keep), arith.mulf(y, weight))

    out = [join(x, y) for x, y in zip(first.out, second.out, strict=True)]
    return Merged(maximum, join(first.sum, second.sum), out)


def load_partial(partials: Partials, exists, index, column, row_size: int) -> tuple[Any, list]:
    """Loads the logarithm of a sum and four elements of row `index` (64 bits) among the rows of all partial results.

    Where the row does not exist, nothing is loaded: the logarithm is -inf, and the elements are 0.
    """
    start = arith.addi(arith.muli(index, i64(4 * row_size)), bytes_of(column, 4 * ELEMENTS))
    return load_log_sum(partials, exists, index), load_elements(partials, exists, start)


def load_log_sum(partials: Partials, exists, index):
    """Loads the logarithm of the sum of row `index` (64 bits); -inf where the row does not exist."""
    code = """{ .reg .pred exists; .reg .f32 a; setp.ne.b32 exists, $2, 0; mov.f32 a, 0fff800000;
        @exists ld.global.f32 a, [$1]; mov.f32 $0, a; }"""
    source = add(partials.log_sums, arith.muli(index, i64(4)))
    return assembly(code, "=f,l,r", source, as_i32(exists), results=1)[0]


def load_elements(partials: Partials, exists, offset) -> list:
    """Loads four elements, `offset` bytes (64 bits) behind the first element of all partial results; 0 if not there."""
    code = """{ .reg .pred exists; .reg .f32 a, b, c, d; setp.ne.b32 exists, $5, 0;
        mov.f32 a, 0f00000000; mov.f32 b, 0f00000000; mov.f32 c, 0f00000000; mov.f32 d, 0f00000000;
        @exists ld.global.v4.f32 {a, b, c, d}, [$4];
        mov.f32 $0, a; mov.f32 $1, b; mov.f32 $2, c; mov.f32 $3, d; }"""
    source = add(partials.out, offset)
    return assembly(code, "=f,=f,=f,=f,l,r", source, as_i32(exists), results=ELEMENTS)


def saw_tokens(merged: Merged):
    """Whether the row saw a token. NaN counts as seen: it must reach the result."""
    return arith.cmpf(arith.CmpFPredicate.UNE, merged.sum, _f32(0.0))


def finished(merged: Merged, seen, sinks_gmem: Ref, head) -> tuple[list, Any]:
    """Returns the thread's elements of out, and lse. A row that saw no token gets out 0 and lse -inf.

    If there are sinks, `head` is the index of the row's sink.
    """
    maximum, total, out = merged
    if sinks_gmem is not ABSENT:
        maximum, total, out = _with_sink(merged, sinks_gmem, head)
    total = arith.select(seen, total, _f32(1.0))
    out = [arith.divf(x, total) for x in out]
    lse = arith.divf(arith.addf(maximum, _log2(total)), _f32(LOG2E))
    return out, arith.select(seen, lse, _f32(float("-inf")))


def _with_sink(merged: Merged, sinks_gmem: Ref, head) -> Merged:
    """Adds a head's sink to the softmax."""
    maximum, total, out = merged
    [logit] = assembly("ld.global.f32 $0, [$1];", "=f,l", add(sinks_gmem, bytes_of(head, 4)), results=1)
    logit = arith.mulf(logit, _f32(LOG2E))
    with_sink = arith.maximumf(maximum, logit)
    rescale = _exp2(arith.subf(maximum, with_sink))
    total = arith.addf(arith.mulf(total, rescale), _exp2(arith.subf(logit, with_sink)))
    return Merged(with_sink, total, [arith.mulf(x, rescale) for x in out])


def store(
    out_gmem: Ref, lse_gmem: Ref, own: OwnElements, out: list, lse, row_size: int, dtype: str, threads: int = 0
) -> None:
    """Stores the thread's elements of out in the query's dtype; the thread of the first elements stores lse.

    If a thread has more than `ELEMENTS` of them, each further four lie behind the four of each of `threads` threads.
    """
    for i in range(len(out) // ELEMENTS):
        of_vector = own._replace(column=add(own.column, i32(i * threads)))
        _store_out(out_gmem, of_vector, out[i * ELEMENTS : (i + 1) * ELEMENTS], row_size, dtype)
    store_lse(lse_gmem, own, lse)


def store_lse(lse_gmem: Ref, own: OwnElements, lse) -> None:
    """Stores lse in the thread of the row's first elements."""
    is_first = arith.andi(own.exists, arith.cmpi(arith.CmpIPredicate.eq, own.column, i32(0)))
    code = "{ .reg .pred exists; setp.ne.b32 exists, $0, 0; @exists st.global.f32 [$1], $2; }"
    assembly(code, "r,l,f", as_i32(is_first), add(lse_gmem, bytes_of(own.row, 4)), lse)


def _store_out(out_gmem: Ref, own: OwnElements, out: list, row_size: int, dtype: str) -> None:
    pair = {"float16": "f16x2", "bfloat16": "bf16x2"}[dtype]
    code = f"""{{ .reg .pred exists; .reg .b32 a, b; setp.ne.b32 exists, $0, 0;
        cvt.rn.{pair}.f32 a, $3, $2; cvt.rn.{pair}.f32 b, $5, $4; @exists st.global.v2.b32 [$1], {{a, b}}; }}"""
    offset = arith.addi(bytes_of(own.row, 2 * row_size), bytes_of(own.column, 8))
    assembly(code, "r,l,f,f,f,f", as_i32(own.exists), add(out_gmem, offset), *out)


def _exp2(x):
    return assembly("ex2.approx.ftz.f32 $0, $1;", "=f,f", x, results=1)[0]


def _log2(x):
    return assembly("lg2.approx.ftz.f32 $0, $1;", "=f,f", x, results=1)[0]


def _f32(x: float):
    return mgpu.c(x, ir.F32Type.get())
