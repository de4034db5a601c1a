"""The benchmarks, without a GPU: their list of cases, the whole harness on a tiny case, the report and the plot."""

import dataclasses
import json
import runpy
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    bench_cache,
    bench_decode,
    bench_prefill,
    bench_step,
    bench_swap,
    cases,
    harness,
    inputs,
    peers,
    plot,
    report,
    timing,
)

TINY = cases.Case("tiny", (40, 17, 64), 4, 2, 32)


@pytest.mark.parametrize("name", ["bench_decode", "bench_cache", "bench_swap", "bench_step"])
def test_nothing_to_time_without_a_gpu(name, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr("sys.argv", [name])
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}")  # runpy warns of a module that is there already
    with pytest.raises(SystemExit) as exit:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert exit.value.code == 2
    assert "nothing to time" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--cases", "no-such"], ["--implementations", "v3"], ["--peers", "no-such"]])
def test_wrong_names_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        bench_decode.main(argv)
    assert argv[1] in capsys.readouterr().err


def test_cases():
    names = [case.name for case in cases.DECODE]
    assert len(set(names)) == len(names) == 24
    by_name = {case.name: case for case in cases.DECODE}
    assert by_name["llama2-7b-32x8192"].kv_bytes == 32 * 8192 * 32 * 128 * 2 * 2
    assert by_name["llama3-8b-64x4096-e4m3"].kv_bytes * 2 == by_name["llama3-8b-64x4096"].kv_bytes
    ragged = by_name["llama3-70b-128xragged"].seq_lens
    assert len(ragged) == 128
    assert (min(ragged), max(ragged)) == (512, 4096)
    skewed = by_name["llama3-8b-64xskewed"].seq_lens
    assert [skewed.count(1024 << i) for i in range(5)] == [32, 16, 8, 4, 4]
    assert cases.PREFILL[1].causal_flops == 2 * 32 * 32768**2 * 128
    assert cases.select(cases.DECODE, names[:2]) == cases.DECODE[:2]
    # Several tables of small cases; together they are far larger than an L2.
    assert inputs.rotations(by_name["llama3-8b-1x512"]) * by_name["llama3-8b-1x512"].kv_bytes >= 256 << 20


@pytest.mark.parametrize("name", ["v1:cuda", "v1/512", "v2/x", "v2:"])
def test_names_of_implementations(name):
    if name == "v2:":
        assert bench_decode.implementation(name)
    else:
        with pytest.raises(ValueError, match=name.partition(":")[0]):
            bench_decode.implementation(name)


@pytest.mark.parametrize(("layout", "dtype"), [("nhd", "bfloat16"), ("vllm", "int8")])
def test_truth_reads_every_layout(layout, dtype):
    case = dataclasses.replace(TINY, layout=layout, cache_dtype=dtype)
    drawn = inputs.make(case, prefill=False, pool_bytes=1 << 16)
    blocks = np.concatenate([np.asarray(table)[2] for table in drawn.block_tables])
    assert len(drawn.block_tables) > 1
    assert len(np.unique(blocks)) == len(blocks)
    (candidate,) = bench_decode.implementation("auto:xla")(case, drawn)
    index, expected = inputs.truth(case, drawn, prefill=False)
    found = np.asarray(candidate.fn(*candidate.argsets[0]), np.float32)[index]
    np.testing.assert_allclose(found, expected, atol=2e-2)


def _fake_timer(fn, argsets):
    jax.block_until_ready([fn(*args) for args in argsets[:2]])
    return timing.Timing(20.0, 19.0, 2, (("kernel", 20.0),))


def _no_gpu_candidate(case, inputs):
    raise peers.Absent("not here")


@pytest.mark.parametrize("bench", [bench_decode, bench_prefill], ids=["decode", "prefill"])
def test_harness_report_and_plot(bench, tmp_path):
    def ceiling(work):
        return timing.Ceiling("GB/s", 1000.0, {size: 5.0 for size in work}, "made up")

    wrong = lambda case, inputs: [peers.Candidate("", jax.jit(lambda q: q), [(inputs.query,)])]  # noqa: E731
    others = {"absent": _no_gpu_candidate, "wrong": wrong}
    if bench is bench_decode:
        others["xla-gather"] = peers.xla_decode
    benchmark = dataclasses.replace(bench.BENCHMARK, ceiling=ceiling, peers=others)
    file = tmp_path / "out" / "result.json"
    names = ["auto", "v2/32"] if bench is bench_decode else ["auto"]
    harness.run(benchmark, [TINY], names, list(others), out=file, pool_bytes=1 << 22, timer=_fake_timer)
    found = json.loads(file.read_text())
    rows = {row["contender"]: row for row in found["rows"]}
    assert {rows[name]["us"] for name in names} == {20}
    assert rows["auto"]["share_at_size"] == 0.25
    assert rows["absent"]["absent"] == "not here"
    assert "wrong result" in rows["wrong"]["failed"]
    assert rows["auto"]["ratios"] == ({"xla-gather": 1.0} if bench is bench_decode else {})
    text = report.markdown(found)
    assert "| tiny | 5.0 | 20.0 (" in text
    assert "- absent, tiny: not here" in text
    pytest.importorskip("matplotlib")
    plot.main([str(file), str(tmp_path / "plot.png")])
    assert (tmp_path / "plot.png").stat().st_size > 1000


