"""How a program's warpgroups agree on work items: the loading one claims them, and describes them to the others.

Descriptions lie in a ring in shared memory, `Scratch.items`. Items have numbers of two sorts: the number among all
items of its kind, which a program claims, and the number of the program's own items before it, `items_before`, which
says in which stage of a ring its description and its query are.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.ragged.geometry import NO_ITEM, Geometry
from paged_jax.kernels.mosaic_gpu.ragged.plan import Item
from paged_jax.kernels.mosaic_gpu.ragged.ptx import items as ptx
from paged_jax.kernels.mosaic_gpu.ragged.refs import ITEM_STAGES, Scratch, Signal


def nothing() -> Item:
    """An item without tiles, which comes before a program's first item and behind its last."""
    return Item(*[jnp.int32(NO_ITEM)] * len(Item._fields))


def describe(item: Item, tiles_before: Scalar, items_before: Scalar, smem: Scratch) -> None:
    """Tells the computing warpgroups of an item, and how many tiles of its kind the program has had before it."""
    stage = stage_of(items_before)
    pl.when(items_before >= ITEM_STAGES)(lambda: plgpu.barrier_wait(smem.items.consumed.at[stage]))
    ptx.store_fields(smem.items.fields, stage, (*item, tiles_before))
    plgpu.barrier_arrive(smem.signal(Signal.ITEM, stage))


def kind_of(stage: Scalar, smem: Scratch) -> Scalar:
    """The kind of the item of a stage, once it is described; NO_ITEM if there is no further one."""
    plgpu.barrier_wait(smem.signal(Signal.ITEM, stage))
    return smem.items.fields[stage, Item._fields.index("kind")]


def read(stage: Scalar, smem: Scratch) -> Item:
    """The item of a stage. To read it again is faster than to keep it over a loop that needs all registers."""
    return Item(*[smem.items.fields[stage, i] for i in range(len(Item._fields))])


def read_own(items_before: Scalar, smem: Scratch) -> Item:
    """The item as the loading warpgroup has described it itself."""
    return read(stage_of(items_before), smem)


def tiles_before(stage: Scalar, smem: Scratch) -> Scalar:
    """How many tiles of its kind the program has had before the item of a stage."""
    return smem.items.fields[stage, len(Item._fields)]


def finish(stage: Scalar, smem: Scratch) -> None:
    """Says that a computing warpgroup needs the description no longer."""
    plgpu.barrier_arrive(smem.items.consumed.at[stage])


def stage_of(items_before: Scalar) -> Scalar:
    """The stage of an item's description."""
    return lax.rem(items_before, jnp.int32(ITEM_STAGES))


def query_stage(stage: Scalar, geometry: Geometry) -> Scalar:
    """The stage of an item's query. There are as many as of descriptions, or one."""
    return stage if geometry.tuning.queries == ITEM_STAGES else jnp.int32(0)
