"""What the loading warpgroup does: it describes work items in a queue, and copies their queries and their tiles.

It is ahead of those who compute. While the tiles of an item are on their way, it finds the next item and copies its
query, for which there are two places in turn; results leave through the place of their query. Rings of tiles go on from
one item to the next.
"""

import functools
from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.device import ragged_count as count
from paged_jax.kernels.mosaic_gpu.device import ragged_plan as plan
from paged_jax.kernels.mosaic_gpu.device import ragged_rows as rows
from paged_jax.kernels.mosaic_gpu.device import ragged_tiles
from paged_jax.kernels.mosaic_gpu.device.ragged_plan import Item, Scalar, Span, Work
from paged_jax.kernels.mosaic_gpu.device.ragged_softmax import SlotScales
from paged_jax.kernels.mosaic_gpu.ragged_tuning import QUEUE, Config, Line

_WARPS = 4  # of a warpgroup


class Ring(NamedTuple):
    """Barriers of the tiles in shared memory: wide items and thin ones have their own, and count their tiles from 0."""

    k_ready: Any
    k_consumed: Any
    v_ready: Any
    v_consumed: Any
    landed: Any  # a tile of V has arrived, of which the loading warpgroup has to zero something
    raw_k_ready: Any  # a tile has arrived that is not what the products take yet
    raw_v_ready: Any


def ring_of(line: Line, refs) -> Ring:
    """The barriers of a line's ring."""
    prefix = "" if line.wide else "thin_"
    return Ring(*[getattr(refs, prefix + name, None) for name in Ring._fields])


def load_items(refs, cfg: Config) -> None:
    """Takes items one after the other, tells the computing warpgroups of each, and copies what it needs.

    A program begins with the wide items or the thin ones, so that both are worked on all the time, as one takes the
    matrix units and the other the memory; it turns to the others when its own are all taken.
    """
    work = count.work(refs, cfg)
    program, of_wide = lax.axis_index("program"), work.of_wide[0]
    begins_wide = program < of_wide

    def take_line(turn, items):
        def take(line: Line):
            begin = of_wide if line.wide else jnp.int32(cfg.tuning.num_programs) - of_wide
            if _queued(cfg):
                own = program if line.wide else program - of_wide
                first = lax.cond(turn == 0, lambda: own, lambda: _next(own, begin, line, refs, cfg))
            else:
                first = program
            return _take_items(first, begin, items, line, work, refs, cfg)

        return lax.cond(begins_wide ^ (turn == 1), *(lambda line=line: take(line) for line in cfg.lines))

    items = lax.fori_loop(0, 2, take_line, jnp.int32(0))
    _describe(Item(*[jnp.int32(0)] * len(fields(Item))), items, refs)
    # Barriers end as they began, which the interpreter insists on.
    drain(items + 1, refs.item_consumed, size=QUEUE)
    drain(items, refs.q_consumed, size=cfg.tuning.queries)


def _take_items(first, begin, items, line: Line, work: Work, refs, cfg: Config) -> Scalar:
    """Takes items of a line from the number `first` on, until there are no more; returns how many there were before.

    The programs that begin with a line have its items before `begin` without a claim.
    """
    ring = ring_of(line, refs)

    def begin_item(number, items):
        """Describes an item, if there is one, and has its query on its way; returns whether there is one."""
        item = plan.find(number, line, work, refs, cfg)
        some = item.kind > 0

        @pl.when(some)
        def begin():
            place = place_of_query(items, cfg)
            is_reused = items >= cfg.tuning.queries
            pl.when(is_reused)(lambda: plgpu.barrier_wait(refs.q_consumed.at[place]))
            _load_query(item, place, line, refs, cfg)
            _describe(item, items, refs)

        return some

    def turn(carry):
        _, number, items, tiles = carry
        item = _item_of(lax.rem(items, jnp.int32(QUEUE)), refs)

        def load_tile(i):
            _load_tile(item, i, tiles, ring, line, refs, cfg)

        if cfg.converts:
            _begin_raw(item, tiles, ring, line, refs, cfg)
        pl.when(item.count > 0)(lambda: load_tile(jnp.int32(0)))
        rows.finish_copies()
        plgpu.barrier_arrive(refs.q_ready.at[place_of_query(items, cfg)])
        pl.when(item.count > 1)(lambda: load_tile(jnp.int32(1)))
        number = _next(number, begin, line, refs, cfg)

        def load_rest():
            begin = jnp.int32(2)
            if _has_whole_tiles(cfg):
                whole = lax.clamp(begin, _whole_tiles(item, line), lax.max(item.count, begin))
                _load_whole_tiles(item, begin, whole, tiles, ring, line, refs, cfg)
                begin = whole
            pl.loop(begin, item.count)(load_tile)

        if cfg.tuning.queries > 1:
            some = begin_item(number, items + 1)
            load_rest()
        else:  # the next query can only follow this one's results
            load_rest()
            some = begin_item(number, items + 1)
        return some, number, items + 1, tiles + item.count

    state = begin_item(first, items), first, items, jnp.int32(0)
    *_, items, tiles = lax.while_loop(lambda carry: carry[0], turn, state)
    drain(tiles, ring.k_consumed, ring.v_consumed, size=line.stages)
    return items


