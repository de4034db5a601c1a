"""The softmax of a warpgroup's query rows, online: logits of a tile, who sees whom, maxima, exponentials and sums.

Query rows are rows and tokens are columns, so that maxima and sums go over columns:

    S [64, tile] = Q [64, head_size] x K^T [head_size, tile]
    P            = exp(S - maxima), in registers
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.device import ragged_lanes
from paged_jax.kernels.mosaic_gpu.device.ragged_plan import Item, Scalar, span_of
from paged_jax.kernels.mosaic_gpu.device.registers import LOG2E, LOWEST, layout
from paged_jax.kernels.mosaic_gpu.device.softmax import cache_scale, scaled_logits
from paged_jax.kernels.mosaic_gpu.ragged_tuning import ROWS, Config, Line
from paged_jax.kernels.problem import ScaleKind

_MOST_LAG = 8.0  # of maxima, in powers of 2: float16 holds weights of that size
_LEAST_FACTOR = 1e-20  # of products that are scaled as they are exponentiated, and not before


class Rows(NamedTuple):
    """What depends on the rows of a warpgroup: scalars for all of them, and arrays [64].

    Attributes:
      first_token, tokens: rows of the query.
      first, last: positions of the first and the last one.
      position: of each row.
      factor: of products, to become logits of base e.
      is_usual: whether the factor is applied as logits are exponentiated, not before.
      unit: of differences of logits as they are kept, to become exponents of 2.
      natural: of logits as they are kept, to become those of base e.
      k_scale, v_scale: of cached keys, and of cached values.
      slopes, sinks: of each row's head, where the call has them.
    """

    first_token: Scalar
    tokens: Scalar
    first: Scalar
    last: Scalar
    position: Array
    factor: Any
    is_usual: Any
    unit: Any
    natural: Any
    k_scale: Any
    v_scale: Any
    slopes: Any
    sinks: Any


class Totals(NamedTuple):
    """What the softmax of the tokens so far is relative to.

    Attributes:
      maxima: what is subtracted of the logits as they are kept, nearly the largest one, [64].
      sums: of exponentials, [64]; each lane has those of its own columns until `finished`.
    """

    maxima: Array
    sums: Array


class State(NamedTuple):
    """The softmax of the tokens so far: O [64, head_size], not divided by the sums, and what `Totals` has."""

    out: Array
    maxima: Array
    sums: Array


class Weighed(NamedTuple):
    """A tile in the softmax: the new totals, what multiplies O so far [64], and P [64, tile] in float32."""

    totals: Totals
    keep: Array
    weights: Array


def empty(cfg: Config) -> State:
    """The softmax of no token."""
    return State(
        layout(jnp.zeros((ROWS, cfg.problem.head_size), jnp.float32)),
        layout(jnp.full((ROWS,), LOWEST, jnp.float32), 1),
        layout(jnp.zeros((ROWS,), jnp.float32), 1),
    )


def rows_of(item: Item, half, line: Line, refs, cfg: Config) -> Rows:
    """The rows of a half of an item."""
    problem = cfg.problem
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, line.tile), 0, layout=plgpu.Layout.WGMMA).max(axis=1)
    token, head = lax.div(row, jnp.int32(problem.group)), lax.rem(row, jnp.int32(problem.group))
    tokens = lax.clamp(jnp.int32(0), item.tokens - half * cfg.half, jnp.int32(cfg.half))
    first = item.position + half * cfg.half

    def of_heads(values_gmem):
        values = layout(jnp.zeros((ROWS,), jnp.float32), 1)
        for i in range(problem.group):
            values = jnp.where(head == i, values_gmem[item.kv_head * problem.group + i], values)
        return values

    k_scale = cache_scale(refs.k_scale_gmem, problem.k_scale, item)  # pyright: ignore[reportArgumentType]
    factor = refs.scale_gmem[0] * k_scale
    # Logits are scaled as they are exponentiated, unless the factor is not positive: maxima would be minima.
    is_usual = factor * LOG2E > _LEAST_FACTOR
    late = _scales_late(cfg)
    return Rows(
        first_token=item.first_token + half * cfg.half,
        tokens=tokens,
        first=first,
        last=first + lax.max(tokens - 1, jnp.int32(0)),
        position=token + first,
        factor=factor,
        is_usual=is_usual,
        unit=jnp.where(is_usual, factor * LOG2E, LOG2E) if late else LOG2E,
        natural=jnp.where(is_usual, factor, 1.0) if late else 1.0,
        k_scale=k_scale,
        v_scale=cache_scale(refs.v_scale_gmem, problem.v_scale, item),  # pyright: ignore[reportArgumentType]
        slopes=of_heads(refs.slopes_gmem) if problem.per_head.alibi_slopes else None,
        sinks=of_heads(refs.sinks_gmem) if problem.per_head.sinks else None,
    )


class SlotScales(NamedTuple):
    """The scales of a tile's slots, [tile] in shared memory, where the call has them."""

    keys: Any
    values: Any


