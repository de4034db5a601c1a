"""Counts a batch's work: items, partial results and merges of each sequence.

Programs claim items in an order of the sequences. Up to 126 sequences are sorted: those with the costliest items come
first. Then the last items are short, and all programs end at about the same time (benchmarks/LOG.md, "The longest
first"). More sequences keep their order, because even the longest is short compared with the work of a program.

Only the device knows the lengths. For up to 510 sequences, the loading warpgroup of each program counts the whole
batch; each of its threads counts one sequence at a time. That took less than 1 us, where XLA's kernels took 5 us
(benchmarks/LOG.md, "Counting and order"). One program stores the counts for the merge kernel. For more sequences, XLA
counts before the kernel.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar, at_least, cdiv, div
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths
from paged_jax.kernels.mosaic_gpu.ragged.geometry import THIN_SHARES, Geometry, ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.ptx import scan
from paged_jax.kernels.mosaic_gpu.ragged.refs import Counted, Counts, Refs
from paged_jax.kernels.mosaic_gpu.ragged.sequence import Sequence, most_tiles, num_queries, query_tiles, splits_of

_ITEM_COST = 2  # the cost of an item beside the cost of its tiles


class _Totals(NamedTuple):
    """Total cost of all wide items, and of all thin items."""

    wide: Any
    thin: Any

    @classmethod
    def of(cls, costs: list) -> "_Totals":
        """Makes totals of the costs of `Geometry.kinds_there`."""
        *wide, thin = costs
        return cls(wide[0] if wide else jnp.float32(0), thin)


class _Shares(NamedTuple):
    """Target cost of a wide split, and of a thin split."""

    wide: Any
    thin: Any

    def of(self, kind: ItemKind) -> Any:
        """Target cost of a split of this kind."""
        return self.wide if kind.is_wide else self.thin


def count_before_kernel(query_start_loc: Array, seq_lens: Array, geometry: Geometry) -> Counts:
    """Counts the work in XLA, unless the kernel counts it."""
    if geometry.tuning.counts_in_kernel:
        return Counts(*[jnp.zeros((1,), jnp.int32)] * len(Counts._fields))
    ends = jnp.append(query_start_loc[1:], geometry.problem.num_tokens)
    sequences = Sequence(query_start_loc, jnp.maximum(ends - query_start_loc, 0), jnp.append(seq_lens, 0))

    def sum_up(arrays):
        return [_sums_before(x)[-1] for x in arrays]

    totals = _Totals.of(sum_up(_costs(sequences, kind) for kind in geometry.kinds_there))
    shares, order = _shares(sequences, totals, sum_up, geometry), jnp.zeros((1,), jnp.int32)
    if geometry.orders_sequences:
        order = jnp.argsort(-_most_cost(sequences, shares, geometry), stable=True)
        sequences = Sequence(*(x[order] for x in sequences))
    counts = _counts(sequences, shares, geometry)
    none = jnp.zeros_like(sequences.first_token)
    table = jnp.stack([counts.get(row, none) for row in range(2 * len(Counted))])
    return Counts(_sums_before(table), order, _wide_programs(totals, geometry)[None])


def count_in_kernel(refs: Refs, geometry: Geometry) -> Counts:
    """Counts the work in shared memory, unless XLA has counted it."""
    if not geometry.tuning.counts_in_kernel:
        return refs.inputs_gmem.counts
    smem, lengths_gmem, end = refs.smem, refs.inputs_gmem.lengths, geometry.count_columns

    def sum_up(arrays, first=0):
        scan.sums_before(dict(enumerate(arrays)), smem.counted, first)
        return [smem.counted[row, end] for row in range(len(arrays))]

    for first in range(0, end, WARPGROUP):
        sequences = _sequences(scan.iota() + first, lengths_gmem, geometry)
        totals = _Totals.of(sum_up([_costs(sequences, kind) for kind in geometry.kinds_there], first))
    shares = _shares(sequences, totals, sum_up, geometry)
    if geometry.orders_sequences:
        scan.largest_first(_most_cost(sequences, shares, geometry), smem.ordered_by, smem.order)
    for first in range(0, end, WARPGROUP):
        seq = scan.iota() + first
        if geometry.orders_sequences:
            seq = plgpu.load(smem.order, layout=scan.LAYOUT)
        scan.sums_before(_counts(_sequences(seq, lengths_gmem, geometry), shares, geometry), smem.table, first)
    smem.wide_programs[0] = _wide_programs(totals, geometry)
    if geometry.merges:
        last = geometry.tuning.num_programs - 1  # its first item is the shortest, so it has the most time
        pl.when(lax.axis_index("program") == last)(lambda: _leave_counts(refs, geometry))
    return Counts(smem.table, smem.order, smem.wide_programs)


def total(what: Counted, kind: ItemKind, counts: Counts) -> Scalar:
    """Sums a count of this kind over all sequences and the padding."""
    return before(what, jnp.int32(kind.geometry.problem.num_seqs + 1), kind, counts)


def sequence_at(ordinal: Scalar, counts: Counts, geometry: Geometry) -> Scalar:
    """The index of the sequence at position `ordinal` of the order."""
    return counts.order[ordinal] if geometry.orders_sequences else ordinal


def before(what: Counted, ordinal: Scalar, kind: ItemKind, counts: Counts) -> Scalar:
    """Sums a count of this kind over the sequences before position `ordinal` of the order."""
    return counts.table[_row(what, kind), ordinal]


def num_splits(ordinal: Scalar, sequence: Sequence, kind: ItemKind, counts: Counts) -> Scalar:
    """The number of splits of each item of the sequence at position `ordinal` of the order."""
    if not kind.may_split:
        return jnp.int32(1)
    items = before(Counted.ITEMS, ordinal + 1, kind, counts) - before(Counted.ITEMS, ordinal, kind, counts)
    num_kv_heads = kind.geometry.problem.num_kv_heads
    unsplit = at_least(query_tiles(sequence, kind), 1) * num_kv_heads if kind.has_several else jnp.int32(num_kv_heads)
    return at_least(lax.div(items, unsplit), 1)


def search(number: Scalar, what: Counted, kind: ItemKind, counts: Counts) -> Scalar:
    """Finds the sequence of element `number` of `what`, which is an item, a partial result or a merge.

    Returns the sequence's position in the order, or num_seqs + 1 if there is no such element.
    """
    num_seqs = kind.geometry.problem.num_seqs
    ordinal = jnp.int32(0)  # the last position whose elements are known to begin at or before `number`
    step = 1 << (num_seqs + 1).bit_length()
    while step := step // 2:
        further = lax.min(ordinal + step, jnp.int32(num_seqs + 1))
        ordinal = jnp.where(before(what, further, kind, counts) <= number, further, ordinal)
    return ordinal


def _costs(sequences: Sequence, kind: ItemKind) -> Array:
    """The cost of all of a sequence's items of this kind, for each sequence."""
    of_item = kind.tile_cost * most_tiles(sequences, kind) + _ITEM_COST
    items = query_tiles(sequences, kind).astype(jnp.float32) * float(kind.geometry.problem.num_kv_heads)
    return items * of_item.astype(jnp.float32)  # integers would overflow


