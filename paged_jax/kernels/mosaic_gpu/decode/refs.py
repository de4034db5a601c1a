"""The references that the decode kernel gets: inputs and outputs in global memory, scratch in shared memory.

A field is `ABSENT` if the call does not have it. Shared memory is laid out in the order of the fields.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.decode import tiles
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.memory import array_bytes
from paged_jax.kernels.mosaic_gpu.hopper.refs import ABSENT, Ref
from paged_jax.kernels.problem import Granularity

_LEAST_COPY = 32  # float32: copies go to multiples of 128 bytes
_BARRIERS = 4096  # bytes for barriers, padding, and reductions across warps


class Inputs(NamedTuple):
    """The arrays that the decode kernel reads. Caches have the shapes of `Tiles.view`.

    If there are new tokens, the kernel also writes to both caches.
    """

    query: Ref  # [num_tokens * items_per_seq * query_copies, heads_per_copy, head_size]
    key_cache: Ref
    value_cache: Ref
    block_tables: Ref  # [num_seqs, max_blocks_per_seq]
    seq_lens: Ref  # [num_seqs]
    options: Any  # `OptionArrays` of references; each array has one axis or more
    new_key: Ref = ABSENT  # [num_seqs, num_kv_heads, head_size]
    new_value: Ref = ABSENT
    slot_mapping: Ref = ABSENT  # [num_seqs]
    query_indices: Ref = ABSENT  # [num_seqs], the index of each sequence's query, or below 0; absent: query i


class Partials(NamedTuple):
    """Partial results. Each is the normalised softmax of one split."""

    out: Ref  # [num_partials, padded_head_size, columns]
    maxima: Ref  # [num_partials, columns]
    sums: Ref  # [num_partials, columns]


class ItemPartials(NamedTuple):
    """The location of each item's partial results, if queues cut the items."""

    first: Ref  # [num_items], the index of the partial result of the item's first split
    last_program: Ref  # [num_items], the program that has the item's last split


class Outputs(NamedTuple):
    """The arrays that the decode kernel writes. Out and lse are absent if the merge kernel writes all of them."""

    out: Ref  # [num_tokens * num_heads, head_size]
    lse: Ref  # [num_tokens * num_heads]
    partials: Partials
    item_partials: ItemPartials


class Ring(NamedTuple):
    """A ring of `stages` tiles of one cache, from the loading to the computing warpgroup."""

    consumed: Ref  # a barrier for each stage: its tile has been read
    ready: Ref  # a barrier for each stage: its tile has arrived
    slot_scales: Ref  # [stages, runs_per_tile, tokens of a run], if each slot of the cache has a scale
    tiles: tuple[Ref, ...]  # one for K; for V, one for each head slice


class Scratch(NamedTuple):
    """Shared memory and barriers of a program."""

    merged_out: Ref  # results of a merge in a cluster
    cluster_done: Ref  # barrier: all programs of the cluster have stored their partial results
    keys: Ring
    new_key: Ref
    merged_lse: Ref
    maxima: Ref
    query_operand: Ref  # the query as an operand of wgmma, if that differs from `query`
    out: tuple[Ref, ...]  # results, one for each head slice
    weights: Ref  # P, the exponentials of a tile
    partial_out: Ref
    query_ready: Ref  # barrier
    query: Ref
    sums: Ref  # sums of a partial result, or lse of an item
    values: Ring
    new_value: Ref


class Refs(NamedTuple):
    """All references of the decode kernel."""

    inputs_gmem: Inputs
    outputs_gmem: Outputs
    smem: Scratch


class MergedScratch(NamedTuple):
    """Shared memory for merged results."""

    out: Ref
    lse: Ref


