"""Merging the parts of items whose contexts were split over programs, in a kernel of its own.

Grid. Programs of one warpgroup, which take the rows of split items in turn. Everyone loads, from global memory into
registers, and computes: 4 elements of a row a thread.

Roofline: 4 * head_size bytes a row and part, mostly from L2: latency, not bandwidth, so that several parts are in
flight.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array, lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from paged_jax.kernels.mosaic_gpu.device import ragged_plan as plan
from paged_jax.kernels.mosaic_gpu.device.inline import inline
from paged_jax.kernels.mosaic_gpu.device.ragged_rows import address, assembly, i32, i64, thread, wide, word
from paged_jax.kernels.mosaic_gpu.device.registers import LOG2E
from paged_jax.kernels.mosaic_gpu.ragged_tuning import ROWS, Config, Line

_IN_FLIGHT = 4  # parts
_RESULTS = "table", "per_split", "wide_parts", "wide_sums", "thin_parts", "thin_sums", "out", "lse"


def merge(cfg: Config, query_start_loc: Array, seq_lens: Array, sinks: Array, results: dict[str, Any]) -> None:
    """Writes the rows of split items, from their parts, to the references of out and lse."""
    plgpu.kernel(
        functools.partial(_kernel, cfg=cfg),
        out_type=(),
        grid=(cfg.tuning.merge_programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query_start_loc, seq_lens, sinks, *(results[name] for name in _RESULTS))


def _kernel(*gmem, cfg: Config):
    names = [f"{name}_gmem" for name in ("query_start_loc", "seq_lens", "sinks", *_RESULTS)]
    refs = SimpleNamespace(**dict(zip(names, gmem, strict=True)))
    for line, places in zip(cfg.lines, cfg.places, strict=True):
        if places:
            _merge_line(line, refs, cfg)


def _merge_line(line: Line, refs, cfg: Config) -> None:
    work = plan.Work(refs.table_gmem, refs.per_split_gmem, None)
    parts_gmem, sums_gmem = refs.thin_parts_gmem, refs.thin_sums_gmem
    if line.wide:
        parts_gmem, sums_gmem = refs.wide_parts_gmem, refs.wide_sums_gmem

    @pl.loop(lax.axis_index("program"), plan.total(plan.MERGES, line, work, cfg), step=cfg.tuning.merge_programs)
    def _(number):
        seq = plan.search(number, plan.MERGES, line, work, cfg)
        row = plan.row_of(seq, refs, cfg)
        merge_rows(
            parts_gmem,
            sums_gmem,
            refs.sinks_gmem,
            refs.out_gmem,
            refs.lse_gmem,
            number - plan.before(plan.MERGES, seq, line, work),
            plan.tokens_of(row, line, cfg) * cfg.problem.num_heads,
            row.start + plan.first_of(row, line, cfg),
            plan.tiles_of(row, line, cfg),
            plan.splits_of(row, refs.per_split_gmem[0], line, cfg),
            plan.before(plan.PLACES, seq, line, work),
            line,
            cfg,
        )


def merge_rows(
    parts_gmem, sums_gmem, sinks_gmem, out_gmem, lse_gmem,
    turn, num_rows, first_token, tiles, splits, places, line: Line, cfg: Config,
) -> None:  # fmt: skip
    """Merges the turn-th rows (token, query head) of a sequence's `num_rows` split ones.

    Its items have `tiles` tiles of query tokens, from `first_token` on, and `splits` parts, from `places` on.
    """
    scalars = turn, num_rows, first_token, tiles, splits, places
    refs = parts_gmem, sums_gmem, sinks_gmem, out_gmem, lse_gmem
    scalar = plgpu.Layout.WG_SPLAT(())

    @inline(*[plgpu.RefType()] * len(refs), *[scalar] * len(scalars))
    def body(_, *arguments):
        addresses = [address(x) for x in arguments[: len(refs)]]
        values = [x.registers.item() for x in arguments[len(refs) :]]
        _merge_rows(*addresses, *values, line, cfg)  # pyright: ignore[reportCallIssue]

    body(*refs, *scalars)


def _merge_rows(
    parts, sums, sinks, out, lse, turn, num_rows, first_token, tiles, splits, places, line: Line, cfg: Config
):
    problem, threads = cfg.problem, cfg.problem.head_size // 4
    index = thread()
    lane, column = arith.divui(index, i32(threads)), arith.remui(index, i32(threads))
    row = arith.addi(arith.muli(turn, i32(cfg.merged_rows)), lane)
    own = arith.andi(_less(lane, i32(cfg.merged_rows)), _less(row, num_rows))
    row = arith.select(own, row, i32(0))
    token, head = arith.divui(row, i32(problem.num_heads)), arith.remui(row, i32(problem.num_heads))
    tile, of_tile = arith.divui(token, i32(line.tokens)), arith.remui(token, i32(line.tokens))
    half, of_half = arith.divui(of_tile, i32(cfg.half)), arith.remui(of_tile, i32(cfg.half))
    kv_head, of_group = arith.divui(head, i32(problem.group)), arith.remui(head, i32(problem.group))
    of_part = arith.addi(arith.muli(half, i32(ROWS)), arith.addi(arith.muli(of_half, i32(problem.group)), of_group))
    item = arith.addi(arith.muli(kv_head, tiles), arith.subi(arith.subi(tiles, i32(1)), tile))
    place = arith.addi(places, arith.muli(item, splits))
    rows_of_part = (2 if line.wide else 1) * ROWS

    def part(number):
        """The logarithm of a part's sum, and four elements."""
        inside = _less(number, splits)
        number = arith.select(inside, number, i32(0))
        at = arith.addi(arith.muli(wide(arith.addi(place, number)), i64(rows_of_part)), wide(of_part))
        [total] = assembly("ld.global.f32 $0, [$1];", "=f,l", 1, arith.addi(sums, arith.muli(at, i64(4))))
        total = arith.select(inside, total, _f32(float("-inf")))
        at = arith.addi(arith.muli(at, i64(4 * problem.head_size)), arith.muli(wide(column), i64(16)))
        elements = assembly("ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", 4, arith.addi(parts, at))
        return total, elements

    top, total, *acc = _over_parts(part, splits)
    norm, base = total, top
    if problem.per_head.sinks:
        at = arith.muli(wide(head), i64(4))
        [sink] = assembly("ld.global.f32 $0, [$1];", "=f,l", 1, arith.addi(sinks, at))
        sink = arith.mulf(sink, _f32(LOG2E))
        base = arith.maximumf(top, sink)
        keep = _exp2(arith.subf(top, base))
        norm = arith.addf(arith.mulf(total, keep), _exp2(arith.subf(sink, base)))
        acc = [arith.mulf(x, keep) for x in acc]
    # NaN counts as seen: what is not a number must show.
    seen = arith.cmpf(arith.CmpFPredicate.UNE, total, _f32(0.0))
    norm = arith.select(seen, norm, _f32(1.0))
    acc = [arith.divf(x, norm) for x in acc]
    log_sum = arith.divf(arith.addf(base, _log2(norm)), _f32(LOG2E))
    log_sum = arith.select(seen, log_sum, _f32(float("-inf")))
    index = wide(arith.addi(arith.muli(arith.addi(first_token, token), i32(problem.num_heads)), head))
    at = arith.addi(arith.muli(index, i64(2 * problem.head_size)), arith.muli(wide(column), i64(8)))
    pair = {"float16": "f16x2", "bfloat16": "bf16x2"}[problem.query_dtype]
    assembly(
        f"""{{ .reg .pred own; .reg .b32 a, b; setp.ne.b32 own, $0, 0;
        cvt.rn.{pair}.f32 a, $3, $2; cvt.rn.{pair}.f32 b, $5, $4; @own st.global.v2.b32 [$1], {{a, b}}; }}""",
        "r,l,f,f,f,f", 0, word(own), arith.addi(out, at), *acc,
    )  # fmt: skip
    first = arith.andi(own, arith.cmpi(arith.CmpIPredicate.eq, column, i32(0)))
    assembly(
        "{ .reg .pred own; setp.ne.b32 own, $0, 0; @own st.global.f32 [$1], $2; }",
        "r,l,f", 0, word(first), arith.addi(lse, arith.muli(index, i64(4))), log_sum,
    )  # fmt: skip


