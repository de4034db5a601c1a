"""Merging the parts of an item (sequence, kv head): in the cluster that wrote them or in a kernel of its own.

A block of 64 elements of the item's heads is merged at once: O^T in the layout of wgmma's results, as it was written.

Grid of the kernel. A program, of one warpgroup, for each block of each item. Everyone loads, from global memory into
registers, and computes.

Shared memory: the block of `out`, and the item's lse, on their way out.

Roofline: 4 * (head_size + 2 * blocks) * columns bytes a part, mostly from L2: latency, not bandwidth, so that many
parts are in flight.
"""

import functools
from types import SimpleNamespace

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu import plan
from paged_jax.kernels.mosaic_gpu.config import Config, merge_scratch
from paged_jax.kernels.mosaic_gpu.registers import LOWEST, exp, layout, log, of_heads, store, wide

_IN_FLIGHT = 16  # parts
_INPUTS = ("seq_lens", "sinks", "parts", "maxima", "sums", "out", "lse")


def reduce(cfg: Config, seq_lens: Array, sinks: Array, parts: dict[str, Array]) -> tuple[Array, Array]:
    """out [num_seqs * num_heads, head_size] and lse [num_seqs * num_heads]."""
    num_rows = cfg.num_seqs * cfg.num_heads
    kernel = plgpu.kernel(
        functools.partial(_kernel, cfg=cfg),
        out_type=(
            jax.ShapeDtypeStruct((num_rows, cfg.head_size), cfg.dtype),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ),
        scratch_types=merge_scratch(cfg),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(cfg.merging_programs, cfg.items),
        grid_names=("program", "item"),
    )
    return kernel(seq_lens, sinks, parts["parts"], parts["maxima"], parts["sums"])


def _kernel(*gmem, cfg: Config, **smem):
    refs = SimpleNamespace(**{f"{name}_gmem": ref for name, ref in zip(_INPUTS, gmem, strict=True)}, **smem)
    segment = plan.segment_of(refs.seq_lens_gmem, lax.axis_index("item"), jnp.int32(0), cfg)
    for block in range(len(cfg.out_blocks)):

        @pl.when(lax.axis_index("program") == cfg.merging_program(block))
        def _(block=block):
            merge_block(segment, block, refs, cfg)


def merge_block(segment: plan.Segment, block: int, refs, cfg: Config):
    """Merges an item's parts, always in the same order, and writes a block of out; with the first, lse."""
    row, offset = plan.window(segment, cfg)
    count = segment.parts

    def read(number):
        at = segment.item, lax.min(number, jnp.int32(count) - 1)
        out = layout(plgpu.load(refs.parts_gmem.at[*at, pl.ds(64 * block, 64)], optimized=False))
        max_logit, exp_sum = (
            plgpu.load(x_gmem.at[at], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            for x_gmem in (refs.maxima_gmem, refs.sums_gmem)
        )
        return out, max_logit, exp_sum

    def step(i, carry):
        numbers = [i * in_flight + j for j in range(in_flight)]
        parts = [read(number) for number in numbers]
        for number, (out, max_logit, exp_sum) in zip(numbers, parts, strict=True):
            carry = _add(carry, out, max_logit, exp_sum * jnp.where(number < count, 1.0, 0.0))
        return carry

    in_flight = min(_IN_FLIGHT, cfg.num_parts)
    steps = lax.div(jnp.int32(count + (in_flight - 1)), jnp.int32(in_flight))
    init = (
        layout(jnp.full((cfg.columns,), LOWEST, jnp.float32), 0),
        layout(jnp.zeros((cfg.columns,), jnp.float32), 0),
        layout(jnp.zeros((64, cfg.columns), jnp.float32)),
    )
    top, total, acc = lax.fori_loop(0, steps, step, init)
    seen = total != 0  # NaN counts: what is not a number must show
    if cfg.sinks:
        sinks = layout(of_heads(refs.sinks_gmem, 64, offset, segment, cfg).max(axis=0), 0)
        top, total, acc = _add((top, total, acc), jnp.zeros_like(acc), sinks, jnp.ones_like(total))
    total = jnp.where(seen, total, 1.0)
    plgpu.wait_smem_to_gmem(0)  # the block before: its copy, and what it overlaps with
    store(refs.block_smem.T, layout((acc * wide(1.0 / total, 64)).astype(cfg.dtype)))
    if block == 0:
        refs.lse_smem[...] = layout(jnp.where(seen, top + log(total), -jnp.inf), 0)
    plgpu.commit_smem()
    # Row by row where head_size is no multiple of 64: Mosaic would tile shared memory for copies of 8 rows, and refuse.
    together = cfg.group if len(cfg.pieces) == 1 else 1
    for i in range(0, cfg.group, together):
        rows_gmem = refs.out_gmem.at[pl.ds(row + offset + i, together), pl.ds(cfg.out_blocks[block], 64)]
        plgpu.copy_smem_to_gmem(refs.block_smem.at[pl.ds(offset + i, together)], rows_gmem)
    if block == 0:
        for i in range(cfg.group):
            refs.lse_gmem[row + offset + i] = refs.lse_smem[offset + i]
    plgpu.wait_smem_to_gmem(0)


def _add(state, out, max_logit, exp_sum):
    """The softmax so far and one more part of it; out is [64, columns], all else [columns]."""
    top, total, acc = state
    new_top = lax.max(top, max_logit)
    keep, weight = exp(top - new_top), exp(max_logit - new_top) * exp_sum
    return new_top, total * keep + weight, acc * wide(keep, 64) + out * wide(weight, 64)
