"""The benchmarks' peers, without a GPU: which configurations they get, what they refuse, and how they are timed."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest

from benchmarks import (
    bench_decode,
    bench_model,
    bench_ragged,
    bench_serving,
    cases,
    flashinfer_kernels,
    harness,
    inputs,
    model_steps,
    peers,
    timing,
    torch_process,
)
from benchmarks.models import MODELS
from benchmarks.serving_requests import Request
from tests.test_benchmarks import TINY, fake_timer


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (512, {(splits, pages) for splits in (1, 8, 32) for pages in (4, 8, 16)}),
        (256, {(splits, pages) for splits in (1, 8, 32) for pages in (4, 8, 16)} - {(32, 16)}),
        (615, {(1, 1), (5, 1), (41, 1)}),
        (1, {(1, 1)}),
        (96, {(1, 4), (1, 8), (1, 16), (8, 4), (32, 1)}),
    ],
)
def test_configurations_of_jaxs_op(width, expected):
    """Every width of tables gets some, and none that the op refuses, which asserts that both numbers divide."""
    found = peers.pallas_configurations(width)
    assert set(found) == expected
    assert len(found) == len(expected)


def test_jaxs_op_takes_a_table_of_any_width():
    """Tracing it is enough for the op to refuse a configuration."""
    case = dataclasses.replace(TINY, name="odd", seq_lens=(80, 33), head_size=64)
    drawn = inputs.make(case, pool_bytes=1 << 18)
    assert drawn.block_tables[0].shape == (2, 5)
    candidates = peers.pallas_decode(case, drawn)
    assert [candidate.label for candidate in candidates] == ["k_splits 1, 1 pages", "k_splits 5, 1 pages"]
    for candidate in candidates:
        jax.eval_shape(candidate.fn, *candidate.argsets[0])


FLASHINFER_CASE = peers.TorchPeers.message(cases.Case("a", (40, 17, 64), 4, 2, 64))
SOME, ALL = {"query_lens": (1, 17, 5)}, {"query_lens": (40, 17, 64)}


@pytest.mark.parametrize(
    ("contender", "change", "reason"),
    [
        ("flashinfer", SOME, "takes one query a sequence"),
        ("flashinfer-xqa", ALL, "takes one query a sequence"),
        ("flashinfer-fa2", SOME | {"cache_dtype": "float8_e4m3fn", "sliding_window": 9}, None),
        ("flashinfer-fa3", ALL | {"sliding_window": 9}, None),
        ("flashinfer-fa3", {"cache_dtype": "float8_e4m3fn"}, "no float8_e4m3fn cache for bfloat16 queries"),
        ("flashinfer-batch", ALL | {"cache_dtype": "float8_e4m3fn"}, None),
        ("flashinfer-batch", {"sliding_window": 9}, "no window"),
        ("flashinfer-pod", SOME, None),
        ("flashinfer-pod", ALL, "takes prompts and single queries together"),
        ("flashinfer-pod", {}, "takes prompts and single queries together"),
        ("flashinfer-pod", SOME | {"num_heads": 64, "num_kv_heads": 2}, "no groups of more than 16 query heads"),
        ("flashinfer", {}, None),
        ("flashinfer", {"layout": "vllm"}, "no layout vllm"),
        ("flashinfer", {"block_size": 8}, None),
        ("flashinfer", {"head_size": 96}, "no heads of 96"),
        ("flashinfer-fa2", {"cache_dtype": "int8"}, "no int8 cache for bfloat16 queries"),
        ("flashinfer-xqa", {"head_size": 96, "cache_dtype": "int8"}, None),
        ("flashinfer-xqa", {}, None),
        ("flashinfer-xqa", {"cache_dtype": "float8_e4m3fn"}, None),
        ("flashinfer-xqa", {"layout": "vllm"}, "no layout vllm"),
        ("flashinfer-xqa", {"block_size": 8}, "no block size 8"),
        ("flashinfer-xqa", {"cache_dtype": "float8_e5m2"}, "no float8_e5m2 cache for bfloat16 queries"),
        ("flashinfer-xqa", {"num_heads": 64, "num_kv_heads": 1}, "no groups of more than 32 query heads"),
    ],
)
def test_what_flashinfer_refuses(contender, change, reason):
    assert flashinfer_kernels.refusal(contender, FLASHINFER_CASE | change) == reason


def test_flashinfers_block_table():
    assert flashinfer_kernels.block_counts(FLASHINFER_CASE) == [3, 2, 4]
    table = flashinfer_kernels.padded_table(FLASHINFER_CASE, [8, 7, 6, 5, 4, 3, 2, 1, 9])
    assert table == [[8, 7, 6, 0], [5, 4, 0, 0], [3, 2, 1, 9]]


def test_flashinfers_kernels_are_summed_by_call():
    # The name of XQA's kernel is in small letters. Copies and memsets do not count. The profiler's order is random.
    seen = [("kernel_mha", 10.0, 4.0), ("Memset (Device)", 12.0, 9.0), ("MergeStatesKernel", 15.0, 1.0)]
    seen += [("kernel_mha", 30.0, 5.0), ("MergeStatesKernel", 35.0, 2.0)]
    assert torch_process.sums_by_call(reversed(seen), 2) == [5.0, 7.0]
    for wrong in (seen[:-1], [], seen[1:2]):
        with pytest.raises(RuntimeError, match="in 2 calls"):
            torch_process.sums_by_call(wrong, 2)


def no_ceiling(work):
    return timing.Ceiling("GB/s", 1000.0, {}, "made up")


def test_flashinfers_process_answers_for_every_case_and_contender(tmp_path, monkeypatch):
    """It has no GPU here, and perhaps no PyTorch: each row says so, and the run goes on."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    benchmark = dataclasses.replace(bench_decode.BENCHMARK, ceiling=no_ceiling, peers={})
    two = [TINY, dataclasses.replace(TINY, name="small", seq_lens=(5,))]
    found = harness.run(benchmark, two, [], peers.TORCH, pool_bytes=1 << 18, timer=fake_timer)
    rows = [(row["case"], row["contender"]) for row in found["rows"]]
    assert rows == [(case.name, name) for case in two for name in peers.TORCH]
    reasons = {row["absent"] for row in found["rows"]}
    assert "its process ended early" not in reasons
    assert all(reasons)


