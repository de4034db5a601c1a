"""Tests edges of the engine's parts that run no program: replicas, streams, drafts, pace, counts, compiling."""

import contextlib
import dataclasses
import inspect
import socket
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from paged_jax.engine import (
    EngineConfig,
    LeadingEngine,
    PromptLookup,
    ReplicaFailed,
    Replicas,
    SamplingParams,
    TextStream,
    compiling,
    follow,
    processes,
)
from paged_jax.engine.adjust import Adjustments
from paged_jax.engine.blocks import BlockManager
from paged_jax.engine.pace import Pace
from paged_jax.engine.plan import Plan, Rows
from paged_jax.engine.pools import Pools
from paged_jax.engine.sampling import Kind, draw
from paged_jax.engine.sequence import Sequence
from paged_jax.engine.speculation import Speculator
from tests.conftest import PATIENCE
from tests.engine_simulation import make_engine
from tests.simulated_tokens import VOCAB, expected_tokens
from tests.test_engine_parts import draws

CONFIG = EngineConfig(max_model_len=64, max_num_seqs=4, max_tokens_per_step=8)
PARAMS = SamplingParams(max_tokens=6, temperature=1.0)


def replicas_of(count=2, **options):
    return Replicas([make_engine(64, 4, CONFIG) for _ in range(count)], **options)


def generated(engine, params=PARAMS):
    return [completion.token_ids for (completion,) in engine.generate([[1, 2, 3]] * 5, params)]


def test_replicas_give_seeds_as_an_engine_does():
    """Requests without a seed get fresh seeds after each reset, or seeds that follow from the seed of all."""
    fresh = replicas_of()
    first = generated(fresh)
    fresh.reset()
    assert first != generated(fresh)
    same, one = replicas_of(seed=7), make_engine(64, 4, CONFIG, seed=7)
    expected = generated(one)
    assert generated(same) == expected
    same.reset()
    assert generated(same) == expected
    assert same.add_request([1]) == 5, "ids count on"
    same.reset()
    assert same.add_request([1]) == 0


def test_replicas_have_room_for_what_all_engines_have():
    replicas = replicas_of(3)
    assert replicas.max_num_seqs == 12
    stats = replicas.stats()
    assert (stats.free_blocks, stats.pools[0].free_blocks, stats.num_compiled) == (192, 192, 3 * 11)


def test_a_config_that_is_refused_leaves_requests_alone():
    """It is refused before any engine is reset."""
    replicas = replicas_of(seed=1)
    expected = generated(replicas_of(seed=1))
    ids = [replicas.add_request([1, 2, 3], PARAMS) for _ in range(5)]
    found = {request_id: [] for request_id in ids}
    with pytest.raises(ValueError, match="reset cannot change what is compiled"):
        replicas.reset(dataclasses.replace(CONFIG, max_model_len=63))
    assert not replicas.has_failed
    while replicas.has_work:
        for delta in replicas.step():
            found[delta.request_id] += delta.token_ids
    assert [tuple(found[request_id]) for request_id in ids] == expected


def test_an_engine_that_is_lost_is_counted_as_it_was():
    """Its blocks are still there; the error that a step raised is the cause of what is told."""
    replicas = replicas_of()
    lost = replicas._replicas[1].engine
    error = ValueError("broken")

    def fail(name):
        raise error

    ids = [replicas.add_request([1, 2, 3], PARAMS) for _ in range(2)]
    lost._runner.interrupt, lost._runner.reset = fail, lambda: fail("reset")

    def run():
        while replicas.has_work:
            replicas.step()

    with pytest.raises(ReplicaFailed, match="replica 1 has failed, ValueError: broken, and so has its reset") as raised:
        run()
    assert (raised.value.__cause__, raised.value.request_ids) == (error, (ids[1],))
    stats = replicas.stats()
    assert stats.free_blocks + stats.cached_blocks + stats.held_blocks == 128


@pytest.mark.parametrize("kind", ["engine", "replicas"])
def test_a_stream_gives_its_own_tokens_alone(kind):
    engine = replicas_of() if kind == "replicas" else make_engine(64, 4, CONFIG)
    other, params = engine.add_request([3, 4], SamplingParams(max_tokens=9)), SamplingParams(max_tokens=6)
    deltas = list(engine.stream([1, 2], params))
    assert {delta.request_id for delta in deltas} == {other + 1}
    assert tuple(token for delta in deltas for token in delta.token_ids) == expected_tokens([1, 2], params, 0, 65)


def test_how_long_is_waited_by_default():
    def defaults(function):
        return {
            name: p.default for name, p in inspect.signature(function).parameters.items() if p.default is not p.empty
        }

    assert defaults(LeadingEngine.wait_for_followers) == {"timeout_seconds": 600}
    assert defaults(follow) == {"timeout_seconds": 600, "get_weights": None}
    assert defaults(Replicas) == {"seed": None, "step_timeout_seconds": 60}
    assert defaults(LeadingEngine.measure_steps) == {"repeats": 8}
    assert defaults(PromptLookup) == {"longest": 3, "shortest": 2}
    assert defaults(TextStream) == {"stop": (), "skip_special_tokens": True, "include_stop": False, "min_tokens": 0}


