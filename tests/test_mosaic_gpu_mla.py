"""Tests the MLA kernel of Mosaic GPU without a GPU: in Pallas's interpreter, its choices, and what it refuses."""

import dataclasses
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

import paged_jax
from paged_jax import _validate_latent
from paged_jax.kernels.mosaic_gpu.hopper.registers import LOG2E
from paged_jax.kernels.mosaic_gpu.mla import choose, plan, softmax
from paged_jax.kernels.mosaic_gpu.mla.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.mla.ptx import warps
from paged_jax.kernels.mosaic_gpu.mla.refs import Inputs
from paged_jax.kernels.mosaic_gpu.ragged import softmax as ragged_softmax
from paged_jax.kernels.problem import Device, Problem, Unsupported
from paged_jax.options import PerHead
from tests import mla_interpreter, oracle, plain, test_mla
from tests.interpreted_mla import warps as interpreted_warps
from tests.latent_cases import HOPPER_CASES, latent_case, make


@pytest.mark.parametrize(
    ("op", "case"),
    [
        ("decode", HOPPER_CASES[0]),  # it has sinks in an item that two queues share
        *(pytest.param("ragged", HOPPER_CASES[i], marks=pytest.mark.slow) for i in (0, 2)),
    ],
    ids=str,
)
def test_in_the_interpreter(op, case):
    def run(function, *, quick=True, **arrays):
        return mla_interpreter.run(function, device=Device(90, 4), **arrays)

    if op == "decode":
        test_mla.test_decode(case, run)
        return
    if case is HOPPER_CASES[0]:
        case = dataclasses.replace(case, case=dataclasses.replace(case.case, sinks=False, logits_soft_cap=3.0))
    test_mla.hold_ragged(case, run)


@pytest.mark.slow
def test_more_queries_than_said():
    """If a sequence has more queries than `max_query_len` says, the other sequences' results are still right."""
    sizes = {"seq_lens": (200, 300, 70), "query_lens": (3, 17, 2)}
    case = latent_case("more", 8, 128, 128, 16, "bfloat16", **sizes)
    made = make(case)

    def ragged(arrays, implementation):
        flags = made.static | {"return_lse": True, "implementation": implementation, "max_query_len": 8}
        return paged_jax.ragged_mla_attention(**arrays, **flags)

    results = mla_interpreter.run(ragged, device=Device(90, 6), arrays=made.ragged)
    exact, rough = (module.latent(**made.ragged, **made.static) for module in (oracle, plain))
    rows = np.array([0, 1, 2, 20, 21])  # the queries of the first and the last sequence
    for found, wanted, yardstick, what in zip(results, exact, rough, ("out", "lse"), strict=True):
        plain.assert_close(found[rows], wanted[rows], yardstick[rows], what)
    assert not interpret_pallas_call.get_races().races_found


def problem_of(num_seqs=8, num_heads=16, latent_size=576, value_size=512, dtype="bfloat16", cache_dtype=None, **sizes):
    """The facts of a decode call, or of a ragged call with `num_queries` queries for each sequence."""
    num_queries, block_size = sizes.get("num_queries", 1), sizes.get("block_size", 64)
    query = jnp.zeros((num_seqs * num_queries, num_heads, latent_size), dtype)
    cache = jnp.zeros((4, block_size, latent_size), cache_dtype or dtype)
    tables, lens = jnp.zeros((num_seqs, 8), jnp.int32), jnp.zeros(num_seqs, jnp.int32)
    options = {"latent_scale": 1.0, "max_query_len": num_queries}
    starts = jnp.arange(num_seqs + 1, dtype=jnp.int32)
    operands = _validate_latent.ragged_operands(query, cache, tables, lens, starts, 0.1, True, options)
    return Problem.of_latents(query, cache, tables, operands.options, value_size)


