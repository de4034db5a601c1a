"""The serving benchmark: its requests, its arithmetic, and all of its runs over a tiny model."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_serving, serving_report
from benchmarks.bench_serving import Rates, Step, Trace
from benchmarks.models import MODELS
from benchmarks.serving_requests import WORKLOADS, Request, Workload, make_requests, workload
from paged_jax import engine
from tests.conftest import QUICK_COMPILE

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
README = (RESULTS.parent / "README.md").read_text()


def test_the_documents_tables_are_what_the_files_say():
    """Serving's table as `benchmarks.serving_report` prints it, and the milliseconds and shares of whole models."""
    (file,) = set(re.findall(r"results/([\w-]+-serving\.json)", README))
    report = json.loads((RESULTS / file).read_text())
    whole = next(row for row in report["rows"] if row["case"] == "at-once")
    told = f"Serving {whole['requests']:,} requests, an 8B model writes {whole['tokens_per_s']:,.0f} tokens/s."
    assert told in (RESULTS.parents[1] / "README.md").read_text()
    printed = serving_report.markdown(report).splitlines()
    table = [line for line in printed if line.startswith("|")]
    assert len(table) > 6
    assert "\n".join(table) in README
    of_models = README.partition("## Whole models")[2].partition("\n## ")[0]
    (file,) = set(re.findall(r"results/([\w-]+-model\.json)", of_models))
    rows = json.loads((RESULTS / file).read_text())["rows"]
    for row in rows:
        if "us" not in row:  # a peer that did not run, or a batch that does not fit
            assert "absent" in row or re.search(r"take \d+ GB of \d+$", row["failed"])
            continue
        (line,) = [line for line in README.splitlines() if line.startswith(f"| `{row['case']}`")]
        cell = dict(zip(("device", "looped", "called", "torch"), line.split("|")[2:], strict=False))[row["contender"]]
        assert cell.strip().startswith(f"{row['us'] / 1e3:.2f} ")
        told = f"{row['share']:.0%}" if "share" in row else f"{row['tokens_per_s']:.0f} tokens/s"
        assert f"({told})" in cell


