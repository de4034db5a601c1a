"""The merge kernel of ragged attention: it merges the partial results of split items into rows of out and lse.

Grid: `Tuning.merge_programs` programs of one warpgroup. Each takes every merge_programs-th group of
`Geometry.merged_rows` rows of split items. If each query has several rows in the batch, all items have left partial
results. Then a group is of neighbouring heads of one query, and the kernel merges all partial results of the query's
rows.

Who loads, who computes: every thread loads 4 elements of a row from global memory into registers, and merges them.

Roofline: 4 * head_size bytes for each row of a partial result, mostly from L2. Latency bounds the kernel, not
bandwidth, so it loads several partial results at a time.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths, Partials
from paged_jax.kernels.mosaic_gpu.ragged import count
from paged_jax.kernels.mosaic_gpu.ragged import sequence as sequences
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry, ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.ptx import merge as ptx
from paged_jax.kernels.mosaic_gpu.ragged.ptx import scan
from paged_jax.kernels.mosaic_gpu.ragged.refs import Counted, Counts, Ref


class MergeRefs(NamedTuple):
    """The arrays that the merge kernel reads, and out and lse, which it writes."""

    query_start_loc: Ref
    seq_lens: Ref
    sinks: Ref
    counts: Counts
    wide_partials: Partials
    thin_partials: Partials
    out: Ref
    lse: Ref


def merge(geometry: Geometry, refs: MergeRefs) -> None:
    """Runs the kernel. It writes to the references of out and lse."""
    arrays, tree = jax.tree.flatten(refs)
    plgpu.kernel(
        functools.partial(_kernel, tree=tree, geometry=geometry),
        out_type=(),
        grid=(geometry.tuning.merge_programs,),
        grid_names=("program",),
        kernel_name="ragged_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*arrays)


def _kernel(*arrays, tree: Any, geometry: Geometry) -> None:
    refs = jax.tree.unflatten(tree, arrays)
    if geometry.merges_copies:
        _merge_copies(refs, geometry)
        return
    partials = dict(zip(geometry.kinds, (refs.wide_partials, refs.thin_partials), strict=True))
    # All totals are loaded before the first one is needed: often nothing is split.
    totals = {kind: count.total(Counted.MERGES, kind, refs.counts) for kind in geometry.kinds if kind.may_split}
    for kind, total in totals.items():
        _merge_kind(total, partials[kind], refs, kind)


def _merge_copies(refs: MergeRefs, geometry: Geometry) -> None:
    """Merges the partial results of all rows of each query."""
    problem = geometry.problem
    row_refs = ptx.CopyRefs(refs.wide_partials, refs.thin_partials, refs.sinks, refs.out, refs.lse)
    groups = problem.num_queries * problem.num_heads // geometry.merged_rows

    @pl.loop(lax.axis_index("program"), groups, step=geometry.tuning.merge_programs)
    def merge_group(number):
        query = lax.div(number * geometry.merged_rows, jnp.int32(problem.num_heads))
        first_own = problem.num_seqs - problem.num_queries
        seq = scan.number_at_most(refs.query_start_loc, 0, first_own, query)
        copies = [
            _copy_of(query, seq, refs, geometry),
            _copy_of(query + problem.num_queries, query + first_own, refs, geometry),
        ]
        ptx.merge_copies(row_refs, number, copies, geometry)


def _copy_of(row: Scalar, seq: Scalar, refs: MergeRefs, geometry: Geometry) -> ptx.Copy:
    """Finds the partial results of a row of the batch, which is a query of sequence `seq`."""
    problem, counts = geometry.problem, refs.counts
    sequence = sequences.sequence_of(seq, Lengths(refs.seq_lens, refs.query_start_loc), problem)
    token, (wide, thin) = row - sequence.first_token, geometry.kinds
    is_wide = token < sequences.num_queries(sequence, wide) if wide.may_exist else jnp.bool_(False)

    def either(of_kind):
        return jnp.where(is_wide, of_kind(wide), of_kind(thin)) if wide.may_exist else of_kind(thin)

    def together(kind):
        return sequences.heads_together(sequences.query_tiles(sequence, kind), total(kind), kind)

    def total(kind):
        return count.total(Counted.ITEMS, kind, counts)

    splits = either(lambda kind: count.num_splits(seq, kind, counts))
    return ptx.Copy(
        is_wide=is_wide.astype(jnp.int32),
        token=token - either(lambda kind: sequences.first_query(sequence, kind)),
        query_tiles=either(lambda kind: sequences.query_tiles(sequence, kind)),
        heads_together=either(together),
        splits=jnp.where(token < sequence.query_len, splits, 0),  # a row of padding has no partial result
        first_partial=either(lambda kind: count.before(Counted.PARTIALS, seq, kind, counts)),
    )


def _merge_kind(total: Scalar, partials: Partials, refs: MergeRefs, kind: ItemKind) -> None:
    """Merges all split items of one kind, which are `total` groups of rows."""
    problem, counts = kind.geometry.problem, refs.counts
    lengths_gmem = Lengths(refs.seq_lens, refs.query_start_loc)
    row_refs = ptx.RowRefs(partials, refs.sinks, refs.out, refs.lse)
    program, step = lax.axis_index("program"), kind.geometry.tuning.merge_programs
    num_items = count.total(Counted.ITEMS, kind, counts)

    @pl.loop(program, total, step=step)
    def merge_group(number):
        ordinal = count.search(number, Counted.MERGES, kind, counts)
        seq = count.sequence_at(ordinal, counts, kind.geometry)
        sequence = sequences.sequence_of(seq, lengths_gmem, problem)
        query_tiles = sequences.query_tiles(sequence, kind)
        group = ptx.RowGroup(
            number=number - count.before(Counted.MERGES, ordinal, kind, counts),
            num_rows=sequences.num_queries(sequence, kind) * problem.num_heads,
            first_token=sequence.first_token + sequences.first_query(sequence, kind),
            query_tiles=query_tiles,
            heads_together=sequences.heads_together(query_tiles, num_items, kind),
            splits=count.num_splits(ordinal, kind, counts),
            first_partial=count.before(Counted.PARTIALS, ordinal, kind, counts),
        )
        ptx.merge_rows(row_refs, group, kind)
