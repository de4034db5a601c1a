"""The decode kernel: attention of one query a sequence over its blocks, whole or in parts.

Grid. A program, a thread block of two warpgroups, for each part of each item (sequence, kv head): all of its tokens, a
partition of fixed size or an even share. Where lengths are uneven, as many as run at once have even stretches of all
items, with whole items and parts in them (`plan.py`), and the others nothing. What they write: `results.py`. The parts
of an item are one cluster where they are short and few: each program writes its part, and when all have, the first ones
merge them (`reduce.py`). Otherwise a kernel of its own does. New tokens that are written on the way: `write.py`.

Who loads: warpgroup 1 copies runs of tokens (TMA, through the block table) into rings of `slots` tiles of K and of V
(`load.py`).
In a stretch the rings go on from one item to the next, and so does the query: while a result is stored, the next item's
query and tiles are on their way.
Who computes: warpgroup 0, with tokens as M of wgmma and query heads (`columns`, a multiple of 8) as N:

    S^T [tile, columns] = K [tile, d]   x Q^T [d, columns]        A, B in shared memory
    O^T [d, columns]   += V^T [d, tile] x P^T [tile, columns]     P goes through shared memory

Query rows come in windows that start at a multiple of 8, as TMA demands: the columns of other heads are computed with
the rest and thrown away.

Shared memory, group 4, head_size 128, bfloat16, tiles of 64 tokens, 2 slots (two programs a multiprocessor):

    | K ring 32 KiB | V ring 32 KiB | Q 2 KiB | P 1 KiB | out 2 KiB, part 4 KiB, or both |

8-bit caches become float16 on the way from the rings to the products, A in registers (`narrow.py`), and a copy of the
query in float16 joins what is in shared memory; rings have 4 slots then. In layout "vllm" blocks lie in the rings as
they came, and A is in registers too (`vllm.py`).

Where items are many, kv heads are folded: an item then has some neighbouring ones, whose tokens of a block are one
larger copy and become rows of one tile. P is 0 where row and column are not of the same kv head; NaN or infinite values
of one of them show in the others.

Where head_size is no multiple of 64, V, O^T and out are in two pieces, as wgmma's M is 64: the second is the last 64
elements of the head and overlaps with the first.

Roofline: 4 * head_size bytes (8-bit K and V: 2) a token and kv head through HBM, read once; wgmma pads the heads of a
group to 8 and has an order of magnitude to spare.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu import narrow, plan, results, vllm, write
from paged_jax.kernels.mosaic_gpu.config import Config, scratch
from paged_jax.kernels.mosaic_gpu.load import load_segment
from paged_jax.kernels.mosaic_gpu.reduce import merge_block
from paged_jax.kernels.mosaic_gpu.registers import LOWEST, exp, layout, of_heads, scaled_logits, wide

_OPTIONS = ("scale", "slopes", "sinks", "k_scale", "v_scale")
_INPUTS = ("query", "key_cache", "value_cache", "block_tables", "seq_lens", *_OPTIONS)
_NEW = ("key", "value", "slot_mapping")
_Step = Callable[[plan.Segment, plan.Scalar, plan.Stretch | None], None]


def attend(cfg: Config, *arrays: Any) -> dict[str, Array]:
    """Runs the kernel on `_INPUTS`, the query as [rows, head_size] and what is absent as any array of one element.

    Then on `_NEW`, if `cfg.num_blocks`: both caches are references then, to which their last tokens are written.
    """
    shapes = results.outputs(cfg)
    if cfg.merge == "cluster":
        mesh = {"cluster": (cfg.num_parts,), "cluster_names": ("part",), "grid": (cfg.items,), "grid_names": ("item",)}
    elif cfg.stretches:
        mesh = {"grid": (cfg.items * cfg.num_parts,), "grid_names": ("program",)}
    else:
        mesh = {"grid": (cfg.num_parts, cfg.items), "grid_names": ("part", "item")}  # parts that few items have: last
    kernel = plgpu.kernel(
        functools.partial(_kernel, cfg=cfg),
        out_type=tuple(shapes.values()),
        scratch_types=scratch(cfg),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        num_threads=2,
        thread_name="warpgroup",
        **mesh,
    )
    return dict(zip(shapes, kernel(*arrays), strict=True))


def _kernel(*gmem, cfg: Config, **smem):
    names = [f"{name}_gmem" for name in (*_INPUTS, *(_NEW if cfg.num_blocks else ()), *results.outputs(cfg))]
    refs = SimpleNamespace(**dict(zip(names, gmem, strict=True)), **smem)
    if cfg.stretches:
        mine = plan.stretch_of(refs.seq_lens_gmem, lax.axis_index("program"), cfg)
    else:
        mine = plan.segment_of(refs.seq_lens_gmem, lax.axis_index("item"), lax.axis_index("part"), cfg)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _():
        # ptxas, left alone, may take more than two programs have. It launches all threads with what is named here.
        if cfg.programs == 2 and cfg.head_size >= 128 and cfg.columns <= 16:
            plgpu.set_max_registers(128, action="increase")
        pl.when(mine.some)(lambda: _load_query(mine, refs, cfg))

        def attend_to(segment, before, rest):
            _attend_segment(segment, before, rest, refs, cfg)

        _for_segments(attend_to, mine, refs, cfg)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last result

    @pl.when(warpgroup == 1)
    def _():
        def load(segment, before, _):
            load_segment(segment, before, refs, cfg)

        _empty_rings(_for_segments(load, mine, refs, cfg), refs, cfg)
        if cfg.num_blocks and isinstance(mine, plan.Segment):
            plgpu.barrier_wait(refs.q_ready)
            write.write(mine, refs, cfg)


def _for_segments(do: _Step, mine: plan.Segment | plan.Stretch, refs, cfg: Config) -> plan.Scalar:
    """A program's segment, or those of its stretch, given the tiles before each and what is left after it.

    Returns how many tiles they have.
    """
    if isinstance(mine, plan.Segment):
        do(mine, jnp.int32(0), None)
        return mine.count

    def turn(state):
        stretch, before = state
        segment = plan.next_segment(refs.seq_lens_gmem, stretch, cfg)
        rest = plan.after_segment(refs.seq_lens_gmem, stretch, cfg)
        do(segment, before, rest)
        return rest, before + segment.count

    return lax.while_loop(lambda state: state[0].some, turn, (mine, jnp.int32(0)))[1]


def _load_query(of: plan.Segment | plan.Stretch, refs, cfg: Config):
    row, _ = plan.window(of, cfg)
    plgpu.copy_gmem_to_smem(refs.query_gmem.at[pl.ds(row, cfg.columns)], refs.q_smem, refs.q_ready)


def _empty_rings(count: plan.Scalar, refs, cfg: Config):
    """Rings end as they began: the interpreter insists on it, and new tokens can be written then."""

    @pl.loop(lax.max(count - cfg.slots, jnp.int32(0)), count)
    def _(i):
        plgpu.barrier_wait(refs.k_consumed.at[lax.rem(i, jnp.int32(cfg.slots))])
        plgpu.barrier_wait(refs.v_consumed.at[lax.rem(i, jnp.int32(cfg.slots))])


def _attend_segment(segment: plan.Segment, before: plan.Scalar, rest: plan.Stretch | None, refs, cfg: Config):
    """Attends to a segment's tiles, which are in the rings after others, and stores the result.

    The query is on its way already; the next one, of the `rest`, is on its way from the last tile on.
    """
    new = write.new_token(segment, refs, cfg) if cfg.num_blocks else None
    row, offset = plan.window(segment, cfg)
    if new is not None:
        for new_gmem, new_smem in ((refs.key_gmem, refs.key_smem), (refs.value_gmem, refs.value_smem)):
            plgpu.copy_gmem_to_smem(new_gmem.at[segment.seq, segment.head], new_smem, refs.q_ready)
    plgpu.barrier_wait(refs.q_ready)
    q_smem, unit = _convert_query(refs, cfg)
    factor = refs.scale_gmem[0] * _cache_scale(refs.k_scale_gmem, cfg.k_scale, segment) * unit
    slopes = of_heads(refs.slopes_gmem, cfg.tile, offset, segment, cfg) if cfg.alibi else None

    end = segment.end if new is None else jnp.where(new.seen, segment.end - 1, segment.end)
    late = cfg.columns * cfg.tile <= 512  # sums across warps once a segment, if registers allow

    def attend_tile(i, carry):
        acc, max_logit, exp_sum = carry
        slot = lax.rem(before + i, jnp.int32(cfg.slots))
        start = segment.origin + i * cfg.tokens
        low, high = segment.begin - start, end - start
        plgpu.barrier_wait(refs.k_ready.at[slot])
        logits = _dot(_keys(refs.k_smem.at[slot], cfg), q_smem.T)
        if cfg.k_scale == "slot":
            logits *= _scales(refs.k_scale_smem.at[slot], cfg)
        plgpu.barrier_arrive(refs.k_consumed.at[slot])
        wide_factor = wide(factor, cfg.tile) if jnp.ndim(factor) else factor
        logits = _logits(logits, wide_factor, slopes, start - segment.seq_len + 1, low, high, cfg)
        top = lax.max(max_logit, logits.max(axis=0))
        keep = exp(max_logit - top)
        p = weights = exp(logits - wide(top, cfg.tile))
        if cfg.v_scale == "slot":
            plgpu.barrier_wait(refs.v_ready.at[slot])
            weights, peak = _scaled(p, _scales(refs.v_scale_smem.at[slot], cfg), low, high, cfg)
        refs.p_smem.T[...] = layout(weights.astype(cfg.operand_dtype))
        plgpu.commit_smem()
        exp_sum = exp_sum * wide(keep, cfg.tile) + p if late else exp_sum * keep + p.sum(axis=0)
        if cfg.v_scale != "slot":
            plgpu.barrier_wait(refs.v_ready.at[slot])
        tiles_smem = [ring_smem.at[slot] for ring_smem in refs.v_smem]
        _zero_rows(tiles_smem, low, high, cfg)
        products = [_dot(_values(x, cfg), refs.p_smem.T) for x in tiles_smem]
        if cfg.v_scale == "slot":
            products = [x * wide(peak, x.shape[0]) for x in products]
        acc = [x * wide(keep, x.shape[0]) + product for x, product in zip(acc, products, strict=True)]
        plgpu.barrier_arrive(refs.v_consumed.at[slot])
        return acc, top, exp_sum

    lowest = jnp.full((cfg.columns,), LOWEST, jnp.float32)
    init = (
        [layout(jnp.zeros((size, cfg.columns), jnp.float32)) for _, size in cfg.pieces],
        layout(lowest, 0),
        layout(jnp.zeros((cfg.tile, cfg.columns), jnp.float32)) if late else layout(jnp.zeros_like(lowest), 0),
    )
    if new is not None:  # while the first tile is on its way
        init = write.attend_to(new, q_smem, factor, init, refs, cfg)
    acc, max_logit, exp_sum = lax.fori_loop(0, segment.count, attend_tile, init)
    if rest is not None:
        plgpu.commit_smem()  # all have read the query
        pl.when(rest.some)(lambda: _load_query(rest, refs, cfg))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the result before: this one takes its place
    state = acc, max_logit, exp_sum.sum(axis=0) if late else exp_sum
    v_scale = _cache_scale(refs.v_scale_gmem, cfg.v_scale, segment)
    results.store_result(segment, row, offset, v_scale, state, refs, cfg)
    if cfg.merge == "cluster":
        # Parts are in memory by now, and in no first-level cache: each program reads them here for the first time.
        plgpu.barrier_arrive(refs.cluster_done)
        plgpu.barrier_wait(refs.cluster_done)
        for block in range(len(cfg.out_blocks)):

            @pl.when(segment.part == cfg.merging_program(block))
            def _(block=block):
                merge_block(segment, segment.item * cfg.num_parts, cfg.num_parts, block, refs, cfg)

    # In stretches: here, as this warpgroup replaces the new token by the next one.
    if cfg.num_blocks and cfg.stretches:
        write.write(segment, refs, cfg)


def _keys(tile_smem, cfg: Config):
    """K [tile, d], in shared memory or in registers."""
    if cfg.layout == "vllm":
        return vllm.keys(tile_smem, cfg)
    return narrow.keys(tile_smem, cfg) if cfg.narrow else tile_smem


def _values(tile_smem, cfg: Config):
    """V^T [d, tile], in shared memory or in registers."""
    if cfg.layout == "vllm":
        return vllm.values(tile_smem, cfg)
    return narrow.values(tile_smem, cfg) if cfg.narrow else tile_smem.T


def _convert_query(refs, cfg: Config):
    """The query as an operand; and what each was divided by: a power of two, so that it fits, exactly."""
    if not cfg.narrow:
        return refs.q_smem, 1.0
    q, unit = layout(refs.q_smem.T[...]), 1.0
    if cfg.dtype != cfg.operand_dtype:
        q = q.astype(jnp.float32)
        peak = lax.max(jnp.abs(q).max(axis=0), jnp.float32(1e-30))
        unit = lax.bitcast_convert_type(lax.bitcast_convert_type(peak, jnp.int32) & 0x7F800000, jnp.float32)
        q = (q / wide(unit, cfg.head_size)).astype(cfg.operand_dtype)
    narrow.store_query(refs.operand_smem, q, cfg)
    plgpu.commit_smem()
    return refs.operand_smem, unit


def _scales(scales_smem, cfg: Config):
    """A factor for each token, [tile] -> [tile, columns]."""
    return layout(lax.broadcast_in_dim(narrow.token_scales(scales_smem, cfg), (cfg.tile, cfg.columns), (0,)))


def _scaled(p, scales, low, high, cfg: Config):
    """The weights of values times their scales; the largest of these stays out, so that float16 holds the others."""
    weights = p * jnp.where(_seen(low, high, p.shape, cfg), scales, jnp.zeros_like(scales))
    peak = jnp.abs(weights).max(axis=0)
    peak = jnp.where(peak > 0, peak, 1.0)
    return weights / wide(peak, cfg.tile), peak


def _seen(low, high, shape, cfg: Config):
    """Which rows are tokens low <= token < high."""
    token = _token(shape, cfg)
    seen = token < high
    return seen & (token >= low) if cfg.sliding_window is not None else seen


def _token(shape, cfg: Config):
    """The token of each row of a tile."""
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    if cfg.fold == 1:
        return row
    run, size = lax.div(row, jnp.int32(cfg.fold * cfg.run)), jnp.int32(cfg.run)
    return run * size + lax.rem(row, size)


def _own(shape, cfg: Config):
    """Where row and column are of the same kv head, of those that are folded; other items' columns may be of any."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, d, layout=plgpu.Layout.WGMMA) for d in (0, 1))
    head, its = lax.div(row, jnp.int32(cfg.run)), lax.div(column, jnp.int32(cfg.group // cfg.fold))
    return lax.rem(head, jnp.int32(cfg.fold)) == lax.rem(its, jnp.int32(cfg.fold))


def _logits(products, factor, slopes, distance, low, high, cfg: Config):
    """The logits of a tile, -inf where it is not attended; `distance` is its first key's to the query."""
    logits = scaled_logits(products, factor, cfg)
    if slopes is not None:
        token = _token(products.shape, cfg)
        logits += slopes * (token + distance).astype(jnp.float32)
    seen = _seen(low, high, products.shape, cfg)
    if cfg.fold > 1:
        seen &= _own(products.shape, cfg)
    return jnp.where(seen, logits, -jnp.inf)


def _zero_rows(tiles_smem, low, high, cfg: Config):
    """Zeroes the rows whose tokens are not low <= token < high: 0 * NaN would be NaN."""
    rows = cfg.tile if cfg.layout == "vllm" else 64
    for row in range(0, cfg.tile, rows):
        start = row // cfg.fold
        partly = high < start + rows // cfg.fold
        if cfg.sliding_window is not None:
            partly |= low > start

        @pl.when(partly)
        def _(row=row, start=start):
            for tile_smem in tiles_smem:
                if cfg.layout == "vllm":
                    vllm.zero_rows(tile_smem, low, high, cfg)
                    continue
                rows_smem = tile_smem.at[pl.ds(row, 64)]
                if cfg.narrow:
                    narrow.zero_rows(rows_smem, low - start, high - start, cfg)
                else:
                    rows = layout(rows_smem[...])
                    seen = _seen(low - start, high - start, rows.shape, cfg)
                    rows_smem[...] = jnp.where(seen, rows, jnp.zeros_like(rows))
            plgpu.commit_smem()


def _cache_scale(scale_gmem, kind: str, segment):
    return 1.0 if kind in ("none", "slot") else scale_gmem[segment.head if kind == "head" else 0]


def _dot(a_smem, b_smem):
    def body(acc):
        plgpu.wgmma(acc, a_smem, b_smem)
        return acc[...]

    accumulator = plgpu.ACC((a_smem.shape[0], b_smem.shape[1]), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return layout(pl.run_scoped(body, accumulator))