@pytest.mark.parametrize(("longest", "shortest"), [(1, 0), (1, 2), (0, 0)])
def test_lookups_of_no_token_are_refused(longest, shortest):
    with pytest.raises(ValueError, match="must be 1 or more, longest first"):
        PromptLookup(longest, shortest)


@pytest.mark.parametrize(("expected", "is_drafted"), [(0.4, False), (2.9, True)])
def test_a_draft_is_weighed_by_what_is_expected_of_it(expected, is_drafted):
    """A step of 16 tokens takes twice the time of one of four. It pays if most of the twelve guesses are right."""
    config = EngineConfig(64, 4, 16, max_draft_tokens=3, verify_tokens=(16,), free_tokens_per_step=8)
    speculator = Speculator(config, SimpleNamespace(propose=lambda rows: [[1, 2, 3]] * len(rows)))
    rows = [Sequence(i, 0, SamplingParams(), [0, 0], 1, 65, 0) for i in range(4)]
    speculator.guess(rows)
    for guess in speculator._guesses.values():
        guess.expected = expected
    assert bool(speculator.draft(rows)) == is_drafted


def plan_of(num_tokens, drafts=None):
    """The plan of a step of this many tokens, one of them of a sequence that decodes."""
    plan = Plan.empty(1)
    plan.rows = Rows(counts=np.array([num_tokens - 1, 1]), are_drawn=np.array([False, True]), drafts=drafts or {})
    return plan


def test_the_pace_gives_up_the_size_that_is_slow(monkeypatch):
    """Where even a small step is slow, all larger ones are given up at once; steps with drafts are of no size."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("paged_jax.engine.pace.time", SimpleNamespace(perf_counter=lambda: clock.now))
    config = EngineConfig(48, 4, 32, mixed_tokens=(4, 8, 16, 32), between_tokens_seconds=0.01)
    for size, drafts, most in ((8, None, 4), (7, None, 4), (32, None, 16), (4, None, 4), (8, {0: [1]}, 32)):
        pace = Pace(config)
        for _ in range(3):
            assert pace.most_tokens == 32 or drafts is None
            clock.now += 1.0
            pace.read(plan_of(size, drafts))
            if pace.most_tokens != 32:
                break
        assert pace.most_tokens == most, size


@pytest.mark.parametrize("least", range(4))
def test_a_stop_text_is_looked_for_right_behind_the_least_tokens(least):
    class Letters:
        def decode(self, ids, skip_special_tokens=True):
            return "".join(map(chr, ids))

    stream = TextStream(Letters(), [65], ["b"], min_tokens=least)
    texts = [stream.push(ord("b")) for _ in range(least)]
    assert (texts, stream.stopped_by) == (["b"] * least, None)
    assert (stream.push(ord("b")), stream.stopped_by) == ("", "b")


def test_counts_of_tokens_that_are_known():
    """Tokens that the model lacks are not counted, and 15 bits hold a count."""
    params = SamplingParams(presence_penalty=1.0)
    tokens = [1, VOCAB + 3, 2, *[3] * 40_000, *[1] * 2]
    row = Adjustments.of(Sequence(0, 0, params, tokens, 3, 10**6, 0), VOCAB)
    expected = [0] * VOCAB
    expected[1:4] = 2 + (1 << 15), 1 << 15, (1 << 15) - 1
    assert row.counts.tolist() == expected


def test_a_small_vocabulary_has_few_likely_tokens():
    drawn = jax.eval_shape(lambda x, how: draw(x, how, Kind.LOGPROBS, 20), jnp.zeros((2, 3)), draws(2))
    assert drawn.top_ids.shape == drawn.top_logprobs.shape == (2, 3)


def test_progress_is_shown_on_stderr_for_each_program(monkeypatch):
    consoles, advanced = [], []
    real, console = compiling._progress, rich.console.Console
    monkeypatch.setattr("rich.console.Console", lambda **how: consoles.append(how) or console(**how))

    @contextlib.contextmanager
    def progress(is_shown, total):
        with real(is_shown, total) as advance:
            yield lambda: advanced.append((is_shown, total)) or advance()

    monkeypatch.setattr(compiling, "_progress", progress)
    seen = []
    for is_shown in (True, False):
        with compiling.Compiler({"x": 1}, is_shown) as compiler:
            for name in "abc":
                compiler.add(name, SimpleNamespace(compile=lambda options: seen.append(options)))
            assert "a" in compiler
            assert "d" not in compiler
            assert compiler.finish() == dict.fromkeys("abc")
    assert (seen, consoles) == ([{"x": 1}] * 6, [{"stderr": True}])
    assert advanced == [(True, 3)] * 3 + [(False, 3)] * 3


def test_programs_are_compiled_beside_each_other():
    """Eight at a time; the first error is raised."""
    running, most, eight = [], [], threading.Barrier(8)

    def compile_slowly(_):
        running.append(1)
        most.append(len(running))
        eight.wait(PATIENCE)
        time.sleep(0.01)  # in which a ninth would begin
        running.pop()

    def fail(_):
        raise ValueError("no program")

    with compiling.Compiler(None, False) as compiler:
        for i in range(16):
            compiler.add(i, SimpleNamespace(compile=compile_slowly))
        assert compiler.finish() == dict.fromkeys(range(16))
        assert max(most) == 8
        compiler.add("bad", SimpleNamespace(compile=fail))
        with pytest.raises(ValueError, match="no program"):
            compiler.finish()


class MadeUpFollower:
    """A leader's connection to a follower that answers each reset as it is told to."""

    timeout_seconds = 1

    def __init__(self, **report):
        self.report, self.sent, self.is_closed, self.num_resets = report, [], False, 0

    def send(self, content):
        self.sent += content
        self.num_resets = content[-1]["arguments"][1]

    def receive(self, timeout_seconds):
        return {"reset": self.num_resets, "failure": None, "num_started": 0} | self.report if timeout_seconds else {}

    def close(self):
        self.is_closed = True


