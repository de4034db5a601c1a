"""Attention of a query tile's rows to a prefix: rows are queries, columns are tokens, and maxima stay in a warp.

    S [64, tile]       = Q [64, head_size] x K^T [head_size, tile]
    O [64, head_size] += P [64, tile]      x V [tile, head_size]        P in registers
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.plan import Split
from paged_jax.kernels.mosaic_gpu.decode.shared.ptx import lanes, products
from paged_jax.kernels.mosaic_gpu.decode.shared.refs import PrefixRefs
from paged_jax.kernels.mosaic_gpu.decode.tiles.plain import PlainTiles
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.logits import scaled_logits
from paged_jax.kernels.mosaic_gpu.hopper.products import product
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOG2E, LOWEST, layout

_MOST_LAG = 6.0  # exp(largest logit - maximum) may reach 2 to this power


class State(NamedTuple):
    """The softmax over the tokens so far."""

    out: Array  # O [64, head_size] before the division by the sums
    bases: Array  # [64], maxima of logits times log2(e); they may lag by `_MOST_LAG`
    sums: Array  # [64], of exponentials


def attend(
    split: Split, half: int, tiles_before: Scalar, factor: Any, query_smem: Ref, refs: PrefixRefs, geometry: Geometry
) -> State:
    """Attends to a split's tokens; its tiles follow `tiles_before` earlier ones in the rings. There must be a tile.

    Two warpgroups read each tile, each with half of an item's rows. While one computes its softmax, the matrix units
    compute the other one's products.
    """
    problem, tile, smem = geometry.problem, geometry.tuning.tile, refs.smem
    unit = lanes.in_each_lane(jnp.float32(LOG2E))

    def attend_to_tile(i, state: tuple, plain: bool):
        out, maxima, sums = state
        stage, end = lax.rem(tiles_before + i, jnp.int32(geometry.tuning.stages)), split.end - (split.origin + i * tile)
        plgpu.barrier_wait(smem.keys.ready.at[stage])
        scores = product(query_smem, smem.keys.tiles[0].at[stage].T)
        plgpu.barrier_arrive(smem.keys.consumed.at[stage])
        logits = scaled_logits(layout(scores), factor, problem)
        if not plain:
            token = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
            logits = jnp.where(token < end, logits, -jnp.inf)
        raised = lanes.raised(maxima, logits, unit, _MOST_LAG)
        exponentials = lanes.exponentials(logits, unit, raised * LOG2E)
        rescale = jnp.exp2((maxima - raised) * LOG2E)
        sums = sums * rescale + lanes.sums(exponentials)
        values_smem = smem.values.tiles[0].at[stage]
        plgpu.barrier_wait(smem.values.ready.at[stage])
        if not plain:
            _zero_unseen(half, values_smem, end, refs, geometry)
        weights = layout(exponentials.astype(problem.query_dtype))
        out = layout(products.accumulate(lanes.rescaled(out, rescale), weights, values_smem))
        plgpu.barrier_arrive(smem.values.consumed.at[stage])
        return out, raised, sums

    rows = jnp.zeros((WGMMA_ROWS,), jnp.float32)
    out = layout(jnp.zeros((WGMMA_ROWS, problem.head_size), jnp.float32))
    state = out, layout(rows + LOWEST, 1), layout(rows, 1)
    num_plain = lax.div(split.end - split.origin, jnp.int32(tile))
    for plain, bounds in ((True, (0, num_plain)), (False, (num_plain, split.num_tiles))):
        state = lax.fori_loop(*bounds, functools.partial(attend_to_tile, plain=plain), state)
    out, maxima, sums = state
    return State(out, maxima * LOG2E, lanes.sum_of_lanes(sums))


def _zero_unseen(half: int, values_smem: Ref, end: Scalar, refs: PrefixRefs, geometry: Geometry) -> None:
    """Zeroes a tile's rows of V from `end` on, which both halves read. Half 0 does it."""
    if half == 0:
        PlainTiles(geometry).zero_unseen([values_smem], jnp.int32(0), end)
        plgpu.barrier_arrive(refs.smem.zeroed)
    else:
        plgpu.barrier_wait(refs.smem.zeroed)


def finished(state: State, factor: Any) -> tuple[Array, Array]:
    """Returns O times a factor over the sums, and the binary logarithms of the sums. Each row has seen a token."""
    columns = state.out.shape[1]
    quotients = lax.broadcast_in_dim(factor / state.sums, (WGMMA_ROWS, columns), (0,))
    return state.out * quotients, state.bases + jnp.log2(state.sums)
