"""Tests the engine over a simulated pool (engine_simulation.py), which notices each read of an unwritten slot."""

import dataclasses
import gc
import itertools
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import bench_scheduler
from paged_jax.engine import EngineConfig, SamplingParams
from paged_jax.engine.plan import Plan
from tests import engine_walk
from tests.engine_checks import drain, tokens_of
from tests.engine_simulation import Clairvoyant, make_engine
from tests.simulated_tokens import VOCAB, expected_tokens

CONFIG = EngineConfig(max_model_len=64, max_num_seqs=4, max_tokens_per_step=8)


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 3, 4, 7, 8])
def test_a_row_never_reads_what_another_row_of_its_decode_step_writes(block_size, length):
    """Equal beginnings meet in one step: the later request finds the block whose last token this step computes."""
    for second in range(length, length + 3):
        for budget in range(2, length + 3):
            config = EngineConfig(max_model_len=32, max_num_seqs=2, max_tokens_per_step=budget)
            engine = make_engine(64 // block_size, block_size, config)
            prompts = [[i % VOCAB for i in range(n)] for n in (length, second)]
            params = SamplingParams(max_tokens=4)
            ids = [engine.add_request(prompt, params) for prompt in prompts]
            found = tokens_of(drain(engine))
            assert [found[i, 0] for i in ids] == [expected_tokens(prompt, params, 0, 33) for prompt in prompts]


@pytest.mark.parametrize(("preemption", "counter"), [("recompute", "num_recomputed"), ("swap", "num_swapped")])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_samples_of_one_prompt_that_are_preempted(preemption, counter, prefix_caching):
    config = dataclasses.replace(CONFIG, preemption=preemption, prefix_caching=prefix_caching, num_host_blocks=60)
    engine = make_engine(11, 4, config)
    prompts = [[(i * i + k) % VOCAB for i in range(9 + k)] for k in range(4)]
    params = SamplingParams(max_tokens=24, n=3, temperature=1.0, seed=3)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    found = tokens_of(drain(engine, engine_walk.check_cached))
    for request_id, prompt in zip(ids, prompts, strict=True):
        for index in range(3):
            assert found[request_id, index] == expected_tokens(prompt, params, index, 65)
    assert getattr(engine.stats(), counter) > 4


@pytest.mark.parametrize(("num_host_blocks", "is_swapped"), [(100, True), (34, True), (33, False)])
def test_swaps_of_many_blocks_go_in_several_calls(num_host_blocks, is_swapped):
    """With one block too few on the host, the sequence is computed again."""
    engine = make_engine(72, 1, dataclasses.replace(CONFIG, preemption="swap", num_host_blocks=num_host_blocks))
    prompts = [[(3 * i + k) % VOCAB for i in range(30)] for k in range(2)]
    params = SamplingParams(max_tokens=20)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    swapped, swap_out = [], engine._blocks.swap_out
    engine._blocks.swap_out = lambda seat: swapped.append(engine._blocks.managers[0].table(seat)) or swap_out(seat)
    found = tokens_of(drain(engine))
    assert [found[i, 0] for i in ids] == [expected_tokens(prompt, params, 0, 65) for prompt in prompts]
    assert max(map(len, swapped)) == 34
    assert (engine._scheduler.counters.swapped > 0) == is_swapped
    assert (engine._scheduler.counters.recomputed > 0) != is_swapped


def test_moves_of_blocks_follow_the_plan():
    """A block that is swapped out may be one that a sequence is swapped in to, or that another block is copied to."""
    engine = make_engine(4, 2, dataclasses.replace(CONFIG, num_host_blocks=4))
    pool, host = engine._runner.pool, engine._runner.host_pool
    pool.tokens[:], host.tokens[:] = np.arange(4)[:, None], 10 + np.arange(4)[:, None]
    engine._runner.launch(Plan(swap_out=[[(0, 0), (1, 1)]], swap_in=[[(2, 0)]], copies=[[(0, 1)]]))
    assert host.tokens[:, 0].tolist() == [0, 1, 12, 13]
    assert pool.tokens[:, 0].tolist() == [12, 12, 2, 3]


def test_a_step_may_change_more_of_the_tables_than_one_call_does():
    engine = make_engine(1200, 1, EngineConfig(max_model_len=1100, max_num_seqs=1, max_tokens_per_step=1100))
    prompt, params = [i * i % VOCAB for i in range(1090)], SamplingParams(max_tokens=4)
    request_id = engine.add_request(prompt, params)
    assert tokens_of(drain(engine))[request_id, 0] == expected_tokens(prompt, params, 0, 1101)


def test_the_rate_is_that_of_tokens(monkeypatch):
    """A step takes a second here."""
    monkeypatch.setattr("paged_jax.engine.engine.time.perf_counter", itertools.count().__next__)
    engine = make_engine(64, 4, CONFIG)
    fresh = engine.stats()
    for _ in range(2):  # a reset forgets the seconds
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=4, n=3))
        num_steps = 0
        while engine.has_work:
            engine.step()
            num_steps += 1
        assert engine.stats().tokens_per_second == pytest.approx(12 / num_steps)
        engine.reset()
        assert engine.stats() == fresh


