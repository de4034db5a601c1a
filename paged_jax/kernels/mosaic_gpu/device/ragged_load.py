"""Device code of the loading warpgroup: work items into the queue, their queries and tiles into shared memory."""

import functools
from dataclasses import fields
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.device import ragged_plan as plan
from paged_jax.kernels.mosaic_gpu.device import ragged_rows as rows
from paged_jax.kernels.mosaic_gpu.ragged_tuning import QUEUE, Config, Line

_WARPS = 4  # of a warpgroup


def load_items(refs, cfg: Config) -> None:
    """Claims items one after the other, tells the computing warpgroups of each, and copies what it needs.

    A program begins with the wide items or the thin ones, so that both are worked on all the time, as one takes the
    matrix units and the other the memory; it turns to the others when its own are all claimed.
    """
    program, of_wide = lax.axis_index("program"), refs.of_wide_gmem[0]
    begins_wide = program < of_wide

    def take_all(line: Line, items, own):
        """Takes items until the line has no more; returns how many there were with those before.

        The programs that begin with a line have its first items without a claim.
        """
        begin = of_wide if line.wide else jnp.int32(cfg.tuning.num_programs) - of_wide
        following = functools.partial(_next, line, begin, refs, cfg)
        own_first = program - jnp.where(line.wide, 0, of_wide) if _queued(cfg) else program
        first = lax.cond(own | (not _queued(cfg)), lambda: own_first, lambda: following(own_first))

        def turn(carry):
            _, number, items, tiles = carry
            item = plan.find(number, line, refs, cfg)
            some = item.kind > 0
            take = functools.partial(
                _load_item, item, items, tiles, functools.partial(following, number), line, refs, cfg
            )
            number = lax.cond(some, take, lambda: number)
            return some, number, items + some.astype(jnp.int32), tiles + jnp.where(some, item.count, 0)

        *_, items, tiles = lax.while_loop(lambda carry: carry[0], turn, (jnp.bool_(True), first, items, jnp.int32(0)))
        _drain(tiles, *_rings(line, refs)[1::2], size=line.stages)
        return items

    def take_line(turn, items):
        takes = [functools.partial(take_all, line, own=turn == 0) for line in cfg.lines]
        return lax.cond(begins_wide ^ (turn == 1), *takes, items)

    items = lax.fori_loop(0, 2, take_line, jnp.int32(0))
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


def _next(line: Line, begin, refs, cfg: Config, number) -> plan.Scalar:
    """The number of the item that a program takes after another one."""
    if not _queued(cfg):
        return number + cfg.tuning.num_programs
    return begin + rows.claim(refs.counts_gmem, refs.claim_smem, int(not line.wide))


def _queued(cfg: Config) -> bool:
    return cfg.tuning.claim == "queue"


def _describe(item: plan.Item, items: plan.Scalar, refs) -> None:
    place = lax.rem(items, jnp.int32(QUEUE))

    @pl.when(items >= QUEUE)
    def _():
        plgpu.barrier_wait(refs.item_consumed.at[place])

    rows.store_words(refs.items_smem, place, jax.tree.leaves(item))
    plgpu.barrier_arrive(refs.item_ready.at[place])


def _load_item(item: plan.Item, items, before, following, line: Line, refs, cfg: Config) -> plan.Scalar:
    """Describes an item and copies its tiles, after those `before`, and its query; returns what `following` does.

    That is called while the first tiles are on their way.
    """
    _describe(item, items, refs)
    k_ready, k_consumed, v_ready, v_consumed = _rings(line, refs)

    def load_query():
        pl.when(items > 0)(lambda: plgpu.barrier_wait(refs.q_consumed))
        half = jnp.int32(cfg.half)
        rows.load_queries(
            refs.query_gmem, refs.q_smem.at[0], item.first_token, lax.min(item.tokens, half), item.kv_head, cfg
        )

        if line.wide:
            rows.load_queries(
                refs.query_gmem, refs.q_smem.at[1], item.first_token + half, item.tokens - half, item.kv_head, cfg
            )

        plgpu.barrier_arrive(refs.q_ready)

    def load_tile(i):
        stage = lax.rem(before + i, jnp.int32(line.stages))
        start = item.origin + i * line.tile

        @pl.when(before + i >= line.stages)
        def _():
            plgpu.barrier_wait(k_consumed.at[stage])

        _copy(
            refs.key_cache_gmem, tile_of(refs.k_smem, stage, line, cfg), k_ready.at[stage], start, item, line, refs, cfg
        )

        @pl.when(before + i >= line.stages)
        def _():
            plgpu.barrier_wait(v_consumed.at[stage])

        v_smem = tile_of(refs.v_smem, stage, line, cfg)
        low, high = item.low - start, item.high - start
        edge = (high < line.tile) | (low > 0)

        @pl.when(~edge)
        def _():
            _copy(refs.value_cache_gmem, v_smem, v_ready.at[stage], start, item, line, refs, cfg)

        @pl.when(edge)
        def _():
            # Weights of tokens that nobody sees are 0, but 0 * NaN would be NaN.
            landed = refs.edge_landed if line.wide else refs.thin_edge_landed
            _copy(refs.value_cache_gmem, v_smem, landed, start, item, line, refs, cfg)
            plgpu.barrier_wait(landed)
            rows.zero_tokens(v_smem, low, high, line, cfg)
            for _ in range(line.runs):
                plgpu.barrier_arrive(v_ready.at[stage])

    pl.when(item.count > 0)(lambda: load_tile(jnp.int32(0)))
    load_query()
    pl.when(item.count > 1)(lambda: load_tile(jnp.int32(1)))
    number = following()

    @pl.loop(2, item.count)
    def _(i):
        load_tile(i)

    return number


def _copy(cache_gmem, tile_smem, ready, start, item: plan.Item, line: Line, refs, cfg: Config) -> None:
    """Copies the runs of a tile from position `start` on, the warps in turn; past the end the last run again."""
    block_size = jnp.int32(cfg.problem.block_size)
    last = lax.max(lax.div(item.high - 1, jnp.int32(line.run)) * line.run, jnp.int32(0))

    def copy_run(run):
        token = lax.min(start + run * line.run, last)
        block, offset = refs.block_tables_gmem[item.seq, lax.div(token, block_size)], lax.rem(token, block_size)
        whole = line.run == cfg.problem.block_size
        tokens = slice(None) if whole else pl.ds(offset, line.run)
        index = (block, tokens, item.kv_head) if cfg.problem.layout == "nhd" else (block, item.kv_head, tokens)
        plgpu.copy_gmem_to_smem(cache_gmem.at[index], tile_smem.at[pl.ds(run * line.run, line.run)], ready)

    def copy_in_turn():
        for warp in range(_WARPS):

            @pl.when(lax.axis_index("warp") == warp)
            def _(warp=warp):
                for run in range(warp, line.runs, _WARPS):
                    copy_run(run)

    pl.kernel(copy_in_turn, mesh=plgpu.WarpMesh(axis_name="warp"))()  # pyright: ignore[reportCallIssue]


def tile_of(ring_smem, stage, line: Line, cfg: Config) -> Any:
    """A tile of a ring. A thin one is a piece of a wide one."""
    pieces = cfg.tuning.tile // line.tile
    if pieces == 1:
        return ring_smem.at[stage]
    first = pl.multiple_of(lax.rem(stage, jnp.int32(pieces)) * line.tile, line.tile)
    return ring_smem.at[lax.div(stage, jnp.int32(pieces)), pl.ds(first, line.tile)]


def _rings(line: Line, refs):
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
