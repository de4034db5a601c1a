"""Tests what an engine does after a call that raised: it refuses its calls until a reset, and forgets the step."""

import dataclasses
from unittest import mock

import pytest

from paged_jax.engine import EngineConfig, EngineFailed, SamplingParams
from tests.engine_checks import drain, tokens_of
from tests.engine_simulation import make_engine
from tests.simulated_tokens import VOCAB, expected_tokens

CONFIG = EngineConfig(max_model_len=32, max_num_seqs=4, max_tokens_per_step=8, num_host_blocks=8)
PARAMS = SamplingParams(max_tokens=6)
PROMPTS = [[(i * i + j) % VOCAB for j in range(9 + i)] for i in range(4)]
EXPECTED = [expected_tokens(prompt, PARAMS, 0, 33) for prompt in PROMPTS]
ERRORS = [RuntimeError("out of memory"), KeyboardInterrupt()]


@pytest.fixture
def engine():
    return make_engine(16, 4, CONFIG)


def fail_at(engine, name, count, error):
    """Makes the engine's device raise, once, when the program `name` runs for the `count`-th time."""
    left = [count]

    def interrupt(what):
        left[0] -= what == name
        if what == name and left[0] == 0:
            raise error

    engine._runner.interrupt = interrupt


def check_refuses(engine):
    calls = {
        "add_request": lambda: engine.add_request([1]),
        "step": engine.step,
        "cancel": lambda: engine.cancel(0),
        "stats": engine.stats,
        "generate": lambda: engine.generate([[1]]),
        "stream": lambda: next(iter(engine.stream([1]))),
    }
    assert engine.has_failed
    for call in calls.values():
        with pytest.raises(EngineFailed, match=r"the engine has failed and needs a reset\(\)"):
            call()


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("name", ["model", "draw", "read"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_after_a_step_that_raised_calls_are_refused_until_a_reset(engine, name, count, error):
    fail_at(engine, name, count, error)
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    with pytest.raises(type(error)):
        drain(engine)
    check_refuses(engine)
    engine.reset()
    assert not engine.has_work
    assert engine._blocks.counts() == (16, 0, 0), "nothing of the failed step is in the prefix cache"
    assert [samples[0].token_ids for samples in engine.generate(PROMPTS, PARAMS)] == EXPECTED


@pytest.mark.parametrize("name", ["copy", "swap_out", "swap_in"])
def test_a_move_of_blocks_that_raised(name):
    engine = make_engine(9, 4, dataclasses.replace(CONFIG, preemption="swap"))
    fail_at(engine, name, 1, RuntimeError("out of memory"))
    params = dataclasses.replace(PARAMS, n=2, max_tokens=9)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate(PROMPTS, params)
    check_refuses(engine)
    engine.reset()
    results = engine.generate(PROMPTS, params)
    assert [[one.token_ids for one in samples] for samples in results] == [
        [expected_tokens(prompt, params, 0, 33)] * 2 for prompt in PROMPTS
    ]


def test_the_reason_is_told(engine):
    fail_at(engine, "model", 1, RuntimeError("out of memory"))
    engine.add_request(PROMPTS[0], PARAMS)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    with pytest.raises(EngineFailed, match="step raised RuntimeError: out of memory"):
        engine.step()


def test_ctrl_c_between_two_steps_of_generate_leaves_no_request_behind(engine):
    others = engine.add_request(PROMPTS[0], PARAMS)
    step, calls = engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    with mock.patch.object(engine, "step", interrupted), pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[1:], PARAMS)
    assert not engine.has_failed
    assert list(engine._requests) == [others]
    drain(engine)


def test_a_generate_that_is_refused_leaves_no_request_behind(engine):
    with pytest.raises(ValueError, match="tokens; at most 32 fit"):
        engine.generate([PROMPTS[0], [1] * 60], PARAMS)
    assert not engine.has_work
    assert not engine.has_failed
    assert engine.add_request(PROMPTS[0], PARAMS) == 0, "none of them was added"


@pytest.mark.parametrize("refused", [{"prompt": []}, {"prompt": [1], "params": SamplingParams(n=5)}])
def test_a_refused_request_is_no_failure(engine, refused):
    with pytest.raises(ValueError, match=r"at least one token|n must be at most"):
        engine.add_request(**refused)
    with pytest.raises(ValueError, match="make a new Engine"):
        engine.reset(dataclasses.replace(CONFIG, max_model_len=16))
    assert not engine.has_failed


def test_a_failed_stream_raises_its_own_error(engine):
    fail_at(engine, "read", 1, OSError("lost"))
    with pytest.raises(OSError, match="lost"):
        list(engine.stream(PROMPTS[0], PARAMS))
    check_refuses(engine)


def test_a_reset_that_raises_leaves_the_engine_failed_and_can_be_tried_again(engine):
    request_id = engine.add_request(PROMPTS[0], PARAMS)
    engine.step()

    failing = mock.patch.object(engine._runner, "reset", side_effect=RuntimeError("no memory for zeros"))
    with failing, pytest.raises(RuntimeError, match="no memory for zeros"):
        engine.reset()
    check_refuses(engine)
    engine.reset()
    assert not engine.is_unfinished(request_id)
    assert [samples[0].token_ids for samples in engine.generate(PROMPTS, PARAMS)] == EXPECTED


@pytest.mark.parametrize("call", ["add_request", "cancel"])
def test_ctrl_c_inside_add_request_and_cancel(engine, call):
    request_id = engine.add_request(PROMPTS[0], PARAMS)
    method, argument = {"add_request": ("add", [1]), "cancel": ("finish", request_id)}[call]
    interrupted = mock.patch.object(engine._scheduler, method, side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        getattr(engine, call)(argument)
    check_refuses(engine)
    engine.reset()
    request_id = engine.add_request(PROMPTS[0], PARAMS)
    assert tokens_of(drain(engine)) == {(request_id, 0): EXPECTED[0]}