def read_item(items: Scalar, refs) -> Item:
    """The item that follows the first `items`, as a computing warpgroup finds it in the queue."""
    place = lax.rem(items, jnp.int32(QUEUE))
    plgpu.barrier_wait(refs.item_ready.at[place])
    item = _item_of(place, refs)
    plgpu.barrier_arrive(refs.item_consumed.at[place])
    return item


def place_of_query(items: Scalar, cfg: Config) -> Scalar:
    """Where the query is of the item that follows the first `items`."""
    return lax.rem(items, jnp.int32(cfg.tuning.queries))


def _item_of(place: Scalar, refs) -> Item:
    return Item(*[refs.items_smem[place, i] for i in range(len(fields(Item)))])


def _next(number, begin, line: Line, refs, cfg: Config) -> Scalar:
    """The number of the item that a program takes after another one."""
    if not _queued(cfg):
        return number + cfg.tuning.num_programs
    return begin + rows.claim(refs.counts_gmem, refs.claim_smem, int(not line.wide))


def _queued(cfg: Config) -> bool:
    return cfg.tuning.claim == "queue"


def _describe(item: Item, items: Scalar, refs) -> None:
    """Puts an item into the queue, as the one that follows the first `items`."""
    place = lax.rem(items, jnp.int32(QUEUE))
    pl.when(items >= QUEUE)(lambda: plgpu.barrier_wait(refs.item_consumed.at[place]))
    rows.store_words(refs.items_smem, place, jax.tree.leaves(item))
    plgpu.barrier_arrive(refs.item_ready.at[place])


def _load_query(item: Item, place, line: Line, refs, cfg: Config) -> None:
    """Has an item's query on its way to a place in shared memory."""
    half = jnp.int32(cfg.half)
    query_gmem, q_smem = refs.query_gmem, refs.q_smem
    first, tokens = item.first_token, item.tokens
    rows.load_queries(query_gmem, q_smem.at[place, 0], first, lax.min(tokens, half), item.kv_head, cfg)
    if line.wide:
        rows.load_queries(query_gmem, q_smem.at[place, 1], first + half, tokens - half, item.kv_head, cfg)


