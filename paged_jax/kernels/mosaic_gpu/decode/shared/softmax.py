"""Attention of a query tile's rows to a prefix: rows are queries, columns are tokens, and maxima stay in a warp.

    S [64, tile]       = Q [64, head_size] x K^T [head_size, tile]
    O [64, head_size] += P [64, tile]      x V [tile, head_size]        P in registers
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.plan import Split
from paged_jax.kernels.mosaic_gpu.decode.shared.ptx import lanes, products
from paged_jax.kernels.mosaic_gpu.decode.shared.refs import PrefixRefs
from paged_jax.kernels.mosaic_gpu.decode.tiles.plain import PlainTiles
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_least
from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.logits import scaled_logits
from paged_jax.kernels.mosaic_gpu.hopper.products import product
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOG2E, LOWEST, layout

_MOST_LAG = 6.0  # exp(largest logit - maximum) may reach 2 to this power


class State(NamedTuple):
    """The softmax over the tokens so far."""

    out: Array  # O [64, head_size] before the division by the sums
    bases: Array  # [64], maxima of logits times log2(e); they may lag by `_MOST_LAG`
    sums: Array  # [64], of exponentials


class _Weighed(NamedTuple):
    """The softmax with a tile whose second product is missing."""

    weights: Array  # P [64, tile], rounded
    rescale: Array  # [64], the factor of O before the tile
    maxima: Array  # [64], of logits; they may lag
    sums: Array  # [64]; each lane sums its own columns only


def attend(split: Split, tiles_before: Scalar, factor: Any, refs: PrefixRefs, geometry: Geometry) -> State:
    """Attends to a split's tokens; its tiles follow `tiles_before` earlier ones in the rings.

    A tile's first product and the second product of the tile before start together. Under the second one, the warpgroup
    computes the tile's softmax. There must be a tile.
    """
    problem, tile, smem = geometry.problem, geometry.tuning.tile, refs.smem
    keys_smem, values_smem = smem.keys.tiles[0], smem.values.tiles[0]
    unit = lanes.in_each_lane(jnp.float32(LOG2E))

    def stage_of(i):
        return lax.rem(tiles_before + i, jnp.int32(geometry.tuning.stages))

    def weigh(i, scores, maxima, sums, plain: bool) -> _Weighed:
        """Computes the softmax of tile i; `plain` if all of its tokens are seen."""
        plgpu.barrier_arrive(smem.keys.consumed.at[stage_of(i)])
        logits = scaled_logits(layout(scores), factor, problem)
        if not plain:
            token = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
            logits = jnp.where(token < split.end - (split.origin + i * tile), logits, -jnp.inf)
        raised = lanes.raised(maxima, logits, unit, _MOST_LAG)
        exponentials = lanes.exponentials(logits, unit, raised * LOG2E)
        rescale = jnp.exp2((maxima - raised) * LOG2E)
        sums = sums * rescale + lanes.sums(exponentials)
        lanes.settle(sums, smem.unused)
        return _Weighed(layout(exponentials.astype(problem.query_dtype)), rescale, raised, sums)

    def attend_to_tile(i, state, plain: bool):
        out, weighed = state
        stage, before = stage_of(i), stage_of(i - 1)
        plgpu.barrier_wait(smem.keys.ready.at[stage])
        plgpu.barrier_wait(smem.values.ready.at[before])
        weighed, out = products.score_and_accumulate(
            smem.query,
            keys_smem.at[stage],
            out,
            weighed.weights,
            values_smem.at[before],
            lambda: None,
            lambda scores, _: weigh(i, scores, weighed.maxima, weighed.sums, plain),
            in_halves=False,
        )
        plgpu.barrier_arrive(smem.values.consumed.at[before])
        return lanes.rescaled(layout(out), weighed.rescale), weighed

    rows = jnp.zeros((WGMMA_ROWS,), jnp.float32)
    plgpu.barrier_wait(smem.keys.ready.at[stage_of(0)])
    scores = product(smem.query, keys_smem.at[stage_of(0)].T)
    weighed = weigh(0, scores, layout(rows + LOWEST, 1), layout(rows, 1), plain=False)
    state = layout(jnp.zeros((WGMMA_ROWS, problem.head_size), jnp.float32)), weighed
    num_plain = at_least(lax.div(split.end - split.origin, jnp.int32(tile)), 1)
    state = lax.fori_loop(1, num_plain, lambda i, state: attend_to_tile(i, state, plain=True), state)
    out, weighed = lax.fori_loop(
        num_plain, split.num_tiles, lambda i, state: attend_to_tile(i, state, plain=False), state
    )
    last = split.num_tiles - 1
    last_smem = values_smem.at[stage_of(last)]
    plgpu.barrier_wait(smem.values.ready.at[stage_of(last)])
    PlainTiles(geometry).zero_unseen([last_smem], jnp.int32(0), split.end - (split.origin + last * tile))
    out = layout(products.accumulate(out, weighed.weights, last_smem))
    plgpu.barrier_arrive(smem.values.consumed.at[stage_of(last)])
    return State(out, weighed.maxima * LOG2E, lanes.sum_of_lanes(weighed.sums))


def finished(state: State, factor: Any) -> tuple[Array, Array]:
    """Returns O times a factor over the sums, and the binary logarithms of the sums. Each row has seen a token."""
    columns = state.out.shape[1]
    quotients = lax.broadcast_in_dim(factor / state.sums, (WGMMA_ROWS, columns), (0,))
    return state.out * quotients, state.bases + jnp.log2(state.sums)