def test_a_reset_forgets_what_was_counted():
    proposer = Clairvoyant(random.Random(0), 1.0)
    engine = make_engine(64, 4, dataclasses.replace(CONFIG, max_draft_tokens=3), proposer=proposer)
    proposer.engine, fresh = engine, engine.stats()
    engine.generate([[1, 2, 3] * 3] * 2, SamplingParams(max_tokens=40))
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0
    changed = {name for name, value in vars(stats).items() if value != getattr(fresh, name)}
    assert changed >= {"num_draft_tokens", "num_steps", "num_prompt_tokens", "num_output_tokens", "hit_rate"}
    engine.reset()
    assert engine.stats() == fresh


def test_an_engine_is_empty_while_it_is_measured():
    """A measured step overwrites blocks, so that none may be found afterwards."""
    engine = make_engine(64, 4, CONFIG)
    engine.generate([list(range(5)) * 3], SamplingParams(max_tokens=2))
    assert engine.stats().cached_blocks == 4
    engine._runner.measure = lambda context_len, repeats: (context_len, repeats, engine._blocks.counts())
    assert engine.measure_steps(7) == (7, 8, (64, 0, 0))


def test_the_time_of_a_step_is_a_mean(monkeypatch):
    monkeypatch.setattr("paged_jax.engine.runner.time", SimpleNamespace(perf_counter=iter([1.0, 9.0]).__next__))
    engine = make_engine(64, 4, CONFIG)
    runner, shape = engine._runner, engine._runner._shapes()[0]
    runner._replicated, runner._shapes, runner._run = None, lambda: [shape], lambda *_: 0
    assert runner.measure(5, 4) == {shape: 2.0}


def test_requests_without_a_seed_get_fresh_randomness():
    """The seeds differ in every process and after every reset, unless the engine has a seed; none is a user's seed."""
    prompt, params = list(range(5)), SamplingParams(max_tokens=20, temperature=1.0)

    def draw(engine, **changes):
        return [
            samples[0].token_ids for samples in engine.generate([prompt] * 3, dataclasses.replace(params, **changes))
        ]

    first, second = (make_engine(64, 4, CONFIG) for _ in range(2))
    drawn = [draw(first), draw(second), draw(first)]
    first.reset()
    drawn += [draw(first), *(draw(first, seed=seed) for seed in range(6))]
    found = [tokens for tokens in drawn[:4] for tokens in tokens] + [tokens[0] for tokens in drawn[4:]]
    assert len(set(found)) == 4 * 3 + 6
    same, again = (make_engine(64, 4, CONFIG, seed=7) for _ in range(2))
    fixed = draw(same)
    assert draw(again) == fixed
    same.reset()
    assert draw(same) == fixed
    assert draw(make_engine(64, 4, CONFIG, seed=8)) != fixed


