"""The loading warpgroup: it claims work items, describes them, and loads their queries and tiles.

It runs ahead of the computing warpgroups: during the copies of an item's tiles it claims the next item and, if queries
have two stages, copies its query. Rings of tiles continue from one item to the next (`load_tiles.py`).
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.ragged import count, items, plan
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind, kinds_of
from paged_jax.kernels.mosaic_gpu.ragged.load_tiles import TileLoader
from paged_jax.kernels.mosaic_gpu.ragged.plan import Item
from paged_jax.kernels.mosaic_gpu.ragged.ptx import blocks as ptx_blocks
from paged_jax.kernels.mosaic_gpu.ragged.ptx import items as claims
from paged_jax.kernels.mosaic_gpu.ragged.ptx import rows
from paged_jax.kernels.mosaic_gpu.ragged.refs import (
    ITEM_STAGES,
    Counted,
    Counts,
    Refs,
    Signal,
    factor_sizes,
    with_factors_in_smem,
)

_LAST_TILES = 2  # tiles of an item that are loaded after the next item is claimed, unless it is claimed early


def count_items(refs: Refs, geometry: Geometry) -> Counts:
    """Counts the batch's items, and copies the call's factors."""
    _copy_factors(refs, geometry)
    counts = count.count_in_kernel(refs, geometry)
    if factor_sizes(geometry):
        rows.finish_copies()
    return counts


def load_items(counts: Counts, refs: Refs, geometry: Geometry) -> None:
    """Takes one item after the other, describes it to the computing warpgroups, and copies its query and tiles.

    Some programs begin with wide items and the others with thin ones, so that matrix units and memory are busy all the
    time. In phase 0 a program takes items of the kind it begins with until none is left. In phase 1 it takes the other
    kind, unless all items of that kind are taken without a claim.
    """
    program, wide_programs = lax.axis_index("program"), counts.wide_programs[0]
    begins_wide, (wide, thin), zero = program < wide_programs, kinds_of(geometry), jnp.int32(0)

    def take(kind: ItemKind, phase: Scalar, items_before: Scalar) -> Scalar:
        own = wide_programs if kind.is_wide else jnp.int32(geometry.tuning.num_programs) - wide_programs
        loader = _ItemLoader(kind, counts, own, refs)
        return loader.take_items(_first_number(loader, program, wide_programs, phase), items_before)

    def take_either(phase: Scalar, items_before: Scalar) -> Scalar:
        take_wide, take_thin = (functools.partial(take, kind, phase, items_before) for kind in (wide, thin))
        return lax.cond(begins_wide ^ (phase == 1), take_wide, take_thin)

    if wide.may_exist:
        items_before = lax.fori_loop(0, phases(begins_wide, wide_programs, counts, geometry), take_either, zero)
    else:
        items_before = take(thin, zero, zero)
    items.describe(items.nothing(), zero, items_before, refs.smem)
    # Each barrier must end as it began; the interpreter checks that.
    _drain(items_before + 1, refs.smem.items.consumed, stages=ITEM_STAGES)
    if not geometry.reads_own_queries:
        _drain(items_before, refs.smem.query.consumed, stages=geometry.tuning.queries)


def phases(begins_wide: Scalar, wide_programs: Scalar, counts: Counts, geometry: Geometry) -> Scalar:
    """The phases of a program: two if items of the other kind are left that no program takes without a claim.

    A claim takes as long as the results of the last item, and the program ends only when both are done.
    """
    wide, thin = kinds_of(geometry)
    wide_left, thin_left = (
        count.total(Counted.ITEMS, kind, counts) > own
        for kind, own in ((wide, wide_programs), (thin, geometry.tuning.num_programs - wide_programs))
    )
    return jnp.where(jnp.where(begins_wide, thin_left, wide_left), 2, 1)


def _copy_factors(refs: Refs, geometry: Geometry) -> None:
    """Starts the copies of the call's factors. Computing warpgroups see them with the first item's description."""
    options_gmem, options_smem = (r.inputs_gmem.options for r in (refs, with_factors_in_smem(refs, geometry)))
    for name in factor_sizes(geometry):
        rows.copy_words(getattr(options_gmem, name), getattr(options_smem, name))


class _Step(NamedTuple):
    """A step of the loop over items: it begins an item, if there is one, and loads most of the item's tiles."""

    number: Scalar  # the item's number
    follows: Scalar  # whether an item of the same kind comes before, some of whose tiles may be left
    loaded: Scalar  # tiles of that item which are loaded
    items_before: Scalar  # items of the program before this one
    tiles_before: Scalar  # tiles of this kind before this item
    goes_on: Scalar  # whether the loop has this step


