"""The online softmax of a warpgroup's query rows: logits of a tile, masks, maxima, exponentials and sums.

Queries are rows and tokens are columns, so maxima and sums go over columns:

    S [64, tile] = Q [64, head_size] x K^T [head_size, tile]
    P            = exp(S - maxima), in registers
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.logits import cache_scale, scaled_logits
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOG2E, LOWEST, inverse, layout, power_of_two
from paged_jax.kernels.mosaic_gpu.ragged import pattern as patterns
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.plan import Item, Span
from paged_jax.kernels.mosaic_gpu.ragged.ptx import lanes
from paged_jax.kernels.mosaic_gpu.ragged.ptx.rows import QueryRows
from paged_jax.kernels.mosaic_gpu.ragged.refs import Inputs, Ref
from paged_jax.kernels.problem import Granularity, Problem

_MOST_LAG = 6.0  # exp(largest logit - maximum) may reach 2 to this power
# Weights in float16 are multiplied by 2 to this power, so float16 keeps weights down to 2 ** -33 of the largest one.
# Small weights matter: a result may be the sum of many. The largest weight is 2 ** (8 + 6), which float16 holds.
_EXPONENT_IN_FLOAT16 = 8
# The least and the largest exponent of the power of two that divides a query row. Within these bounds, the power has an
# inverse in float32, and the factor times the power is not 0: logits may be -inf, and 0 * -inf would be NaN.
_DIVISORS = -40, 126
# Groups of 8 columns. With 1 or 4 of them, a chunk of 512 queries takes 4 to 5% longer (benchmarks/LOG.md, "What is
# spilled").
_AHEAD = 2
_LEAST_FACTOR = 1e-20  # smaller factors, and negative ones, are applied before the exponentials


class Scaling(NamedTuple):
    """Factors from products Q K^T to logits: scalars, or arrays [64] if query rows were divided.

    If logits are products times one factor, the exponential may apply the factor: a late factor. The softmax then keeps
    the plain products and takes their maxima. A factor up to `_LEAST_FACTOR` is applied before the maxima, because a
    negative one would turn maxima into minima. "Kept logits" are the values that the softmax keeps in either case.
    """

    factor: Any  # from products to kept logits
    is_late: Any  # whether the factor is late, so that kept logits are plain products
    to_exponents: Any  # from kept logits to exponents of 2
    to_base_e: Any  # from kept logits to logits


class Rows(NamedTuple):
    """The facts of a warpgroup's rows: a scalar for all rows, or an array [64]."""

    query: QueryRows
    first_position: Scalar  # the first row's position in the sequence
    last_position: Scalar
    position: Array
    scaling: Scaling
    k_scale: Any  # the scale of cached keys
    v_scale: Any  # the scale of cached values
    stripes: Any  # `pattern.stripes_of_rows`, if there is a pattern
    slopes: Array | None  # the ALiBi slope of each row's head
    sinks: Array | None  # the sink of each row's head


class Totals(NamedTuple):
    """Maxima and sums of the softmax over the tokens so far."""

    maxima: Array  # [64], subtracted from kept logits; a maximum may lag by `_MOST_LAG`
    sums: Array  # [64], sums of exponentials; until `finished`, each lane sums its own columns only


class State(NamedTuple):
    """The softmax over the tokens so far."""

    out: Array  # O before the division by the sums: [64, head_size]
    maxima: Array  # as in `Totals`
    sums: Array


class TileWeights(NamedTuple):
    """The contribution of a tile to the softmax."""

    totals: Totals  # maxima and sums that include the tile
    rescale: Array  # [64], the factor by which O before the tile is multiplied
    weights: Array  # P: [64, tile]


class TileScales(NamedTuple):
    """The scales of a tile's slots, [tile] in shared memory, or None."""

    keys: Ref | None
    values: Ref | None


