"""Tests the leader's and the followers' engines in threads of one process, over simulated pools.

Every engine has a pool of its own here, so that each test can compare what the leader and its followers draw.
"""

import contextlib
import dataclasses
import logging
import select
import socket
import threading
from unittest import mock

import pytest

from paged_jax.engine import Engine, EngineConfig, EngineFailed, LeadingEngine, SamplingParams, follow
from tests.conftest import PATIENCE
from tests.engine_checks import drain, tokens_of
from tests.engine_simulation import make_engine
from tests.simulated_tokens import Rules, expected_tokens
from tests.test_engine_failures import PROMPTS, fail_at
from tests.test_processes import free_ports

CONFIG = EngineConfig(max_model_len=32, max_num_seqs=4, max_tokens_per_step=8, num_host_blocks=8)
PARAMS = SamplingParams(max_tokens=6, temperature=1.0, n=2)


class Group:
    """A leader and two followers; each follower runs `follow` in a thread.

    Attributes:
      leader: the leader's engine.
      followers: the followers' engines.
      drawn: the deltas of each follower.
      salt: the weights that the followers are given at the leader's next update.
    """

    def __init__(self, can_update=True):
        getters = [lambda: {"salt": self.salt}] * 2 if can_update else [lambda: {"salt": self.salt}, None]
        self.leader = make_engine(9, 4, CONFIG, LeadingEngine)
        self.followers = [make_engine(9, 4, CONFIG) for _ in range(2)]
        self.drawn = [[] for _ in self.followers]
        address = "localhost", free_ports()
        self.salt = 0
        self.threads = [
            threading.Thread(target=self.follow, args=(engine, address, get_weights), daemon=True)
            for engine, get_weights in zip(self.followers, getters, strict=True)
        ]
        for engine, drawn in zip(self.followers, self.drawn, strict=True):
            engine._step = lambda engine=engine, drawn=drawn: drawn.extend(news := Engine._step(engine)) or news
        for thread in self.threads:
            thread.start()
        self.leader.wait_for_followers(address, len(self.followers), PATIENCE)

    @staticmethod
    def follow(engine, address, get_weights):
        """Runs a follower, which may end when its leader ends."""
        with contextlib.suppress(ConnectionError):
            follow(engine, address, PATIENCE, get_weights=get_weights)

    def close(self):
        """Ends the followers and waits for them."""
        self.leader.close()
        for thread in self.threads:
            thread.join(timeout=PATIENCE)
        assert not any(thread.is_alive() for thread in self.threads)


@pytest.fixture
def make_group():
    """Makes a `Group`, which is closed when the test ends."""
    with contextlib.ExitStack() as groups:
        yield lambda **options: groups.enter_context(contextlib.closing(Group(**options)))


@pytest.fixture
def group(make_group):
    return make_group()


def check_alike(group):
    """Runs requests, and checks that all engines drew the same tokens, which are right."""
    for drawn in group.drawn:
        drawn.clear()
    ids = [group.leader.add_request(prompt, dataclasses.replace(PARAMS, seed=5)) for prompt in PROMPTS]
    deltas = drain(group.leader)
    group.close()
    assert group.drawn == [deltas, deltas]
    found = {}
    for delta in deltas:
        found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        for index in range(2):
            assert tuple(found[request_id, index]) == expected_tokens(prompt, PARAMS, index, 33, seed=5)


def test_all_processes_draw_alike(group):
    check_alike(group)


def test_requests_without_a_seed_draw_alike(group):
    ids = [group.leader.add_request(prompt, PARAMS) for prompt in PROMPTS]
    deltas = drain(group.leader)
    group.close()
    assert {delta.request_id for delta in deltas} == set(ids)
    assert group.drawn == [deltas, deltas]


def test_masks_of_the_leader_hold_in_all_processes(group):
    """Some masks end or fail, and some requests have none; the followers never see the masks."""
    masks = [Rules(), Rules(end=3), Rules(end=0), Rules(fails_at=2), Rules(fails_at=0), None]
    params = [dataclasses.replace(PARAMS, seed=5, mask=mask, frequency_penalty=0.5) for mask in masks]
    ids = [group.leader.add_request(PROMPTS[i % len(PROMPTS)], each) for i, each in enumerate(params)]
    deltas = drain(group.leader)
    group.close()
    assert group.drawn == [deltas, deltas]
    found = tokens_of(deltas)
    for i, (request_id, each) in enumerate(zip(ids, params, strict=True)):
        for index in range(2):
            wanted = expected_tokens(PROMPTS[i % len(PROMPTS)], each, index, 33)
            assert found.get((request_id, index), ()) == wanted
    assert {delta.finish_reason for delta in deltas} == {None, "stop", "length", "error"}


