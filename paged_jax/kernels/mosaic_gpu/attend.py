"""The decode kernel: attention of one query a sequence over its blocks, whole or in parts.

Grid. A program, a thread block of two warpgroups, for each part of each item (sequence, kv head): all of its tokens, a
partition of fixed size or an even share (`plan.py`). The parts of an item are one cluster where they are few: each
program writes its part, and when all have, the first ones merge them (`reduce.py`). Where they are many, a kernel of
its own does.

Who loads: warpgroup 1 copies runs of tokens (TMA, through the block table) into rings of `slots` tiles of K and of V.
Who computes: warpgroup 0, with tokens as M of wgmma and query heads (`columns`, a multiple of 8) as N:

    S^T [tile, columns] = K [tile, d]   x Q^T [d, columns]        A, B in shared memory
    O^T [d, columns]   += V^T [d, tile] x P^T [tile, columns]     P goes through shared memory

Query rows come in windows that start at a multiple of 8, as TMA demands: the columns of other heads are computed with
the rest and thrown away.

Shared memory, group 4, head_size 128, bfloat16, tiles of 64 tokens, 3 slots (two programs a multiprocessor):

    | K ring 48 KiB | V ring 48 KiB | Q 2 KiB | P 1 KiB | out 2 KiB | merged 1 KiB |

Where head_size is no multiple of 64, V, O^T and out are in two pieces, as wgmma's M is 64: the second is the last 64
elements of the head and overlaps with the first.

Roofline: 4 * head_size bytes a token and kv head (16-bit K and V) through HBM, read once; wgmma pads the heads of a
group to 8 and has an order of magnitude to spare.
"""

import functools
from types import SimpleNamespace

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu import plan
from paged_jax.kernels.mosaic_gpu.config import Config, scratch
from paged_jax.kernels.mosaic_gpu.reduce import merge_block
from paged_jax.kernels.mosaic_gpu.registers import LOWEST, exp, layout, log, of_heads, store, wide

_OPTIONS = ("scale", "slopes", "sinks", "k_scale", "v_scale")
_INPUTS = ("query", "key_cache", "value_cache", "block_tables", "seq_lens", *_OPTIONS)