def empty(geometry: Geometry) -> State:
    """The softmax over no tokens."""
    return State(
        layout(jnp.zeros((WGMMA_ROWS, geometry.problem.head_size), jnp.float32)),
        layout(jnp.full((WGMMA_ROWS,), LOWEST, jnp.float32), 1),
        layout(jnp.zeros((WGMMA_ROWS,), jnp.float32), 1),
    )


def rows_of(item: Item, band: Scalar, inputs_gmem: Inputs, kind: ItemKind) -> Rows:
    """The rows of one band of an item."""
    problem, band_tokens, options = kind.geometry.problem, kind.geometry.band_tokens, inputs_gmem.options
    row = lanes.row_numbers()
    token, head = lax.div(row, jnp.int32(problem.group)), lax.rem(row, jnp.int32(problem.group))
    query = query_rows_of(item, band, kind.geometry)
    first_position = item.position + band * band_tokens

    def of_heads(values_gmem):
        values = layout(jnp.zeros((WGMMA_ROWS,), jnp.float32), 1)
        for i in range(problem.group):
            values = jnp.where(head == i, values_gmem[item.kv_head * problem.group + i], values)
        return values

    k_scale = cache_scale(options.k_scale, problem.k_scale, item.kv_head)
    stripes = patterns.stripes_of_rows(head, item.kv_head, kind.geometry) if problem.block_sparse is not None else None
    return Rows(
        scaling=_scaling(options.scale[0] * k_scale, problem),
        query=query,
        first_position=first_position,
        last_position=first_position + lax.max(query.num_tokens - 1, jnp.int32(0)),
        position=token + first_position,
        k_scale=k_scale,
        v_scale=cache_scale(options.v_scale, problem.v_scale, item.kv_head),
        stripes=stripes,
        slopes=of_heads(options.per_head.alibi_slopes) if problem.per_head.alibi_slopes else None,
        sinks=of_heads(options.per_head.sinks) if problem.per_head.sinks else None,
    )


def query_rows_of(item: Item, band: Scalar, geometry: Geometry) -> QueryRows:
    """The query rows of one band of an item."""
    band_tokens = geometry.band_tokens
    num_tokens = lax.clamp(jnp.int32(0), item.num_tokens - band * band_tokens, jnp.int32(band_tokens))
    return QueryRows(item.first_token + band * band_tokens, num_tokens, item.kv_head)


def divide_query(query_smem: Ref, rows: Rows, geometry: Geometry) -> Rows:
    """Converts a warpgroup's query from bits of bfloat16 to float16, in place, if the products are in float16.

    Returns the rows with factors that undo the division.
    """
    if not geometry.divides_queries:
        return rows
    bits = plgpu.load(query_smem, layout=plgpu.Layout.WGMMA)
    query, divisors = divided(lax.bitcast_convert_type(bits, jnp.dtype(geometry.problem.query_dtype)), geometry)
    query_smem[...] = query
    plgpu.commit_smem()
    return undo_division(rows, divisors)


def divided(query: Array, geometry: Geometry) -> tuple[Array, Array]:
    """Divides each row of a query by a power of two, exactly. Returns the query in float16, and the divisors [64].

    An element loses bits in float16 only if it is more than 2 ** 17 times smaller than the row's largest element.
    """
    query = query.astype(jnp.float32)
    divisors = power_of_two(jnp.abs(query).max(axis=1), *_DIVISORS)
    return layout((query * over_columns(inverse(divisors), query.shape[1])).astype(geometry.operand_dtype)), divisors


def undo_division(rows: Rows, divisors: Array) -> Rows:
    """Returns rows whose factors undo the division of their query."""
    factor, is_late, to_exponents, to_base_e = rows.scaling
    late = jnp.where(is_late, 1.0, 0.0)
    early_divisors, late_divisors = divisors * (1 - late) + late, divisors * late + (1 - late)
    scaling = Scaling(factor * early_divisors, is_late, to_exponents * late_divisors, to_base_e * late_divisors)
    return rows._replace(scaling=scaling)


