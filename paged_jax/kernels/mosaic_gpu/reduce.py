"""Merging the parts of an item (sequence, kv head): in the cluster that wrote them or in a kernel of its own.

A block of 64 elements of the item's heads is merged at once: O^T in the layout of wgmma's results, as it was written.

Grid of the kernel. A program, of one warpgroup, for each block of each item, or of some items if not all may have
several parts. Everyone loads, from global memory into registers, and computes.

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
_PROGRAMS = 256  # that look at all items, where few have several parts


def reduce(cfg: Config, seq_lens: Array, sinks: Array, results: dict[str, Array]) -> tuple[Array, Array]:
    """out [num_seqs * num_heads, head_size] and lse [num_seqs * num_heads], from the `results` of `attend`."""
    num_rows = cfg.num_seqs * cfg.num_heads
    inputs = seq_lens, sinks, *(results[name] for name in _inputs(cfg))
    outs = (
        jax.ShapeDtypeStruct((num_rows, cfg.head_size), cfg.dtype),
        jax.ShapeDtypeStruct((num_rows,), jnp.float32),
    )
    call = functools.partial(
        plgpu.kernel,
        functools.partial(_kernel, cfg=cfg),
        scratch_types=merge_scratch(cfg),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(cfg.merging_programs, _item_programs(cfg)),
        grid_names=("program", "item"),
    )
    if not cfg.stretches:
        return call(out_type=outs)(*inputs)
    # Those of one part are there already.
    return pl.run_state(lambda refs: call(out_type=())(*inputs, *refs))((results["out"], results["lse"]))


def _kernel(*gmem, cfg: Config, **smem):
    names = "seq_lens", "sinks", *_inputs(cfg), "out", "lse"
    refs = SimpleNamespace(**{f"{name}_gmem": ref for name, ref in zip(names, gmem, strict=True)}, **smem)
    first, step = lax.axis_index("item"), _item_programs(cfg)

    def parts_of(item):
        return refs.last_program_gmem[item] - lax.div(refs.first_place_gmem[item], jnp.int32(2)) + 1

    def merge(item):
        segment = plan.segment_of(refs.seq_lens_gmem, item, jnp.int32(0), cfg)
        first, parts = segment.place, plan.num_partitions(segment.seq_len, cfg)
        if cfg.stretches:
            first, parts = refs.first_place_gmem[item], parts_of(item)
        for block in range(len(cfg.out_blocks)):

            @pl.when(lax.axis_index("program") == cfg.merging_program(block))
            def _(block=block):
                merge_block(segment, first, parts, block, refs, cfg)

    if not cfg.stretches:
        merge(first)
        return
    items = [first + i for i in range(0, cfg.items, step)]
    counts = [parts_of(lax.min(item, jnp.int32(cfg.items - 1))) for item in items]

    @pl.when(functools.reduce(lax.max, counts) > 1)
    def _():
        @pl.loop(first, cfg.items, step=step)
        def _(item):
            pl.when(parts_of(item) > 1)(lambda: merge(item))


def _inputs(cfg: Config) -> tuple[str, ...]:
    return "parts", "maxima", "sums", *(("first_place", "last_program") if cfg.stretches else ())


def _item_programs(cfg: Config) -> int:
    """Of the grid; where few items have several parts, each program looks at some."""
    return min(cfg.items, max(_PROGRAMS, -(-cfg.items // _IN_FLIGHT))) if cfg.stretches else cfg.items


def merge_block(segment: plan.Segment, first, count, block: int, refs, cfg: Config):
    """Merges an item's parts, always in the same order, and writes a block of out; with the first, lse."""
    row, offset = plan.window(segment, cfg)

    def read(at):  # in the layout of what it is added to; to say so takes Mosaic longer
        out = plgpu.load(refs.parts_gmem.at[at, pl.ds(64 * block, 64)], optimized=False)
        max_logit, exp_sum = (
            plgpu.load(x_gmem.at[at], optimized=False) for x_gmem in (refs.maxima_gmem, refs.sums_gmem)
        )
        return out, max_logit, exp_sum

    def step(i, carry):
        numbers = [i * in_flight + j for j in range(in_flight)]
        parts = [read(plan.place_of(first, lax.min(number, jnp.int32(count) - 1), cfg)) for number in numbers]
        for number, (out, max_logit, exp_sum) in zip(numbers, parts, strict=True):
            carry = _add(carry, out, max_logit, exp_sum * jnp.where(number < count, 1.0, 0.0))
        return carry

    carry = (
        layout(jnp.full((cfg.columns,), LOWEST, jnp.float32), 0),
        layout(jnp.zeros((cfg.columns,), jnp.float32), 0),
        layout(jnp.zeros((64, cfg.columns), jnp.float32)),
    )
    in_flight = min(_IN_FLIGHT, cfg.num_parts + (4 if cfg.stretches else 0))  # more where one item may have more
    steps = lax.div(jnp.int32(count + (in_flight - 1)), jnp.int32(in_flight))
    top, total, acc = lax.fori_loop(0, steps, step, carry)
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