@dataclass(frozen=True)
class _ItemLoader:
    """Loads items of one kind.

    Attributes:
      kind: wide or thin items.
      counts: the counts of the batch.
      unclaimed: the number of items that programs take without a claim: the first item of each program that begins
          with this kind.
      refs: all references.
    """

    kind: ItemKind
    counts: Counts
    unclaimed: Scalar
    refs: Refs

    def take_items(self, first: Scalar, items_before: Scalar) -> Scalar:
        """Takes item `first`, and then further items until none is left; returns the updated `items_before`."""
        start = _Step(first, jnp.bool_(False), jnp.int32(0), items_before, jnp.int32(0), jnp.bool_(True))
        end = lax.while_loop(lambda step: step.goes_on, self._take_item, start)
        # Tiles of the other kind use the same shared memory, but other barriers.
        barriers = self.refs.smem.barriers(self.kind)
        _drain(end.tiles_before, barriers.keys_consumed, barriers.values_consumed, stages=self.kind.stages)
        return end.items_before

    def _take_item(self, step: _Step) -> _Step:
        """Begins an item, if there is one; loads the last tiles of the item before, and this item's first tiles.

        One loop loads the tiles in three parts, and its steps also do the work between the parts. So the kernel
        contains the code that loads tiles only once (benchmarks/LOG.md, "The code between tiles"), except for the
        program's first tiles, which the whole call waits for.

        The second part is this item's first tile. While memory is busy, asking for another one takes longer than the
        products with the first one, and they wait for the query's signal (benchmarks/LOG.md, "The start of a call").
        """
        geometry, items_before = self.kind.geometry, step.items_before
        exists, num_tiles, asked = self._begin_item(step)
        copies_query = not geometry.reads_own_queries

        def load_part(part, state):
            (loaded, item), of_item, of_last = state, part > 0, part == 0
            is_there, own = jnp.where(of_item, exists, step.follows), items_before - of_last.astype(jnp.int32)

            def read():  # without an item, another warp may be writing the first description
                return lax.cond(is_there, lambda: items.read_own(own, self.refs.smem), items.nothing)

            item = lax.cond(part == 2, lambda: item, read)
            tiles_before = step.tiles_before - jnp.where(of_item, 0, item.num_tiles)
            tiles = TileLoader(item, tiles_before, self.kind, self.refs)
            begins = (part == 1) & exists
            if geometry.converts_tiles:
                pl.when(begins)(tiles.begin_raw)
            if copies_query and geometry.tuning.queries == 1:  # the query overwrites results of the item before
                pl.when(begins)(lambda: self._load_query(item, items_before))
            first, begun = lax.min(item.num_tiles, jnp.int32(1)), self._tiles_before_next(item.num_tiles)
            end = jnp.where(of_last, item.num_tiles, jnp.where(part == 1, first, begun))
            pl.when(loaded < end)(lambda: tiles.load_range(loaded, end))
            if copies_query:
                pl.when(begins)(lambda: self._finish_query(items_before))
            return jnp.where(of_item, lax.max(end, loaded), asked), item

        loaded, _ = lax.fori_loop(0, 3, load_part, (step.loaded, items.nothing()))
        return _Step(
            number=lax.cond(exists, lambda: self.number_after(step.number), lambda: step.number),
            follows=exists,
            loaded=loaded,
            items_before=items_before + exists.astype(jnp.int32),
            tiles_before=step.tiles_before + num_tiles,
            goes_on=exists,
        )

    def _tiles_before_next(self, num_tiles: Scalar) -> Scalar:
        """The number of an item's tiles that are loaded before the next item is claimed.

        They are all tiles except the last two. The next query arrives while these two are loaded. An earlier claim
        could take an item that another program would begin sooner. But if there are thin items, too, wide ones are
        claimed early: programs then end their last wide items at different times, and take thin items meanwhile
        (benchmarks/LOG.md, "Late claims"). Before any claim, one tile of the wide item is loaded, or two if they only
        need copies.

        Of a thin item, at least stages + 2 tiles are loaded before the claim, if it has so many. By then, both
        warpgroups that attend to it have begun, so the results of the previous item no longer occupy the shared memory
        of the next query. If each query has several rows, the claim comes as soon as the item's tiles fill all stages:
        own tokens behind a prefix may be few tiles. Then the loading warpgroup may wait for the memory of the next
        query, but it would wait for a stage anyway.
        """
        if self.kind.is_wide:
            early = lax.min(num_tiles, jnp.int32(2 if self.kind.geometry.has_whole_tiles else 1))
            thin_items = count.total(Counted.ITEMS, kinds_of(self.kind.geometry)[1], self.counts)
            return jnp.where(thin_items > 0, early, lax.max(num_tiles - _LAST_TILES, early))
        if self.kind.geometry.merges_copies:
            return lax.max(num_tiles - _LAST_TILES, lax.min(num_tiles, jnp.int32(self.kind.stages)))
        return lax.max(num_tiles - _LAST_TILES, lax.min(num_tiles, jnp.int32(self.kind.stages + 2)))

    def number_after(self, number: Scalar) -> Scalar:
        """The number of the item that the program takes after `number`."""
        return claims.number_after(number, self.unclaimed, self.kind, self.refs)

    def _begin_item(self, step: _Step) -> tuple[Scalar, Scalar, Scalar]:
        """Describes a step's item, if there is one.

        If queries have two stages, it also starts the copy of the item's query. If the item is the first one, it also
        asks for as many tiles as there are stages.

        Returns:
          Whether there is an item, its number of tiles, and how many of them it has asked for.
        """
        exists, none = plan.exists(step.number, self.counts, self.kind), jnp.int32(0)
        return exists, *lax.cond(exists, lambda: self._begin_existing(step), lambda: (none, none))

    def _begin_existing(self, step: _Step) -> tuple[Scalar, Scalar]:
        """Describes a step's item."""
        geometry, smem = self.kind.geometry, self.refs.smem
        item = plan.find(step.number, self.counts, self.refs.inputs_gmem.lengths, self.kind)
        if geometry.problem.block_sparse is None:  # the first tiles' copies wait for their blocks' numbers
            block = lax.div(item.origin, jnp.int32(geometry.problem.block_size))
            ptx_blocks.prefetch(self.refs.inputs_gmem.block_tables, item.seq, block)
        if geometry.reads_own_queries:
            query = rows.QueryRows(plan.query_of(item, geometry), item.num_tokens, item.kv_head)
            rows.prefetch_queries(self.refs.inputs_gmem.query, query, self.kind)
        if geometry.tuning.queries > 1:
            self._load_query(item, step.items_before)
        asked = jnp.int32(0)
        if geometry.has_whole_tiles and geometry.tuning.queries > 1:  # a query that is asked for later arrives later
            tiles = TileLoader(item, jnp.int32(0), self.kind, self.refs)
            asked = jnp.where(step.follows, 0, tiles.num_whole(jnp.int32(self.kind.stages)))
            pl.when(asked > 0)(lambda: tiles.load_first(asked))
        items.describe(item, step.tiles_before, step.items_before, smem)
        return item.num_tiles, asked

    def _load_query(self, item: Item, items_before: Scalar) -> None:
        """Starts the copy of an item's query, 64 rows for each band, once its stage is free."""
        geometry, query = self.kind.geometry, self.refs.smem.query
        stage = items.query_stage(items.stage_of(items_before), geometry)
        pl.when(items_before >= geometry.tuning.queries)(lambda: plgpu.barrier_wait(query.consumed.at[stage]))
        band = jnp.int32(geometry.band_tokens)
        query_gmem, query_smem, token = self.refs.inputs_gmem.query, query.rows, plan.query_of(item, geometry)
        first = rows.QueryRows(token, lax.min(item.num_tokens, band), item.kv_head)
        rows.load_queries(query_gmem, query_smem.at[stage, 0], first, self.kind)
        if self.kind.is_wide:
            for i in range(1, self.kind.bands):
                later = rows.QueryRows(token + i * band, item.num_tokens - i * band, item.kv_head)
                rows.load_queries(query_gmem, query_smem.at[stage, i], later, self.kind)
        elif geometry.divides_queries:  # each warpgroup divides a copy of its own in place
            rows.load_queries(query_gmem, query_smem.at[stage, 1], first, self.kind)

    def _finish_query(self, items_before: Scalar) -> None:
        """Waits for the copy of an item's query, and signals it."""
        rows.finish_copies()
        stage = items.query_stage(items.stage_of(items_before), self.kind.geometry)
        plgpu.barrier_arrive(self.refs.smem.signal(Signal.QUERY, stage))


def _first_number(loader: _ItemLoader, program: Scalar, wide_programs: Scalar, phase: Scalar) -> Scalar:
    """The number of a program's first item of a kind. In phase 0 the program takes its first item without a claim."""
    own = program if loader.kind.is_wide else program - wide_programs
    return lax.cond(phase == 0, lambda: own, lambda: loader.number_after(jnp.int32(-1)))


def _drain(number: Scalar, *consumed, stages: int) -> None:
    """Waits until all stages of a ring are consumed, to which `number` elements have been written."""

    @pl.loop(lax.max(number - stages, jnp.int32(0)), number)
    def wait_for_stage(i):
        for barrier in consumed:
            plgpu.barrier_wait(barrier.at[lax.rem(i, jnp.int32(stages))])