def _wide_programs(totals: _Totals, geometry: Geometry) -> Any:
    """Computes `Counts.wide_programs`."""
    if not geometry.kinds[0].may_exist:
        return jnp.int32(0)
    (wide, thin), programs = totals, geometry.tuning.num_programs
    wide_programs = (wide / lax.max(wide + thin, jnp.float32(1)) * programs + 0.5).astype(jnp.int32)
    wide_programs = lax.max(wide_programs, (wide > 0).astype(jnp.int32))
    return jnp.where(thin > 0, lax.min(wide_programs, jnp.int32(programs - 1)), programs)


def _thin_items(sequences: Sequence, share: Any, geometry: Geometry) -> Array:
    """Counts the thin items that see a tile, in each sequence, if a split costs about `share`."""
    _, thin = geometry.kinds
    items = query_tiles(sequences, thin) * splits_of(sequences, share, thin) * geometry.problem.num_kv_heads
    return jnp.where(most_tiles(sequences, thin) > 0, items, 0).astype(jnp.float32)  # sums of integers might overflow


def _shares(sequences: Sequence, totals: _Totals, sum_up: Callable, geometry: Geometry) -> _Shares:
    """Computes target costs of splits: about total work / programs. Thin splits may cost less if sequences are sorted.

    For thin splits, the candidate in `THIN_SHARES` wins whose last wave is fullest. If all items took equally long,
    programs would take ceil(items / programs) waves; the candidate with the least waves / (items / programs) wins.
    """
    share = (totals.wide + totals.thin) * (1 / geometry.tuning.num_programs) + 1
    even, *candidates = [lax.max(share * part, jnp.float32(geometry.tuning.least_split)) for part in THIN_SHARES]
    if not geometry.orders_sequences:
        return _Shares(even, even)
    even_items, *items = sum_up([_thin_items(sequences, share, geometry) for share in (even, *candidates)])
    programs = at_least(geometry.tuning.num_programs - _wide_programs(totals, geometry), 1)
    thin, least = even, _waves_per_share(even_items, programs)
    for candidate, number in zip(candidates, items, strict=True):
        waves = _waves_per_share(number, programs)
        thin, least = jnp.where(waves < least, candidate, thin), lax.min(waves, least)
    return _Shares(even, thin)


