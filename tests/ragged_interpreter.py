"""Runs the ragged Mosaic GPU kernels without a GPU, in Pallas's interpreter, and replaces what it cannot run."""

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

from paged_jax.kernels import mosaic_gpu
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.ragged import call as ragged
from paged_jax.kernels.mosaic_gpu.ragged import choose, items, merge, products
from paged_jax.kernels.mosaic_gpu.ragged.ptx import lanes, scan, tiles
from paged_jax.kernels.mosaic_gpu.ragged.ptx import rows as ragged_rows
from paged_jax.kernels.problem import Device

SMALL_GPU = Device(90, 2)


def row_of_query(row, rows, geometry):
    """For each row of a warpgroup: whether it has a token, and its token and query head."""
    group = geometry.problem.group
    token, of_group = row // group, row % group
    exists = (token < rows.num_tokens) & (row < geometry.half_tokens * group)
    return exists, rows.first_token + token, rows.kv_head * group + of_group


def load_queries(query_gmem, query_smem, rows, kind):
    exists, token, query_head = row_of_query(jnp.arange(WGMMA_ROWS), rows, kind.geometry)
    values = query_gmem[...][jnp.where(exists, token, 0), query_head]
    values = jnp.where(exists[:, None], values, jnp.zeros_like(values))
    query_smem[...] = lax.bitcast_convert_type(values, query_smem.dtype)
    plgpu.commit_smem()


def load_new(new_gmem, tile_smem, item, first_rows, kept, kind):
    row = jnp.arange(kind.tile)
    is_kept = (row >= kept.begin) & (row < kept.end)
    new_row = jnp.repeat(jnp.stack(first_rows), kind.stretch_tokens) + row
    values = new_gmem[...][jnp.where(is_kept, new_row, 0), item.kv_head]
    tile_smem[...] = jnp.where(is_kept[:, None], values, jnp.zeros_like(values))


def finish_copies():
    plgpu.commit_smem()


def gather(values_gmem, indices, last):
    return values_gmem[...][jnp.minimum(indices, last)]


def row_numbers():
    return jnp.arange(WGMMA_ROWS)


def in_each_lane(x):
    return jnp.full(WGMMA_ROWS, x)


def sums(x):
    return x.sum(axis=1)


def sum_of_lanes(x):
    return x


def raised(maxima, x, factor, lag):
    higher = jnp.maximum(maxima, x.max(axis=1))
    return jnp.where((higher - maxima) * factor > lag, higher, maxima)


def exponentials(x, factor, bases):
    factor = factor[:, None] if jnp.ndim(factor) else factor
    return jnp.exp2(x * factor - bases[:, None])


def rescaled(x, factors):
    return x * factors[:, None]