def outputs(geometry: Geometry) -> Outputs:
    """The types of the arrays that the decode kernel writes."""
    problem, tuning, f32 = geometry.problem, geometry.tuning, jnp.float32
    rows, whole, partials, item_partials = problem.num_tokens * problem.num_heads, (ABSENT, ABSENT), ABSENT, ABSENT
    if tuning.merges_in_cluster or geometry.stores_whole_items:
        out = jax.ShapeDtypeStruct((rows, problem.head_size), problem.query_dtype)
        whole = out, jax.ShapeDtypeStruct((rows,), f32)
    if tuning.merges:
        shape = geometry.num_partials, geometry.padded_head_size, geometry.columns
        row = jax.ShapeDtypeStruct((geometry.num_partials, geometry.columns), f32)
        partials = Partials(jax.ShapeDtypeStruct(shape, f32), row, row)
    if tuning.queues:
        index = jax.ShapeDtypeStruct((geometry.num_items,), jnp.int32)
        item_partials = ItemPartials(index, index)
    return Outputs(*whole, partials, item_partials)


def scratch(geometry: Geometry) -> Scratch:
    """The shared memory and the barriers of a program."""
    problem, tuning, columns = geometry.problem, geometry.tuning, geometry.columns
    reader = tiles.class_of(problem)(geometry)
    vector = plgpu.SMEM((columns,), jnp.float32)
    new_token = plgpu.SMEM((problem.head_size,), jnp.dtype(problem.query_dtype)) if problem.writes_tokens else ABSENT
    merged = merged_scratch(geometry) if tuning.merges_in_cluster else MergedScratch(ABSENT, ABSENT)
    out = partial_out = ABSENT
    if geometry.stores_whole_items:
        dtype = jnp.dtype(problem.query_dtype)
        out = tuple(plgpu.SMEM((columns, part.size), dtype) for part in geometry.head_slices)
    if tuning.merges and not tuning.merges_in_cluster:
        partial_out = plgpu.SMEM((geometry.padded_head_size, columns), jnp.float32)
    return Scratch(
        merged_out=merged.out,
        cluster_done=plgpu.ClusterBarrier(collective_axes=("split",)) if tuning.merges_in_cluster else ABSENT,
        keys=ring(geometry, problem.k_scale, (reader.key_ring(),)),
        new_key=new_token,
        merged_lse=merged.lse,
        maxima=vector,
        query_operand=reader.query_operand_type(),
        out=out,
        weights=reader.swizzled((columns, tuning.tile), reader.operand_dtype),
        partial_out=partial_out,
        query_ready=plgpu.Barrier(num_arrivals=geometry.query_copies + (2 if problem.writes_tokens else 0)),
        query=reader.swizzled((columns, problem.head_size), problem.query_dtype),
        sums=vector,
        values=ring(geometry, problem.v_scale, reader.value_rings()),
        new_value=new_token,
    )


def ring(geometry: Geometry, scale: Granularity, rings: tuple[Ref, ...]) -> Ring:
    """The ring of a cache, whose tiles lie in `rings`. A tile is ready when all of its runs and scales have arrived."""
    stages, runs = geometry.tuning.stages, geometry.runs_per_tile
    copies = runs * len(rings) * geometry.copies_per_run
    if not rings:  # values lie in the ring of K
        return Ring(ABSENT, ABSENT, ABSENT, ())
    slot_scales = ABSENT
    if scale is Granularity.SLOT:
        slot_scales = plgpu.SMEM((stages, runs, max(geometry.run_tokens, _LEAST_COPY)), jnp.float32)
    return Ring(
        consumed=plgpu.Barrier(num_barriers=stages),
        ready=plgpu.Barrier(num_barriers=stages, num_arrivals=copies + (0 if slot_scales is ABSENT else runs)),
        slot_scales=slot_scales,
        tiles=rings,
    )


def merged_scratch(geometry: Geometry) -> MergedScratch:
    """The shared memory of a merge."""
    out = plgpu.SMEM((geometry.columns, WGMMA_ROWS), jnp.dtype(geometry.problem.query_dtype))
    return MergedScratch(out, plgpu.SMEM((geometry.columns,), jnp.float32))


def shared_memory_bytes(geometry: Geometry) -> int:
    """Bytes of shared memory that a program takes."""
    return array_bytes(scratch(geometry)) + _BARRIERS
