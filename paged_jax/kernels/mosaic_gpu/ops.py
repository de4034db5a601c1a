"""Chooses between the decode kernel and the ragged kernel, for ops that both can run."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from paged_jax.kernels import problem as facts
from paged_jax.kernels.mosaic_gpu.decode import call as decode
from paged_jax.kernels.mosaic_gpu.decode import choose
from paged_jax.kernels.mosaic_gpu.ragged import call as ragged
from paged_jax.kernels.mosaic_gpu.ragged import choose as ragged_choose
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import partial_bytes
from paged_jax.kernels.mosaic_gpu.ragged.tuning import Tuning
from paged_jax.kernels.problem import Device, Problem, Unsupported
from paged_jax.options import AttentionOptions
from paged_jax.shapes import BlockTables, Cache, Lse, Query, QueryStartLoc, RaggedLse, RaggedQuery, SeqLens

# Limits of calls with one query for each sequence that decode takes. Measured: LOG, "A bound of query lengths".
_MOST_ITEMS_OF_DECODE = 528  # two waves of programs; thin items are faster from 1024 on, and between was not timed
_LARGEST_HEAD_OF_MANY = 128  # more items of heads up to this size are faster as thin ones

# Limits of calls that merge the rows of each query.
_LEAST_GROUP, _LEAST_HEAD_SIZE = 4, 128
_MOST_PARTIAL_BYTES = 128 << 20


def is_decode(
    query: RaggedQuery,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
) -> bool:
    """Whether the decode kernel takes a ragged batch, because each sequence is known to have one query or none.

    Over 8 bits and for large heads decode is faster than thin items, and about as fast if items are few. Each item
    of decode has a program of its own, even if its sequence is padding (benchmarks/LOG.md, "A bound of query lengths").
    There must be no more rows than sequences, because each row of padding goes to a sequence without a query.
    """
    if options.max_query_len != 1 or options.copies > 1 or seq_lens.shape[0] < query.shape[0]:
        return False
    problem = Problem.of_call(query, key_cache, value_cache, block_tables, options)
    if choose.refusals(problem, Device()):  # the default `Device`: both kernels refuse GPUs other than Hopper's
        return False
    if problem.cache_itemsize == 1 or problem.head_size > _LARGEST_HEAD_OF_MANY:
        return True
    few = problem.num_seqs * problem.num_kv_heads <= _MOST_ITEMS_OF_DECODE
    return few or _tuning_of_ragged(problem, Device()) is None


def merges_copies(operands: Any) -> bool:
    """Whether the ragged kernel takes a batch with several rows for each query, and is the fastest for it.

    Shared prefixes make such batches. They keep the matrix units busy while the queries' own tokens keep memory busy.
    Over 8 bits one call is no gain (benchmarks/LOG.md, "Shared prefixes in one call"). Small groups, small heads and
    scales of slots have not been timed. With small groups, most rows of a thin item have no query.
    """
    arrays = operands.query, operands.key_cache, operands.value_cache, operands.block_tables
    problem, device = Problem.of_call(*arrays, operands.options), facts.device()
    if problem.cache_itemsize == 1 or problem.group < _LEAST_GROUP or problem.head_size < _LEAST_HEAD_SIZE:
        return False
    if (tuning := _tuning_of_ragged(problem, device)) is None:
        return False
    geometry = Geometry(problem, tuning)
    return geometry.has_whole_tiles and partial_bytes(geometry) <= _MOST_PARTIAL_BYTES


def _tuning_of_ragged(problem: Problem, device: Device) -> Tuning | None:
    """The ragged kernel's tuning for a problem, or None if it refuses that."""
    try:
        return ragged_choose.tune(problem, device)
    except Unsupported:
        return None


def paged_attention(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
) -> tuple[Query, Lse]:
    """Attends with the decode kernel, or with the ragged kernel if there is a block-sparse pattern."""
    arrays = query, key_cache, value_cache, block_tables, seq_lens
    if options.block_sparse is None:
        return decode.paged_attention(*arrays, options)
    starts = jnp.arange(query.shape[0] + 1, dtype=jnp.int32)  # for the ragged kernel, each sequence has one query
    return ragged.ragged_paged_attention(*arrays, starts, options)


def ragged_paged_attention(
    query: RaggedQuery,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    options: AttentionOptions,
) -> tuple[RaggedQuery, RaggedLse]:
    """Attends with the ragged kernel, or with the decode kernel if `is_decode`."""
    caches = key_cache, value_cache, block_tables
    if not is_decode(query, *caches, seq_lens, options):
        return ragged.ragged_paged_attention(query, *caches, seq_lens, query_start_loc, options)
    options = replace(options, causal=True)  # a sequence's only query is its last token, which sees all tokens
    return decode.ragged_paged_attention(query, *caches, seq_lens, query_start_loc, options)
