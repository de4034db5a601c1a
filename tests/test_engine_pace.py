"""Tests on made-up clocks that a bound on the time between two tokens holds for 99 of 100 of them."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from paged_jax.engine import EngineConfig, LeadingEngine, SamplingParams
from paged_jax.engine.pace import Pace
from paged_jax.engine.plan import Plan, Rows
from tests.engine_simulation import make_engine
from tests.simulated_tokens import VOCAB

CONFIG = EngineConfig(
    max_model_len=48, max_num_seqs=4, max_tokens_per_step=16, mixed_tokens=(4, 8, 16), between_tokens_seconds=0.010
)


class Clock:
    """The time, in seconds."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("paged_jax.engine.pace.time.perf_counter", clock)
    return clock


def rows(num_tokens, are_drawn):
    """The plan of a step of this many tokens, one of them of a sequence that decodes."""
    plan = Plan.empty(1)
    plan.rows = Rows(counts=np.array([num_tokens - 1, 1]), are_drawn=np.array([False, are_drawn]))
    plan.is_decode = num_tokens <= 2
    return plan


def follow(pace, clock, seconds_of, num_steps, draw, share=0.7):
    """Runs steps; a share of them computes prompts. A step is planned before the previous step's tokens come.

    Returns:
      The size of each step, 0 without prompts, and how long it took.
    """
    sizes, times, launched = [], [], None
    for _ in range(num_steps):
        before, launched = launched, pace.most_tokens if draw.random() < share else 0
        if before is not None:
            times.append(seconds_of(before))
            clock.now += times[-1]
            pace.read(rows(before or 1, are_drawn=True))
            sizes.append(before)
    return np.array(sizes), np.array(times)


@pytest.mark.parametrize("first", [None, 4, 16])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.8])
def test_one_step_in_a_hundred_is_slow_and_the_others_are_as_large_as_they_may_be(clock, first, factor):
    """Steps take 1 ms and one more for each token of their size; one in 500 takes long for no reason."""
    draw = random.Random(0)
    pace = Pace(dataclasses.replace(CONFIG, max_tokens_beside_decodes=first))
    assert pace.most_tokens == (first or 16)

    def seconds_of(size):
        return 0.05 if draw.random() < 0.002 else factor * 0.001 * (1 + size)

    sizes, times = follow(pace, clock, seconds_of, 20_000, draw)
    assert (times > 0.010).mean() < 0.01
    best = {0.5: 16, 1.0: 8, 1.8: 4}[factor]
    assert (sizes[sizes > 0] >= best).mean() > 0.9


def test_the_pace_follows_the_machine(clock):
    """Nothing is learnt for good: the machine becomes slower, and then as fast as it was."""
    draw, pace = random.Random(1), Pace(CONFIG)
    for factor, best in ((1.0, 8), (1.8, 4), (1.0, 8), (0.5, 16)):
        sizes, times = follow(pace, clock, lambda size, factor=factor: factor * 0.001 * (1 + size), 3000, draw)
        used = sizes[1000:][sizes[1000:] > 0]
        assert (used >= best).mean() > 0.9
        assert (times > 0.010).mean() < 0.015


def test_first_tokens_are_no_times_between_tokens(clock):
    """A step that only computes prompts holds nobody up, however long it takes."""
    pace = Pace(CONFIG)
    for _ in range(50):
        clock.now += 1.0
        pace.read(rows(16, are_drawn=False))
    assert pace.most_tokens == 16
    for _ in range(2):
        assert pace.most_tokens == 16, "a single slow step may be chance"
        clock.now += 1.0
        pace.read(rows(16, are_drawn=True))
    assert pace.most_tokens == 8


def between_tokens(config, clock, num_steps=400):
    """Runs an engine in which prompts come all the time; returns the times between two tokens of a sample."""
    draw = random.Random(2)
    engine = make_engine(60, 4, config)
    read, last, gaps = engine._runner.read, {}, []

    def wait(launched):
        shape, _ = engine._runner._choose(launched.plan)
        clock.now += 0.002 if shape.is_decode else 0.001 * (1 + shape.num_tokens)
        return read(launched)

    engine._runner.read = wait
    for _ in range(num_steps):
        if draw.random() < 0.12:
            prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(10, 24))]
            engine.add_request(prompt, SamplingParams(max_tokens=draw.randint(8, 20)))
        for key in {(delta.request_id, delta.index) for delta in engine.step()}:
            gaps.append(clock.now - last.get(key, clock.now))
            last[key] = clock.now
    return np.array(gaps)


def test_an_engine_holds_its_bound(clock):
    free = between_tokens(dataclasses.replace(CONFIG, between_tokens_seconds=None), clock)
    held = between_tokens(CONFIG, clock)
    assert np.percentile(free, 95) > 0.010
    assert np.percentile(held[len(held) // 4 :], 99) <= 0.010 + 1e-9


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_bound_that_is_not_positive_is_refused(value):
    with pytest.raises(ValueError, match="between_tokens_seconds must be positive"):
        dataclasses.replace(CONFIG, between_tokens_seconds=value)


def test_followers_cannot_hold_a_bound():
    """They would measure other times, and make other plans."""
    engine: Any = make_engine(60, 4, dataclasses.replace(CONFIG, between_tokens_seconds=None), kind=LeadingEngine)
    engine.reset(CONFIG)
    with pytest.raises(ValueError, match="between_tokens_seconds needs an engine without followers"):
        engine.wait_for_followers(("localhost", 0), 1, timeout_seconds=0.1)
