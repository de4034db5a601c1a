"""The kernel of shared prefixes: a decode batch whose queries share prefixes, each of which is read once.

Grid: one program on each multiprocessor, a thread block of four warpgroups in two parts that run side by side. The
matrix units bound the part that attends to the prefixes, and memory bounds the one that attends to own tokens.

Who loads: warpgroups 1 and 3 copy tiles of K and V, as in decode.

Who computes: warpgroup 0 attends to the queries' own tokens, as decode does: tokens are rows. Warpgroup 2 attends to
prefixes: queries are rows (`softmax.py`), up to 64 of a prefix's queries and heads at a time (`plan.py`).

All items leave partial results, which `merge.py` merges.

Shared memory, for head_size 128, bfloat16:

    | own tokens: ring of K 48 KiB | ring of V 48 KiB | query 2 KiB | P 1 KiB | prefixes: K 48 KiB | V 48 KiB | query 16 KiB |

Roofline: 4 * head_size bytes for each token and kv head. Each prefix is read from HBM once, and once for each of its
query tiles from L2.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.decode import kernel as decode
from paged_jax.kernels.mosaic_gpu.decode import plan as decode_plan
from paged_jax.kernels.mosaic_gpu.decode import refs as of_decode
from paged_jax.kernels.mosaic_gpu.decode import tiles as decode_tiles
from paged_jax.kernels.mosaic_gpu.decode.plan import Item, QueuedSplit, Queue
from paged_jax.kernels.mosaic_gpu.decode.shared import plan, softmax
from paged_jax.kernels.mosaic_gpu.decode.shared.load import load
from paged_jax.kernels.mosaic_gpu.decode.shared.plan import PrefixSplit
from paged_jax.kernels.mosaic_gpu.decode.shared.ptx import results
from paged_jax.kernels.mosaic_gpu.decode.shared.refs import (
    Inputs,
    Outputs,
    Parts,
    PrefixRefs,
    Scratch,
    outputs,
    scratch,
)
from paged_jax.kernels.mosaic_gpu.decode.softmax import State, summed
from paged_jax.kernels.mosaic_gpu.decode.tiles.plain import PlainTiles
from paged_jax.kernels.mosaic_gpu.hopper.epilogue import Epilogue, saw_tokens
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.launch import as_warps, launch
from paged_jax.kernels.mosaic_gpu.hopper.limits import QUERY_ROWS, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.logits import cache_scale
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths
from paged_jax.kernels.mosaic_gpu.hopper.registers import layout, store, wide

_COMPUTES_OWN, _LOADS = 0, 3  # indices of warpgroups; those between attend to prefixes
# Registers of each thread of a warpgroup. The four of them start with 128 each.
_REGISTERS = 96, 168, 168, 80


def attend(parts: Parts, inputs: Inputs) -> Outputs:
    """Runs the kernel."""
    problem = parts.prefix.problem
    return launch(
        lambda *refs: _kernel(*refs, parts),
        inputs,
        outputs(parts),
        scratch(parts),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        num_threads=4,
        grid=(parts.num_programs,),
        grid_names=("program",),
        kernel_name=f"shared_hd{problem.head_size}_g{problem.group}",
    )


def _kernel(inputs_gmem: Inputs, outputs_gmem: Outputs, smem: Scratch, parts: Parts) -> None:
    warpgroup = lax.axis_index("warpgroup")
    own, prefix = _own_refs(inputs_gmem, outputs_gmem, smem, parts), PrefixRefs(inputs_gmem, outputs_gmem, smem.prefix)
    prefixes = Lengths(inputs_gmem.seq_lens, inputs_gmem.query_start_loc)

    def attend_to_prefixes(half: int):
        _attend_to_prefixes(half, prefix, prefixes, parts)

    for index, run in enumerate(
        (
            lambda: _attend_to_own_tokens(own, outputs_gmem, parts),
            lambda: attend_to_prefixes(0),
            lambda: attend_to_prefixes(1),
            lambda: as_warps(lambda: load(own, prefix, prefixes, parts)),
        )
    ):

        @pl.when(warpgroup == index)
        def run_part(index=index, run=run):
            is_more = _REGISTERS[index] > sum(_REGISTERS) // len(_REGISTERS)
            plgpu.set_max_registers(_REGISTERS[index], action="increase" if is_more else "decrease")
            run()


def _own_refs(inputs_gmem: Inputs, outputs_gmem: Outputs, smem: Scratch, parts: Parts) -> of_decode.Refs:
    """The references of decode attention to own tokens."""
    sequences = pl.ds(parts.prefix.problem.num_seqs, parts.own.problem.num_seqs)
    inputs = of_decode.Inputs(
        inputs_gmem.query_tiles,
        inputs_gmem.key_cache,
        inputs_gmem.value_cache,
        inputs_gmem.block_tables.at[sequences],
        inputs_gmem.seq_lens.at[sequences],
        inputs_gmem.options,
    )
    return of_decode.Refs(inputs, outputs_gmem, smem.own)


def _attend_to_own_tokens(refs: of_decode.Refs, outputs_gmem: Outputs, parts: Parts) -> None:
    """The warpgroup that attends to a share of own tokens."""
    geometry, line, seq_lens_gmem = parts.own, parts.own_line, refs.inputs_gmem.seq_lens
    share, kv_head = plan.own_share(parts.own.problem)
    tiles = decode_tiles.class_of(geometry.problem)(geometry)

    def load_query(queue: Queue):
        decode.load_query(queue._replace(kv_head=kv_head), refs, geometry)

    def attend_to_split(queued: QueuedSplit, tiles_before: Scalar, left: Queue):
        seq = queued.split.item.seq
        split = queued.split._replace(item=Item(seq * geometry.items_per_seq + kv_head, seq, kv_head))
        plgpu.barrier_wait  # no wait here
        _, state = decode.attend_split(split, tiles_before, refs, geometry, tiles)
        results.mark(outputs_gmem.marks, lax.min(2 + lax.div(tiles_before, jnp.int32(8)), 8))
        plgpu.commit_smem()  # all threads have read the query; the next one may overwrite it
        pl.when(left.has_more)(lambda: load_query(left))
        _store_own(queued._replace(split=split), share, state, refs, outputs_gmem, parts)

    M = outputs_gmem.marks
    results.mark(M, 0)
    queue = decode_plan.queue_of(seq_lens_gmem, share, line)
    results.mark(M, jnp.int32(1) + lax.min(queue.tiles_left, 0))
    pl.when(queue.has_more)(lambda: load_query(queue))
    decode_plan.for_each_split(attend_to_split, queue, seq_lens_gmem, line)
    results.mark(M, 9)


def _store_own(
    queued: QueuedSplit, share: Scalar, state: State, refs: of_decode.Refs, outputs_gmem: Outputs, parts: Parts
) -> None:
    """Stores the partial result of a split, and where its item's partial results are. Whole items have places, too."""
    geometry, split, (partials, item_partials) = parts.own, queued.split, outputs_gmem[:2]
    of_line = jnp.where(queued.is_whole, 2 * parts.own_line.tuning.queues + split.item.seq, split.partial)
    first_row = (of_line * geometry.items_per_seq + split.item.kv_head) * geometry.columns
    out, maxima, sums = summed(state, geometry)
    end = Epilogue.of(saw_tokens(sums), maxima, sums)
    v_scale = cache_scale(refs.inputs_gmem.options.v_scale, geometry.problem.v_scale, split.item.kv_head)
    for x, part in zip(out, geometry.head_slices, strict=True):
        divided = layout(x * wide(v_scale / end.divisors, x.shape[0]))
        results.store_columns(partials.out, divided, first_row, part.first)
    store(partials.log_sums.at[pl.ds(first_row, geometry.columns)], layout(end.lse_of_base_2, 0))

    @pl.when(split.is_first)
    def store_first():
        item_partials.first[split.item.index] = of_line

    @pl.when(queued.is_last)
    def store_last():
        item_partials.last_program[split.item.index] = share