def _load_tile(item: Item, i, before, ring: Ring, line: Line, refs, cfg: Config) -> None:
    """Copies the i-th tile of an item into the rings, after the tiles that were there `before`."""
    stage = lax.rem(before + i, jnp.int32(line.stages))
    is_reused = before + i >= line.stages
    span = plan.span_of(item, i, line, cfg)
    low, end = item.low - span.start, span.end - span.start
    k_smem, v_smem = (tile_of(ring_smem, stage, line, cfg) for ring_smem in (refs.k_smem, refs.v_smem))
    k_ready, v_ready = ring.k_ready.at[stage], ring.v_ready.at[stage]

    def wait_for(consumed):
        pl.when(is_reused)(lambda: plgpu.barrier_wait(consumed.at[stage]))

    def wait_for_values():
        if not cfg.slot_scales:
            wait_for(ring.v_consumed)

    def convert():
        is_next = i + line.raw_stages < item.cached
        for is_key, ready in ((True, k_ready), (False, v_ready)):
            raw_smem, arrived = _raw(before + i, is_key, ring, line, refs, cfg)
            plgpu.barrier_wait(arrived)
            wait_for(ring.k_consumed) if is_key else wait_for_values()
            seen = (jnp.int32(0), jnp.int32(line.tile)) if is_key else (low, end)
            ragged_tiles.convert_tile(raw_smem, k_smem if is_key else v_smem, *seen, line, cfg)
            _arrive(ready, line)
            following = functools.partial(_load_raw, item, i + line.raw_stages, before, is_key, ring, line, refs, cfg)
            pl.when(is_next)(following)

    def copy():
        wait_for(ring.k_consumed)
        _copy(True, k_smem, k_ready, span, item, line, refs, cfg)
        wait_for_values()
        partly = (end < line.tile) | (low > 0)
        pl.when(~partly)(lambda: _copy(False, v_smem, v_ready, span, item, line, refs, cfg))

        @pl.when(partly)
        def copy_some():
            # Weights of tokens that nobody sees are 0, but 0 * NaN would be NaN.
            _copy(False, v_smem, ring.landed, span, item, line, refs, cfg)
            plgpu.barrier_wait(ring.landed)
            ragged_tiles.zero_tokens(v_smem, low, end, line, cfg)
            _arrive(v_ready, line)

    if cfg.slot_scales:
        # Both scales are read with the softmax: they have their places until the tile of V is consumed.
        wait_for(ring.v_consumed)
        for name, scale_gmem, ready in (("k", refs.k_scale_gmem, k_ready), ("v", refs.v_scale_gmem, v_ready)):
            if name in cfg.slot_scales:
                slots = getattr(refs, f"{name}_slots_smem").at[pl.ds(stage * line.tile, line.tile)]
                tables = refs.block_tables_gmem
                ragged_tiles.load_scales(
                    scale_gmem, tables, slots, item.seq, item.kv_head, span.start, low, end, line, cfg
                )
                plgpu.barrier_arrive(ready)

    def load_new():
        """Tiles of new tokens begin at any row of their arrays, which TMA does not take."""
        row = item.first_token + (span.start - item.position)
        for is_key, ready in ((True, k_ready), (False, v_ready)):
            wait_for(ring.k_consumed) if is_key else wait_for_values()
            new_gmem, tile_smem = (refs.key_gmem, k_smem) if is_key else (refs.value_gmem, v_smem)
            ragged_tiles.load_new(new_gmem, tile_smem, row, low, end, item.kv_head, line, cfg)
            rows.finish_copies()
            _arrive(ready, line)

    load_cached = convert if cfg.converts else copy
    if cfg.prefix:
        pl.when(span.is_new)(load_new)
        pl.when(~span.is_new)(load_cached)
    else:
        load_cached()


def _has_whole_tiles(cfg: Config) -> bool:
    """Whether tiles all of whose tokens have values are there as soon as they are copied."""
    return not (cfg.converts or cfg.slot_scales or cfg.prefix)


def _whole_tiles(item: Item, line: Line) -> Scalar:
    """How many of an item's tiles end before its sequence does."""
    return lax.div(item.end - item.origin, jnp.int32(line.tile))


