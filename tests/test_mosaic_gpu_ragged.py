"""Tests the ragged Mosaic GPU kernels without a GPU: in Pallas's interpreter, which finds races, and lowered for CUDA.

On a GPU the tests of the operations run these kernels too.
"""

import importlib
import inspect
import pkgutil
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from paged_jax import _validate
from paged_jax.kernels.mosaic_gpu.decode import ptx as decode_ptx
from paged_jax.kernels.mosaic_gpu.mla import ptx as mla_ptx
from paged_jax.kernels.mosaic_gpu.ragged import call as ragged
from paged_jax.kernels.mosaic_gpu.ragged import choose, items, ptx
from paged_jax.kernels.mosaic_gpu.ragged import wide as ragged_wide
from paged_jax.kernels.mosaic_gpu.ragged.count import count_before_kernel, total
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import kernel_name, kinds_of, kinds_there
from paged_jax.kernels.mosaic_gpu.ragged.refs import Counted
from paged_jax.kernels.problem import Device, Problem, Unsupported
from tests import inputs, interpreted_decode, interpreted_mla, interpreted_ptx, oracle, plain
from tests.cases import Case
from tests.ragged_interpreter import call
from tests.test_cache_ops import assert_same_bytes
from tests.test_decode import op_options


def small(name, *shape, seq_lens=(37, 0, 130, 70), query_lens=(1, 0, 40, 20), **options):
    return Case(name, *shape, seq_lens=seq_lens, query_lens=query_lens, **options)


BANDS = {"seq_lens": (170, 30), "query_lens": (150, 1)}
SHORT_ONES = (0,) * 95 + (9, 40, 3) + (0,) * 30  # the 96th to the 98th of 128 sequences
LATE = {"seq_lens": (*SHORT_ONES, 5, 140, 300, 0), "query_lens": (*(min(n, 2) for n in SHORT_ONES), 0, 40, 1, 0)}
MANY_LENS = tuple((1, 0, 3, 1, 70, 1, 2, 1, 1)[n % 9] for n in range(270))
MANY = {"seq_lens": tuple(max(37 * n % 400, x) for n, x in enumerate(MANY_LENS)), "query_lens": MANY_LENS}

# Wide and thin items and every option occur, in as few small cases as possible.
INTERPRETED = [
    small("plain", 4, 2, 64, 16, "bfloat16"),
    small("three-bands", 4, 2, 64, 16, "bfloat16", **BANDS),
    small("bands-over-8-bits", 4, 2, 64, 8, "bfloat16", "float8_e4m3fn", **BANDS, k_scale="scalar", v_scale="head"),
    small("small-heads-over-8-bits", 8, 2, 32, 128, "bfloat16", "int8", k_scale="head", v_scale="scalar"),
    small("late-sequences", 4, 2, 64, 16, "bfloat16", **LATE),
    small("many-sequences", 4, 2, 64, 16, "bfloat16", **MANY),
    small("group-of-5", 5, 1, 128, 32, "float16", layout="nhd", scale=-0.3),
    small("window", 2, 1, 80, 8, "float16", layout="nhd", sliding_window=50, k_scale="scalar", max_seq_len=130),
    small("options", 7, 1, 64, 32, "bfloat16", alibi=True, sinks=True, v_scale="scalar", scale="traced"),
    small("capped", 8, 2, 64, 16, "float16", logits_soft_cap=2.0, k_scale="head", v_scale="head", sinks=True),
    small("huge", 2, 1, 64, 16, "bfloat16", logits="huge", scale=1.0, sinks=True),
    small("all-empty", 4, 2, 64, 16, "float16", seq_lens=(0, 0), query_lens=(0, 0), sinks=True),
    small("e4m3", 4, 2, 64, 16, "bfloat16", "float8_e4m3fn", k_scale="scalar", v_scale="head"),
    small("int8", 4, 2, 96, 32, "float16", "int8", layout="nhd", k_scale="head", v_scale="scalar"),
    small("slots", 4, 2, 64, 16, "bfloat16", "int8", k_scale="slot", v_scale="slot"),
    small("tiny", 4, 2, 16, 16, "bfloat16"),
    small("large", 2, 1, 256, 16, "bfloat16", sinks=True),
    small(
        "short-window", 2, 1, 64, 16, "bfloat16", seq_lens=(150, 20), query_lens=(3, 20), sliding_window=37, scale=-0.3
    ),
    small("short-and-wide", 2, 1, 64, 16, "float16", seq_lens=(128,), query_lens=(40,), padding=0, max_seq_len=128),
]
# Only GPUs run `ON_GPUS`: these cases test little that the others do not test.
ON_GPUS = (
    *("options", "slots", "plain", "group-of-5", "window", "huge", "tiny", "all-empty", "short-and-wide", "e4m3"),
    *("int8", "large", "capped", "small-heads-over-8-bits", "many-sequences"),
)
TINY_TILES = {"tile": 64, "thin_tile": 64, "stages": 2, "least_split": 2}

