"""The ragged kernel: attention of any number of queries a sequence over its blocks, in one launch.

Grid: a program on each multiprocessor, a thread block of three warpgroups, which takes work items (`plan.py`)
until none is left. Items of many query rows take the matrix units and items of few rows the memory, so that some
programs begin with the ones and some with the others.

Who loads: warpgroup 2 claims an item, describes it to the others (`items.py`), and copies its query and, run by
run through the block table (TMA), its tiles of K and V into rings of `stages` tiles (`load.py`). It is ahead of
the others: under an item's tiles the next one's query is on its way.

Who computes: warpgroups 0 and 1, each with 64 query rows as M of wgmma, and tokens as N:

    S [64, tile] = Q [64, d] x K^T [d, tile]        A, B in shared memory
    O [64, d]   += P [64, tile] x V [tile, d]       A in registers

Of a wide item each has its own 64 rows and reads every tile. They take turns: one has the matrix units, for O of a tile
and S of the next, while the other does its softmax (`wide.py`). Of a thin item both have the same rows, and take
the tiles in turn; then one hands its softmax over to the other (`thin.py`).

Shared memory, for head_size 128, bfloat16, tiles of 128 tokens, 2 stages:

    | ring of K 64 KiB | ring of V 64 KiB | queries of two items 64 KiB | counts of up to 126 sequences 4 KiB |

Out and lse of a whole item leave through the place of its query; partial results go from registers to memory. What is
handed over goes through the query's place too: each element of O as two numbers of 16 bits.

Roofline: 4 * num_heads * head_size operations for each pair of a query and a token that it sees; or, where queries are
few, 4 * head_size bytes for each token and kv head, or 2 * head_size with caches of 8 bits.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.ragged import items, thin, wide
from paged_jax.kernels.mosaic_gpu.ragged import load as ragged_load
from paged_jax.kernels.mosaic_gpu.ragged.geometry import NO_ITEM, WIDE, Geometry
from paged_jax.kernels.mosaic_gpu.ragged.refs import Inputs, Outputs, Refs, Signal, outputs, scratch

_LOADS = 2  # warpgroup; the others compute
# Registers of each thread. Together they must not exceed those that the three warpgroups start with, 3 * 168: a
# warpgroup would wait forever for what it cannot get. With 224 for those that compute, heads of 128 spill two registers
# less, but the assembler has a wide tile's exponentials begin later (benchmarks/LOG.md, "What is spilled").
_COMPUTING_REGISTERS, _LOADING_REGISTERS = 216, 72


def attend(geometry: Geometry, inputs: Inputs) -> Outputs:
    """Runs the kernel, in which programs claim items by writing to the reference `inputs.claimed`."""
    arrays, tree = jax.tree.flatten(inputs)
    out_types, out_tree = jax.tree.flatten(outputs(geometry))

    def refs_of(*refs) -> Refs:
        *gmem, smem = refs
        inputs_gmem = jax.tree.unflatten(tree, gmem[: len(arrays)])
        return Refs(inputs_gmem, jax.tree.unflatten(out_tree, gmem[len(arrays) :]), smem)

    kernel = plgpu.kernel(
        functools.partial(_kernel, refs_of=refs_of, geometry=geometry),
        out_type=tuple(out_types),
        scratch_types=(scratch(geometry),),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        num_threads=3,
        thread_name="warpgroup",
        grid=(geometry.tuning.num_programs,),
        grid_names=("program",),
        kernel_name=geometry.kernel_name,
    )
    return jax.tree.unflatten(out_tree, kernel(*arrays))


def _kernel(*refs, refs_of, geometry: Geometry) -> None:
    all_refs = refs_of(*refs)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < _LOADS)
    def compute():
        plgpu.set_max_registers(_COMPUTING_REGISTERS, action="increase")
        _attend_to_items(all_refs, geometry)

    @pl.when(warpgroup == _LOADS)
    def load():
        plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")
        ragged_load.load_items(all_refs, geometry)


def _attend_to_items(refs: Refs, geometry: Geometry) -> None:
    """Attends to all items that are described to it."""
    wide_kind, thin_kind = geometry.kinds

    def attend_to_wide_or_thin(state):
        stage, item_kind = state
        # With their code in front, thin items are 1 to 2% faster (benchmarks/LOG.md, "What is spilled").
        pl.when(item_kind != WIDE)(lambda: thin.attend_to_item(stage, refs, thin_kind))
        pl.when(item_kind == WIDE)(lambda: wide.attend_to_item(stage, refs, wide_kind))
        return item_after(stage)

    def attend_to_thin(state):
        stage, _ = state
        thin.attend_to_item(stage, refs, thin_kind)
        return item_after(stage)

    def item_after(stage):
        following = items.stage_of(stage + 1)
        return following, items.kind_of(following, refs.smem)

    def attend_to_all(attend_to_item):
        state = jnp.int32(0), items.kind_of(jnp.int32(0), refs.smem)
        stage, _ = lax.while_loop(lambda state: state[1] > NO_ITEM, attend_to_item, state)
        items.finish(stage, refs.smem)

    if not wide_kind.may_exist:
        attend_to_all(attend_to_thin)
        return
    # Warpgroup 0 has the first turn. At the end it takes the one that is left to it, as barriers end as they began.
    first_turn = refs.smem.signal(Signal.TURN)
    pl.when(lax.axis_index("warpgroup") == 1)(lambda: plgpu.barrier_arrive(first_turn))
    attend_to_all(attend_to_wide_or_thin)
    pl.when(lax.axis_index("warpgroup") == 0)(lambda: plgpu.barrier_wait(first_turn))
