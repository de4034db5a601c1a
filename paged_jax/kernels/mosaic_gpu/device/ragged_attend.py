"""The ragged kernel: attention of any number of queries a sequence over its blocks, in one launch.

Grid. One program a multiprocessor, a thread block of three warpgroups, which takes work items (`ragged_plan.py`) until
none is left. Items of many query rows take the matrix units, items of few rows the memory: some programs begin with
the ones, some with the others.

Who loads: warpgroup 2 claims an item, tells of it in the queue, and copies its query and its tiles of K and V, a block
of the table at a time (TMA), into rings of `stages` tiles (`ragged_load.py`). It is ahead of those who compute: under
an item's tiles the next one's query is on its way.
Who computes: warpgroups 0 and 1, each with 64 query rows as M of wgmma, and tokens as N:

    S [64, tile] = Q [64, d] x K^T [d, tile]        A, B in shared memory
    O [64, d]   += P [64, tile] x V [tile, d]       A in registers

Of a wide item each has its own 64 rows and reads every tile. They take turns: one has the matrix units, for O of a tile
and S of the next, while the other does its softmax. Of a thin item both have the same rows, and take the tiles in turn;
then who had the second tile hands its sums to who had the first.

Shared memory, head_size 128, bfloat16, tiles of 128 tokens, 2 stages:

    | K ring 64 KiB | V ring 64 KiB | Q of two items 64 KiB | counts of the batch, 4 KiB |

Results leave through the place of their query. What is handed over goes there too: each sum as two numbers of 16 bits.

Roofline: 4 * num_heads * head_size operations for each pair of a query and a token that it sees, or where queries are
few, 4 * head_size bytes (two of 16 bits) for each token and kv head.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.device import ragged_lanes
from paged_jax.kernels.mosaic_gpu.device import ragged_load as load
from paged_jax.kernels.mosaic_gpu.device import ragged_plan as plan
from paged_jax.kernels.mosaic_gpu.device import ragged_results as results
from paged_jax.kernels.mosaic_gpu.device import ragged_softmax as softmax
from paged_jax.kernels.mosaic_gpu.device.ragged_softmax import State, Totals, Weighed
from paged_jax.kernels.mosaic_gpu.ragged_tuning import COUNTED, ROWS, Config, Line, scratch

_OPTIONS = ("scale", "slopes", "sinks", "k_scale", "v_scale")
_INPUTS = (
    *("query", "key_cache", "value_cache", "block_tables", "seq_lens", "query_start_loc", "counts"),
    *plan.Work._fields,
    *_OPTIONS,
)


def outputs(cfg: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel writes: out and lse, and of split items the parts, normalised, and their logs of sums."""
    problem, f32 = cfg.problem, jnp.float32
    shapes = {
        "out": jax.ShapeDtypeStruct((problem.num_tokens, problem.num_heads, problem.head_size), problem.query_dtype),
        "lse": jax.ShapeDtypeStruct((problem.num_tokens, problem.num_heads), f32),
    }
    if cfg.counts_in_kernel:
        shapes["table"] = jax.ShapeDtypeStruct((2 * COUNTED, cfg.counted), jnp.int32)
        shapes["per_split"] = jax.ShapeDtypeStruct((1,), f32)
    for name, places, halves in zip(("wide", "thin"), cfg.places, (2, 1), strict=True):
        places = max(places, 1)
        shapes[f"{name}_parts"] = jax.ShapeDtypeStruct((places, halves, ROWS, problem.head_size), f32)
        shapes[f"{name}_sums"] = jax.ShapeDtypeStruct((places, halves, ROWS), f32)
    return shapes


def attend(cfg: Config, *arrays: Any) -> dict[str, Array]:
    """Runs the kernel on `_INPUTS`, and new keys and values; what is absent is any array of one element."""
    shapes = outputs(cfg)
    kernel = plgpu.kernel(
        functools.partial(_kernel, cfg=cfg),
        out_type=tuple(shapes.values()),
        scratch_types=scratch(cfg),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        num_threads=3,
        thread_name="warpgroup",
        grid=(cfg.tuning.num_programs,),
        grid_names=("program",),
    )
    return dict(zip(shapes, kernel(*arrays), strict=True))


def _kernel(*gmem, cfg: Config, **smem):
    names = [f"{name}_gmem" for name in (*_INPUTS, *(("key", "value") if cfg.prefix else ()), *outputs(cfg))]
    refs = SimpleNamespace(**dict(zip(names, gmem, strict=True)), **smem)
    warpgroup = lax.axis_index("warpgroup")
    computing, loading = cfg.tuning.registers

    @pl.when(warpgroup < 2)
    def compute():
        plgpu.set_max_registers(computing, action="increase")
        _attend_to_items(warpgroup, refs, cfg)

    @pl.when(warpgroup == 2)
    def load_items():
        plgpu.set_max_registers(loading, action="decrease")
        load.load_items(refs, cfg)