def _over_parts(part, splits):
    """The softmax of all parts, in their order: maximum, sum and four elements."""
    carry = [_f32(-1e30), *[_f32(0.0)] * 5]
    loop = scf.ForOp(_index(i32(0)), _index(splits), _index(i32(_IN_FLIGHT)), carry)
    with ir.InsertionPoint(loop.body):
        first = arith.index_cast(ir.IntegerType.get_signless(32), loop.induction_variable)
        parts = [part(arith.addi(first, i32(i))) for i in range(_IN_FLIGHT)]
        top, total, *acc = loop.inner_iter_args
        for log_sum, elements in parts:
            new_top = arith.maximumf(top, log_sum)
            keep, weight = _exp2(arith.subf(top, new_top)), _exp2(arith.subf(log_sum, new_top))
            total = arith.addf(arith.mulf(total, keep), weight)
            acc = [arith.addf(arith.mulf(x, keep), arith.mulf(y, weight)) for x, y in zip(acc, elements, strict=True)]
            top = new_top
        scf.yield_([top, total, *acc])
    return loop.results


def _exp2(x):
    return assembly("ex2.approx.ftz.f32 $0, $1;", "=f,f", 1, x)[0]


def _log2(x):
    return assembly("lg2.approx.ftz.f32 $0, $1;", "=f,f", 1, x)[0]


def _less(x, y):
    return arith.cmpi(arith.CmpIPredicate.slt, x, y)


def _index(x):
    return arith.index_cast(ir.IndexType.get(), x)


def _f32(x: float):
    return mgpu.c(x, ir.F32Type.get())
