"""Device code: what a program of the decode kernel writes of a segment.

`out` and `lse` of a whole item; of a part a partial result, normalised, for `reduce.py` to merge.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu import narrow, plan
from paged_jax.kernels.mosaic_gpu.config import Config
from paged_jax.kernels.mosaic_gpu.registers import exp, layout, log, of_heads, store, wide


def outputs(cfg: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel writes: `out` and `lse`, or partial results, each normalised; if it merges them, all of these.

    Where lengths may be uneven, there are the place of each item's first part, and the program that has the last one.
    """
    f32, num_rows, shapes = jnp.float32, cfg.num_seqs * cfg.num_heads, {}
    if cfg.merge == "cluster" or cfg.whole_items:
        shapes["out"] = jax.ShapeDtypeStruct((num_rows, cfg.head_size), cfg.dtype)
        shapes["lse"] = jax.ShapeDtypeStruct((num_rows,), f32)
    if cfg.merge != "none":
        shapes["parts"] = jax.ShapeDtypeStruct((cfg.places, cfg.padded_head_size, cfg.columns), f32)
        shapes["maxima"] = shapes["sums"] = jax.ShapeDtypeStruct((cfg.places, cfg.columns), f32)
    if cfg.stretches:
        shapes["first_place"] = shapes["last_program"] = jax.ShapeDtypeStruct((cfg.items,), jnp.int32)
    return shapes


def store_result(segment: plan.Segment, row, offset, v_scale, state, refs, cfg: Config):
    """Writes a segment's result from the softmax's state: O^T in pieces, maxima and sums; and where parts are.

    Copies from shared memory may still be on their way when this returns, unless parts are for a cluster.
    """
    store_whole = functools.partial(_store_whole, segment, row, offset, v_scale, state, refs, cfg)
    store_part = functools.partial(_store_part, segment, v_scale, state, refs, cfg)
    if cfg.merge == "none":
        store_whole()
    elif cfg.whole_items:
        lax.cond(segment.whole, store_whole, store_part)
    else:
        store_part()
    if cfg.stretches:

        @pl.when(segment.part == 0)
        def _():
            refs.first_place_gmem[segment.item] = segment.place

        @pl.when(segment.last)
        def _():
            refs.last_program_gmem[segment.item] = lax.axis_index("program")


def _store_whole(segment, row, offset, v_scale, state, refs, cfg: Config):
    """Writes a finished item. Heads that saw no token: out 0, lse -inf."""
    acc, max_logit, exp_sum = state
    seen = exp_sum != 0  # NaN counts: what is not a number must show
    total = exp_sum
    if cfg.sinks:
        sinks = layout(of_heads(refs.sinks_gmem, 64, offset, segment, cfg).max(axis=0), 0)
        top = lax.max(max_logit, sinks)
        keep = exp(max_logit - top)
        total, max_logit = total * keep + exp(sinks - top), top
        acc = [x * wide(keep, x.shape[0]) for x in acc]
    total = jnp.where(seen, total, 1.0)
    log_sum = jnp.where(seen, max_logit + log(total), -jnp.inf)
    outs = [x * wide(v_scale / total, x.shape[0]) for x in acc]
    for out_smem, x in zip(refs.out_smem, outs, strict=True):
        x = layout(x.astype(cfg.dtype))
        if cfg.narrow:
            narrow.store_transposed(out_smem, x, cfg)
        else:
            store(out_smem.T, x)
    refs.sum_smem[...] = layout(log_sum, 0)
    plgpu.commit_smem()
    # In pieces row by row: Mosaic would tile shared memory for copies of 8 rows, and refuse the head size for it.
    together = cfg.group if len(cfg.pieces) == 1 else 1
    for piece_smem, (first, size) in zip(refs.out_smem, cfg.pieces, strict=True):
        if first > 0:  # overlaps with what is there, with equal values
            plgpu.wait_smem_to_gmem(0)
        for i in range(0, cfg.group, together):
            rows_gmem = refs.out_gmem.at[pl.ds(row + offset + i, together), pl.ds(first, size)]
            plgpu.copy_smem_to_gmem(piece_smem.at[pl.ds(offset + i, together)], rows_gmem)
    for i in range(cfg.group):
        refs.lse_gmem[row + offset + i] = refs.sum_smem[offset + i]


def _store_part(segment, v_scale, state, refs, cfg: Config):
    """Writes a partial result: normalised O^T, maxima and sums; for a cluster, all of it when this returns."""
    acc, max_logit, exp_sum = state
    seen = exp_sum != 0
    total = jnp.where(seen, exp_sum, 1.0)
    row = 0
    for x in (x * wide(v_scale / total, x.shape[0]) for x in acc):
        if cfg.narrow:
            narrow.store(refs.part_smem, x, cfg)
        else:
            refs.part_smem[pl.ds(row, x.shape[0])] = x
        row += x.shape[0]
    refs.max_smem[...] = layout(jnp.where(seen, max_logit, -jnp.inf), 0)
    refs.sum_smem[...] = layout(exp_sum, 0)
    plgpu.commit_smem()
    for x_smem, x_gmem in (
        (refs.part_smem, refs.parts_gmem),
        (refs.max_smem, refs.maxima_gmem),
        (refs.sum_smem, refs.sums_gmem),
    ):
        plgpu.copy_smem_to_gmem(x_smem, x_gmem.at[segment.place])
    if cfg.merge == "cluster":
        plgpu.wait_smem_to_gmem(0)
