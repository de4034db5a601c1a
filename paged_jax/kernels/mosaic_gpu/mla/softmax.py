"""The online softmax of 64 rows, in warpgroup 0, and the sums of values, in both computing warpgroups.

S [64, tile]     = Q [64, latent_size] x latents^T [latent_size, tile]
P                = exp(S - maxima)
O [64, part]    += P [64, tile]        x latents [tile, part]        each warpgroup has its own parts of the value
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.hopper.epilogue import join_sinks, saw_tokens
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, div
from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.logits import cache_scale, scaled_logits
from paged_jax.kernels.mosaic_gpu.hopper.memory import Slice
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOG2E, LOWEST, layout
from paged_jax.kernels.mosaic_gpu.mla.geometry import TILE, Geometry
from paged_jax.kernels.mosaic_gpu.mla.plan import Split
from paged_jax.kernels.mosaic_gpu.mla.ptx import lanes
from paged_jax.kernels.mosaic_gpu.mla.refs import Inputs, Refs

_MOST_LAG = 6.0  # exp(largest logit - maximum) may reach 2 to this power; float16 holds 2 ** (8 + 6)
BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_EXPONENT_IN_FLOAT16 = 8.0
_LEAST_FACTOR = 1e-30  # 0 times the infinite logit of an unseen token would be NaN
_ZEROED = 64  # columns of a tile that are zeroed at a time, because they take registers


class State(NamedTuple):
    """The softmax of the tokens so far."""

    out: list[Array]  # parts of O, not divided by the sums: [64, size of the part] each
    maxima: Array  # [64], maxima of logits over their factor; they may lag by `_MOST_LAG` over the factor
    sums: Array  # [64], sums of exponentials; until `finished`, each lane sums its own columns only


class Seen(NamedTuple):
    """One past the last token that rows see."""

    by_all: Scalar  # that all rows see
    by_rows: Any  # that each row sees: [64], or a scalar


class Factor(NamedTuple):
    """The factor from products to logits: scalars. Exponentials apply its magnitude, with one rounding for both.

    Caps need whole logits. If there is one, `raise_maxima` applies the factor, and sign and magnitude are 1.
    """

    signed: Any
    sign: Any  # 1 or -1
    magnitude: Any  # times log2(e)


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


def seen_by_rows(split: Split, geometry: Geometry) -> Seen:
    """The tokens that rows see."""
    if not geometry.problem.causal or geometry.one_query:
        return Seen(split.end, split.end)
    row = lanes.row_numbers() + split.first_row
    of_rows = lax.min(div(row, geometry.heads) + (split.context_len + 1), jnp.broadcast_to(split.limit, row.shape))
    by_all = lax.min(div(split.first_row, geometry.heads) + (split.context_len + 1), split.limit)
    return Seen(by_all, of_rows)


def rescaled(out: list[Array], factors: Array) -> list[Array]:
    """Parts of O times a factor for each row."""
    return [lanes.rescaled(x, factors) for x in out]


def raise_maxima(
    products: Array, maxima: Array, start: Scalar, seen: Seen, factor: Factor, geometry: Geometry
) -> tuple[Array, Array, Array]:
    """Returns the logits of the tile that begins at token `start`, maxima, and the factors that rescale O.

    Logits and maxima lack the factor's magnitude.
    """
    problem, end = geometry.problem, seen.by_rows - start
    if not problem.scaled_products:
        products = scaled_logits(products, factor.signed, problem) * LOG2E

    def mask(x):
        token = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=plgpu.Layout.WGMMA)
        signed = x * factor.sign
        return jnp.where(token < (over_columns(end, TILE) if jnp.ndim(end) else end), signed, -jnp.inf)

    # Only the last tiles of a row block need a mask.
    is_masked = (seen.by_all - start < TILE) | (factor.sign < 0)
    logits = lax.cond(is_masked, mask, lambda x: x, products)
    # A maximum may lag behind the largest logit. Maxima then rise rarely, and O is rarely multiplied.
    raised = lanes.raised(maxima, logits, factor.magnitude, _MOST_LAG)
    return logits, raised, jnp.exp2((maxima - raised) * factor.magnitude)


def weigh(logits: Array, maxima: Array, factor: Factor, geometry: Geometry) -> Array:
    """The weights of a tile's tokens."""
    return lanes.exponentials(logits, factor.magnitude, scaled(maxima, factor) - _exponent_of_weights(geometry))


def scaled(maxima: Array, factor: Factor) -> Array:
    """Maxima with the factor. They stay finite, so that differences of maxima of unseen rows are no NaN."""
    return lax.max(maxima * factor.magnitude, jnp.full_like(maxima, LOWEST))


def factor_of(inputs_gmem: Inputs, geometry: Geometry) -> Factor:
    """The factor of a call."""
    signed = inputs_gmem.scale[0] * cache_scale(inputs_gmem.latent_scale, geometry.problem.k_scale, jnp.int32(0))
    if not geometry.problem.scaled_products:
        return Factor(signed, jnp.float32(1), jnp.float32(1))
    sign = jnp.where(signed < 0, jnp.float32(-1), jnp.float32(1))
    return Factor(signed, sign, lax.max(signed * sign * LOG2E, jnp.float32(_LEAST_FACTOR)))


def zero_unseen(values_smem: Sequence[Ref], end: Scalar) -> None:
    """Zeroes the values of the tokens from `end` on: their weights are 0, but 0 * NaN would be NaN."""

    @pl.when(end < TILE)
    def zero():
        for part_smem in [x.at[:, pl.ds(i, _ZEROED)] for x in values_smem for i in range(0, x.shape[1], _ZEROED)]:
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
