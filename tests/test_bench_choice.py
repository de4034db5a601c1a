"""The benchmark of the choice between implementations, as far as it goes without a GPU."""

import json

import pytest

from benchmarks import bench_choice, cases, peers, report
from paged_jax.kernels import problem
from paged_jax.kernels.triton import ragged_tuning, tuning


@pytest.mark.parametrize("draw", [cases.random_decode, cases.random_ragged])
def test_cases_are_drawn_the_same_every_time(draw):
    drawn = draw(12)
    assert drawn == draw(12)
    assert drawn[:5] == draw(5)
    assert drawn != draw(12, seed=1)
    assert len({case.name for case in drawn}) == 12


def test_shapes_of_decode_differ():
    drawn = cases.random_decode(12)
    assert len({(case.num_heads, case.num_kv_heads, case.head_size, case.cache_dtype) for case in drawn}) > 8


def test_shapes_of_models_are_not_those_of_another_benchmark():
    assert bench_choice.models(3, seed=1) == cases.MORE_DECODE[:3]
    names = [case.name for case in (*cases.MORE_DECODE, *cases.DECODE)]
    assert len(set(names)) == len(names)
    chosen = bench_choice.choices("models", cases.MORE_DECODE)
    assert chosen.keys() == {case.name for case in cases.MORE_DECODE}


def test_batches_are_what_engines_compose():
    drawn = [case for seed in range(4) for case in cases.random_ragged(30, seed)]
    for case in drawn:
        rows = list(zip(case.query_lens, case.seq_lens, strict=True))
        assert all(1 <= queries <= length <= 65536 for queries, length in rows), case.name
        assert sum(case.query_lens) <= case.shapes.num_tokens
        assert case.num_seqs <= case.shapes.num_seqs
        assert sum(case.blocks_per_seq) <= case.shapes.num_blocks
        assert sum(queries > 8 for queries, _ in rows) <= 4
    common = [case for case in drawn if (case.num_heads, case.num_kv_heads, case.head_size) == (32, 8, 128)]
    assert len(common) / len(drawn) == pytest.approx(2 / 3)
    assert {max(case.query_lens) > 8 for case in drawn} == {False, True}
    assert max(case.num_seqs for case in drawn) > 200
    assert max(max(case.seq_lens) for case in drawn) > 60000
    assert {case.shapes.num_tokens for case in drawn} >= {512, 1024, 2048, 4096, 8192}
    # Few programs serve a seed's 30 batches.
    assert len({(case.shapes, case.num_heads, case.head_size, case.cache_dtype) for case in drawn[:30]}) < 16


@pytest.mark.parametrize("draw", [cases.random_decode, cases.random_ragged])
def test_other_blocks_hold_the_same_tokens(draw):
    for case in (case for seed in range(3) for case in draw(30, seed)):
        other = cases.with_blocks_of(case, 128)
        assert other.kv_bytes == case.kv_bytes
        assert other.name == f"{case.name}-blocks-of-128"
        assert sum(other.blocks_per_seq) * 128 < sum(case.blocks_per_seq) * 16 + case.num_seqs * 128
        if case.shapes is not None:
            assert sum(other.blocks_per_seq) <= other.shapes.num_blocks == case.shapes.num_blocks // 8
            assert max(other.blocks_per_seq) <= other.shapes.max_blocks_per_seq == case.shapes.max_blocks_per_seq // 8