def _load_whole_tiles(item: Item, begin, end, before, ring: Ring, line: Line, refs, cfg: Config) -> None:
    """Copies the tiles begin <= i < end, as `_load_tile` does, but no warp waits for another.

    All tokens of these tiles have values. Each warp has its own runs of every tile, and reads which blocks they are in
    while the tile before is on its way.
    """
    problem, size = cfg.problem, line.run
    last = lax.max(lax.div(item.end - 1, jnp.int32(size)) * size, jnp.int32(0))
    of_warp = max(line.runs // _WARPS, 1)

    def load_as_warp():
        first = lax.axis_index("warp") * of_warp

        def blocks_of(i):
            tokens = [lax.min(item.origin + i * line.tile + (first + j) * size, last) for j in range(of_warp)]
            return tuple(refs.block_tables_gmem[item.seq, lax.div(x, jnp.int32(problem.block_size))] for x in tokens)

        def load(i, blocks):
            following = blocks_of(i + 1)
            stage = lax.rem(before + i, jnp.int32(line.stages))
            rings = (
                (refs.key_cache_gmem, refs.k_smem, ring.k_consumed, ring.k_ready),
                (refs.value_cache_gmem, refs.v_smem, ring.v_consumed, ring.v_ready),
            )
            for cache_gmem, ring_smem, consumed, ready in rings:
                pl.when(before + i >= line.stages)(lambda consumed=consumed: plgpu.barrier_wait(consumed.at[stage]))
                tile_smem = tile_of(ring_smem, stage, line, cfg)

                def copy(cache_gmem=cache_gmem, tile_smem=tile_smem, ready=ready):
                    for j, block in enumerate(blocks):
                        token = item.origin + i * line.tile + (first + j) * size
                        run_gmem = _run_gmem(cache_gmem, block, token, item, line, cfg)
                        plgpu.copy_gmem_to_smem(
                            run_gmem, tile_smem.at[pl.ds((first + j) * size, size)], ready.at[stage]
                        )

                pl.when(first < line.runs)(copy) if line.runs < _WARPS else copy()
            return following

        lax.fori_loop(begin, end, load, blocks_of(begin))

    pl.kernel(load_as_warp, mesh=plgpu.WarpMesh(axis_name="warp"))()  # pyright: ignore[reportCallIssue]


def _run_gmem(cache_gmem, block, token, item: Item, line: Line, cfg: Config) -> Any:
    """The run of a cache that begins with a token, in a block."""
    problem, size = cfg.problem, line.run
    if size == problem.block_size:
        tokens = slice(None)
    else:  # Mosaic sees that a product is a multiple.
        of_block = lax.rem(lax.div(token, jnp.int32(size)), jnp.int32(problem.block_size // size))
        tokens = pl.ds(of_block * size, size)
    index = (block, tokens, item.kv_head) if problem.layout == "nhd" else (block, item.kv_head, tokens)
    return cache_gmem.at[index]


def _arrive(ready, line: Line) -> None:
    """Arrives for all runs of a tile."""
    for _ in range(line.runs):
        plgpu.barrier_arrive(ready)


def _begin_raw(item: Item, before, ring: Ring, line: Line, refs, cfg: Config) -> None:
    """Has an item's first tiles on their way to where they are converted from."""
    for i in range(line.raw_stages):
        for is_key in (True, False):
            load = functools.partial(_load_raw, item, jnp.int32(i), before, is_key, ring, line, refs, cfg)
            pl.when(i < item.cached)(load)


def _load_raw(item: Item, i, before, is_key: bool, ring: Ring, line: Line, refs, cfg: Config) -> None:
    """Has the i-th tile of an item's K or V on its way to where it is converted from."""
    raw_smem, arrived = _raw(before + i, is_key, ring, line, refs, cfg)
    _copy(is_key, raw_smem, arrived, plan.span_of(item, i, line, cfg), item, line, refs, cfg)


def _raw(tiles, is_key: bool, ring: Ring, line: Line, refs, cfg: Config) -> tuple[Any, Any]:
    """Where the tile that follows the first `tiles` is converted from, and the barrier that says it is there."""
    raw_smem, arrived = (refs.raw_k_smem, ring.raw_k_ready) if is_key else (refs.raw_v_smem, ring.raw_v_ready)
    stage = lax.rem(tiles, jnp.int32(line.raw_stages))
    if line.raw_stages > 1:
        raw_smem = raw_smem.at[pl.ds(pl.multiple_of(stage * line.tile, line.tile), line.tile)]
    return raw_smem, arrived.at[stage]


def _copy(is_key: bool, tile_smem, ready, span: Span, item: Item, line: Line, refs, cfg: Config) -> None:
    """Copies the runs of a tile of K or V, the warps in turn; past the end the last run again."""
    problem, size = cfg.problem, line.run
    cache_gmem = refs.key_cache_gmem if is_key else refs.value_cache_gmem
    last = lax.max(lax.div(span.high - 1, jnp.int32(size)) * size, jnp.int32(0))

    def copy_run(run):
        token = lax.min(span.start + run * size, last)
        block = refs.block_tables_gmem[item.seq, lax.div(token, jnp.int32(problem.block_size))]
        run_gmem = _run_gmem(cache_gmem, block, token, item, line, cfg)
        plgpu.copy_gmem_to_smem(run_gmem, tile_smem.at[pl.ds(run * size, size)], ready)

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


def slot_scales(stage, line: Line, refs) -> SlotScales:
    """The scales of the slots of a tile in the rings."""
    slots = pl.ds(stage * line.tile, line.tile)
    smem = (getattr(refs, f"{name}_slots_smem", None) for name in ("k", "v"))
    return SlotScales(*(None if x is None else x.at[slots] for x in smem))


def drain(number: Scalar, *consumed, size: int) -> None:
    """Waits until all that came into a ring is consumed: what follows may be for other readers."""

    @pl.loop(lax.max(number - size, jnp.int32(0)), number)
    def _(i):
        for barrier in consumed:
            plgpu.barrier_wait(barrier.at[lax.rem(i, jnp.int32(size))])