def test_requests_are_as_asked_for():
    requests = make_requests(workload("mixed"), 1000, 5000)
    lens, counts = [len(r.prompt) for r in requests], [r.max_tokens for r in requests]
    assert 128 <= min(lens) < 140
    assert 1012 < max(lens) <= 1024
    assert (min(counts), max(counts)) == (32, 256)
    assert 560 < np.mean(lens) < 592
    assert {r.arrival for r in requests} == {0}
    assert make_requests(workload("mixed"), 3, 5000) == make_requests(workload("mixed"), 3, 5000)
    shared = make_requests(workload("mixed"), 1000, 5000, is_shared=True)
    longest = max(shared, key=lambda r: len(r.prompt)).prompt
    for alone, together in zip(requests, shared, strict=True):
        half = len(together.prompt) // 2
        assert (len(together.prompt), together.max_tokens) == (len(alone.prompt), alone.max_tokens)
        assert together.prompt[:half] == longest[:half]
    assert len({tuple(r.prompt[-(len(r.prompt) // 2) :]) for r in shared}) == 1000
    arrivals = [r.arrival for r in make_requests(workload("mixed"), 1000, 5000, rate=50.0)]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(20, rel=0.1)


@pytest.mark.parametrize("name", WORKLOADS[1:])
def test_published_workloads(name):
    """Fixed lengths are exact; ShareGPT's lengths are those of vLLM's benchmark, a few hundred on average."""
    of = workload(name)
    requests = make_requests(of, 1200, 100)
    lens = [(len(request.prompt), request.max_tokens) for request in requests]
    assert max(map(sum, lens)) == of.longest
    if name == "sharegpt":
        assert lens[1000:] == lens[:200]
        assert of.longest <= 2048
        assert 300 < np.mean(lens, axis=0)[0] < 500 > np.mean(lens, axis=0)[1] > 300
        assert of.context == round(float(np.mean(lens[:1000], axis=0) @ (1, 0.5)))
    else:
        assert {f"{prompt}x{output}" for prompt, output in lens} == {name}


def test_the_bound_adds_up_what_the_bare_model_takes():
    rates = Rates(1000.0, {1: 100.0, 11: 200.0})
    assert rates.bound(500, [1, 6, 11, 0]) == pytest.approx(0.5 + 100e-6 + 150e-6 + 200e-6)


def test_a_run_is_described_by_its_stamps():
    stats = engine.Stats(0, 0, 9, 0, 0, 0.0, 8, 0.25, 0, 1, 2, 3, 7, 5, 0, 0, 0.0, 4)
    stamps = [[1.0, 1.5, 2.0], [1.0, 3.0]]
    steps = [Step(1.0, 0, 2), Step(1.5, 1, 2), Step(2.0, 1, 2), Step(3.0, 1, 1)]
    samples = [
        dataclasses.replace(stats, waste=0.1, num_waiting=1, num_running=2),
        dataclasses.replace(stats, waste=0.3),
    ]
    trace = Trace(stamps, steps, samples, 4.0, stats)
    requests = [Request([1, 2, 3], 3, 0.0), Request([1, 2, 3, 4], 2, 0.5)]
    row = bench_serving.describe(trace, requests, Rates(7.0, {1: 1e6, 2: 1e6}), 160, 1280)
    assert (row["output_tokens"], row["tokens_per_s"], row["prompt_tokens"]) == (5, 1.25, 7)
    assert row["share_of_bound"] == pytest.approx((1 + 3) / 4)
    assert row["first_token_ms"]["median"] == pytest.approx(750)
    assert row["between_tokens_ms"]["median"] == pytest.approx(500)
    assert row["waste"] == {"mean": pytest.approx(0.2), "most": 0.3}
    assert row["sequences"] == {"most": 2, "contiguous": 2, "mean while others wait": 2}
    assert (row["hit_rate"], row["preempted"]) == (0.25, 3)


@pytest.fixture
def setup():
    sizes = {"vocab_size": 96, "embedding_size": 64, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "layers": MODELS["llama3-8b"].layers[:1]}
    config = dataclasses.replace(MODELS["llama3-8b"], **sizes)
    engine_config = engine.EngineConfig(80, 8, 64, decode_rows=(8,), mixed_tokens=(64,), adjustments=False)
    sizes = {"requests": 24, "few": 6, "streamed": 24, "rate": 500.0}
    lengths = Workload((8, 64), (2, 16))
    return bench_serving.Setup("tiny", config, {}, 30, engine_config, lengths, **sizes, compiler_options=QUICK_COMPILE)


@pytest.mark.slow
def test_all_runs_over_a_tiny_model(setup, tmp_path):
    file, picture = tmp_path / "serving.json", tmp_path / "serving.png"
    bench_serving.run(setup, peer_seconds=60, out=file)
    report = json.loads(file.read_text())
    rows = {row["case"]: row for row in report["rows"] if row["contender"] == "engine"}
    assert tuple(rows) == bench_serving.RUNS
    requests = make_requests(setup.workload, 24, 96)
    for name in ("at-once", "at-once-shared", "poisson"):
        assert rows[name]["output_tokens"] == sum(r.max_tokens for r in requests)
    assert rows["prompts"]["output_tokens"] == rows["subset"]["requests"] == 6
    assert rows["at-once"]["prompt_tokens_computed"] >= rows["at-once"]["prompt_tokens"]
    assert rows["prompts-shared"]["prompt_tokens_computed"] < rows["prompts"]["prompt_tokens_computed"]
    assert rows["at-once"]["sequences"]["contiguous"] == 30 * 16 // 80
    assert all(row["share_of_bound"] > 0 for row in rows.values())
    (peer,) = [row for row in report["rows"] if row["contender"] == "transformers"]
    assert set(rows["subset"]["times"]) == ({"transformers"} if "us" in peer else set())
    assert peer.get("output_tokens", rows["subset"]["output_tokens"]) == rows["subset"]["output_tokens"]
    assert serving_report.main([str(file), str(picture)]) == 0
    assert picture.stat().st_size > 10_000


def test_the_table_has_a_line_for_each_run(capsys, tmp_path):
    times = {"median": 1.0, "p99": 2.0, "percentiles": [0.0] * 101}
    row = {"case": "at-once", "contender": "engine", "us": 2e6, "requests": 3, "tokens_per_s": 7.0, "busy": 0.5}
    row |= {"first_token_ms": times, "between_tokens_ms": times, "sequences": {"most": 4, "contiguous": 2}}
    report = {"gpu": "G", "jax": "1", "date": "today", "commit": "c", "model": "m", "num_blocks": 3, "block_size": 16}
    report |= {"engine": {"max_num_seqs": 4, "max_tokens_per_step": 64}}
    prompts = [row | {"case": "prompts"}, row | {"case": "prompts-shared", "us": 1e6}]
    report["rows"] = [row, *prompts, {"case": "subset", "contender": "transformers", "absent": "not here"}]
    file = tmp_path / "x.json"
    file.write_text(json.dumps(report))
    assert serving_report.main([str(file)]) == 0
    out = capsys.readouterr().out
    assert "- prompts-shared takes 0.50 of the time of prompts" in out
    assert "| at-once | 3 | 2.00 | 7 | 50.0% | - | 1, 2 | 1.0, 2.0 | - | - | - | 4, - (2) |" in out
    assert "- subset, transformers: not here" in out


def test_peers_are_compared_by_tokens_a_second(capsys, tmp_path):
    """One that was stopped has generated fewer tokens, in another time."""
    times = {"median": 1.0, "p99": 2.0, "percentiles": [0.0] * 101}
    row = {"case": "subset", "requests": 3, "first_token_ms": times, "between_tokens_ms": times}
    ours = row | {"contender": "engine", "kind": "implementation"}
    ours |= {"us": 2e6, "output_tokens": 1200, "tokens_per_s": 600.0}
    other = ours | {"case": "at-once"}
    peer = row | {"contender": "transformers", "kind": "peer"}
    peer |= {"us": 5e6, "output_tokens": 200, "tokens_per_s": 40.0}
    report = {"gpu": "G", "jax": "1", "date": "today", "commit": "c", "model": "m", "num_blocks": 3, "block_size": 16}
    report |= {"engine": {"max_num_seqs": 4, "max_tokens_per_step": 64}, "rows": [other, ours, peer]}
    file = tmp_path / "x.json"
    bench_serving._say(report, file)
    assert [row.get("times") for row in json.loads(file.read_text())["rows"]] == [{}, {"transformers": 15.0}, None]
    capsys.readouterr()
    assert serving_report.main([str(file)]) == 0
    told = "- subset: 15.0 times the output tokens a second of transformers, stopped at 200 tokens"
    assert told in capsys.readouterr().out
