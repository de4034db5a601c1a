"""Multi-head latent attention, where decode is a ragged batch with one query a sequence, and the write of latents."""

import jax
import jax.numpy as jnp
from jax import Array

from paged_jax.kernels.problem import Pool, Problem
from paged_jax.kernels.triton import cache_tuning, launch, mla_tuning, ragged_tuning
from paged_jax.kernels.triton.ragged import results, split
from paged_jax.kernels.triton.tuning import cdiv
from paged_jax.options import AttentionOptions
from paged_jax.shapes import (
    BlockTables,
    CacheScale,
    LatentCache,
    LatentOut,
    LatentQuery,
    Latents,
    Lse,
    QueryStartLoc,
    RaggedLatentOut,
    RaggedLatentQuery,
    RaggedLse,
    SeqLens,
    SlotMapping,
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
    starts = jnp.arange(query.shape[0] + 1, dtype=jnp.int32)
    return _attend(query, latent_cache, block_tables, seq_lens, starts, options, value_size)


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
    return _attend(query, latent_cache, block_tables, seq_lens, query_start_loc, options, value_size)


def _attend(
    query: Array,
    latent_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    options: AttentionOptions,
    value_size: int,
) -> tuple[Array, Array]:
    gpu = launch.device()
    problem = Problem.of_latents(query, latent_cache, block_tables, options, value_size)
    launch.check(gpu, problem.cache_dtype)
    kernel, grid = mla_tuning.tune(problem, gpu)
    num_tokens, num_heads, _ = query.shape
    if num_tokens == 0:
        return jnp.zeros((0, num_heads, value_size), query.dtype), jnp.zeros((0, num_heads), jnp.float32)
    lengths = seq_lens, query_start_loc
    items, split_tiles = split(problem, kernel, grid, lengths, gpu)
    sinks, latent_scale = (options.scale if x is None else x for x in (options.per_head.sinks, options.k_scale))
    arrays = query, latent_cache, block_tables, *lengths, items, options.scale, sinks, latent_scale
    scalars = num_tokens, problem.num_seqs, problem.max_blocks_per_seq, problem.max_seq_len, grid.items
    out = jax.ShapeDtypeStruct((num_tokens, num_heads, value_size), query.dtype)
    shapes = ragged_tuning.result_shapes(out, kernel, grid)
    num_programs = grid.items * kernel.head_tiles
    parts = launch.call("latent", "latent_kernel", kernel, num_programs, arrays, scalars, shapes, gpu)
    return results(kernel, grid, parts, split_tiles, sinks, gpu)


def write_to_latent_cache(
    latent: Latents, latent_cache: LatentCache, slot_mapping: SlotMapping, scale: CacheScale
) -> tuple[LatentCache]:
    gpu = launch.device()
    launch.check(gpu, latent_cache.dtype.name)
    num_tokens, latent_size = latent.shape
    kernel = cache_tuning.write(latent.dtype.name, num_tokens, Pool.of_latents(latent_cache, latent_size, scale), gpu)
    if num_tokens == 0 or latent_cache.size == 0:
        return (latent_cache,)
    arrays = latent, slot_mapping, slot_mapping if scale is None else scale  # an absent scale is not read
    shape = jax.ShapeDtypeStruct(latent_cache.shape, latent_cache.dtype)
    scalars, num_programs = (num_tokens, latent_cache.shape[0]), cdiv(num_tokens, kernel.tokens)
    (written,) = launch.call(
        "write", "write_latents_kernel", kernel, num_programs, arrays, scalars, (shape,), gpu, in_place=(latent_cache,)
    )
    return (written,)
