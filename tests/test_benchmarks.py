"""The benchmarks, without a GPU: their list of cases, the whole harness on a tiny case, the report and the plot."""

import dataclasses
import json
import os
import runpy
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from benchmarks import (
    bench_cache,
    bench_ceilings,
    bench_decode,
    bench_experts,
    bench_ragged,
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
from examples import moe
from examples.config import ExpertsConfig

TINY = cases.Case("tiny", (40, 17, 64), 4, 2, 32)


NAMES = ["bench_decode", "bench_ragged", "bench_choice", "bench_cache", "bench_swap", "bench_step", "bench_ceilings"]
NAMES += ["bench_model", "bench_serving", "bench_experts"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_time_without_a_gpu(name, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr("sys.argv", [name])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)  # runpy warns of one that is imported
    with pytest.raises(SystemExit) as exit:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert exit.value.code == 2
    assert "nothing to time" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--cases", "no-such"], ["--implementations", "v3"], ["--peers", "no-such"]])
def test_wrong_names_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        bench_decode.main(argv)
    assert argv[1] in capsys.readouterr().err


def test_cases_get_blocks_of_each_size(monkeypatch):
    def run(benchmark, cases, implementations, peer_names, *, out, processes):
        called.extend((case.name, case.block_size) for case in cases)

    called = []
    monkeypatch.setattr(harness, "has_gpu", lambda *_: True)
    monkeypatch.setattr(harness, "run", run)
    argv = ["--cases", "llama3-8b-1x512,llama3-8b-4x1024"]
    assert bench_decode.main([*argv, "--peers", "vllm-fa3", "--block-sizes", "16,128"]) == 0
    assert bench_decode.main(argv) == 0
    names = argv[1].split(",")
    wanted = [(f"{name}-blocks-of-{size}", size) for size in (16, 128) for name in names]
    assert called == wanted + [(name, 16) for name in names]


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
    assert cases.select(cases.DECODE, names[:2]) == cases.DECODE[:2]
    # Calls of a small case rotate through several tables, whose blocks together are far larger than an L2.
    assert inputs.rotations(by_name["llama3-8b-1x512"]) * by_name["llama3-8b-1x512"].kv_bytes >= 256 << 20


@pytest.mark.parametrize("name", ["v1:cuda", "v1/512", "v2/x", "v2:"])
def test_names_of_implementations(name):
    if name == "v2:":
        assert bench_decode.implementation(name)
    else:
        with pytest.raises(ValueError, match=name.partition(":")[0]):
            bench_decode.implementation(name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("layout", "dtype"), [("nhd", "bfloat16"), ("vllm", "int8")])
def test_truth_reads_every_layout(layout, dtype):
    case = dataclasses.replace(TINY, layout=layout, cache_dtype=dtype)
    drawn = inputs.make(case, pool_bytes=1 << 16)
    blocks = np.concatenate([np.asarray(table)[2] for table in drawn.block_tables])
    assert len(drawn.block_tables) > 1
    assert len(np.unique(blocks)) == len(blocks)
    (candidate,) = bench_decode.implementation("auto:xla")(case, drawn)
    index, expected = inputs.truth(case, drawn)
    found = np.asarray(candidate.fn(*candidate.argsets[0]), np.float32)[index]
    np.testing.assert_allclose(found, expected, atol=2e-2)


def fake_timer(fn, argsets):
    jax.block_until_ready([fn(*args) for args in argsets[:2]])
    return timing.Timing(20.0, 19.0, 2, (("kernel", 20.0),))


def _no_gpu_candidate(case, inputs):
    raise peers.Absent("not here")


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("bench", [bench_decode, bench_ragged], ids=["decode", "ragged"])
def test_harness_report_and_plot(bench, tmp_path, capsys):
    def ceiling(work):
        return timing.Ceiling("GB/s", 1000.0, {size: 5.0 for size in work}, "made up")

    wrong = lambda case, inputs: [peers.Candidate("", jax.jit(lambda q: q), [(inputs.query,)])]  # noqa: E731
    others = {"absent": _no_gpu_candidate, "wrong": wrong}
    if bench is bench_decode:
        others["xla-gather"] = peers.xla_decode
    benchmark = dataclasses.replace(bench.BENCHMARK, ceiling=ceiling, peers=others)
    file = tmp_path / "out" / "result.json"
    names = ["auto", "v2/32", "ragged"] if bench is bench_decode else ["auto"]
    harness.run(benchmark, [TINY], names, list(others), out=file, pool_bytes=1 << 22, timer=fake_timer)
    found = json.loads(file.read_text())
    rows = {row["contender"]: row for row in found["rows"]}
    assert {rows[name]["us"] for name in names} == {20}
    assert rows["auto"]["share"] == 0.25
    assert rows["absent"]["absent"] == "not here"
    assert "wrong result" in rows["wrong"]["failed"]
    assert rows["auto"]["ratios"] == ({"xla-gather": 1.0} if bench is bench_decode else {})
    text = report.markdown(found)
    assert "| tiny | 5.0 | 20.0 (25%) " in text
    assert "- absent, tiny: not here" in text
    report.main([str(file), "--cases", "tiny"])
    assert capsys.readouterr().out.endswith(text)
    with pytest.raises(SystemExit):
        report.main([str(file), "--cases", "no-such"])
    pytest.importorskip("matplotlib")
    plot.main([str(file), str(tmp_path / "plot.png")])
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_shares_of_older_files_are_of_the_same_kind():
    """Older files also have a share of a large read, which no table and no picture shows."""
    assert report.share({"share": 0.10, "share_at_size": 0.40}) == 0.40
    assert report.share({"us": 3.0}) is None


def test_plot_and_table_show_the_same_shares(tmp_path, monkeypatch):
    figures = []
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    row = {"case": "a", "kind": "implementation", "work": 100, "us": 8.0}
    rows = [row | {"contender": "auto", "share": 0.1, "share_at_size": 0.4}, row | {"contender": "v1", "share": 0.6}]
    machine = {"gpu": "g", "driver": "d", "jax": "j", "date": "today", "commit": None}
    found = machine | {"op": "decode", "ceiling": {"unit": "GB/s", "rate": 9.0, "us": {}, "note": ""}, "rows": rows}
    plot.plot(found, tmp_path / "none.png")
    drawn = {dots.get_label(): dots.get_offsets().tolist() for dots in figures[0].axes[0].collections}
    assert drawn == {"paged_jax auto": [[40.0, 0.0]], "paged_jax v1": [[60.0, 0.0]]}
    assert "| a | 8.0 (40%) | 8.0 (60%) |" in report.markdown(found)


def test_a_read_that_caches_may_hold_is_no_ceiling(monkeypatch):
    device = mock.Mock(mem_info=(60 << 20, 140 << 30))
    monkeypatch.setitem(sys.modules, "cupy", mock.MagicMock(cuda=mock.Mock(Device=lambda: device)))
    found = timing.read_ceiling([1 << 20])
    assert (found.rate, found.us) == (None, {})
    assert "only 60 MiB are free" in found.note


def test_ceilings_are_written_one_after_the_other(tmp_path, capsys):
    def fails():
        raise MemoryError("too large")

    file = tmp_path / "out" / "ceilings.json"
    works = {"pages": fails, "copy": lambda: [bench_ceilings.row("copy", 4000, 2.0)]}
    bench_ceilings.run(works, file)
    pages, copy = json.loads(file.read_text())["rows"]
    assert pages == {"case": "pages", "failed": "MemoryError: too large"}
    assert copy == {"case": "copy", "work": 4000, "us": 2.0, "rate": 2.0}
    assert "2.0 us      2.0 GB/s" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench_ceilings.main(["--works", "no-such"])
    assert "no-such" in capsys.readouterr().err


def test_the_fastest_launch_of_each_size_counts():
    # Two sizes, two launches, three repeats.
    times = [9, 5, 7, 3, 4, 90, 20, 20, 20, 10, 30, 40]
    assert bench_ceilings.fastest(times, (2, 2, 3)) == [4.0, 20.0]
    with pytest.raises(RuntimeError, match="11 kernels of 12"):
        bench_ceilings.fastest(times[1:], (2, 2, 3))


def test_pages_are_read_once_before_any_is_read_again():
    ordered, shuffled = (bench_ceilings.page_tables(100, shuffle) for shuffle in (False, True))
    assert ordered.tolist() == sorted(shuffled.tolist()) == list(range(100))
    assert ordered.tolist() != shuffled.tolist()
    assert list(bench_ceilings.read_starts(100, [40, 40, 40, 10, 50, 1])) == [0, 40, 0, 40, 50, 0]


def test_what_the_plain_writer_is_checked_against():
    """The op's own write into layout `vllm`, bit for bit."""
    rng = np.random.default_rng(0)
    shape = (5, bench_ceilings.NUM_KV_HEADS, bench_ceilings.HEAD_SIZE)
    key, value = (rng.standard_normal(shape).astype(jnp.bfloat16) for _ in "kv")
    slots = np.array([3, 40, 16, 47, 9], np.int32)
    found = bench_ceilings.written_vllm(key.view(np.uint16), value.view(np.uint16), slots, num_blocks=3)
    cache = paged_jax.PagedKVCache.create(3, 16, *shape[1:], layout="vllm")
    expected = paged_jax.write_to_paged_cache(key, value, cache.key_cache, cache.value_cache, slots, layout="vllm")
    for mine, exact in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, np.asarray(exact).view(np.uint16))


def _fake_cache_timer(fn, argsets):
    for args in argsets[:3]:
        jax.block_until_ready(fn(*args))  # before the next call takes the caches
    return timing.Timing(20.0, 19.0, 2, ())


@pytest.mark.slow
def test_cache_benchmark(tmp_path):
    works = [
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
    assert len(rows) == 2 * 2 + 3
    assert rows["copy-2", "auto"]["work"] == 2 * 2 * 2 * 16 * 8 * 128 * 2
    assert rows["copy-2", "xla"]["share"] == pytest.approx(rows["copy-2", "xla"]["work"] / 20e-6 / 1e12)
    assert rows["decode-tiny", "auto"]["ratios"] == {"attention alone": 1.0, "write, then attention": 1.0}
    assert "| copy-2 | 20.0 (" in report.markdown(found)


def test_cache_benchmark_refuses_wrong_results_and_names(capsys):
    drawn = inputs.make(dataclasses.replace(TINY, num_kv_heads=8, head_size=128), pool_bytes=1 << 20)
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
    # The profiler takes what looks jitted as it is.
    assert isinstance(timing._Launches(print), jax.stages.Wrapped)
    timed = timing.time_calls(lambda x: calls.append(x), [(1,), (2,), (3,)], seconds=1e-4)
    assert (timed.us, timed.kernels) == (4.0, (("attend", 3.0), ("reduce", 1.0)))
    pauses = []
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: pauses.append((seconds, len(calls))))
    rested = timing.time_calls(lambda x: calls.append(x), [(1,), (2,), (3,)], seconds=1e-4, rested=True)
    assert (timed.rested_us, rested.rested_us) == (None, 4.0)
    assert calls == [1, 2, 3, 1]
    assert pauses == [(timing.PAUSE, i) for i in range(4)]


@pytest.mark.parametrize("direction", ["out", "in"])
def test_swaps_are_checked_before_they_are_timed(direction):
    assert bench_swap.swap_seconds(4, direction, "xla", num_blocks=8) > 0
    wrong = lambda *caches, implementation: caches[2:4]  # noqa: E731
    with mock.patch("paged_jax.swap_blocks", wrong), pytest.raises(ValueError, match="wrong result"):
        bench_swap.swap_seconds(4, direction, "xla", num_blocks=8)


def test_experts_are_checked_before_they_are_timed(monkeypatch):
    config = ExpertsConfig(num_experts=4, num_chosen=2, intermediate_size=64)
    timed = timing.Timing(5.0, 5.0, 4, (("kernel", 5.0),))
    monkeypatch.setattr(timing, "time_calls", lambda *_: timed)
    monkeypatch.setattr(bench_experts, "_CALLS", 2)
    monkeypatch.setitem(bench_experts.LAYERS, "tiny", (64, config))
    contenders = {
        "ours": bench_experts.CONTENDERS["ours"],
        "wrong": lambda: mock.patch.object(moe, "_swiglu", lambda gate, up, config: gate),
    }
    ceiling = timing.Ceiling("GB/s", 100.0, {}, "")
    ours, wrong = bench_experts.run(["tiny"], [1], contenders, ceiling=ceiling)["rows"]
    assert (ours["us"], ours["kernels"]) == (5.0, [["kernel", 5.0]])
    assert ours["work"] == 2 * 3 * 64 * 64 * 2  # two experts, three matrices of bfloat16
    assert "error" in wrong["failed"]


def test_a_step_runs_through_all_layers():
    stack = bench_step.Stack(2, 2, 64, 4, 4, 64, 16)
    made = bench_step.make(stack)
    step, captured = bench_step.compile_step(stack, made)
    assert not captured  # only GPUs have command buffers
    hidden, caches = step(np.ones((2, 256), jnp.bfloat16), made[1], np.full(2, 64, np.int32))
    assert np.isfinite(np.asarray(hidden, np.float32)).all()
    for cache in caches:  # each layer's cache holds one new token of each sequence
        written = np.asarray(cache.key_cache, np.float32).any(axis=(1, 3))
        assert written.sum() == 2


def test_ratios_are_of_the_lower_times(tmp_path):
    """FlashAttention's launches have pauses between them in a row; after a pause, ours may take longer."""
    times = [("auto", "implementation", 9.0, 10.0), ("a", "peer", 12.0, 6.0), ("b", "peer", 18.0, None)]
    rows = [
        {"case": "some", "contender": name, "kind": kind, "us": us} | ({"rested_us": rested} if rested else {})
        for name, kind, us, rested in times
    ]
    harness.save({"rows": rows}, tmp_path / "some.json")
    assert json.loads((tmp_path / "some.json").read_text())["rows"][0]["ratios"] == {"a": 6 / 9, "b": 18 / 9}