@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "num_queries", "queues", "width"),
    [
        (128, 16, 1, 128, 1),  # a queue for each sequence
        (128, 128, 1, 64, 2),  # a queue has two sequences, and two programs for the two row blocks of each
        (64, 16, 1, 128, 1),  # two queues a sequence
        (100, 16, 1, 132, 1),  # no fitting number of queues is large enough
        (128, 128, 2, 32, 4),
        (8, 128, 16, 32, 4),
        (1, 16, 1, 132, 1),
    ],
)
def test_queues_fit_items_of_like_lengths(num_seqs, num_heads, num_queries, queues, width):
    problem = problem_of(num_seqs, num_heads, num_queries=num_queries)
    tuning = choose.tune(problem, Device(90, 132))
    left = 256 if width == 4 else 128  # products bound the kernel, or copies
    assert (tuning.queues, tuning.width, tuning.left) == (queues, width, left)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "takes queries and latents of one dtype of 16 bits, got float32 and float32"),
        ({"cache_dtype": "float8_e4m3fn"}, "one dtype of 16 bits, got bfloat16 and float8_e4m3fn"),
        ({"latent_size": 640}, "takes latents of a multiple of 64 elements up to 576, got 640"),
        ({"latent_size": 560}, "takes latents of a multiple of 64 elements up to 576, got 560"),
        ({"value_size": 192}, "takes values of a multiple of 128 elements up to 512, got 192"),
        ({"block_size": 4}, "takes blocks of 8 tokens or more, got 4"),
    ],
)
def test_refusals(changes, reason):
    with pytest.raises(Unsupported, match=reason):
        choose.tune(problem_of(**changes), Device(90, 132))
    with pytest.raises(Unsupported, match=r"needs compute capability 9\.0, this GPU has 10\.0"):
        choose.tune(problem_of(), Device(100, 132))


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_the_factor_of_exponents_is_positive(scale):
    """So the largest product is the largest logit, and the infinite logit of an unseen token is no NaN."""
    problem = problem_of()
    geometry = Geometry(problem, choose.tune(problem, Device(90, 132)), one_query=True)
    inputs = Inputs(*[None] * 4, scale=jnp.full(1, scale), latent_scale=jnp.full(1, 0.5), sinks=None)
    factor = softmax.factor_of(inputs, geometry)
    np.testing.assert_allclose(factor.sign * factor.magnitude, scale * 0.5 * LOG2E, rtol=1e-6, atol=1e-20)
    assert factor.magnitude > 0


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_end_of_a_softmax(dtype, has_sinks, monkeypatch):
    """In float16 the sums of weights have a power of two, which leaves lse, out and what the merge gets."""
    monkeypatch.setattr(softmax.lanes, "loaded", lambda values, first: values[int(first) :][:64])
    monkeypatch.setattr(softmax.lanes, "sum_of_lanes", lambda x: x)
    monkeypatch.setattr(softmax, "layout", lambda x, _: x)
    problem = problem_of(dtype=dtype)
    problem = Problem(**vars(problem) | {"per_head": PerHead(sinks=has_sinks), "k_scale": "none", "v_scale": "none"})
    geometry = Geometry(problem, choose.tune(problem, Device()), one_query=True)
    maxima, sums = np.linspace(-9, 9, 64).astype(np.float32), np.linspace(1, 50, 64).astype(np.float32)
    sums[5] = 0  # a row that saw no token
    sinks = np.linspace(-5, 5, 64).astype(np.float32)
    refs = SimpleNamespace(inputs_gmem=SimpleNamespace(sinks=sinks, latent_scale=None))
    power = 2.0**8 if dtype == "float16" else 1.0
    state = softmax.State([], jnp.asarray(maxima), jnp.asarray(sums * power))
    split = SimpleNamespace(first_row=jnp.int32(0))
    found, lse = softmax.finished(state, jnp.bool_(True), split, refs, geometry)
    with np.errstate(divide="ignore"):
        log_sums = maxima + np.log2(sums)
    wanted = np.logaddexp(log_sums / LOG2E, sinks if has_sinks else -np.inf)
    seen = sums > 0
    np.testing.assert_allclose(found.log_sums, log_sums, rtol=1e-5)
    np.testing.assert_allclose(lse, np.where(seen, wanted, -np.inf), rtol=1e-5)
    np.testing.assert_allclose(found.factor[seen], (np.exp(maxima / LOG2E - wanted) / power)[seen], rtol=1e-4)


