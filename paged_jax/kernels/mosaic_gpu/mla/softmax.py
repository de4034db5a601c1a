"""The online softmax of 64 rows, in warpgroup 0, and the sums of values, in both computing warpgroups.

S [64, tile]     = Q [64, latent_size] x latents^T [latent_size, tile]
P                = exp(S - maxima)
O [64, part]    += P [64, tile]        x latents [tile, part]        each warpgroup has its own parts of the value
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.hopper import lanes
from paged_jax.kernels.mosaic_gpu.hopper.epilogue import join_sinks, saw_tokens
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, div
from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.logits import cache_scale, scaled_logits
from paged_jax.kernels.mosaic_gpu.hopper.memory import Slice
from paged_jax.kernels.mosaic_gpu.hopper.products import accumulator, product
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOG2E, LOWEST, layout
from paged_jax.kernels.mosaic_gpu.mla.geometry import TILE, Geometry
from paged_jax.kernels.mosaic_gpu.mla.plan import Split
from paged_jax.kernels.mosaic_gpu.mla.refs import Inputs, Refs

_MOST_LAG = 6.0  # exp(largest logit - maximum) may reach 2 to this power; float16 holds 2 ** (8 + 6)
BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_EXPONENT_IN_FLOAT16 = 8.0
_ZEROED = 64  # columns of a tile that are zeroed at a time, because they take registers


class State(NamedTuple):
    """The softmax of the tokens so far."""

    out: list[Array]  # parts of O, not divided by the sums: [64, size of the part] each
    maxima: Array  # [64], maxima of logits times log2(e); they may lag by `_MOST_LAG`
    sums: Array  # [64], sums of exponentials; until `finished`, each lane sums its own columns only


class Finished(NamedTuple):
    """Factors from a softmax to its results: arrays [64]."""

    factor: Array  # multiplies O
    log_sums: Array  # binary logarithms of sums, without sinks; -inf for rows that saw no token


def empty_out(parts: Sequence[Slice]) -> list[Array]:
    """Parts of O that have seen no token."""
    return [layout(jnp.zeros((WGMMA_ROWS, part.size), jnp.float32)) for part in parts]


def empty(parts: Sequence[Slice]) -> State:
    """The softmax of no token."""
    lowest = jnp.full((WGMMA_ROWS,), LOWEST, jnp.float32)
    return State(empty_out(parts), layout(lowest, 1), layout(jnp.zeros_like(lowest), 1))


def seen_by_rows(split: Split, inputs_gmem: Inputs, geometry: Geometry) -> Any:
    """One past the last token that each row sees, [64], or a scalar for all rows."""
    if not geometry.problem.causal or geometry.one_query:
        return split.end
    row = lanes.row_numbers() + split.first_row
    return lax.min(div(row, geometry.heads) + (split.context_len + 1), jnp.broadcast_to(split.limit, row.shape))


def scores(query_smem: Ref, tile_smem: Ref) -> Array:
    """S, the products of the query with a tile's latents."""
    return product(query_smem, tile_smem.T)


def accumulate(out: list[Array], weights: Any, tile_smem: Ref, parts: Sequence[Slice]) -> list[Array]:
    """O + P V for some parts of O, where P is in registers or in shared memory."""

    def multiply(accs):
        for acc, part in zip(accs, parts, strict=True):
            plgpu.wgmma(acc, weights, tile_smem.at[:, pl.ds(*part)])

    accs: Any = [plgpu.ACC.init(x) for x in out]  # pyright: ignore[reportPrivateImportUsage]
    return list(pl.run_state(multiply)(accs))


def accumulate_and_score(
    out: list[Array],
    weights: Array,
    tile_smem: Ref,
    parts: Sequence[Slice],
    query_smem: Ref,
    next_smem: Ref,
    begin_next: Callable[[], None],
    end: Callable[[], None],
) -> tuple[list[Array], Array]:
    """O + P V, followed by S of the next tile.

    `begin_next` runs before the second product starts, and `end` when the first one is done.
    """

    def multiply(accs, scores_acc):
        for acc, x, part in zip(accs, out, parts, strict=True):
            acc[...] = x
            plgpu.wgmma(acc, weights, tile_smem.at[:, pl.ds(*part)])
        begin_next()
        plgpu.wgmma(scores_acc, query_smem, next_smem.T)
        sums = [plgpu.wgmma_accumulator_load(acc, wait_n=1) for acc in accs]
        end()
        return sums, scores_acc[...]

    accumulators = [accumulator((WGMMA_ROWS, part.size)) for part in parts]
    return pl.run_scoped(multiply, accumulators, accumulator((WGMMA_ROWS, TILE)))