def test_a_sequence_that_was_swapped_is_found_again():
    """The prefix cache evicted its old blocks while it was on the host; its new blocks take their names."""
    engine = make_engine(12, 4, dataclasses.replace(CONFIG, preemption="swap", num_host_blocks=20))
    first, second = ([(3 * i + k) % VOCAB for i in range(16)] for k in range(2))
    engine.add_request(first, SamplingParams(max_tokens=26))
    swapped = engine.add_request(second, SamplingParams(max_tokens=13))
    tokens = tokens_of(drain(engine, engine_walk.check_cached))[swapped, 0]
    assert engine.stats().num_swapped == 1
    engine.generate([[*second, *tokens]], SamplingParams(max_tokens=1))
    assert engine._scheduler.counters.hit_tokens == 28, "also the block that its last step filled"


def test_only_tokens_of_prompts_count_as_such():
    """A preempted sequence's output, computed again in one row with its prompt, does not count."""
    engine = make_engine(9, 4, dataclasses.replace(CONFIG, preemption="recompute", prefix_caching=False))
    for k in range(2):
        engine.add_request([(3 * i + k) % VOCAB for i in range(10)], SamplingParams(max_tokens=14))
    launch, computed = engine._runner.launch, []
    engine._runner.launch = lambda plan: computed.extend(plan.chunks) or launch(plan)
    drain(engine)
    ends = [(chunk.start, chunk.start + chunk.num_tokens) for chunk in computed]
    assert any(start < 10 < end - 1 for start, end in ends), "a row has both"
    assert engine.stats().num_prompt_tokens == sum(max(0, min(end, 10) - start) for start, end in ends)


@pytest.mark.parametrize("num_steps", range(5))
def test_a_cancelled_request_gives_all_of_its_seats_back(num_steps):
    engine = make_engine(64, 4, CONFIG)
    request_id = engine.add_request(list(range(7)) * 3, SamplingParams(max_tokens=9, n=3, temperature=1.0))
    for _ in range(num_steps):
        engine.step()
    engine.cancel(request_id)
    assert sorted(engine._scheduler.seats.free) == list(range(CONFIG.max_num_seqs))
    assert engine._blocks.counts().held == 0
    drain(engine)


def count_calls(engine, num_steps=32):
    """Counts the calls of functions in a step, Python's and C's."""
    calls = []
    gc.disable()  # some packages have Python functions called in every search for garbage
    sys.setprofile(lambda frame, event, argument: calls.append(event in ("call", "c_call")))
    try:
        for _ in range(num_steps):
            engine.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return sum(calls) / num_steps


@pytest.mark.parametrize("num_groups", [1, 2])
def test_the_host_works_for_what_changes_in_a_decode_step(num_groups):
    """A further sequence costs a few calls, though others wait for a seat; contexts and pools cost none.

    A sequence gives out a token in each step, and fills a block in one step of 16. In the second group it also releases
    one then.
    """
    few, many, long = (
        count_calls(bench_scheduler.make_engine(num_seqs, length, num_blocks, num_groups, num_waiting=3))
        for num_seqs, length, num_blocks in ((16, 1100, 5000), (64, 1100, 5000), (64, 2000, 20_000))
    )
    assert few < many <= few + 6 * (64 - 16)
    assert many == long
    engine = bench_scheduler.make_engine(256, 40, 5000, num_groups, 0)
    engine._runner.sent_bytes = 0
    engine.step()
    assert 0 < engine._runner.sent_bytes < 64 * 1024


def test_random_histories():
    """Runs the first histories of `python -m tests.engine_walk`; every event of a request happens in them."""
    seen = engine_walk.run(range(60))
    assert min(seen.values()) > 5, seen


@pytest.mark.slow
def test_many_random_histories():
    seen = engine_walk.run(range(60, 140))
    assert min(seen.values()) > 5, seen
