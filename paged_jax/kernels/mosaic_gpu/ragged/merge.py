"""The merge kernel of ragged attention: it merges the partial results of split items into rows of out and lse.

Grid: `Tuning.merge_programs` programs of one warpgroup. Each takes every merge_programs-th group of
`Geometry.merged_rows` rows of split items.

Who loads, who computes: every thread loads 4 elements of a row from global memory into registers, and merges them.

Roofline: 4 * head_size bytes for each row of a partial result, mostly from L2. Latency bounds the kernel, not
bandwidth, so it loads several partial results at a time.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths, Partials
from paged_jax.kernels.mosaic_gpu.ragged import count
from paged_jax.kernels.mosaic_gpu.ragged import sequence as sequences
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry, ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.ptx import merge as ptx
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
    partials = dict(zip(geometry.kinds, (refs.wide_partials, refs.thin_partials), strict=True))
    # All totals are loaded before the first one is needed: often nothing is split.
    totals = {kind: count.total(Counted.MERGES, kind, refs.counts) for kind in geometry.kinds if kind.may_split}
    for kind, total in totals.items():
        _merge_kind(total, partials[kind], refs, kind)


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
