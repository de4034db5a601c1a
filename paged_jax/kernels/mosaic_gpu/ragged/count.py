"""Counts a batch's work: items and partial results of each sequence.

Programs claim items in an order of the sequences: those with the costliest items come first. Then the last items are
short, and all programs end at about the same time (benchmarks/LOG.md, "The longest first"). If only the first 128
sequences have queries, they are sorted exactly, or keep their order if their items all begin at once. More sequences
are sorted by classes of cost.

Only the device knows the lengths. For up to 510 sequences whose counts fit into shared memory, the loading warpgroup of
each program counts the whole batch; each of its threads counts one sequence at a time. XLA's kernels would take 5 us
(benchmarks/LOG.md, "Counting and order"). No program loads anything before it has counted, so each instruction of the
count delays the whole call (benchmarks/LOG.md, "The start of a call"). If there is a merge kernel, one program stores
the counts for it. For more sequences, XLA counts before the kernel.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_least
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP
from paged_jax.kernels.mosaic_gpu.ragged.arithmetic import quotient
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind, kinds_of, kinds_there
from paged_jax.kernels.mosaic_gpu.ragged.ptx import scan, sort, warps
from paged_jax.kernels.mosaic_gpu.ragged.refs import Counted, Counts, Refs
from paged_jax.kernels.mosaic_gpu.ragged.sequence import Sequence, most_tiles, query_tiles, splits_of
from paged_jax.kernels.mosaic_gpu.ragged.shares import Lanes, Shares, Totals, shares_of

_ITEM_COST = 2  # the cost of an item beside the cost of its tiles


def count_before_kernel(query_start_loc: Array, seq_lens: Array, geometry: Geometry) -> Counts:
    """Counts the work in XLA, unless the kernel counts it."""
    if geometry.tuning.counts_in_kernel:
        return Counts(*[jnp.zeros((1,), jnp.int32)] * len(Counts._fields))
    ends = jnp.append(query_start_loc[1:], query_start_loc[-1])
    sequences = Sequence(query_start_loc, jnp.maximum(ends - query_start_loc, 0), jnp.append(seq_lens, 0))

    totals = Totals.of([costs(sequences, kind).sum().astype(jnp.float32) for kind in kinds_there(geometry)])
    lanes = Lanes(
        sum_up=lambda of_sequences: jnp.stack([of(sequences).sum() for of in of_sequences]).astype(jnp.float32),
        spread=lambda values: jnp.stack([jnp.float32(x) for x in values]),
        collect=lambda values, count: list(values[:count]),
        vote=lambda x: (x << jnp.arange(len(x))).sum(),
    )
    shares, begin_at_once, wide_programs = shares_of(totals, lanes, geometry)
    order = jnp.zeros((1,), jnp.int32)
    if geometry.orders_sequences:
        order = jnp.argsort(jnp.where(begin_at_once, 0, -_most_cost(sequences, shares, geometry)), stable=True)
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
    totals, is_short = Totals.of(sums[: len(kinds)]), sums[-1] == 0 if others else True

    def sum_up(of_sequences):
        own = [of(first) for of in of_sequences]
        if others:  # engines pad batches to many sequences, so most often only the first ones have queries
            none, all_others = lambda: [x * 0 for x in own], lambda: [_over_parts(of, others) for of in of_sequences]
            own = [x + more for x, more in zip(own, lax.cond(is_short, none, all_others), strict=True)]
        return warps.totals_in_lanes(own, smem.counted, len(kinds) + 1)

    lanes = Lanes(sum_up, warps.in_lanes, warps.of_lanes, warps.votes)
    shares, begin_at_once, wide_programs = shares_of(totals, lanes, geometry)
    summed = Counted.ITEMS, Counted.PARTIALS
    packs = all(kind.most_numbered < 1 << 16 for kind in kinds)

    def count_first():
        counts = _counts(first, shares, geometry)
        if geometry.orders_sequences:
            counts = _ordered(first, counts, shares, begin_at_once, refs, geometry)
        else:
            scan.store(_only(counts, Counted.SPLITS), smem.table, 0)
        scan.sums_before(_only(counts, *summed), smem.table, 0, packs)
        if others:
            scan.extend(list(_only(counts, *summed)), smem.table)

    def count_all():
        counts = [_counts(part, shares, geometry) for part in (first, *others)]
        if geometry.orders_sequences:
            # Columns of padding come last: `search` sees num_seqs + 1 columns, and not what lies after these.
            costs = [jnp.where(part.query_len > 0, _most_cost(part, shares, geometry), -1) for part in (first, *others)]
            counts = sort.moved(counts, sort.places_by_class(costs, smem.table), smem.table, smem.order)
        for part, of_part in enumerate(counts):
            if not geometry.orders_sequences:
                scan.store(_only(of_part, Counted.SPLITS), smem.table, part * WARPGROUP)
            scan.sums_before(_only(of_part, *summed), smem.table, part * WARPGROUP, packs)

    if others:
        pl.when(is_short)(count_first)
        pl.when(~is_short)(count_all)
    else:
        count_first()
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
    sequences: Sequence, counts: dict[int, Array], shares: Shares, keeps_order: Any, refs: Refs, geometry: Geometry
) -> dict[int, Array]:
    """Moves the counts of each of the first 128 sequences to the thread at its place in the order."""
    smem = refs.smem

    def keep():
        sort.keep(counts, smem.table, smem.order)
        return list(counts.values())

    def order():
        used = scan.used(len(kinds_there(geometry)), smem.counted)
        places = sort.places_largest_first(_most_cost(sequences, shares, geometry), smem.ordered_by, used)
        return list(sort.moved([counts], [places], smem.table, smem.order)[0].values())

    return dict(zip(counts, lax.cond(keeps_order, keep, order), strict=True))


def total(what: Counted, kind: ItemKind, counts: Counts) -> Scalar:
    """Sums a count of this kind over all sequences."""
    return before(what, jnp.int32(kind.geometry.problem.num_seqs + 1), kind, counts)


def sequence_at(ordinal: Scalar, counts: Counts, geometry: Geometry) -> Scalar:
    """The index of the sequence at position `ordinal` of the order."""
    if not geometry.orders_sequences:
        return ordinal
    return counts.order[ordinal]


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


def _most_cost(sequences: Sequence, shares: Shares, geometry: Geometry) -> Array:
    """The cost of each sequence's costliest item or split; 0 if the sequence has no item."""
    most = jnp.zeros_like(sequences.seq_len)
    for kind in kinds_there(geometry):
        tiles = most_tiles(sequences, kind)
        if kind.may_split:
            splits = splits_of(sequences, shares.of(kind), kind)
            tiles = quotient(tiles + (splits - 1), splits, kind)
        most = lax.max(most, jnp.where(query_tiles(sequences, kind) > 0, tiles * kind.tile_cost, 0))
    return most


def _counts(sequences: Sequence, shares: Shares, geometry: Geometry) -> dict[int, Array]:
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
