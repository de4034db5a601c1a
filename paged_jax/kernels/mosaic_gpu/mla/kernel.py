"""The MLA kernel: attention over latents, which are keys and, in their first elements, values.

Grid: `width` programs for each queue (`plan.py`), one program on each multiprocessor. A program is a thread block of
three warpgroups. The programs of a queue attend to the same tiles, each with its own row block: 64 rows (query token,
head) of a sequence.

Who loads: warpgroup 2 copies the query of a row block and runs of latents (TMA, through the block table) into a ring of
two tiles (`load.py`). The parts of a tile have rings and barriers of their own, so that each part is copied again
once it has been read.

Who computes: warpgroups 0 and 1. Warpgroup 0 computes the softmax, and hands its weights P, and the factors that
rescale O, to warpgroup 1 through shared memory. Both sum up a part of O, because O takes more registers than one
warpgroup has. Warpgroup 0 starts S of the next tile before its part of O, so that the softmax runs under the latter:

    warpgroup 0   | S0 | softmax | S1       | O0 left, softmax | S2       | O1 left, softmax | S3 ...
    warpgroup 1                  | O0 right |                  | O1 right |                  | O2 right ...
    warpgroup 2   tiles 0 and 1, then each part of tile i once that part of tile i - 2 has been read

Shared memory, for latents of 576 elements of 16 bits and tiles of 64 tokens:

    | query 72 KiB, later out | 2 tiles 144 KiB | P 8 KiB | factors 1 KiB | lse 1 KiB |

Queues cut items, so a second kernel merges partial results (`merge.py`).

Roofline: each token has latent_size * itemsize bytes, which are read once for `width` row blocks. Each pair of a query
and a token takes 2 * num_heads * (latent_size + value_size) operations, and rows are padded to whole row blocks.
Arithmetic bounds the kernel from 64 heads on, or from fewer heads on if sequences have several queries.
"""

import functools
from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.launch import launch
from paged_jax.kernels.mosaic_gpu.hopper.limits import QUERY_ROWS, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.mla import load, plan, results, softmax
from paged_jax.kernels.mosaic_gpu.mla.geometry import STAGES, TILE, Geometry
from paged_jax.kernels.mosaic_gpu.mla.plan import Split
from paged_jax.kernels.mosaic_gpu.mla.ptx import lanes, products
from paged_jax.kernels.mosaic_gpu.mla.refs import Inputs, Outputs, Ref, Refs, Scratch, outputs, scratch

_WEIGHS, _SUMS, _LOADS = 0, 1, 2  # warpgroups
# Registers of each thread. Their sum must not exceed 3 * 168, with which the three warpgroups start.
_MOST_REGISTERS, _MORE_REGISTERS, _LOADING_REGISTERS = 240, 216, 48


def attend(geometry: Geometry, inputs: Inputs) -> Outputs:
    """Runs the kernel."""
    return launch(
        lambda *refs: _kernel(Refs(*refs), geometry),
        inputs,
        outputs(geometry),
        scratch(geometry),
        # Pallas would have a warpgroup wait for all of its warps before and after each store to shared memory. Here
        # other warpgroups read what is stored, or each warp its own rows, and the barriers in `Scratch` order both.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        num_threads=3,
        grid=(geometry.tuning.programs,),
        grid_names=("program",),
        kernel_name="mla_attend",
    )


def _kernel(refs: Refs, geometry: Geometry) -> None:
    warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("program")
    width = jnp.int32(geometry.tuning.width)
    number, block = lax.div(program, width), lax.rem(program, width)
    lengths_gmem = refs.inputs_gmem.lengths
    # All warpgroups read the lengths here: later the loading one has no registers for many loads in flight.
    total = plan.total_tiles(lengths_gmem, geometry)
    queue = plan.queue_of(lengths_gmem, number, total, geometry)

    def for_each_split(do, carry):
        of_program = functools.partial(do, _Program(number, block, total, refs, geometry))
        return plan.for_each_split(of_program, carry, lengths_gmem, queue, block, geometry)

    # A half of O and the softmax take most registers. So do three quarters of O without a softmax.
    halves = 2 * geometry.tuning.left >= geometry.problem.head_size
    registers = (_MOST_REGISTERS, _MORE_REGISTERS) if halves else (_MORE_REGISTERS, _MOST_REGISTERS)
    weighing_registers, summing_registers = registers

    @pl.when(warpgroup == _WEIGHS)
    def weigh():
        plgpu.set_max_registers(weighing_registers, action="increase")
        if not geometry.closes_items:
            refs.outputs_gmem.closings[number, block, 1] = jnp.int32(0)
        for_each_split(_weigh, jnp.int32(0))
        plgpu.barrier_wait(refs.smem.weights_consumed)  # barriers end as they began

    @pl.when(warpgroup == _SUMS)
    def sum_up():
        plgpu.set_max_registers(summing_registers, action="increase")
        plgpu.barrier_arrive(refs.smem.weights_consumed)  # the shared memory of weights is free
        for_each_split(_sum_up, jnp.int32(0))

    @pl.when(warpgroup == _LOADS)
    def load_all():
        plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")
        load.drain(for_each_split(_load, (jnp.int32(0), jnp.int32(0))), refs)


