"""The references that the MLA kernel gets: inputs and outputs in global memory, scratch in shared memory.

A field is `ABSENT` if the call does not have it. Shared memory is laid out in the order of the fields.
"""

from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.memory import transforms
from paged_jax.kernels.mosaic_gpu.hopper.refs import Lengths, Partials, Ref
from paged_jax.kernels.mosaic_gpu.mla.geometry import STAGES, TILE, Geometry

CLOSING = 4
"""Integers that describe an item to merge."""


class Inputs(NamedTuple):
    """The arrays that the MLA kernel reads."""

    query: Ref  # [rows, latent_size]
    latent_cache: Ref
    block_tables: Ref
    lengths: Lengths
    scale: Ref  # [1]
    latent_scale: Ref  # [1]
    sinks: Ref  # [heads + 64], repeated from the first head on after the last one


class Outputs(NamedTuple):
    """The arrays that the MLA kernel writes."""

    out: Ref  # [rows, value_size]
    lse: Ref  # [rows]
    partials: Partials  # elements of out are in the order of `rows.store_partial`
    closings: Ref  # [closings, width, CLOSING]: first_partial, num_splits, row, num_rows; num_splits is 0 without a cut


class Scratch(NamedTuple):
    """Shared memory and barriers of a program."""

    query: Ref  # out overwrites it after the last product
    tiles: tuple[Ref, ...]  # the rings of the parts of a tile
    weights: Ref  # P of a tile
    factors: Ref  # [64], the factors that rescale O; warpgroup 0 gives them to warpgroup 1
    lse: Ref  # [64]
    query_ready: Ref
    query_consumed: Ref
    tile_ready: tuple[Ref, ...]
    tile_consumed: tuple[Ref, ...]
    weights_ready: Ref  # weights and factors are ready
    weights_consumed: Ref


class Refs(NamedTuple):
    """All references of the MLA kernel."""

    inputs_gmem: Inputs
    outputs_gmem: Outputs
    smem: Scratch


def outputs(geometry: Geometry) -> Outputs:
    """The arrays that the MLA kernel writes."""
    problem, tuning, f32 = geometry.problem, geometry.tuning, jnp.float32
    of_partials = geometry.num_partials, tuning.width, WGMMA_ROWS
    return Outputs(
        jax.ShapeDtypeStruct((geometry.rows, problem.head_size), problem.query_dtype),
        jax.ShapeDtypeStruct((geometry.rows,), f32),
        Partials(jax.ShapeDtypeStruct((*of_partials, problem.head_size), f32), jax.ShapeDtypeStruct(of_partials, f32)),
        jax.ShapeDtypeStruct((geometry.closings, tuning.width, CLOSING), jnp.int32),
    )


def scratch(geometry: Geometry) -> Scratch:
    """The shared memory and the barriers of a program."""
    dtype, latent_size = geometry.problem.query_dtype, geometry.latent_size

    def swizzled(*shape: int) -> Ref:
        return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms(shape[-1], dtype))

    return Scratch(
        query=swizzled(WGMMA_ROWS, latent_size),
        tiles=tuple(swizzled(STAGES, TILE, part.size) for part in geometry.tile_parts),
        weights=swizzled(WGMMA_ROWS, TILE),
        factors=plgpu.SMEM((WGMMA_ROWS,), jnp.float32),
        lse=plgpu.SMEM((WGMMA_ROWS,), jnp.float32),
        query_ready=plgpu.Barrier(),
        query_consumed=plgpu.Barrier(num_arrivals=2),
        tile_ready=tuple(
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=geometry.runs_per_tile) for _ in geometry.tile_parts
        ),
        tile_consumed=tuple(plgpu.Barrier(num_barriers=STAGES) for _ in geometry.tile_parts),
        weights_ready=plgpu.Barrier(),
        weights_consumed=plgpu.Barrier(),
    )
