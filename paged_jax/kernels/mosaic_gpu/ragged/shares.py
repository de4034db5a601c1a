"""Chooses how costly the splits of a batch are, and how many programs begin with wide items, from its total work."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_least, at_most
from paged_jax.kernels.mosaic_gpu.ragged.arithmetic import reciprocal, truncated
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind, kinds_of, kinds_there
from paged_jax.kernels.mosaic_gpu.ragged.sequence import Sequence, most_tiles, query_tiles, splits_of

# Fitted to timings: LOG, "The longest first".
_LEFT_COST = 2.3  # thin items that are left to the end take so many times their cost, because all programs read at once
_LAST_COST = 25  # is added to that: the ends of wide items, and the beginning and the end of a thin one
_MANY_WAVES = 4  # with so many, fewer programs may begin with wide items
_LEAST_PART = 0.8  # but no fewer than this part of their programs
_ROUNDS_UP = 0.995  # added before a quotient of integers is truncated
_MOST_ITEMS = 1 << 22  # of one sequence, when shares are compared: sums over sequences must not overflow


class Totals(NamedTuple):
    """Total cost of all wide items, and of all thin items."""

    wide: Any
    thin: Any

    @classmethod
    def of(cls, costs: list) -> "Totals":
        """Makes totals of the costs of `kinds_there`."""
        *wide, thin = costs
        return cls(wide[0] if wide else jnp.float32(0), thin)


class Shares(NamedTuple):
    """Target cost of a wide split, and of a thin split."""

    wide: Any
    thin: Any

    def of(self, kind: ItemKind) -> Any:
        """Target cost of a split of this kind."""
        return self.wide if kind.is_wide else self.thin


class _Candidate(NamedTuple):
    """A target cost of a split."""

    kind: ItemKind
    cost: Any
    item_cost: int  # of an item beside its tiles, when candidates are compared


class Lanes(NamedTuple):
    """How `shares_of` computes candidates side by side: in an array by XLA, in the lanes of each warp in a kernel."""

    sum_up: Callable[[list[Callable[[Sequence], Array]]], Array]  # each function's sum over all sequences in a lane
    spread: Callable[[list], Array]  # one value in each lane
    collect: Callable[[Array, int], list]  # the values of the first lanes
    vote: Callable[[Array], Scalar]  # an integer with a bit for each lane


def shares_of(totals: Totals, lanes: Lanes, geometry: Geometry) -> tuple[Shares, Any, Any]:
    """Computes target costs of splits: about total work / programs, or less or more if the sequences are ordered.

    Of the candidates in `ItemKind.shares`, the one wins with which the items of a kind take the least time. If all of
    them took equally long, programs would take ceil(items / programs) waves.

    Also returns whether all items that see a tile are known to begin at once, one in each program, and
    `Counts.wide_programs`. Thin splits are compared with the programs they have before a wave of wide items is saved.
    """
    wide_programs = _wide_programs(totals, geometry)
    share = (totals.wide + totals.thin) * (1 / geometry.tuning.num_programs) + 1
    candidates = [
        _Candidate(kind, _target(_part_of(share, part, least), totals, kind), item_cost)
        for kind in kinds_there(geometry)
        for part, least, item_cost in zip(kind.shares, kind.least_of_shares, kind.item_costs, strict=True)
    ]
    if not geometry.orders_sequences:
        costs = {candidate.kind: candidate.cost for candidate in candidates}
        return Shares(*[costs.get(kind, share) for kind in kinds_of(geometry)]), False, wide_programs

    def by_kind(wide: Any, thin: Any) -> Array:
        return lanes.spread([wide if candidate.kind.is_wide else thin for candidate in candidates])

    numbers = lanes.sum_up([functools.partial(_items, of=x) for x in candidates])
    if kinds_of(geometry)[0].may_exist and not geometry.converts_tiles:
        wide_programs = _fewer_of_many(wide_programs, lanes.collect(numbers, 1)[0], geometry)
    of_kinds = wide_programs, geometry.tuning.num_programs - wide_programs
    wide, thin = (at_least(x, 1).astype(jnp.float32) for x in of_kinds)
    programs, saved, begin_wide = by_kind(wide, thin), jnp.int32(0), []
    items = lax.max(numbers, jnp.ones_like(numbers))
    waves = _waves(items, programs, geometry)
    of_item = by_kind(*totals) * reciprocal(items, geometry)  # of equal items
    if kinds_of(geometry)[0].may_exist:
        most = by_kind(jnp.float32(geometry.tuning.num_programs - 1), jnp.float32(0))
        saves, more = _saved_wave(waves, of_item, items, most, totals, geometry)
        programs, waves = jnp.where(saves, more, programs), jnp.where(saves, waves - 1, waves)
        saved = lanes.vote(saves.astype(jnp.int32))  # bit i tells it of candidate i, also below
        begin_wide = lanes.collect(programs, sum(candidate.kind.is_wide for candidate in candidates))
    item_costs = lanes.spread([jnp.float32(candidate.item_cost) for candidate in candidates])
    times = lanes.collect(waves * (of_item + item_costs), len(candidates))
    fits = lanes.vote((numbers <= programs).astype(jnp.int32))
    chosen, begin_at_once = {}, True
    for kind in kinds_there(geometry):
        (best, cost, least), *others = [(i, x.cost, times[i]) for i, x in enumerate(candidates) if x.kind == kind]
        for i, other, time in others:
            is_less = time < least
            best, cost, least = jnp.where(is_less, i, best), jnp.where(is_less, other, cost), lax.min(time, least)
        chosen[kind], begin_at_once = cost, begin_at_once & ((fits >> best) & 1 == 1)
        for i, of_candidate in enumerate(begin_wide if kind.is_wide else []):  # wide candidates are the first ones
            is_saved = (best == i) & ((saved >> i) & 1 == 1)
            wide_programs = jnp.where(is_saved, truncated(of_candidate, geometry), wide_programs)
            begin_at_once &= ~is_saved  # fewer programs than `fits` knows begin with thin items
    return Shares(*[chosen.get(kind, share) for kind in kinds_of(geometry)]), begin_at_once, wide_programs


def _wide_programs(totals: Totals, geometry: Geometry) -> Any:
    """Computes `Counts.wide_programs`."""
    if not kinds_of(geometry)[0].may_exist:
        return jnp.int32(0)
    (wide, thin), programs = totals, geometry.tuning.num_programs
    part = wide * reciprocal(lax.max(wide + thin, jnp.float32(1)), geometry)
    wide_programs = truncated(part * programs + 0.5, geometry)
    wide_programs = lax.max(wide_programs, (wide > 0).astype(jnp.int32))
    return jnp.where(thin > 0, lax.min(wide_programs, jnp.int32(programs - 1)), programs)


def _items(sequences: Sequence, of: _Candidate) -> Array:
    """Counts the items of a kind that see a tile, in each sequence, if a split costs about as much as the candidate."""
    unsplit = query_tiles(sequences, of.kind) * of.kind.geometry.problem.num_kv_heads
    unsplit = jnp.where(most_tiles(sequences, of.kind) > 0, unsplit, 0)
    return at_most(unsplit * splits_of(sequences, of.cost, of.kind), _MOST_ITEMS)


def _part_of(share: Any, part: float, least: int) -> Any:
    """A part of a share; if it costs less than `least`, the whole share, which is an earlier candidate."""
    return share * part if least == 0 else jnp.where(share * part >= least, share * part, share)


def _target(share: Any, totals: Totals, kind: ItemKind) -> Any:
    """The target cost of a split, if `share` is the candidate without wide items."""
    target = lax.max(share, jnp.float32(kind.least_split))
    if kind.beside_wide is None:
        return target
    of_all, of_thin = (part / kind.geometry.tuning.num_programs for part in kind.beside_wide)
    beside_wide = lax.max((totals.wide + totals.thin) * of_all, totals.thin * of_thin)
    beside_wide = lax.min(target, lax.max(beside_wide, jnp.float32(kind.least_beside_wide)))
    return jnp.where(totals.wide > 0, beside_wide, target)


def _fewer_of_many(wide_programs: Any, items: Any, geometry: Geometry) -> Any:
    """Lets fewer programs begin with wide items, if these are many and about half of the work.

    Early query tiles of a prompt cost less than its last one, and thin items take longer than their cost if memory is
    busy. Half of the programs keep it busy. Few wide items keep their part of the programs, which may be one wave; many
    fill as many programs as take whole waves. With a fifth fewer programs, wide items would end last. Over 8 bits,
    conversions bound thin items, and memory is less busy.
    """
    programs, wide = geometry.tuning.num_programs, wide_programs.astype(jnp.float32)
    # From three quarters of the programs on, these are no fewer.
    fewer = lax.max(wide * (7 / 3) - programs, jnp.float32(programs / 2))
    waves = truncated(items * reciprocal(fewer, geometry) + 0.5, geometry).astype(jnp.float32)
    whole = _waves(items, lax.max(waves, jnp.float32(1)), geometry)
    may_differ = (fewer < wide) & (items >= wide * _MANY_WAVES) & (whole >= wide * _LEAST_PART)
    return jnp.where(may_differ, truncated(lax.min(whole, wide), geometry), wide_programs)


def _saved_wave(
    waves: Array, of_item: Array, items: Array, most: Array, totals: Totals, geometry: Geometry
) -> tuple[Array, Array]:
    """Whether more programs than by its part of the work begin with a candidate's items, to save a wave; and how many.

    Most thin items then wait until wide ones have ended. So a wave is saved only if a mean wide item (`of_item`) costs
    more than all thin items do when all programs share them at the end. Two constants allow for what the means leave
    out: a last wave has the shortest wide items, and a program takes a thin item as a whole. No more than `most`
    programs may begin with items of a candidate.
    """
    fewer_waves = waves - 1
    more = _waves(items, lax.max(fewer_waves, jnp.ones_like(waves)), geometry)
    left = totals.thin * (_LEFT_COST / geometry.tuning.num_programs) + _LAST_COST
    return (of_item > left) & (more <= most) & (fewer_waves >= 1), more


def _waves(items: Any, programs: Any, geometry: Geometry) -> Any:
    """The waves of programs that so many items take."""
    return truncated(items * reciprocal(programs, geometry) + _ROUNDS_UP, geometry).astype(jnp.float32)
