"""Device code of the loading warpgroup: work items into the queue, their queries and tiles into shared memory."""

from dataclasses import fields

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.device import ragged_plan as plan
from paged_jax.kernels.mosaic_gpu.device import ragged_rows as rows
from paged_jax.kernels.mosaic_gpu.ragged_tuning import QUEUE, Config

_WARPS = 4  # of a warpgroup


def load_items(refs, cfg: Config) -> None:
    """Claims items one after the other, tells the computing warpgroups of each, and copies what it needs.

    A program begins with the wide items or the thin ones, so that both are worked on all the time, as one takes the
    matrix units and the other the memory; it turns to the others when its own are all claimed.
    """
    per_split, of_wide = plan.work(refs, cfg)
    program = lax.axis_index("program")
    wide, thin = plan.lines(cfg)
    state = jnp.int32(0), jnp.int32(0)  # items and tiles so far
    begins_wide = program < of_wide

    def take_all(line: plan.Line, state, first, step):
        def turn(carry):
            _, cursor, number, (items, tiles) = carry
            number = rows.claim(refs.counts_gmem, refs.claim_smem, int(not line.wide)) if _queued(cfg) else number
            cursor, item = plan.find(number, cursor, per_split, line, refs, cfg)
            pl.when(item.kind > 0)(lambda: _load_item(item, items, tiles, refs, cfg))
            some = item.kind > 0
            state = items + some.astype(jnp.int32), tiles + jnp.where(some, item.count, 0)
            return some, cursor, number + step, state

        return lax.while_loop(lambda carry: carry[0], turn, (jnp.bool_(True), plan.start(), first, state))[3]

    if _queued(cfg):
        # Thin, wide, thin: those that begin with wide ones skip the first turn.
        def line_of(turn, state):
            is_wide = begins_wide ^ (turn == 1)
            return lax.cond(
                is_wide,
                lambda state: take_all(wide, state, jnp.int32(0), 1),
                lambda state: take_all(thin, state, jnp.int32(0), 1),
                state,
            )

        state = lax.fori_loop(0, 2, line_of, state)
    else:
        of_thin = jnp.int32(cfg.tuning.num_programs) - of_wide
        state = lax.cond(
            begins_wide,
            lambda state: take_all(wide, state, program, of_wide),
            lambda state: take_all(thin, state, program - of_wide, of_thin),
            state,
        )
    items, tiles = state
    none = plan.Item(*[jnp.int32(0)] * len(fields(plan.Item)))
    _describe(none, items, refs)
    _drain(items + 1, tiles, refs, cfg)


def read_item(items: plan.Scalar, refs) -> plan.Item:
    """The item that follows the first `items`, as a computing warpgroup finds it in the queue."""
    place = lax.rem(items, jnp.int32(QUEUE))
    plgpu.barrier_wait(refs.item_ready.at[place])
    item = plan.Item(*[refs.items_smem[place, i] for i in range(len(fields(plan.Item)))])
    plgpu.barrier_arrive(refs.item_consumed.at[place])
    return item


def _queued(cfg: Config) -> bool:
    return cfg.tuning.claim == "queue"


def _describe(item: plan.Item, items: plan.Scalar, refs) -> None:
    place = lax.rem(items, jnp.int32(QUEUE))

    @pl.when(items >= QUEUE)
    def _():
        plgpu.barrier_wait(refs.item_consumed.at[place])

    for i, value in enumerate(jax.tree.leaves(item)):
        refs.items_smem[place, i] = value
    plgpu.barrier_arrive(refs.item_ready.at[place])


