"""The benchmark of several commits: programs that one process lowers and another one times, here by XLA on a CPU."""

import dataclasses
import json

import jax
import pytest
from jax import export

from benchmarks import bench_commits, bench_decode, bench_ragged, cases, timing

SMALL = cases.Case("small", (40, 17), 4, 2, 32, query_lens=(3, 17))
PADDED = dataclasses.replace(SMALL, name="padded", shapes=cases.Shapes(32, 4, 4, 512))
LIKE_PADDED = dataclasses.replace(PADDED, name="like padded", seq_lens=(30, 33))

POOL = {"pool_bytes": 1 << 20}
ON_CPU = {"platform": "cpu", **POOL}


@pytest.fixture(autouse=True)
def made_up_times(monkeypatch):
    """Times and ceilings of a made-up GPU."""

    def time_calls(fn, argsets):
        jax.block_until_ready(fn(*argsets[0]))
        return timing.Timing(20.0, 19.0, 2, (("kernel", 20.0),))

    def ceiling(work):
        return timing.Ceiling("TFLOP/s", 1000.0, {}, "made up")

    for op, bench in (("decode", bench_decode), ("ragged", bench_ragged)):
        made = dataclasses.replace(bench.BENCHMARK, ceiling=ceiling, timer=time_calls, peers={})
        monkeypatch.setitem(bench_commits.BENCHMARKS, op, made)


def test_two_commits_beside_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGED_JAX_COMMIT", "abc")
    bench_commits.lower(tmp_path / "before", "ragged", [SMALL, PADDED, LIKE_PADDED], "xla", **ON_CPU)
    monkeypatch.setenv("PAGED_JAX_COMMIT", "def")
    bench_commits.lower(tmp_path / "after", "ragged", [PADDED], "xla", **ON_CPU)
    assert sorted(path.name for path in (tmp_path / "before").iterdir()) == ["0.bin", "1.bin", "programs.json"]
    out = tmp_path / "result.json"
    bench_commits.time(tmp_path, ["before", "after"], [], out=out, **POOL)
    found = json.loads(out.read_text())
    assert found["commits"] == {"before": "abc", "after": "def"}
    rows = {(row["case"], row["contender"]): row for row in found["rows"]}
    assert {key for key, row in rows.items() if row.get("us") == 20} == {
        *((case.name, "before") for case in (SMALL, PADDED, LIKE_PADDED)),
        ("padded", "after"),
    }
    assert all(row["relative_error"] < 1e-2 for row in rows.values() if "us" in row)
    assert rows["small", "after"]["absent"] == rows["like padded", "after"]["absent"] == "not lowered"


def test_a_commit_with_wrong_results_gets_no_time(tmp_path, monkeypatch):
    build = bench_commits.BENCHMARKS["ragged"].implementation

    def half(name):
        def candidates(case, inputs):
            (candidate,) = build(name)(case, inputs)
            return [candidate._replace(fn=jax.jit(lambda *args: candidate.fn(*args) / 2))]

        return candidates

    wrong = dataclasses.replace(bench_commits.BENCHMARKS["ragged"], implementation=half)
    with monkeypatch.context() as patched:
        patched.setitem(bench_commits.BENCHMARKS, "ragged", wrong)
        bench_commits.lower(tmp_path / "wrong", "ragged", [SMALL], "xla", **ON_CPU)
    (row,) = bench_commits.time(tmp_path, ["wrong"], [], **POOL)["rows"]
    assert "wrong result" in row["failed"]


def test_kernels_are_lowered_for_hopper_without_a_gpu(tmp_path):
    assert bench_commits.main(["lower", str(tmp_path), "--random", "11", "--numbers", "3", "--block-sizes", "128"]) == 0
    op, _, files = bench_commits.read(tmp_path)
    (case,) = files
    assert (op, case.block_size, case.query_lens) == ("ragged", 128, (7, 1, 1))
    program = export.deserialize(bytearray((tmp_path / "0.bin").read_bytes()))
    assert program.platforms == ("cuda",)
    assert "ragged_wide_thin" in program.mlir_module()


def test_nothing_is_timed_without_a_gpu(tmp_path, capsys):
    assert bench_commits.main(["time", str(tmp_path), "--names", "a,b"]) == 2
    assert "nothing to time" in capsys.readouterr().out
