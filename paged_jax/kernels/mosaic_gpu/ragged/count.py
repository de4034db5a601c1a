"""Counts a batch's work: items and partial results of each sequence.

Programs claim items in an order of the sequences. If only the first 128 sequences have queries, they are sorted: those
with the costliest items come first. Then the last items are short, and all programs end at about the same time
(benchmarks/LOG.md, "The longest first"). More sequences keep their order, because even the longest is short compared
with the work of a program. So do sequences whose items all begin at once.

Only the device knows the lengths. For up to 510 sequences, the loading warpgroup of each program counts the whole
batch; each of its threads counts one sequence at a time. XLA's kernels would take 5 us (benchmarks/LOG.md, "Counting
and order"). No program loads anything before it has counted, so each instruction of the count delays the whole call
(benchmarks/LOG.md, "The start of a call"). If there is a merge kernel, one program stores the counts for it. For more
sequences, XLA counts before the kernel.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_least, at_most
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP
from paged_jax.kernels.mosaic_gpu.ragged.arithmetic import quotient, reciprocal, truncated
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind, kinds_of, kinds_there
from paged_jax.kernels.mosaic_gpu.ragged.ptx import scan, warps
from paged_jax.kernels.mosaic_gpu.ragged.refs import Counted, Counts, Refs
from paged_jax.kernels.mosaic_gpu.ragged.sequence import Sequence, most_tiles, query_tiles, splits_of

_ITEM_COST = 2  # the cost of an item beside the cost of its tiles
_MORE = 2  # so many more programs than their part may begin with wide items, if that saves a wave
_FEW_THIN = 1 / 16  # and if at most this part of the programs would begin with thin items
_MANY_WAVES = 4  # with so many, fewer programs may begin with wide items
_LEAST_FEWER = 0.8  # but no fewer than this part of their programs
_FEW_WAVES = 8  # of more waves than that, one less saves little
_ROUNDS_UP = 0.995  # added before a quotient of integers is truncated
_MOST_ITEMS = 1 << 22  # of one sequence, when shares are compared: sums over sequences must not overflow


class _Totals(NamedTuple):
    """Total cost of all wide items, and of all thin items."""

    wide: Any
    thin: Any

    @classmethod
    def of(cls, costs: list) -> "_Totals":
        """Makes totals of the costs of `kinds_there`."""
        *wide, thin = costs
        return cls(wide[0] if wide else jnp.float32(0), thin)


class _Shares(NamedTuple):
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


class _Lanes(NamedTuple):
    """How `_shares` computes its candidates side by side: in an array by XLA, in the lanes of each warp in a kernel."""

    sum_up: Callable[[list[Callable[[Sequence], Array]]], Array]  # each function's sum over all sequences in a lane
    spread: Callable[[list], Array]  # one value in each lane
    collect: Callable[[Array, int], list]  # the values of the first lanes
    vote: Callable[[Array], Scalar]  # an integer with a bit for each lane


def count_before_kernel(query_start_loc: Array, seq_lens: Array, geometry: Geometry) -> Counts:
    """Counts the work in XLA, unless the kernel counts it."""
    if geometry.tuning.counts_in_kernel:
        return Counts(*[jnp.zeros((1,), jnp.int32)] * len(Counts._fields))
    ends = jnp.append(query_start_loc[1:], query_start_loc[-1])
    sequences = Sequence(query_start_loc, jnp.maximum(ends - query_start_loc, 0), jnp.append(seq_lens, 0))

    totals = _Totals.of([costs(sequences, kind).sum().astype(jnp.float32) for kind in kinds_there(geometry)])
    may_order = (sequences.query_len[WARPGROUP:] == 0).all()
    lanes = _Lanes(
        sum_up=lambda of_sequences: jnp.stack([of(sequences).sum() for of in of_sequences]).astype(jnp.float32),
        spread=lambda values: jnp.stack([jnp.float32(x) for x in values]),
        collect=lambda values, count: list(values[:count]),
        vote=lambda x: (x << jnp.arange(len(x))).sum(),
    )
    shares, begin_at_once, wide_programs = _shares(totals, may_order, lanes, geometry)
    order = jnp.zeros((1,), jnp.int32)
    if geometry.orders_sequences:
        keeps_order = begin_at_once | ~may_order
        order = jnp.argsort(jnp.where(keeps_order, 0, -_most_cost(sequences, shares, geometry)), stable=True)
        sequences = Sequence(*(x[order] for x in sequences))
    counts = _counts(sequences, shares, geometry)
    none = jnp.zeros_like(sequences.first_token)
    table = jnp.stack([counts.get(row, none) for row in range(2 * len(Counted))])
    is_summed = jnp.arange(len(table))[:, None] % len(Counted) != Counted.SPLITS
    table = jnp.where(is_summed, _sums_before(table), jnp.pad(table, ((0, 0), (0, 1))))
    counts = Counts(table, order, wide_programs[None])
    return counts._replace(wide_programs=_wide_at_once(counts, geometry)[None]) if geometry.merges_copies else counts


def count_in_kernel(refs: Refs, geometry: Geometry) -> Counts:
    """Counts the work in shared memory, unless XLA has counted it."""
    if not geometry.tuning.counts_in_kernel:
        return refs.inputs_gmem.counts
    smem, kinds = refs.smem, kinds_there(geometry)
    parts = range(0, geometry.count_columns, WARPGROUP)
    first, *others = [sequences_of(scan.iota() + part, refs, geometry) for part in parts]
    sums = [_over_parts(functools.partial(costs, kind=kind), [first, *others]) for kind in kinds]
    if others:
        sums.append(_over_parts(lambda part: (part.query_len > 0).astype(jnp.int32), others))
    sums = scan.totals(dict(enumerate(sums)), smem.counted)
    totals, may_order = _Totals.of(sums[: len(kinds)]), sums[-1] == 0 if others else True

    def sum_up(of_sequences):
        own = [of(first) for of in of_sequences]
        if others:  # engines pad batches to many sequences, so most often only the first ones have queries
            none, all_others = lambda: [x * 0 for x in own], lambda: [_over_parts(of, others) for of in of_sequences]
            own = [x + more for x, more in zip(own, lax.cond(may_order, none, all_others), strict=True)]
        return warps.totals_in_lanes(own, smem.counted, len(kinds) + 1)

    lanes = _Lanes(sum_up, warps.in_lanes, warps.of_lanes, warps.votes)
    shares, begin_at_once, wide_programs = _shares(totals, may_order, lanes, geometry)
    counts = _counts(first, shares, geometry)
    if geometry.orders_sequences:
        keeps_order = begin_at_once | ~may_order if others else begin_at_once
        counts = _ordered(first, counts, shares, keeps_order, refs, geometry)
    else:
        scan.store(_only(counts, Counted.SPLITS), smem.table, 0)
    summed = Counted.ITEMS, Counted.PARTIALS
    packs = all(kind.most_numbered < 1 << 16 for kind in kinds)
    scan.sums_before(_only(counts, *summed), smem.table, 0, packs)
    if others:
        pl.when(may_order)(lambda: scan.extend(list(_only(counts, *summed)), smem.table))

        @pl.when(~may_order)
        def sum_up_others():
            for part, sequences in enumerate(others, 1):
                columns = _counts(sequences, shares, geometry)
                scan.store(_only(columns, Counted.SPLITS), smem.table, part * WARPGROUP)
                scan.sums_before(_only(columns, *summed), smem.table, part * WARPGROUP, packs)

    found = Counts(smem.table, smem.order, smem.wide_programs)
    if geometry.merges_copies:
        wide_programs = _wide_at_once(found, geometry)
    smem.wide_programs[0] = wide_programs
    if geometry.merges_copies:

        @pl.when(lax.axis_index("program") == geometry.tuning.num_programs - 1)
        def leave_counts():
            scan.copy_columns(smem.table, refs.outputs_gmem.counts.table, geometry.count_columns)

    return found


def _ordered(
    sequences: Sequence, counts: dict[int, Array], shares: _Shares, keeps_order: Any, refs: Refs, geometry: Geometry
) -> dict[int, Array]:
    """Moves the counts of each of the first 128 sequences to the thread at its place in the order."""
    smem = refs.smem

    def keep():
        scan.keep(counts, smem.table, smem.order)
        return list(counts.values())

    def order():
        used = scan.used(len(kinds_there(geometry)), smem.counted)
        places = scan.places_largest_first(_most_cost(sequences, shares, geometry), smem.ordered_by, used)
        return scan.moved(counts, places, smem.table, smem.order)

    return dict(zip(counts, lax.cond(keeps_order, keep, order), strict=True))


def total(what: Counted, kind: ItemKind, counts: Counts) -> Scalar:
    """Sums a count of this kind over all sequences."""
    return before(what, jnp.int32(kind.geometry.problem.num_seqs + 1), kind, counts)


def sequence_at(ordinal: Scalar, counts: Counts, geometry: Geometry) -> Scalar:
    """The index of the sequence at position `ordinal` of the order."""
    if not geometry.orders_sequences:
        return ordinal
    first = counts.order[lax.min(ordinal, jnp.int32(WARPGROUP - 1))]
    return first if geometry.count_columns == WARPGROUP else jnp.where(ordinal < WARPGROUP, first, ordinal)


def before(what: Counted, ordinal: Scalar, kind: ItemKind, counts: Counts) -> Scalar:
    """Sums a count of this kind over the sequences before position `ordinal` of the order.

    `Counted.SPLITS` is not summed: it is the count of the sequence at that position.
    """
    return counts.table[_row(what, kind), ordinal]


def num_splits(ordinal: Scalar, kind: ItemKind, counts: Counts) -> Scalar:
    """The number of splits of each item of the sequence at position `ordinal` of the order."""
    return at_least(before(Counted.SPLITS, ordinal, kind, counts), 1) if kind.may_split else jnp.int32(1)


def search(number: Scalar, kind: ItemKind, counts: Counts) -> Scalar:
    """Finds the sequence of item `number`.

    Returns the sequence's position in the order, or num_seqs + 1 if there is no such item.
    """
    num_seqs = kind.geometry.problem.num_seqs
    if kind.geometry.tuning.counts_in_kernel:
        return scan.number_at_most(counts.table, _row(Counted.ITEMS, kind), num_seqs + 1, number)
    ordinal = jnp.int32(0)  # the last position whose items are known to begin at or before `number`
    step = 1 << (num_seqs + 1).bit_length()
    while step := step // 2:
        further = lax.min(ordinal + step, jnp.int32(num_seqs + 1))
        ordinal = jnp.where(before(Counted.ITEMS, further, kind, counts) <= number, further, ordinal)
    return ordinal


def costs(sequences: Sequence, kind: ItemKind) -> Array:
    """The cost of all of a sequence's items of this kind, for each sequence."""
    of_item = kind.tile_cost * most_tiles(sequences, kind) + _ITEM_COST
    items = query_tiles(sequences, kind) * kind.geometry.problem.num_kv_heads
    most_cost = kind.tile_cost * (kind.geometry.problem.max_seq_len // kind.tile + 2) + _ITEM_COST
    if kind.most_unsplit * most_cost < 1 << 31:
        return items * of_item  # a warp adds up integers in one instruction
    return items.astype(jnp.float32) * of_item.astype(jnp.float32)


def _wide_programs(totals: _Totals, geometry: Geometry) -> Any:
    """Computes `Counts.wide_programs`."""
    if not kinds_of(geometry)[0].may_exist:
        return jnp.int32(0)
    (wide, thin), programs = totals, geometry.tuning.num_programs
    part = wide * reciprocal(lax.max(wide + thin, jnp.float32(1)), geometry)
    wide_programs = truncated(part * programs + 0.5, geometry)
    wide_programs = lax.max(wide_programs, (wide > 0).astype(jnp.int32))
    return jnp.where(thin > 0, lax.min(wide_programs, jnp.int32(programs - 1)), programs)


def _wide_at_once(counts: Counts, geometry: Geometry) -> Any:
    """Computes `Counts.wide_programs` if each query has several rows: all wide items begin at once.

    A shared prefix is few wide items, which are long. If one of them began late, it would end last.
    """
    wide, thin = kinds_of(geometry)
    if not wide.may_exist:
        return jnp.int32(0)
    for_thin = (total(Counted.ITEMS, thin, counts) > 0).astype(jnp.int32)
    return lax.min(total(Counted.ITEMS, wide, counts), geometry.tuning.num_programs - for_thin)


def _over_parts(count: Callable[[Sequence], Array], parts: list[Sequence]) -> Array:
    """Sums a count over the parts of the batch, for each thread."""
    return functools.reduce(jnp.add, [count(part) for part in parts])


def _items(sequences: Sequence, of: _Candidate) -> Array:
    """Counts the items of a kind that see a tile, in each sequence, if a split costs about as much as the candidate."""
    unsplit = query_tiles(sequences, of.kind) * of.kind.geometry.problem.num_kv_heads
    unsplit = jnp.where(most_tiles(sequences, of.kind) > 0, unsplit, 0)
    return at_most(unsplit * splits_of(sequences, of.cost, of.kind), _MOST_ITEMS)


def _shares(totals: _Totals, may_order: Any, lanes: _Lanes, geometry: Geometry) -> tuple[_Shares, Any, Any]:
    """Computes target costs of splits: about total work / programs, or less if the sequences may be ordered.

    Of the candidates in `ItemKind.shares`, the one wins with which the items of a kind take the least time. If all of
    them took equally long, programs would take ceil(items / programs) waves.

    Also returns whether all items that see a tile begin at once, one in each program, and `Counts.wide_programs`.
    """
    wide_programs = _wide_programs(totals, geometry)
    share = (totals.wide + totals.thin) * (1 / geometry.tuning.num_programs) + 1
    candidates = [
        _Candidate(kind, _target(share * part, totals, kind)) for kind in kinds_there(geometry) for part in kind.shares
    ]
    if not geometry.orders_sequences:
        costs = {candidate.kind: candidate.cost for candidate in candidates}
        return _Shares(*[costs.get(kind, share) for kind in kinds_of(geometry)]), False, wide_programs

    def by_kind(wide: Any, thin: Any) -> Array:
        return lanes.spread([wide if kind.is_wide else thin for kind, _ in candidates])

    numbers = lanes.sum_up([functools.partial(_items, of=x) for x in candidates])
    if kinds_of(geometry)[0].may_exist and not geometry.converts_tiles:
        wide_programs = _fewer_of_many(wide_programs, lanes.collect(numbers, 1)[0], geometry)
    of_kinds = wide_programs, geometry.tuning.num_programs - wide_programs
    wide, thin = (at_least(x, 1).astype(jnp.float32) for x in of_kinds)
    programs, saved = by_kind(wide, thin), jnp.int32(0)
    items = lax.max(numbers, jnp.ones_like(numbers))
    waves = _waves(items, programs, geometry)
    if kinds_of(geometry)[0].may_exist:
        more = by_kind(jnp.where(_may_be_more(thin, geometry), wide + _MORE, wide), thin)
        fewer_waves = _waves(items, more, geometry)
        saves = (fewer_waves < waves) & (fewer_waves <= _FEW_WAVES)
        programs, waves = jnp.where(saves, more, programs), jnp.where(saves, fewer_waves, waves)
        saved = lanes.vote(saves.astype(jnp.int32))  # bit i tells it of candidate i, also below
    item_costs = by_kind(*[jnp.float32(kind.item_cost) for kind in kinds_of(geometry)])
    times = waves * (by_kind(*totals) * reciprocal(items, geometry) + item_costs)  # of equal items
    times = lanes.collect(times, len(candidates))
    fits = lanes.vote((numbers <= programs).astype(jnp.int32))
    chosen, begin_at_once = {}, True
    for kind in kinds_there(geometry):
        (best, cost, least), *others = [(i, x.cost, times[i]) for i, x in enumerate(candidates) if x.kind == kind]
        for i, other, time in others:
            is_less = (time < least) & may_order
            best, cost, least = jnp.where(is_less, i, best), jnp.where(is_less, other, cost), lax.min(time, least)
        chosen[kind], begin_at_once = cost, begin_at_once & ((fits >> best) & 1 == 1)
        if kind.is_wide:
            wide_programs += _MORE * ((saved >> best) & 1)
    return _Shares(*[chosen.get(kind, share) for kind in kinds_of(geometry)]), begin_at_once, wide_programs


def _target(share: Any, totals: _Totals, kind: ItemKind) -> Any:
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
    fewer = lax.max(wide * (7 / 3) - programs, jnp.float32(programs / 2))  # all of 3/4 and more
    waves = truncated(items * reciprocal(fewer, geometry) + 0.5, geometry).astype(jnp.float32)
    whole = _waves(items, lax.max(waves, jnp.float32(1)), geometry)
    may_differ = (fewer < wide) & (items >= wide * _MANY_WAVES) & (whole >= wide * _LEAST_FEWER)
    return jnp.where(may_differ, truncated(lax.min(whole, wide), geometry), wide_programs)


def _may_be_more(thin_programs: Any, geometry: Geometry) -> Any:
    """Whether a few of the programs that begin with thin items may begin with wide ones, if that saves a wave.

    Then wide items take nearly all of the call, and a last wave of few of them would leave most programs idle.
    """
    return (thin_programs > _MORE) & (thin_programs <= _FEW_THIN * geometry.tuning.num_programs)


def _waves(items: Any, programs: Any, geometry: Geometry) -> Any:
    """The waves of programs that so many items take."""
    return truncated(items * reciprocal(programs, geometry) + _ROUNDS_UP, geometry).astype(jnp.float32)


def _most_cost(sequences: Sequence, shares: _Shares, geometry: Geometry) -> Array:
    """The cost of each sequence's costliest item or split; 0 if the sequence has no item."""
    most = jnp.zeros_like(sequences.seq_len)
    for kind in kinds_there(geometry):
        tiles = most_tiles(sequences, kind)
        if kind.may_split:
            splits = splits_of(sequences, shares.of(kind), kind)
            tiles = quotient(tiles + (splits - 1), splits, kind)
        most = lax.max(most, jnp.where(query_tiles(sequences, kind) > 0, tiles * kind.tile_cost, 0))
    return most


def _counts(sequences: Sequence, shares: _Shares, geometry: Geometry) -> dict[int, Array]:
    """The counts of each sequence, keyed by row of the table; rows that nobody reads are left out."""
    counts = {}
    for kind in kinds_there(geometry):
        items = query_tiles(sequences, kind) * geometry.problem.num_kv_heads
        if not kind.may_split:
            counts[_row(Counted.ITEMS, kind)] = items
            continue
        splits = splits_of(sequences, shares.of(kind), kind)
        counts[_row(Counted.ITEMS, kind)] = items * splits
        has_partials = splits > kind.geometry.splits_of_whole
        counts[_row(Counted.PARTIALS, kind)] = jnp.where(has_partials, items * splits, 0)
        counts[_row(Counted.SPLITS, kind)] = splits
    return counts


def _only(counts: dict[int, Array], *what: Counted) -> dict[int, Array]:
    """Some of the counts."""
    return {row: x for row, x in counts.items() if row % len(Counted) in what}


def _row(what: Counted, kind: ItemKind) -> int:
    """The row of the table that holds a count of this kind."""
    return what + (0 if kind.is_wide else len(Counted))


def _sums_before(x: Array) -> Array:
    """Exclusive prefix sums, and the total: [..., n] -> [..., n + 1]."""
    count = x.shape[-1]
    earlier = jnp.arange(count)[None, :] < jnp.arange(count + 1)[:, None]
    earlier = earlier.reshape(*[1] * (x.ndim - 1), count + 1, count)
    return jnp.where(earlier, x[..., None, :], jnp.zeros_like(x)[..., None, :]).sum(axis=-1, dtype=x.dtype)


def sequences_of(seq: Array, refs: Refs, geometry: Geometry) -> Sequence:
    """The sequences of these indices, one in each thread; those from index num_seqs on are empty."""
    lengths_gmem, num_seqs = refs.inputs_gmem.lengths, geometry.problem.num_seqs
    start = scan.gather(lengths_gmem.query_start_loc, seq, num_seqs)
    end = scan.gather(lengths_gmem.query_start_loc, seq + 1, num_seqs)
    seq_len = scan.gather(lengths_gmem.seq_lens, seq, num_seqs - 1)
    query_len = jnp.where(seq < num_seqs, lax.max(end - start, jnp.zeros_like(start)), 0)
    return Sequence(start, query_len, jnp.where(seq < num_seqs, seq_len, 0))
