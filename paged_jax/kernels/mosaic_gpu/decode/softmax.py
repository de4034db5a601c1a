"""Attention of one query tile to a split's tiles. Each tile has two products, with the online softmax between them.

Tokens are rows and query heads are columns, so maxima and sums go over rows:

    S^T [tile, columns]       = K [tile, head_size]   x Q^T [head_size, columns]
    O^T [head_size, columns] += V^T [head_size, tile] x P^T [tile, columns]          P goes through shared memory
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.decode import mask
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.plan import Item, Split, for_each_tile
from paged_jax.kernels.mosaic_gpu.decode.refs import Refs
from paged_jax.kernels.mosaic_gpu.decode.tiles import Tiles
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import QUERY_ROWS, WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.logits import cache_scale, scaled_logits
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOWEST, exp, layout, wide
from paged_jax.kernels.problem import Granularity

_MOST_IN_REGISTERS = 256
"""The largest head_size for which registers have room for the addresses of all parts of the query."""


class State(NamedTuple):
    """The softmax over the tokens so far."""

    out: list[Array]  # O^T before the division by the sums: [rows, columns] of each head slice
    maxima: Array  # [columns], the maxima of logits
    sums: Array  # sums of exponentials: [columns], or [tile, columns] if `Geometry.sums_once_a_split`


class Logits(NamedTuple):
    """Factors from products of queries and keys to logits."""

    factor: Any  # scalar or [columns]: scale times the cache's scale times the query's divisor
    slopes: Array | None  # [tile, columns], the slopes of ALiBi


def to_logits(item: Item, divisor, refs: Refs, geometry: Geometry) -> Logits:
    """The factors of an item whose query was divided by `divisor`."""
    problem, options = geometry.problem, refs.inputs_gmem.options
    factor = options.scale[0] * cache_scale(options.k_scale, problem.k_scale, item.kv_head) * divisor

    def of_columns(values_gmem):
        return of_heads(values_gmem, geometry.tuning.tile, item.kv_head, geometry)

    slopes = of_columns(options.per_head.alibi_slopes) if problem.per_head.alibi_slopes else None
    return Logits(factor, slopes)


def of_heads(values_gmem, rows: int, kv_head, geometry: Geometry):
    """Broadcasts values of an item's query heads to [rows, columns]; other columns are 0."""
    shape = rows, geometry.columns
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    zeros = values = layout(jnp.zeros(shape, jnp.float32))
    for i in range(geometry.heads_per_item):
        mine = column == geometry.column(i)
        values = jnp.where(mine, zeros + values_gmem[kv_head * geometry.heads_per_item + i], values)
    return values


def sinks_of(sinks_gmem: Ref, kv_head: Scalar, geometry: Geometry):
    """The sinks of an item's heads, [columns]."""
    return layout(of_heads(sinks_gmem, WGMMA_ROWS, kv_head, geometry).max(axis=0), 0)


def empty(geometry: Geometry) -> State:
    """The softmax over no tokens."""
    columns, tile = geometry.columns, geometry.tuning.tile
    lowest = jnp.full((columns,), LOWEST, jnp.float32)
    return State(
        [layout(jnp.zeros((part.size, columns), jnp.float32)) for part in geometry.head_slices],
        layout(lowest, 0),
        layout(jnp.zeros((tile, columns), jnp.float32))
        if geometry.sums_once_a_split
        else layout(jnp.zeros_like(lowest), 0),
    )


