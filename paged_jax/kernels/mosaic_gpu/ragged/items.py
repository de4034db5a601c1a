"""Descriptions of work items: the loading warpgroup writes them, the computing warpgroups read them.

They lie in a ring in shared memory, `Scratch.items`. `items_before` is the number of the program's earlier items. The
stages of an item's description and query follow from it.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import NO_ITEM
from paged_jax.kernels.mosaic_gpu.ragged.plan import Item
from paged_jax.kernels.mosaic_gpu.ragged.ptx import items as ptx
from paged_jax.kernels.mosaic_gpu.ragged.refs import ITEM_STAGES, Scratch, Signal


def nothing() -> Item:
    """The item without tiles that precedes a program's first item and follows its last one."""
    return Item(*[jnp.int32(NO_ITEM)] * len(Item._fields))


def describe(item: Item, tiles_before: Scalar, items_before: Scalar, smem: Scratch) -> None:
    """Describes an item to the computing warpgroups. `tiles_before` counts earlier tiles of the same kind."""
    stage = stage_of(items_before)
    pl.when(items_before >= ITEM_STAGES)(lambda: plgpu.barrier_wait(smem.items.consumed.at[stage]))
    ptx.store_fields(smem.items.fields, stage, (*item, tiles_before))
    plgpu.barrier_arrive(smem.signal(Signal.ITEM, stage))


def kind_of(stage: Scalar, smem: Scratch) -> Scalar:
    """Waits for the description in a stage; returns the item's kind, or NO_ITEM after the last item."""
    plgpu.barrier_wait(smem.signal(Signal.ITEM, stage))
    return kind_again(stage, smem)


def kind_again(stage: Scalar, smem: Scratch) -> Scalar:
    """The kind in a description for which this warpgroup has waited already."""
    return smem.items.fields[stage, Item._fields.index("kind")]


def read(stage: Scalar, smem: Scratch) -> Item:
    """Reads the item of a stage. After a loop that needs all registers, reading again is faster than a spill."""
    return Item(*[smem.items.fields[stage, i] for i in range(len(Item._fields))])


def read_own(items_before: Scalar, smem: Scratch) -> Item:
    """Reads the item that this loading warpgroup described."""
    return read(stage_of(items_before), smem)


def tiles_before(stage: Scalar, smem: Scratch) -> Scalar:
    """The number of the program's tiles of the same kind before the item of a stage."""
    return smem.items.fields[stage, len(Item._fields)]


def finish(stage: Scalar, smem: Scratch) -> None:
    """Releases a stage: this computing warpgroup is done with the description."""
    plgpu.barrier_arrive(smem.items.consumed.at[stage])


def stage_of(items_before: Scalar) -> Scalar:
    """The stage of an item's description."""
    return lax.rem(items_before, jnp.int32(ITEM_STAGES))


def query_stage(stage: Scalar, geometry: Geometry) -> Scalar:
    """The stage of an item's query; there are one or two of them."""
    return stage if geometry.tuning.queries == ITEM_STAGES else jnp.int32(0)
