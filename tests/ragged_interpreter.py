"""Runs the ragged Mosaic GPU kernels without a GPU, in Pallas's interpreter, with substitutes for what it lacks."""

from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, params

from paged_jax.kernels.mosaic_gpu import ragged, ragged_tuning
from paged_jax.kernels.mosaic_gpu.device import (
    ragged_attend,
    ragged_lanes,
    ragged_merge,
    ragged_rows,
    ragged_scan,
    ragged_tiles,
)
from paged_jax.kernels.mosaic_gpu.ragged_tuning import ROWS, THREADS
from paged_jax.kernels.problem import Device

SMALL_GPU = Device(90, 2)


def row_of_query(row, first_token, tokens, head, cfg):
    """For each row of a warpgroup: whether it has a token, and its token and query head."""
    token, of_group = row // cfg.problem.group, row % cfg.problem.group
    own = (token < tokens) & (row < cfg.half * cfg.problem.group)
    return own, first_token + token, head * cfg.problem.group + of_group


def load_queries(query_gmem, q_smem, first_token, tokens, head, cfg):
    own, token, query_head = row_of_query(jnp.arange(ROWS), first_token, tokens, head, cfg)
    rows = query_gmem[...][jnp.where(own, token, 0), query_head]
    q_smem[...] = jnp.where(own[:, None], rows, jnp.zeros_like(rows))
    plgpu.commit_smem()


def load_new(new_gmem, tile_smem, first_row, low, high, kv_head, line, cfg):
    row = jnp.arange(line.tile)
    seen = (row >= low) & (row < high)
    values = new_gmem[...][jnp.where(seen, first_row + row, 0), kv_head]
    tile_smem[...] = jnp.where(seen[:, None], values, jnp.zeros_like(values))


def finish_copies():
    plgpu.commit_smem()


def gather(values_gmem, first, last):
    return values_gmem[...][jnp.minimum(jnp.arange(THREADS) + first, last)]


def sums(x):
    return x.sum(axis=1)


def sum_of_lanes(x):
    return x


def raised(maxima, x, factor, lag):
    higher = jnp.maximum(maxima, x.max(axis=1))
    return jnp.where((higher - maxima) * factor > lag, higher, maxima)


def exponentials(x, factor, bases):
    return jnp.exp2(x * factor - bases[:, None])


def rescaled(x, factors):
    return x * factors[:, None]


def settle(sums, unused_smem):
    pass


def sums_before(arrays, sums_smem, first):
    for row, x in arrays.items():
        before = sums_smem[row, first] if first else jnp.zeros((), x.dtype)
        sums_smem[row, pl.ds(first, THREADS)] = before + jnp.cumsum(x, dtype=x.dtype) - x
        sums_smem[row, first + THREADS] = before + x.sum(dtype=x.dtype)


def store_rows(out_smem, lse_smem, out_gmem, lse_gmem, first_token, tokens, head, cfg):
    out, lse, group = out_smem[...], lse_smem[...], cfg.problem.group

    @pl.loop(0, tokens)
    def _(token):
        heads = pl.ds(head * group, group)
        out_gmem[first_token + token, heads] = lax.dynamic_slice_in_dim(out, token * group, group)
        lse_gmem[first_token + token, heads] = lax.dynamic_slice_in_dim(lse, token * group, group)


def store_part(part_gmem, acc, tokens, cfg):
    old = part_gmem[...]
    rows = jnp.arange(ROWS)[:, None] < tokens * cfg.problem.group
    part_gmem[...] = jnp.where(rows, acc, old)


def zero_tokens(v_smem, low, high, line, cfg):
    rows = v_smem[...]
    token = jnp.arange(line.tile)[:, None]
    v_smem[...] = jnp.where((token >= low) & (token < high), rows, jnp.zeros_like(rows))
    plgpu.commit_smem()


def convert_tile(raw_smem, tile_smem, low, high, line, cfg):
    token = jnp.arange(line.tile)[:, None]
    rows = raw_smem[...].astype(tile_smem.dtype)
    tile_smem[...] = jnp.where((token >= low) & (token < high), rows, jnp.zeros_like(rows))
    plgpu.commit_smem()


