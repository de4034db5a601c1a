"""Measuring in several processes, and programs that cases share, on a CPU."""

import dataclasses
import os
import threading
import time
from multiprocessing.connection import Connection

import numpy as np
import pytest

from benchmarks import bench_ragged, cases, harness, inputs, measure, peers, processes, report, timing
from tests.test_benchmarks import TINY, fake_timer

SHAPES = cases.Shapes(num_tokens=32, num_seqs=5, max_blocks_per_seq=6, num_blocks=2048)
FIRST = dataclasses.replace(TINY, name="first", query_lens=(1, 17, 3), shapes=SHAPES)
SECOND = dataclasses.replace(FIRST, name="second", seq_lens=(90, 33), query_lens=(30, 1))
OTHER = dataclasses.replace(FIRST, name="other", shapes=dataclasses.replace(SHAPES, num_seqs=4))


def ceiling(work):
    return timing.Ceiling("TFLOP/s", 1000.0, {}, "made up")


def dies_at_second(case, drawn):
    if case.name == "second":
        os._exit(1)
    raise peers.Absent("not here")


BENCHMARK = dataclasses.replace(
    bench_ragged.BENCHMARK, ceiling=ceiling, peers={"dies": dies_at_second, "absent": dies_at_second}
)


def test_inputs_are_padded():
    few = dataclasses.replace(FIRST, shapes=dataclasses.replace(SHAPES, num_blocks=64))
    drawn = inputs.make(few)
    assert drawn.query.shape == (32, 4, 32)
    assert drawn.seq_lens.tolist() == [40, 17, 64, 0, 0]
    assert drawn.query_start_loc.tolist() == [0, 1, 18, 21, 21, 21]
    assert drawn.key_cache.shape[0] == drawn.value_cache.shape[0] == 64
    tables = np.stack(drawn.block_tables)
    assert tables.shape == (7, 5, 6)  # nine blocks each
    used = [row[:blocks] for table in tables for row, blocks in zip(table, FIRST.blocks_per_seq, strict=False)]
    assert len(np.unique(np.concatenate(used))) == 63
    with pytest.raises(ValueError, match="needs 9 blocks, the engine has 8"):
        inputs.make(dataclasses.replace(FIRST, shapes=dataclasses.replace(SHAPES, num_blocks=8)))


@pytest.mark.slow_on_cpu
def test_batches_of_an_engine_share_programs():
    names = ["auto:xla", "triton"]  # Triton has no GPU to compile for here
    work = measure.Work(BENCHMARK, (FIRST, SECOND, OTHER), names, [], pool_bytes=1 << 16, timer=fake_timer)
    programs = measure.compile_ahead(work)
    compiled = dict(programs._compiled)
    assert len(compiled) == 2
    answers = list(measure.measure(work, programs))
    assert programs._compiled == compiled
    found = {(answer.case, answer.contender): answer.fields for answer in answers}
    assert [found[case.name, "auto:xla"].get("us") for case in work.cases] == [20, 20, 20]
    assert all("failed" in found[case.name, "triton"] for case in work.cases)


def test_cases_that_share_programs_stay_together():
    others = [dataclasses.replace(TINY, name=str(i)) for i in range(3)]
    hands = processes.dealt([FIRST, others[0], SECOND, OTHER, *others[1:]], 2)
    assert [[case.name for case in hand] for hand in hands] == [["first", "second", "other", "2"], ["0", "1"]]
    assert processes.dealt([FIRST, SECOND], 5) == [[FIRST, SECOND]]


