"""Tests the benchmark of several GPUs on CPU devices: it runs the work that its report names."""

import dataclasses
import json

import jax
import pytest

from benchmarks import bench_scale, model_clocks, scale_plot, scale_reduce, scale_steps, scale_trace
from examples import step
from examples.sharding import make_mesh, split_config
from examples.step import xla_options


@pytest.fixture
def report(tmp_path):
    return bench_scale.Report("test", tmp_path / "report.json")


@pytest.mark.slow
def test_ops_give_the_same_in_both_ways(report, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_scale, "ITERATIONS", 2)
    monkeypatch.setattr(bench_scale, "OPS", {"paged_attention": bench_scale.OPS["paged_attention"]})
    shape = bench_scale.Shape(num_seqs=2, context=64, num_heads=8, num_kv_heads=4, num_new=32)
    bench_scale.run_ops(report, shape, [1, 4])
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [(row["case"], row["contender"]) for row in rows] == [
        *(("paged_attention/tp=4", how) for how in ("shard_map", "jit")),
        ("paged_attention/tp=1", "jit"),
    ]
    assert all(row["us"] > 0 and row["collectives"] == 0 for row in rows)
    sums = [row["sum"] for row in rows]
    assert sums[0] == pytest.approx(sums[1], rel=1e-3) == pytest.approx(sums[2], rel=1e-2)


@pytest.mark.parametrize("op", bench_scale.OPS)
def test_every_op_is_lowered_in_both_ways(op):
    shape = bench_scale.Shape(num_seqs=2, context=64, num_heads=8, num_kv_heads=4, num_new=128)
    mesh = make_mesh({"dp": 1, "tp": 2}, jax.devices("cpu"))
    for how in ("jit", "shard_map"):
        assert "while" in bench_scale.lower_op(op, shape, mesh, how).as_text()


@pytest.mark.slow
def test_steps_of_a_model(report):
    config = scale_steps.MODELS["llama3-8b"]
    small = {"vocab_size": 64, "embedding_size": 32, "hidden_size": 32, "intermediate_size": 64, "head_size": 16}
    heads = {"layers": config.layers[:1], "num_heads": 4, "num_kv_heads": 2}
    bench_scale.run_models(report, {"small": dataclasses.replace(config, **small, **heads)}, [2], [2], 64, prompts=1)
    decode, prefill = report.rows
    assert decode["all_reduces"] == prefill["all_reduces"] == 3
    weights = 64 * 32 + 32 * (4 + 2 + 2) * 16 + 4 * 16 * 32 + 3 * 32 * 64 + 3 * 32
    cached = 2 * 2 * 16 * 2 * 64
    assert decode["floor_bytes"] == 2 * (weights + cached) // 2
    assert decode["us"] > 0
    assert prefill["tokens_per_s"] > 0


@pytest.mark.slow
def test_prompts_in_pieces_are_rows_of_a_model(report, monkeypatch):
    """One GPU has no pieces, and decode steps have none."""
    monkeypatch.setattr(step, "_LEAST_IN_PIECE", 64)
    config = scale_steps.MODELS["llama3-8b"]
    small = {"vocab_size": 64, "embedding_size": 32, "hidden_size": 32, "intermediate_size": 64, "head_size": 16}
    config = dataclasses.replace(config, **small, layers=config.layers[:1], num_heads=4, num_kv_heads=2)
    bench_scale.run_models(report, {"small": config}, [1, 2], [2], 64, prompts=4, pieces=["2", "2-queued"])
    assert [(row["case"], row["contender"]) for row in report.rows] == [
        ("small/tp=1/decode/2x64", "called"),
        ("small/tp=1/prefill/4x64", "called"),
        ("small/tp=2/decode/2x64", "called"),
        ("small/tp=2/prefill/4x64", "called"),
        ("small/tp=2/prefill/4x64", "in 2"),
        ("small/tp=2/prefill/4x64", "in 2-queued"),
    ]
    assert [row["all_reduces"] > 3 for row in report.rows] == [False] * 4 + [True] * 2
    assert all(row["us_in_a_row"] > 0 for row in report.rows if "prefill" in row["case"])


