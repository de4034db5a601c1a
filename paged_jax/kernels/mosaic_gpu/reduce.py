"""The reduce: the softmax over the partial results of an item (sequence, kv head).

Grid. A program, of one warpgroup, for each item when there are partitions; for each program of the decode kernel when
there are even parts, where only the owner (the program that has the item's first tile) of a split item has work.
Everyone loads, from global memory into registers, and computes: O^T in the layout of wgmma's results, as it was
written.

Shared memory: the item's rows of `out`, and its lse, on their way out.

Roofline: 4 * (head_size + 128) * columns bytes a part, mostly from L2: latency, not bandwidth, so that a few parts are
in flight.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu import plan
from paged_jax.kernels.mosaic_gpu.attend import LOWEST, exp, log, of_heads, store_item
from paged_jax.kernels.mosaic_gpu.config import Config, out_scratch

_INPUTS = ("seq_lens", "sinks", "parts", "out", "lse")


def reduce(cfg: Config, seq_lens: Array, sinks: Array, results: dict[str, Array]) -> tuple[Array, Array]:
    """out [rows, head_size] and lse [rows]; items that the decode kernel has finished keep theirs."""
    arrays = seq_lens, sinks, results["parts"]
    kernel: Any = functools.partial(
        plgpu.kernel,
        functools.partial(_kernel, cfg=cfg),
        scratch_types=out_scratch(cfg),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(cfg.num_parts if cfg.split == "even" else cfg.items,),
        grid_names=("program",),
    )
    if cfg.split == "even":
        return pl.run_state(lambda refs: kernel()(*arrays, *refs))((results["out"], results["lse"]))
    shapes = jax.ShapeDtypeStruct((cfg.rows, cfg.head_size), cfg.dtype), jax.ShapeDtypeStruct((cfg.rows,), jnp.float32)
    return kernel(out_type=shapes)(*arrays)


def _kernel(*gmem, cfg: Config, **smem):
    refs = SimpleNamespace(**{f"{name}_gmem": ref for name, ref in zip(_INPUTS, gmem, strict=True)}, **smem)
    program = lax.axis_index("program")
    if cfg.split == "partitions":
        segment = plan.segment_of(refs.seq_lens_gmem, program, None, cfg)
        end = segment.extent.end
        count = lax.div(end + (cfg.partition_size - 1), jnp.int32(cfg.partition_size))
        _reduce_item(segment, count, lambda i: program * cfg.num_parts + i, refs, cfg)
        return

    cursor, end, total = plan.stretch_of(refs.seq_lens_gmem, program, cfg, last=True)
    if cfg.dependent_launch:
        plgpu.griddepcontrol_wait()
    segment = plan.segment_at(refs.seq_lens_gmem, cursor, end, program, cfg)
    start = cursor.tile - segment.first
    owned = (cursor.tile >= 0) & (plan.program_of(start, total, cfg) == program)

    @pl.when(owned & (start + segment.tiles > end))
    def _():
        count = plan.program_of(start + segment.tiles - 1, total, cfg) - program + 1
        _reduce_item(segment, count, lambda i: plan.part_of(program + i, i == 0), refs, cfg)


def _reduce_item(segment, count, part_of, refs, cfg: Config):
    """Reduces `count` parts, always in the same order, so that the result depends on nothing but them."""
    row, offset = plan.window(segment, cfg)
    starts = range(0, cfg.padded_head_size + 128, 64)
    in_flight = max(1, min(4, 4096 // (cfg.padded_head_size * cfg.columns)))

    def read(number):
        part_gmem = refs.parts_gmem.at[part_of(lax.min(number, count - 1))]
        rows = [plgpu.load(part_gmem.at[pl.ds(start, 64)], optimized=False) for start in starts]
        return [plgpu.layout_cast(x, plgpu.Layout.WGMMA) for x in rows]

    def step(i, carry):
        numbers = [i * in_flight + j for j in range(in_flight)]
        parts = [read(number) for number in numbers]
        for number, (*outs, max_logit, exp_sum) in zip(numbers, parts, strict=True):
            carry = _add(carry, outs, max_logit, exp_sum * jnp.where(number < count, 1.0, 0.0))
        return carry

    def full(value):
        return plgpu.layout_cast(jnp.full((64, cfg.columns), value, jnp.float32), plgpu.Layout.WGMMA)

    init = full(LOWEST), full(0.0), *(full(0.0) for _ in starts[2:])
    top, total, *acc = lax.fori_loop(0, lax.div(count + (in_flight - 1), jnp.int32(in_flight)), step, init)
    seen = total != 0  # NaN counts: what is not a number must show
    if cfg.sinks:
        sinks = of_heads(refs.sinks_gmem, 64, offset, segment, cfg)
        zeros = [jnp.zeros_like(x) for x in acc]
        top, total, *acc = _add((top, total, *acc), zeros, sinks, full(1.0))
    total = jnp.where(seen, total, 1.0)
    log_sum = jnp.where(seen, top + log(total), -jnp.inf).max(axis=0)
    store_item([jnp.where(seen, x / total, 0.0) for x in acc], log_sum, row, offset, refs, cfg)
    plgpu.wait_smem_to_gmem(0)


def _add(state, outs, max_logit, exp_sum):
    """The softmax so far and one more part of it, in which everything is [64, columns]."""
    top, total, *acc = state
    new_top = lax.max(top, max_logit)
    keep, weight = exp(top - new_top), exp(max_logit - new_top) * exp_sum
    acc = [x * keep + out * weight for x, out in zip(acc, outs, strict=True)]
    return new_top, total * keep + weight, *acc
