"""What a program of the ragged kernel stores: out and lse of a whole item, or the partial result of a split.

Results leave through the shared memory of the query. A thin item's rows are those of both warpgroups, each of which has
seen half of the tiles: one hands its softmax to the other, through the same place.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.device import ragged_rows
from paged_jax.kernels.mosaic_gpu.device.ragged_plan import Item
from paged_jax.kernels.mosaic_gpu.device.ragged_softmax import Rows, State, wide
from paged_jax.kernels.mosaic_gpu.device.registers import LOG2E, exp, layout, log
from paged_jax.kernels.mosaic_gpu.ragged_tuning import Config, Line


def hand_over(state: State, places_smem, refs, cfg: Config) -> None:
    """Gives a warpgroup's softmax to the other one: O normalised, as 16 bits and what these leave out in 16 more."""
    out, maxima, sums = state
    dtype = cfg.problem.query_dtype
    out = out * wide(1.0 / jnp.where(sums != 0, sums, 1.0), out.shape[1])
    rounded = layout(out.astype(dtype))
    places_smem.at[1][...] = rounded
    places_smem.at[0][...] = layout((out - rounded.astype(jnp.float32)).astype(dtype))
    refs.maxima_smem[...] = maxima
    refs.sums_smem[...] = sums
    plgpu.barrier_arrive(refs.handed_over)


def take_over(state: State, places_smem, refs) -> State:
    """The softmax with that of the other warpgroup, who has handed it over."""
    out, maxima, sums = state
    of_rows = plgpu.Layout.WGMMA.reduce(1)
    rounded, rest = (plgpu.load(places_smem.at[i], layout=plgpu.Layout.WGMMA).astype(jnp.float32) for i in (1, 0))
    other_maxima, other_sums = (plgpu.load(ref, layout=of_rows) for ref in (refs.maxima_smem, refs.sums_smem))
    both = lax.max(maxima, other_maxima)
    keep, weight = exp(maxima - both), other_sums * exp(other_maxima - both)
    out = out * wide(keep, out.shape[1]) + (rounded + rest) * wide(weight, out.shape[1])
    return State(layout(out), layout(both, 1), layout(sums * keep + weight, 1))


def store(item: Item, half, rows: Rows, state: State, out_smem, line: Line, refs, cfg: Config) -> None:
    """Stores a half of an item, whose logits are those of base e. Rows that saw no token: out 0, lse -inf."""
    out, maxima, sums = state
    seen = sums != 0  # NaN counts: what is not a number must show

    def store_whole():
        norm, base, scaled = sums, maxima, out
        if cfg.problem.per_head.sinks:
            base = lax.max(maxima, rows.sinks)
            keep = exp(maxima - base)
            norm = sums * keep + exp(rows.sinks - base)
            scaled = out * wide(keep, out.shape[1])
        norm = jnp.where(seen, norm, 1.0)
        lse_smem = refs.lse_smem.at[half]
        out_smem[...] = layout((scaled * wide(rows.v_scale / norm, out.shape[1])).astype(cfg.problem.query_dtype))
        lse_smem[...] = layout(jnp.where(seen, base + log(norm), -jnp.inf), 1)
        ragged_rows.store_rows(
            out_smem, lse_smem, refs.out_gmem, refs.lse_gmem, rows.first_token, rows.tokens, item.kv_head, cfg
        )

    def store_part():
        norm = jnp.where(seen, sums, 1.0)
        parts_gmem, sums_gmem = (
            (refs.wide_parts_gmem, refs.wide_sums_gmem) if line.wide else (refs.thin_parts_gmem, refs.thin_sums_gmem)
        )
        part = layout(out * wide(rows.v_scale / norm, out.shape[1]))
        ragged_rows.store_part(parts_gmem.at[item.place, half], part, rows.tokens, cfg)
        log_sums = jnp.where(seen, maxima * LOG2E + jnp.log2(norm), -jnp.inf)  # of base 2
        sums_gmem.at[item.place, half][...] = layout(log_sums, 1)

    if not cfg.splits(line):
        store_whole()
    else:
        pl.when(item.place < 0)(store_whole)
        pl.when(item.place >= 0)(store_part)
