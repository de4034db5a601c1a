"""The ragged kernel: attention of any number of queries a sequence over its blocks, in one launch.

Grid. One program a multiprocessor, a thread block of three warpgroups, which takes work items (`ragged_plan.py`) until
none is left. Items of many query rows take the matrix units, items of few rows the memory: some programs begin with
the ones, some with the others.

Who loads: warpgroup 2 claims an item, tells of it in the queue, and copies its query and its tiles of K and V, a block
of the table at a time (TMA), into rings of `stages` tiles (`ragged_load.py`). It is ahead of those who compute: an
item's first tiles are on their way while the one before it is finished.
Who computes: warpgroups 0 and 1, each with 64 query rows as M of wgmma, and tokens as N:

    S [64, tile] = Q [64, d] x K^T [d, tile]        A, B in shared memory
    O [64, d]   += P [64, tile] x V [tile, d]       A in registers

Of a wide item each has its own 64 rows and reads every tile. They take turns: while one has the matrix units, the other
does its softmax. Of a thin item both have the same rows, and each reads the tiles of its own stages of the rings, every
other one; then warpgroup 1 hands its sums to warpgroup 0.

Shared memory, head_size 128, bfloat16, tiles of 128 tokens, 2 stages:

    | K ring 64 KiB | V ring 64 KiB | Q 32 KiB | out 32 KiB |

What warpgroup 1 hands over is where the results of both would be: each sum as two numbers of 16 bits.

Roofline: 4 * num_heads * head_size operations for each pair of a query and a token that it sees, or where queries are
few, 4 * head_size bytes (two of 16 bits) for each token and kv head.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.device import ragged_load as load
from paged_jax.kernels.mosaic_gpu.device import ragged_plan as plan
from paged_jax.kernels.mosaic_gpu.device import ragged_rows as rows
from paged_jax.kernels.mosaic_gpu.device.softmax import scaled_logits
from paged_jax.kernels.mosaic_gpu.ragged_tuning import ROWS, Config, scratch
from paged_jax.kernels.problem import ScaleKind

LOG2E = math.log2(math.e)
LOWEST = -1e30  # of a maximum: finite, so that the exponential of -inf minus it is 0
_LEAST_FACTOR = 1e-20  # of products that are scaled as they are exponentiated, and not before

_OPTIONS = ("scale", "slopes", "sinks", "k_scale", "v_scale")
_INPUTS = (
    *("query", "key_cache", "value_cache", "block_tables", "seq_lens", "query_start_loc", "counts"),
    *plan.Work._fields,
    *_OPTIONS,
)
# Registers of a thread: 65536 of a multiprocessor, for 3 warpgroups of 128.
_COMPUTING_REGISTERS, _LOADING_REGISTERS = 232, 40


def outputs(cfg: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel writes: out and lse, and of split items the parts, normalised, and their logs of sums."""
    problem, f32 = cfg.problem, jnp.float32
    shapes = {
        "out": jax.ShapeDtypeStruct((problem.num_tokens, problem.num_heads, problem.head_size), problem.query_dtype),
        "lse": jax.ShapeDtypeStruct((problem.num_tokens, problem.num_heads), f32),
    }
    for name, places, halves in zip(("wide", "thin"), cfg.places, (2, 1), strict=True):
        places = max(places, 1)
        shapes[f"{name}_parts"] = jax.ShapeDtypeStruct((places, halves, ROWS, problem.head_size), f32)
        shapes[f"{name}_sums"] = jax.ShapeDtypeStruct((places, halves, ROWS), f32)
    return shapes


def attend(cfg: Config, *arrays: Any) -> dict[str, Array]:
    """Runs the kernel on `_INPUTS`; what is absent is any array of one element."""
    shapes = outputs(cfg)
    kernel = plgpu.kernel(
        functools.partial(_kernel, cfg=cfg),
        out_type=tuple(shapes.values()),
        scratch_types=scratch(cfg),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        num_threads=3,
        thread_name="warpgroup",
        grid=(cfg.tuning.num_programs,),
        grid_names=("program",),
    )
    return dict(zip(shapes, kernel(*arrays), strict=True))


def _kernel(*gmem, cfg: Config, **smem):
    names = [f"{name}_gmem" for name in (*_INPUTS, *outputs(cfg))]
    refs = SimpleNamespace(**dict(zip(names, gmem, strict=True)), **smem)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < 2)
    def compute():
        plgpu.set_max_registers(_COMPUTING_REGISTERS, action="increase")
        _attend_to_items(warpgroup, refs, cfg)

    @pl.when(warpgroup == 2)
    def load_items():
        plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")
        load.load_items(refs, cfg)