def _attend_to_prefixes(half: int, refs: PrefixRefs, prefixes: Lengths, parts: Parts) -> None:
    """A warpgroup that attends to a share of the prefixes with half of each query tile."""
    geometry, options = parts.prefix, refs.inputs_gmem.options
    problem, count = geometry.problem, plan.queries_of_half(geometry.problem)
    query_smem, query_ready = refs.smem.query.at[half], refs.smem.query_ready.at[half]

    def attend_to_split(found: PrefixSplit, tiles_before: Scalar, following: PrefixSplit, has_more: Scalar):
        split, kv_head = found.split, found.split.item.kv_head
        plgpu.barrier_wait(query_ready)
        factor = options.scale[0] * cache_scale(options.k_scale, problem.k_scale, kv_head)
        results.mark(refs.outputs_gmem.marks, 11 + 8 * half)
        state = softmax.attend(split, half, tiles_before, factor, query_smem, refs, geometry)
        results.mark(refs.outputs_gmem.marks, 12 + 8 * half)
        plgpu.commit_smem()  # all threads have read the query; the next one may overwrite it
        pl.when(has_more)(lambda: load_query(following))

        @pl.when(found.first_query + half * count < found.end_query)
        def store_rows():
            out, log_sums = softmax.finished(state, cache_scale(options.v_scale, problem.v_scale, kv_head))
            first = parts.own_rows + (split.partial * plan.HALVES + half) * WGMMA_ROWS
            rows = pl.ds(first, WGMMA_ROWS)
            store(refs.outputs_gmem.partials.out.at[rows], layout(out))
            store(refs.outputs_gmem.partials.log_sums.at[rows], layout(log_sums, 1))

    def load_query(found: PrefixSplit):
        """Copies the same rows of each head. Past the last query a copy reads zeros."""
        rows = pl.ds(pl.multiple_of(found.first_query + half * count, QUERY_ROWS), count)
        for i in range(plan.heads_of_item(problem)):
            head_gmem = refs.inputs_gmem.query.at[rows, found.first_head + i]
            plgpu.copy_gmem_to_smem(head_gmem, query_smem.at[pl.ds(i * count, count)], query_ready)

    results.mark(refs.outputs_gmem.marks, 10 + 8 * half)
    plan.for_each_split(attend_to_split, lax.axis_index("program"), prefixes, geometry, load_query)
    results.mark(refs.outputs_gmem.marks, 13 + 8 * half)
