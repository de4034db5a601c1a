"""Tests the kernel that sums, adds and norms over the memory of other GPUs, and the steps that use it.

Pallas's interpreter runs no PTX, which is most of the kernel. So the protocol is tested by a model of it, the code by
lowering and by the assembler, and both together on GPUs. On CPU devices steps run with XLA's sum in the kernel's place.
"""

import dataclasses
import functools
import logging
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import scale_reduce, scale_steps
from examples import all_reduce, exchange, loop, sharding
from examples.config import LayerConfig
from examples.sharding import make_mesh, sharding_of, split_config
from examples.step import make_abstract_step, xla_options
from paged_jax.engine import Batch
from tests import hopper_compiler

LACKS = hopper_compiler.lacks()
EMPTY = "empty"


TOTAL = "total"


def program(rank, inboxes, turns, owners, seen):
    """A row of a device in the words of the kernel's header; it yields wherever another device may go on instead.

    `owners` has each call's owner of the row, or None if all devices add the row up.
    """
    num_devices = len(inboxes)

    def send(word, place, to):
        for other in to:
            inboxes[other][place] = word
            yield

    def take(places):
        for place in places:
            while inboxes[rank][place] == EMPTY:
                yield
            words.append(inboxes[rank][place])
            yield
            inboxes[rank][place] = EMPTY

    everyone = [(rank + i) % num_devices for i in range(1, num_devices + 1)]
    for call, owner in enumerate(owners):
        turn, words = call % turns, []
        yield from send((call, rank), (turn, rank), everyone if owner is None else [owner])
        if owner in (None, rank):
            yield from take((turn, other) for other in range(num_devices))
        if owner is not None:
            if owner == rank:
                yield from send(tuple(words), (turn, TOTAL), everyone)
            words = []
            yield from take([(turn, TOTAL)])
            (words,) = words
        seen[rank].append(list(words))


def run_programs(num_devices, turns, num_calls, seed):
    """Runs the devices in a random order, some of them rarely. Returns the parts that each summed in each call."""
    places = [(turn, sender) for turn in range(turns) for sender in (*range(num_devices), TOTAL)]
    inboxes = [dict.fromkeys(places, EMPTY) for _ in range(num_devices)]
    seen = [[] for _ in range(num_devices)]
    draw = random.Random(seed)
    owners = [draw.choice((None, seed % num_devices)) for _ in range(num_calls)]
    running = {rank: program(rank, inboxes, turns, owners, seen) for rank in range(num_devices)}
    weights = [draw.choice((1, 1, 30)) for _ in range(num_devices)]
    for _ in range(num_devices * num_calls * 3000):
        if not running:
            break
        rank = draw.choices(list(running), [weights[rank] for rank in running])[0]
        if next(running[rank], "ended") == "ended":
            del running[rank]
    return seen, not running


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_every_call_sums_the_parts_of_that_call_in_order_of_ranks(num_devices):
    for seed in range(20):
        seen, all_ended = run_programs(num_devices, turns=2, num_calls=6, seed=seed)
        assert all_ended
        assert seen == [[[(call, rank) for rank in range(num_devices)] for call in range(6)]] * num_devices


def test_an_inbox_of_one_turn_would_lose_parts():
    """The model of the protocol can fail."""
    wanted = [[[(call, rank) for rank in range(2)] for call in range(6)]] * 2
    assert any(run_programs(2, turns=1, num_calls=6, seed=seed) != (wanted, True) for seed in range(20))


CONFIG = dataclasses.replace(
    scale_steps.MODELS["llama3-8b"],
    vocab_size=64,
    embedding_size=all_reduce.MULTIPLE,
    hidden_size=all_reduce.MULTIPLE,
    intermediate_size=256,
    num_heads=8,
    num_kv_heads=8,
    layers=scale_steps.MODELS["llama3-8b"].layers[:2],
)
NUM_SEQS = 3


def make_batch(num_seqs=NUM_SEQS):
    lens = np.arange(num_seqs, dtype=np.int32) % 7 + 3
    tables = np.arange(num_seqs, dtype=np.int32)[:, None]
    slots = tables[:, 0] * 16 + lens - 1
    return Batch(*map(jnp.asarray, (lens * 5 % 64, lens - 1, slots, tables, lens)), is_decode=True)