def _fake_cache_timer(fn, argsets):
    for args in argsets[:3]:
        jax.block_until_ready(fn(*args))  # before the next call takes the caches
    return timing.Timing(20.0, 19.0, 2, ())


def test_cache_benchmark(tmp_path):
    works = [
        bench_cache.Write(5, "nhd"),
        bench_cache.Write(3, "vllm", "float8_e4m3fn"),
        bench_cache.Copy(2),
        bench_cache.Fused(TINY),
    ]
    ceiling = lambda: timing.Ceiling("GB/s", 1000.0, {}, "made up")  # noqa: E731
    file = tmp_path / "out" / "cache.json"
    bench_cache.run(works, out=file, pool_bytes=1 << 21, ceiling=ceiling, timer=_fake_cache_timer)
    found = json.loads(file.read_text())
    assert {row.get("failed") for row in found["rows"]} == {None}
    rows = {(row["case"], row["contender"]): row for row in found["rows"]}
    assert len(rows) == 2 * 3 + 3
    assert rows["copy-2", "auto"]["work"] == 2 * 2 * 2 * 16 * 8 * 128 * 2
    assert rows["copy-2", "xla"]["share"] == pytest.approx(rows["copy-2", "xla"]["work"] / 20e-6 / 1e12)
    assert rows["decode-tiny", "auto"]["ratios"] == {"attention alone": 1.0, "write, then attention": 1.0}
    assert "| copy-2 | 20.0 (" in report.markdown(found)


def test_cache_benchmark_refuses_wrong_results_and_names(capsys):
    drawn = inputs.make(dataclasses.replace(TINY, num_kv_heads=8, head_size=128), prefill=False, pool_bytes=1 << 20)
    ours, _ = bench_cache.copy_contenders(bench_cache.Copy(2), drawn)
    with pytest.raises(ValueError, match="wrong result: the key cache differs"):
        ours.check((), (drawn.key_cache, drawn.value_cache))
    with pytest.raises(SystemExit):
        bench_cache.main(["--cases", "no-such"])
    assert "no-such" in capsys.readouterr().err


def test_kernels_are_summed_by_call(monkeypatch):
    def kernel_times(run):
        calls.clear()
        run()
        return [(name, us) for _ in calls for name, us in (("attend", 3.0), ("reduce", 1.0))]

    calls = []
    monkeypatch.setattr(timing, "kernel_times", kernel_times)
    # What the profiler takes as it is, without jitting it.
    assert isinstance(timing._Launches(print), jax.stages.Wrapped)
    timed = timing.time_calls(lambda x: calls.append(x), [(1,), (2,), (3,)], seconds=1e-4)
    assert (timed.us, timed.kernels) == (4.0, (("attend", 3.0), ("reduce", 1.0)))


@pytest.mark.parametrize("direction", ["out", "in"])
def test_swaps_are_checked_before_they_are_timed(direction):
    assert bench_swap.swap_seconds(4, direction, "xla", num_blocks=8) > 0
    wrong = lambda *caches, implementation: caches[2:4]  # noqa: E731
    with mock.patch("paged_jax.swap_blocks", wrong), pytest.raises(ValueError, match="wrong result"):
        bench_swap.swap_seconds(4, direction, "xla", num_blocks=8)


def test_a_step_runs_through_all_layers():
    stack = bench_step.Stack(2, 2, 64, 4, 4, 64, 16)
    made = bench_step.make(stack)
    step, captured = bench_step.compile_step(stack, made)
    assert not captured  # command buffers are GPUs'
    hidden, caches = step(np.ones((2, 256), jnp.bfloat16), made[1], np.full(2, 64, np.int32))
    assert np.isfinite(np.asarray(hidden, np.float32)).all()
    for cache in caches:  # one token of each sequence
        written = np.asarray(cache.key_cache, np.float32).any(axis=(1, 3))
        assert written.sum() == 2
