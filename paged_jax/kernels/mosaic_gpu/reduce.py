"""The reduce: the softmax over the partial results of one head.

Grid. A program, of one warpgroup, for each row (sequence, head) when there are partitions; for each program of the
decode kernel and head of a group when there are even parts, where only those of the owner (the program that has the
item's first tile) of a split item have work. Everyone loads and computes: an element or two of head_size a thread.

Shared memory: the row, head_size elements, on its way out.

Roofline: the partial results, 4 * head_size bytes a part and head, mostly from L2: latency, not bandwidth, so that
`unroll` parts are in flight.
"""

import functools
from types import SimpleNamespace

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu import plan
from paged_jax.kernels.mosaic_gpu.attend import LOG2E, LOWEST
from paged_jax.kernels.mosaic_gpu.config import Config

_INPUTS = ("seq_lens", "sinks", "tmp_out", "exp_sums", "max_logits", "out", "lse")


def reduce(cfg: Config, seq_lens: Array, sinks: Array, parts: dict[str, Array]) -> tuple[Array, Array]:
    """out [rows, head_size] and lse [rows]; items that the decode kernel has finished keep theirs."""
    even = cfg.split == "even"
    rows = cfg.num_seqs * cfg.num_heads
    arrays = seq_lens, sinks, parts["tmp_out"], parts["exp_sums"], parts["max_logits"]
    kernel = functools.partial(
        plgpu.kernel,
        functools.partial(_kernel, cfg=cfg),
        scratch_types={"out_smem": plgpu.SMEM((cfg.part_size,), jnp.dtype(cfg.dtype))},
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(cfg.num_parts, cfg.group) if even else (rows,),
        grid_names=("program", "head") if even else ("row",),
    )
    if even:
        return pl.run_state(lambda results: kernel()(*arrays, *results))((parts["out"], parts["lse"]))
    shapes = jax.ShapeDtypeStruct((rows, cfg.head_size), cfg.dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)
    return kernel(out_type=shapes)(*arrays)


def _kernel(*gmem, cfg: Config, **smem):
    refs = SimpleNamespace(**{f"{name}_gmem": ref for name, ref in zip(_INPUTS, gmem, strict=True)}, **smem)
    if cfg.split == "partitions":
        row = lax.axis_index("row")
        end = plan.extent_of(refs.seq_lens_gmem[lax.div(row, jnp.int32(cfg.num_heads))], cfg).end
        count = lax.div(end + (cfg.partition_size - 1), jnp.int32(cfg.partition_size))
        _reduce_row(row, count, lambda part: (row, part), refs, cfg)
        return

    owner, head = lax.axis_index("program"), lax.axis_index("head")
    cursor, end, total = plan.stretch_of(refs.seq_lens_gmem, owner, cfg, last=True)
    if cfg.dependent_launch:
        plgpu.griddepcontrol_wait()
    segment = plan.segment_at(refs.seq_lens_gmem, cursor, end, owner, cfg)
    start = cursor.tile - segment.first

    @pl.when((cursor.tile >= 0) & (plan.program_of(start, total, cfg) == owner) & (start + segment.tiles > end))
    def _():
        count = plan.program_of(start + segment.tiles - 1, total, cfg) - owner + 1
        row = (segment.seq * cfg.num_kv_heads + segment.head) * cfg.group + head
        _reduce_row(row, count, lambda part: (plan.part_of(owner + part, part == 0), head), refs, cfg)


def _reduce_row(row, count, at, refs, cfg: Config):
    """Reduces `count` parts, the i-th of them at index at(i), always in the same order."""

    def over_parts(body, init):
        def step(i, carry):
            numbers = [i * cfg.unroll + j for j in range(cfg.unroll)]
            indices = [at(lax.min(number, count - 1)) for number in numbers]
            return body([number < count for number in numbers], indices, carry)

        return lax.fori_loop(0, lax.div(count + (cfg.unroll - 1), jnp.int32(cfg.unroll)), step, init)

    def highest(_, indices, top):
        for max_logit in [refs.max_logits_gmem[index] for index in indices]:
            top = lax.max(top, max_logit)
        return top

    top = over_parts(highest, jnp.float32(LOWEST))

    def add(valid, indices, carry):
        acc, total = carry
        parts = [refs.tmp_out_gmem.at[index][...] for index in indices]
        weights = [refs.exp_sums_gmem[i] * jnp.exp2((refs.max_logits_gmem[i] - top) * LOG2E) for i in indices]
        for is_part, part, weight in zip(valid, parts, weights, strict=True):
            weight = jnp.where(is_part, weight, 0.0)
            acc, total = acc + part * weight, total + weight
        return acc, total

    acc, total = over_parts(add, (jnp.zeros((cfg.part_size,), jnp.float32), jnp.float32(0)))
    seen = total != 0  # NaN counts: what is not a number must show
    keep = jnp.float32(1)
    if cfg.sinks:
        sink = refs.sinks_gmem[lax.rem(row, jnp.int32(cfg.num_heads))]
        higher = lax.max(top, sink)
        keep = jnp.exp2((top - higher) * LOG2E)
        total, top = total * keep + jnp.exp2((sink - higher) * LOG2E), higher
    total = jnp.where(seen, total, 1.0)
    refs.out_smem[...] = (acc * (jnp.where(seen, keep, 0.0) / total)).astype(cfg.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.out_smem.at[pl.ds(0, cfg.head_size)], refs.out_gmem.at[row])
    refs.lse_gmem[row] = jnp.where(seen, top + jnp.log2(total) / LOG2E, -jnp.inf)
    plgpu.wait_smem_to_gmem(0)
