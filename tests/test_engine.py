"""Tests the engine against generation without batches: other requests must not change a request's greedy tokens."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from paged_jax.engine import Engine, EngineConfig, SamplingParams, TokenLogprob
from paged_jax.engine.arrays import logits_at
from paged_jax.engine.batch import StepShape
from paged_jax.engine.sampling import Kind
from tests import engine_model as model
from tests.conftest import QUICK_COMPILE
from tests.engine_checks import BLOCK_SIZE, CONFIG, NUM_BLOCKS, PROMPTS, RNG, STEM, check_blocks, drain, tokens_of


@pytest.mark.sampled(1)
def test_greedy_tokens_are_those_of_one_by_one_generation(engine, reference):
    results = engine.generate(PROMPTS, SamplingParams(max_tokens=9))
    assert [[r.token_ids for r in samples] for samples in results] == [[reference.greedy(p, 9)] for p in PROMPTS]
    assert {r.finish_reason for samples in results for r in samples} == {"length"}
    drain(engine)


REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.integers(0, len(PROMPTS) - 1),
        "max_tokens": st.integers(1, 12),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "temperature": st.sampled_from([0.0, 0.0, 1.0]),
        "stops": st.booleans(),
    }
)
STEPS, CANCEL = st.tuples(st.just("step"), st.integers(1, 3)), st.tuples(st.just("cancel"), st.integers(0, 9))
ACTIONS = st.lists(st.one_of(REQUESTS, REQUESTS, REQUESTS, STEPS, CANCEL), min_size=5, max_size=14)


@settings(max_examples=40)
@given(
    actions=ACTIONS,
    num_blocks=st.integers(8, 12),
    prefix_caching=st.booleans(),
    preemption=st.sampled_from(["cheaper", "recompute", "swap"]),
)
def test_any_history(the_engine, reference, actions, num_blocks, prefix_caching, preemption, config):
    """Requests arrive and are cancelled at random, in pools that hold about one or two of them."""
    engine, stop = the_engine, (3, 53)
    engine.reset(
        dataclasses.replace(config, num_blocks=num_blocks, prefix_caching=prefix_caching, preemption=preemption)
    )
    requests, cancelled, deltas = {}, set(), []
    for action in actions:
        if isinstance(action, dict):
            prompt = PROMPTS[action["prompt"]]
            params = SamplingParams(
                max_tokens=action["max_tokens"],
                n=action["n"],
                temperature=action["temperature"],
                seed=11,
                stop_token_ids=stop if action["stops"] else (),
            )
            requests[engine.add_request(prompt, params)] = prompt, params
        elif action[0] == "step":
            for _ in range(action[1]):
                deltas += engine.step()
                check_blocks(engine)
        elif requests:
            request_id = list(requests)[action[1] % len(requests)]
            is_unfinished = request_id in engine._requests
            assert engine.cancel(request_id) == is_unfinished
            if is_unfinished:
                cancelled.add(request_id)
            check_blocks(engine)
    deltas += drain(engine)
    stats = engine.stats()
    for name in ("num_recomputed", "num_swapped", "hit_rate"):
        event(f"{name} > 0: {getattr(stats, name) > 0}")
    found = tokens_of(deltas)
    for request_id, (prompt, params) in requests.items():
        if request_id not in cancelled:
            expected = expected_tokens(engine, reference, prompt, params, config)
            assert [found[request_id, index] for index in range(params.n)] == expected


ALONE = {}


def expected_tokens(engine, reference, prompt, params, config):
    """The tokens of a request by itself: greedy ones from the reference, random ones from an otherwise idle engine."""
    if params.temperature == 0:
        return [reference.greedy(prompt, params.max_tokens, params.stop_token_ids)] * params.n
    key = tuple(prompt), params
    if key not in ALONE:
        engine.reset(config)
        ALONE[key] = [
            engine.generate([prompt], dataclasses.replace(params))[0][index].token_ids for index in range(params.n)
        ]
    return ALONE[key]


@pytest.mark.parametrize(("preemption", "counter"), [("recompute", "num_recomputed"), ("swap", "num_swapped")])
def test_preemption_either_way(engine, reference, preemption, counter, config):
    engine.reset(dataclasses.replace(config, num_blocks=9, preemption=preemption, prefix_caching=False))
    prompts = [PROMPTS[i] for i in (7, 5, 3, 6)]
    results = engine.generate(prompts, SamplingParams(max_tokens=16))
    assert [r[0].token_ids for r in results] == [reference.greedy(p, 16) for p in prompts]
    assert getattr(engine.stats(), counter) > 0
    drain(engine)


def test_cancelling_what_is_swapped_out_frees_its_place_on_the_host(engine, config):
    engine.reset(dataclasses.replace(config, num_blocks=9, preemption="swap", prefix_caching=False))
    for i in (7, 5, 3, 6):
        engine.add_request(PROMPTS[i], SamplingParams(max_tokens=16))
    while not (swapped := [s for s in engine._scheduler.waiting if s.host_blocks]):
        engine.step()
    for sequence in swapped:
        assert engine.cancel(sequence.request_id)
        check_blocks(engine)
    drain(engine)


def test_swaps_only_while_the_host_has_room_and_it_is_cheaper(engine, config):
    """The estimated times decide: with a very slow link nothing is swapped."""
    for rate, is_swapped in ((1e15, True), (1e-3, False)):
        engine.reset(dataclasses.replace(config, num_blocks=9, swap_bytes_per_second=rate, prefix_caching=False))
        engine.generate([PROMPTS[i] for i in (7, 5, 3, 6)], SamplingParams(max_tokens=16))
        stats = engine.stats()
        assert (stats.num_swapped > 0) == is_swapped
        assert (stats.num_recomputed == 0) == is_swapped


def test_shared_prefix_is_computed_once(engine, reference, config):
    prompts = [[*STEM[:12], i, i + 1] for i in range(6)]
    results = engine.generate(prompts, SamplingParams(max_tokens=3))
    assert [r[0].token_ids for r in results] == [reference.greedy(p, 3) for p in prompts]
    stats = engine.stats()
    assert stats.num_prompt_tokens == 14 + 5 * 2, "three full blocks are computed once, then found"
    assert stats.hit_rate == pytest.approx(5 * 12 / (6 * 14))
    engine.reset(dataclasses.replace(config, prefix_caching=False))
    engine.generate(prompts, SamplingParams(max_tokens=3))
    assert engine.stats().num_prompt_tokens == 6 * 14
    assert engine.stats().hit_rate == 0


def test_a_conversation_finds_its_own_output(engine, reference):
    """The prefix cache also keeps blocks of generated tokens."""
    prompt = PROMPTS[6]
    ((first,),) = engine.generate([prompt], SamplingParams(max_tokens=10))
    more = [*prompt, *first.token_ids, 5, 6]
    before = engine.stats().num_prompt_tokens
    ((second,),) = engine.generate([more], SamplingParams(max_tokens=4))
    assert second.token_ids == reference.greedy(more, 4)
    assert engine.stats().num_prompt_tokens - before == len(more) - 12


def test_decode_rows_are_never_starved(engine):
    """While a long prompt is computed in chunks, a running sequence gets a token in every step."""
    running = engine.add_request(PROMPTS[6], SamplingParams(max_tokens=20))
    engine.step(), engine.step()
    long = engine.add_request(RNG.integers(0, model.VOCAB, 45).tolist(), SamplingParams(max_tokens=2))
    steps = [engine.step() for _ in range(3)]
    assert all(any(delta.request_id == running for delta in deltas) for deltas in steps)
    assert not any(delta.request_id == long for deltas in steps for delta in deltas), (
        "three steps of 15 tokens, read one step late"
    )
    assert any(delta.request_id == long for delta in engine.step())
    drain(engine)


@pytest.mark.sampled(1)
def test_no_compilation_after_the_start(engine, config):
    """During 200 random requests neither the engine's counter of compiled programs nor XLA's own changes."""
    compiled = []

    def listen(name, seconds, **_):
        if "backend_compile" in name:
            compiled.append(name)

    rng = np.random.default_rng(0)
    before = engine.stats().num_compiled
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 1)(np.float32(1))
        assert compiled, "the listener hears nothing"
        compiled.clear()
        engine.reset(dataclasses.replace(config, num_blocks=12))
        for _ in range(200):
            prompt = rng.integers(0, model.VOCAB, rng.integers(1, 12)).tolist()
            params = SamplingParams(
                max_tokens=int(rng.integers(1, 4)),
                n=int(rng.choice([1, 1, 1, 3])),
                temperature=float(rng.choice([0.0, 1.0])),
                top_k=int(rng.choice([0, 5])),
                logprobs=2 if rng.random() < 0.1 else None,
            )
            engine.add_request(prompt, params)
            if rng.random() < 0.5:
                engine.step()
        while engine.has_work:
            engine.step()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    shapes, rows = len(config.decode_rows) + len(config.mixed_tokens), len(config.decode_rows)
    assert engine.stats().num_compiled == before == 4 + shapes + 4 * rows, "moves and tables, shapes, ways to draw"
    drain(engine)


@pytest.mark.parametrize("field", dataclasses.fields(EngineConfig), ids=lambda field: field.name)
def test_what_a_reset_cannot_change(field):
    """The fields above `num_blocks` decide what is compiled, and no other ones."""
    names = [each.name for each in dataclasses.fields(EngineConfig)]
    others = {
        "max_model_len": 40,
        "max_num_seqs": 8,
        "max_tokens_per_step": 32,
        "max_prompts_per_step": 1,
        "decode_rows": (1, 4),
        "mixed_tokens": (1, 16),
        "max_logprobs": 1,
        "adjustments": False,
        "num_host_blocks": 1,
        "verify_tokens": (2,),
        "max_shared_prefixes": 1,
        "num_blocks": 5,
        "prefix_caching": False,
        "preemption": "swap",
        "recompute_tokens_per_second": 1.0,
        "swap_bytes_per_second": 1.0,
        "max_draft_tokens": 1,
        "free_tokens_per_step": 1,
        "least_shared_tokens": 1,
        "max_tokens_beside_decodes": 5,
        "between_tokens_seconds": 0.01,
    }
    config = EngineConfig(48, 4, 16, max_draft_tokens=2, verify_tokens=(4,))
    ladders = {"decode_rows": (), "mixed_tokens": ()}  # which follow from the sizes
    changed = dataclasses.replace(config, **ladders | {field.name: others[field.name]})
    is_compiled = names.index(field.name) < names.index("num_blocks")
    assert (changed.compiled != config.compiled) == is_compiled


def test_reset_cannot_change_what_is_compiled(engine, config):
    with pytest.raises(ValueError, match="make a new Engine"):
        engine.reset(dataclasses.replace(config, max_model_len=40))
    with pytest.raises(ValueError, match="num_blocks must be at most the caches' 24, got 25"):
        engine.reset(dataclasses.replace(config, num_blocks=25))


def failing(engine, part):
    """Makes the programs of one part, "model" or "drawing", fail after they took their arguments."""

    def fail_after(program):
        def run(*arguments):
            program(*arguments)
            raise RuntimeError("out of memory")

        return run

    programs = engine._runner._programs
    is_of_part = {name: isinstance(name, StepShape) == (part == "model") for name in programs}
    broken = {name: fail_after(program) for name, program in programs.items() if is_of_part[name]}
    return mock.patch.dict(programs, broken)


@pytest.mark.parametrize("part", ["model", "drawing"])
def test_reset_after_a_step_that_failed_on_the_device(engine, reference, part):
    """A program that fails has taken arrays and gives none back."""
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=9))
    with failing(engine, part), pytest.raises(RuntimeError, match="out of memory"):
        drain(engine)
    engine.reset()
    results = engine.generate(PROMPTS, SamplingParams(max_tokens=9))
    assert [result.token_ids for (result,) in results] == [reference.greedy(prompt, 9) for prompt in PROMPTS]


def test_measured_steps_are_all_shapes_and_leave_no_trace(engine, reference, config):
    prompt = PROMPTS[7]
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="1 requests are unfinished"):
        engine.measure_steps(20)
    engine.cancel(request_id)
    times = engine.measure_steps(48, repeats=1)
    shapes = {(rows, True) for rows in config.decode_rows} | {(tokens, False) for tokens in config.mixed_tokens}
    assert {(shape.num_tokens, shape.is_decode) for shape in times} == shapes
    assert min(times.values()) > 0
    ((result,),) = engine.generate([prompt], SamplingParams(max_tokens=9))
    assert result.token_ids == reference.greedy(prompt, 9)
    with pytest.raises(ValueError, match=r"context_len must be in \[1, 48\], got 49"):
        engine.measure_steps(49)


def test_a_block_has_the_bytes_of_all_layers(engine):
    """The engine compares the cost of a swap, by these bytes, with the cost of computing again."""
    keys_and_values = 2 * BLOCK_SIZE * model.KV_HEADS * model.HEAD_SIZE * 4
    assert [pool.block_bytes for pool in engine.stats().pools] == [
        pool.num_layers * keys_and_values for pool in engine.stats().pools
    ]
    assert sum(pool.num_layers for pool in engine.stats().pools) == model.LAYERS


@pytest.mark.parametrize(("vocab_size", "is_split"), [(60, True), (61, False)])
def test_a_vocabulary_is_split_as_heads_are_if_it_can_be(vocab_size, is_split):
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    caches = jax.device_put(model.make_caches(4, 4), NamedSharding(mesh, PartitionSpec(None, "tp")))
    expected = PartitionSpec(None, "tp") if is_split else PartitionSpec()
    assert logits_at(caches[0], vocab_size) == NamedSharding(mesh, expected)


def test_log_probabilities_of_the_drawn_tokens_alone():
    """The model here continues a token by the next number, with certainty."""

    def step(weights, caches, batch):
        return jnp.where(jax.nn.one_hot(batch.token_ids[batch.logit_rows] + 1, 16) > 0, 0.0, -jnp.inf), caches

    caches = model.make_caches(8, 4)[:1]
    config = EngineConfig(16, 2, 2, decode_rows=(2,), mixed_tokens=(2,), max_logprobs=0, adjustments=False)
    engine = Engine(step, {}, caches, config, compiler_options=QUICK_COMPILE)
    ((result,),) = engine.generate([[1, 2]], SamplingParams(max_tokens=2, logprobs=0, prompt_logprobs=0))
    assert result.prompt_logprobs == (TokenLogprob(2, 0.0),)
    assert result.logprobs == (TokenLogprob(3, 0.0), TokenLogprob(4, 0.0))
    ((result,),) = engine.generate([[1, 2]], SamplingParams(max_tokens=2, prompt_logprobs=0))
    assert result.prompt_logprobs == (TokenLogprob(2, 0.0),)
    assert not result.logprobs


def test_scales_per_token_are_refused(weights):
    caches = model.make_caches(4, 4, dtype=jnp.int8, k_scale=jnp.ones((4, 2, 4)), v_scale=1.0)
    with pytest.raises(ValueError, match="a scale for each token's place"):
        Engine(model.step, weights, caches, CONFIG)


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize(
    ("dtype", "k_scale", "v_scale"),
    [
        pytest.param(jnp.float8_e4m3fn, 0.02, None, marks=pytest.mark.slow),
        (jnp.int8, jnp.full(2, 0.05), jnp.full(2, 0.04)),
    ],
    ids=["float8, one scale", "int8, a scale per head"],
)
def test_a_narrow_cache_is_swapped(weights, dtype, k_scale, v_scale):
    """The host's cache has scales of its own: programs take those of the device with the caches that they update."""
    config = dataclasses.replace(CONFIG, max_num_seqs=2, decode_rows=(2,), preemption="swap", prefix_caching=False)
    caches = model.make_caches(NUM_BLOCKS, BLOCK_SIZE, dtype=dtype, k_scale=k_scale, v_scale=v_scale)
    with model.drawing(Kind.GREEDY):
        engine = Engine(model.step, weights, caches, config, compiler_options=QUICK_COMPILE)
    prompts, params = [PROMPTS[7], PROMPTS[5]], SamplingParams(max_tokens=16)
    expected = engine.generate(prompts, params)
    assert engine.stats().num_swapped == 0
    engine.reset(dataclasses.replace(config, num_blocks=13))
    assert engine.generate(prompts, params) == expected
    assert engine.stats().num_swapped > 0
    with failing(engine, "model"), pytest.raises(RuntimeError, match="out of memory"):
        engine.generate(prompts, params)
    engine.reset()
    assert engine.generate(prompts, params) == expected, "the scales are what they were"
