"""The references of the kernel of shared prefixes: inputs, outputs, and the shared memory of both of its parts."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.decode import refs as of_decode
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.refs import ItemPartials, Ring
from paged_jax.kernels.mosaic_gpu.decode.shared import plan
from paged_jax.kernels.mosaic_gpu.decode.tiles.plain import PlainTiles
from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.memory import array_bytes
from paged_jax.kernels.mosaic_gpu.hopper.refs import ABSENT, Partials, Ref

_BARRIERS = 4096  # bytes for barriers, padding, and reductions across warps


class Parts(NamedTuple):
    """The geometries of both parts of a call."""

    own: Geometry  # decode attention to each query's own tokens
    prefix: Geometry  # attention of up to 128 rows to the prefixes
    num_programs: int

    @property
    def own_line(self) -> Geometry:
        """Decode attention of one kv head, whose queues are shares of a line."""
        problem, tuning = self.own.problem, self.own.tuning
        of_head = dataclasses.replace(problem, num_kv_heads=1, num_heads=problem.group)
        shares = max(1, self.num_programs // problem.num_kv_heads)
        return Geometry(of_head, dataclasses.replace(tuning, queues=shares))

    @property
    def own_rows(self) -> int:
        """Rows of all partial results of own tokens, which come before those of prefixes.

        A share has two partial results of items that it cuts; each other item has one.
        """
        of_line = 2 * self.own_line.tuning.queues + self.own.problem.num_seqs
        return of_line * self.own.problem.num_kv_heads * self.own.columns

    @property
    def rows(self) -> int:
        """Rows of all partial results."""
        partials = plan.num_splits(self.prefix) * plan.lines(self.prefix.problem)
        return self.own_rows + partials * plan.HALVES * WGMMA_ROWS


class Inputs(NamedTuple):
    """The arrays that the kernel reads. Sequences are the prefixes, and then one for each query's own tokens."""

    query: Ref  # [num_queries, num_heads, head_size]
    query_tiles: Ref  # the same, as decode takes it
    key_cache: Ref
    value_cache: Ref
    block_tables: Ref  # [num_prefixes + num_queries, max_blocks_per_seq]
    seq_lens: Ref  # [num_prefixes + num_queries]
    query_start_loc: Ref  # [num_prefixes + num_queries + 1]
    options: Any  # `OptionArrays` of references


class Outputs(NamedTuple):
    """The arrays that the kernel writes."""

    partials: Partials  # [rows, head_size] and [rows]
    item_partials: ItemPartials  # of own tokens
    marks: Ref = ABSENT


class PrefixScratch(NamedTuple):
    """Shared memory and barriers of the part that attends to prefixes."""

    keys: Ring
    query: Ref  # [halves, 64, head_size]: for each head of an item, its rows of half a query tile
    query_ready: Ref  # a barrier for each half
    unused: Ref  # nothing is stored here (`lanes.settle`)
    values: Ring
    zeroed: Ref  # barrier: half 0 has zeroed what a tile has behind its prefix


class Scratch(NamedTuple):
    """Shared memory and barriers of a program."""

    own: of_decode.Scratch
    prefix: PrefixScratch


class PrefixRefs(NamedTuple):
    """The references of the part that attends to prefixes."""

    inputs_gmem: Any
    outputs_gmem: Outputs
    smem: PrefixScratch


def outputs(parts: Parts) -> Outputs:
    """The types of the arrays that the kernel writes."""
    head_size, index = parts.own.problem.head_size, jax.ShapeDtypeStruct((parts.own.num_items,), jnp.int32)
    out = jax.ShapeDtypeStruct((parts.rows, head_size), jnp.float32)
    log_sums = jax.ShapeDtypeStruct((parts.rows,), jnp.float32)
    return Outputs(Partials(out, log_sums), ItemPartials(index, index), jax.ShapeDtypeStruct((parts.num_programs, 32), jnp.int32))


def scratch(parts: Parts) -> Scratch:
    """The shared memory and the barriers of a program."""
    own, problem, reader = of_decode.scratch(parts.own), parts.prefix.problem, PlainTiles(parts.prefix)
    consumed = plgpu.Barrier(num_arrivals=plan.HALVES, num_barriers=parts.prefix.tuning.stages)
    prefix = PrefixScratch(
        keys=of_decode.ring(parts.prefix, problem.k_scale, (reader.key_ring(),))._replace(consumed=consumed),
        query=reader.swizzled((plan.HALVES, WGMMA_ROWS, problem.head_size), problem.query_dtype),
        query_ready=plgpu.Barrier(num_arrivals=plan.heads_of_item(problem), num_barriers=plan.HALVES),
        unused=plgpu.SMEM((WGMMA_ROWS,), jnp.float32),
        values=of_decode.ring(parts.prefix, problem.v_scale, reader.value_rings())._replace(consumed=consumed),
        zeroed=plgpu.Barrier(),
    )
    return Scratch(own._replace(out=ABSENT, partial_out=ABSENT, maxima=ABSENT, sums=ABSENT), prefix)


def shared_memory_bytes(parts: Parts) -> int:
    """Bytes of shared memory that a program takes."""
    return array_bytes(scratch(parts)) + _BARRIERS
