"""A computing warpgroup's work for a thin item: attention of all rows to every other tile of the item.

Two warpgroups attend to a thin item; a third one goes on to the next item. Both have the same rows, and each takes the
tiles of its own stages. The warpgroup without the last tile is done first: it hands its softmax over to the other one,
and goes on with the next item.
"""

from dataclasses import dataclass

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.products import product
from paged_jax.kernels.mosaic_gpu.ragged import items, plan, queries, results, softmax
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.load_tiles import scales_of, tile_of
from paged_jax.kernels.mosaic_gpu.ragged.plan import Item
from paged_jax.kernels.mosaic_gpu.ragged.ptx import lanes, products, tiles
from paged_jax.kernels.mosaic_gpu.ragged.ptx import rows as ptx_rows
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref, Refs, Signal
from paged_jax.kernels.mosaic_gpu.ragged.softmax import Rows, State, TileScales, TileWeights, Totals

_WARPGROUPS = 2  # that attend to a thin item


def attend_to_item(stage: Scalar, refs: Refs, kind: ItemKind) -> None:
    """Attends to the thin item in a stage, and stores its results."""
    smem, query_stage, band = refs.smem, items.query_stage(stage, kind.geometry), jnp.int32(0)
    item, tiles_before = items.read(stage, smem), items.tiles_before(stage, smem)
    warpgroup = lax.axis_index("warpgroup")
    rows = softmax.rows_of(item, band, refs.inputs_gmem, kind)
    places_smem = smem.query.rows.at[query_stage]
    query_smem = smem.query.rows.at[query_stage, warpgroup if kind.geometry.copies_queries else 0]
    rows = queries.wait(query_smem, query_stage, rows, refs, kind.geometry)
    first_tile = lax.rem(tiles_before + warpgroup, jnp.int32(2))
    # The warpgroup with the last tile takes over, because the other one is done earlier and can begin the next item.
    takes_over = lax.rem(item.num_tiles + first_tile, jnp.int32(2)) == 1
    query_done = smem.signal(Signal.QUERY_DONE, stage)
    pl.when(takes_over & (item.num_tiles == 0))(lambda: _signal_query_done(query_done))
    tiles = _ThinTiles(item, tiles_before, first_tile, rows, query_smem, query_done, refs, kind)
    state = tiles.attend()
    next_query = queries.read_next(stage, refs, kind.geometry)
    state = softmax.finished(state, rows)

    @pl.when(~takes_over)
    def hand_over():
        plgpu.barrier_wait(query_done)  # the handed-over O overwrites the query
        results.hand_over(state, rows, places_smem, smem, kind.geometry)

    # Both wait, because either may take over the next item.
    plgpu.barrier_wait(smem.signal(Signal.HANDED_OVER))

    @pl.when(takes_over)
    def finish():
        whole = results.take_over(state, rows, places_smem, smem, kind.geometry)
        results.store(stage, band, whole, places_smem.at[0], refs, kind)
        if kind.geometry.reads_own_queries:
            plgpu.barrier_arrive(smem.signal(Signal.STORED))

    if kind.geometry.reads_own_queries:  # the softmax and the results have left the place of both copies of the query
        plgpu.barrier_wait(smem.signal(Signal.STORED))
    queries.finish(query_stage, next_query, refs, kind.geometry)
    items.finish(stage, smem)


def attend_or_pass_by(stage: Scalar, refs: Refs, kind: ItemKind) -> None:
    """Attends to the thin item in a stage with the first two computing warpgroups; a third one has no part in it."""
    if kind.geometry.tuning.computing_warpgroups == _WARPGROUPS:
        attend_to_item(stage, refs, kind)
        return
    attends = lax.axis_index("warpgroup") < _WARPGROUPS
    pl.when(attends)(lambda: attend_to_item(stage, refs, kind))
    pl.when(~attends)(lambda: _pass_by(stage, refs, kind.geometry))


def _pass_by(stage: Scalar, refs: Refs, geometry: Geometry) -> None:
    """Keeps up with the phases of the barriers of a thin item for which all computing warpgroups wait."""
    query_stage = items.query_stage(stage, geometry)
    plgpu.barrier_wait(refs.smem.signal(Signal.QUERY, query_stage))
    plgpu.barrier_arrive(refs.smem.query.consumed.at[query_stage])
    items.finish(stage, refs.smem)


def _signal_query_done(query_done: Ref) -> None:
    """Tells the warpgroup that hands over that no product needs the query any more.

    This warpgroup waits for the signal, too, so that it keeps up with the barrier's phase. The other one may be an item
    ahead. Each stage of items has its own barrier, because a second arrival would flip the barrier's phase back.
    """
    plgpu.barrier_arrive(query_done)
    plgpu.barrier_wait(query_done)


@dataclass(frozen=True)
class _ThinTiles:
    """A warpgroup's attention to every other tile of a thin item, from `first_tile` on."""

    item: Item
    tiles_before: Scalar
    first_tile: Scalar
    rows: Rows
    query_smem: Ref
    query_done: Ref
    refs: Refs
    kind: ItemKind

    def attend(self) -> State:
        """Attends to all of these tiles."""
        steps = lax.div(self.item.num_tiles - self.first_tile + 1, jnp.int32(2))
        return lax.fori_loop(0, steps, self._attend_to_tile, softmax.empty(self.kind.geometry))

    def _attend_to_tile(self, i: Scalar, state: State) -> State:
        """Both products of a tile, and the softmax between them."""
        out, *totals = state
        smem, barriers = self.refs.smem, self.refs.smem.barriers(self.kind)
        tile = self.first_tile + 2 * i
        stage = lax.rem(self.tiles_before + tile, jnp.int32(self.kind.stages))
        plgpu.barrier_wait(barriers.keys_ready.at[stage])
        self._see_tiles()
        scores = product(self.query_smem, tile_of(smem.keys.tiles, stage, self.kind).T)
        plgpu.barrier_arrive(barriers.keys_consumed.at[stage])
        pl.when(tile == self.item.num_tiles - 1)(lambda: _signal_query_done(self.query_done))
        scales = TileScales(*(scales_of(ring, stage, self.kind) for ring in (smem.keys, smem.values)))
        span = plan.span_of(self.item, tile, self.kind)

        def weigh(plain: bool) -> TileWeights:
            weighed = softmax.attend(scores, Totals(*totals), span, scales, self.rows, self.kind, plain=plain)
            return weighed._replace(weights=weighed.weights.astype(self.kind.geometry.operand_dtype))

        is_plain = softmax.is_plain(span, self.rows, self.kind)
        weighed = lax.cond(is_plain, lambda: weigh(True), lambda: weigh(False))
        out = lanes.rescaled(out, weighed.rescale)
        plgpu.barrier_wait(barriers.values_ready.at[stage])
        values_smem = tile_of(smem.values.tiles, stage, self.kind)
        if self.kind.zeroes_when_read:  # the weights of these rows are 0, but 0 * NaN is NaN
            end = plan.rank_of(span.values_end, span.pattern, self.kind.geometry) - span.rank
            pl.when(end < self.kind.tile)(lambda: tiles.zero_rows_from(values_smem, end, self.kind))
        self._see_tiles()
        out = products.accumulate(out, weighed.weights, values_smem)
        plgpu.barrier_arrive(barriers.values_consumed.at[stage])
        return State(out, *weighed.totals)

    def _see_tiles(self) -> None:
        """Lets products see tiles that the loading warpgroup has converted."""
        if self.kind.geometry.converts_tiles:
            ptx_rows.see_copies()
