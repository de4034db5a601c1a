"""The merge of an item's partial results into out and lse, in the cluster that computed them or in a kernel of its own.

The heads of an item are merged 64 elements (a merged slice) at a time, as O^T in the layout of wgmma's results.

Grid of the kernel: `merging_programs` programs of one warpgroup for each item. With queues most items are whole, so
there are fewer programs, and each looks at several items.

Who loads, who computes: the warpgroup loads partial results from global memory into registers, and merges them there.

Shared memory: the merged slice of out, and the item's lse.

Roofline: 4 * (head_size + 2 * merged slices) * columns bytes for each partial result, mostly from L2. Latency bounds
the kernel, not bandwidth, so it loads many partial results at a time.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.in_place import apart
from paged_jax.kernels.mosaic_gpu.decode import plan
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.plan import Item
from paged_jax.kernels.mosaic_gpu.decode.refs import (
    Inputs,
    ItemPartials,
    MergedScratch,
    Outputs,
    Partials,
    merged_scratch,
)
from paged_jax.kernels.mosaic_gpu.decode.softmax import sinks_of
from paged_jax.kernels.mosaic_gpu.hopper.epilogue import Epilogue, saw_tokens
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOWEST, exp, layout, store, wide

_PARTIALS_IN_FLIGHT = 16
_MORE_OF_QUEUES = 4  # loads in flight in addition to the mean number of queues for each item
_ITEM_PROGRAMS = 256  # programs that look at items, if there are queues


class MergeInputs(NamedTuple):
    """The arrays that the merge kernel reads."""

    seq_lens: Ref
    sinks: Ref  # [num_heads]
    query_indices: Ref  # as in `refs.Inputs`
    partials: Partials
    item_partials: ItemPartials


class MergeRefs(NamedTuple):
    """The references of a merge."""

    sinks_gmem: Ref
    query_indices_gmem: Ref
    partials_gmem: Partials
    out_gmem: Ref
    lse_gmem: Ref
    smem: MergedScratch


def merge(geometry: Geometry, read: Inputs, written: Outputs) -> tuple[Array, Array]:
    """Runs the merge kernel after the decode kernel. Returns out [num_tokens * num_heads, head_size] and lse."""
    problem, sinks = geometry.problem, read.options.per_head.sinks
    rows = problem.num_tokens * problem.num_heads
    given = MergeInputs(read.seq_lens, sinks, read.query_indices, written.partials, written.item_partials)
    inputs, tree = jax.tree.flatten(given)
    out_type = (
        jax.ShapeDtypeStruct((rows, problem.head_size), problem.query_dtype),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
    )
    kernel = functools.partial(
        plgpu.kernel,
        functools.partial(_kernel, tree=tree, geometry=geometry),
        scratch_types=(merged_scratch(geometry),),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(geometry.merging_programs, _item_programs(geometry)),
        grid_names=("program", "item"),
        kernel_name="decode_merge",
    )
    if not geometry.tuning.queues:
        return kernel(out_type=out_type)(*inputs)
    # The decode kernel has stored whole items; this kernel stores the others.
    return apart(pl.run_state(lambda refs: kernel(out_type=())(*inputs, *refs))((written.out, written.lse)))


def _kernel(*refs, tree: Any, geometry: Geometry) -> None:
    """Merges this program's items."""
    *inputs_gmem, out_gmem, lse_gmem, smem = refs
    inputs_gmem = jax.tree.unflatten(tree, inputs_gmem)
    sinks_gmem, query_indices_gmem, partials_gmem = inputs_gmem.sinks, inputs_gmem.query_indices, inputs_gmem.partials
    merge_refs = MergeRefs(sinks_gmem, query_indices_gmem, partials_gmem, out_gmem, lse_gmem, smem)
    if geometry.tuning.queues:
        _merge_cut_items(inputs_gmem.item_partials, merge_refs, geometry)
        return
    item = plan.item_of(lax.axis_index("item"), geometry)
    seq_len = inputs_gmem.seq_lens[item.seq]
    first_partial = item.index * geometry.tuning.splits
    num_splits = plan.num_splits(seq_len, geometry)
    merge_item(item, first_partial, num_splits, lax.axis_index("program"), merge_refs, geometry)


def _merge_cut_items(item_partials: ItemPartials, refs: MergeRefs, geometry: Geometry) -> None:
    """Merges this program's items that queues have cut. It loads the split counts of all of them together."""
    first, step = lax.axis_index("item"), _item_programs(geometry)

    def num_splits(index):
        return plan.num_queued_splits(item_partials.last_program[index], item_partials.first[index])

    indices = [first + i for i in range(0, geometry.num_items, step)]
    counts = [num_splits(lax.min(index, jnp.int32(geometry.num_items - 1))) for index in indices]

    @pl.when(functools.reduce(lax.max, counts) > 1)
    def merge_some():
        @pl.loop(first, geometry.num_items, step=step)
        def merge_if_cut(index):
            @pl.when(num_splits(index) > 1)
            def merge_one():
                item = plan.item_of(index, geometry)
                program = lax.axis_index("program")
                merge_item(item, item_partials.first[index], num_splits(index), program, refs, geometry)


