"""Stores of the decode kernel: out and lse of a whole item, or the partial result of a split.

A partial result is the normalised softmax over the split's tokens alone; `merge.py` merges an item's partial results.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.plan import Item, QueryTile, QueuedSplit, Split
from paged_jax.kernels.mosaic_gpu.decode.refs import Partials, Refs
from paged_jax.kernels.mosaic_gpu.decode.softmax import State, sinks_of, summed
from paged_jax.kernels.mosaic_gpu.decode.tiles import Tiles
from paged_jax.kernels.mosaic_gpu.hopper.epilogue import Epilogue, join_sinks, saw_tokens
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.logits import cache_scale
from paged_jax.kernels.mosaic_gpu.hopper.registers import layout, store, wide


def store_split(split: Split, query: QueryTile, state: State, refs: Refs, geometry: Geometry, tiles: Tiles) -> None:
    """Stores the results of a program's only split."""
    state = summed(state, geometry)
    v_scale = cache_scale(refs.inputs_gmem.options.v_scale, geometry.problem.v_scale, split.item.kv_head)
    if not geometry.tuning.merges:
        _store_whole_item(split.item, query, v_scale, state, refs, geometry, tiles)
        return
    _store_partial(split.partial, v_scale, state, refs, geometry, tiles)


def store_queued_split(
    queued: QueuedSplit, query: QueryTile, state: State, refs: Refs, geometry: Geometry, tiles: Tiles
) -> None:
    """Stores the results of a queue's split, and where its item's partial results lie.

    Copies from shared memory may still run when this returns.
    """
    split, item_partials = queued.split, refs.outputs_gmem.item_partials
    state = summed(state, geometry)
    v_scale = cache_scale(refs.inputs_gmem.options.v_scale, geometry.problem.v_scale, split.item.kv_head)
    lax.cond(
        queued.is_whole,
        lambda: _store_whole_item(split.item, query, v_scale, state, refs, geometry, tiles),
        lambda: _store_partial(split.partial, v_scale, state, refs, geometry, tiles),
    )

    @pl.when(split.is_first)
    def store_first():
        item_partials.first[split.item.index] = split.partial

    @pl.when(queued.is_last)
    def store_last():
        item_partials.last_program[split.item.index] = lax.axis_index("program")


def _store_whole_item(
    item: Item, query: QueryTile, v_scale, state: State, refs: Refs, geometry: Geometry, tiles: Tiles
) -> None:
    """Stores out and lse of an item. Heads that saw no token get out 0 and lse -inf."""
    smem = refs.smem
    out, maxima, sums = state
    seen = saw_tokens(sums)
    if geometry.problem.per_head.sinks:
        sinks = sinks_of(refs.inputs_gmem.options.per_head.sinks, item.kv_head, geometry)
        maxima, sums, rescale = join_sinks(sinks, maxima, sums)
        out = [x * wide(rescale, x.shape[0]) for x in out]
    end = Epilogue.of(seen, maxima, sums)
    lse = end.lse
    out = [x * wide(v_scale / end.divisors, x.shape[0]) for x in out]
    for out_smem, x in zip(smem.out, out, strict=True):
        tiles.store_out(out_smem, layout(x.astype(geometry.problem.query_dtype)))
    smem.sums[...] = layout(lse, 0)
    plgpu.commit_smem()

    @pl.when(query.is_there)
    def copy():
        _copy_out(query, refs, geometry)
        for i in range(geometry.heads_per_item):
            refs.outputs_gmem.lse[query.out_row + i] = smem.sums[geometry.column(i)]


def _copy_out(query: QueryTile, refs: Refs, geometry: Geometry) -> None:
    """Copies an item's out from shared memory to its rows in global memory."""
    for out_smem, (first, size) in zip(refs.smem.out, geometry.head_slices, strict=True):
        if first > 0:  # this slice overlaps with the previous one, with equal values
            plgpu.wait_smem_to_gmem(0)
        for head, heads in geometry.copied_heads:
            rows, rows_smem = pl.ds(query.out_row + head, heads), out_smem.at[pl.ds(geometry.column(head), heads)]
            plgpu.copy_smem_to_gmem(rows_smem, refs.outputs_gmem.out.at[rows, pl.ds(first, size)])


def _store_partial(partial: Scalar, v_scale, state: State, refs: Refs, geometry: Geometry, tiles: Tiles) -> None:
    """Stores a partial result: in a cluster directly, otherwise by copies, which may still run when this returns."""
    smem, partials, directly = refs.smem, refs.outputs_gmem.partials, geometry.tuning.merges_in_cluster
    in_smem, in_gmem = Partials(smem.partial_out, smem.maxima, smem.sums), [x.at[partial] for x in partials]
    stored = Partials(*in_gmem) if directly else in_smem
    out, maxima, sums = state
    end = Epilogue.of(saw_tokens(sums), maxima, sums)
    row = 0
    for x in (x * wide(v_scale / end.divisors, x.shape[0]) for x in out):
        tiles.store_partial_out(stored.out, x, row)
        row += x.shape[0]
    store(stored.maxima, layout(jnp.where(end.seen, maxima, -jnp.inf), 0))
    store(stored.sums, layout(sums, 0))
    if directly:
        return
    plgpu.commit_smem()
    for x_smem, x_gmem in zip(in_smem, in_gmem, strict=True):
        plgpu.copy_smem_to_gmem(x_smem, x_gmem)