def _attend_to_items(warpgroup, refs, cfg: Config) -> None:
    """Attends to all items of the queue."""

    def turn(state):
        items, tiles, handed, item = state
        wide = item.kind == 1
        # Wide items and thin ones count the tiles of their rings each from 0.
        attend_to = functools.partial(_attend_to, item, warpgroup=warpgroup, refs=refs, cfg=cfg)
        pl.when(wide)(lambda: attend_to(tiles[0], handed, wide=True))
        pl.when(~wide)(lambda: attend_to(tiles[1], handed, wide=False))
        handed = ~wide & (warpgroup == 1)
        tiles = tiles[0] + jnp.where(wide, item.count, 0), tiles[1] + jnp.where(wide, 0, item.count)
        return items + 1, tiles, handed, load.read_item(items + 1, refs)

    zero = jnp.int32(0)
    first = load.read_item(zero, refs)
    state = zero, (zero, zero), jnp.bool_(False), first
    *_, handed, _ = lax.while_loop(lambda state: state[3].kind > 0, turn, state)
    pl.when(handed)(lambda: plgpu.barrier_wait(refs.taken_over))


def _take_turns(refs) -> None:
    plgpu.barrier_arrive(refs.turn)
    plgpu.barrier_wait(refs.turn)


def _attend_to(item: plan.Item, before, handed, *, wide: bool, warpgroup, refs, cfg: Config) -> None:
    """Attends to an item, whose tiles are in its rings after those `before`, and writes its result or its part.

    `handed` is whether what warpgroup 1 handed over, of the item before, may still be where its results go.
    """
    half = warpgroup if wide else jnp.int32(0)  # of the item's rows
    plgpu.barrier_wait(refs.q_ready)
    of_rows = _rows_of(item, half, refs, cfg)
    state = (
        _layout(jnp.zeros((ROWS, cfg.problem.head_size), jnp.float32)),
        _layout(jnp.full((ROWS,), LOWEST, jnp.float32), 1),
        _layout(jnp.zeros((ROWS,), jnp.float32), 1),
    )
    if wide:
        first, step, steps = 0, 1, item.count
    else:  # the tiles of its own stages
        first, step = lax.rem(before + warpgroup, jnp.int32(2)), 2
        steps = lax.div(item.count - first + 1, jnp.int32(2))
    ready = refs.k_ready if wide else refs.thin_k_ready

    def wait_for_keys(i):
        stage = lax.rem(before + first + i * step, jnp.int32(cfg.tuning.stages))
        pl.when(i < steps)(lambda: plgpu.barrier_wait(ready.at[stage]))

    def attend_tile(i, state):
        wait = functools.partial(wait_for_keys, i + 1)
        return _attend_tile(item, first + i * step, before, half, of_rows, state, wait, refs, cfg, wide=wide)

    wait_for_keys(jnp.int32(0))
    if wide:
        pl.when(warpgroup == 1)(lambda: _take_turns(refs))  # the other one is first
    state = lax.fori_loop(0, steps, attend_tile, state)
    plgpu.barrier_arrive(refs.q_consumed)
    acc, top, total = state
    state = acc, _layout(top * of_rows.natural, 1), total  # from here on logits are those of base e
    if wide:
        pl.when(warpgroup == 0)(lambda: _take_turns(refs))
        pl.when(handed)(lambda: plgpu.barrier_wait(refs.taken_over))
        _store(item, half, of_rows, state, refs, cfg, wide=True)
        return

    @pl.when(warpgroup == 1)
    def hand_over():
        pl.when(handed)(lambda: plgpu.barrier_wait(refs.taken_over))
        _hand_over(state, refs, cfg)

    @pl.when(warpgroup == 0)
    def finish():
        _store(item, half, of_rows, _take_over(state, refs), refs, cfg, wide=False)
        plgpu.barrier_arrive(refs.taken_over)


def _rows_of(item: plan.Item, half, refs, cfg: Config) -> SimpleNamespace:
    """What depends on the rows of a warpgroup: [64] arrays, and scalars for all rows."""
    problem = cfg.problem
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, cfg.tuning.tile), 0, layout=plgpu.Layout.WGMMA).max(axis=1)
    token, head = lax.div(row, jnp.int32(problem.group)), lax.rem(row, jnp.int32(problem.group))
    tokens = lax.clamp(jnp.int32(0), item.tokens - half * cfg.half, jnp.int32(cfg.half))
    first = item.position + half * cfg.half

    def of_heads(values_gmem):
        values = _layout(jnp.zeros((ROWS,), jnp.float32), 1)
        for i in range(problem.group):
            values = jnp.where(head == i, values_gmem[item.head * problem.group + i], values)
        return values

    factor = refs.scale_gmem[0] * _cache_scale(refs.k_scale_gmem, problem.k_scale, item)
    # Logits are scaled as they are exponentiated, unless the factor is not positive: maxima would be minima.
    late = not problem.per_head.alibi_slopes and problem.logits_soft_cap is None
    usual = factor * LOG2E > _LEAST_FACTOR
    return SimpleNamespace(
        unit=jnp.where(usual, factor * LOG2E, 1.0) if late else 1.0,
        natural=jnp.where(usual, factor, 1 / LOG2E) if late else 1 / LOG2E,
        first_token=item.first_token + half * cfg.half,
        tokens=tokens,
        position=token + first,
        first=first,
        last=first + lax.max(tokens - 1, jnp.int32(0)),
        factor=factor,
        v_scale=_cache_scale(refs.v_scale_gmem, problem.v_scale, item),
        slopes=of_heads(refs.slopes_gmem) * LOG2E if problem.per_head.alibi_slopes else None,
        sinks=of_heads(refs.sinks_gmem) if problem.per_head.sinks else None,
    )


