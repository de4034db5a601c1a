"""The engine against one-by-one generation: the same greedy tokens whatever runs beside a request."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from paged_jax.engine import Engine, EngineConfig, SamplingParams
from tests import engine_model as model
from tests.conftest import QUICK_COMPILE

BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 4, 24, 16
CONFIG = EngineConfig(
    max_model_len=48,
    max_num_seqs=4,
    max_tokens_per_step=16,
    decode_rows=(4,),
    mixed_tokens=(16,),
    max_logprobs=3,
    num_host_blocks=NUM_HOST_BLOCKS,
)
RNG = np.random.default_rng(5)
STEM, LONG = (RNG.integers(0, model.VOCAB, length).tolist() for length in (14, 20))
# Some begin alike, with and without whole blocks in common, one is another's beginning, and the last has the first
# block of one and the second and third of another.
PROMPTS = [
    *(STEM[:length] for length in (1, 7, 8, 13)),
    *(STEM[:12] + RNG.integers(0, model.VOCAB, length).tolist() for length in (1, 5)),
    RNG.integers(0, model.VOCAB, 3).tolist(),
    LONG,
    [*STEM[:4], *LONG[4:13]],
]


class Words:
    """A tokenizer: every token is a short word of its own."""

    def decode(self, ids, /):
        return "".join(f"{i:x}." for i in ids)


@pytest.fixture(scope="module")
def weights():
    return model.make_weights()


@pytest.fixture(scope="module")
def reference(weights):
    return model.Reference(weights)


@pytest.fixture(scope="module")
def the_engine(weights):
    caches = model.make_caches(NUM_BLOCKS, BLOCK_SIZE)
    return Engine(model.step, weights, caches, CONFIG, tokenizer=Words(), compiler_options=QUICK_COMPILE)


@pytest.fixture
def engine(the_engine):
    """One engine for all tests, since compiling takes most of their time; empty, with the policies above."""
    the_engine.reset(CONFIG)
    return the_engine


def check_blocks(engine):
    """No block is lost: every one is free, cached or held, and its references are those of tables and cache."""
    blocks = engine._blocks
    counts = blocks.counts()
    assert sum(counts) == blocks.num_blocks
    tables = blocks.state.block_tables
    references = np.bincount(tables[tables >= 0], minlength=blocks.num_blocks)
    for block in range(blocks.num_blocks):
        references[block] += blocks.prefix is not None and block in blocks.prefix
    assert references.tolist() == blocks.state.ref_counts.tolist()
    swapped = [s.host_blocks for s in engine._scheduler.waiting if s.host_blocks is not None]
    assert sorted(sum(swapped, blocks.free_host_blocks)) == list(range(engine.config.num_host_blocks))
    seats = [s.seat for s in engine._scheduler.running]
    seats += [child.seat for s in engine._scheduler.running for child in s.children]
    assert sorted(seats + engine._scheduler.free_seats) == list(range(engine.config.max_num_seqs))


def drain(engine):
    """Steps until nothing is left to do; the deltas, with the blocks checked after each step."""
    deltas = []
    while engine.has_work or engine._launched is not None:
        deltas += engine.step()
        check_blocks(engine)
    assert engine._blocks.counts().held == 0
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    return deltas


def tokens_of(deltas):
    """(request id, index) -> all tokens."""
    found = {}
    for delta in deltas:
        found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    return {key: tuple(tokens) for key, tokens in found.items()}


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


@settings(max_examples=100)
@given(
    actions=ACTIONS,
    num_blocks=st.integers(8, 12),
    prefix_caching=st.booleans(),
    preemption=st.sampled_from(["cheaper", "recompute", "swap"]),
)
def test_any_history(the_engine, reference, actions, num_blocks, prefix_caching, preemption):
    """Random arrivals and cancellations in pools that hold about one or two requests."""
    engine, stop = the_engine, (3, 53)
    engine.reset(
        dataclasses.replace(CONFIG, num_blocks=num_blocks, prefix_caching=prefix_caching, preemption=preemption)
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
            expected = expected_tokens(engine, reference, prompt, params)
            assert [found[request_id, index] for index in range(params.n)] == expected


ALONE = {}


def expected_tokens(engine, reference, prompt, params):
    """What a request gives by itself: greedy tokens one by one, drawn ones from an otherwise idle engine."""
    if params.temperature == 0:
        return [reference.greedy(prompt, params.max_tokens, params.stop_token_ids)] * params.n
    key = tuple(prompt), params
    if key not in ALONE:
        engine.reset(CONFIG)
        ALONE[key] = [
            engine.generate([prompt], dataclasses.replace(params))[0][index].token_ids for index in range(params.n)
        ]
    return ALONE[key]


@pytest.mark.parametrize(("preemption", "counter"), [("recompute", "num_recomputed"), ("swap", "num_swapped")])
def test_preemption_either_way(engine, reference, preemption, counter):
    engine.reset(dataclasses.replace(CONFIG, num_blocks=9, preemption=preemption, prefix_caching=False))
    prompts = [PROMPTS[i] for i in (7, 5, 3, 6)]
    results = engine.generate(prompts, SamplingParams(max_tokens=16))
    assert [r[0].token_ids for r in results] == [reference.greedy(p, 16) for p in prompts]
    assert getattr(engine.stats(), counter) > 0
    drain(engine)


def test_cancelling_what_is_swapped_out_frees_its_place_on_the_host(engine):
    engine.reset(dataclasses.replace(CONFIG, num_blocks=9, preemption="swap", prefix_caching=False))
    for i in (7, 5, 3, 6):
        engine.add_request(PROMPTS[i], SamplingParams(max_tokens=16))
    while not (swapped := [s for s in engine._scheduler.waiting if s.host_blocks]):
        engine.step()
    for sequence in swapped:
        assert engine.cancel(sequence.request_id)
        check_blocks(engine)
    drain(engine)


def test_swaps_only_while_the_host_has_room_and_it_is_cheaper(engine):
    """The estimate of either way decides: with a link that is slow enough nothing is swapped."""
    for rate, is_swapped in ((1e15, True), (1e-3, False)):
        engine.reset(dataclasses.replace(CONFIG, num_blocks=9, swap_bytes_per_second=rate, prefix_caching=False))
        engine.generate([PROMPTS[i] for i in (7, 5, 3, 6)], SamplingParams(max_tokens=16))
        stats = engine.stats()
        assert (stats.num_swapped > 0) == is_swapped
        assert (stats.num_recomputed == 0) == is_swapped


def test_shared_prefix_is_computed_once(engine, reference):
    prompts = [[*STEM[:12], i, i + 1] for i in range(6)]
    results = engine.generate(prompts, SamplingParams(max_tokens=3))
    assert [r[0].token_ids for r in results] == [reference.greedy(p, 3) for p in prompts]
    stats = engine.stats()
    assert stats.num_prompt_tokens == 14 + 5 * 2, "three full blocks are computed once, then found"
    assert stats.hit_rate == pytest.approx(5 * 12 / (6 * 14))
    engine.reset(dataclasses.replace(CONFIG, prefix_caching=False))
    engine.generate(prompts, SamplingParams(max_tokens=3))
    assert engine.stats().num_prompt_tokens == 6 * 14
    assert engine.stats().hit_rate == 0


def test_a_conversation_finds_its_own_output(engine, reference):
    """Generated blocks are cached too."""
    prompt = PROMPTS[6]
    ((first,),) = engine.generate([prompt], SamplingParams(max_tokens=10))
    more = [*prompt, *first.token_ids, 5, 6]
    before = engine.stats().num_prompt_tokens
    ((second,),) = engine.generate([more], SamplingParams(max_tokens=4))
    assert second.token_ids == reference.greedy(more, 4)
    assert engine.stats().num_prompt_tokens - before == len(more) - 12


def test_samples_share_their_prompt(engine):
    """A prompt of `n` samples is computed once, and only the last block, in which they part, is copied."""
    prompt = PROMPTS[3]
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=8, n=4, temperature=1.0, seed=1))
    for _ in range(3):
        engine.step()
    assert engine.stats().num_prompt_tokens == len(prompt)
    shared, own = len(prompt) // BLOCK_SIZE, 1
    assert engine.stats().held_blocks == shared + 4 * own
    deltas = drain(engine)
    samples = [tuple(t for d in deltas if d.index == i for t in d.token_ids) for i in range(4)]
    assert len(set(samples)) == 4
    assert {d.request_id for d in deltas} == {request_id}


def test_same_seed_same_tokens_in_any_batch(engine):
    params = SamplingParams(max_tokens=8, temperature=0.9, top_k=30, top_p=0.9, seed=2**63 + 5)
    ((alone,),) = engine.generate([PROMPTS[5]], params)
    engine.reset(CONFIG)
    together = engine.generate([PROMPTS[1], PROMPTS[5], PROMPTS[7], PROMPTS[2]], params)
    assert together[1][0].token_ids == alone.token_ids
    engine.reset(CONFIG)
    ((other,),) = engine.generate([PROMPTS[5]], dataclasses.replace(params, seed=5))
    assert other.token_ids != alone.token_ids


def test_decode_rows_are_never_starved(engine):
    """While a long prompt is computed in pieces, a running text gets a token in every step."""
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


def test_log_probabilities_are_the_models(engine, reference):
    prompt = PROMPTS[4]
    for temperature in (0.0, 1.5):
        params = SamplingParams(max_tokens=5, temperature=temperature, logprobs=3)
        ((result,),) = engine.generate([prompt], params)
        tokens = list(prompt)
        for token_id, told in zip(result.token_ids, result.logprobs, strict=True):
            expected = np.asarray(jax.nn.log_softmax(jnp.asarray(reference.logits(tokens))))
            assert told.token_id == token_id
            np.testing.assert_allclose(told.logprob, expected[token_id], atol=1e-4)
            assert [i for i, _ in told.top] == np.argsort(-expected)[:3].tolist()
            np.testing.assert_allclose([p for _, p in told.top], np.sort(expected)[::-1][:3], atol=1e-4)
            tokens.append(token_id)


def test_stop_tokens_and_texts(engine, reference):
    prompt = PROMPTS[7]
    tokens = reference.greedy(prompt, 12)
    ((by_token,),) = engine.generate([prompt], SamplingParams(max_tokens=12, stop_token_ids=(tokens[5],)))
    cut = tokens.index(tokens[5]) + 1
    assert (by_token.token_ids, by_token.finish_reason) == (tokens[:cut], "stop")
    assert by_token.stop_reason == tokens[5]
    assert by_token.text == Words().decode(tokens[: cut - 1])

    text = Words().decode(tokens)
    stop = text[9:13]
    ((by_text,),) = engine.generate([prompt], SamplingParams(max_tokens=12, stop=(stop, "never")))
    assert (by_text.text, by_text.finish_reason, by_text.stop_reason) == (text[: text.index(stop)], "stop", stop)
    drain(engine)


def test_streamed_text_never_shows_a_part_of_a_stop_text(engine, reference):
    prompt = PROMPTS[0]
    text = Words().decode(reference.greedy(prompt, 12))
    stop = text[-4:] + "!"  # begins, but never completes
    pieces = [delta.text for delta in engine.stream(prompt, SamplingParams(max_tokens=12, stop=(stop,)))]
    assert "".join(pieces) == text
    assert len("".join(pieces[:-1])) <= len(text) - 4, "what begins the stop text is held back to the end"


def test_leaving_a_stream_cancels_its_request(engine):
    for _ in engine.stream(PROMPTS[7], SamplingParams(max_tokens=20)):
        break
    drain(engine)
    assert not engine.cancel(0)


def test_no_compilation_after_the_start(engine):
    """1,000 random requests: the counter of compiled programs stands still, and so does XLA's own."""
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
        engine.reset(dataclasses.replace(CONFIG, num_blocks=12))
        for _ in range(1000):
            prompt = rng.integers(0, model.VOCAB, rng.integers(1, 12)).tolist()
            params = SamplingParams(
                max_tokens=int(rng.integers(1, 4)),
                n=int(rng.choice([1, 1, 1, 3])),
                temperature=float(rng.choice([0.0, 1.0])),
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
    assert engine.stats().num_compiled == before == 3 + 2 + 3, "copies and swaps, shapes of a step, ways to draw"
    drain(engine)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "at least one token"),
        ([1] * 49, {}, "49 tokens; at most 48 fit"),
        ([1] * 40, {"max_tokens": 10}, "at most 9 new tokens"),
        ([1], {"n": 5}, "n must be at most max_num_seqs = 4, got 5"),
        ([1], {"logprobs": 4}, "logprobs must be at most max_logprobs = 3, got 4"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(engine, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, SamplingParams(**params))
    assert not engine.has_work


def test_as_many_tokens_as_fit(engine, reference):
    """Without `max_tokens` a text ends with the model's positions; its last token is never fed back."""
    prompt = PROMPTS[6]
    ((result,),) = engine.generate([prompt])
    assert len(result.token_ids) == CONFIG.max_model_len - len(prompt) + 1
    assert result.token_ids == reference.greedy(prompt, len(result.token_ids))


def test_reset_cannot_change_what_is_compiled(engine):
    with pytest.raises(ValueError, match="make a new Engine"):
        engine.reset(dataclasses.replace(CONFIG, max_model_len=40))
    with pytest.raises(ValueError, match="num_blocks must be at most the caches' 24, got 25"):
        engine.reset(dataclasses.replace(CONFIG, num_blocks=25))


def test_scales_per_token_are_refused(weights):
    caches = model.make_caches(4, 4, dtype=jnp.int8, k_scale=jnp.ones((4, 2, 4)), v_scale=1.0)
    with pytest.raises(ValueError, match="a scale for each token's place"):
        Engine(model.step, weights, caches, CONFIG)
