"""Runs the MLA kernel of Mosaic GPU without a GPU, in Pallas's interpreter, with substitutes for what it lacks."""

from functools import partial
from unittest import mock

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from paged_jax.kernels import problem
from paged_jax.kernels.mosaic_gpu.hopper import lanes
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOG2E
from paged_jax.kernels.mosaic_gpu.mla import call, merge, plan, rows, softmax, warps
from paged_jax.kernels.problem import Device
from tests import ragged_interpreter
from tests.interpreted_ptx import lanes as interpreted_lanes


def loaded(values_gmem, first):
    return values_gmem[pl.ds(first, 64)]


_LANES = "row_numbers", "sums", "sum_of_lanes", "raised", "exponentials", "rescaled", "settle"
SMALL_GPU = Device(90, 4)


def lane_numbers():
    return jnp.tile(jnp.arange(32), 4)


def gather(values_gmem, indices, last):
    return values_gmem[...][jnp.minimum(indices, last)]


def sums_to_here(x):
    return jnp.tile(jnp.cumsum(x[:32]), 4)


WARPS = {
    "lane_numbers": lane_numbers,
    "gather": gather,
    "sums_to_here": sums_to_here,
    "total": lambda x: x[:32].sum(),
    "largest": jnp.max,
}


def store_lse(lse_smem, lse_gmem, row, num_rows):
    plgpu.commit_smem()
    lse = lse_smem[...]

    @pl.loop(0, num_rows)
    def _(i):
        lse_gmem[row + i] = jax.lax.dynamic_index_in_dim(lse, i, keepdims=False)


def store_partial(partial_gmem, out, first, num_rows, geometry):
    columns = pl.ds(first, out.shape[1])

    @pl.loop(0, num_rows)
    def _(i):
        partial_gmem[i, columns] = jax.lax.dynamic_index_in_dim(out, i, keepdims=False)


def scores(query_smem, tile):
    """S. The interpreter multiplies with NumPy, which would warn of NaNs in rows that no result uses."""
    for ready in tile.ready:
        plgpu.barrier_wait(ready)
    query, *latents = (x[...].astype(jnp.float32) for x in (query_smem, *tile.smem))
    plgpu.commit_smem()
    parts = zip(tile.parts, latents, strict=True)
    return sum(query[:, part.first : part.first + part.size] @ of_part.T for part, of_part in parts)


def accumulate(out, weights_smem, values_smem, release):
    weights, *values = (x[...].astype(jnp.float32) for x in (weights_smem, *values_smem))
    plgpu.commit_smem()  # without this fence the interpreter sees a race between these reads and later writes
    for part in range(len(values)):
        release(part)
    return [x + jnp.dot(weights, of_part) for x, of_part in zip(out, values, strict=True)]


def score_and_accumulate(out, weights_smem, values_smem, release, query_smem, next_tile, then):
    result = then(scores(query_smem, next_tile))
    return accumulate(out, weights_smem, values_smem, release), result


def merge_parts(refs, block, part, sums_smem, geometry):
    """Merges a program's parts of rows, in the order of the splits."""
    sinks = None if refs.sinks is None else refs.sinks[...]
    parts_of_row = geometry.problem.head_size // merge.PART

    @pl.loop(part, jnp.minimum(part + merge.parts_of_program(geometry), block.num_rows * parts_of_row))
    def _(part):
        row, columns = part // parts_of_row, pl.ds(part % parts_of_row * merge.PART, merge.PART)

        def add(number, carry):
            maximum, total, out = carry
            place = plan.partial_of(block.first_partial, number), block.block, row
            log_sum = refs.partials.log_sums[place]
            new = jnp.maximum(maximum, log_sum)
            keep, weight = jnp.exp2(maximum - new), jnp.exp2(log_sum - new)
            return new, total * keep + weight, out * keep + refs.partials.out[*place, columns] * weight

        empty = jnp.float32(-1e30), jnp.float32(0), jnp.zeros(merge.PART, jnp.float32)
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


def run(function, *, device=SMALL_GPU, **arrays):
    """Replaces the fixture `run` of the tests of every implementation."""
    patches = [
        mock.patch.multiple(warps, **WARPS),
        mock.patch.object(rows, "store_lse", store_lse),
        mock.patch.object(rows, "store_partial", store_partial),
        mock.patch.multiple(softmax, scores=scores, accumulate=accumulate, score_and_accumulate=score_and_accumulate),
        mock.patch.multiple(lanes, loaded=loaded, **{name: getattr(interpreted_lanes, name) for name in _LANES}),
        mock.patch.object(merge, "merge_parts", merge_parts),
        mock.patch.object(merge, "_PROGRAMS", 6),  # so that a program of the merge merges several parts
        mock.patch.object(problem, "device", return_value=device),
    ]

    def eagerly(op, operands, *, implementation=None, unwanted=(), **static):
        kernel = jax.jit(partial(getattr(call, op), **static))
        with ragged_interpreter.interpreting():
            return jax.block_until_ready(kernel(*operands))

    with mock.patch("paged_jax._dispatch.call", eagerly):
        for patch in patches:
            patch.start()
        try:
            return jax.tree.map(np.asarray, function(**arrays, implementation="mosaic_gpu"))
        except Exception:
            interpret_pallas_call.reset_gpu_interpret_mode_state()
            raise
        finally:
            for patch in patches:
                patch.stop()
