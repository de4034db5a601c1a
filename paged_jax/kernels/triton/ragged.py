"""Ragged attention: prefill, chunks and decodes in one launch. The device cuts their queries into tiles."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from paged_jax.kernels.problem import Device, OptionArrays, Problem
from paged_jax.kernels.triton import launch, ragged_tuning, tuning
from paged_jax.kernels.triton.integers import cdiv
from paged_jax.kernels.triton.ragged_tuning import ITEM_FIELDS, Grid
from paged_jax.kernels.triton.tuning import AttentionKernel
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
    return _ragged(query, None, None, key_cache, value_cache, block_tables, seq_lens, query_start_loc, options)


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
    return _ragged(query, key, value, key_cache, value_cache, block_tables, seq_lens, query_start_loc, options)


def _ragged(
    query: RaggedQuery,
    key: NewTokens | None,
    value: NewTokens | None,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    query_start_loc: QueryStartLoc,
    options: AttentionOptions,
) -> tuple[RaggedQuery, RaggedLse]:
    gpu = launch.device()
    problem = Problem.of_call(query, key_cache, value_cache, block_tables, options, prefix=key is not None)
    launch.check(gpu, problem.cache_dtype, tuning.refusals(problem))
    kernel, grid = ragged_tuning.tune(problem, gpu)
    if problem.num_tokens == 0:
        return jnp.zeros(query.shape, query.dtype), jnp.zeros((0, problem.num_heads), jnp.float32)
    lengths = seq_lens, query_start_loc
    items, split_tiles = split(problem, kernel, grid, lengths, gpu)
    new = query if key is None else key, query if value is None else value  # the kernel reads no absent arrays
    options_in_order = OptionArrays.of(options)
    arrays = query, *new, key_cache, value_cache, block_tables, *lengths, items, *options_in_order.flat
    scalars = problem.num_tokens, problem.num_seqs, problem.max_blocks_per_seq, problem.max_seq_len, grid.items
    shapes = ragged_tuning.result_shapes(jax.ShapeDtypeStruct(query.shape, query.dtype), kernel, grid)
    num_programs = grid.items * problem.num_kv_heads * kernel.head_tiles
    parts = launch.call("attend", "ragged_kernel", kernel, num_programs, arrays, scalars, shapes, gpu)
    return results(kernel, grid, parts, split_tiles, options_in_order.per_head.sinks, gpu)


def split(
    problem: Problem, kernel: AttentionKernel, grid: Grid, lengths: tuple[Array, Array], gpu: Device
) -> tuple[Array, Array]:
    """Describes all items, and the tiles of queries with several splits. Without splits, nobody reads the arrays."""
    if kernel.tuning.final:
        return lengths[1], lengths[1]
    counts = grid.items, grid.split_tiles
    scalars = problem.num_tokens, problem.num_seqs, problem.max_seq_len, grid.at_once, *counts
    described = [jax.ShapeDtypeStruct((count, ITEM_FIELDS), jnp.int32) for count in counts]
    num_programs = cdiv(grid.items, kernel.tuning.plan)
    items, split_tiles = launch.call("items", "plan_kernel", kernel, num_programs, lengths, scalars, described, gpu)
    return items, split_tiles


def results(
    kernel: AttentionKernel, grid: Grid, parts: Sequence[Array], split_tiles: Array, sinks: Array, gpu: Device
) -> tuple[Array, Array]:
    """Makes out and lse from the kernel's results: out, lse and the splits' tmp_out, exp_sums and max_logits."""
    out, lse, *splits = parts
    if kernel.tuning.final:
        return out, lse
    reduce = ragged_tuning.reduce(kernel, grid, gpu)
    arrays, whole = (*splits, split_tiles, sinks), (out, lse)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in whole]
    num_head_tiles = kernel.problem.num_kv_heads * kernel.head_tiles
    num_programs = grid.split_tiles * num_head_tiles * reduce.groups * reduce.parts
    out, lse = launch.call(
        "reduce", "ragged_reduce_kernel", reduce, num_programs, arrays, (), shapes, gpu, in_place=whole
    )
    return out, lse