def _scaling(factor: Any, problem: Problem) -> Scaling:
    """The factors of a call whose logits, before caps and biases, are products times `factor`."""
    if not problem.scaled_products:
        return Scaling(factor, False, jnp.float32(LOG2E), 1.0)  # a Python float could become 64 bits in PTX
    is_late = factor * LOG2E > _LEAST_FACTOR
    early, exponents = jnp.where(is_late, 1.0, factor), jnp.where(is_late, factor * LOG2E, LOG2E)
    return Scaling(early, is_late, lanes.in_each_lane(exponents), jnp.where(is_late, factor, 1.0))


def is_plain(span: Span, rows: Rows, kind: ItemKind) -> Any:
    """Whether a tile needs no mask and no factor of its own: all rows see all of its tokens."""
    problem = kind.geometry.problem
    tile_end = span.starts[-1] + kind.tile
    plain = tile_end <= span.end
    if problem.causal:
        plain &= tile_end <= rows.first_position + 1
    if problem.sliding_window is not None:
        plain &= span.starts[0] > rows.last_position - problem.sliding_window
    if problem.scaled_products:
        plain &= rows.scaling.is_late
    if _scales_cache_only(kind.geometry):
        plain &= ~span.is_new
    if span.pattern is not None:
        plain &= patterns.hides_nothing(span.pattern, span.rank, span.starts[0], rows.last_position, kind)
        plain &= span.starts[0] >= span.begin
    return plain


def attend(
    products: Array,
    totals: Totals,
    span: Span,
    scales: TileScales,
    rows: Rows,
    kind: ItemKind,
    at_maxima: Callable[[], None] | None = None,
    *,
    plain: bool,
) -> TileWeights:
    """Adds a tile's products Q K^T to maxima and sums. The caller then rescales O and adds P V.

    Other products may run meanwhile, so no branch here may depend on the tile. The caller branches on `is_plain`, and
    passes its result as the static `plain`. Two branches remain: the one in `lanes.raised`, and one on `is_late`, which
    is the same for all tiles of a call. `at_maxima` runs between the maxima and the exponentials.
    """
    geometry = kind.geometry
    if scales.keys is not None:
        products = products * _of_tokens(scales.keys)
    logits = _logits(products, span, rows, kind, plain)
    # A maximum may lag behind the largest logit. Maxima then rise rarely, and O is rarely multiplied.
    unit = rows.scaling.to_exponents
    maxima = lanes.raised(totals.maxima, logits, unit, _MOST_LAG)
    if at_maxima is not None:
        at_maxima()
    # The rounding of maximum * unit is the same everywhere, so it cancels when the sums divide O.
    base, old_base = (lax.max(x * unit, jnp.full_like(x, LOWEST)) for x in (maxima, totals.maxima))
    rescale = jnp.exp2(old_base - base)
    exponentials = lanes.exponentials(logits, unit, base - _exponent_of_weights(geometry), _AHEAD)
    weights = exponentials if scales.values is None else exponentials * _of_tokens(scales.values)
    if not plain and geometry.problem.prefix and geometry.problem.v_scale is not Granularity.NONE:
        weights = weights * jnp.where(span.is_new, 1 / rows.v_scale, 1.0)
    sums = totals.sums * rescale + lanes.sums(exponentials)
    return TileWeights(Totals(maxima, sums), rescale, weights)


def finished(state: State, rows: Rows) -> State:
    """Ends the softmax: adds up lanes' sums, and converts maxima to logits. O and sums keep the power of two."""
    maxima = lax.max(state.maxima * rows.scaling.to_base_e, jnp.full_like(state.maxima, LOWEST))
    return State(state.out, layout(maxima, 1), lanes.sum_of_lanes(state.sums))


def over_columns(x: Array, columns: int) -> Array:
    """[64] -> [64, columns]."""
    return lax.broadcast_in_dim(x, (WGMMA_ROWS, columns), (0,))