# NumPy gives this warning when arithmetic meets the poison, which is NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def operands_of(case, made, *, causal=True, max_query_len=None):
    bounds = {"max_seq_len": case.max_seq_len, "max_query_len": max_query_len}
    options = made.arrays | op_options(made.static) | bounds
    return _validate.ragged_operands(*made.ragged.values(), causal, options)


def check(case, made, results):
    """Compares the results of an op with the oracle's."""
    out, lse = results
    options = made.arrays | made.static
    exact, rough = (module.ragged(**made.ragged, **options) for module in (oracle, plain))
    assert np.all(out[made.num_rows :].astype(np.float32) == 0), "padding rows"
    assert np.all(lse[made.num_rows :] == -np.inf), "padding rows"
    plain.assert_close(out, exact[0], rough[0], "out")
    plain.assert_close(lse, exact[1], rough[1], "lse")


def some(cases, slow, without=()):
    """The cases as parameters. Cases named in `without` are left out; those named in `slow` are slow."""
    kept = [case for case in cases if case.name not in without]
    return [pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (case.name in slow)) for case in kept]


@pytest.mark.parametrize(
    ("ptx", "interpreted"),
    [(ptx, interpreted_ptx), (mla_ptx, interpreted_mla), (decode_ptx, interpreted_decode)],
    ids=["ragged", "mla", "decode"],
)
def test_interpreter_replaces_what_is_in_ptx(ptx, interpreted):
    """Each function in `ptx/` with PTX or MLIR has a substitute with the same parameters."""
    for file in pkgutil.iter_modules(ptx.__path__):
        real, substitute = (importlib.import_module(f"{x.__name__}.{file.name}") for x in (ptx, interpreted))
        for name, function in inspect.getmembers(real, inspect.isfunction):
            if function.__module__ == real.__name__ and "@inline(" in inspect.getsource(function):
                signatures = [inspect.signature(function), inspect.signature(getattr(substitute, name))]
                assert len({tuple(s.parameters) for s in signatures}) == 1, name


@pytest.mark.parametrize("case", some(INTERPRETED, (), ON_GPUS))
def test_in_the_interpreter(case):
    made = inputs.make(case)
    check(case, made, call("ragged_paged_attention", operands_of(case, made), **TINY_TILES))
    assert not interpret_pallas_call.get_races().races_found


# One sequence has split items of both kinds: wide items have 24 of its queries, and thin ones have two. The first tile
# is whole in the window of the first query, and not in the windows of the next ones.
BOTH = small(
    "both", 8, 1, 64, 16, "bfloat16", seq_lens=(544,), query_lens=(26,), padding=0, sinks=True, sliding_window=391
)