@pytest.mark.slow
def test_a_process_that_dies_costs_its_own_cases_only(tmp_path, monkeypatch):
    """The report keeps the order of the cases."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    last = dataclasses.replace(SECOND, name="last")
    some = [FIRST, OTHER, SECOND, last]
    how = {"processes": 2, "pool_bytes": 1 << 16, "timer": fake_timer}
    found = harness.run(BENCHMARK, some, ["auto:xla"], ["dies", "absent"], out=tmp_path / "a.json", **how)
    rows = {(row["case"], row["contender"]): row for row in found["rows"]}
    assert list(rows) == [(case.name, name) for case in some for name in ("auto:xla", "dies", "absent")]
    assert {rows[name, "auto:xla"].get("us") for name in ("first", "other", "second")} == {20}
    assert rows["other", "absent"]["absent"] == "not here"
    ended = [key for key, row in rows.items() if row.get("failed") == "its process ended early"]
    assert ended == [
        ("second", "dies"),
        ("second", "absent"),
        *[("last", row) for row in ("auto:xla", "dies", "absent")],
    ]
    assert rows["first", "auto:xla"]["share"] == bench_ragged.work(FIRST) / 1e9 / 20
    assert "- auto:xla, last: its process ended early" in report.markdown(found)


@pytest.fixture
def ends(monkeypatch):
    """The processes' ends of their connections: the test acts for them."""

    class Stub:
        def __init__(self, *, target, args, daemon):
            connection, _ = args
            self.start = lambda: found.append(Connection(os.dup(connection.fileno())))
            self.join = self.kill = lambda *_: None

    found = []
    monkeypatch.setattr(type(processes.multiprocessing.get_context("spawn")), "Process", Stub)
    return found


def test_those_that_still_compile_come_last(ends):
    both = processes.Processes(measure.Work(BENCHMARK, [FIRST, OTHER], ["auto"], []), 2)
    ends[1].send("compiled")
    assert both.wait(0.01) == [1]
    answers = both.answers()
    for end, case in reversed(list(zip(ends, (FIRST, OTHER), strict=True))):
        if end is ends[0]:
            end.send("compiled")
        end.send(peers.Answer(case.name, "auto", "implementation", {"us": 3}))
        end.send(None)
        assert next(answers).case == case.name
    assert list(answers) == []
    both.close()


def test_cases_that_are_short_of_memory_are_measured_again(ends):
    """One process measures it alone, after all others have ended."""
    both = processes.Processes(measure.Work(BENCHMARK, [FIRST, OTHER], ["auto"], []), 2)
    failed = {"failed": "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.03GiB"}
    for end, case, fields in zip(ends[:2], (FIRST, OTHER), (failed, {"us": 3}), strict=True):
        end.send("compiled")
        end.send(peers.Answer(case.name, "auto", "implementation", fields))
        end.send(None)
    answers = both.answers()
    assert [next(answers).fields for _ in ends[:2]] == [failed, {"us": 3}]

    def alone():
        while len(ends) < 3:
            time.sleep(0.01)
        ends[2].send("compiled")
        ends[2].send(peers.Answer("first", "auto", "implementation", {"us": 4}))
        ends[2].send(None)

    thread = threading.Thread(target=alone, daemon=True)  # if the test fails, nobody asks for its process
    thread.start()
    assert [(answer.case, answer.fields) for answer in answers] == [("first", {"us": 4})]
    thread.join()
    both.close()


def test_a_second_answer_takes_the_place_of_the_first(monkeypatch):
    class Others:
        def __init__(self, *_):
            self.wait = self.close = lambda: None

        def answers(self):
            for fields in ({"failed": "RESOURCE_EXHAUSTED"}, {"us": 3}):
                yield peers.Answer("first", "auto:xla", "implementation", fields)

    monkeypatch.setattr(harness, "Processes", Others)
    (row,) = harness.run(BENCHMARK, [FIRST], ["auto:xla"], [], processes=2)["rows"]
    assert row["us"] == 3


def test_a_process_that_hangs_is_given_up(ends, monkeypatch):
    monkeypatch.setattr(processes, "_LONGEST_S", 0.1)
    both = processes.Processes(measure.Work(BENCHMARK, [FIRST, OTHER], ["auto"], []), 2)
    for end in ends:
        end.send("compiled")
    ends[1].send(peers.Answer("other", "auto", "implementation", {"us": 3}))
    ends[1].send(None)
    found = {answer.case: answer.fields for answer in both.answers()}
    assert found == {"first": {"failed": "took more than 0 s"}, "other": {"us": 3}}
    both.close()
