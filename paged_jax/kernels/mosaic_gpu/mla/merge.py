"""The merge of partial results: it computes out and lse of items that queues have cut, from the results of splits.

Grid: programs of four warps for each row block that queues may have cut (`Geometry.closings`). A warp merges a part: 16
columns of 8 rows. Each of its lanes merges four elements, with loads of many splits in flight. If items have many
splits, the four warps of a program share the splits of one part, and the first warp adds up their four sums from shared
memory. Only the number of splits decides the order of the sums.

Roofline: 4 * value_size bytes for each row and split, mostly from the L2 cache. Latency bounds the kernel, not
bandwidth.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import cdiv
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP
from paged_jax.kernels.mosaic_gpu.mla import plan
from paged_jax.kernels.mosaic_gpu.mla.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.mla.plan import Lengths
from paged_jax.kernels.mosaic_gpu.mla.ptx import merge as ptx

_PROGRAMS = 1056  # programs that run at once: 8 on each multiprocessor


def merge(geometry: Geometry, lengths: Lengths, refs: ptx.MergeRefs) -> None:
    """Runs the kernel. It writes to the references of out and lse."""
    arrays, tree = jax.tree.flatten((lengths, refs))
    plgpu.kernel(
        functools.partial(_kernel, tree=tree, geometry=geometry),
        out_type=(),
        scratch_types=(plgpu.SMEM((WARPGROUP * ptx.SUMS,), jnp.float32),),
        grid=(geometry.closings * geometry.tuning.width, _programs_of_block(geometry)),
        grid_names=("closing", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mla_merge",
    )(*arrays)


def _programs_of_block(geometry: Geometry) -> int:
    """Programs for each row block. All of them run at once, because most row blocks may be whole and need no merge."""
    parts = pl.cdiv(geometry.block_rows, ptx.PART_ROWS) * ptx.parts_side_by_side(geometry)
    most = pl.cdiv(parts, ptx.parts_of_program(geometry))
    return min(most, max(1, _PROGRAMS // (geometry.closings * geometry.tuning.width)))


def _kernel(*arrays, tree: Any, geometry: Geometry) -> None:
    *arrays, sums_smem = arrays
    lengths_gmem, refs = jax.tree.unflatten(tree, arrays)
    width = jnp.int32(geometry.tuning.width)
    closing, block = lax.div(lax.axis_index("closing"), width), lax.rem(lax.axis_index("closing"), width)
    first_partial, num_splits, row, num_rows = (refs.closings[closing, block, i] for i in range(4))
    step = ptx.parts_of_program(geometry)
    first, all_steps = lax.axis_index("part") * step, _programs_of_block(geometry) * step
    end = jnp.where(num_splits > 0, cdiv(num_rows, ptx.PART_ROWS) * ptx.parts_side_by_side(geometry), 0)
    if geometry.closes_items and not geometry.one_query:
        of_seq = jnp.int32(geometry.items_per_seq)
        items = plan.sequence_of(lengths_gmem, lax.div(closing, of_seq), geometry).items
        end = jnp.where(lax.rem(closing, of_seq) < items, end, 0)  # other items have no entry in `closings`

    @pl.loop(first, end, step=all_steps)
    def merge_some(part):
        ptx.merge_parts(refs, ptx.RowBlock(first_partial, num_splits, row, num_rows, block), part, sums_smem, geometry)