def factor_of_results(geometry: Geometry) -> float:
    """The factor that takes the power of two out of O and sums."""
    return 2.0 ** -_exponent_of_weights(geometry)


def _exponent_of_weights(geometry: Geometry) -> int:
    """The exponent of the power of two in weights and sums, until results are stored."""
    return _EXPONENT_IN_FLOAT16 if geometry.operand_dtype == "float16" else 0


def _of_tokens(values_smem: Ref) -> Array:
    """[tile] -> [64, tile]."""
    values = plgpu.load(values_smem, layout=plgpu.Layout.WGMMA.reduce(0))
    return lax.broadcast_in_dim(values, (WGMMA_ROWS, values.shape[0]), (1,))


def _scales_cache_only(geometry: Geometry) -> bool:
    """Whether cached keys or values have scales that new ones do not have."""
    scales = geometry.problem.k_scale, geometry.problem.v_scale
    return geometry.problem.prefix and any(scale is not Granularity.NONE for scale in scales)


def _logits(products: Array, span: Span, rows: Rows, kind: ItemKind, plain: bool) -> Array:
    """The kept logits of a tile. They are -inf where a row does not see a token."""
    problem, scaling = kind.geometry.problem, rows.scaling
    if not plain and kind.geometry.problem.prefix and problem.k_scale is not Granularity.NONE:
        products = products * jnp.where(span.is_new, 1 / rows.k_scale, 1.0)
    if problem.scaled_products:
        logits = products
        if not plain:  # the branch saves a multiplication of each logit if the factor is late
            logits = lax.cond(scaling.is_late, lambda: products, lambda: products * _spread(scaling.factor, kind))
    else:
        logits = scaled_logits(products, _spread(scaling.factor, kind), problem)
        if rows.slopes is not None:
            token = plgpu.broadcasted_iota(jnp.int32, products.shape, 1, layout=plgpu.Layout.WGMMA)
            distance = (token + _side_by_side(span.starts, kind)) - over_columns(rows.position, kind.tile)
            logits += over_columns(rows.slopes, kind.tile) * distance.astype(jnp.float32)
    return logits if plain else _masked(logits, span, rows, kind)


def _masked(logits: Array, span: Span, rows: Rows, kind: ItemKind) -> Array:
    """Sets the logits of unseen tokens to -inf."""
    problem, prefix, pattern = kind.geometry.problem, kind.geometry.problem.prefix, span.pattern
    if problem.causal:
        lasts = [lax.min(rows.position, span.end - 1) - start for start in span.starts]
        if pattern is not None:
            tokens = [start + i * kind.segment_tokens for i, start in enumerate(span.starts)]
            shown = [patterns.shows(token, rows.position, rows.stripes, kind.geometry) for token in tokens]
            lasts = [jnp.where(s, last, jnp.full_like(last, -1)) for s, last in zip(shown, lasts, strict=True)]
    else:
        lasts = [span.end - 1 - span.starts[0]]
    firsts = []
    if problem.sliding_window is not None:
        firsts = [rows.position + 1 - (start + problem.sliding_window) for start in span.starts]
    if prefix and pattern is not None:  # the first tile of new tokens may begin with cached ones
        begins = [span.begin - start for start in span.starts]
        firsts = [lax.max(first, begin) for first, begin in zip(firsts, begins, strict=True)] if firsts else begins
    return lanes.masked(logits, firsts, lasts)


def _side_by_side(of_segments: Sequence[Any], kind: ItemKind) -> Any:
    """[64, tile] from a scalar or an array [64] for each segment. A single segment's scalar stays a scalar."""
    if len(of_segments) > 1:
        return lanes.side_by_side(of_segments, kind.tile)
    return _spread(of_segments[0], kind)


def _spread(x: Any, kind: ItemKind) -> Any:
    """[64] -> [64, tile]; a scalar stays a scalar."""
    return over_columns(x, kind.tile) if jnp.ndim(x) else x
