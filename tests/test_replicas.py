"""Tests several engines that share requests: the same tokens as one engine gives, and no engine waits for another."""

import concurrent.futures
import dataclasses
import threading
from unittest import mock

import jax
import pytest

from paged_jax.engine import Delta, Engine, EngineFailed, ReplicaFailed, Replicas, SamplingParams, Stats
from paged_jax.engine.request import Seeds
from paged_jax.engine.sampling import Kind
from tests import engine_model as model
from tests.conftest import PATIENCE, QUICK_COMPILE
from tests.engine_checks import BLOCK_SIZE, CONFIG, NUM_BLOCKS, PROMPTS, Words, check_blocks, tokens_of

PARAMS = SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def the_engines(weights):
    """Engines on two devices."""
    engines = []
    for device in jax.devices("cpu")[:2]:
        with jax.default_device(device):
            caches = model.make_caches(NUM_BLOCKS, BLOCK_SIZE)
        on_device = jax.device_put((weights, caches), device)
        with model.drawing(Kind.GREEDY, Kind.RANDOM):
            engines.append(Engine(model.step, *on_device, CONFIG, tokenizer=Words(), compiler_options=QUICK_COMPILE))
    return engines


@pytest.fixture
def replicas(the_engines):
    for engine in the_engines:
        engine.reset(CONFIG)
    return Replicas(the_engines)


class MadeUpEngine:
    """Gives each request one token a step and as many as it wants, once `may_step` lets it."""

    def __init__(self):
        self.may_step, self.is_stepping, self.max_num_seqs = threading.Semaphore(0), threading.Event(), 4
        self.error, self.reset_error = None, None
        self.reset()

    def reset(self, config=None):
        assert not self.is_stepping.is_set()
        if self.reset_error:
            raise self.reset_error
        self.requests, self.num_added = {}, 0

    def check_config(self, config):
        pass

    def stats(self):
        assert not self.is_stepping.is_set()
        assert not self.reset_error, "an engine that has failed has no statistics"
        zeros = dict.fromkeys((field.name for field in dataclasses.fields(Stats)), 0)
        return Stats(**zeros | {"num_running": len(self.requests), "pools": ()})

    def check(self, prompt, params):
        return 100

    def add_request(self, prompt, params):
        self.requests[self.num_added] = [params.max_tokens] * params.n
        self.num_added += 1

    def cancel(self, request_id):
        return self.requests.pop(request_id, None) is not None

    @property
    def has_work(self):
        return bool(self.requests)

    def step(self):
        self.is_stepping.set()
        assert self.may_step.acquire(timeout=PATIENCE), "the test never lets this engine run its step"
        self.is_stepping.clear()
        if self.error:
            raise self.error
        deltas = []
        for request_id, left in list(self.requests.items()):
            left[:] = [tokens - 1 for tokens in left]
            ends = "length" if left[0] == 0 else None
            deltas += [Delta(request_id, i, (7,), finish_reason=ends) for i in range(len(left))]
            if ends:
                del self.requests[request_id]
        return deltas


def made_up(count=2):
    engines = [MadeUpEngine() for _ in range(count)]
    return Replicas(engines), engines


def finish(replicas):
    """Runs steps until no request is unfinished, and returns the deltas."""
    deltas = []
    while replicas.has_work:
        deltas += replicas.step()
    return deltas


@pytest.mark.slow_on_cpu
def test_tokens_are_those_of_one_model(replicas, the_engines, reference):
    """Tests greedy and drawn tokens; replicas and one engine with the same seed give requests the same seeds."""
    greedy = replicas.generate(PROMPTS, PARAMS)
    assert [one.token_ids for (one,) in greedy] == [reference.greedy(prompt, 6) for prompt in PROMPTS]
    assert all(engine.stats().num_output_tokens > 0 for engine in the_engines), "both engines took part"

    drawn = dataclasses.replace(PARAMS, temperature=1.0, n=2)
    several = Replicas(the_engines, seed=7).generate(PROMPTS, drawn)
    the_engines[0]._seeds = Seeds(7)
    the_engines[0].reset()
    assert the_engines[0].generate(PROMPTS, drawn) == several