def is_plain(item: Item, tile, rows: Rows, line: Line, cfg: Config) -> Any:
    """Whether all rows see all tokens of a tile, whose products need no factor of their own."""
    problem = cfg.problem
    span = span_of(item, tile, line, cfg)
    end = span.start + line.tile
    plain = end <= span.high
    if problem.causal:
        plain &= end <= rows.first + 1
    if problem.sliding_window is not None:
        plain &= span.start > rows.last - problem.sliding_window
    if _scales_late(cfg):
        plain &= rows.is_usual
    if _scales_new(cfg):
        plain &= ~span.is_new
    return plain


def attend(
    products,
    totals: Totals,
    item: Item,
    tile,
    scales: SlotScales,
    rows: Rows,
    line: Line,
    cfg: Config,
    *,
    plain: bool,
) -> Weighed:
    """Takes a tile's products Q K^T into the softmax; what is left is to multiply O, and to add P V to it.

    There is no branch in it, as products of tiles may be on their way meanwhile: `plain` says what `is_plain` does.
    """
    if scales.keys is not None:
        products = products * _of_tokens(scales.keys)
    logits = _logits(products, item, tile, rows, line, cfg, plain)
    # What is subtracted may lag behind the largest logit: then O need not be multiplied.
    maxima = ragged_lanes.raised(totals.maxima, logits, rows.unit, _MOST_LAG)
    # A maximum times the unit rounds, always in the same way, which cancels when O is divided by the sums.
    base, old_base = (lax.max(x * rows.unit, jnp.full_like(x, LOWEST)) for x in (maxima, totals.maxima))
    keep = jnp.exp2(old_base - base)
    exponentials = ragged_lanes.exponentials(logits, rows.unit, base)
    weights = exponentials if scales.values is None else exponentials * _of_tokens(scales.values)
    if not plain and cfg.prefix and cfg.problem.v_scale is not ScaleKind.NONE:
        weights = weights * jnp.where(span_of(item, tile, line, cfg).is_new, 1 / rows.v_scale, 1.0)
    sums = totals.sums * keep + ragged_lanes.sums(exponentials)
    return Weighed(Totals(maxima, sums), keep, weights)


def finished(state: State, rows: Rows) -> State:
    """The softmax of all tokens, with maxima of logits of base e."""
    return State(state.out, layout(state.maxima * rows.natural, 1), ragged_lanes.sum_of_lanes(state.sums))


def _of_tokens(values_smem):
    """[tile] -> [64, tile]."""
    values = plgpu.load(values_smem, layout=plgpu.Layout.WGMMA.reduce(0))
    return lax.broadcast_in_dim(values, (ROWS, values.shape[0]), (1,))


def wide(x, columns: int):
    """[64] -> [64, columns]."""
    return lax.broadcast_in_dim(x, (ROWS, columns), (0,))


def _scales_late(cfg: Config) -> bool:
    return not cfg.problem.per_head.alibi_slopes and cfg.problem.logits_soft_cap is None


def _scales_new(cfg: Config) -> bool:
    """Whether new tokens' keys and values are without the scales that the cached ones have."""
    scales = cfg.problem.k_scale, cfg.problem.v_scale
    return cfg.prefix and any(scale is not ScaleKind.NONE for scale in scales)


def _logits(products, item: Item, tile, rows: Rows, line: Line, cfg: Config, plain: bool):
    """The logits of a tile, which `rows.natural` makes those of base e; -inf where a row does not see."""
    problem = cfg.problem
    span = span_of(item, tile, line, cfg)
    start, high = span.start, span.high
    if not plain and cfg.prefix and problem.k_scale is not ScaleKind.NONE:
        products = products * jnp.where(span.is_new, 1 / rows.k_scale, 1.0)
    if _scales_late(cfg):
        logits = products if plain else products * jnp.where(rows.is_usual, 1.0, rows.factor)
    else:
        logits = scaled_logits(products, rows.factor, problem)
        if problem.per_head.alibi_slopes:
            token = plgpu.broadcasted_iota(jnp.int32, products.shape, 1, layout=plgpu.Layout.WGMMA)
            distance = (token + start) - wide(rows.position, line.tile)
            logits += wide(rows.slopes, line.tile) * distance.astype(jnp.float32)
    return logits if plain else _masked(logits, start, high, rows, line, cfg)


def _masked(logits, start, high, rows: Rows, line: Line, cfg: Config):
    """-inf where a row does not see a token."""
    problem = cfg.problem
    token = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
    if problem.causal:
        last = lax.min(rows.position, high - 1) - start
        seen = token <= wide(last, line.tile)
    else:
        seen = token < high - start
    if problem.sliding_window is not None:
        seen &= token > wide(rows.position - (start + problem.sliding_window), line.tile)
    return layout(jnp.where(seen, logits, -jnp.inf))