def load_scales(scale_gmem, tables_gmem, scales_smem, seq, kv_head, start, low, high, line, cfg):
    row = jnp.arange(line.tile)
    seen = (row >= low) & (row < high)
    token = jnp.where(seen, start + row, 0)
    block = jnp.where(seen, tables_gmem[...][seq, token // cfg.problem.block_size], 0)
    scale = scale_gmem[...][block, kv_head, token % cfg.problem.block_size]
    scales_smem[...] = jnp.where(seen, scale, 0)


def store_words(words_smem, row, values):
    for i, value in enumerate(values):
        words_smem[row, i] = value


def score_and_accumulate(out, weights, q_smem, k_smem, v_smem, then, meanwhile, line):
    products = ragged_attend.scores(q_smem, k_smem, then, line)
    results = meanwhile(products)
    return results, accumulate(out, weights, v_smem, None)


def accumulate(acc, weights, v_smem, then):
    if then is not None:
        then()
    values = v_smem[...]
    plgpu.commit_smem()  # without this fence the interpreter sees a race of reads and later copies
    return acc + jnp.dot(weights.astype(jnp.float32), values.astype(jnp.float32))


def merge_rows(
    parts_gmem, sums_gmem, sinks_gmem, out_gmem, lse_gmem,
    turn, num_rows, first_token, tiles, splits, places, line, cfg,
):  # fmt: skip
    heads, group = cfg.problem.num_heads, cfg.problem.group
    for i in range(cfg.merged_rows):
        row = turn * cfg.merged_rows + i

        @pl.when(row < num_rows)
        def _(row=row):
            token, head = row // heads, row % heads
            tile, of_tile = token // line.tokens, token % line.tokens
            place = places + ((head // group) * tiles + tiles - 1 - tile) * splits
            index = of_tile // cfg.half, of_tile % cfg.half * group + head % group

            def add(number, state):
                top, total, acc = state
                log_sum = sums_gmem[place + number, *index]
                new_top = jnp.maximum(top, log_sum)
                keep, weight = jnp.exp2(top - new_top), jnp.exp2(log_sum - new_top)
                return new_top, total * keep + weight, acc * keep + parts_gmem[place + number, *index] * weight

            zeros = jnp.zeros(cfg.problem.head_size, jnp.float32)
            top, total, acc = lax.fori_loop(0, splits, add, (jnp.float32(-1e30), jnp.float32(0), zeros))
            norm, base = total, top
            if cfg.problem.per_head.sinks:
                sink = sinks_gmem[head] * np.float32(np.log2(np.e))
                base = jnp.maximum(top, sink)
                norm = total * jnp.exp2(top - base) + jnp.exp2(sink - base)
                acc = acc * jnp.exp2(top - base)
            norm = jnp.where(total != 0, norm, 1.0)
            out_gmem[first_token + token, head] = (acc / norm).astype(out_gmem.dtype)
            log_sum = (base + jnp.log2(norm)) / np.float32(np.log2(np.e))
            lse_gmem[first_token + token, head] = jnp.where(total != 0, log_sum, -jnp.inf)


def call(op, operands, device=SMALL_GPU, **tuning):
    """Runs the implementation's function in the interpreter, with some fields of its tuning changed."""

    def tune(*args, tune=ragged_tuning.tune, **kwargs):
        cfg = tune(*args, **kwargs)
        return replace(cfg, tuning=replace(cfg.tuning, claim="stride", merge_programs=2, **tuning))

    patches = (
        mock.patch.object(ragged, "device", return_value=device),
        mock.patch.object(ragged_tuning, "tune", tune),
        mock.patch.multiple(
            ragged_rows,
            load_queries=load_queries,
            store_rows=store_rows,
            store_part=store_part,
            store_words=store_words,
            finish_copies=finish_copies,
        ),
        mock.patch.multiple(
            ragged_lanes,
            sums=sums,
            sum_of_lanes=sum_of_lanes,
            raised=raised,
            exponentials=exponentials,
            rescaled=rescaled,
            settle=settle,
        ),
        mock.patch.multiple(
            ragged_tiles, load_new=load_new, zero_tokens=zero_tokens, convert_tile=convert_tile, load_scales=load_scales
        ),
        mock.patch.multiple(ragged_scan, gather=gather, sums_before=sums_before),
        mock.patch.multiple(ragged_attend, accumulate=accumulate, score_and_accumulate=score_and_accumulate),
        mock.patch.object(ragged_merge, "merge_rows", merge_rows),
        params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=True)),
    )
    try:
        for patch in patches:
            patch.__enter__()
        return jax.tree.map(np.asarray, jax.jit(partial(getattr(ragged, op)))(*operands))
    except Exception:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        raise
    finally:
        for patch in reversed(patches):
            patch.__exit__(None, None, None)
