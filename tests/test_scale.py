"""Tests the benchmark of several GPUs on CPU devices: it runs the work that its report names."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from benchmarks import bench_scale, model_clocks, scale_projection, scale_steps
from examples.sharding import make_mesh, split_config
from examples.step import xla_options

RESULTS = Path(bench_scale.__file__).parent / "results"


@pytest.fixture
def report(tmp_path):
    return bench_scale.Report("test", tmp_path / "report.json")


def test_ops_give_the_same_in_both_ways(report, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_scale, "ITERATIONS", 2)
    monkeypatch.setattr(bench_scale, "OPS", {op: bench_scale.OPS[op] for op in ("paged_attention", "write_and_attend")})
    shape = bench_scale.Shape(num_seqs=2, context=64, num_heads=8, num_kv_heads=4, num_new=32)
    bench_scale.run_ops(report, shape, [1, 4])
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [(row["case"], row["contender"]) for row in rows] == [
        *((f"{op}/tp=4", how) for op in ("paged_attention", "write_and_attend") for how in ("shard_map", "jit")),
        ("paged_attention/tp=1", "jit"),
    ]
    assert all(row["us"] > 0 and row["collectives"] == 0 for row in rows)
    sums = [row["sum"] for row in rows]
    assert sums[0] == pytest.approx(sums[1], rel=1e-3) == pytest.approx(sums[4], rel=1e-2)


@pytest.mark.parametrize("op", bench_scale.OPS)
def test_every_op_is_lowered_in_both_ways(op):
    shape = bench_scale.Shape(num_seqs=2, context=64, num_heads=8, num_kv_heads=4, num_new=128)
    mesh = make_mesh({"dp": 1, "tp": 2}, jax.devices("cpu"))
    for how in ("jit", "shard_map"):
        assert "while" in bench_scale.lower_op(op, shape, mesh, how).as_text()


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


def test_all_reduces(report):
    bench_scale.run_all_reduces(report, 2, [(1, 64)])
    assert report.rows[0]["us"] > 0


@pytest.mark.slow
def test_projection_of_measured_parts():
    model, all_reduces = (
        json.loads((RESULTS / f"2026-11-{name}.json").read_text())
        for name in ("23-h200-model", "22-h200x2-scale-all-reduce")
    )
    # The time on one GPU is measured; the expected times on more GPUs were computed by hand from the same files.
    assert scale_projection.step_ms("llama3-8b", 64, 1, model, all_reduces) == pytest.approx(6.57373725)
    moved, rest = 23599783936 / 4581.8934843004945e6, 6.57373725 - 23599783936 / 4581.8934843004945e6
    all_reduce = 65 * 22.38289999993981e-3 * 1.25
    assert scale_projection.step_ms("llama3-8b", 64, 4, model, all_reduces) == pytest.approx(
        moved / 4 + rest + all_reduce
    )
    readme = (RESULTS.parent / "README.md").read_text()
    assert scale_projection.table(model, all_reduces, (1, 64)) in readme
