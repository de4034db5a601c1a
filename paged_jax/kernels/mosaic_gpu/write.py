"""Device code: the new token of a sequence, which decode writes into the cache as it reads.

It is the softmax's first state (`attend_to`) instead of what tiles have in its place, and goes into its slot when its
neighbours have been read (`write`).
"""

from dataclasses import dataclass

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu import plan
from paged_jax.kernels.mosaic_gpu.config import Config
from paged_jax.kernels.mosaic_gpu.registers import LOWEST, layout, scaled_logits


@dataclass(frozen=True)
class NewToken:
    """The last token of a sequence: its slot, and whether this program attends to it and writes it there."""

    slot: plan.Scalar
    seen: plan.Scalar
    written: plan.Scalar


def new_token(segment: plan.Segment, refs, cfg: Config) -> NewToken:
    """Tiles come with what its slot holds before: copies need not wait for the slot, and no other program reads it."""
    slot, position = refs.slot_mapping_gmem[segment.seq], segment.seq_len - 1
    given = (slot >= 0) & (slot < cfg.num_blocks * cfg.block_size)
    seen = given & (position >= segment.origin) & (position < segment.end)
    past = given & (segment.part == 0) & ((position < 0) | (position >= cfg.max_seq_len))
    return NewToken(slot, seen, seen | past)


def attend_to(new: NewToken, q_smem, factor, init, refs, cfg: Config):
    """What `attend_tile` would make of the new token alone, if this program attends to it."""
    shape = cfg.head_size, cfg.columns
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    seen = row < jnp.where(new.seen, cfg.head_size, 0)

    def tall(vector_smem):  # [d] -> [d, columns]
        vector = plgpu.load(vector_smem, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False).astype(jnp.float32)
        return layout(lax.broadcast_in_dim(vector, shape, (0,)))

    def if_seen(x):
        return jnp.where(seen, x, jnp.zeros_like(x))

    _, _, exp_sum = init
    products = if_seen(layout(q_smem.T[...]).astype(jnp.float32) * tall(refs.key_smem))
    logit = scaled_logits(products.sum(axis=0), factor, cfg)
    one = jnp.where(new.seen, 1.0, 0.0)
    if exp_sum.ndim > 1:
        first = plgpu.broadcasted_iota(jnp.int32, exp_sum.shape, 0, layout=plgpu.Layout.WGMMA) == 0
        exp_sum = jnp.where(first, exp_sum + one, exp_sum)
    else:
        exp_sum += one
    return [if_seen(tall(refs.value_smem))], logit + jnp.where(new.seen, 0.0, LOWEST), exp_sum


def write(segment: plan.Segment, refs, cfg: Config):
    """Writes the new token into the caches, after its neighbours have been read; for one warpgroup."""
    new = new_token(segment, refs, cfg)

    @pl.when(new.written)
    def _():
        block, offset = lax.div(new.slot, jnp.int32(cfg.block_size)), lax.rem(new.slot, jnp.int32(cfg.block_size))
        at = (block, offset, segment.head) if cfg.layout == "nhd" else (block, segment.head, offset)
        plgpu.copy_smem_to_gmem(refs.key_smem, refs.key_cache_gmem.at[at])
        plgpu.copy_smem_to_gmem(refs.value_smem, refs.value_cache_gmem.at[at])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