@pytest.mark.slow
@pytest.mark.parametrize("case", [BOTH], ids=str)
def test_split_items_in_the_interpreter(case):
    made, tuning = inputs.make(case), TINY_TILES | {"num_programs": 12}
    operands = operands_of(case, made)
    arrays = operands.query, operands.key_cache, operands.value_cache, operands.block_tables
    problem = Problem.of_call(*arrays, operands.options)
    chosen = replace(choose.tune(problem, Device()), counts_in_kernel=False, **tuning)
    geometry = Geometry(problem, chosen)
    counts = count_before_kernel(operands.query_start_loc, operands.seq_lens, geometry)
    assert len(kinds_there(geometry)) == 2
    assert all(total(Counted.PARTIALS, kind, counts) > 1 for kind in kinds_of(geometry))
    check(case, made, call("ragged_paged_attention", operands, **tuning))
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.slow
def test_a_third_warpgroup_that_thin_items_pass_by():
    """The only program begins with thin items. The third warpgroup must see all phases of queries' barriers."""
    case = small("passed-by", 4, 2, 64, 16, "bfloat16", seq_lens=(30, 170), query_lens=(1, 150), padding=0)
    made, tuning = inputs.make(case), TINY_TILES | {"num_programs": 1}
    operands = operands_of(case, made)
    problem = Problem.of_call(*operands[:4], operands.options)
    chosen = replace(choose.tune(problem, Device()), counts_in_kernel=False, **tuning)
    counts = count_before_kernel(operands.query_start_loc, operands.seq_lens, Geometry(problem, chosen))
    assert (chosen.computing_warpgroups, int(counts.wide_programs[0])) == (3, 0)
    check(case, made, call("ragged_paged_attention", operands, **tuning))
    assert not interpret_pallas_call.get_races().races_found


FEW = {"seq_lens": (137, 0, 130, 70, 500, 150), "query_lens": (1, 0, 2, 4, 3, 2), "padding": 75}


@pytest.mark.slow
def test_more_queries_than_said():
    """A sequence whose queries have more rows than a thin item gets several thin items."""
    lens = {"seq_lens": (9, 0, 40, 70), "query_lens": (1, 0, 40, 2), "padding": 9}
    case = small("more", 4, 2, 64, 16, "bfloat16", **lens)
    made = inputs.make(case)
    check(case, made, call("ragged_paged_attention", operands_of(case, made, max_query_len=4), **TINY_TILES))
    assert not interpret_pallas_call.get_races().races_found


PREFIXES = [
    small("plain", 4, 2, 64, 16, "bfloat16"),
    small("window", 2, 1, 80, 8, "float16", layout="nhd", sliding_window=50, k_scale="scalar"),
    small("e4m3", 8, 2, 64, 16, "bfloat16", "float8_e4m3fn", v_scale="head"),
]