def test_blocks_and_counts_of_all_engines(replicas, the_engines):
    replicas.generate(PROMPTS, PARAMS)
    stats = replicas.stats()
    assert stats.num_output_tokens == 6 * len(PROMPTS)
    assert (stats.num_running, stats.num_waiting, stats.held_blocks) == (0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == 2 * NUM_BLOCKS
    parts = [engine.stats() for engine in the_engines]
    hits = [round(part.hit_rate * part.num_looked_up_tokens) for part in parts]
    assert min(part.num_looked_up_tokens for part in parts) > 0
    assert stats.hit_rate == pytest.approx(sum(hits) / sum(part.num_looked_up_tokens for part in parts))
    for engine in the_engines:
        check_blocks(engine)


def test_cancelling_frees_blocks_and_ends_deltas(replicas, the_engines, reference):
    long = SamplingParams(max_tokens=30)
    ids = [replicas.add_request(prompt, long if i < 2 else PARAMS) for i, prompt in enumerate(PROMPTS[:4])]
    assert replicas.cancel(ids[1])  # before any engine has seen it
    deltas = replicas.step() + replicas.step()
    assert replicas.cancel(ids[0])
    assert not replicas.cancel(ids[0])
    while replicas.has_work:
        deltas += (later := replicas.step())
        assert not {delta.request_id for delta in later} & {ids[0], ids[1]}
    found = tokens_of(deltas)
    assert [found[i, 0] for i in ids[2:]] == [reference.greedy(prompt, 6) for prompt in PROMPTS[2:4]]
    assert replicas.stats().held_blocks == 0
    assert not any(replica.request_ids for replica in replicas._replicas), "nothing is kept of what is over"
    for engine in the_engines:
        check_blocks(engine)


def test_an_engine_never_waits_for_the_step_of_another():
    replicas, (slow, quick) = made_up()
    ids = [replicas.add_request([1], SamplingParams(max_tokens=3)) for _ in range(2)]
    for _ in range(3):
        quick.may_step.release()
    found = [delta for _ in range(3) for delta in replicas.step()]  # waits forever if the slow engine's step must end
    assert [delta.request_id for delta in found] == [ids[1]] * 3
    assert replicas.is_unfinished(ids[0])
    for _ in range(3):
        slow.may_step.release()
    finish(replicas)


def test_a_request_goes_where_the_fewest_samples_are():
    replicas, engines = made_up(3)
    replicas.add_request([1], SamplingParams(max_tokens=1, n=3))
    replicas.add_request([1], SamplingParams(max_tokens=2, n=2))
    cancelled = replicas.add_request([1], SamplingParams(max_tokens=2, n=2))
    replicas.cancel(cancelled)
    for _ in range(2):
        replicas.add_request([1], SamplingParams(max_tokens=2))
    for engine in engines:
        for _ in range(3):
            engine.may_step.release()
    done = finish(replicas)
    assert [engine.num_added for engine in engines] == [1, 1, 3]
    assert len(done) == 3 * 1 + 2 * 2 + 2 * 2
    replicas.add_request([1], SamplingParams(max_tokens=1))
    engines[0].may_step.release()
    replicas.step()
    assert engines[0].num_added == 2, "finished samples count no more"


def test_each_sample_of_a_request_counts():
    replicas, engines = made_up()
    for n in (3, 1, 1, 1):
        replicas.add_request([1], SamplingParams(max_tokens=1, n=n))
    for engine in engines:
        engine.may_step.release()
    finish(replicas)
    assert [engine.num_added for engine in engines] == [1, 3]


@pytest.mark.parametrize("place", [0, 1])
def test_a_request_must_fit_into_every_engine(place):
    replicas, engines = made_up()
    engines[place].check = lambda prompt, params: 7
    assert replicas.check([1], PARAMS) == 7


def test_a_reset_waits_for_the_step_that_runs(monkeypatch):
    replicas, (slow, quick) = made_up()
    for _ in range(2):
        replicas.add_request([1], SamplingParams(max_tokens=2))
    quick.may_step.release()
    replicas.step()
    wait = concurrent.futures.wait

    def let_it_end(running, *timeout):
        assert not wait(running, 0).done
        slow.may_step.release()
        return wait(running, *timeout)

    monkeypatch.setattr("concurrent.futures.wait", let_it_end)
    replicas.reset()  # the made-up engine asserts that none of its steps runs
    assert not replicas.has_work
    assert not slow.has_work


def test_after_a_failure_a_reset_makes_it_usable(replicas, the_engines, reference, monkeypatch):
    def fail(plan):
        raise RuntimeError("out of luck")

    for prompt in PROMPTS[:4]:
        replicas.add_request(prompt, PARAMS)
    replicas.step()
    with monkeypatch.context() as patch:
        patch.setattr(the_engines[1]._runner, "launch", fail)
        with pytest.raises(ReplicaFailed, match="replica 1 has failed, RuntimeError: out of luck"):
            finish(replicas)
    replicas.reset()
    assert not replicas.has_work
    assert [one.token_ids for (one,) in replicas.generate(PROMPTS, PARAMS)] == [
        reference.greedy(prompt, 6) for prompt in PROMPTS
    ]


def test_what_fails_in_one_engine_is_lost_there_alone():
    replicas, engines = made_up()
    ids = [replicas.add_request([1], SamplingParams(max_tokens=3)) for _ in range(4)]
    for engine in engines:
        engine.may_step.release(9)
    engines[1].error = RuntimeError("out of luck")
    deltas: list[Delta] = []

    def run():
        while True:
            deltas.extend(replicas.step())

    with pytest.raises(ReplicaFailed, match="replica 1 has failed, RuntimeError: out of luck") as raised:
        run()
    assert raised.value.request_ids == (ids[1], ids[3])
    assert [replicas.is_unfinished(request_id) for request_id in raised.value.request_ids] == [False, False]
    engines[1].error = None
    more = replicas.add_request([1], SamplingParams(max_tokens=3))
    deltas += finish(replicas)
    assert {key: len(tokens) for key, tokens in tokens_of(deltas).items()} == {
        (i, 0): 3 for i in (ids[0], ids[2], more)
    }
    assert engines[1].num_added == 1, "it was reset and gets requests again"


def test_engines_that_cannot_be_reset_get_no_more_requests():
    replicas, engines = made_up()
    for engine in engines:
        engine.may_step.release(9)
    for broken in engines:
        broken.error, broken.reset_error = RuntimeError("out of luck"), RuntimeError("no memory")
        replicas.add_request([1], SamplingParams(max_tokens=2))
        replicas.add_request([1], SamplingParams(max_tokens=2))
        with pytest.raises(ReplicaFailed, match="so has its reset: it gets no more requests") as raised:
            finish(replicas)
        assert len(raised.value.request_ids) == (1 if broken is engines[0] else 2)
        assert replicas.has_failed == (broken is engines[1])
        if not replicas.has_failed:
            replicas.stats()
            finish(replicas)
    with pytest.raises(EngineFailed, match=r"needs a reset\(\)"):
        replicas.add_request([1])
    with pytest.raises(RuntimeError, match="no memory"):
        replicas.reset()
    for engine in engines:
        engine.error = engine.reset_error = None
    replicas.reset()
    replicas.add_request([1], SamplingParams(max_tokens=2))
    assert len(finish(replicas)) == 2


def test_statistics_do_not_wait_for_a_step():
    replicas, (slow, quick) = made_up()
    for _ in range(3):
        replicas.add_request([1], SamplingParams(max_tokens=3))
    quick.may_step.release()
    replicas.step()
    assert slow.is_stepping.wait(PATIENCE)
    assert replicas.stats().num_running == 1, "the slow engine has not finished a step yet"
    slow.may_step.release(9)
    quick.may_step.release(9)
    finish(replicas)
    assert replicas.stats().num_running == 0


def test_a_step_that_never_ends_keeps_no_reset_waiting():
    engines = [MadeUpEngine() for _ in range(2)]
    replicas = Replicas(engines, step_timeout_seconds=0.05)
    for _ in range(2):
        replicas.add_request([1], SamplingParams(max_tokens=3))
    engines[1].may_step.release()
    replicas.step()
    with pytest.raises(TimeoutError, match=r"has not ended for 0\.05 s"):
        replicas.reset()
    with pytest.raises(EngineFailed, match="TimeoutError"):
        replicas.step()
    engines[0].may_step.release()
    replicas._step_timeout_seconds = PATIENCE
    replicas.reset()
    assert not replicas.has_work


def test_ctrl_c_while_steps_run_loses_no_token(monkeypatch):
    replicas, engines = made_up()
    ids = [replicas.add_request([1], SamplingParams(max_tokens=2)) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.wait", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            replicas.step()
    for engine in engines:
        engine.may_step.release(2)
    assert {key: len(tokens) for key, tokens in tokens_of(finish(replicas)).items()} == {(i, 0): 2 for i in ids}


def test_a_prompt_may_change_after_it_was_added(replicas, reference):
    prompt = list(PROMPTS[3])
    request_id = replicas.add_request(prompt, PARAMS)
    prompt[:] = [0] * len(prompt)
    deltas = finish(replicas)
    assert tokens_of(deltas)[request_id, 0] == reference.greedy(PROMPTS[3], 6)


def test_what_is_refused(replicas):
    with pytest.raises(ValueError, match="at least one engine"):
        Replicas([])
    with pytest.raises(ValueError, match="at least one token"):
        replicas.add_request([])
    assert not replicas.has_work
    assert replicas.step() == []