def step_of(mesh, peers, logit_rows=None, times=None, num_seqs=NUM_SEQS):
    """The logits of a decode step, or of the last of `times` equal steps in a loop; and the compiled program."""
    config, draw = split_config(CONFIG, mesh), np.random.default_rng(0)
    shapes, step = make_abstract_step(config, jnp.bfloat16, peers=peers)

    def weight(path, leaf):
        if isinstance(leaf, jax.Array):  # the table
            return leaf
        made = draw.normal(size=leaf.shape, scale=0.02) if path[-1].key != "scale" else draw.uniform(size=leaf.shape)
        return jax.device_put(made.astype(jnp.bfloat16), sharding_of([key.key for key in path], leaf.shape, mesh))

    weights = jax.tree_util.tree_map_with_path(weight, shapes)
    caches = loop.make_caches(config, num_seqs, 16, jnp.bfloat16, mesh=mesh)
    batch = dataclasses.replace(make_batch(num_seqs), logit_rows=logit_rows)

    def steps(weights, caches, batch, times):
        last = (
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, weights, caches, batch)[0]),
            caches,
        )
        return jax.lax.fori_loop(0, times, lambda _, last: step(weights, last[1], batch), last)

    given = (weights, caches, batch, *(() if times is None else (times,)))
    compiled = jax.jit(step if times is None else steps).lower(*given).compile()
    return np.asarray(compiled(*given)[0]), compiled


def xla_s_sum(part, residual, scale, table, *, num_devices, epsilon):
    assert table.shape == (2 + 2 * num_devices,)
    assert epsilon == CONFIG.norm_eps == 1e-5
    if part.ndim == 3:
        part = part.sum(axis=0).astype(jnp.bfloat16)
    return scale_reduce.sum_norm(part, residual, scale)


@pytest.mark.parametrize("num_seqs", [1, NUM_SEQS])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_are_those_of_xla(size, num_seqs, monkeypatch):
    """With XLA's sum and norm in the kernel's place, and with the last rows alone."""
    monkeypatch.setattr(all_reduce, "sum_norm", xla_s_sum)
    mesh = make_mesh({"dp": 1, "tp": size}, jax.devices("cpu"))
    peers, rows = all_reduce.PeerSum.over(mesh, CONFIG.hidden_size), jnp.array([num_seqs - 1, 0], jnp.int32)
    wanted, _ = step_of(mesh, None, rows, num_seqs=num_seqs)
    found, compiled = step_of(mesh, peers, rows, num_seqs=num_seqs)
    np.testing.assert_allclose(found, wanted, atol=3e-2 * np.abs(wanted).max())
    # One for the embedding, one after each attention and one after each MLP: the kernel has all but the first.
    text = str(compiled.as_text())
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1 + 2 * len(CONFIG.layers)


@pytest.fixture
def gpu_mesh(request):
    """A mesh of some GPUs whose memory the kernel reaches."""
    if len(jax.devices()) < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    mesh = make_mesh({"dp": 1, "tp": request.param})
    if (lacks := all_reduce.lacks(mesh, CONFIG.hidden_size, jnp.bfloat16)) is not None:
        pytest.skip(lacks)
    return mesh


@pytest.mark.gpu
@pytest.mark.parametrize("gpu_mesh", [2, 4, 8], indirect=True)
@pytest.mark.parametrize("rows", [1, 37, all_reduce.MOST_ROWS])
def test_kernel_on_gpus(gpu_mesh, rows):
    """Results have the same bits on all devices and in each run, and an error that rounding explains."""
    for hidden_size in (all_reduce.MULTIPLE, 8 * all_reduce.MULTIPLE):
        found = scale_reduce.check(gpu_mesh, rows, hidden_size, "called")
        assert found["same_bits"]
        assert found["error"] < 2 * 2**-9


@pytest.mark.gpu
@pytest.mark.parametrize("gpu_mesh", [2, 4, 8], indirect=True)
@pytest.mark.parametrize("num_seqs", [1, NUM_SEQS])
def test_steps_on_gpus_are_those_of_xla(gpu_mesh, num_seqs):
    peers = sharding.peer_sum(split_config(CONFIG, gpu_mesh), jnp.bfloat16, gpu_mesh, True)
    assert peers is not None
    wanted, _ = step_of(gpu_mesh, None, num_seqs=num_seqs)
    found, compiled = step_of(gpu_mesh, peers, num_seqs=num_seqs)
    np.testing.assert_allclose(found, wanted, atol=3e-2 * np.abs(wanted).max())
    text = str(compiled.as_text())
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1
    in_loop, _ = step_of(gpu_mesh, peers, times=3, num_seqs=num_seqs)
    np.testing.assert_allclose(in_loop, wanted, atol=3e-2 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, "a device is no Hopper GPU"),
        ({"hidden_size": 1000, "embedding_size": 1000}, "it takes bfloat16 rows of a multiple of 1024"),
    ],
)
def test_cpus_leave_sums_to_xla_and_say_why(change, why, caplog):
    caplog.set_level(logging.INFO, "examples.sharding")
    mesh = make_mesh({"dp": 1, "tp": 2}, jax.devices("cpu"))
    assert sharding.peer_sum(dataclasses.replace(CONFIG, **change), jnp.bfloat16, mesh) is None
    assert why in caplog.text
    assert sharding.peer_sum(CONFIG, jnp.bfloat16, None) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"norm_offset": 1.0}, "other norms"),
        ({"norm_place": "after"}, "other norms"),
        ({"residual_scale": 0.5, "o_bias": True}, "a residual scale, biases"),
        ({"layers": (LayerConfig(has_experts=True),)}, "experts"),
    ],
)
def test_other_models_leave_sums_to_xla(change, why, caplog, monkeypatch):
    monkeypatch.setattr(all_reduce, "lacks", lambda *_: None)
    caplog.set_level(logging.INFO, "examples.sharding")
    mesh = make_mesh({"dp": 1, "tp": 2}, jax.devices("cpu"))
    assert sharding.peer_sum(dataclasses.replace(CONFIG, **change), jnp.bfloat16, mesh) is None
    assert f"the model has {why}" in caplog.text