SHORT = {"seq_lens": (37, 0, 40, 20, 70), "query_lens": (1, 0, 20, 9, 2)}
SLOTS = {"k_scale": "slot", "v_scale": "slot", "alibi": True, "sinks": True}
ONE_PLACE = [
    # The options that no other interpreted case has.
    small("slots", 7, 1, 64, 32, "bfloat16", "int8", **SHORT, **SLOTS, scale="traced"),
    # The query is divided.
    small("divided", 4, 2, 64, 16, "bfloat16", "float8_e4m3fn", **SHORT, k_scale="head"),
    # One raw tile holds a tile of K and then one of V.
    small("one-raw-tile", 2, 1, 256, 16, "bfloat16", "float8_e4m3fn", **SHORT, k_scale="scalar", v_scale="head"),
    # No program has a thin item, so the end follows a wide one.
    small("prompts", 4, 2, 64, 16, "bfloat16", "int8", seq_lens=(64, 0, 128), query_lens=(64, 0, 128)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", ONE_PLACE, ids=str)
def test_one_place_for_queries(case, monkeypatch):
    """An item's query overwrites the results of the previous item, while raw tiles of 8 bits are copied.

    An item's description must be read only after it is written. An earlier read would race with another warp's write.
    """
    events = []  # each program's events are in order

    def noted(function, items_before):
        program = lax.axis_index("program")
        jax.debug.callback(lambda *item: events.append((function.__name__, *map(int, item))), program, items_before)
        return function

    describe, read_own = items.describe, items.read_own
    monkeypatch.setattr(
        items, "describe", lambda item, tiles, before, smem: noted(describe, before)(item, tiles, before, smem)
    )
    monkeypatch.setattr(items, "read_own", lambda before, smem: noted(read_own, before)(before, smem))
    made = inputs.make(case)
    tuning = TINY_TILES | {"queries": 1, "num_programs": 2, "computing_warpgroups": 2}
    check(case, made, call("ragged_paged_attention", operands_of(case, made), **tuning))
    assert not interpret_pallas_call.get_races().races_found
    jax.effects_barrier()
    read = [(i, item) for i, (name, *item) in enumerate(events) if name == "read_own"]
    assert len(read) > 4
    assert all(("describe", *item) in events[:i] for i, item in read)


def prefix_operands_of(case, made, *, max_query_len=None):
    bounds = {"max_seq_len": case.max_seq_len, "max_query_len": max_query_len}
    options = made.arrays | op_options(made.static) | bounds
    return _validate.prefix_operands(*made.prefix.values(), True, options)


def check_prefix(made, results):
    options = made.arrays | made.static
    exact, rough = (module.prefix(**made.prefix, **options) for module in (oracle, plain))
    for actual, wanted, yardstick in zip(results, exact, rough, strict=True):
        plain.assert_close(actual[: made.num_rows], wanted[: made.num_rows], yardstick[: made.num_rows], "prefix")
    assert np.all(results[0][made.num_rows :].astype(np.float32) == 0), "padding rows"


@pytest.mark.slow  # by default, `test_mosaic_gpu_sparse.py` has new tokens
@pytest.mark.parametrize("case", some(PREFIXES, (), ("plain", "window")))
def test_new_tokens_in_the_interpreter(case):
    made = inputs.make(case)
    check_prefix(made, call("prefix_attention", prefix_operands_of(case, made), **TINY_TILES))
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.slow
def test_few_new_tokens_have_no_wide_items():
    """A bound on queries leaves out the code of wide items. `test_more_queries_than_said` runs the other code."""
    case = small("few", 4, 2, 64, 16, "bfloat16", **FEW, sinks=True)
    operands = prefix_operands_of(case, inputs.make(case), max_query_len=4)
    with mock.patch.object(ragged_wide, "attend_to_item", side_effect=AssertionError("a wide item")):
        jax.jit(ragged.prefix_attention).trace(*operands).lower(lowering_platforms=("cuda",))


@pytest.mark.slow
def test_every_query_sees_all_tokens():
    """With causal=False every query sees all tokens, as in decode, which gives the expected results.

    The case has thin items alone; `programs.txt` holds what wide items do.
    """
    case = small("all-seen", 8, 2, 64, 16, "bfloat16", seq_lens=(70, 20), query_lens=(4, 3), padding=0)
    made = inputs.make(case)
    out, _ = call("ragged_paged_attention", operands_of(case, made, causal=False, max_query_len=4), **TINY_TILES)
    rows = np.repeat(np.arange(2), case.query_lens)
    decode = {name: made.ragged[name] for name in ("key_cache", "value_cache")}
    decode |= {name: made.ragged[name][rows] for name in ("block_tables", "seq_lens")}
    exact, rough = (module.decode(query=made.ragged["query"], **decode) for module in (oracle, plain))
    plain.assert_close(out, exact[0], rough[0], "out")


@pytest.mark.slow
def test_results_do_not_depend_on_who_takes_an_item():
    """Which tiles of an item a warpgroup takes depends on the program's earlier items; the results must not.

    After the last item one warpgroup stores rows of padding while the other stores the thin item; each has its own
    memory for lse.
    """
    lens = {"seq_lens": (70, 200, 140, 87), "query_lens": (1, 2, 1, 1), "padding": 23}
    case = small("whole", 4, 1, 64, 16, "bfloat16", **lens)
    made = inputs.make(case)
    operands = operands_of(case, made, max_query_len=2)  # there are no wide items
    tuning = TINY_TILES | {"least_split": 1000}
    results = []
    for num_programs in (1, 2):
        results.append(call("ragged_paged_attention", operands, **tuning, num_programs=num_programs))
        assert not interpret_pallas_call.get_races().races_found
    check(case, made, results[0])
    for one, other in zip(*results, strict=True):
        assert_same_bytes(one, other, "other programs")


LOWERED = [
    small("hnd-64-4", 8, 2, 64, 16, "bfloat16", sinks=True),
    small("nhd-96-1", 2, 2, 96, 8, "float16", layout="nhd", sliding_window=100),
    small("hnd-128-64", 64, 1, 128, 256, "bfloat16", alibi=True),
    small("hnd-112-7", 7, 1, 112, 64, "float16", logits_soft_cap=30.0, v_scale="head"),
    small("e5m2-192", 4, 2, 192, 16, "float16", "float8_e5m2"),
    small("slots", 4, 2, 64, 16, "bfloat16", "int8", k_scale="slot", v_scale="slot"),
    small("hnd-32-2", 4, 2, 32, 16, "bfloat16", "int8", k_scale="scalar", v_scale="scalar"),
    small("hnd-256-2", 4, 2, 256, 16, "bfloat16", alibi=True),
    small("nhd-80-3", 3, 1, 80, 32, "bfloat16", layout="nhd", k_scale="scalar"),
]


@pytest.mark.slow
def test_lowers_for_cuda():
    """GPUs compile all cases; `test_x64.py` lowers prefix attention and patterns, too."""
    case = LOWERED[0]
    made = inputs.make(case)
    function = jax.jit(ragged.ragged_paged_attention)
    operands = operands_of(case, made)
    text = function.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    problem = Problem.of_call(*operands[:4], operands.options)
    geometry = Geometry(problem, choose.tune(problem, Device()))
    assert text.count("@mosaic_gpu_v2") == 1
    # Profiles show this name.
    assert f"{kernel_name(geometry)}_mosaic_gpu" in text


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (small("float32", 4, 2, 64, 16), "lacks queries of float32"),
        (small("mixed", 4, 2, 64, 16, "bfloat16", "float16"), "caches of float16 for queries of bfloat16"),
        (
            small("head-size", 4, 2, 120, 16, "bfloat16"),
            "lacks head_size 120 in ragged attention, takes multiples of 16 from 16 to 256",
        ),
        (small("block-size", 4, 2, 64, 4, "bfloat16"), "lacks block_size 4"),
        (small("group", 71, 1, 64, 16, "bfloat16"), "lacks groups of 71"),
        (small("vllm", 4, 2, 64, 16, "bfloat16", layout="vllm"), "lacks layout 'vllm'"),
        (small("slot", 4, 2, 64, 16, "float16", v_scale="slot"), "lacks v_scale for each slot"),
    ],
    ids=str,
)
def test_what_it_lacks_is_said(case, reason):
    with pytest.raises(Unsupported, match=reason):
        jax.eval_shape(ragged.ragged_paged_attention, *operands_of(case, inputs.make(case)))