def rescaled(out: list[Array], factors: Array) -> list[Array]:
    """Parts of O times a factor for each row."""
    return [lanes.rescaled(x, factors) for x in out]


def weigh(products: Array, state: State, start: Scalar, seen: Any, factor: Any, geometry: Geometry):
    """Returns the weights of the tile that begins at token `start`, the factor that rescales O, new maxima and sums."""
    problem = geometry.problem
    logits = scaled_logits(products, factor, problem)
    if not problem.scaled_products:
        logits *= LOG2E
    token = plgpu.broadcasted_iota(jnp.int32, products.shape, 1, layout=plgpu.Layout.WGMMA)
    end = seen - start
    logits = jnp.where(token < (over_columns(end, TILE) if jnp.ndim(end) else end), logits, -jnp.inf)
    # A maximum may lag behind the largest logit. Maxima then rise rarely, and O is rarely multiplied.
    maxima = lanes.raised(state.maxima, logits, jnp.float32(1), _MOST_LAG)
    keep = jnp.exp2(state.maxima - maxima)
    weights = lanes.exponentials(logits, jnp.float32(1), maxima - _exponent_of_weights(geometry))
    return weights, keep, maxima, state.sums * keep + lanes.sums(weights)


def factor_of(inputs_gmem: Inputs, geometry: Geometry) -> Any:
    """The factor from products to logits, or to logits times log2(e) if logits are just scaled products."""
    factor = inputs_gmem.scale[0] * cache_scale(inputs_gmem.latent_scale, geometry.problem.k_scale, jnp.int32(0))
    return factor * LOG2E if geometry.problem.scaled_products else factor


def zero_unseen(tile_smem: Ref, end: Scalar, geometry: Geometry) -> None:
    """Zeroes the values of the tokens from `end` on: their weights are 0, but 0 * NaN would be NaN."""

    @pl.when(end < TILE)
    def zero():
        for first in range(0, geometry.problem.head_size, _ZEROED):
            part_smem = tile_smem.at[:, pl.ds(first, _ZEROED)]
            values = plgpu.load(part_smem, layout=plgpu.Layout.WGMMA)
            token = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
            part_smem[...] = jnp.where(token < end, values, jnp.zeros_like(values))


def finished(state: State, is_whole: Scalar, split: Split, refs: Refs, geometry: Geometry) -> tuple[Finished, Array]:
    """Factors from a softmax to its results, and its lse with sinks. Rows that saw no token have lse -inf."""
    inputs_gmem, problem = refs.inputs_gmem, geometry.problem
    _, maxima, sums = state
    sums = lanes.sum_of_lanes(sums)
    seen = saw_tokens(sums)
    divisor = jnp.where(seen, sums, 1.0)
    log_sums = jnp.where(seen, maxima + jnp.log2(divisor) - _exponent_of_weights(geometry), -jnp.inf)
    factor, lse = 1.0 / divisor, log_sums * (1 / LOG2E)
    if problem.per_head.sinks:
        first = lax.rem(split.first_row, jnp.int32(geometry.heads))
        sinks = lanes.loaded(inputs_gmem.sinks, first)
        exponent = 2.0 ** _exponent_of_weights(geometry)
        natural, total, rescale = join_sinks(sinks, maxima * (1 / LOG2E), divisor / exponent)
        with_sinks = seen & jnp.broadcast_to(is_whole, seen.shape)
        factor = jnp.where(with_sinks, rescale / (total * exponent), factor)
        lse = jnp.where(seen, natural + jnp.log2(total) * (1 / LOG2E), -jnp.inf)
    factor = factor * cache_scale(inputs_gmem.latent_scale, problem.v_scale, jnp.int32(0))
    return Finished(layout(factor, 1), layout(log_sums, 1)), layout(lse, 1)


def _exponent_of_weights(geometry: Geometry) -> float:
    """Weights and sums are multiplied by 2 to this power, so that float16 keeps smaller weights."""
    return _EXPONENT_IN_FLOAT16 if geometry.problem.query_dtype == "float16" else 0.0


def over_columns(x: Array, columns: int) -> Array:
    """[64] -> [64, columns]."""
    return lax.broadcast_in_dim(x, (WGMMA_ROWS, columns), (0,))