def test_large_steps_leave_sums_to_xla():
    """XLA's options for all-reduces are for those steps alone that XLA reduces."""
    mesh = make_mesh({"dp": 1, "tp": 2}, jax.devices("cpu"))
    weights = {"mlp": {"down_proj": {"kernel": jax.ShapeDtypeStruct((2**15, 2**14), jnp.bfloat16)}}}
    peers = all_reduce.PeerSum(mesh, None, most_rows=100)
    assert "xla_gpu_enable_command_buffer" not in xla_options(100, weights=weights, mesh=mesh, peers=peers)
    assert "xla_gpu_enable_command_buffer" in xla_options(101, weights=weights, mesh=mesh, peers=peers)


@pytest.mark.parametrize(("rows", "sent"), [(2, 3), (256, 1 + 3)])
def test_rows_are_sent_to_whom_they_concern(rows, sent, monkeypatch):
    """To all devices, or to the owner and then from it to all. What a device takes out of its inbox, it empties."""
    stored = []
    monkeypatch.setattr(exchange, "_store", lambda _, offset, words: stored.append(offset))
    part, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 2048), (2048,)))
    table = jax.ShapeDtypeStruct((2 + 2 * 3,), jnp.int32)
    call = jax.jit(functools.partial(all_reduce.sum_norm, num_devices=3, epsilon=1e-5))
    call.trace(part, part, scale, table).lower(lowering_platforms=("cuda",))
    chunks = 2 // all_reduce.programs_of(rows, 2048)
    taken = 3 + all_reduce.by_owner(3, rows, 2048)
    assert all_reduce.by_owner(3, rows, 2048) == (rows == 256)
    assert len(stored) == chunks * (sent + taken)


@pytest.mark.parametrize(
    ("rows", "hidden_size", "programs"), [(1, 8192, 8), (8, 4096, 4), (9, 8192, 1), (2, 5120, 1), (2, 6144, 2)]
)
def test_programs_of_a_row(rows, hidden_size, programs):
    """Several for few rows, as long as each thread has 16 bytes."""
    assert all_reduce.programs_of(rows, hidden_size) == programs


def test_layers_share_one_lowered_kernel():
    mesh = make_mesh({"dp": 1, "tp": 2}, jax.devices("cpu"))
    config = split_config(CONFIG, mesh)
    peers = all_reduce.PeerSum.over(mesh, CONFIG.hidden_size)
    shapes, step = make_abstract_step(config, jnp.bfloat16, peers=peers, implementation="xla")
    caches = jax.eval_shape(lambda: loop.make_caches(config, NUM_SEQS, 16, jnp.bfloat16))
    traced = jax.jit(step).trace(scale_steps.abstract_weights(shapes, mesh), caches, make_batch())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 2  # the last one leaves its sum out, which nobody needs
    assert text.count("call @add") == 2 * len(CONFIG.layers)


def compiled_cases():
    """Calls to compile: numbers of GPUs, rows and their sizes."""
    for num_devices, rows, hidden_size in ((2, 2, 4096), (8, all_reduce.MOST_ROWS, 8192), (8, 2, 8192)):

        def trace(on_device, num_devices=num_devices, rows=rows, hidden_size=hidden_size):
            shape = jax.ShapeDtypeStruct((rows, hidden_size), jnp.bfloat16)
            scale = jax.ShapeDtypeStruct((hidden_size,), jnp.bfloat16)
            table = jax.ShapeDtypeStruct((2 + 2 * num_devices,), jnp.int32)
            call = functools.partial(all_reduce.sum_norm, num_devices=num_devices, epsilon=1e-5)
            part = jax.ShapeDtypeStruct((4, rows, hidden_size), jnp.float32) if rows == 2 else shape
            return jax.jit(call).trace(*map(on_device, (part, shape, scale, table)))

        yield f"{num_devices}-{rows}x{hidden_size}", trace


@pytest.mark.slow
@pytest.mark.skipif(LACKS is not None, reason=str(LACKS))
def test_machine_code():
    """The assembler takes the kernel, and spills no registers."""
    reports = hopper_compiler.reports("tests.test_all_reduce:compiled_cases")
    spilled = [int(count) for _, said in reports for count in re.findall(r"(\d+) bytes spill loads", said)]
    assert spilled == [0, 0, 0]