def _attend_to_items(warpgroup, refs, cfg: Config) -> None:
    """Attends to all items of the queue."""
    wide_line, thin_line = cfg.lines

    def turn(state):
        items, tiles, item = state
        wide = item.kind == 1
        # Wide items and thin ones count the tiles of their rings each from 0.
        common = {"warpgroup": warpgroup, "refs": refs, "cfg": cfg}
        pl.when(wide)(lambda: _attend_to_wide(item, items, tiles[0], line=wide_line, **common))
        pl.when(~wide)(lambda: _attend_to_thin(item, items, tiles[1], line=thin_line, **common))
        tiles = tiles[0] + jnp.where(wide, item.count, 0), tiles[1] + jnp.where(wide, 0, item.count)
        return items + 1, tiles, load.read_item(items + 1, refs)

    zero = jnp.int32(0)
    state = zero, (zero, zero), load.read_item(zero, refs)
    pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(refs.turn.at[0]))  # warpgroup 0 has the first turn
    lax.while_loop(lambda state: state[2].kind > 0, turn, state)
    pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(refs.turn.at[0]))  # barriers end as they began


def _attend_to_wide(item: plan.Item, items, before, *, line: Line, warpgroup, refs, cfg: Config) -> None:
    """Attends to a wide item, whose tiles are in the rings after those `before`, and stores it.

    The warpgroups take turns at the matrix units: a turn is the first product of a tile and, behind it, the second one
    of the tile before. Under the second product, and under the other warpgroup's turn, a warpgroup does its softmax.
    """
    place = load.place_of_query(items, cfg)
    rows = softmax.rows_of(item, warpgroup, line, refs, cfg)
    plgpu.barrier_wait(refs.q_ready.at[place])
    q_smem = refs.q_smem.at[place, warpgroup]
    steps = item.count

    def end_turn():
        plgpu.barrier_arrive(refs.turn.at[1 - warpgroup])

    def stage_of(i):
        return lax.rem(before + i, jnp.int32(line.stages))

    def is_plain(i):
        return softmax.is_plain(item, i, rows, line, cfg)

    def weigh(i, totals: Totals, products, *, plain: bool) -> Weighed:
        """The softmax of a tile, whose first product is done."""
        stage = stage_of(i)
        plgpu.barrier_arrive(refs.k_consumed.at[stage])
        scales = load.slot_scales(stage, line, refs)
        weighed = softmax.attend(products, totals, item, i, scales, rows, line, cfg, plain=plain)
        ragged_lanes.settle(weighed.totals.sums, refs.lse_smem.at[warpgroup])
        return weighed

    def attend_first() -> tuple[State, Array]:
        state, stage = softmax.empty(cfg), stage_of(jnp.int32(0))
        plgpu.barrier_wait(refs.k_ready.at[stage])
        plgpu.barrier_wait(refs.turn.at[warpgroup])
        products = scores(q_smem, refs.k_smem.at[stage], end_turn, line)
        weighed = weigh(jnp.int32(0), Totals(state.maxima, state.sums), products, plain=False)
        return State(state.out, *weighed.totals), weighed.weights.astype(cfg.problem.query_dtype)

    def attend_tile(i, carry: tuple[State, Array], *, plain: bool) -> tuple[State, Array]:
        """The first product and the softmax of tile i, and the second product of the tile before."""
        (out, *totals), weights = carry
        stage, earlier = stage_of(i), stage_of(i - 1)
        plgpu.barrier_wait(refs.k_ready.at[stage])
        plgpu.barrier_wait(refs.v_ready.at[earlier])
        plgpu.barrier_wait(refs.turn.at[warpgroup])
        k_smem, v_smem = refs.k_smem.at[stage], refs.v_smem.at[earlier]
        meanwhile = functools.partial(weigh, i, Totals(*totals), plain=plain)
        weighed, out = score_and_accumulate(out, weights, q_smem, k_smem, v_smem, end_turn, meanwhile, line)
        plgpu.barrier_arrive(refs.v_consumed.at[earlier])
        # What the next product takes from registers must not be computed while it takes the last one's.
        weights = weighed.weights.astype(cfg.problem.query_dtype)
        return State(ragged_lanes.rescaled(out, weighed.keep), *weighed.totals), weights

    def attend_alike(i, carry):
        """Attends to tile i and those behind it that are as plain. A branch for each tile would split its turn."""

        def run(plain: bool):
            def goes_on(state):
                return (state[0] < steps) & (is_plain(state[0]) if plain else ~is_plain(state[0]))

            def attend_one(state):
                return state[0] + 1, attend_tile(*state, plain=plain)

            return lax.while_loop(goes_on, attend_one, (i, carry))

        return lax.cond(is_plain(i), lambda: run(True), lambda: run(False))

    def attend_tiles() -> State:
        state = lax.while_loop(lambda s: s[0] < steps, lambda s: attend_alike(*s), (jnp.int32(1), attend_first()))
        (out, *totals), weights = state[1]
        stage = stage_of(steps - 1)
        plgpu.barrier_wait(refs.v_ready.at[stage])
        plgpu.barrier_wait(refs.turn.at[warpgroup])
        out = accumulate(out, weights, refs.v_smem.at[stage], end_turn)
        plgpu.barrier_arrive(refs.v_consumed.at[stage])
        return State(out, *totals)

    state = lax.cond(steps > 0, attend_tiles, lambda: softmax.empty(cfg))
    results.store(item, warpgroup, rows, softmax.finished(state, rows), q_smem, line, refs, cfg)
    plgpu.barrier_arrive(refs.q_consumed.at[place])