def test_a_leader_closes_its_connections_at_the_end():
    leader, follower = make_engine(64, 4, CONFIG, LeadingEngine), MadeUpFollower()
    with leader as entered:
        assert entered is leader
        leader._followers = (follower,)
        leader.reset()
        assert [told["call"] for told in follower.sent] == ["reset"]
    assert follower.is_closed
    assert leader._followers == ()


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"failure": "reset raised"}, "follower 1 has failed: reset raised"),
        ({"num_started": 3}, "follower 1 has started 3 programs and its leader 0"),
    ],
)
def test_a_leader_s_reset_fails_with_a_follower_s(report, message):
    leader = make_engine(64, 4, CONFIG, LeadingEngine)
    leader._followers = MadeUpFollower(), MadeUpFollower(**report)
    with pytest.raises(RuntimeError, match=message):
        leader.reset()
    assert leader.has_failed


def test_nobody_waits_for_ever():
    """A leader for followers and their reports, a follower for its leader."""
    leader = make_engine(64, 4, CONFIG, LeadingEngine)
    with pytest.raises(TimeoutError):
        leader.wait_for_followers(("127.0.0.1", 0), 1, timeout_seconds=0.05)
    ours, other = _pair()
    with ours, other:
        connection = processes._Follower(ours, 1)
        assert connection.receive(0) == {}
        with pytest.raises(TimeoutError, match=r"it has not answered for 0\.05 s"):
            connection.receive(0.05)
        other.sendall(b'{"a": 1}\n{"b"')
        assert connection.receive(1) == {"a": 1}
        assert connection.receive(0) == {}
        other.close()
        with pytest.raises(ConnectionError, match="its process has ended"):
            connection.receive(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(ConnectionRefusedError):
        follow(leader, address, timeout_seconds=0.05)


def _pair():
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


def test_a_follower_that_has_failed_makes_no_call_until_a_reset():
    called = []
    engine = SimpleNamespace(has_failed=True, step=lambda: called.append("step"), reset=called.append)
    assert processes._try(engine, "step", [], None) is None
    assert called == []
    assert processes._try(engine, "reset", [dataclasses.asdict(CONFIG), 1], None) is None
    assert called == [CONFIG]


def test_groups_of_layers_agree():
    """A sequence begins where all groups find their blocks, and is swapped out if all have room on the host."""

    def group(ends, num_held, num_free):
        return SimpleNamespace(
            block_size=1,
            prefix=(),
            count_found=lambda names: max(end for end in ends if end <= len(names)),
            find=lambda names: [len(names)],
            table=lambda seat: [0] * num_held,
            free_host_blocks=[0] * num_free,
            swap_out=lambda seat: "moved",
        )

    sequence = Sequence(0, 0, SamplingParams(), [1] * 9, 9, 20, 0)
    pools = Pools([group((7, 6, 3, 0), 2, 2), group((6, 5, 3, 0), 1, 1), group((7, 5, 3, 0), 3, 3)], [1, 1, 1])
    assert pools.match(sequence) == (3, [[3], [3], [3]])
    assert pools.swap_out(0) == ["moved"] * 3
    assert Pools([group((0,), 2, 9), group((0,), 2, 1)], [1, 1]).swap_out(0) is None


def test_a_window_bounds_the_blocks_that_a_sequence_needs():
    """Of 40 tokens with a window of 5, in blocks of 4, two blocks are held of five at most."""
    manager = BlockManager(20, 4, 2, 12, 0, False, sliding_window=5, most_held=5)
    assert (manager.held_for(40), manager.needed(40, 44), manager.needed(40, 100)) == (1, 1, 4)
    assert (manager.needed_for(40, 3), manager.needed_for(40, 99)) == (1, 4)
    assert BlockManager(20, 4, 2, 12, 0, False).needed(40, 100) == 15
