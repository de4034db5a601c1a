"""What the loading warpgroup does with work items: it claims them, describes them, and loads their queries and tiles.

It is ahead of the computing warpgroups. While the tiles of an item are on their way, it claims the next item and, if
queries have two stages, copies its query. Rings of tiles go on from one item to the next (`load_tiles.py`).
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
from paged_jax.kernels.mosaic_gpu.ragged.refs import ITEM_STAGES, Counts, Refs, Signal

_LAST_TILES = 2  # of a thin item, which are loaded after the next item is begun


def load_items(refs: Refs, geometry: Geometry) -> None:
    """Takes items one after the other, tells the computing warpgroups of each, and copies what it needs.

    Some programs begin with the wide items and the others with the thin ones, so that both are worked on all the time:
    the ones take the matrix units and the others the memory. A program goes over to the other kind when its own items
    are all taken.
    """
    counts = count.count_in_kernel(refs, geometry)
    program, wide_programs = lax.axis_index("program"), counts.wide_programs[0]
    begins_wide, (wide, thin), zero = program < wide_programs, geometry.kinds, jnp.int32(0)

    def take(kind: ItemKind, turn: Scalar, items_before: Scalar) -> Scalar:
        own = wide_programs if kind.is_wide else jnp.int32(geometry.tuning.num_programs) - wide_programs
        loader = _ItemLoader(kind, counts, own, refs)
        return loader.take_items(_first_number(loader, program, wide_programs, turn), items_before)

    def take_either(turn: Scalar, items_before: Scalar) -> Scalar:
        take_wide, take_thin = (functools.partial(take, kind, turn, items_before) for kind in (wide, thin))
        return lax.cond(begins_wide ^ (turn == 1), take_wide, take_thin)

    items_before = lax.fori_loop(0, 2, take_either, zero) if wide.may_exist else take(thin, zero, zero)
    items.describe(items.nothing(), zero, items_before, refs.smem)
    # Barriers end as they began, which the interpreter insists on.
    _drain(items_before + 1, refs.smem.items.consumed, stages=ITEM_STAGES)
    _drain(items_before, refs.smem.query.consumed, stages=geometry.tuning.queries)


class _Taken(NamedTuple):
    """What a turn of the loop over items takes: an item that is begun, or nothing in the turn that begins the first."""

    number: Scalar  # of the item, or of the first one
    is_item: Scalar  # whether it is begun
    goes_on: Scalar  # whether there is such a turn: there is one without an item


@dataclass(frozen=True)
class _ItemLoader:
    """Loads items of one kind.

    Attributes:
      kind: the kind.
      counts: what was counted of the batch.
      unclaimed: how many items programs take without a claim: one each of those programs that begin with this kind.
      refs: all references.
    """

    kind: ItemKind
    counts: Counts
    unclaimed: Scalar
    refs: Refs

    def take_items(self, first: Scalar, items_before: Scalar) -> Scalar:
        """Takes items from the number `first` on, until there are no more; returns how many the program has had.

        The first one is begun behind an item of no tiles, so that the code that begins items is there once.
        """

        def take(state):
            taken, items_before, tiles_before = state
            # A warp that read a description before there is one could read it while another warp writes it.
            item = lax.cond(taken.is_item, lambda: items.read_own(items_before, self.refs.smem), items.nothing)
            next_item = self._load_item(item, items_before, tiles_before, taken)
            return next_item, items_before + taken.is_item.astype(jnp.int32), tiles_before + item.num_tiles

        state = _Taken(first, jnp.bool_(False), jnp.bool_(True)), items_before, jnp.int32(0)
        _, items_before, tiles_before = lax.while_loop(lambda state: state[0].goes_on, take, state)
        barriers = self.refs.smem.barriers(self.kind)
        _drain(tiles_before, barriers.keys_consumed, barriers.values_consumed, stages=self.kind.stages)
        return items_before

    def _load_item(self, item: Item, items_before: Scalar, tiles_before: Scalar, taken: _Taken) -> _Taken:
        """Loads an item's tiles, says between them that its query is there, and begins the next item, if there is one.

        The tiles are loaded in three parts by a loop, whose steps also do what comes between the parts. So the kernel
        has the code that loads tiles once (benchmarks/LOG.md, "The code between tiles").
        """
        tiles = TileLoader(item, tiles_before, self.kind, self.refs)
        if self.kind.geometry.converts_tiles:
            pl.when(taken.is_item)(tiles.begin_raw)
        if self.kind.geometry.tuning.queries == 1:  # the query can only follow the results of the item before
            pl.when(taken.is_item)(lambda: self._load_query(item, items_before))
        first, begun = lax.min(item.num_tiles, jnp.int32(self._first_tiles)), self._tiles_before_next(item.num_tiles)

        def begin_next():
            return self._begin_next(taken, items_before, tiles_before + item.num_tiles)

        def load_part(part, state):
            begin, next_item = state
            end = jnp.where(part == 0, first, jnp.where(part == 1, begun, item.num_tiles))
            pl.when(begin < end)(lambda: tiles.load_range(begin, end))
            pl.when((part == 0) & taken.is_item)(lambda: self._finish_query(items_before))
            next_item = lax.cond(part == 1, begin_next, lambda: next_item)
            return end, next_item

        return lax.fori_loop(0, 3, load_part, (jnp.int32(0), taken))[1]

    def _begin_next(self, taken: _Taken, items_before: Scalar, tiles_before: Scalar) -> _Taken:
        """Begins the item that the program takes next, whose tiles come after so many, if there is such an item."""
        number = lax.cond(taken.is_item, lambda: self.number_after(taken.number), lambda: taken.number)
        exists = self._begin_item(number, items_before + taken.is_item.astype(jnp.int32), tiles_before)
        return _Taken(number, exists, exists)

    def _tiles_before_next(self, num_tiles: Scalar) -> Scalar:
        """How many of an item's tiles are loaded before the next item is begun.

        Of a thin item all but the last two are. In the time of these two the next query comes, and a later claim leaves
        the next item for longer to a program that is done sooner. But at least as many are as fill the ring and two
        stages again: then both warpgroups are at this item, so that the results of the item before have left the
        place of the next query.
        """
        if self.kind.is_wide:
            return lax.min(num_tiles, jnp.int32(self._first_tiles))
        return lax.max(num_tiles - _LAST_TILES, lax.min(num_tiles, jnp.int32(self.kind.stages + 2)))

    def number_after(self, number: Scalar) -> Scalar:
        """The number of the item that a program takes after another one."""
        return claims.number_after(number, self.unclaimed, self.kind, self.refs)

    def _begin_item(self, number: Scalar, items_before: Scalar, tiles_before: Scalar) -> Scalar:
        """Describes the item of a number, if there is such an item; returns whether.

        Where there is a place for it, the item's query is on its way, too.
        """
        geometry, smem = self.kind.geometry, self.refs.smem
        item = plan.find(number, self.counts, self.refs.inputs_gmem.lengths, self.kind)
        exists = item.kind > NO_ITEM

        @pl.when(exists)
        def begin():
            if geometry.tuning.queries > 1:
                self._load_query(item, items_before)
            items.describe(item, tiles_before, items_before, smem)

        return exists

    def _load_query(self, item: Item, items_before: Scalar) -> None:
        """Starts to copy an item's query, 64 rows for each half, once the item that had its place is done."""
        geometry, query = self.kind.geometry, self.refs.smem.query
        stage = items.query_stage(items.stage_of(items_before), geometry)
        pl.when(items_before >= geometry.tuning.queries)(lambda: plgpu.barrier_wait(query.consumed.at[stage]))
        half = jnp.int32(geometry.half_tokens)
        query_gmem, query_smem = self.refs.inputs_gmem.query, query.rows
        first = rows.QueryRows(item.first_token, lax.min(item.num_tokens, half), item.kv_head)
        rows.load_queries(query_gmem, query_smem.at[stage, 0], first, self.kind)
        if self.kind.is_wide:
            second = rows.QueryRows(item.first_token + half, item.num_tokens - half, item.kv_head)
            rows.load_queries(query_gmem, query_smem.at[stage, 1], second, self.kind)
        elif geometry.divides_queries:  # each warpgroup has a copy, which it divides in place
            rows.load_queries(query_gmem, query_smem.at[stage, 1], first, self.kind)

    @property
    def _first_tiles(self) -> int:
        """Tiles of an item that are on their way before the next item is claimed.

        Where the warpgroup has work with a tile, a conversion for example, the query does not wait for a second one.
        """
        return 2 if self.kind.geometry.has_whole_tiles else 1

    def _finish_query(self, items_before: Scalar) -> None:
        """Waits for an item's query, which was on its way before, and says that it is there."""
        rows.finish_copies()
        stage = items.query_stage(items.stage_of(items_before), self.kind.geometry)
        plgpu.barrier_arrive(self.refs.smem.signal(Signal.QUERY, stage))


def _first_number(loader: _ItemLoader, program: Scalar, wide_programs: Scalar, turn: Scalar) -> Scalar:
    """The number of the first item of a kind that a program takes, in its first turn without a claim."""
    own = program if loader.kind.is_wide else program - wide_programs
    return lax.cond(turn == 0, lambda: own, lambda: loader.number_after(jnp.int32(-1)))


def _drain(number: Scalar, *consumed, stages: int) -> None:
    """Waits until all that came into a ring is consumed: what follows may be for other readers."""

    @pl.loop(lax.max(number - stages, jnp.int32(0)), number)
    def wait_for_stage(i):
        for barrier in consumed:
            plgpu.barrier_wait(barrier.at[lax.rem(i, jnp.int32(stages))])