class _Program(NamedTuple):
    """The facts that each warpgroup of a program has."""

    number: Scalar  # the number of the program's queue
    block: Scalar  # the index of the program, and of its row block, in the queue
    total: Scalar  # the number of tiles of all items
    refs: Refs
    geometry: Geometry


def _weigh(program: _Program, split: Split, tiles_before: Scalar) -> Scalar:
    """Computes the softmax of a split, and the left part of O."""
    geometry = program.geometry
    pl.when(split.num_rows > 0)(lambda: _weigh_rows(program, split, tiles_before))
    if geometry.closes_items:
        # Rows of padding, and a sequence's rows beyond `max_query_len`, are in items that the merge has no place for.
        has_place = (split.seq < geometry.problem.num_seqs) & (split.item < geometry.items_per_seq)
        pl.when(split.closes & has_place)(lambda: _store_closing(program, split))
        pl.when(split.is_whole & has_place)(lambda: _store_whole(program, split))
    else:
        pl.when(split.closes)(lambda: _store_closing(program, split))
    return tiles_before + split.num_tiles


def _weigh_rows(program: _Program, split: Split, tiles_before: Scalar) -> None:
    _, block, _, refs, geometry = program
    smem, parts = refs.smem, geometry.value_parts[_WEIGHS]
    plgpu.barrier_wait(smem.query_ready)
    factor = softmax.factor_of(refs.inputs_gmem, geometry)
    seen = softmax.seen_by_rows(split, geometry)

    def stage_of(i):
        return lax.rem(tiles_before + i, jnp.int32(STAGES))

    def tile_of(i):
        parts_smem, ready = ([x.at[stage_of(i)] for x in xs] for xs in (smem.tiles, smem.tile_ready))
        return products.Tile(geometry.tile_parts, parts_smem, ready)

    def values_of(i):
        return _values(smem, stage_of(i), geometry, _WEIGHS)

    def releasing(i):
        return functools.partial(_release, smem, stage_of(i), geometry, _WEIGHS)

    def weigh(i, scores, maxima, sums):
        for consumed in smem.tile_consumed[: geometry.parts_behind]:  # S has been computed, and nothing else reads them
            plgpu.barrier_arrive(consumed.at[stage_of(i)])
        start = (split.tile + i) * TILE
        logits, maxima, keep = softmax.raise_maxima(scores, maxima, start, seen, factor, geometry)
        exponentials = softmax.weigh(logits, maxima, factor, geometry)
        weights = exponentials.astype(geometry.problem.query_dtype)
        own_sums = lanes.sums(exponentials)
        lanes.settle(own_sums, smem.lse)
        return weights, keep, maxima, sums * keep + own_sums

    def hand_over(i, weights, keep):
        plgpu.barrier_wait(smem.weights_consumed)
        smem.weights[...] = weights
        smem.factors[...] = keep
        all_values = [x for warpgroup in (_WEIGHS, _SUMS) for x in _values(smem, stage_of(i), geometry, warpgroup)]
        softmax.zero_unseen(all_values, split.end - (split.tile + i) * TILE)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.weights_ready)

    def query_at(hiding):
        # The offset is 0, but the compiler cannot know it. It would otherwise compute the addresses of all parts of the
        # query before the loops, and keep them in registers, or spill them (benchmarks/LOG.md, "Latents read once").
        hidden = pl.multiple_of(lax.shift_right_logical(hiding, jnp.int32(30)) * QUERY_ROWS, QUERY_ROWS)
        return smem.query.at[pl.ds(hidden, WGMMA_ROWS)]

    def go_on(i, state):
        out, (weights, keep, maxima, sums) = products.score_and_accumulate(
            state.out, smem.weights, values_of(i), releasing(i), query_at(i), tile_of(i + 1),
            lambda scores: weigh(i + 1, scores, state.maxima, state.sums),
        )  # fmt: skip
        hand_over(i + 1, weights, keep)
        return softmax.State(softmax.rescaled(out, keep), maxima, sums)

    def attend():
        first, begin, last = softmax.empty(parts), jnp.int32(0), split.num_tiles - 1
        scores = products.scores(query_at(tiles_before), tile_of(begin))
        weights, keep, maxima, sums = weigh(begin, scores, first.maxima, first.sums)
        hand_over(begin, weights, keep)
        state = lax.fori_loop(0, last, go_on, softmax.State(first.out, maxima, sums))
        return state._replace(out=products.accumulate(state.out, smem.weights, values_of(last), releasing(last)))

    state = lax.cond(split.num_tiles > 0, attend, lambda: softmax.empty(parts))
    state = state._replace(maxima=softmax.scaled(state.maxima, factor))
    done, lse = softmax.finished(state, split.is_whole, split, refs, geometry)
    plgpu.barrier_wait(smem.weights_consumed)
    smem.factors[...] = done.factor
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.weights_ready)
    results.store_sums(lse, done.log_sums, split, block, refs)
    results.store_out(softmax.rescaled(state.out, done.factor), parts, split, block, refs, geometry)
    plgpu.barrier_arrive(smem.query_consumed)


