"""The decode ops, which have one query for each sequence, and the ragged batches that are known to be decode.

v1 has one split for each work item, and v2 has one for each partition. For the other ops `choose.py` chooses.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged_jax.kernels import problem as facts
from paged_jax.kernels.in_place import apart
from paged_jax.kernels.mosaic_gpu.decode import choose, tiles
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.kernel import attend
from paged_jax.kernels.mosaic_gpu.decode.merge import merge
from paged_jax.kernels.mosaic_gpu.decode.refs import Inputs, Outputs
from paged_jax.kernels.mosaic_gpu.decode.tuning import Merge, Tuning
from paged_jax.kernels.problem import LONGEST_CONTEXT, Device, OptionArrays, Problem
from paged_jax.options import AttentionOptions
from paged_jax.shapes import (
    BlockTables,
    Cache,
    Lse,
    NewTokens,
    Query,
    QueryStartLoc,
    RaggedLse,
    RaggedQuery,
    Residual,
    SeqLens,
    SlotMapping,
    TmpOut,
)


def paged_attention_v1(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
) -> tuple[Query, Lse]:
    """Attends with one split for each work item."""
    caches = key_cache, value_cache, block_tables
    return _out_and_lse(query, caches, seq_lens, options, choose.unsplit)


def paged_attention(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
) -> tuple[Query, Lse]:
    """Attends with as many splits as keep the GPU busy."""
    caches = key_cache, value_cache, block_tables
    return _out_and_lse(query, caches, seq_lens, options, choose.balanced)


def ragged_paged_attention(
    query: RaggedQuery,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    options: AttentionOptions,
) -> tuple[RaggedQuery, RaggedLse]:
    """Attends to sequences that have one query each or none, with no more rows than sequences.

    A sequence without a query takes a row of padding as its query, if one is left, and has no tokens.
    """
    num_tokens, num_seqs, caches = query.shape[0], seq_lens.shape[0], (key_cache, value_cache, block_tables)
    begin, total, has_query = query_start_loc[:-1], query_start_loc[-1], query_start_loc[1:] > query_start_loc[:-1]
    lens, indices = jnp.where(has_query, seq_lens, 0), None
    if num_seqs > 1:
        # `arange - begin` counts the earlier sequences without a query. If a sequence has more queries than
        # `max_query_len` promises, the count is too small; its further rows then belong to no sequence.
        padding = total + jnp.arange(num_seqs, dtype=jnp.int32) - begin
        indices = jnp.where(has_query, begin, jnp.where(padding < total, -1, padding))
        indices = jnp.where(indices < num_tokens, indices, -1)
    return _out_and_lse(query, caches, lens, options, choose.balanced, indices)


def write_and_attend(
    query: Query,
    key: NewTokens,
    value: NewTokens,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    slot_mapping: SlotMapping,
    options: AttentionOptions,
) -> tuple[Query, Lse, Cache, Cache]:
    """Attends like `paged_attention`, and writes the new tokens into the caches."""
    problem = Problem.of_call(query, key_cache, value_cache, block_tables, options, writes_tokens=True)
    geometry = Geometry(problem, choose.balanced(problem, facts.device()))
    new = key, value, slot_mapping

    def run(refs):
        keys, values, out_ref, lse_ref = refs
        outputs = _attend(query, keys, values, block_tables, seq_lens, options, new, geometry)
        out_ref[...], lse_ref[...] = _of_shape(query, outputs)

    unwritten = jnp.zeros_like(query), jnp.zeros(query.shape[:2], jnp.float32)  # XLA removes these zeros
    key_cache, value_cache, out, lse = pl.run_state(run)((*apart((key_cache, value_cache)), *unwritten))
    return out, lse, *apart((key_cache, value_cache))


def paged_attention_v2(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
    *,
    partition_size: int,
) -> tuple[Query, Lse, Residual, Residual, TmpOut]:
    """Attends with a split for each partition, and also returns the partial results."""
    partition_size = min(partition_size, LONGEST_CONTEXT)
    caches = key_cache, value_cache, block_tables
    problem = Problem.of_call(query, *caches, options, partition_size=partition_size)
    geometry = Geometry(problem, choose.in_partitions(problem, facts.device()))
    if _nothing_to_attend(problem):
        residual = *query.shape[:2], pl.cdiv(problem.max_seq_len, partition_size)
        zeros = jnp.zeros(residual, jnp.float32)
        return *_unseen(query), zeros, zeros - jnp.inf, jnp.zeros((*residual, problem.head_size), jnp.float32)
    outputs = _attend(query, *caches, seq_lens, options, (), geometry)
    tmp_out = _by_head(outputs.partials.out, geometry)
    # The second head slice overlaps with the first; only its last rows are new.
    whole = geometry.head_slices[0].size
    new = tmp_out.shape[-1] - problem.head_size + whole
    tmp_out = jnp.concatenate([tmp_out[..., :whole], tmp_out[..., new:]], -1)
    sums, maxima = (_by_head(x, geometry) for x in (outputs.partials.sums, outputs.partials.maxima))
    return *_of_shape(query, outputs), sums, maxima, tmp_out


def _out_and_lse(
    query: Array,
    caches: tuple[Array, Array, Array],
    seq_lens: SeqLens,
    options: AttentionOptions,
    tuned: Callable[[Problem, Device], Tuning],
    query_indices: Array | None = None,
) -> tuple[Array, Array]:
    """Attends with the tuning that `tuned` chooses. `caches` are keys, values and block tables."""
    problem = Problem.of_call(query, *caches, options)
    geometry = Geometry(problem, tuned(problem, facts.device()))
    if _nothing_to_attend(problem):
        return _unseen(query)
    outputs = _attend(query, *caches, seq_lens, options, (), geometry, query_indices=query_indices)
    return _of_shape(query, outputs)


def _attend(
    query: Array,
    key_cache: Any,
    value_cache: Any,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
    new: tuple[Array, ...],
    geometry: Geometry,
    *,
    query_indices: Array | None = None,
) -> Outputs:
    """Runs the kernels. Returns out and lse by row, and the partial results.

    If `new` holds new tokens (key, value, slot_mapping), both caches are references. `query_indices` [num_seqs] holds
    the index of each sequence's query, or a negative number if it has none. None means that sequence i has query i.
    """
    problem = geometry.problem
    reader = tiles.class_of(problem)(geometry)
    rows = query_tiles(query, geometry)
    vectors = jax.tree.map(jnp.atleast_1d, OptionArrays.of(options))
    inputs = Inputs(rows, reader.view(key_cache), reader.view(value_cache), block_tables, seq_lens, vectors, *new)
    inputs = inputs._replace(query_indices=query_indices)
    outputs = attend(geometry, reader, inputs)
    if geometry.tuning.merge is Merge.KERNEL:
        out, lse = merge(geometry, inputs, outputs)
        outputs = outputs._replace(out=out, lse=lse)
    return outputs


def _of_shape(query: Array, outputs: Outputs) -> tuple[Array, Array]:
    """Out and lse in the shapes of the query."""
    return outputs.out.reshape(query.shape), outputs.lse.reshape(query.shape[:2])


def query_tiles(query: Array, geometry: Geometry) -> Array:
    """The heads of each copy of the query, [copies of all items, heads_per_copy, head_size].

    If an item's copies share its heads unevenly, as with 9 heads, the last one gets padding, which takes a kernel.
    """
    heads, head_size = geometry.heads_per_item, geometry.problem.head_size
    if missing := geometry.query_copies * geometry.heads_per_copy - heads:
        query = jnp.pad(query.reshape(-1, heads, head_size), ((0, 0), (0, missing), (0, 0)))
    return query.reshape(-1, geometry.heads_per_copy, head_size)


def _by_head(x: Array, geometry: Geometry) -> Array:
    """[num_items * splits, ..., columns] -> [num_seqs, num_heads, splits, ...]."""
    problem = geometry.problem
    x = x.reshape(geometry.num_items, geometry.tuning.splits, *x.shape[1:])
    x = x[..., np.array([geometry.column(head) for head in range(geometry.heads_per_item)])]
    return jnp.moveaxis(x, -1, 1).reshape(problem.num_seqs, problem.num_heads, *x.shape[1:-1])


def _nothing_to_attend(problem: Problem) -> bool:
    return problem.num_tokens * problem.num_seqs * problem.max_seq_len * problem.num_blocks == 0


def _unseen(query: Array) -> tuple[Array, Array]:
    """Out and lse of queries that see no token."""
    return jnp.zeros(query.shape, query.dtype), jnp.full(query.shape[:2], -jnp.inf, jnp.float32)
