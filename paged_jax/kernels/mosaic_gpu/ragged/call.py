"""Ragged attention: prefill, chunks, speculative tokens and decodes in one launch.

This file makes `Inputs` from the ops' arrays, and `Problem`, `Tuning` and `Geometry` from the static facts.
"""

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array

from paged_jax.kernels import problem as facts
from paged_jax.kernels.in_place import apart
from paged_jax.kernels.mosaic_gpu.hopper.refs import ABSENT, Lengths
from paged_jax.kernels.mosaic_gpu.ragged import choose, count
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kernel import attend
from paged_jax.kernels.mosaic_gpu.ragged.kinds import num_counters
from paged_jax.kernels.mosaic_gpu.ragged.merge import MergeRefs, merge
from paged_jax.kernels.mosaic_gpu.ragged.refs import Inputs
from paged_jax.kernels.problem import Problem
from paged_jax.options import AttentionOptions
from paged_jax.shapes import BlockTables, Cache, NewTokens, QueryStartLoc, RaggedLse, RaggedQuery, SeqLens


def ragged_paged_attention(
    query: RaggedQuery,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    options: AttentionOptions,
) -> tuple[RaggedQuery, RaggedLse]:
    """Attends to caches that also hold the queries' own tokens."""
    caches = key_cache, value_cache, block_tables
    return _attend(query, (), caches, seq_lens, query_start_loc, options)


def prefix_attention(
    query: RaggedQuery,
    key: NewTokens,
    value: NewTokens,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    options: AttentionOptions,
) -> tuple[RaggedQuery, RaggedLse]:
    """Attends like `ragged_paged_attention`, but the new tokens' keys and values are in arrays beside the caches."""
    caches = key_cache, value_cache, block_tables
    return _attend(query, (key, value), caches, seq_lens, query_start_loc, options)


def _attend(
    query: Array,
    new: tuple[Array, ...],
    caches: tuple[Array, Array, Array],
    seq_lens: Array,
    query_start_loc: Array,
    options: AttentionOptions,
) -> tuple[Array, Array]:
    """Runs the kernels. `new` holds the new tokens' keys and values if they are in arrays beside the caches."""
    problem = Problem.of_call(query, *caches, options, prefix=len(new) > 0)
    geometry = Geometry(problem, choose.tune(problem, facts.device()))
    if problem.num_tokens * problem.num_seqs * problem.num_blocks * problem.max_seq_len == 0:
        return jnp.zeros(query.shape, query.dtype), jnp.full(query.shape[:2], -jnp.inf, jnp.float32)
    vectors = jax.tree.map(jnp.atleast_1d, facts.OptionArrays.of(options))
    counts = count.count_before_kernel(query_start_loc, seq_lens, geometry)

    def run(refs):
        counters_ref, out_ref, lse_ref = refs
        inputs = Inputs(query, *caches, Lengths(seq_lens, query_start_loc), counters_ref, counts, vectors, *new)
        results = attend(geometry, inputs)
        out_ref[...], lse_ref[...] = results.out, results.lse
        if geometry.merges_copies:
            counted = results.counts if geometry.tuning.counts_in_kernel else counts
            counted = counted._replace(order=ABSENT, wide_programs=ABSENT)
            partials = results.wide_partials, results.thin_partials
            sinks = vectors.per_head.sinks
            merge(geometry, MergeRefs(query_start_loc, seq_lens, sinks, counted, *partials, out_ref, lse_ref))

    counters = jnp.zeros((num_counters(geometry),), jnp.int32)  # a reference, because the kernel writes to it
    unwritten = jnp.zeros(query.shape, query.dtype), jnp.zeros(query.shape[:2], jnp.float32)  # XLA removes these zeros
    return apart(pl.run_state(run)((counters, *unwritten))[1:])
