"""Tests fairness over a simulated pool: no request starves, urgent ones wait least, no prompt delays a decode."""

import dataclasses
import random

import pytest

from paged_jax.engine import EngineConfig, SamplingParams
from tests.engine_checks import drain, tokens_of
from tests.engine_simulation import make_engine
from tests.simulated_tokens import VOCAB, expected_tokens

CONFIG = EngineConfig(max_model_len=48, max_num_seqs=4, max_tokens_per_step=16, max_prompts_per_step=2)


def watched(config, num_blocks, block_size=4):
    """An engine, and a list to which it appends the plan of each step."""
    engine, plans = make_engine(num_blocks, block_size, config), []
    launch = engine._runner.launch
    engine._runner.launch = lambda plan: plans.append(plan) or launch(plan)
    return engine, plans


def arrivals(seed, count, priorities=(0,)):
    """Random requests: the step before which each comes, its prompt and its parameters."""
    draw, step, found = random.Random(seed), 0, []
    for _ in range(count):
        step += draw.choice([0, 0, 0, 1, 5])
        prompt = [draw.randrange(VOCAB) for _ in range(draw.choice([1, 3, 12, 30]))]
        params = SamplingParams(
            max_tokens=draw.randint(1, 16), priority=draw.choice(priorities), n=draw.choice([1, 1, 2])
        )
        found.append((step, prompt, params))
    return found


def run(engine, requests):
    """Runs requests that come before some steps; returns the steps of their first and last tokens, and all tokens."""
    step, first, last, waiting, deltas = 0, {}, {}, list(requests), []
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            engine.add_request(*waiting.pop(0)[1:])
        for delta in engine.step():
            first.setdefault(delta.request_id, step)
            last[delta.request_id] = step
            deltas.append(delta)
        step += 1
    return first, last, tokens_of(deltas)


@pytest.mark.parametrize(("limit", "num_blocks"), [(None, 13), (1, 40), (6, 13)])
def test_no_request_starves(limit, num_blocks):
    """A request waits for the work of those before it, however many come behind it, and decodes wait for no prompt."""
    for seed in range(2):
        config = dataclasses.replace(CONFIG, max_tokens_beside_decodes=limit, preemption="recompute")
        engine, plans = watched(config, num_blocks)
        requests = arrivals(seed, 24)
        first, last, _ = run(engine, requests)
        work = 0  # steps of all earlier requests, run one by one with one prompt token a step
        for request_id, (step, prompt, params) in enumerate(requests):
            assert first[request_id] <= step + work + len(prompt) + 2, f"request {request_id} of seed {seed}"
            work += len(prompt) + params.max_tokens + 2
            assert last[request_id] <= step + 2 * work, f"request {request_id} of seed {seed}"
        running = []
        for plan in plans:
            preempted = sum(map(len, plan.swap_out)) or engine.stats().num_recomputed
            planned = {chunk.sequence.arrival for chunk in plan.chunks}
            if not preempted:
                assert all(s.arrival in planned for s in running), "a running sequence gets no token"
            running = [s for s in plan.samples.sequences if len(s.tokens) < s.max_total and s.finish_reason is None]


@pytest.mark.parametrize("limit", [1, 5, 9])
def test_prompts_beside_decodes_are_bounded(limit):
    engine, plans = watched(dataclasses.replace(CONFIG, max_tokens_beside_decodes=limit), 60)
    requests = arrivals(3, 30)
    _, _, found = run(engine, requests)
    for request_id, (_, prompt, params) in enumerate(requests):
        for index in range(params.n):
            assert found[request_id, index] == expected_tokens(prompt, params, index, 49)
    alone, beside = [], []
    for plan in plans:
        num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
        rows = [chunk for chunk in plan.chunks if chunk.start >= chunk.sequence.num_prompt]
        last = [c for c in plan.chunks if c.num_tokens == 1 and c.start == c.sequence.num_prompt - 1]
        # The last token of a prompt, alone in its row, counts as a decode.
        (beside if rows else alone).append((num_tokens, len(rows) + len(last)))
    assert all(num_tokens <= max(limit, num_decodes + 1) for num_tokens, num_decodes in beside)
    assert max(num_tokens for num_tokens, _ in beside) == max(limit, CONFIG.max_num_seqs)
    assert max(num_tokens for num_tokens, _ in alone) == CONFIG.max_tokens_per_step


def test_urgent_requests_are_served_first():
    """A request with a lower number overtakes those that wait, and of equal numbers the earlier one comes first."""
    engine, _ = watched(dataclasses.replace(CONFIG, max_num_seqs=2, decode_rows=()), 40)
    order = [(5, 0), (0, 1), (5, 2), (-3, 3), (0, 4), (5, 5)]
    for priority, _ in order:
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=6, priority=priority))
    begun = []
    for delta in drain(engine):
        if delta.request_id not in begun:
            begun.append(delta.request_id)
    assert begun == [request_id for _, request_id in sorted(order)]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_least_urgent_is_preempted(preemption):
    """Of equally urgent requests the newest is preempted; each request gets the tokens that it gets alone."""
    config = dataclasses.replace(CONFIG, preemption=preemption, num_host_blocks=40)
    engine, _ = watched(config, 12)
    priorities, preempted = [1, 0, 1, 0], []
    scheduler = engine._scheduler
    preempt = scheduler._preempt

    def note(sequence, plan):
        assert sequence.place == max(other.place for other in scheduler.running)
        preempted.append(sequence.request_id)
        preempt(sequence, plan)

    scheduler._preempt = note
    prompts = [[(3 * i + k) % VOCAB for i in range(8)] for k in range(4)]
    params = [SamplingParams(max_tokens=20, priority=priority) for priority in priorities]
    found = engine.generate(prompts, params)
    assert preempted[:2] == [0, 3], "though request 3 came last"
    assert 1 not in preempted, "the first in line is never preempted"
    for prompt, each, (completion,) in zip(prompts, params, found, strict=True):
        assert completion.token_ids == expected_tokens(prompt, each, 0, 49)


@pytest.mark.parametrize("value", [0, -1])
def test_a_bound_that_is_not_positive_is_refused(value):
    with pytest.raises(ValueError, match="max_tokens_beside_decodes must be positive"):
        dataclasses.replace(CONFIG, max_tokens_beside_decodes=value)


def test_priorities_out_of_range_are_refused():
    with pytest.raises(ValueError, match="priority must be in"):
        SamplingParams(priority=2**31)
