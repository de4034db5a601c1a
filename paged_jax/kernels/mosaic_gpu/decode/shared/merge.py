"""The merge of the partial results of each query: those of its prefix and those of its own tokens.

Grid: one program of one warpgroup for each query, with the heads of one item of its prefix.

Who loads, who computes: each thread loads a part of a row of each partial result into registers, and merges them.

Roofline: 4 * head_size bytes for each row of a partial result, mostly from L2. Latency bounds the kernel, not
bandwidth, so it loads several rows at a time.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.decode import plan as decode_plan
from paged_jax.kernels.mosaic_gpu.decode.refs import ItemPartials
from paged_jax.kernels.mosaic_gpu.decode.shared import plan
from paged_jax.kernels.mosaic_gpu.decode.shared.refs import Outputs, Parts
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_least, div
from paged_jax.kernels.mosaic_gpu.hopper.limits import QUERY_ROWS, WARPGROUP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths, Partials, Ref
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOG2E, LOWEST

_IN_FLIGHT = 4  # partial results that a program loads at a time


class _Inputs(NamedTuple):
    """The arrays that the merge kernel reads."""

    partials: Partials
    item_partials: ItemPartials
    prefixes: Lengths
    sinks: Ref  # [num_heads]


class _Row(NamedTuple):
    """The softmax of a row."""

    maximum: Any  # of logits, times log2(e)
    total: Any  # sum of exponentials
    out: Array  # [head_size], before the division by the sum


def merge(parts: Parts, written: Outputs, prefixes: Lengths, sinks: Array) -> tuple[Array, Array]:
    """Runs the merge kernel. Returns out [num_queries * num_heads, head_size] and lse."""
    problem = parts.own.problem
    inputs, tree = jax.tree.flatten(_Inputs(written.partials, written.item_partials, prefixes, sinks))
    rows = problem.num_tokens * problem.num_heads
    return plgpu.kernel(
        functools.partial(_kernel, tree=tree, parts=parts),
        out_type=(
            jax.ShapeDtypeStruct((rows, problem.head_size), jnp.dtype(problem.query_dtype)),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(problem.num_tokens, plan.lines(problem)),
        grid_names=("query", "part"),
        kernel_name="shared_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs)


def _kernel(*refs, tree: Any, parts: Parts) -> None:
    *leaves, out_gmem, lse_gmem = refs
    inputs_gmem, problem = jax.tree.unflatten(tree, leaves), parts.own.problem
    query, heads = lax.axis_index("query"), plan.heads_of_item(problem)
    first_head, size = lax.axis_index("part") * heads, problem.head_size
    rows_of, count = _rows_of(query, first_head, inputs_gmem, parts)
    row_layout = plgpu.Layout.WG_STRIDED((size,), vec_size=size // WARPGROUP)
    partials = inputs_gmem.partials

    def load(number, i):
        row = rows_of(lax.min(number, count - 1), i)
        log_sum = jnp.where(number < count, partials.log_sums[row], -jnp.inf)
        return log_sum, plgpu.load(partials.out.at[row], layout=row_layout, optimized=False)

    def step(i, merged):
        numbers = [i * _IN_FLIGHT + j for j in range(_IN_FLIGHT)]
        loaded = [[load(number, head) for number in numbers] for head in range(heads)]
        return [_add(row, of_row) for row, of_row in zip(merged, loaded, strict=True)]

    zeros = plgpu.layout_cast(jnp.zeros((size,), jnp.float32), row_layout)
    nothing = [_Row(jnp.float32(LOWEST), jnp.float32(0), zeros) for _ in range(heads)]
    merged = lax.fori_loop(0, lax.div(count + (_IN_FLIGHT - 1), jnp.int32(_IN_FLIGHT)), step, nothing)
    for i, row in enumerate(merged):
        sink = inputs_gmem.sinks[first_head + i] * LOG2E if problem.per_head.sinks else None
        _store(row, sink, query * problem.num_heads + first_head + i, out_gmem, lse_gmem, row_layout)


def _rows_of(query: Scalar, first_head: Scalar, inputs_gmem: _Inputs, parts: Parts) -> tuple[Any, Scalar]:
    """Returns a function that finds the row of a partial result from its number and a head, and the count of them.

    Heads are counted from `first_head` on. They are in one item of the prefix.
    """
    own, group = parts.own, parts.own.problem.group
    kv_head = div(first_head, group)
    item = query * own.items_per_seq + kv_head
    first, last = inputs_gmem.item_partials.first[item], inputs_gmem.item_partials.last_program[item]
    num_own = at_least(decode_plan.num_queued_splits(last, first), 1)  # a whole item has one
    queries = plan.queries_of_tile(own.problem)
    place = plan.place_of(query, first_head, inputs_gmem.prefixes, parts.prefix)

    def row_of(number, i):
        of_group = first_head - kv_head * group + i
        copy = div(of_group, own.heads_per_copy)
        column = copy * QUERY_ROWS + of_group - copy * own.heads_per_copy
        of_line = decode_plan.partial_of(first, number, parts.own_line)
        of_own = (of_line * own.items_per_seq + kv_head) * own.columns + column
        partial = place.first + (number - num_own) * plan.lines(own.problem)
        of_prefix = partial * WGMMA_ROWS + place.row + i * queries
        return jnp.where(number < num_own, of_own, parts.own_rows + of_prefix)

    return row_of, num_own + place.count


def _add(row: _Row, partials: list[tuple[Any, Array]]) -> _Row:
    """Adds normalised softmaxes to a row, in their order."""
    maximum = functools.reduce(lax.max, [log_sum for log_sum, _ in partials], row.maximum)
    keep = jnp.exp2(row.maximum - maximum)
    total, out = row.total * keep, row.out * keep
    for log_sum, other in partials:
        weight = jnp.exp2(log_sum - maximum)
        total, out = total + weight, out + other * weight
    return _Row(maximum, total, out)


def _store(row: _Row, sink: Any, index: Scalar, out_gmem: Ref, lse_gmem: Ref, row_layout: Any) -> None:
    """Stores a row. If it saw no token, its out is 0 and its lse is -inf. NaN counts as seen."""
    seen = row.total != 0
    maximum, total, out = row
    if sink is not None:
        maximum = lax.max(row.maximum, sink)
        keep = jnp.exp2(row.maximum - maximum)
        total, out = row.total * keep + jnp.exp2(sink - maximum), row.out * keep
    total = jnp.where(seen, total, 1.0)
    out_gmem[index] = plgpu.layout_cast((out * (1 / total)).astype(out_gmem.dtype), row_layout)
    lse_gmem[index] = jnp.where(seen, (maximum + jnp.log2(total)) / LOG2E, -jnp.inf)
