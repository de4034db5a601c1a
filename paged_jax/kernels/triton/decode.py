"""Decode attention: v1 splits no contexts, v2 splits them into partitions, the automatic choice into even splits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from paged_jax.kernels.problem import LONGEST_CONTEXT, Device, OptionArrays, Problem
from paged_jax.kernels.triton import cache_tuning, launch, tuning
from paged_jax.kernels.triton.integers import cdiv
from paged_jax.kernels.triton.tuning import AttentionKernel, Tuning
from paged_jax.options import AttentionOptions
from paged_jax.shapes import BlockTables, Cache, Lse, NewTokens, Query, Residual, SeqLens, SlotMapping, TmpOut


def paged_attention_v1(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
) -> tuple[Query, Lse]:
    problem, gpu = _problem(query, key_cache, value_cache, block_tables, options)
    tuned = tuning.attention(problem, gpu)
    tuned = replace(tuned, ranked=tuning.ranked(problem, tuned, gpu))
    out, lse, _ = _decode(query, key_cache, value_cache, block_tables, seq_lens, options, problem, tuned, 1, gpu)
    return out, lse


def paged_attention(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
) -> tuple[Query, Lse]:
    problem, gpu = _problem(query, key_cache, value_cache, block_tables, options)
    tuned, splits = tuning.automatic(problem, gpu)
    parts = _decode(query, key_cache, value_cache, block_tables, seq_lens, options, problem, tuned, splits, gpu)
    return _whole(query, seq_lens, options, problem, tuned, gpu, *parts)


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
    problem, gpu = _problem(query, key_cache, value_cache, block_tables, options)
    partition_size = min(partition_size, LONGEST_CONTEXT)
    partitions = cdiv(problem.max_seq_len, partition_size)
    tuned = replace(tuning.attention(problem, gpu), final=False, partition_size=partition_size)
    parts = _decode(query, key_cache, value_cache, block_tables, seq_lens, options, problem, tuned, partitions, gpu)
    out, lse = _reduce(query, seq_lens, options, problem, tuned, gpu, *parts)
    tmp_out, exp_sums, max_logits = parts
    return out, lse, exp_sums, max_logits, tmp_out


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
    caches = key_cache, value_cache
    if query.size == 0 or key_cache.size == 0:  # nothing to write
        return *paged_attention(query, *caches, block_tables, seq_lens, options), *caches
    problem, gpu = _problem(query, *caches, block_tables, options)
    tuned, splits = tuning.automatic(problem, gpu)
    scaled = problem.cache_itemsize < key.dtype.itemsize
    tuned = replace(tuned, write=cache_tuning.quantisation(key.dtype.name, problem, gpu, scaled=scaled))
    kernel = AttentionKernel(problem.attention, tuned)
    arrays = query, key, value, block_tables, seq_lens, slot_mapping, *OptionArrays.of(options).flat
    scalars = problem.num_seqs, problem.max_blocks_per_seq, problem.max_seq_len, splits, problem.num_blocks
    shapes = *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches), *_shapes(query, tuned, splits)
    num_programs = problem.num_seqs * splits * problem.num_kv_heads * kernel.head_tiles
    key_cache, value_cache, *parts = launch.call(
        "attend", "write_and_decode_kernel", kernel, num_programs, arrays, scalars, shapes, gpu, in_place=caches
    )
    return *_whole(query, seq_lens, options, problem, tuned, gpu, *parts), key_cache, value_cache


def _problem(
    query: Query, key_cache: Cache, value_cache: Cache, block_tables: BlockTables, options: AttentionOptions
) -> tuple[Problem, Device]:
    """Returns the facts of a call and of its GPU; raises `Unsupported` if the GPU cannot do the call."""
    gpu = launch.device()
    problem = Problem.of_call(query, key_cache, value_cache, block_tables, options)
    launch.check(gpu, problem.cache_dtype, tuning.refusals(problem))
    return problem, gpu


def _shapes(query: Query, tuned: Tuning, splits: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of a decode kernel's results: out, lse and an unused array, or splits' tmp_out, exp_sums, max_logits."""
    num_seqs, num_heads, head_size = query.shape
    if tuned.final:
        out, lse = jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct(query.shape[:2], jnp.float32)
        return out, lse, jax.ShapeDtypeStruct((1,), jnp.float32)
    residual = jax.ShapeDtypeStruct((num_seqs, num_heads, splits), jnp.float32)
    return jax.ShapeDtypeStruct((*residual.shape, head_size), jnp.float32), residual, residual


def _decode(
    query: Query,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    options: AttentionOptions,
    problem: Problem,
    tuned: Tuning,
    splits: int,
    gpu: Device,
) -> tuple[Array, Array, Array]:
    """Runs a decode kernel. Returns out, lse and an unused array, or splits' tmp_out, exp_sums and max_logits."""
    kernel, shapes = AttentionKernel(problem.attention, tuned), _shapes(query, tuned, splits)
    num_programs = problem.num_seqs * splits * problem.num_kv_heads * kernel.head_tiles
    if num_programs == 0:
        first, second, third = (jnp.zeros(x.shape, x.dtype) for x in shapes)
        return first, second, third
    arrays = query, key_cache, value_cache, block_tables, seq_lens, *OptionArrays.of(options).flat
    scalars = problem.num_seqs, problem.max_blocks_per_seq, problem.max_seq_len, splits
    return tuple(launch.call("attend", "decode_kernel", kernel, num_programs, arrays, scalars, shapes, gpu))


def _whole(
    query: Query,
    seq_lens: SeqLens,
    options: AttentionOptions,
    problem: Problem,
    tuned: Tuning,
    gpu: Device,
    *parts: Array,
) -> tuple[Query, Lse]:
    """Makes out and lse from the results of `_decode`."""
    if tuned.final:
        return parts[0], parts[1]
    return _reduce(query, seq_lens, options, problem, tuned, gpu, *parts)


def _reduce(
    query: Query,
    seq_lens: SeqLens,
    options: AttentionOptions,
    problem: Problem,
    tuned: Tuning,
    gpu: Device,
    tmp_out: TmpOut,
    exp_sums: Residual,
    max_logits: Residual,
) -> tuple[Query, Lse]:
    num_seqs, num_heads, splits = exp_sums.shape
    if num_seqs * splits == 0:
        return jnp.zeros(query.shape, query.dtype), jnp.full((num_seqs, num_heads), -jnp.inf, jnp.float32)
    shapes = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((num_seqs, num_heads), jnp.float32),
    )
    arrays = tmp_out, exp_sums, max_logits, seq_lens, OptionArrays.of(options).per_head.sinks
    kernel = tuning.reduce(problem, tuned, splits, gpu)
    num_programs = num_seqs * num_heads * kernel.parts
    return tuple(launch.call("reduce", "reduce_kernel", kernel, num_programs, arrays, (splits,), shapes, gpu))