def _attend_to_thin(item: plan.Item, items, before, *, line: Line, warpgroup, refs, cfg: Config) -> None:
    """Attends to a thin item, whose tiles are in the rings after those `before`, and stores it.

    Both warpgroups have all of its rows, and each takes the tiles of its own stages, every other one.
    """
    place, half = load.place_of_query(items, cfg), jnp.int32(0)
    rows = softmax.rows_of(item, half, line, refs, cfg)
    plgpu.barrier_wait(refs.q_ready.at[place])
    q_smem = refs.q_smem.at[place, 0]
    first = lax.rem(before + warpgroup, jnp.int32(2))
    steps = lax.div(item.count - first + 1, jnp.int32(2))

    def attend_tile(i, state: State) -> State:
        out, *totals = state
        tile = first + 2 * i
        stage = lax.rem(before + tile, jnp.int32(line.stages))
        plgpu.barrier_wait(refs.thin_k_ready.at[stage])
        products = scores(q_smem, load.tile_of(refs.k_smem, stage, line, cfg), None, line)
        plgpu.barrier_arrive(refs.thin_k_consumed.at[stage])
        scales = load.slot_scales(stage, line, refs)

        def weigh(plain: bool):
            weighed = softmax.attend(products, Totals(*totals), item, tile, scales, rows, line, cfg, plain=plain)
            return weighed._replace(weights=weighed.weights.astype(cfg.problem.query_dtype))

        is_plain = softmax.is_plain(item, tile, rows, line, cfg)
        weighed = lax.cond(is_plain, lambda: weigh(True), lambda: weigh(False))
        out = ragged_lanes.rescaled(out, weighed.keep)
        plgpu.barrier_wait(refs.thin_v_ready.at[stage])
        out = accumulate(out, weighed.weights, load.tile_of(refs.v_smem, stage, line, cfg), None)
        plgpu.barrier_arrive(refs.thin_v_consumed.at[stage])
        return State(out, *weighed.totals)

    state = lax.fori_loop(0, steps, attend_tile, softmax.empty(cfg))
    state = softmax.finished(state, rows)

    # Whoever has the first tile takes over, so that results do not depend on what the program did before. Both wait for
    # both barriers, as either may be the one who needs to wait for the next item.
    is_first, places_smem = first == 0, refs.q_smem.at[place]
    pl.when(is_first)(lambda: plgpu.barrier_arrive(refs.tiles_done))
    plgpu.barrier_wait(refs.tiles_done)  # who takes over needs the query no more
    pl.when(~is_first)(lambda: results.hand_over(state, places_smem, refs, cfg))
    plgpu.barrier_wait(refs.handed_over)

    @pl.when(is_first)
    def finish():
        whole = results.take_over(state, places_smem, refs)
        results.store(item, half, rows, whole, q_smem, line, refs, cfg)

    plgpu.barrier_arrive(refs.q_consumed.at[place])


def scores(q_smem, k_smem, then, line: Line) -> Array:
    """S = Q K^T; `then` runs when the product is on its way."""

    def body(acc):
        plgpu.wgmma(acc, q_smem, k_smem.T)
        if then is not None:
            then()
        return acc[...]

    shape = ROWS, line.tile
    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def accumulate(out, weights, v_smem, then) -> Any:
    """O + P V; `then` runs when the product is on its way."""

    def body(acc):
        plgpu.wgmma(acc, weights, v_smem)
        if then is not None:
            then()

    return pl.run_state(body)(plgpu.ACC.init(out))  # pyright: ignore[reportPrivateImportUsage]


def score_and_accumulate(out, weights, q_smem, k_smem, v_smem, then, meanwhile, line: Line) -> tuple[Any, Any]:
    """S = Q K^T, and right behind it O + P V: what `meanwhile` makes of S under the second product, and the new O.

    `then` runs when both are on their way.
    """

    def body(products_acc, out_acc):
        out_acc[...] = out
        plgpu.wgmma(products_acc, q_smem, k_smem.T)
        plgpu.wgmma(out_acc, weights, v_smem)
        then()
        results = meanwhile(plgpu.wgmma_accumulator_load(products_acc, wait_n=1))
        return results, out_acc[...]

    shapes = (ROWS, line.tile), out.shape
    accumulators = [plgpu.ACC(shape, jnp.float32) for shape in shapes]  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(body, *accumulators)