def test_the_largest_weights_fit_into_float16():
    """A maximum may lag behind the largest logit, and weights are multiplied by a power of two."""
    for module in (softmax, ragged_softmax):
        assert np.finfo(np.float16).max / 2 > 2.0 ** (module._EXPONENT_IN_FLOAT16 + module._MOST_LAG)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("num_seqs", "queues"), [(9, 1), (9, 3), (150, 7), (9, 50)])
def test_queues_share_all_tiles_of_all_items(num_seqs, queues, monkeypatch):
    """Each tile of each item is in one queue. The last split of a cut item finds the partial results of the others."""
    for name, function in inspect.getmembers(interpreted_warps, inspect.isfunction):
        monkeypatch.setattr(warps, name, function)
    rng = np.random.default_rng(queues)
    seq_lens, most = rng.integers(0, 2000, num_seqs), 1500
    query_lens = np.minimum(rng.choice([0, 1, 1, 2, 40], num_seqs), seq_lens)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    problem = problem_of(num_seqs, 16, num_queries=40)
    problem = Problem(**vars(problem) | {"num_tokens": int(starts[-1]) + 3, "max_seq_len": most})
    tuning = choose.Tuning(queues=queues, width=2, left=64)
    geometry = Geometry(problem, tuning, one_query=False)
    lengths = plan.Lengths(jnp.asarray(seq_lens, jnp.int32), jnp.asarray(starts))
    found = {}

    @jax.jit
    def splits_of(number):
        total = plan.total_tiles(lengths, geometry)
        rows = jnp.full((200, 8), -1)

        def keep(split, carry):
            rows, count = carry
            closing = plan.closing_of(number, split.tile, total, geometry)
            fields = split.row, split.num_rows, split.tile, split.num_tiles, split.is_whole, split.closes, split.partial
            fields = jnp.stack([*map(jnp.int32, fields), jnp.where(split.closes, closing.num_splits, 0)])
            return rows.at[count].set(fields), count + 1

        queue = plan.queue_of(lengths, number, total, geometry)
        return plan.for_each_split(keep, (rows, 0), lengths, queue, jnp.int32(0), geometry)

    partials = set()
    for number in range(queues):
        rows, count = splits_of(jnp.int32(number))
        for row, num_rows, tile, num_tiles, is_whole, closes, partial, num_splits in np.asarray(rows)[: int(count)]:
            item = found.setdefault(int(row), [])
            item.append((int(tile), int(num_tiles)))
            assert 0 < num_rows <= 64
            assert not closes or num_splits == len(item) > 1
            if not is_whole:
                assert partial not in partials
                partials.add(int(partial))
    expected = {}
    for seq, length in enumerate([*seq_lens, 0]):
        start = int(starts[seq])
        stop = int(starts[seq + 1]) if seq < num_seqs else problem.num_tokens
        for first in range(start * 16, stop * 16, 128):
            last_query = (min(first + 64, stop * 16) - 1) // 16 - start
            seen = min(length, most, length - (stop - start) + last_query + 1)
            expected[first] = -(-max(int(seen), 0) // 64)
    assert {row: sum(n for _, n in item) for row, item in found.items()} == expected
    for item in found.values():
        assert [tile for tile, _ in item] == sorted(tile for tile, _ in item)


def test_mla_leads_on_hopper():
    query, cache = jnp.zeros((2, 16, 576), jnp.bfloat16), jnp.zeros((4, 64, 576), jnp.bfloat16)
    arrays = query, cache, jnp.zeros((2, 4), jnp.int32), jnp.ones(2, jnp.int32)
    flags = {"value_size": 512, "scale": 0.1}
    asked = paged_jax.which_implementation(paged_jax.mla_paged_attention, *arrays, platform="cuda", **flags)
    assert asked.name == "triton"  # this machine has no GPU, so the program must run on any
