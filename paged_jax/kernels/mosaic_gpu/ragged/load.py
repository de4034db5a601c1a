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
from paged_jax.kernels.mosaic_gpu.ragged.geometry import NO_ITEM, Geometry, ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.load_tiles import TileLoader
from paged_jax.kernels.mosaic_gpu.ragged.plan import Item
from paged_jax.kernels.mosaic_gpu.ragged.ptx import items as claims
from paged_jax.kernels.mosaic_gpu.ragged.ptx import rows
from paged_jax.kernels.mosaic_gpu.ragged.refs import (
    ITEM_STAGES,
    Counts,
    Refs,
    Signal,
    factor_sizes,
    with_factors_in_smem,
)

_LAST_TILES = 2  # tiles of a thin item that are loaded after the next item is claimed


def load_items(refs: Refs, geometry: Geometry) -> None:
    """Takes one item after the other, describes it to the computing warpgroups, and copies its query and tiles.

    Some programs begin with wide items and the others with thin ones, so that matrix units and memory are busy all the
    time. In phase 0 a program takes items of the kind it begins with until none is left; in phase 1 the other kind.
    """
    _copy_factors(refs, geometry)
    counts = count.count_in_kernel(refs, geometry)
    rows.finish_copies()
    program, wide_programs = lax.axis_index("program"), counts.wide_programs[0]
    begins_wide, (wide, thin), zero = program < wide_programs, geometry.kinds, jnp.int32(0)

    def take(kind: ItemKind, phase: Scalar, items_before: Scalar) -> Scalar:
        own = wide_programs if kind.is_wide else jnp.int32(geometry.tuning.num_programs) - wide_programs
        loader = _ItemLoader(kind, counts, own, refs)
        return loader.take_items(_first_number(loader, program, wide_programs, phase), items_before)

    def take_either(phase: Scalar, items_before: Scalar) -> Scalar:
        take_wide, take_thin = (functools.partial(take, kind, phase, items_before) for kind in (wide, thin))
        return lax.cond(begins_wide ^ (phase == 1), take_wide, take_thin)

    items_before = lax.fori_loop(0, 2, take_either, zero) if wide.may_exist else take(thin, zero, zero)
    items.describe(items.nothing(), zero, items_before, refs.smem)
    # Each barrier must end as it began; the interpreter checks that.
    _drain(items_before + 1, refs.smem.items.consumed, stages=ITEM_STAGES)
    if not geometry.reads_own_queries:
        _drain(items_before, refs.smem.query.consumed, stages=geometry.tuning.queries)


def _copy_factors(refs: Refs, geometry: Geometry) -> None:
    """Starts the copies of the call's factors. Computing warpgroups see them with the first item's description."""
    options_gmem, options_smem = (r.inputs_gmem.options for r in (refs, with_factors_in_smem(refs, geometry)))
    for name in factor_sizes(geometry):
        rows.copy_words(getattr(options_gmem, name), getattr(options_smem, name))


