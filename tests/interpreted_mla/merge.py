"""The merge of parts of rows."""

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.registers import LOG2E
from paged_jax.kernels.mosaic_gpu.mla import plan
from paged_jax.kernels.mosaic_gpu.mla.ptx.merge import PART_COLUMNS, PART_ROWS, parts_of_program


def merge_parts(refs, block, part, sums_smem, geometry):
    """Merges a program's parts, in the order of the splits. Here a part is the columns of 8 parts, of one row."""
    sinks = None if refs.sinks is None else refs.sinks[...]
    size = PART_ROWS * PART_COLUMNS
    parts_of_row = geometry.problem.head_size // size

    @pl.loop(part, jnp.minimum(part + parts_of_program(geometry), block.num_rows * parts_of_row))
    def _(part):
        row, columns = part // parts_of_row, pl.ds(part % parts_of_row * size, size)

        def add(number, carry):
            maximum, total, out = carry
            place = plan.partial_of(block.first_partial, number), block.block, row
            log_sum = refs.partials.log_sums[place]
            new = jnp.maximum(maximum, log_sum)
            keep, weight = jnp.exp2(maximum - new), jnp.exp2(log_sum - new)
            return new, total * keep + weight, out * keep + refs.partials.out[*place, columns] * weight

        empty = jnp.float32(-1e30), jnp.float32(0), jnp.zeros(size, jnp.float32)
        maximum, total, out = jax.lax.fori_loop(0, block.num_splits, add, empty)
        seen = total != 0
        if sinks is not None:
            sink = sinks[(block.row + row) % geometry.heads] * LOG2E
            new = jnp.maximum(maximum, sink)
            keep = jnp.exp2(maximum - new)
            maximum, total, out = new, total * keep + jnp.exp2(sink - new), out * keep
        total = jnp.where(seen, total, 1.0)
        refs.out[block.row + row, columns] = (out / total).astype(refs.out.dtype)

        @pl.when(part % parts_of_row == 0)
        def _():
            refs.lse[block.row + row] = jnp.where(seen, (maximum + jnp.log2(total)) / LOG2E, -jnp.inf)