def attend(
    split: Split,
    end: Scalar,
    tiles_before: Scalar,
    first: State,
    query_smem,
    to_logits: Logits,
    refs: Refs,
    geometry: Geometry,
    tiles: Tiles,
) -> State:
    """Attends to a split's tokens before `end`; its tiles follow `tiles_before` earlier ones in the rings."""
    problem, tile, smem = geometry.problem, geometry.tuning.tile, refs.smem
    scaled_values = problem.v_scale is Granularity.SLOT

    def attend_tile(i, state: State) -> State:
        stage = lax.rem(tiles_before + i, jnp.int32(geometry.tuning.stages))
        start = split.origin + i * geometry.tile_tokens
        low, high = split.begin - start, end - start
        plgpu.barrier_wait(smem.keys.ready.at[stage])
        query_rows_smem = _at_hidden_address(query_smem, i, geometry)
        products = tiles.product(tiles.keys(smem.keys.tiles[0].at[stage]), query_rows_smem.T)
        if problem.k_scale is Granularity.SLOT:
            products *= _slot_scales(smem.keys.slot_scales.at[stage], geometry, tiles)
        if not geometry.pairs:
            plgpu.barrier_arrive(smem.keys.consumed.at[stage])
        logits = _logits(products, to_logits, start - split.seq_len + 1, low, high, geometry)
        maxima = lax.max(state.maxima, logits.max(axis=0))
        keep = exp(state.maxima - maxima)
        exponentials = weights = exp(logits - wide(maxima, tile))
        if scaled_values:
            plgpu.barrier_wait(smem.values.ready.at[stage])
            scales = _slot_scales(smem.values.slot_scales.at[stage], geometry, tiles)
            weights, peaks = _scaled_weights(exponentials, scales, low, high, geometry)
        tiles.store_weights(smem.weights, weights.astype(tiles.operand_dtype))
        plgpu.commit_smem()
        if geometry.sums_once_a_split:
            sums = state.sums * wide(keep, tile) + exponentials
        else:
            sums = state.sums * keep + exponentials.sum(axis=0)
        values = smem.keys if geometry.pairs else smem.values
        if not scaled_values and not geometry.pairs:
            plgpu.barrier_wait(values.ready.at[stage])
        tiles_smem = [ring_smem.at[stage] for ring_smem in values.tiles]
        tiles.zero_unseen(tiles_smem, low, high)
        outs = [tiles.product(tiles.values(tile_smem), smem.weights.T) for tile_smem in tiles_smem]
        if scaled_values:
            outs = [out * wide(peaks, out.shape[0]) for out in outs]
        outs = [so_far * wide(keep, out.shape[0]) + out for so_far, out in zip(state.out, outs, strict=True)]
        plgpu.barrier_arrive(values.consumed.at[stage])
        return State(outs, maxima, sums)

    return for_each_tile(attend_tile, split.num_tiles, first, geometry)


def summed(state: State, geometry: Geometry) -> State:
    """Reduces the state's sums over rows, if they are [tile, columns], to [columns]."""
    return state._replace(sums=state.sums.sum(axis=0)) if geometry.sums_once_a_split else state


def _at_hidden_address(query_smem: Any, i: Scalar, geometry: Geometry) -> Any:
    """Returns the query. If heads are wide, it adds an offset to its address: the compiler cannot know that this is 0.

    Otherwise the compiler would keep the addresses of all parts of the query in registers, throughout the loop over
    the tiles i.
    """
    if geometry.problem.head_size <= _MOST_IN_REGISTERS:
        return query_smem
    offset = lax.shift_right_logical(i, jnp.int32(30)) * QUERY_ROWS
    return query_smem.at[pl.ds(pl.multiple_of(offset, QUERY_ROWS), geometry.columns)]


def _logits(products, to_logits: Logits, distance, low, high, geometry: Geometry):
    """The logits of a tile, or -inf where a query does not attend. `distance` is from the query to the first key."""
    factor = wide(to_logits.factor, geometry.tuning.tile) if jnp.ndim(to_logits.factor) else to_logits.factor
    logits = scaled_logits(products, factor, geometry.problem)
    if to_logits.slopes is not None:
        token = mask.token_of_row(products.shape, geometry)
        logits += to_logits.slopes * (token + distance).astype(jnp.float32)
    attended = mask.seen(low, high, products.shape, geometry)
    if geometry.tuning.fold > 1:
        attended &= mask.same_kv_head(products.shape, geometry)
    return jnp.where(attended, logits, -jnp.inf)


def _slot_scales(scales_smem, geometry: Geometry, tiles: Tiles):
    """The scale of each row, broadcast to [tile, columns]."""
    shape = geometry.tuning.tile, geometry.columns
    return layout(lax.broadcast_in_dim(tiles.slot_scales(scales_smem), shape, (0,)))


def _scaled_weights(exponentials, scales, low, high, geometry: Geometry):
    """Multiplies exponentials by scales of values; divides each column by its peak, to fit into float16.

    Returns the quotients, and the peaks [columns].
    """
    seen = mask.seen(low, high, exponentials.shape, geometry)
    weights = exponentials * jnp.where(seen, scales, jnp.zeros_like(scales))
    peaks = jnp.abs(weights).max(axis=0)
    peaks = jnp.where(peaks > 0, peaks, 1.0)
    return weights / wide(peaks, geometry.tuning.tile), peaks
