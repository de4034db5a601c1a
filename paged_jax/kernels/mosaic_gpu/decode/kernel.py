"""The decode kernel: attention of one query a sequence over its blocks.

Grid: a program, which is a thread block of two warpgroups, for each split of each work item (sequence, kv head). Or
there is a program for each queue, which attends to the queue's splits one after the other (`plan.py`). A program may
have nothing to do.

Who loads: warpgroup 1 copies runs of tokens (TMA, through the block table) into rings of `stages` tiles of K and of V
(`load.py`). In a queue the rings continue from one split to the next: while a result is stored, the next split's query
and tiles arrive.

Who computes: warpgroup 0 computes two products for each tile, with tokens as rows and query heads as columns
(`softmax.py`). The class of tiles makes operands from the rings (`tiles/`). Then warpgroup 0 stores the results
(`results.py`).

A query tile has a multiple of 8 query rows, because copies need that: an item's heads, and zeros.

Shared memory, for 4 query heads a kv head, head_size 128, bfloat16, tiles of 64 tokens, 2 stages, two programs a
multiprocessor:

    | ring of K 32 KiB | ring of V 32 KiB | query 2 KiB | P 1 KiB | out 2 KiB, partial result 4 KiB, or both |

If splits are short and few, the programs of an item are a cluster: they store their partial results, and merge them
after a barrier (`merge.py`). Otherwise a second kernel merges them. `write.py` writes new tokens.

Roofline: 4 * head_size bytes for each token and kv head, or 2 * head_size bytes if caches have 8 bits. K and V are read
from HBM once.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.decode import plan, results, softmax, write
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.load import drain_rings, load_split
from paged_jax.kernels.mosaic_gpu.decode.merge import MergeRefs, merge_item
from paged_jax.kernels.mosaic_gpu.decode.plan import Item, QueryTile, Queue, QueuedSplit, Split
from paged_jax.kernels.mosaic_gpu.decode.refs import Inputs, MergedScratch, Outputs, Refs, outputs, scratch
from paged_jax.kernels.mosaic_gpu.decode.tiles import Tiles
from paged_jax.kernels.mosaic_gpu.hopper import fence
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.launch import launch

_COMPUTES, _LOADS = 0, 1  # indices of warpgroups
_REGISTERS = 128  # registers of each thread, if two programs share a multiprocessor
_MOST_COLUMNS = 24  # more columns need more registers


def attend(geometry: Geometry, tiles: Tiles, inputs: Inputs) -> Outputs:
    """Runs the kernel. If it writes new tokens, both caches are references."""
    return launch(
        lambda *refs: _kernel(Refs(*refs), geometry, tiles),
        inputs,
        outputs(geometry),
        scratch(geometry),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        num_threads=2,
        kernel_name=geometry.kernel_name,
        **_mesh(geometry),
    )


def _mesh(geometry: Geometry) -> dict[str, Any]:
    """The grid, as arguments of `plgpu.kernel`."""
    splits, num_items = geometry.tuning.splits, geometry.num_items
    if geometry.tuning.merges_in_cluster:
        return {"cluster": (splits,), "cluster_names": ("split",), "grid": (num_items,), "grid_names": ("item",)}
    if geometry.tuning.queues:
        return {"grid": (geometry.num_programs,), "grid_names": ("program",)}
    if geometry.problem.partition_size:  # one axis, because a second axis would bound the number of partitions
        return {"grid": (splits * num_items,), "grid_names": ("program",)}
    return {"grid": (splits, num_items), "grid_names": ("split", "item")}


def _item_and_split(geometry: Geometry) -> tuple[Scalar, Scalar]:
    """The index of this program's item, and the number of its split.

    In v2, programs start in the order of split numbers, because few items have the last splits.
    """
    if not geometry.problem.partition_size:
        return lax.axis_index("item"), lax.axis_index("split")
    program, num_items = lax.axis_index("program"), jnp.int32(geometry.num_items)
    return lax.rem(program, num_items), lax.div(program, num_items)


def _kernel(refs: Refs, geometry: Geometry, tiles: Tiles) -> None:
    attend_to_its_own = _attend_queue if geometry.tuning.queues else _attend_one_split
    attend_to_its_own(refs, geometry, tiles)


def _attend_one_split(refs: Refs, geometry: Geometry, tiles: Tiles) -> None:
    """A program with one split."""
    index, number = _item_and_split(geometry)
    split = plan.split_of(refs.inputs_gmem.seq_lens, index, number, geometry)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == _COMPUTES)
    def compute():
        _set_registers(geometry)
        load_query(split.item, refs, geometry)
        query, state = attend_split(split, jnp.int32(0), refs, geometry, tiles)
        results.store_split(split, query, state, refs, geometry, tiles)
        if geometry.tuning.merges_in_cluster:
            _merge_in_cluster(split.item, number, refs, geometry)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(warpgroup == _LOADS)
    def load():
        load_split(split, jnp.int32(0), refs, geometry, tiles)
        drain_rings(split.num_tiles, refs, geometry)
        if geometry.problem.writes_tokens:
            plgpu.barrier_wait(refs.smem.query_ready)  # the new token arrives together with the query
            write.write(split, refs, geometry)


def _attend_queue(refs: Refs, geometry: Geometry, tiles: Tiles) -> None:
    """A program with a queue of splits."""
    seq_lens_gmem = refs.inputs_gmem.seq_lens
    queue = plan.queue_of(seq_lens_gmem, lax.axis_index("program"), geometry)
    warpgroup = lax.axis_index("warpgroup")

    def compute_next(queued: QueuedSplit, tiles_before: Scalar, left: Queue):
        split = queued.split
        query, state = attend_split(split, tiles_before, refs, geometry, tiles)
        plgpu.commit_smem()  # all threads have read the query; the next one may overwrite it
        pl.when(left.has_more)(lambda: load_query(left, refs, geometry))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # until the copies of the last result have read shared memory
        results.store_queued_split(queued, query, state, refs, geometry, tiles)
        if geometry.problem.writes_tokens:  # by this warpgroup, which then loads the next new token
            write.write(split, refs, geometry)

    def load_next(queued: QueuedSplit, tiles_before: Scalar, left: Queue):
        load_split(queued.split, tiles_before, refs, geometry, tiles)

    @pl.when(warpgroup == _COMPUTES)
    def compute():
        _set_registers(geometry)
        pl.when(queue.has_more)(lambda: load_query(queue, refs, geometry))
        plan.for_each_split(compute_next, queue, seq_lens_gmem, geometry)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(warpgroup == _LOADS)
    def load():
        drain_rings(plan.for_each_split(load_next, queue, seq_lens_gmem, geometry), refs, geometry)


def _set_registers(geometry: Geometry) -> None:
    """Limits ptxas to `_REGISTERS` registers a thread, so that two programs fit on a multiprocessor.

    The kernel is launched with this many registers a thread. Two cases have no limit. For heads smaller than 128
    without queues, three programs may fit on a multiprocessor; with more than `_MOST_COLUMNS` columns, registers would
    spill (benchmarks/LOG.md, "Registers of decode").
    """
    limited = geometry.problem.head_size >= 128 or geometry.tuning.queues > 0
    if geometry.tuning.programs == 2 and limited and geometry.columns <= _MOST_COLUMNS:
        plgpu.set_max_registers(_REGISTERS, action="increase")


def load_query(of: Item | Queue, refs: Refs, geometry: Geometry) -> None:
    """Starts the copies of an item's query tile. They read zeros past an item's heads, outside of the array."""
    inputs, smem, copies = refs.inputs_gmem, refs.smem, geometry.query_copies
    item, rows = plan.query_tile(of, inputs.query_indices, geometry).index, geometry.columns // copies
    for i in range(copies):
        # The start is a traced 0, because Pallas refuses a constant slice that goes past the array's end.
        heads_gmem = inputs.query.at[item * copies + i, pl.ds(0 * item, rows)]
        plgpu.copy_gmem_to_smem(heads_gmem, smem.query.at[pl.ds(i * rows, rows)], smem.query_ready)


def attend_split(
    split: Split, tiles_before: Scalar, refs: Refs, geometry: Geometry, tiles: Tiles
) -> tuple[QueryTile, softmax.State]:
    """The softmax of a split. The query's copy has started; `tiles_before` tiles came earlier in the rings."""
    smem = refs.smem
    new = write.new_token(split, refs, geometry) if geometry.problem.writes_tokens else None
    query = plan.query_tile(split.item, refs.inputs_gmem.query_indices, geometry)
    if new is not None:
        write.load(split.item, refs)
    plgpu.barrier_wait(smem.query_ready)
    query_smem, divisor = tiles.query_operand(smem.query, smem.query_operand)
    to_logits = softmax.to_logits(split.item, divisor, refs, geometry)
    end, state = split.end, softmax.empty(geometry)
    if new is not None:  # computed while the first tile arrives
        end = jnp.where(new.is_seen, split.end - 1, split.end)
        state = write.first_state(new, query_smem, to_logits.factor, state, refs, geometry)
    return query, softmax.attend(split, end, tiles_before, state, query_smem, to_logits, refs, geometry, tiles)


def _merge_in_cluster(item: Item, number: Scalar, refs: Refs, geometry: Geometry) -> None:
    """Merges an item's partial results once all programs of the cluster have stored theirs.

    No L1 cache holds stale copies of partial results: the fence empties it, and nothing reads them before the barrier.
    """
    smem, outputs_gmem, splits = refs.smem, refs.outputs_gmem, geometry.tuning.splits
    fence.show_cluster_what_is_stored()
    plgpu.barrier_arrive(smem.cluster_done)
    plgpu.barrier_wait(smem.cluster_done)
    merged = MergedScratch(smem.merged_out, smem.merged_lse)
    sinks_gmem, query_indices_gmem = refs.inputs_gmem.options.per_head.sinks, refs.inputs_gmem.query_indices
    merge_refs = MergeRefs(
        sinks_gmem, query_indices_gmem, outputs_gmem.partials, outputs_gmem.out, outputs_gmem.lse, merged
    )
    merge_item(item, item.index * splits, splits, number, merge_refs, geometry)