def _item_programs(geometry: Geometry) -> int:
    """Programs of the grid's item axis."""
    if not geometry.tuning.queues:
        return geometry.num_items
    return min(geometry.num_items, max(_ITEM_PROGRAMS, pl.cdiv(geometry.num_items, _PARTIALS_IN_FLIGHT)))


def merge_item(
    item: Item, first_partial: Scalar, count: Scalar, program: Scalar, refs: MergeRefs, geometry: Geometry
) -> None:
    """Merges a program's slices of an item's `count` partial results. Programs from `merging_programs` on have none."""
    programs, slices = geometry.merging_programs, geometry.num_merged_slices

    @pl.when(program < programs)
    def merge():
        if programs == slices:
            _merge_slice(item, first_partial, count, program, refs, geometry)
        else:
            pl.loop(program, slices, step=programs)(
                lambda number: _merge_slice(item, first_partial, count, number, refs, geometry)
            )


def _merge_slice(
    item: Item, first_partial: Scalar, count: Scalar, number: Scalar, refs: MergeRefs, geometry: Geometry
) -> None:
    """Merges slice `number` of an item's partial results, in a fixed order; slice 0 also stores lse."""
    query = plan.query_tile(item, refs.query_indices_gmem, geometry)
    maxima, sums, out = _merged(first_partial, count, number, refs.partials_gmem, geometry)
    seen = saw_tokens(sums)
    if geometry.problem.per_head.sinks:
        sinks = sinks_of(refs.sinks_gmem, item.kv_head, geometry)
        maxima, sums, out = _add((maxima, sums, out), [(jnp.zeros_like(out), sinks, jnp.ones_like(sums))])
    end = Epilogue.of(seen, maxima, sums)
    plgpu.wait_smem_to_gmem(0)  # the previous slice's copy reads the same shared memory, and its elements may overlap
    store(refs.smem.out.T, layout((out * wide(1.0 / end.divisors, WGMMA_ROWS)).astype(geometry.problem.query_dtype)))
    refs.smem.lse[...] = layout(end.lse, 0)  # equal for all slices of an item
    plgpu.commit_smem()
    first = lax.min(WGMMA_ROWS * number, jnp.int32(geometry.problem.head_size - WGMMA_ROWS))

    @pl.when(query.is_there)
    def copy():
        for head, heads in geometry.copied_heads:
            rows, elements = pl.ds(query.out_row + head, heads), pl.ds(first, WGMMA_ROWS)
            rows_smem = refs.smem.out.at[pl.ds(geometry.column(head), heads)]
            plgpu.copy_smem_to_gmem(rows_smem, refs.out_gmem.at[rows, elements])

        @pl.when(number == 0)
        def store_lse():
            for i in range(geometry.heads_per_item):
                refs.lse_gmem[query.out_row + i] = refs.smem.lse[geometry.column(i)]

    plgpu.wait_smem_to_gmem(0)


def _merged(first_partial: Scalar, count: Scalar, number: Scalar, partials_gmem: Partials, geometry: Geometry):
    """Returns merged maxima [columns], sums [columns], and a slice of O^T [64, columns] not yet divided by the sums."""
    columns, tuning = geometry.columns, geometry.tuning
    expected = pl.cdiv(tuning.queues, geometry.num_items) + _MORE_OF_QUEUES if tuning.queues else tuning.splits
    in_flight = min(_PARTIALS_IN_FLIGHT, expected)

    def load(at):  # no layout is given: Mosaic infers it from the additions faster than from a cast
        out = plgpu.load(partials_gmem.out.at[at, pl.ds(WGMMA_ROWS * number, WGMMA_ROWS)], optimized=False)
        maxima, sums = (plgpu.load(x.at[at], optimized=False) for x in (partials_gmem.maxima, partials_gmem.sums))
        return out, maxima, sums

    def step(i, merged):
        splits = [i * in_flight + j for j in range(in_flight)]  # past the end: the last split, with weight 0
        last = jnp.int32(count) - 1
        loaded = [load(plan.partial_of(first_partial, lax.min(split, last), geometry)) for split in splits]
        factors = [jnp.where(split < count, 1.0, 0.0) for split in splits]
        return _add(merged, [(out, maxima, sums * f) for (out, maxima, sums), f in zip(loaded, factors, strict=True)])

    nothing = (
        layout(jnp.full((columns,), LOWEST, jnp.float32), 0),
        layout(jnp.zeros((columns,), jnp.float32), 0),
        layout(jnp.zeros((WGMMA_ROWS, columns), jnp.float32)),
    )
    steps = lax.div(jnp.int32(count + (in_flight - 1)), jnp.int32(in_flight))
    return lax.fori_loop(0, steps, step, nothing)


def _add(merged, others: Sequence[tuple[Array, Array, Array]]):
    """Adds normalised softmaxes: of each, out [64, columns], and maxima and sums [columns]."""
    old_maxima, sums, out = merged
    maxima = functools.reduce(lax.max, [x for _, x, _ in others], old_maxima)
    keep = exp(old_maxima - maxima)
    sums, out = sums * keep, out * wide(keep, WGMMA_ROWS)
    for other_out, other_maxima, other_sums in others:
        weight = exp(other_maxima - maxima) * other_sums
        sums, out = sums + weight, out + other_out * wide(weight, WGMMA_ROWS)
    return maxima, sums, out