@pytest.mark.slow_on_cpu
def test_ways_to_reduce_are_rows_of_a_model(report, monkeypatch):
    """One GPU has nothing to reduce. Prompts are timed once."""
    monkeypatch.setattr(bench_scale.harness, "compile_all", lambda cases: dict.fromkeys(cases))
    monkeypatch.setattr(bench_scale, "make_weights", lambda shapes, _: shapes)
    monkeypatch.setattr(bench_scale, "_measure_step", lambda _, model, weights, *case: {"xla": model.options(case[1])})
    config = scale_steps.MODELS["llama3-8b"]
    models = {"8b": dataclasses.replace(config, layers=config.layers[:2])}
    bench_scale.run_models(report, models, [1, 2], [3], 64, prompts=1, variants=["called", "nccl-recorded"])
    assert [(row["case"], row["contender"], len(row["xla"])) for row in report.rows] == [
        ("8b/tp=1/decode/3x64", "called", 0),
        ("8b/tp=1/prefill/1x64", "called", 0),
        ("8b/tp=2/decode/3x64", "called", 0),
        ("8b/tp=2/prefill/1x64", "called", 0),
        ("8b/tp=2/decode/3x64", "nccl-recorded", 2),
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "tp", "num_tokens", "has_options"),
    [
        ("llama3-70b", 2, 256, True),
        ("llama3-70b", 2, 512, False),
        ("llama3-70b", 4, 1, False),
        ("llama3-8b", 2, 1, False),
    ],
)
def test_all_reduces_of_a_large_model_s_decode_steps_are_recorded(name, tp, num_tokens, has_options):
    mesh = make_mesh({"dp": 1, "tp": tp}, jax.devices("cpu"))
    weights, _ = scale_steps.Model(split_config(scale_steps.MODELS[name], mesh), mesh, 64).parts
    options = xla_options(num_tokens, weights=weights, mesh=mesh)
    assert ("xla_gpu_enable_command_buffer" in options) == has_options


def test_all_reduces_that_xla_numbers_are_one_kernel_of_a_row():
    launches = [("all_reduce_12_0_fusion_1", 3.0), ("fusion_1", 1.0), ("all_reduce_65_fusion_1", 2.0)]
    row = model_clocks.by_kernel(launches, 1)
    assert row == {"us": 6, "kernels": [["all_reduce_fusion_1", 2, 5], ["fusion_1", 1, 1]]}


def events(*times):
    """A GPU's events by name, start and duration."""
    return [scale_trace.Event(name, start, start + us) for name, start, us in times]


def test_summary_of_a_trace():
    """The second GPU's clock is 100 us late. It begins its all-reduces later, so the first one waits for it."""
    times = [("a", 0, 8), ("all_reduce_1", 10, 20)], [("a", 100, 24), ("psum_7", 126, 4)]
    first, second = (events(*((name, t + at, us) for t in (0, 50, 100) for name, at, us in gpu)) for gpu in times)
    found = scale_trace.summary([first, second], 3)
    assert found == {
        "traced_us": 40,  # 80 us from the first begin to the last end, of two steps
        "kernels_us": 28,
        "num_kernels": 2,
        "pauses_us": 12,
        "num_pauses": 1.5,
        "num_all_reduces": 1,
        "all_reduce_us": 12,
        "waits_us": 8,
        "moves_us": 4,
        "skew_us": 16,
        "pause_before_us": 2,
        "pause_after_us": 20,
    }
    assert scale_trace.by_name(first, 3) == [("all_reduce_", 1, 20), ("a", 1, 8)]


def test_kernels_that_overlap_leave_no_pause():
    assert scale_trace.pauses(events(("a", 0, 10), ("b", 2, 3), ("c", 12, 1))) == [2]


def test_all_reduces_alone(report, monkeypatch):
    monkeypatch.setattr(scale_reduce, "CHAIN", 2)
    monkeypatch.setattr(scale_reduce, "SHAPES", [(2, 1024)])
    scale_reduce.run(report.add, [2], ["called", "xla"])
    called, xla = report.rows
    assert called["failed"] == "NotImplementedError: a device is no Hopper GPU"
    assert xla["us"] > 0
    assert xla["same_bits"]
    assert xla["error"] < 0.01


def test_files_of_the_plot():
    """Of rows of the same case, the last file's counts."""
    files = [
        {"date": date, "rows": [{"case": case, "contender": "called", "us": us} for case, us in rows.items()]}
        for date, rows in (("2026-11-26", {"tp=1": 4.0, "tp=2": 3.0}), ("2026-11-27", {"tp=2": 2.0}))
    ]
    found = scale_plot.joined(files)
    assert found["date"] == "2026-11-27"
    assert {row["case"]: row["us"] for row in found["rows"]} == {"tp=1": 4.0, "tp=2": 2.0}


def test_points_of_the_plot():
    rows = [
        {"case": f"llama3-8b/tp={size}/{phase}/1x1024", "contender": "called", "us": us, "floor_bytes": 4.58e9 / size}
        for size, phase, us in ((2, "decode", 1e3), (1, "decode", 2e3), (1, "prefill", 1e3))
    ]
    rows.append({"case": "llama3-70b/tp=1", "contender": "called", "absent": "too large"})
    rows.append(rows[0] | {"contender": "by a script"})
    found = scale_plot.points({"gpu": "NVIDIA H200", "rows": rows})
    assert found == {("llama3-8b", "1", "called"): [(1, 2.0, pytest.approx(0.5)), (2, 1.0, pytest.approx(0.5))]}
