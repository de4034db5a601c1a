"""Stores of the ragged kernel: out and lse of a whole item, or the partial result of a split.

Out and lse pass through the query's shared memory; a partial result goes from registers to global memory, and so do out
and lse of a wide item if warpgroups read the queries. The warpgroup that is the last one to store a partial result of
its rows merges them all. In a thin item each of two warpgroups has seen half of the tiles. One hands its softmax over
to the other, also through the query's shared memory.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.epilogue import Epilogue, join_sinks, saw_tokens
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.registers import exp, layout
from paged_jax.kernels.mosaic_gpu.ragged import items, softmax
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.ptx import items as counters
from paged_jax.kernels.mosaic_gpu.ragged.ptx import merge
from paged_jax.kernels.mosaic_gpu.ragged.ptx import results as ptx
from paged_jax.kernels.mosaic_gpu.ragged.ptx.results import Results
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref, Refs, Scratch, Signal
from paged_jax.kernels.mosaic_gpu.ragged.softmax import Rows, State, factor_of_results, over_columns


def hand_over(state: State, rows: Rows, places_smem: Ref, smem: Scratch, geometry: Geometry) -> None:
    """Hands a softmax over to the other warpgroup."""
    ptx.hand_over(state.out, places_smem, rows.query.num_tokens, geometry)
    smem.maxima[...] = state.maxima
    smem.sums[...] = state.sums
    plgpu.barrier_arrive(smem.signal(Signal.HANDED_OVER))


def take_over(state: State, rows: Rows, places_smem: Ref, smem: Scratch, geometry: Geometry) -> State:
    """Merges this warpgroup's softmax with the one that the other warpgroup has handed over."""
    out, maxima, sums = state
    by_row = plgpu.Layout.WGMMA.reduce(1)
    other_maxima, other_sums = (plgpu.load(ref, layout=by_row) for ref in (smem.maxima, smem.sums))
    both = lax.max(maxima, other_maxima)
    rescale, other_rescale = exp(maxima - both), exp(other_maxima - both)
    out = ptx.take_over(out, rescale, other_rescale, places_smem, rows.query.num_tokens, geometry)
    return State(layout(out), layout(both, 1), layout(sums * rescale + other_sums * other_rescale, 1))


def store(stage: Scalar, band: Scalar, state: State, out_smem: Ref, refs: Refs, kind: ItemKind) -> None:
    """Stores one band of the item in a stage through `out_smem`, and releases the description of a wide item.

    The loop over tiles leaves no register for the item. Reading the item again is faster than reloading a spill, which
    has the latency of memory (benchmarks/LOG.md, "What is spilled").
    """
    item = items.read(stage, refs.smem)
    rows = softmax.rows_of(item, band, refs.inputs_gmem, kind)
    # Each warpgroup has its own memory for lse: while one stores a thin item, another may store the next item.
    results_smem = Results(out_smem, refs.smem.lse_of(lax.axis_index("warpgroup")))

    def finish():
        if kind.is_wide:
            items.finish(stage, refs.smem)

    def store_whole():
        finish()  # the following item can be described while results are stored
        _store_whole(rows, state, results_smem, refs, kind)

    def store_partial():
        _store_partial(item.partial, band, rows, state, refs, kind)
        if not kind.geometry.merges_copies:
            _merge_if_last(stage, band, refs, kind)
        finish()

    if kind.geometry.merges_copies:
        store_partial()
    elif not kind.may_split:
        store_whole()
    else:
        pl.when(item.partial < 0)(store_whole)
        pl.when(item.partial >= 0)(store_partial)


def _store_whole(rows: Rows, state: State, results_smem: Results, refs: Refs, kind: ItemKind) -> None:
    """Stores out and lse. Rows that saw no token get out 0 and lse -inf."""
    (out, maxima, sums), factor = state, factor_of_results(kind.geometry)
    sums = sums * factor
    seen = saw_tokens(sums)
    if rows.sinks is not None:
        maxima, sums, rescale = join_sinks(rows.sinks, maxima, sums)
        out = out * over_columns(rescale, out.shape[1])
    end = Epilogue.of(seen, maxima, sums)
    out = out * over_columns(rows.v_scale * factor / end.divisors, out.shape[1])
    rounded = layout(out.astype(kind.geometry.problem.query_dtype))
    results_gmem = Results(refs.outputs_gmem.out, refs.outputs_gmem.lse)
    if kind.is_wide and kind.geometry.reads_own_queries:  # shared memory has the next query
        ptx.store_from_registers(rounded, layout(end.lse, 1), results_gmem, rows.query, kind.geometry)
        return
    if kind.geometry.divides_queries:  # shared memory is typed as float16; only the bits matter
        rounded = lax.bitcast_convert_type(rounded, kind.geometry.operand_dtype)
    results_smem.out[...] = rounded
    results_smem.lse[...] = layout(end.lse, 1)
    ptx.store_rows(results_smem, results_gmem, rows.query, kind)


def _store_partial(partial: Scalar, band: Scalar, rows: Rows, state: State, refs: Refs, kind: ItemKind) -> None:
    """Stores one band of a partial result."""
    (out, maxima, sums), factor = state, factor_of_results(kind.geometry)
    sums = sums * factor
    end = Epilogue.of(saw_tokens(sums), maxima, sums)
    partials_gmem = refs.outputs_gmem.partials(kind)
    out = layout(out * over_columns(rows.v_scale * factor / end.divisors, out.shape[1]))
    ptx.store_partial(partials_gmem.out.at[partial, band], out, rows.query.num_tokens, kind.geometry)
    partials_gmem.log_sums.at[partial, band][...] = layout(end.lse_of_base_2, 1)


def _merge_if_last(stage: Scalar, band: Scalar, refs: Refs, kind: ItemKind) -> None:
    """Merges the partial results of one band of an item, if this warpgroup has stored the last one of them.

    They are merged in the order of splits, so the result does not depend on which one is the last.
    """
    item = items.read(stage, refs.smem)
    counter = kind.split_counter(item.first_partial, band)
    earlier = counters.stored_before(counter, lax.axis_index("warpgroup"), refs)

    @pl.when(earlier == item.splits - 1)
    def merge_all():
        item = items.read(stage, refs.smem)
        rows = softmax.query_rows_of(item, band, kind.geometry)
        outputs, sinks = refs.outputs_gmem, refs.inputs_gmem.options.per_head.sinks
        row_refs = merge.RowRefs(outputs.partials(kind), sinks, outputs.out, outputs.lse)
        merge.merge_item(row_refs, merge.SplitRows(*rows, band, item.first_partial, item.splits), kind)