def _cache_scale(scale_gmem, kind: ScaleKind, item: plan.Item):
    return jnp.float32(1) if kind == ScaleKind.NONE else scale_gmem[item.head if kind == ScaleKind.HEAD else 0]


def _attend_tile(item, tile, before, half, of_rows, state, wait_for_keys, refs, cfg: Config, *, wide: bool):
    """Attends to a tile, whose keys are there: O, maxima of logits and sums. Then the next keys are there, too.

    What is needed for the next product comes before the end of this one, as the matrix units wait from then on.
    """
    acc, top, total = state
    stage = lax.rem(before + tile, jnp.int32(cfg.tuning.stages))
    rings = (refs.k_consumed, refs.v_ready, refs.v_consumed)
    if not wide:
        rings = (refs.thin_k_consumed, refs.thin_v_ready, refs.thin_v_consumed)
    k_consumed, v_ready, v_consumed = (barrier.at[stage] for barrier in rings)
    products = scores(
        refs.q_smem.at[half], refs.k_smem.at[stage], functools.partial(_take_turns, refs) if wide else None, cfg
    )
    plgpu.barrier_arrive(k_consumed)
    logits = _logits(products, item, tile, of_rows, cfg)
    new_top = lax.max(top, logits.max(axis=1))
    keep = jnp.exp2((top - new_top) * of_rows.unit)
    # Of differences: a product with large logits would round, and the largest weight would not be 1.
    p = jnp.exp2((logits - _wide(new_top, cfg.tuning.tile)) * of_rows.unit)
    acc *= _wide(keep, cfg.problem.head_size)
    total *= keep
    weights = p.astype(cfg.problem.query_dtype)
    total += p.sum(axis=1)
    if wide:
        acc, total, new_top, weights = lax.optimization_barrier((acc, total, new_top, weights))
        plgpu.barrier_arrive(refs.turn)
    plgpu.barrier_wait(v_ready)
    if wide:
        plgpu.barrier_wait(refs.turn)
    acc = accumulate(acc, weights, refs.v_smem.at[stage], wait_for_keys if wide else None)
    plgpu.barrier_arrive(v_consumed)
    if not wide:
        wait_for_keys()
    return acc, new_top, total


def _logits(products, item: plan.Item, tile, of_rows, cfg: Config):
    """The logits of a tile, which `of_rows.unit` makes those of base 2; -inf where a row does not see."""
    problem = cfg.problem
    start = item.origin + tile * cfg.tuning.tile
    distance_matters = problem.per_head.alibi_slopes or problem.logits_soft_cap is not None
    if distance_matters:
        logits = scaled_logits(products, of_rows.factor, problem) * LOG2E
        if problem.per_head.alibi_slopes:
            token = plgpu.broadcasted_iota(jnp.int32, products.shape, 1, layout=plgpu.Layout.WGMMA)
            distance = (token + start) - _wide(of_rows.position, cfg.tuning.tile)
            logits += _wide(of_rows.slopes, cfg.tuning.tile) * distance.astype(jnp.float32)
    else:
        factor = of_rows.factor * LOG2E
        logits = lax.cond(factor > _LEAST_FACTOR, lambda x: x, lambda x: _layout(x * factor), products)
    end = start + cfg.tuning.tile
    partly = end > item.high
    if problem.causal:
        partly |= end > of_rows.first + 1
    if problem.sliding_window is not None:
        partly |= start <= of_rows.last - problem.sliding_window
    return lax.cond(partly, lambda x: _masked(x, item, start, of_rows, cfg), lambda x: x, logits)


def _masked(logits, item: plan.Item, start, of_rows, cfg: Config):
    """-inf where a row does not see a token."""
    problem = cfg.problem
    token = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
    if problem.causal:
        last = lax.min(of_rows.position, item.high - 1) - start
        seen = token <= _wide(last, cfg.tuning.tile)
    else:
        seen = token < item.high - start
    if problem.sliding_window is not None:
        seen &= token > _wide(of_rows.position - (start + problem.sliding_window), cfg.tuning.tile)
    return _layout(jnp.where(seen, logits, -jnp.inf))