def _waves_per_share(items: Any, programs: Any) -> Any:
    """ceil(items / programs) / (items / programs): 1 if the last wave is full."""
    share = lax.max(items, jnp.float32(1)) / programs.astype(jnp.float32)
    waves = share.astype(jnp.int32)
    waves = waves + (waves.astype(jnp.float32) < share).astype(jnp.int32)
    return waves.astype(jnp.float32) / share


def _most_cost(sequences: Sequence, shares: _Shares, geometry: Geometry) -> Array:
    """The cost of each sequence's costliest item or split; 0 if the sequence has no item."""
    most = jnp.zeros_like(sequences.seq_len)
    for kind in geometry.kinds_there:
        tiles = most_tiles(sequences, kind)
        if kind.may_split:
            tiles = cdiv(tiles, splits_of(sequences, shares.of(kind), kind))
        most = lax.max(most, jnp.where(query_tiles(sequences, kind) > 0, tiles * kind.tile_cost, 0))
    return most


def _counts(sequences: Sequence, shares: _Shares, geometry: Geometry) -> dict[int, Array]:
    """The counts of each sequence, keyed by row of the table; rows that nobody reads are left out."""
    counts = {}
    for kind in geometry.kinds_there:
        items = query_tiles(sequences, kind) * geometry.problem.num_kv_heads
        if not kind.may_split:
            counts[_row(Counted.ITEMS, kind)] = items
            continue
        splits = splits_of(sequences, shares.of(kind), kind)
        rows = num_queries(sequences, kind) * geometry.problem.num_heads
        merges = div(rows + (geometry.merged_rows - 1), geometry.merged_rows)
        counts[_row(Counted.ITEMS, kind)] = items * splits
        counts[_row(Counted.PARTIALS, kind)] = jnp.where(splits > 1, items * splits, 0)
        counts[_row(Counted.MERGES, kind)] = jnp.where(splits > 1, merges, 0)
    return counts


def _row(what: Counted, kind: ItemKind) -> int:
    """The row of the table that holds a count of this kind."""
    return what + (0 if kind.is_wide else len(Counted))


def _sums_before(x: Array) -> Array:
    """Exclusive prefix sums, and the total: [..., n] -> [..., n + 1]."""
    count = x.shape[-1]
    earlier = jnp.arange(count)[None, :] < jnp.arange(count + 1)[:, None]
    earlier = earlier.reshape(*[1] * (x.ndim - 1), count + 1, count)
    return jnp.where(earlier, x[..., None, :], jnp.zeros_like(x)[..., None, :]).sum(axis=-1, dtype=x.dtype)


def _sequences(seq: Array, lengths_gmem: Lengths, geometry: Geometry) -> Sequence:
    """The sequences of these indices, one in each thread. Index num_seqs is the padding; higher ones are empty."""
    num_seqs = geometry.problem.num_seqs
    start = scan.gather(lengths_gmem.query_start_loc, seq, num_seqs)
    end = scan.gather(lengths_gmem.query_start_loc, seq + 1, num_seqs)
    seq_len = scan.gather(lengths_gmem.seq_lens, seq, num_seqs - 1)
    end = jnp.where(seq == num_seqs, geometry.problem.num_tokens, end)
    query_len = jnp.where(seq > num_seqs, 0, lax.max(end - start, jnp.zeros_like(start)))
    return Sequence(start, query_len, jnp.where(seq < num_seqs, seq_len, 0))


def _leave_counts(refs: Refs, geometry: Geometry) -> None:
    """Stores the counts in global memory, for the merge kernel."""
    counts_gmem = refs.outputs_gmem.counts
    if geometry.orders_sequences:
        counts_gmem.order[...] = plgpu.load(refs.smem.order, layout=scan.LAYOUT)
    for first in range(0, geometry.count_columns, WARPGROUP):
        columns = pl.ds(first, WARPGROUP)
        for row in range(2 * len(Counted)):
            counts_gmem.table[row, columns] = plgpu.load(refs.smem.table.at[row, columns], layout=scan.LAYOUT)
