"""Attention of queries that have two rows in a batch: one sees a shared prefix, the other one its query's own tokens."""

import jax
import jax.numpy as jnp

from paged_jax.kernels import problem as facts
from paged_jax.kernels.mosaic_gpu.decode import call as decode
from paged_jax.kernels.mosaic_gpu.decode.shared import choose
from paged_jax.kernels.mosaic_gpu.decode.shared.kernel import attend
from paged_jax.kernels.mosaic_gpu.decode.shared.merge import merge
from paged_jax.kernels.mosaic_gpu.decode.shared.refs import Inputs
from paged_jax.kernels.mosaic_gpu.hopper.limits import QUERY_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths
from paged_jax.kernels.problem import OptionArrays, Problem
from paged_jax.options import AttentionOptions
from paged_jax.shapes import BlockTables, Cache, Query, QueryStartLoc, RaggedLse, SeqLens


def attend_to_copies(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    options: AttentionOptions,
) -> tuple[Query, RaggedLse]:
    """Attends to a batch with two rows for each query, as `AttentionOptions.copies` describes it."""
    problem = Problem.of_call(query, key_cache, value_cache, block_tables, options)
    parts = choose.tune(problem, facts.device())
    if problem.num_tokens * problem.num_blocks * problem.max_seq_len == 0:
        return jnp.zeros_like(query), jnp.full(query.shape[:2], -jnp.inf, jnp.float32)
    vectors = jax.tree.map(jnp.atleast_1d, OptionArrays.of(options))
    tiles, missing = decode.query_tiles(query, parts.own), -problem.num_queries % QUERY_ROWS
    rows = jnp.pad(query, ((0, missing), (0, 0), (0, 0))) if missing else query
    written = attend(
        parts, Inputs(rows, tiles, key_cache, value_cache, block_tables, seq_lens, query_start_loc, vectors)
    )
    out, lse = merge(parts, written, Lengths(seq_lens, query_start_loc), vectors.per_head.sinks)
    return out.reshape(query.shape), lse.reshape(query.shape[:2])