def _store_closing(program: _Program, split: Split) -> None:
    """Tells the merge where the row block's partial results lie. This split has the last one."""
    number, block, total, refs, geometry = program
    closing = plan.closing_of(number, split.tile, total, geometry)
    index = _index_of(split, geometry) if geometry.closes_items else number
    for i, x in enumerate((*closing, split.row, split.num_rows)):
        refs.outputs_gmem.closings[index, block, i] = x


def _store_whole(program: _Program, split: Split) -> None:
    """Tells the merge that no queue has cut the item."""
    program.refs.outputs_gmem.closings[_index_of(split, program.geometry), program.block, 1] = jnp.int32(0)


def _index_of(split: Split, geometry: Geometry) -> Scalar:
    """The index of a split's item among the items of the batch."""
    return split.seq * geometry.items_per_seq + split.item


def _sum_up(program: _Program, split: Split, tiles_before: Scalar) -> Scalar:
    """Computes the right part of O."""
    pl.when(split.num_rows > 0)(lambda: _sum_up_rows(program, split, tiles_before))
    return tiles_before + split.num_tiles


def _sum_up_rows(program: _Program, split: Split, tiles_before: Scalar) -> None:
    _, block, _, refs, geometry = program
    smem, parts = refs.smem, geometry.value_parts[_SUMS]

    def factors():
        plgpu.barrier_wait(smem.weights_ready)
        return plgpu.load(smem.factors, layout=softmax.BY_ROW)

    def attend_tile(i, out):
        stage = lax.rem(tiles_before + i, jnp.int32(STAGES))
        for ready in smem.tile_ready[_rings(geometry, _SUMS)]:
            plgpu.barrier_wait(ready.at[stage])
        out, release = softmax.rescaled(out, factors()), functools.partial(_release, smem, stage, geometry, _SUMS)
        out = products.accumulate(out, smem.weights, _values(smem, stage, geometry, _SUMS), release)
        plgpu.barrier_arrive(smem.weights_consumed)
        return out

    out = lax.fori_loop(0, split.num_tiles, attend_tile, softmax.empty_out(parts))
    out = softmax.rescaled(out, factors())
    plgpu.barrier_arrive(smem.weights_consumed)
    results.store_out(out, parts, split, block, refs, geometry)
    plgpu.barrier_arrive(smem.query_consumed)


def _rings(geometry: Geometry, warpgroup: int) -> slice:
    """The rings that hold a warpgroup's parts of values, among the rings of all parts of tiles."""
    right = len(geometry.value_parts[_SUMS])
    first = geometry.parts_behind + (right if warpgroup == _WEIGHS else 0)
    return slice(first, first + len(geometry.value_parts[warpgroup]))


def _values(smem: Scratch, stage: Scalar, geometry: Geometry, warpgroup: int) -> list[Ref]:
    """A warpgroup's parts of the values of the tile in a stage."""
    return [ring_smem.at[stage] for ring_smem in smem.tiles[_rings(geometry, warpgroup)]]


def _release(smem: Scratch, stage: Scalar, geometry: Geometry, warpgroup: int, part: int) -> None:
    """Says that a warpgroup has read one of its parts of a tile."""
    plgpu.barrier_arrive(smem.tile_consumed[_rings(geometry, warpgroup)][part].at[stage])


def _load(program: _Program, split: Split, counts: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
    """Copies the query and the tiles of a split."""
    is_there = split.num_rows > 0
    pl.when(is_there)(lambda: load.load_split(split, counts, program.refs, program.geometry))
    num_tiles, num_queries = counts
    return num_tiles + split.num_tiles, num_queries + is_there.astype(jnp.int32)
