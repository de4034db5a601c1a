"""The ragged kernel: attention with any number of queries for each sequence, in one launch.

Grid: one program on each multiprocessor, a thread block of three or four warpgroups. It takes work items (`plan.py`)
until none is left. The matrix units bound wide items and memory bounds thin ones, so some programs begin with wide
items and the others with thin ones.

Who loads: the last warpgroup claims an item, describes it to the others (`items.py`), and copies its query and, run by
run through the block table (TMA), its tiles of K and V into rings of `stages` tiles (`load.py`). It runs ahead: while
it loads an item's tiles, it also loads the next item's query, if both fit (else see `queries.py`).

Who computes: two warpgroups, or three for heads up to 64, each with 64 query rows as M of wgmma, and tokens as N:

    S [64, tile] = Q [64, d] x K^T [d, tile]        A, B in shared memory
    O [64, d]   += P [64, tile] x V [tile, d]       A in registers

In a wide item each warpgroup has its own 64 rows and reads every tile. Two warpgroups take turns at the matrix units:
one computes S of a tile and O of the tile before, while the other computes its softmax (`wide.py`). In a thin item the
first two have the same rows and take alternate tiles; then one hands its softmax over to the other (`thin.py`).

Shared memory, for head_size 128, bfloat16, 2 stages of wide tiles of 128 tokens, or 4 of thin ones of 64:

    | ring of K 64 KiB | ring of V 64 KiB | queries of two items 64 KiB | counts of up to 126 sequences 4 KiB |

Out and lse of a whole item overwrite its query in shared memory and are copied from there; partial results go from
registers to global memory. The last program that stores one of an item's partial results merges all of them. A
handed-over O of a thin item overwrites the bands of two warpgroups' queries, which hold as many elements of 32 bits.

Roofline: 4 * num_heads * head_size operations for each pair of a query and a token that it sees. With few queries:
4 * head_size bytes for each token and kv head, or 2 * head_size bytes with caches of 8 bits.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.launch import launch
from paged_jax.kernels.mosaic_gpu.ragged import ahead, items, queries, thin, wide
from paged_jax.kernels.mosaic_gpu.ragged import load as ragged_load
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import NO_ITEM, WIDE, kernel_name, kinds_of
from paged_jax.kernels.mosaic_gpu.ragged.ptx import results
from paged_jax.kernels.mosaic_gpu.ragged.refs import (
    Inputs,
    Outputs,
    Refs,
    Signal,
    outputs,
    scratch,
    with_factors_in_smem,
)

# Registers of each computing and of each loading thread, by the number of computing warpgroups. All warpgroups start
# with equal shares: 2 * 216 + 72 = 3 * 168, and 3 * 160 + 32 = 4 * 128. A warpgroup that asks for more waits forever.
# With 152 for each thread of three computing warpgroups, ptxas would serialize the products. For O of large heads, who
# loads and does not convert tiles gives some of its registers: 2 * 224 + 56 = 3 * 168 (benchmarks/LOG.md, "What is
# spilled").
_REGISTERS = {2: (216, 72), 3: (160, 32)}
_REGISTERS_OF_LARGE_HEADS = 224, 56
_MOST_HEAD_SIZE = 224  # the largest with `_REGISTERS`


def attend(geometry: Geometry, inputs: Inputs) -> Outputs:
    """Runs the kernel. Programs count claimed items and stored splits in the reference `inputs.counters`."""
    return launch(
        lambda *refs: _kernel(Refs(*refs), geometry),
        inputs,
        outputs(geometry),
        scratch(geometry),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        num_threads=geometry.tuning.computing_warpgroups + 1,
        grid=(geometry.tuning.num_programs,),
        grid_names=("program",),
        kernel_name=kernel_name(geometry),
    )


def _kernel(refs: Refs, geometry: Geometry) -> None:
    warpgroup, loads = lax.axis_index("warpgroup"), geometry.tuning.computing_warpgroups
    # A third warpgroup has no part in thin items, so it cannot read the query of the item after one.
    assert geometry.takes_turns or not geometry.reads_own_queries, "two warpgroups read queries, not three"
    is_large = geometry.problem.head_size > _MOST_HEAD_SIZE and geometry.takes_turns and not geometry.converts_tiles
    computing_registers, loading_registers = _REGISTERS_OF_LARGE_HEADS if is_large else _REGISTERS[loads]

    @pl.when(warpgroup < loads)
    def compute():
        ahead.prefetch(refs, geometry)
        # This waits until the loading warpgroup has counted and gives up its registers.
        plgpu.set_max_registers(computing_registers, action="increase")
        if not geometry.merges_copies:
            _clear_padding(refs, geometry)
        _attend_to_items(with_factors_in_smem(refs, geometry), geometry)

    @pl.when(warpgroup == loads)
    def load():
        counts = ragged_load.count_items(refs, geometry)  # takes more registers than loading
        plgpu.set_max_registers(loading_registers, action="decrease")
        ragged_load.load_items(counts, refs, geometry)


def _clear_padding(refs: Refs, geometry: Geometry) -> None:
    """Stores out 0 and lse -inf in the rows past the last sequence, while the first item is on its way."""
    inputs, outputs = refs.inputs_gmem, refs.outputs_gmem
    problem, programs = geometry.problem, geometry.tuning.num_programs
    first = lax.clamp(jnp.int32(0), inputs.lengths.query_start_loc[problem.num_seqs], jnp.int32(problem.num_tokens))
    worker = lax.axis_index("warpgroup") * programs + lax.axis_index("program")
    workers = geometry.tuning.computing_warpgroups * programs
    results.clear_rows(results.Results(outputs.out, outputs.lse), first, worker, workers, problem)


def _attend_to_items(refs: Refs, geometry: Geometry) -> None:
    """Attends to all items that the loading warpgroup describes."""
    wide_kind, thin_kind = kinds_of(geometry)

    def attend_to_wide_or_thin(state):
        stage, item_kind = state
        # Thin items are 1 to 2% faster if their code comes first (benchmarks/LOG.md, "What is spilled").
        pl.when(item_kind != WIDE)(lambda: thin.attend_or_pass_by(stage, refs, thin_kind))
        pl.when(item_kind == WIDE)(lambda: wide.attend_to_item(stage, refs, wide_kind))
        return item_after(stage)

    def attend_to_thin(state):
        stage, _ = state
        thin.attend_or_pass_by(stage, refs, thin_kind)
        return item_after(stage)

    def item_after(stage):
        following = items.stage_of(stage + 1)
        kind_of = items.kind_again if geometry.reads_own_queries else items.kind_of
        return following, kind_of(following, refs.smem)

    def attend_to_all(attend_to_item):
        first = jnp.int32(0)
        if geometry.reads_own_queries:
            queries.write(queries.read(first, refs, geometry), refs, geometry)
            state = first, items.kind_again(first, refs.smem)
        else:
            state = first, items.kind_of(first, refs.smem)
        stage, _ = lax.while_loop(lambda state: state[1] > NO_ITEM, attend_to_item, state)
        items.finish(stage, refs.smem)

    if not wide_kind.may_exist:
        attend_to_all(attend_to_thin)
        return
    if not geometry.takes_turns:
        attend_to_all(attend_to_wide_or_thin)
        return
    # Warpgroup 1 gives the first turn to warpgroup 0. After the last item warpgroup 0 takes the turn that is left over:
    # the barrier must end as it began.
    first_turn = refs.smem.signal(Signal.TURN)
    pl.when(lax.axis_index("warpgroup") == 1)(lambda: plgpu.barrier_arrive(first_turn))
    attend_to_all(attend_to_wide_or_thin)
    pl.when(lax.axis_index("warpgroup") == 0)(lambda: plgpu.barrier_wait(first_turn))
