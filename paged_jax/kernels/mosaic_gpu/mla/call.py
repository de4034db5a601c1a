"""The ops of multi-head latent attention: they make `Inputs` of arrays, and `Problem` and `Geometry` of facts."""

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array

from paged_jax.kernels import problem as facts
from paged_jax.kernels.in_place import apart
from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.refs import ABSENT, Lengths
from paged_jax.kernels.mosaic_gpu.mla import choose
from paged_jax.kernels.mosaic_gpu.mla.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.mla.kernel import attend
from paged_jax.kernels.mosaic_gpu.mla.merge import merge
from paged_jax.kernels.mosaic_gpu.mla.ptx.merge import MergeRefs
from paged_jax.kernels.mosaic_gpu.mla.refs import Inputs
from paged_jax.kernels.problem import Problem
from paged_jax.options import AttentionOptions
from paged_jax.shapes import (
    BlockTables,
    LatentCache,
    LatentOut,
    LatentQuery,
    Lse,
    QueryStartLoc,
    RaggedLatentOut,
    RaggedLatentQuery,
    RaggedLse,
    SeqLens,
)


def mla_paged_attention(
    query: LatentQuery,
    latent_cache: LatentCache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
    *,
    value_size: int,
) -> tuple[LatentOut, Lse]:
    """Attends with the one query of each sequence."""
    return _attend(query, latent_cache, block_tables, Lengths(seq_lens, ABSENT), options, value_size)


def ragged_mla_attention(
    query: RaggedLatentQuery,
    latent_cache: LatentCache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    options: AttentionOptions,
    *,
    value_size: int,
) -> tuple[RaggedLatentOut, RaggedLse]:
    """Attends with any number of queries a sequence."""
    return _attend(query, latent_cache, block_tables, Lengths(seq_lens, query_start_loc), options, value_size)


def _attend(
    query: Array, latent_cache: Array, block_tables: Array, lengths: Lengths, options: AttentionOptions, value_size: int
) -> tuple[Array, Array]:
    problem = Problem.of_latents(query, latent_cache, block_tables, options, value_size)
    geometry = Geometry(problem, choose.tune(problem, facts.device()), one_query=lengths.query_start_loc is ABSENT)
    num_tokens, num_heads, latent_size = query.shape
    shape = num_tokens, num_heads, value_size
    if num_tokens * problem.num_seqs * problem.num_blocks * problem.max_seq_len == 0:
        return jnp.zeros(shape, query.dtype), jnp.full(shape[:2], -jnp.inf, jnp.float32)
    padding = geometry.heads - num_heads
    rows = jnp.pad(query, ((0, 0), (0, padding), (0, 0))) if padding else query
    scale, latent_scale = (jnp.atleast_1d(options.scale if x is None else x) for x in (options.scale, options.k_scale))
    inputs = Inputs(
        query=rows.reshape(geometry.rows, latent_size),
        latent_cache=latent_cache,
        block_tables=block_tables,
        lengths=lengths,
        scale=scale,
        latent_scale=latent_scale,
        sinks=_sinks_of_rows(options.per_head.sinks, geometry),
    )
    written = attend(geometry, inputs)

    def run(refs):
        merge(geometry, inputs.lengths, MergeRefs(written.closings, written.partials, inputs.sinks, *refs))

    # The kernel has stored whole row blocks. The merge stores the others in the same arrays.
    out, lse = apart(pl.run_state(run)((written.out, written.lse)))
    out, lse = out.reshape(num_tokens, geometry.heads, value_size), lse.reshape(num_tokens, geometry.heads)
    return out[:, :num_heads], lse[:, :num_heads]


def _sinks_of_rows(sinks: Array | None, geometry: Geometry) -> Array | None:
    """Returns [heads + 64] sinks, padded with 0 and then repeated, so that 64 rows may begin at any head."""
    if sinks is None:
        return ABSENT
    padded = jnp.pad(sinks, (0, geometry.heads - geometry.problem.num_heads))
    return jnp.resize(padded, (geometry.heads + WGMMA_ROWS,))