def scores(q_smem, k_smem, then, cfg: Config):
    """S = Q K^T; `then` runs when the product is on its way."""

    def body(acc):
        plgpu.wgmma(acc, q_smem, k_smem.T)
        if then is not None:
            then()
        return acc[...]

    shape = ROWS, cfg.tuning.tile
    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def accumulate(acc, weights, v_smem, then):
    """O + P V; `then` runs when the product is on its way."""

    def body(acc_ref):
        plgpu.wgmma(acc_ref, weights, v_smem)
        if then is not None:
            then()

    return pl.run_state(body)(plgpu.ACC.init(acc))  # pyright: ignore[reportPrivateImportUsage]


def _hand_over(state, refs, cfg: Config) -> None:
    """Gives warpgroup 1's sums of a thin item to warpgroup 0, normalised; what 16 bits leave out in 16 more."""
    acc, top, total = state
    dtype = cfg.problem.query_dtype
    acc = acc * _wide(1.0 / jnp.where(total != 0, total, 1.0), acc.shape[1])
    rounded = _layout(acc.astype(dtype))
    refs.out_smem.at[1][...] = rounded
    refs.out_smem.at[0][...] = _layout((acc - rounded.astype(jnp.float32)).astype(dtype))
    refs.top_smem[...] = top
    refs.total_smem[...] = total
    plgpu.barrier_arrive(refs.handed_over)


def _take_over(state, refs):
    """Warpgroup 0's sums of a thin item with those of warpgroup 1."""
    plgpu.barrier_wait(refs.handed_over)
    acc, top, total = state
    columns = plgpu.Layout.WGMMA.reduce(1)
    rounded, rest = (_load(refs.out_smem.at[i], plgpu.Layout.WGMMA).astype(jnp.float32) for i in (1, 0))
    other_top, other_total = _load(refs.top_smem, columns), _load(refs.total_smem, columns)
    new_top = lax.max(top, other_top)
    keep, weight = _exp(top - new_top), other_total * _exp(other_top - new_top)
    acc = acc * _wide(keep, acc.shape[1]) + (rounded + rest) * _wide(weight, acc.shape[1])
    return _layout(acc), _layout(new_top, 1), _layout(total * keep + weight, 1)


def _load(ref, layout):
    return plgpu.load(ref, layout=layout)


def _store(item: plan.Item, half, of_rows, state, refs, cfg: Config, *, wide: bool) -> None:
    """Writes out and lse of a whole item, or the part of a split one. Rows that saw no token: out 0, lse -inf."""
    acc, top, total = state
    seen = total != 0  # NaN counts: what is not a number must show
    d = cfg.problem.head_size

    def store_whole():
        norm, base = total, top
        scaled = acc
        if cfg.problem.per_head.sinks:
            base = lax.max(top, of_rows.sinks)
            keep = _exp(top - base)
            norm = total * keep + _exp(of_rows.sinks - base)
            scaled = acc * _wide(keep, d)
        norm = jnp.where(seen, norm, 1.0)
        out_smem, lse_smem = refs.out_smem.at[half], refs.lse_smem.at[half]
        out_smem[...] = _layout((scaled * _wide(of_rows.v_scale / norm, d)).astype(cfg.problem.query_dtype))
        lse_smem[...] = _layout(jnp.where(seen, base + jnp.log2(norm) / LOG2E, -jnp.inf), 1)
        rows.store_rows(
            out_smem, lse_smem, refs.out_gmem, refs.lse_gmem, of_rows.first_token, of_rows.tokens, item.head, cfg
        )

    def store_part():
        norm = jnp.where(seen, total, 1.0)
        sums = _layout(jnp.where(seen, top * LOG2E + jnp.log2(norm), -jnp.inf), 1)
        part = _layout(acc * _wide(of_rows.v_scale / norm, d))
        parts_gmem, sums_gmem = (
            (refs.wide_parts_gmem, refs.wide_sums_gmem)
            if wide
            else (
                refs.thin_parts_gmem,
                refs.thin_sums_gmem,
            )
        )
        rows.store_part(parts_gmem.at[item.place, half], part, of_rows.tokens, cfg)
        sums_gmem.at[item.place, half][...] = sums

    if not cfg.places[0 if wide else 1]:
        store_whole()
    else:
        pl.when(item.place < 0)(store_whole)
        pl.when(item.place >= 0)(store_part)


def _exp(x):
    return jnp.exp2(x * LOG2E)


def _layout(x, axis: int | None = None):
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA if axis is None else plgpu.Layout.WGMMA.reduce(axis))


def _wide(x, columns: int):
    """[64] -> [64, columns]."""
    return lax.broadcast_in_dim(x, (ROWS, columns), (0,))
