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
from paged_jax.kernels.mosaic_gpu.decode.shared.refs import PrefixRefs
from paged_jax.kernels.mosaic_gpu.decode.tiles.plain import PlainTiles
from paged_jax.kernels.mosaic_gpu.hopper import products
from paged_jax.kernels.mosaic_gpu.hopper.epilogue import Epilogue, saw_tokens
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.logits import scaled_logits
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOWEST, exp, layout


class State(NamedTuple):
    """The softmax over the tokens so far."""

    out: Array  # O [64, head_size] before the division by the sums
    maxima: Array  # [64], of logits
    sums: Array  # [64], of exponentials


def empty(geometry: Geometry) -> State:
    """The softmax over no tokens."""
    rows = jnp.zeros((WGMMA_ROWS,), jnp.float32)
    out = layout(jnp.zeros((WGMMA_ROWS, geometry.problem.head_size), jnp.float32))
    return State(out, layout(rows + LOWEST, 1), layout(rows, 1))


def attend(split: Split, tiles_before: Scalar, factor: Any, refs: PrefixRefs, geometry: Geometry) -> State:
    """Attends to a split's tokens; its tiles follow `tiles_before` earlier ones in the rings."""
    problem, tile, smem, tiles = geometry.problem, geometry.tuning.tile, refs.smem, PlainTiles(geometry)

    def attend_to_tile(i, state: State) -> State:
        stage = lax.rem(tiles_before + i, jnp.int32(geometry.tuning.stages))
        end = split.end - (split.origin + i * tile)
        plgpu.barrier_wait(smem.keys.ready.at[stage])
        scores = layout(products.product(smem.query, smem.keys.tiles[0].at[stage].T))
        plgpu.barrier_arrive(smem.keys.consumed.at[stage])
        logits = scaled_logits(scores, factor, problem)
        token = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
        logits = jnp.where(token < end, logits, -jnp.inf)
        maxima = lax.max(state.maxima, logits.max(axis=1))
        keep, weights = exp(state.maxima - maxima), exp(logits - _tall(maxima, tile))
        sums = state.sums * keep + weights.sum(axis=1)
        values_smem = smem.values.tiles[0].at[stage]
        plgpu.barrier_wait(smem.values.ready.at[stage])
        tiles.zero_unseen([values_smem], jnp.int32(0), end)
        kept = state.out * _tall(keep, problem.head_size)
        out = layout(products.accumulate(kept, weights.astype(problem.query_dtype), values_smem))
        plgpu.barrier_arrive(smem.values.consumed.at[stage])
        return State(out, maxima, sums)

    return lax.fori_loop(0, split.num_tiles, attend_to_tile, empty(geometry))


def finished(state: State, factor: Any) -> tuple[Array, Array]:
    """Returns O times a factor over the sums, and the binary logarithms of the sums. Each row has seen a token."""
    log_sums = Epilogue.of(saw_tokens(state.sums), state.maxima, state.sums).lse_of_base_2
    return state.out * _tall(factor / state.sums, state.out.shape[1]), log_sums


def _tall(x: Array, columns: int) -> Array:
    """[rows] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))