def side_by_side(values, columns):
    columns_of_each = [jnp.broadcast_to(x[..., None], (WGMMA_ROWS, columns // len(values))) for x in values]
    return jnp.concatenate(columns_of_each, axis=1)


def settle(sums, unused_smem):
    pass


def sums_before(arrays, sums_smem, first):
    for row, x in arrays.items():
        before = sums_smem[row, first] if first else jnp.zeros((), x.dtype)
        sums_smem[row, pl.ds(first, WARPGROUP)] = before + jnp.cumsum(x, dtype=x.dtype) - x
        sums_smem[row, first + WARPGROUP] = before + x.sum(dtype=x.dtype)


def largest_first(values, unused_smem, order_smem):
    order_smem[...] = jnp.argsort(-values, stable=True)


def store_rows(smem, gmem, rows, kind):
    out, lse, group = smem.out[...], smem.lse[...], kind.geometry.problem.group
    out = lax.bitcast_convert_type(out, gmem.out.dtype)

    @pl.loop(0, rows.num_tokens)
    def _(token):
        heads = pl.ds(rows.kv_head * group, group)
        gmem.out[rows.first_token + token, heads] = lax.dynamic_slice_in_dim(out, token * group, group)
        gmem.lse[rows.first_token + token, heads] = lax.dynamic_slice_in_dim(lse, token * group, group)


def store_partial(partial_gmem, out, num_tokens, geometry):
    old = partial_gmem[...]
    exists = jnp.arange(WGMMA_ROWS)[:, None] < num_tokens * geometry.problem.group
    partial_gmem[...] = jnp.where(exists, out, old)


def zero_rows(tile_smem, kept, first_row, kind):
    own = pl.ds(first_row, kind.rows_of_warp)
    row = first_row + jnp.arange(kind.rows_of_warp)[:, None]
    rows = tile_smem[own]
    tile_smem[own] = jnp.where((row >= kept.begin) & (row < kept.end), rows, jnp.zeros_like(rows))
    plgpu.commit_smem()


def convert_rows(raw_smem, tile_smem, first_row, kind):
    own = pl.ds(first_row, kind.rows_of_warp)
    tile_smem[own] = raw_smem[own].astype(tile_smem.dtype)
    plgpu.commit_smem()


def load_scales(scale_gmem, tables_gmem, scales_smem, item, starts, kept, kind):
    block_size = kind.geometry.problem.block_size
    row = jnp.arange(kind.tile)
    is_kept = (row >= kept.begin) & (row < kept.end)
    token = jnp.where(is_kept, jnp.repeat(jnp.stack(starts), kind.stretch_tokens) + row, 0)
    block = jnp.where(is_kept, tables_gmem[...][item.seq, token // block_size], 0)
    scale = scale_gmem[...][block, item.kv_head, token % block_size]
    scales_smem[...] = jnp.where(is_kept, scale, 0)


def store_fields(fields_smem, row, values):
    for i, value in enumerate(values):
        fields_smem[row, i] = value


def score_and_accumulate(query_smem, keys_smem, out, weights, values_smem, then, meanwhile, *, in_halves):
    scores = products.scores(query_smem, keys_smem, None if in_halves else then)
    results = meanwhile(scores, then if in_halves else lambda: None)
    return results, accumulate(out, weights, values_smem)


def accumulate(out, weights, values_smem, then=None):
    if then is not None:
        then()
    values = values_smem[...]
    plgpu.commit_smem()  # without this fence the interpreter sees a race between this read and later copies
    return out + jnp.dot(weights.astype(jnp.float32), values.astype(jnp.float32))


def merge_rows(refs, group, kind):
    for i in range(kind.geometry.merged_rows):
        row = group.number * kind.geometry.merged_rows + i
        pl.when(row < group.num_rows)(partial(merge_row, refs, group, row, kind))


def merge_row(refs, group, row, kind):
    """Merges one row, which a GPU does with several threads."""
    geometry, problem, partials = kind.geometry, kind.geometry.problem, refs.partials
    token, head = row // problem.num_heads, row % problem.num_heads
    tile, of_tile = token // kind.tokens, token % kind.tokens
    item = (head // problem.group) * group.query_tiles + group.query_tiles - 1 - tile
    first = group.first_partial + item * group.splits
    index = of_tile // geometry.half_tokens, of_tile % geometry.half_tokens * problem.group + head % problem.group

    def add(number, state):
        top, total, out = state
        log_sum = partials.log_sums[first + number, *index]
        new_top = jnp.maximum(top, log_sum)
        rescale, weight = jnp.exp2(top - new_top), jnp.exp2(log_sum - new_top)
        return new_top, total * rescale + weight, out * rescale + partials.out[first + number, *index] * weight

    zeros = jnp.zeros(problem.head_size, jnp.float32)
    top, total, out = lax.fori_loop(0, group.splits, add, (jnp.float32(-1e30), jnp.float32(0), zeros))
    norm, base = total, top
    if problem.per_head.sinks:
        sink = refs.sinks[head] * np.float32(np.log2(np.e))
        base = jnp.maximum(top, sink)
        norm = total * jnp.exp2(top - base) + jnp.exp2(sink - base)
        out = out * jnp.exp2(top - base)
    norm = jnp.where(total != 0, norm, 1.0)
    refs.out[group.first_token + token, head] = (out / norm).astype(refs.out.dtype)
    log_sum = (base + jnp.log2(norm)) / np.float32(np.log2(np.e))
    refs.lse[group.first_token + token, head] = jnp.where(total != 0, log_sum, -jnp.inf)


def call(op, operands, device=SMALL_GPU, **tuning):
    """Runs the implementation's function in the interpreter, with some fields of its tuning changed."""

    def tune(*args, tune=choose.tune, **kwargs):
        return replace(tune(*args, **kwargs), claims_items=False, merge_programs=2, **tuning)

    patches = (
        mock.patch.object(ragged, "device", return_value=device),
        mock.patch.object(choose, "tune", tune),
        mock.patch.multiple(
            ragged_rows,
            load_queries=load_queries,
            store_rows=store_rows,
            store_partial=store_partial,
            finish_copies=finish_copies,
        ),
        mock.patch.object(items, "store_fields", store_fields),
        mock.patch.multiple(
            lanes,
            row_numbers=row_numbers,
            in_each_lane=in_each_lane,
            sums=sums,
            sum_of_lanes=sum_of_lanes,
            raised=raised,
            exponentials=exponentials,
            rescaled=rescaled,
            side_by_side=side_by_side,
            settle=settle,
        ),
        mock.patch.multiple(
            tiles,
            load_new=load_new,
            zero_rows=zero_rows,
            convert_rows=convert_rows,
            load_scales=load_scales,
        ),
        mock.patch.multiple(scan, gather=gather, sums_before=sums_before, largest_first=largest_first),
        mock.patch.multiple(products, accumulate=accumulate, score_and_accumulate=score_and_accumulate),
        mock.patch.object(merge, "merge_rows", merge_rows),
        params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=True)),
    )
    try:
        for patch in patches:
            patch.__enter__()
        function = getattr(ragged, op, None) or getattr(mosaic_gpu, op)  # the package may give an op to another kernel
        return jax.tree.map(np.asarray, jax.jit(partial(function))(*operands))
    except Exception:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        raise
    finally:
        for patch in reversed(patches):
            patch.__exit__(None, None, None)
