"""Device code of the loading warpgroup: work items into the queue, their queries and tiles into shared memory."""

import functools
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
    of_wide = refs.of_wide_gmem[0]
    program = lax.axis_index("program")
    wide, thin = plan.lines(cfg)
    begins_wide = program < of_wide

    def take_all(line: plan.Line, items, first, step):
        """Claims items until the line has no more; returns how many there were with those before."""

        def turn(carry):
            _, number, items, tiles = carry
            number = rows.claim(refs.counts_gmem, refs.claim_smem, int(not line.wide)) if _queued(cfg) else number
            item = plan.find(number, line, refs, cfg)
            some = item.kind > 0
            pl.when(some)(lambda: _load_item(item, items, tiles, line, refs, cfg))
            return some, number + step, items + some.astype(jnp.int32), tiles + jnp.where(some, item.count, 0)

        state = jnp.bool_(True), first, items, jnp.int32(0)
        *_, items, tiles = lax.while_loop(lambda carry: carry[0], turn, state)
        _drain(tiles, *_rings(line, refs)[1::2], size=cfg.tuning.stages)
        return items

    if _queued(cfg):

        def take_line(turn, items):
            is_wide = begins_wide ^ (turn == 1)
            takes = [functools.partial(take_all, line, first=jnp.int32(0), step=1) for line in (wide, thin)]
            return lax.cond(is_wide, *takes, items)

        items = lax.fori_loop(0, 2, take_line, jnp.int32(0))
    else:
        of_thin = jnp.int32(cfg.tuning.num_programs) - of_wide
        takes = (
            functools.partial(take_all, wide, first=program, step=of_wide),
            functools.partial(take_all, thin, first=program - of_wide, step=of_thin),
        )
        items = lax.cond(begins_wide, *takes, jnp.int32(0))
    none = plan.Item(*[jnp.int32(0)] * len(fields(plan.Item)))
    _describe(none, items, refs)
    # Barriers end as they began, which the interpreter insists on.
    _drain(items + 1, refs.item_consumed, size=QUEUE)
    pl.when(items > 0)(lambda: plgpu.barrier_wait(refs.q_consumed))


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


def _load_item(item: plan.Item, items: plan.Scalar, before: plan.Scalar, line: plan.Line, refs, cfg: Config) -> None:
    """Describes an item and copies its tiles, after those `before`, and its query."""
    _describe(item, items, refs)
    k_ready, k_consumed, v_ready, v_consumed = _rings(line, refs)

    def load_query():
        pl.when(items > 0)(lambda: plgpu.barrier_wait(refs.q_consumed))
        half = jnp.int32(cfg.half)
        rows.load_queries(
            refs.query_gmem, refs.q_smem.at[0], item.first_token, lax.min(item.tokens, half), item.head, cfg
        )

        if line.wide:
            rows.load_queries(
                refs.query_gmem, refs.q_smem.at[1], item.first_token + half, item.tokens - half, item.head, cfg
            )

        plgpu.barrier_arrive(refs.q_ready)

    def load_tile(i):
        stage = lax.rem(before + i, jnp.int32(cfg.tuning.stages))
        start = item.origin + i * cfg.tuning.tile

        @pl.when(before + i >= cfg.tuning.stages)
        def _():
            plgpu.barrier_wait(k_consumed.at[stage])

        _copy(refs.key_cache_gmem, refs.k_smem.at[stage], k_ready.at[stage], start, item, refs, cfg)

        @pl.when(before + i >= cfg.tuning.stages)
        def _():
            plgpu.barrier_wait(v_consumed.at[stage])

        low, high = item.low - start, item.high - start
        edge = (high < cfg.tuning.tile) | (low > 0)

        @pl.when(~edge)
        def _():
            _copy(refs.value_cache_gmem, refs.v_smem.at[stage], v_ready.at[stage], start, item, refs, cfg)

        @pl.when(edge)
        def _():
            # Weights of tokens that nobody sees are 0, but 0 * NaN would be NaN.
            _copy(refs.value_cache_gmem, refs.v_smem.at[stage], refs.edge_landed, start, item, refs, cfg)
            plgpu.barrier_wait(refs.edge_landed)
            rows.zero_tokens(refs.v_smem.at[stage], low, high, cfg)
            for _ in range(cfg.runs):
                plgpu.barrier_arrive(v_ready.at[stage])

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

    def copy_in_turn():
        for warp in range(_WARPS):

            @pl.when(lax.axis_index("warp") == warp)
            def _(warp=warp):
                for run in range(warp, cfg.runs, _WARPS):
                    copy_run(run)

    pl.kernel(copy_in_turn, mesh=plgpu.WarpMesh(axis_name="warp"))()  # pyright: ignore[reportCallIssue]


def _rings(line: plan.Line, refs):
    """Barriers of the rings, K's and V's ready and consumed: wide items and thin ones have their own."""
    if line.wide:
        return refs.k_ready, refs.k_consumed, refs.v_ready, refs.v_consumed
    return refs.thin_k_ready, refs.thin_k_consumed, refs.thin_v_ready, refs.thin_v_consumed


def _drain(count: plan.Scalar, *consumed, size: int) -> None:
    """Waits until all that came into a ring is consumed: what follows may be for other readers."""

    @pl.loop(lax.max(count - size, jnp.int32(0)), count)
    def _(i):
        for barrier in consumed:
            plgpu.barrier_wait(barrier.at[lax.rem(i, jnp.int32(size))])