@pytest.mark.parametrize(("num_seqs", "width", "num_blocks", "num_tokens"), [(0, 3, 9, 2), (2, 0, 9, 2), (2, 3, 0, 2)])
def test_nothing_to_attend(num_seqs, width, num_blocks, num_tokens):
    cache = jnp.zeros((num_blocks, 2, 16, 64), jnp.bfloat16)
    arrays = (
        *(jnp.zeros((num_tokens, 4, 64), jnp.bfloat16), cache, cache),
        *(jnp.zeros((num_seqs, width), jnp.int32), jnp.zeros((num_seqs,), jnp.int32)),
        jnp.zeros((num_seqs + 1,), jnp.int32),
    )
    out, lse = ragged.ragged_paged_attention(*_validate.ragged_operands(*arrays, True, {}))
    assert np.all(out == 0)
    assert np.all(lse == -np.inf)


ON_A_GPU = [
    *INTERPRETED,
    *LOWERED,
    small("many", 8, 2, 128, 16, "bfloat16", seq_lens=(*range(1, 900, 9),), query_lens=(1,) * 100),
    small("mixed", 8, 2, 64, 16, "float16", seq_lens=(3000, 700, 9, 900), query_lens=(1, 700, 9, 300), sinks=True),
    small("split-96", 32, 2, 96, 64, "float16", seq_lens=(6900, 3000, 5000), query_lens=(6, 2, 5)),
    small("long", 4, 1, 128, 16, "bfloat16", seq_lens=(70_000, 33, 1), query_lens=(5, 33, 1)),
    # The layout of converted rows differs in each of these.
    small("e4m3-16", 4, 2, 16, 16, "bfloat16", "float8_e4m3fn"),
    small("e5m2-80", 8, 2, 80, 8, "bfloat16", "float8_e5m2", layout="nhd", k_scale="head", sinks=True),
    small("int8-96", 8, 2, 96, 32, "bfloat16", "int8", k_scale="scalar", v_scale="head", logits_soft_cap=30.0),
    small("e4m3-112", 7, 1, 112, 64, "bfloat16", "float8_e4m3fn", sliding_window=50),
    small("e4m3-128", 8, 2, 128, 16, "bfloat16", "float8_e4m3fn", seq_lens=(3000, 700, 9), query_lens=(1, 700, 5)),
    small("e4m3-256", 4, 2, 256, 16, "bfloat16", "float8_e4m3fn", seq_lens=(900, 37, 9), query_lens=(90, 1, 5)),
    small("k-slots", 4, 2, 64, 16, "bfloat16", "int8", k_scale="slot", v_scale="scalar"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("tuning", [{}, TINY_TILES | {"num_programs": 4}], ids=["here", "small"])
@pytest.mark.parametrize("case", ON_A_GPU, ids=str)
def test_on_a_gpu(case, tuning, monkeypatch):
    """Results are right with the tunings of this GPU and of a smaller one that splits more, and equal in every run."""
    made = inputs.make(case)
    check_on_a_gpu(case, made, operands_of(case, made), tuning, monkeypatch)


def check_on_a_gpu(case, made, operands, tuning, monkeypatch):
    """Compares two runs with each other and with the oracle; `tuning` overrides this GPU's choices."""

    def tune(*args, tune=choose.tune, **kwargs):
        return replace(tune(*args, **kwargs), **tuning)

    monkeypatch.setattr(choose, "tune", tune)
    operands = jax.device_put(operands, jax.devices("gpu")[0])
    function = jax.jit(lambda *operands: ragged.ragged_paged_attention(*operands))  # traced with this tuning
    results, again = (jax.tree.map(np.asarray, function(*operands)) for _ in range(2))
    check(case, made, results)
    for actual, wanted in zip(again, results, strict=True):
        assert_same_bytes(actual, wanted, "a second run")


@pytest.mark.gpu
@pytest.mark.parametrize("query_len", [1, 40], ids=["thin", "wide"])
def test_merges_do_not_depend_on_who_is_last_on_a_gpu(query_len):
    """In each run other programs may store the last partial results of items, which have many splits."""
    case = small("last", 32, 8, 128, 16, "bfloat16", seq_lens=(9000, 5000), query_lens=(query_len,) * 2, padding=0)
    made = inputs.make(case)
    operands = jax.device_put(operands_of(case, made), jax.devices("gpu")[0])
    function = jax.jit(lambda *operands: ragged.ragged_paged_attention(*operands))
    first = jax.tree.map(np.asarray, function(*operands))
    check(case, made, first)
    for _ in range(200):
        for actual, wanted in zip(function(*operands), first, strict=True):
            assert_same_bytes(np.asarray(actual), wanted, "a further run")


@pytest.mark.gpu
def test_under_vmap_on_a_gpu():
    """Runs long contexts, which are split and merged, in a loop over a batch of calls."""
    case = small("split", 4, 2, 64, 16, "bfloat16", seq_lens=(6900, 3000), query_lens=(6, 2), padding=0)
    made = inputs.make(case)
    operands = jax.device_put(operands_of(case, made), jax.devices("gpu")[0])
    queries = jnp.stack([operands.query, operands.query[::-1]])
    looped = jax.jit(lambda queries: jax.lax.map(lambda q: ragged.ragged_paged_attention(q, *operands[1:]), queries))
    wanted = [ragged.ragged_paged_attention(query, *operands[1:]) for query in queries]
    for actual, *expected in zip(looped(queries), *wanted, strict=True):
        assert_same_bytes(np.asarray(actual), np.stack(expected), "in a loop")