def outputs(cfg: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel writes: `out` and `lse`, or partial results, each normalised; if it merges them, all of these."""
    f32, num_rows, shapes = jnp.float32, cfg.num_seqs * cfg.num_heads, {}
    if cfg.merge != "kernel":
        shapes["out"] = jax.ShapeDtypeStruct((num_rows, cfg.head_size), cfg.dtype)
        shapes["lse"] = jax.ShapeDtypeStruct((num_rows,), f32)
    if cfg.merge != "none":
        parts = cfg.items, cfg.num_parts
        shapes["parts"] = jax.ShapeDtypeStruct((*parts, cfg.padded_head_size, cfg.columns), f32)
        shapes["maxima"] = shapes["sums"] = jax.ShapeDtypeStruct((*parts, cfg.columns), f32)
    return shapes


def attend(cfg: Config, *arrays: Array) -> dict[str, Array]:
    """Runs the kernel on `_INPUTS`, the query as [rows, head_size] and what is absent as any array of one element."""
    shapes = outputs(cfg)
    if cfg.merge == "cluster":
        mesh = {"cluster": (cfg.num_parts,), "cluster_names": ("part",), "grid": (cfg.items,), "grid_names": ("item",)}
    else:
        mesh = {"grid": (cfg.items, cfg.num_parts), "grid_names": ("item", "part")}
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
    names = [f"{name}_gmem" for name in (*_INPUTS, *outputs(cfg))]
    refs = SimpleNamespace(**dict(zip(names, gmem, strict=True)), **smem)
    segment = plan.segment_of(refs.seq_lens_gmem, lax.axis_index("item"), lax.axis_index("part"), cfg)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _():
        _attend_segment(segment, refs, cfg)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _():
        _load_segment(segment, refs, cfg)

        # The rings end as they began; the interpreter insists on it.
        @pl.loop(lax.max(segment.count - cfg.slots, jnp.int32(0)), segment.count)
        def _(i):
            plgpu.barrier_wait(refs.k_consumed.at[lax.rem(i, jnp.int32(cfg.slots))])
            plgpu.barrier_wait(refs.v_consumed.at[lax.rem(i, jnp.int32(cfg.slots))])


def _load_segment(segment: plan.Segment, refs, cfg: Config):
    """Copies a segment's tiles into the rings."""
    last = lax.max(lax.div(segment.end - 1, jnp.int32(cfg.run)) * cfg.run, jnp.int32(0))

    def runs_of(tile):  # (block, offset in it); past the end the last run again, which is masked
        starts = [lax.min(segment.origin + tile * cfg.tile + i, last) for i in range(0, cfg.tile, cfg.run)]
        blocks = [refs.block_tables_gmem[segment.seq, lax.div(t, jnp.int32(cfg.block_size))] for t in starts]
        blocks = [jnp.where(segment.end > 0, block, 0) for block in blocks]
        return tuple((block, lax.rem(t, jnp.int32(cfg.block_size))) for block, t in zip(blocks, starts, strict=True))

    def load_tile(i, runs):
        following = runs_of(i + 1)  # in flight while this tile waits for its slot
        slot = lax.rem(i, jnp.int32(cfg.slots))
        whole = ((0, cfg.head_size),)
        keys = refs.key_cache_gmem, (refs.k_smem,), whole, refs.k_ready, refs.k_consumed
        values = refs.value_cache_gmem, refs.v_smem, cfg.pieces, refs.v_ready, refs.v_consumed
        for cache_gmem, rings_smem, pieces, ready, consumed in (keys, values):

            @pl.when(i >= cfg.slots)
            def _(consumed=consumed):
                plgpu.barrier_wait(consumed.at[slot])

            for j, run in enumerate(runs):
                rows = pl.ds(j * cfg.run, cfg.run)
                for ring_smem, piece in zip(rings_smem, pieces, strict=True):
                    run_gmem = _run_gmem(cache_gmem, run, segment.head, piece, cfg)
                    plgpu.copy_gmem_to_smem(run_gmem, ring_smem.at[slot, rows], ready.at[slot])
        return following

    lax.fori_loop(0, segment.count, load_tile, runs_of(0))


def _run_gmem(cache_gmem, run, head, piece: tuple[int, int], cfg: Config):
    """A piece of a run of neighbouring tokens, [run, size]."""
    (block, offset), (first, size) = run, piece
    tokens = slice(None) if cfg.run == cfg.block_size else pl.ds(pl.multiple_of(offset, cfg.run), cfg.run)
    d = slice(None) if size == cfg.head_size else pl.ds(first, size)
    return cache_gmem.at[block, tokens, head, d] if cfg.layout == "nhd" else cache_gmem.at[block, head, tokens, d]


def _attend_segment(segment: plan.Segment, refs, cfg: Config):
    """Attends to a segment's tiles in the rings, and stores the result."""
    row, offset = plan.window(segment, cfg)
    plgpu.copy_gmem_to_smem(refs.query_gmem.at[pl.ds(row, cfg.columns)], refs.q_smem, refs.q_ready)
    plgpu.barrier_wait(refs.q_ready)
    factor = refs.scale_gmem[0] * _cache_scale(refs.k_scale_gmem, cfg.k_scale, segment)
    slopes = of_heads(refs.slopes_gmem, cfg.tile, offset, segment, cfg) if cfg.alibi else None

    def attend_tile(i, carry):
        acc, max_logit, exp_sum = carry
        slot = lax.rem(i, jnp.int32(cfg.slots))
        start = segment.origin + i * cfg.tile
        low, high = segment.begin - start, segment.end - start
        plgpu.barrier_wait(refs.k_ready.at[slot])
        logits = _dot(refs.k_smem.at[slot], refs.q_smem.T)
        plgpu.barrier_arrive(refs.k_consumed.at[slot])
        logits = _logits(logits, factor, slopes, start - segment.seq_len + 1, low, high, cfg)
        top = lax.max(max_logit, logits.max(axis=0))
        keep = exp(max_logit - top)
        p = exp(logits - wide(top, cfg.tile))
        refs.p_smem.T[...] = layout(p.astype(cfg.dtype))
        plgpu.commit_smem()
        exp_sum = exp_sum * keep + p.sum(axis=0)
        plgpu.barrier_wait(refs.v_ready.at[slot])
        values_smem = [ring_smem.at[slot] for ring_smem in refs.v_smem]
        _zero_rows(values_smem, low, high, cfg)
        acc = [x * wide(keep, x.shape[0]) + _dot(v.T, refs.p_smem.T) for x, v in zip(acc, values_smem, strict=True)]
        plgpu.barrier_arrive(refs.v_consumed.at[slot])
        return acc, top, exp_sum

    init = (
        [layout(jnp.zeros((size, cfg.columns), jnp.float32)) for _, size in cfg.pieces],
        layout(jnp.full((cfg.columns,), LOWEST, jnp.float32), 0),
        layout(jnp.zeros((cfg.columns,), jnp.float32), 0),
    )
    state = lax.fori_loop(0, segment.count, attend_tile, init)
    v_scale = _cache_scale(refs.v_scale_gmem, cfg.v_scale, segment)
    if cfg.merge == "none":
        _store_whole(segment, row, offset, v_scale, state, refs, cfg)
    else:
        _store_part(segment, v_scale, state, refs)
    if cfg.merge == "cluster":
        plgpu.barrier_arrive(refs.cluster_done)
        plgpu.barrier_wait(refs.cluster_done)
        for block in range(len(cfg.out_blocks)):

            @pl.when(segment.part == cfg.merging_program(block))
            def _(block=block):
                merge_block(segment, cfg.num_parts, block, refs, cfg)


def _logits(products, factor, slopes, distance, low, high, cfg: Config):
    """The logits of a tile, -inf where it is not attended; `distance` is its first key's to the query."""
    token = plgpu.broadcasted_iota(jnp.int32, products.shape, 0, layout=plgpu.Layout.WGMMA)
    if (cap := cfg.logits_soft_cap) is not None:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        logits = cap - (2 * cap) / (exp(products * (factor * (2 / cap))) + 1)
    else:
        logits = products * factor
    if slopes is not None:
        logits += slopes * (token + distance).astype(jnp.float32)
    seen = token < high
    if cfg.sliding_window is not None:
        seen &= token >= low
    return jnp.where(seen, logits, -jnp.inf)


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
    for out_smem, x in zip(refs.out_smem, acc, strict=True):
        store(out_smem.T, layout((x * wide(v_scale / total, x.shape[0])).astype(cfg.dtype)))
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


def _store_part(segment, v_scale, state, refs):
    """Writes a partial result: normalised O^T, maxima and sums of exponentials; all of it when this returns."""
    acc, max_logit, exp_sum = state
    seen = exp_sum != 0
    total = jnp.where(seen, exp_sum, 1.0)
    row = 0
    for x in acc:
        refs.part_smem[pl.ds(row, x.shape[0])] = x * wide(v_scale / total, x.shape[0])
        row += x.shape[0]
    refs.max_smem[...] = layout(jnp.where(seen, max_logit, -jnp.inf), 0)
    refs.sum_smem[...] = layout(exp_sum, 0)
    plgpu.commit_smem()
    for x_smem, x_gmem in (
        (refs.part_smem, refs.parts_gmem),
        (refs.max_smem, refs.maxima_gmem),
        (refs.sum_smem, refs.sums_gmem),
    ):
        plgpu.copy_smem_to_gmem(x_smem, x_gmem.at[segment.item, segment.part])
    plgpu.wait_smem_to_gmem(0)


def _zero_rows(tiles_smem, low, high, cfg: Config):
    """Zeroes the rows that are not low <= row < high: 0 * NaN would be NaN."""
    for start in range(0, cfg.tile, 64):
        partly = high < start + 64
        if cfg.sliding_window is not None:
            partly |= low > start

        @pl.when(partly)
        def _(start=start):
            for tile_smem in tiles_smem:
                rows_smem = tile_smem.at[pl.ds(start, 64)]
                rows = layout(rows_smem[...])
                row = plgpu.broadcasted_iota(jnp.int32, rows.shape, 0, layout=plgpu.Layout.WGMMA) + start
                seen = row < high
                if cfg.sliding_window is not None:
                    seen &= row >= low
                rows_smem[...] = jnp.where(seen, rows, jnp.zeros_like(rows))
            plgpu.commit_smem()


def _cache_scale(scale_gmem, kind: str, segment):
    return 1.0 if kind == "none" else scale_gmem[segment.head if kind == "head" else 0]


def _dot(a_smem, b_smem):
    def body(acc):
        plgpu.wgmma(acc, a_smem, b_smem)
        return acc[...]

    accumulator = plgpu.ACC((a_smem.shape[0], b_smem.shape[1]), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return layout(pl.run_scoped(body, accumulator))
