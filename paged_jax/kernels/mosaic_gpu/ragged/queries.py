"""The queries of a computing warpgroup: waits for a copied one, or reads its own rows.

If shared memory has room for the queries of two items, the loading warpgroup copies the next query under this item's
products. Otherwise results on their way to global memory occupy the only room until the item ends. Then each computing
warpgroup reads its rows of the next query into registers when its last product is done. It stores its results while the
rows arrive, and writes the rows to shared memory after that.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.ragged import items, plan, softmax
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import WIDE
from paged_jax.kernels.mosaic_gpu.ragged.ptx import rows as ptx
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref, Refs, Signal
from paged_jax.kernels.mosaic_gpu.ragged.softmax import Rows


def wait(query_smem: Ref, query_stage: Scalar, rows: Rows, refs: Refs, geometry: Geometry) -> Rows:
    """Waits for an item's query; returns the rows with factors that undo a division of the query."""
    if not geometry.reads_own_queries:
        plgpu.barrier_wait(refs.smem.signal(Signal.QUERY, query_stage))
        return softmax.divide_query(query_smem, rows, geometry)
    if not geometry.divides_queries:
        return rows
    divisors_smem = refs.smem.query.divisors.at[lax.axis_index("warpgroup")]
    return softmax.undo_division(rows, plgpu.load(divisors_smem, layout=plgpu.Layout.WGMMA.reduce(1)))


def read_next(stage: Scalar, refs: Refs, geometry: Geometry) -> Array | None:
    """Starts to read the query of the item after the one in a stage, if computing warpgroups read queries."""
    return read(items.stage_of(stage + 1), refs, geometry) if geometry.reads_own_queries else None


def finish(query_stage: Scalar, next_query: Array | None, refs: Refs, geometry: Geometry) -> None:
    """Gives an item's query up, once its results are stored: writes the next one, or tells the loading warpgroup."""
    if next_query is None:
        plgpu.barrier_arrive(refs.smem.query.consumed.at[query_stage])
    else:
        write(next_query, refs, geometry)


def read(stage: Scalar, refs: Refs, geometry: Geometry) -> Array:
    """Waits for the description in a stage, and starts to read this warpgroup's rows of its query into registers.

    The two warpgroups of a thin item read the same rows. After the last item there are none.
    """
    kind = items.kind_of(stage, refs.smem)
    band = jnp.where(kind == WIDE, lax.axis_index("warpgroup"), 0)
    item = items.read(stage, refs.smem)
    item = item._replace(first_token=plan.query_of(item, geometry))
    rows = softmax.query_rows_of(item, band, geometry)
    return ptx.read_queries(refs.inputs_gmem.query, rows, geometry)


def write(query: Array, refs: Refs, geometry: Geometry) -> None:
    """Writes a query that this warpgroup has read to its place in shared memory, divided if products need that."""
    smem, warpgroup = refs.smem.query, lax.axis_index("warpgroup")
    divisors = None
    if geometry.divides_queries:
        query, divisors = softmax.divided(query, geometry)
    ptx.write_queries(query, divisors, smem.rows.at[0, warpgroup], smem.divisors.at[warpgroup], geometry)
    plgpu.commit_smem()