class _Taken(NamedTuple):
    """The item that a step of the loop loads. The first step loads no item; it only begins the first one."""

    number: Scalar  # the number of the step's item; in the first step, of the program's first item
    is_item: Scalar  # whether the step has an item to load
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
        """Takes item `first`, and then further items until none is left; returns the updated `items_before`.

        The loop starts with an item without tiles, so that its body is the only code that begins items.
        """

        def take(state):
            taken, items_before, tiles_before = state
            # Without an item there is nothing to read, and another warp may be writing the first description.
            item = lax.cond(taken.is_item, lambda: items.read_own(items_before, self.refs.smem), items.nothing)
            next_item = self._load_item(item, items_before, tiles_before, taken)
            return next_item, items_before + taken.is_item.astype(jnp.int32), tiles_before + item.num_tiles

        state = _Taken(first, jnp.bool_(False), jnp.bool_(True)), items_before, jnp.int32(0)
        _, items_before, tiles_before = lax.while_loop(lambda state: state[0].goes_on, take, state)
        # Tiles of the other kind use the same shared memory, but other barriers.
        barriers = self.refs.smem.barriers(self.kind)
        _drain(tiles_before, barriers.keys_consumed, barriers.values_consumed, stages=self.kind.stages)
        return items_before

    def _load_item(self, item: Item, items_before: Scalar, tiles_before: Scalar, taken: _Taken) -> _Taken:
        """Loads an item's tiles. In between, signals the item's query, and begins the next item if there is one.

        One loop loads the tiles in three parts, and its steps also do the work between the parts. So the kernel
        contains the code that loads tiles only once (benchmarks/LOG.md, "The code between tiles").

        The first part is one tile. While memory is busy, asking for a second one takes longer than the products with
        the first one, and they wait for the query's signal (benchmarks/LOG.md, "The start of a call").
        """
        tiles = TileLoader(item, tiles_before, self.kind, self.refs)
        if self.kind.geometry.converts_tiles:
            pl.when(taken.is_item)(tiles.begin_raw)
        copies_query = not self.kind.geometry.reads_own_queries
        if copies_query and self.kind.geometry.tuning.queries == 1:  # the query overwrites results of the item before
            pl.when(taken.is_item)(lambda: self._load_query(item, items_before))
        first, begun = lax.min(item.num_tiles, jnp.int32(1)), self._tiles_before_next(item.num_tiles)

        def begin_next():
            return self._begin_next(taken, items_before, tiles_before + item.num_tiles)

        def load_part(part, state):
            begin, next_item = state
            end = jnp.where(part == 0, first, jnp.where(part == 1, begun, item.num_tiles))
            pl.when(begin < end)(lambda: tiles.load_range(begin, end))
            if copies_query:
                pl.when((part == 0) & taken.is_item)(lambda: self._finish_query(items_before))
            next_item = lax.cond(part == 1, begin_next, lambda: next_item)
            return end, next_item

        return lax.fori_loop(0, 3, load_part, (jnp.int32(0), taken))[1]

    def _begin_next(self, taken: _Taken, items_before: Scalar, tiles_before: Scalar) -> _Taken:
        """Begins the program's next item, if there is one, after `tiles_before` tiles."""
        number = lax.cond(taken.is_item, lambda: self.number_after(taken.number), lambda: taken.number)
        exists = self._begin_item(number, items_before + taken.is_item.astype(jnp.int32), tiles_before)
        return _Taken(number, exists, exists)

    def _tiles_before_next(self, num_tiles: Scalar) -> Scalar:
        """The number of an item's tiles that are loaded before the next item is claimed.

        For a thin item, they are all tiles except the last two. The next query arrives while these two are loaded. An
        earlier claim could take an item that another program would begin sooner. But at least stages + 2 tiles are
        loaded before the claim, if the item has so many. By then, both warpgroups have begun this item, so the results
        of the previous item no longer occupy the shared memory of the next query. If each query has several rows, the
        claim comes as soon as the item's tiles fill all stages: own tokens behind a prefix may be few tiles. Then the
        loading warpgroup may wait for the memory of the next query, but it would wait for a stage anyway.
        """
        if self.kind.is_wide:
            return lax.min(num_tiles, jnp.int32(2 if self.kind.geometry.has_whole_tiles else 1))
        if self.kind.geometry.merges_copies:
            return lax.max(num_tiles - _LAST_TILES, lax.min(num_tiles, jnp.int32(self.kind.stages)))
        return lax.max(num_tiles - _LAST_TILES, lax.min(num_tiles, jnp.int32(self.kind.stages + 2)))

    def number_after(self, number: Scalar) -> Scalar:
        """The number of the item that the program takes after `number`."""
        return claims.number_after(number, self.unclaimed, self.kind, self.refs)

    def _begin_item(self, number: Scalar, items_before: Scalar, tiles_before: Scalar) -> Scalar:
        """Describes item `number`, if there is such an item, and returns whether there is.

        If queries have two stages, it also starts the copy of the item's query.
        """
        geometry, smem = self.kind.geometry, self.refs.smem
        item = plan.find(number, self.counts, self.refs.inputs_gmem.lengths, self.kind)
        exists = item.kind > NO_ITEM

        @pl.when(exists)
        def begin():
            if geometry.problem.block_sparse is None:  # the first tiles' copies wait for their blocks' numbers
                block = lax.div(item.origin, jnp.int32(geometry.problem.block_size))
                claims.prefetch_block(self.refs.inputs_gmem.block_tables, item.seq, block)
            if geometry.reads_own_queries:
                query = rows.QueryRows(plan.query_of(item, geometry), item.num_tokens, item.kv_head)
                rows.prefetch_queries(self.refs.inputs_gmem.query, query, self.kind)
            if geometry.tuning.queries > 1:
                self._load_query(item, items_before)
            items.describe(item, tiles_before, items_before, smem)

        return exists

    def _load_query(self, item: Item, items_before: Scalar) -> None:
        """Starts the copy of an item's query, 64 rows for each half, once its stage is free."""
        geometry, query = self.kind.geometry, self.refs.smem.query
        stage = items.query_stage(items.stage_of(items_before), geometry)
        pl.when(items_before >= geometry.tuning.queries)(lambda: plgpu.barrier_wait(query.consumed.at[stage]))
        half = jnp.int32(geometry.half_tokens)
        query_gmem, query_smem, token = self.refs.inputs_gmem.query, query.rows, plan.query_of(item, geometry)
        first = rows.QueryRows(token, lax.min(item.num_tokens, half), item.kv_head)
        rows.load_queries(query_gmem, query_smem.at[stage, 0], first, self.kind)
        if self.kind.is_wide:
            second = rows.QueryRows(token + half, item.num_tokens - half, item.kv_head)
            rows.load_queries(query_gmem, query_smem.at[stage, 1], second, self.kind)
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