@pytest.mark.parametrize("rows", bench_choice.TILES)
def test_tiles_are_forced(rows):
    """Triton's tuning has as many queries as fill the named rows, whatever it would have chosen."""
    (case,) = cases.random_ragged(1)
    (candidate,) = bench_choice.ragged_implementation(f"triton/{rows}")(case, bench_choice.abstract_inputs(case))
    seen = []

    def tune(*args, **options):
        seen.append(original(*args, **options))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        original = tuning.attention
        patch.setattr(tuning, "attention", tune)
        patch.setattr(bench_choice.ragged, "ragged_paged_attention", lambda *arrays: (tuned(*arrays), None))
        candidate.fn.eval_shape(*candidate.argsets[0])
    assert [(found.rows, found.queries) for found in seen] == [(rows, rows // 4)]
    assert tuning.attention is original


def tuned(query, key_cache, value_cache, tables, *rest):
    facts = problem.Problem.of_call(query, key_cache, value_cache, tables, rest[-1])
    ragged_tuning.tune(facts, problem.Device())
    return query


def test_tiles_that_cannot_be_had_are_absent():
    case = next(case for case in cases.random_ragged(30) if case.head_size == 256)
    (candidate,) = bench_choice.ragged_implementation("triton/256")(case, bench_choice.abstract_inputs(case))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_choice.ragged, "ragged_paged_attention", lambda *arrays: (tuned(*arrays), None))
        with pytest.raises(peers.Absent, match="tiles have 64 rows"):
            candidate.fn.eval_shape(*candidate.argsets[0])


@pytest.mark.parametrize("name", ["triton/7", "mosaic_gpu/64", "cuda"])
def test_names_of_other_contenders_are_refused(name):
    with pytest.raises(ValueError, match="no implementation is named"):
        bench_choice.ragged_implementation(name)


@pytest.mark.parametrize(("op", "draw"), [("decode", cases.random_decode), ("ragged", cases.random_ragged)])
def test_each_case_gets_one(op, draw):
    some = draw(3)
    assert bench_choice.choices(op, some) == dict.fromkeys([case.name for case in some], "triton")  # there is no Hopper


def test_the_command_line(monkeypatch, capsys):
    def run(benchmark, some, names, peer_names, *, out, processes, notes):
        called.append((benchmark.op, names, len(some), processes))
        assert benchmark.cases == some
        assert benchmark.timer.keywords == benchmark.peer_timing
        name = some[0].name
        return found({name: {"triton": 3.0, "triton/64": 2.0}}, **notes())

    called = []
    monkeypatch.setattr(bench_choice.harness, "has_gpu", lambda *_: True)
    monkeypatch.setattr(bench_choice.harness, "run", run)
    arguments = ["--op", "ragged", "--count", "2", "--seed", "3", "--implementations", "triton,triton/64"]
    assert bench_choice.main([*arguments, "--processes", "4"]) == 0
    assert "Regret of 1 cases: 50.0%" in capsys.readouterr().out
    assert bench_choice.main(["--count", "1"]) == 0
    assert "Regret" in capsys.readouterr().out
    assert called == [
        ("choice-ragged", ["triton", "triton/64"], 2, 4),
        ("choice-decode", bench_choice.IMPLEMENTATIONS["decode"], 1, 1),
    ]
    sizes = ["--count", "3", "--block-sizes", "16,128", "--implementations", "mosaic_gpu", "--seconds", "0.01"]
    assert bench_choice.main(sizes) == 0
    assert called[2:] == [("choice-decode", ["mosaic_gpu"], 6, 1)]
    assert "Regret" not in capsys.readouterr().out
    seen = []
    monkeypatch.setattr(bench_choice.harness, "run", lambda _, some, *args, **how: seen.extend(some) or found({}))
    assert bench_choice.main(["--count", "9", "--numbers", "7,2", "--implementations", "triton"]) == 0
    assert seen == [cases.random_decode(9)[number] for number in (7, 2)]
    with pytest.raises(SystemExit):
        bench_choice.main(["--count", "7", "--numbers", "7,2"])
    assert "only 7 cases are drawn" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_choice.main(["--op", "ragged", "--implementations", "triton/3"])
    assert "triton/3" in capsys.readouterr().err


def found(times, **more):
    rows = [
        {"case": case, "contender": name, "kind": "implementation", "work": 1}
        | ({"us": us} if us else {"failed": "no"})
        for case, by_name in times.items()
        for name, us in by_name.items()
    ]
    machine = {"gpu": "g", "driver": "d", "jax": "j", "date": "today", "commit": None, "op": "choice-ragged"}
    return machine | {"ceiling": {"unit": "TFLOP/s", "rate": 9.0, "us": {}, "note": ""}, "rows": rows} | more


TIMES = {
    "a": {"triton": 3.0, "mosaic_gpu": 2.0, "triton/16": 4.0},
    "b": {"triton": 4.0, "mosaic_gpu": None, "triton/16": 3.2},
    "c": {"triton": None, "mosaic_gpu": 1.0},
}


def test_regret_is_over_the_fastest():
    report_of = found(TIMES, chosen={"a": "triton", "b": "triton/16", "c": "triton"})
    assert report.regrets(report_of) == pytest.approx({"a": 0.5, "b": 0.0})
    assert report.regret_text(report_of) == "Regret of 2 cases: 25.0% on the mean, at most 50.0% (a)."
    text = report.markdown(json.loads(json.dumps(report_of)))
    assert "| b | triton/16 | 4.0 | - | 3.2 | 0.0% |" in text
    assert "| c | triton | - | 1.0 | - | - |" in text
    assert "at most 50.0% (a)." in text
    # Without a note of what was chosen it is the first of ours.
    assert report.regrets(found({"a": TIMES["a"]})) == pytest.approx({"a": 0.5})
    assert "regret of" not in report.markdown(found(TIMES)).lower()


def test_peers_beside_random_cases():
    """Only cases in which both have a time count; up to 1% is level. Each size of blocks has a line."""
    report_of = found({"a": {"auto": 2.0}, "b": {"auto": 3.03}, "c": {"auto": 3.2}, "d": {"auto": None}})
    for case, us in {"a": 3.0, "b": 3.0, "c": 3.0, "d": 1.0}.items():
        report_of["rows"].append({"case": case, "contender": "vllm-fa3", "kind": "peer", "work": 1, "us": us})
    assert report.peers_text(report_of).splitlines() == [
        "auto leads in 2 of 3 cases; its median time is 1.01 of a peer's.",
        "Its worst times, over a peer's:",
        "  1.067 c",
        "  1.010 b",
        "  0.667 a",
    ]
    for row in report_of["rows"]:
        row["case"] += "-blocks-of-16" if row["case"] == "a" else "-blocks-of-128"
    first, second, *_ = report.peers_text(report_of).splitlines()
    assert first == "auto leads in 1 of 1 cases with blocks of 16; its median time is 0.67 of a peer's."
    assert second == "auto leads in 1 of 2 cases with blocks of 128; its median time is 1.04 of a peer's."
    assert report.peers_text(found(TIMES)) == "No case has a time of ours and one of a peer."
    for row, rested_us in zip(report_of["rows"], (1.5, 3.0, 3.3, None, 3.5, 2.5, 3.0), strict=False):
        row |= {"rested_us": rested_us} if rested_us else {}
    assert report.peer_ratios(report_of) == pytest.approx(
        {"a-blocks-of-16": 1.5 / 3, "b-blocks-of-128": 3 / 2.5, "c-blocks-of-128": 3.2 / 3}
    ), "the lower of two times counts"


def test_peers_are_named_or_refused(capsys):
    with pytest.raises(SystemExit):
        bench_choice.main(["--peers", "vllm-fa3,nobody"])
    assert "nobody" in capsys.readouterr().err