class Stub:
    """Stands in for the process: it ends after the first answer."""

    def __init__(self, *args, **options):
        self.stdin, self.stdout = (
            io.StringIO(),
            io.StringIO('{"contender": "flashinfer-fa2", "name": "tiny", "us": 5}\n'),
        )
        self.kill = self.wait = lambda: None


def test_a_process_that_ends_early_owes_the_rest(monkeypatch):
    monkeypatch.setattr(peers.subprocess, "Popen", Stub)
    process = peers.TorchPeers([TINY], ["flashinfer-fa2", "flashinfer-pod"], seconds=0.03, rested=False)
    told = json.loads(process._process.stdin.getvalue())
    assert told["contenders"] == ["flashinfer-fa2", "flashinfer-pod"]
    assert told["cases"][0]["query_lens"] == [1, 1, 1]
    assert (told["cases"][0]["seconds"], told["cases"][0]["rested"]) == (0.03, False)
    ended = {"absent": "its process ended early"}
    expected = [("flashinfer-fa2", {"us": 5}), ("flashinfer-pod", ended)]
    assert [(answer.contender, answer.fields) for answer in process.answers()] == expected


@pytest.mark.parametrize(
    ("peer", "change", "reason"),
    [
        ("cudnn", {"query_lens": (1, 17, 5)}, "whole prompts only"),
        ("cudnn", {"query_lens": (1, 1, 1), "sliding_window": 9}, "no window"),
        ("cudnn", {"query_lens": (40, 17, 64), "cache_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ("cudnn-contiguous", {"query_lens": (40, 17, 64)}, "of one length"),
        ("attention_mgpu", {"query_lens": (5, 5, 5), "seq_lens": (40, 40, 40)}, "of one length"),
    ],
)
def test_what_peers_of_ragged_batches_refuse(peer, change, reason):
    case = dataclasses.replace(TINY, **change)
    drawn = inputs.make(case, pool_bytes=1 << 18)
    with pytest.raises(peers.Absent, match=reason):
        bench_ragged.BENCHMARK.peers[peer](case, drawn)


@pytest.mark.parametrize("query_lens", [(40, 17, 64), (1, 1, 1)])
def test_cudnn_gets_padded_queries(query_lens, monkeypatch):
    """Each query is where `rows` looks for its output, and the pool of each call has the blocks of its table."""
    case = dataclasses.replace(TINY, query_lens=query_lens)
    drawn = inputs.make(case, pool_bytes=1 << 18)
    (candidate,) = peers.cudnn_paged(case, drawn)
    padded, key, _, table, seq_lens, lens = candidate.argsets[1]
    assert padded.shape == (3, 4, max(query_lens), 32)
    assert (lens.tolist(), seq_lens.tolist()) == (list(query_lens), [40, 17, 64])
    index = np.arange(sum(query_lens))
    np.testing.assert_array_equal(candidate.rows(padded, index), drawn.query)
    np.testing.assert_array_equal(key[table], drawn.key_cache[drawn.block_tables[1]])


@pytest.mark.parametrize("value", ["", "/some/folder"])
def test_peers_find_tritons_cache(monkeypatch, tmp_path, value):
    """Their processes know no empty `TRITON_CACHE_DIR`, which jax-triton 0.3 sets in ours; Triton fails with it."""
    program = tmp_path / "python"  # hears what it is asked, and says in each peer's words what its environment has
    answer = '{"model": "m", "phase": "k", "num_seqs": 1, "contender": "flashinfer", "name": "tiny", "absent": "%s"}'
    program.write_text(f"#!/bin/sh\nread work\nread go\nprintf '{answer}' \"${{TRITON_CACHE_DIR-unset}}\"\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setenv("TRITON_CACHE_DIR", value)
    (of_model,) = bench_model.peer_answers({}, model_steps.Work([], [], 32), 60).values()
    of_serving = bench_serving.transformers_answer(MODELS["llama3-8b"], [Request([1], 1, 0.0)], 60.0)
    flashinfer = peers.TorchPeers([dataclasses.replace(TINY, name="tiny")], ["flashinfer"])
    try:
        (of_flashinfer,) = flashinfer.answers()
    finally:
        flashinfer.close()
    told = [answer["absent"] for answer in (of_model, of_serving, of_flashinfer.fields)]
    assert told == [value or "unset"] * 3
