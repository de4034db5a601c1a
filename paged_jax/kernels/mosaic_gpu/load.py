"""Device code of the loading warpgroup: runs of tokens, through the block table, into the rings of tiles."""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu import plan
from paged_jax.kernels.mosaic_gpu.config import Config


def load_segment(segment: plan.Segment, before: plan.Scalar, refs, cfg: Config):
    """Copies a segment's tiles into the rings, after those `before`."""
    last = lax.max(lax.div(segment.end - 1, jnp.int32(cfg.run)) * cfg.run, jnp.int32(0))

    def runs_of(tile):  # (block, offset in it); past the end the last run again, which is masked
        starts = [lax.min(segment.origin + tile * cfg.tokens + i, last) for i in range(0, cfg.tokens, cfg.run)]
        blocks = [refs.block_tables_gmem[segment.seq, lax.div(t, jnp.int32(cfg.block_size))] for t in starts]
        blocks = [jnp.where(segment.end > 0, block, 0) for block in blocks]
        return tuple((block, lax.rem(t, jnp.int32(cfg.block_size))) for block, t in zip(blocks, starts, strict=True))

    def load_tile(i, runs):
        following = runs_of(i + 1)  # in flight while this tile waits for its slot
        slot = lax.rem(before + i, jnp.int32(cfg.slots))
        whole = ((0, cfg.head_size),)
        keys = "k", refs.key_cache_gmem, (refs.k_smem,), whole, refs.k_ready, refs.k_consumed
        values = "v", refs.value_cache_gmem, refs.v_smem, cfg.pieces, refs.v_ready, refs.v_consumed
        for which, cache_gmem, rings_smem, pieces, ready, consumed in (keys, values):

            @pl.when(before + i >= cfg.slots)
            def _(consumed=consumed):
                plgpu.barrier_wait(consumed.at[slot])

            for j, run in enumerate(runs):
                rows = j if cfg.layout == "vllm" else pl.ds(j * cfg.run * cfg.fold, cfg.run * cfg.fold)
                for ring_smem, piece in zip(rings_smem, pieces, strict=True):
                    run_gmem = _run_gmem(cache_gmem, run, segment.head, piece, cfg)
                    plgpu.copy_gmem_to_smem(run_gmem, ring_smem.at[slot, rows], ready.at[slot])
                if getattr(cfg, f"{which}_scale") == "slot":
                    scales_gmem = getattr(refs, f"{which}_scale_gmem").at[run[0], segment.head, _tokens(run[1], cfg)]
                    scales_smem = getattr(refs, f"{which}_scale_smem").at[slot, j, pl.ds(0, cfg.run)]
                    plgpu.copy_gmem_to_smem(scales_gmem, scales_smem, ready.at[slot])
        return following

    lax.fori_loop(0, segment.count, load_tile, runs_of(0))


def _run_gmem(cache_gmem, run, head, piece: tuple[int, int], cfg: Config):
    """A piece of a run of neighbouring tokens, [fold * run, size], or in layout "vllm" their bytes."""
    (block, offset), (first, size) = run, piece
    if cfg.fold > 1 or cfg.layout == "vllm":
        return cache_gmem.at[block, head]
    tokens, d = _tokens(offset, cfg), slice(None) if size == cfg.head_size else pl.ds(first, size)
    return cache_gmem.at[block, tokens, head, d] if cfg.layout == "nhd" else cache_gmem.at[block, head, tokens, d]


def _tokens(offset, cfg: Config):
    """A run in its block."""
    return slice(None) if cfg.run == cfg.block_size else pl.ds(pl.multiple_of(offset, cfg.run), cfg.run)
