"""A computing warpgroup's work for a wide item: attention of its own 64 rows to all tiles of the item.

Two warpgroups take turns at the matrix units (ping-pong scheduling). A turn is S of a tile followed by O of the tile
before. A warpgroup computes its softmax under its own O and under the other warpgroup's turn. If the softmax takes
longer than the products, O has two halves: the second one starts when the softmax has its maxima, and ends the turn.
Three warpgroups do the same without waiting for turns: products are a smaller part of their time, so they seldom meet
at the matrix units, and turns would only delay them (benchmarks/LOG.md, "Three warpgroups").

The compiler must not split a turn. So a turn has no branches except those of `softmax.attend`, and it computes no
operand of the next product. `lanes.settle` keeps the compiler from delaying the softmax until the products are done.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.products import product
from paged_jax.kernels.mosaic_gpu.ragged import items, plan, queries, results, softmax
from paged_jax.kernels.mosaic_gpu.ragged.kinds import ItemKind
from paged_jax.kernels.mosaic_gpu.ragged.load_tiles import scales_of
from paged_jax.kernels.mosaic_gpu.ragged.plan import Item
from paged_jax.kernels.mosaic_gpu.ragged.ptx import lanes, products
from paged_jax.kernels.mosaic_gpu.ragged.refs import Ref, Refs, Signal
from paged_jax.kernels.mosaic_gpu.ragged.softmax import Rows, State, TileScales, TileWeights, Totals

_Carry = tuple[State, Array]  # O without the last tile, maxima and sums with it, and its P


def attend_to_item(stage: Scalar, refs: Refs, kind: ItemKind) -> None:
    """Attends to the wide item in a stage, and stores its results."""
    smem, query_stage = refs.smem, items.query_stage(stage, kind.geometry)
    item, tiles_before = items.read(stage, smem), items.tiles_before(stage, smem)
    warpgroup = lax.axis_index("warpgroup")
    rows = softmax.rows_of(item, warpgroup, refs.inputs_gmem, kind)
    query_smem = smem.query.rows.at[query_stage, warpgroup]
    rows = queries.wait(query_smem, query_stage, rows, refs, kind.geometry)
    tiles = _WideTiles(item, tiles_before, rows, query_smem, warpgroup, refs, kind)
    state = lax.cond(item.num_tiles > 0, tiles.attend, lambda: softmax.empty(kind.geometry))
    next_query = queries.read_next(stage, refs, kind.geometry)
    state = softmax.finished(state, rows)
    warpgroup = lax.axis_index("warpgroup")  # again, so that no register holds it over the loop
    results.store(stage, warpgroup, state, smem.query.rows.at[query_stage, warpgroup], refs, kind)
    queries.finish(query_stage, next_query, refs, kind.geometry)


@dataclass(frozen=True)
class _WideTiles:
    """A warpgroup's attention to the tiles of a wide item with at least one tile."""

    item: Item
    tiles_before: Scalar
    rows: Rows
    query_smem: Ref
    warpgroup: Scalar
    refs: Refs
    kind: ItemKind

    def attend(self) -> State:
        """Attends to all tiles."""

        def is_left(state):
            return state[0] < self.item.num_tiles

        state = jnp.int32(1), self._attend_to_first_tile()
        (out, *totals), weights = lax.while_loop(is_left, lambda state: self._attend_to_similar_tiles(*state), state)[1]
        values, stage = self.refs.smem.values, self._stage(self.item.num_tiles - 1)
        plgpu.barrier_wait(values.ready.at[stage])
        self._wait_for_turn()
        out = products.accumulate(out, weights, values.tiles.at[stage], self._end_turn)
        plgpu.barrier_arrive(values.consumed.at[stage])
        return State(out, *totals)

    def _attend_to_first_tile(self) -> _Carry:
        """S and the softmax of the first tile."""
        first, keys = jnp.int32(0), self.refs.smem.keys
        state, stage = softmax.empty(self.kind.geometry), self._stage(first)
        plgpu.barrier_wait(keys.ready.at[stage])
        self._wait_for_turn()
        scores = product(self.query_smem, keys.tiles.at[stage].T, self._end_turn)
        # The product is done, so the branch cannot lie within a turn.
        weigh = functools.partial(self._weigh, first, Totals(state.maxima, state.sums), scores)
        weighed = lax.cond(self._is_plain(first), lambda: weigh(plain=True), lambda: weigh(plain=False))
        return State(state.out, *weighed.totals), self._rounded(weighed)

    def _attend_to_similar_tiles(self, i: Scalar, carry: _Carry) -> tuple[Scalar, _Carry]:
        """Attends to tile i and the next ones while `is_plain` stays the same. A branch in a tile would split turns."""

        def run(plain: bool):
            def goes_on(state):
                is_left, is_plain = state[0] < self.item.num_tiles, self._is_plain(state[0])
                return is_left & (is_plain if plain else ~is_plain)

            def attend_one(state):
                return state[0] + 1, self._attend_to_tile(*state, plain=plain)

            return lax.while_loop(goes_on, attend_one, (i, carry))

        return lax.cond(self._is_plain(i), lambda: run(True), lambda: run(False))

    def _attend_to_tile(self, i: Scalar, carry: _Carry, *, plain: bool) -> _Carry:
        """S and the softmax of tile i, and O of the tile before."""
        (out, *totals), weights = carry
        keys, values = self.refs.smem.keys, self.refs.smem.values
        stage, earlier = self._stage(i), self._stage(i - 1)
        plgpu.barrier_wait(keys.ready.at[stage])
        plgpu.barrier_wait(values.ready.at[earlier])
        self._wait_for_turn()
        weigh = functools.partial(self._weigh, i, Totals(*totals), plain=plain)
        keys_smem, values_smem = keys.tiles.at[stage], values.tiles.at[earlier]
        weighed, out = products.score_and_accumulate(
            self.query_smem,
            keys_smem,
            out,
            weights,
            values_smem,
            self._end_turn,
            weigh,
            in_halves=self.kind.geometry.softmax_outlasts_products,
        )
        plgpu.barrier_arrive(values.consumed.at[earlier])
        # The next product's operand must not be computed while the last product reads its own from registers.
        weights = self._rounded(weighed)
        return State(lanes.rescaled(out, weighed.rescale), *weighed.totals), weights

    def _weigh(
        self, i: Scalar, totals: Totals, scores: Array, at_maxima: Callable[[], None] | None = None, *, plain: bool
    ) -> TileWeights:
        """The softmax of a tile, from its S; `at_maxima` runs between maxima and exponentials."""
        smem, stage = self.refs.smem, self._stage(i)
        plgpu.barrier_arrive(smem.keys.consumed.at[stage])
        scales = TileScales(*(scales_of(ring, stage, self.kind) for ring in (smem.keys, smem.values)))
        span = plan.span_of(self.item, i, self.kind)
        weighed = softmax.attend(scores, totals, span, scales, self.rows, self.kind, at_maxima, plain=plain)
        lanes.settle(weighed.totals.sums, smem.of_rows)
        return weighed

    def _rounded(self, weighed: TileWeights) -> Array:
        """P in the dtype of the second product."""
        return weighed.weights.astype(self.kind.geometry.operand_dtype)

    def _is_plain(self, i: Scalar) -> Scalar:
        return softmax.is_plain(plan.span_of(self.item, i, self.kind), self.rows, self.kind)

    def _stage(self, i: Scalar) -> Scalar:
        return lax.rem(self.tiles_before + i, jnp.int32(self.kind.stages))

    def _wait_for_turn(self) -> None:
        if self.kind.geometry.takes_turns:
            plgpu.barrier_wait(self.refs.smem.signal(Signal.TURN, self.warpgroup))

    def _end_turn(self) -> None:
        if self.kind.geometry.takes_turns:
            plgpu.barrier_arrive(self.refs.smem.signal(Signal.TURN, 1 - self.warpgroup))