def test_a_leader_that_fails_before_it_tells_a_mask_can_be_reset(group):
    """The followers wait for the mask's result, and get the reset instead."""
    group.leader.add_request(PROMPTS[0], dataclasses.replace(PARAMS, seed=5, mask=Rules()))
    group.leader.step()
    fail_at(group.leader, "read", 1, RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        group.leader.step()
    group.leader.reset()
    check_alike(group)


def test_followers_cancel_too(group):
    cancelled = group.leader.add_request(PROMPTS[0], SamplingParams(max_tokens=20))
    group.leader.step(), group.leader.step()
    group.leader.cancel(cancelled)
    drain(group.leader)
    check_alike(group)
    assert not any(engine.has_work for engine in group.followers)


def test_followers_are_not_told_of_what_is_refused(group):
    with pytest.raises(ValueError, match="at least one token"):
        group.leader.add_request([])
    with pytest.raises(ValueError, match="reset cannot change what is compiled"):
        group.leader.reset(dataclasses.replace(CONFIG, max_model_len=16))
    with pytest.raises(ValueError, match="while followers are connected"):
        group.leader.measure_steps(8)
    check_alike(group)
    assert {engine._next_id for engine in group.followers} == {len(PROMPTS)}


def test_followers_get_the_new_policies_of_a_reset(group):
    group.leader.reset(dataclasses.replace(CONFIG, prefix_caching=False, preemption="swap"))
    check_alike(group)
    assert {engine.config for engine in group.followers} == {group.leader.config}
    assert group.leader.config.preemption == "swap"


@pytest.mark.parametrize("running", ["continue", "restart"])
def test_followers_take_other_weights_when_their_leader_does(group, running):
    request_id = group.leader.add_request(PROMPTS[0], SamplingParams(max_tokens=9))
    deltas = [delta for _ in range(4) for delta in group.leader.step()]
    group.salt = 3
    group.leader.update_weights({"salt": 3}, running=running)
    deltas += drain(group.leader)
    group.close()
    assert group.drawn == [deltas, deltas]
    num_old = 3 if running == "continue" else 0
    wanted = expected_tokens(PROMPTS[0], SamplingParams(max_tokens=9), 0, 33, salts={0: 0, num_old: 3}.items())
    assert tokens_of(deltas) == {(request_id, 0): wanted}


def test_a_follower_that_takes_no_other_weights_is_noticed(make_group, caplog):
    """All processes must stop then, because their weights differ."""
    group = make_group(can_update=False)
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(RuntimeError, match=r"follower . has not taken .*: .* follow\(\) was given no get_weights"):
        group.leader.update_weights({"salt": 3})
    with pytest.raises(EngineFailed):
        group.leader.step()
    with pytest.raises(ConnectionError, match="restart all processes"):
        group.leader.reset()


def test_an_idle_leader_loses_no_follower(make_group, monkeypatch):
    """A follower waits for its leader's next call for ever."""
    connections, connect = [], socket.create_connection

    def create_connection(*arguments, **options):
        connections.append(connection := connect(*arguments, **options))
        return connection

    monkeypatch.setattr("paged_jax.engine.processes.socket.create_connection", create_connection)
    group = make_group()
    group.leader.reset()  # the followers have answered, and wait for the next call
    assert [connection.gettimeout() for connection in connections] == [None, None]
    check_alike(group)


@pytest.mark.parametrize("name", ["model", "read"])
def test_followers_survive_what_their_leader_survives(group, name, caplog):
    """All of them fail in one step, as they do where memory runs out."""
    for engine in (group.leader, *group.followers):
        fail_at(engine, name, 3, RuntimeError("out of memory"))
    for prompt in PROMPTS:
        group.leader.add_request(prompt, PARAMS)
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(RuntimeError, match="out of memory"):
        drain(group.leader)
    with pytest.raises(EngineFailed, match="out of memory"):
        group.leader.step()
    group.leader.reset()
    check_alike(group)


@pytest.mark.parametrize("which", [0, 1])
def test_the_leader_is_told_of_a_follower_s_failure(group, which, caplog):
    caplog.set_level(logging.CRITICAL)
    fail_at(group.followers[which], "read", 1, RuntimeError("out of luck"))
    group.leader.add_request(PROMPTS[0], PARAMS)
    group.leader.step(), group.leader.step()
    assert select.select([follower._connection for follower in group.leader._followers], [], [], PATIENCE)[0], (
        "no report"
    )
    with pytest.raises(RuntimeError, match=r"follower . has failed: step raised RuntimeError: out of luck"):
        drain(group.leader)
    group.leader.reset()
    check_alike(group)


def test_programs_that_no_longer_meet_are_noticed(group, caplog):
    """A leader whose program did not start, while the followers' did, would wait for them for ever."""
    fail_at(group.leader, "model", 2, RuntimeError("out of memory"))
    group.leader.add_request(PROMPTS[0], PARAMS)
    with pytest.raises(RuntimeError, match="out of memory"):
        drain(group.leader)
    with pytest.raises(RuntimeError, match=r"follower 0 has started \d+ programs and its leader \d+"):
        group.leader.reset()
    with pytest.raises(ConnectionError, match="restart all processes"):
        group.leader.reset()
    with pytest.raises(EngineFailed):
        group.leader.step()


def test_ctrl_c_while_the_leader_sends_ends_the_group(group):
    """A follower that got a part of a line cannot read another one."""
    group.leader.add_request(PROMPTS[0], PARAMS)
    with (
        mock.patch.object(group.leader._followers[1], "send", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        group.leader.step()
    with pytest.raises(ConnectionError, match="restart all processes"):
        group.leader.reset()


def test_a_reset_waits_for_its_own_reports(group, caplog):
    """The reports of a reset that failed come first."""
    caplog.set_level(logging.CRITICAL)
    with contextlib.ExitStack() as failing:
        for engine in (group.leader, group.followers[0]):
            failing.enter_context(mock.patch.object(engine._runner, "reset", side_effect=RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            group.leader.reset()
        assert select.select([group.leader._followers[0]._connection], [], [], PATIENCE)[0], "no report"
    group.leader.reset()
    check_alike(group)


def test_a_follower_that_is_gone_is_noticed(group):
    group.leader.add_request(PROMPTS[0], PARAMS)
    group.leader.step()
    group.leader._followers[1]._connection.shutdown(2)
    with pytest.raises(ConnectionError, match=r"follower 1 is lost, restart all processes"):
        drain(group.leader)
    with pytest.raises(ConnectionError, match="restart all processes"):
        group.leader.reset()
