"""How much work a batch of ragged attention has: counts of items, partial results and merges, sequence by sequence.

The lengths are known on the device only. Where sequences are few, each program of the kernel counts all of them, in its
loading warpgroup, a thread a sequence. That took less than 1 us, where XLA's kernels took 5 us (benchmarks/LOG.md,
"turns and determinism"). Program 0 leaves what it found in memory, for the kernel that merges. Where sequences are
many, XLA counts before the kernel.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.device import ragged_scan as scan
from paged_jax.kernels.mosaic_gpu.device.integers import at_least, div
from paged_jax.kernels.mosaic_gpu.device.plan import Scalar
from paged_jax.kernels.mosaic_gpu.device.ragged_refs import Counted, Counts, Lengths, Refs
from paged_jax.kernels.mosaic_gpu.device.ragged_sequence import (
    Sequence,
    most_tiles,
    num_queries,
    query_tiles,
    splits_of,
)
from paged_jax.kernels.mosaic_gpu.ragged_geometry import THREADS, Geometry, ItemKind

_ITEM_COST = 2  # what an item costs beside its tiles


class _Totals(NamedTuple):
    """What all items of a batch cost."""

    wide: Any
    thin: Any


def count_before_kernel(query_start_loc: Array, seq_lens: Array, geometry: Geometry) -> Counts:
    """Counts the work in XLA; or does nothing, where the kernel counts."""
    if geometry.tuning.counts_in_kernel:
        return Counts(*[jnp.zeros((1,), jnp.int32)] * 2)
    ends = jnp.append(query_start_loc[1:], geometry.problem.num_tokens)
    sequences = Sequence(query_start_loc, jnp.maximum(ends - query_start_loc, 0), jnp.append(seq_lens, 0))
    totals = _Totals(*(_sums_before(_costs(sequences, kind))[-1] for kind in geometry.kinds))
    counts = _counts(sequences, totals, geometry)
    none = jnp.zeros_like(sequences.first_token)
    table = jnp.stack([counts.get(row, none) for row in range(2 * len(Counted))])
    return Counts(_sums_before(table), _wide_programs(totals, geometry)[None])


def count_in_kernel(refs: Refs, geometry: Geometry) -> Counts:
    """Counts the work in shared memory; or does nothing, where XLA has counted it."""
    if not geometry.tuning.counts_in_kernel:
        return refs.inputs_gmem.counts
    smem, lengths_gmem, end = refs.smem, refs.inputs_gmem.lengths, geometry.count_columns
    chunks = range(0, end, THREADS)
    for first in chunks:
        sequences = _sequences(first, lengths_gmem, geometry)
        costs = {row: _costs(sequences, kind) for row, kind in enumerate(geometry.kinds)}
        scan.sums_before(costs, smem.costs, first)
    totals = _Totals(smem.costs[0, end], smem.costs[1, end])
    for first in chunks:
        sequences = _sequences(first, lengths_gmem, geometry)
        scan.sums_before(_counts(sequences, totals, geometry), smem.table, first)
    smem.wide_programs[0] = _wide_programs(totals, geometry)
    if geometry.merges:
        pl.when(lax.axis_index("program") == 0)(lambda: _leave_counts(refs, geometry))
    return Counts(smem.table, smem.wide_programs)


def total(what: Counted, kind: ItemKind, counts: Counts) -> Scalar:
    """How many of `Counted` a kind of items has."""
    return before(what, jnp.int32(kind.geometry.problem.num_seqs + 1), kind, counts)


def before(what: Counted, seq: Scalar, kind: ItemKind, counts: Counts) -> Scalar:
    """How many of `Counted` come before a sequence."""
    return counts.table[_row(what, kind), seq]


def num_splits(seq: Scalar, sequence: Sequence, kind: ItemKind, counts: Counts) -> Scalar:
    """Splits of each item of the sequence that has the index `seq`."""
    if not kind.may_split:
        return jnp.int32(1)
    items = before(Counted.ITEMS, seq + 1, kind, counts) - before(Counted.ITEMS, seq, kind, counts)
    num_kv_heads = kind.geometry.problem.num_kv_heads
    unsplit = at_least(query_tiles(sequence, kind), 1) * num_kv_heads if kind.is_wide else jnp.int32(num_kv_heads)
    return at_least(lax.div(items, unsplit), 1)


def search(number: Scalar, what: Counted, kind: ItemKind, counts: Counts) -> Scalar:
    """The sequence that has the item, partial result or merge (`what`) of this number; there must be one."""
    num_seqs = kind.geometry.problem.num_seqs
    seq = jnp.int32(0)  # the last one known to begin at or before the number
    step = 1 << (num_seqs + 1).bit_length()
    while step := step // 2:
        further = lax.min(seq + step, jnp.int32(num_seqs + 1))
        seq = jnp.where(before(what, further, kind, counts) <= number, further, seq)
    return seq


def _costs(sequences: Sequence, kind: ItemKind) -> Array:
    """What all items of each sequence cost."""
    of_item = kind.tile_cost * most_tiles(sequences, kind) + _ITEM_COST
    items = query_tiles(sequences, kind).astype(jnp.float32) * float(kind.geometry.problem.num_kv_heads)
    return items * of_item.astype(jnp.float32)  # integers would overflow


def _wide_programs(totals: _Totals, geometry: Geometry) -> Any:
    """`wide_programs` of a batch."""
    (wide, thin), programs = totals, geometry.tuning.num_programs
    wide_programs = (wide / lax.max(wide + thin, jnp.float32(1)) * programs + 0.5).astype(jnp.int32)
    wide_programs = lax.max(wide_programs, (wide > 0).astype(jnp.int32))
    return jnp.where(thin > 0, lax.min(wide_programs, jnp.int32(programs - 1)), programs)


def _counts(sequences: Sequence, totals: _Totals, geometry: Geometry) -> dict[int, Array]:
    """What each sequence has, by its row of the table; rows that nobody reads are left out."""
    share = (totals.wide + totals.thin) * (1 / geometry.tuning.num_programs) + 1
    splits_per_cost = 1 / lax.max(share, jnp.float32(geometry.tuning.least_split))
    counts = {}
    for kind in geometry.kinds:
        items = query_tiles(sequences, kind) * geometry.problem.num_kv_heads
        if not kind.may_split:
            counts[_row(Counted.ITEMS, kind)] = items
            continue
        splits = splits_of(sequences, splits_per_cost, kind)
        rows = num_queries(sequences, kind) * geometry.problem.num_heads
        merges = div(rows + (geometry.merged_rows - 1), geometry.merged_rows)
        counts[_row(Counted.ITEMS, kind)] = items * splits
        counts[_row(Counted.PARTIALS, kind)] = jnp.where(splits > 1, items * splits, 0)
        counts[_row(Counted.MERGES, kind)] = jnp.where(splits > 1, merges, 0)
    return counts


def _row(what: Counted, kind: ItemKind) -> int:
    """The row of the table that counts this of a kind of items."""
    return what + (0 if kind.is_wide else len(Counted))


def _sums_before(x: Array) -> Array:
    """[..., n] -> [..., n + 1], the sums of all elements before each, and of all."""
    count = x.shape[-1]
    earlier = jnp.arange(count)[None, :] < jnp.arange(count + 1)[:, None]
    earlier = earlier.reshape(*[1] * (x.ndim - 1), count + 1, count)
    return jnp.where(earlier, x[..., None, :], jnp.zeros_like(x)[..., None, :]).sum(axis=-1, dtype=x.dtype)


def _sequences(first: int, lengths_gmem: Lengths, geometry: Geometry) -> Sequence:
    """The sequences from `first` on, a thread each; past the last one they are that of the padding, and empty ones."""
    num_seqs = geometry.problem.num_seqs
    seq = scan.iota() + first
    start = scan.gather(lengths_gmem.query_start_loc, first, num_seqs)
    end = scan.gather(lengths_gmem.query_start_loc, first + 1, num_seqs)
    seq_len = scan.gather(lengths_gmem.seq_lens, first, num_seqs - 1)
    end = jnp.where(seq == num_seqs, geometry.problem.num_tokens, end)
    query_len = jnp.where(seq > num_seqs, 0, lax.max(end - start, jnp.zeros_like(start)))
    return Sequence(start, query_len, jnp.where(seq < num_seqs, seq_len, 0))


def _leave_counts(refs: Refs, geometry: Geometry) -> None:
    """Leaves in memory what was counted."""
    counts_gmem = refs.outputs_gmem.counts
    for row in range(2 * len(Counted)):
        for first in range(0, geometry.count_columns, THREADS):
            columns = pl.ds(first, THREADS)
            counts_gmem.table[row, columns] = plgpu.load(refs.smem.table.at[row, columns], layout=scan.LAYOUT)
