"""Writes each sequence's new token into the caches while the decode kernel reads them.

A tile may hold the slot's old or new content, or a mix. The mask sets the slot's logit to -inf and its row of V to
zeros. So copies need not wait for the slot mapping, and other programs may copy the same block at any time. The new
token starts the softmax (`first_state`), and goes into its slot once its neighbours have been read (`write`).
"""

from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.plan import Item, Split
from paged_jax.kernels.mosaic_gpu.decode.refs import Refs
from paged_jax.kernels.mosaic_gpu.decode.softmax import State
from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.logits import scaled_logits
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOWEST, layout


class NewToken(NamedTuple):
    """The last token of a sequence."""

    slot: Scalar
    is_seen: Scalar  # whether this program attends to it
    is_written: Scalar  # whether this program writes it into its slot


def new_token(split: Split, refs: Refs, geometry: Geometry) -> NewToken:
    """The new token of a split's sequence. If no program attends to it, the item's first program writes it."""
    problem = geometry.problem
    slot, position = refs.inputs_gmem.slot_mapping[split.item.seq], split.seq_len - 1
    has_slot = (slot >= 0) & (slot < problem.num_blocks * problem.block_size)
    is_seen = has_slot & (position >= split.origin) & (position < split.end)
    is_unseen = has_slot & split.is_first & ((position < 0) | (position >= problem.max_seq_len))
    return NewToken(slot, is_seen, is_seen | is_unseen)


def load(item: Item, refs: Refs) -> None:
    """Starts the copies of an item's new key and value. They arrive at the same barrier as the query."""
    inputs, smem = refs.inputs_gmem, refs.smem
    for new_gmem, new_smem in ((inputs.new_key, smem.new_key), (inputs.new_value, smem.new_value)):
        plgpu.copy_gmem_to_smem(new_gmem.at[item.seq, item.kv_head], new_smem, smem.query_ready)


def first_state(new: NewToken, query_smem, factor, empty: State, refs: Refs, geometry: Geometry) -> State:
    """The softmax over the new token alone, or `empty` if this program does not attend to it."""
    problem = geometry.problem
    shape = problem.head_size, geometry.columns
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    is_seen = row < jnp.where(new.is_seen, problem.head_size, 0)

    def tall(vector_smem):  # [head_size] -> [head_size, columns]
        vector = plgpu.load(vector_smem, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False).astype(jnp.float32)
        return layout(lax.broadcast_in_dim(vector, shape, (0,)))

    def if_seen(x):
        return jnp.where(is_seen, x, jnp.zeros_like(x))

    products = if_seen(layout(query_smem.T[...]).astype(jnp.float32) * tall(refs.smem.new_key))
    logit = scaled_logits(products.sum(axis=0), factor, problem)
    one, sums = jnp.where(new.is_seen, 1.0, 0.0), empty.sums
    if sums.ndim > 1:  # each row has a sum; the new token counts in the first row
        first = plgpu.broadcasted_iota(jnp.int32, sums.shape, 0, layout=plgpu.Layout.WGMMA) == 0
        sums = jnp.where(first, sums + one, sums)
    else:
        sums += one
    return State([if_seen(tall(refs.smem.new_value))], logit + jnp.where(new.is_seen, 0.0, LOWEST), sums)


def write(split: Split, refs: Refs, geometry: Geometry) -> None:
    """Writes the new token into the caches. One warpgroup calls this after the token's neighbours have been read."""
    new, inputs, problem = new_token(split, refs, geometry), refs.inputs_gmem, geometry.problem

    @pl.when(new.is_written)
    def store():
        block_size, kv_head = jnp.int32(problem.block_size), split.item.kv_head
        block, offset = lax.div(new.slot, block_size), lax.rem(new.slot, block_size)
        at = (block, offset, kv_head) if problem.layout == "nhd" else (block, kv_head, offset)
        plgpu.copy_smem_to_gmem(refs.smem.new_key, inputs.key_cache.at[at])
        plgpu.copy_smem_to_gmem(refs.smem.new_value, inputs.value_cache.at[at])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