def _load_item(item: plan.Item, items: plan.Scalar, before: plan.Scalar, refs, cfg: Config) -> None:
    """Describes an item and copies its tiles, after those `before`, and its query."""
    _describe(item, items, refs)
    def load_query():
        pl.when(items > 0)(lambda: plgpu.barrier_wait(refs.q_consumed))
        half = jnp.int32(cfg.half)
        rows.load_queries(
            refs.query_gmem, refs.q_smem.at[0], item.first_token, lax.min(item.tokens, half), item.head, cfg
        )

        @pl.when(item.kind == 1)
        def _():
            rows.load_queries(
                refs.query_gmem, refs.q_smem.at[1], item.first_token + half, item.tokens - half, item.head, cfg
            )

        plgpu.barrier_arrive(refs.q_ready)

    def load_tile(i):
        stage = lax.rem(before + i, jnp.int32(cfg.tuning.stages))
        start = item.origin + i * cfg.tuning.tile
        @pl.when(before + i >= cfg.tuning.stages)
        def _():
            plgpu.barrier_wait(refs.k_consumed.at[stage])

        _copy(refs.key_cache_gmem, refs.k_smem.at[stage], refs.k_ready.at[stage], start, item, refs, cfg)

        @pl.when(before + i >= cfg.tuning.stages)
        def _():
            plgpu.barrier_wait(refs.v_consumed.at[stage])

        low, high = item.low - start, item.high - start
        edge = (high < cfg.tuning.tile) | (low > 0)

        @pl.when(~edge)
        def _():
            _copy(refs.value_cache_gmem, refs.v_smem.at[stage], refs.v_ready.at[stage], start, item, refs, cfg)

        @pl.when(edge)
        def _():
            # Weights of tokens that nobody sees are 0, but 0 * NaN would be NaN.
            _copy(refs.value_cache_gmem, refs.v_smem.at[stage], refs.edge_landed, start, item, refs, cfg)
            plgpu.barrier_wait(refs.edge_landed)
            rows.zero_tokens(refs.v_smem.at[stage], low, high, cfg)
            for _ in range(cfg.runs):
                plgpu.barrier_arrive(refs.v_ready.at[stage])

    pl.when(item.count > 0)(lambda: load_tile(jnp.int32(0)))
    load_query()

    @pl.loop(1, item.count)
    def _(i):
        load_tile(i)


def _copy(cache_gmem, tile_smem, ready, start, item: plan.Item, refs, cfg: Config) -> None:
    """Copies the runs of a tile from position `start` on, the warps in turn; past the end the last run again."""
    block_size = jnp.int32(cfg.problem.block_size)
    last = lax.max(lax.div(item.high - 1, jnp.int32(cfg.run)) * cfg.run, jnp.int32(0))

    def copy_run(run):
        token = lax.min(start + run * cfg.run, last)
        block, offset = refs.block_tables_gmem[item.seq, lax.div(token, block_size)], lax.rem(token, block_size)
        whole = cfg.run == cfg.problem.block_size
        tokens = slice(None) if whole else pl.ds(offset, cfg.run)
        index = (block, tokens, item.head) if cfg.problem.layout == "nhd" else (block, item.head, tokens)
        plgpu.copy_gmem_to_smem(cache_gmem.at[index], tile_smem.at[pl.ds(run * cfg.run, cfg.run)], ready)

    @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
    def copy_in_turn():
        for warp in range(_WARPS):

            @pl.when(lax.axis_index("warp") == warp)
            def _(warp=warp):
                for run in range(warp, cfg.runs, _WARPS):
                    copy_run(run)


def _drain(items: plan.Scalar, tiles: plan.Scalar, refs, cfg: Config) -> None:
    """Barriers end as they began, which the interpreter insists on: waits for all that nobody else waits for."""
    for count, most, barriers in (
        (items, QUEUE, (refs.item_consumed,)),
        (tiles, cfg.tuning.stages, (refs.k_consumed, refs.v_consumed)),
    ):

        @pl.loop(lax.max(count - most, jnp.int32(0)), count)
        def _(i, most=most, barriers=barriers):
            for barrier in barriers:
                plgpu.barrier_wait(barrier.at[lax.rem(i, jnp.int32(most))])

    pl.when(items > 1)(lambda: plgpu.barrier_wait(refs.q_consumed))
