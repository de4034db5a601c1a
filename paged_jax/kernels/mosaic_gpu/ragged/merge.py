"""The merge kernel of ragged attention, for batches in which each query has several rows.

All items of such a batch leave partial results. The kernel merges the partial results of all rows of a query.

Grid: `Tuning.merge_programs` programs of one warpgroup. Each takes every merge_programs-th group of
`Geometry.merged_rows` neighbouring heads of one query.

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
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import kinds_of
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
    refs, problem = jax.tree.unflatten(tree, arrays), geometry.problem
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
    token, (wide, thin) = row - sequence.first_token, kinds_of(geometry)
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
