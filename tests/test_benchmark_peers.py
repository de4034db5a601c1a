"""The benchmarks' peers, without a GPU: which configurations they get, what they refuse, and how they are timed."""

import dataclasses

import jax
import pytest

from benchmarks import bench_decode, cases, flashinfer_decode, harness, inputs, peers, timing
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
    """Every table gets some, and none that the op refuses: it asserts that both divide."""
    found = peers.pallas_configurations(width)
    assert set(found) == expected
    assert len(found) == len(expected)


def test_jaxs_op_takes_a_table_of_any_width():
    """Tracing it is enough for the op to refuse a configuration."""
    case = dataclasses.replace(TINY, name="odd", seq_lens=(80, 33), head_size=64)
    drawn = inputs.make(case, prefill=False, pool_bytes=1 << 18)
    assert drawn.block_tables[0].shape == (2, 5)
    candidates = peers.pallas_decode(case, drawn)
    assert [candidate.label for candidate in candidates] == ["k_splits 1, 1 pages", "k_splits 5, 1 pages"]
    for candidate in candidates:
        jax.eval_shape(candidate.fn, *candidate.argsets[0])


FLASHINFER_CASE = peers.FlashInfer._message(cases.Case("a", (40, 17, 64), 4, 2, 64))


@pytest.mark.parametrize(
    ("contender", "change", "reason"),
    [
        ("flashinfer", {}, None),
        ("flashinfer", {"layout": "vllm"}, "no layout vllm"),
        ("flashinfer", {"block_size": 8}, None),
        ("flashinfer-xqa", {}, None),
        ("flashinfer-xqa", {"cache_dtype": "float8_e4m3fn"}, None),
        ("flashinfer-xqa", {"layout": "vllm"}, "no layout vllm"),
        ("flashinfer-xqa", {"block_size": 8}, "no block size 8"),
        ("flashinfer-xqa", {"cache_dtype": "float8_e5m2"}, "no float8_e5m2 cache for bfloat16 queries"),
        ("flashinfer-xqa", {"num_heads": 64, "num_kv_heads": 1}, "no groups of more than 32 query heads"),
    ],
)
def test_what_flashinfer_refuses(contender, change, reason):
    assert flashinfer_decode.refusal(contender, FLASHINFER_CASE | change) == reason


def test_flashinfers_block_table():
    assert flashinfer_decode.block_counts(FLASHINFER_CASE) == [3, 2, 4]
    table = flashinfer_decode.padded_table(FLASHINFER_CASE, [8, 7, 6, 5, 4, 3, 2, 1, 9])
    assert table == [[8, 7, 6, 0], [5, 4, 0, 0], [3, 2, 1, 9]]


def test_flashinfers_kernels_are_summed_by_call():
    # XQA's kernel is written small; copies and memsets do not count; the profiler gives them in any order.
    seen = [("kernel_mha", 10.0, 4.0), ("Memset (Device)", 12.0, 9.0), ("MergeStatesKernel", 15.0, 1.0)]
    seen += [("kernel_mha", 30.0, 5.0), ("MergeStatesKernel", 35.0, 2.0)]
    assert flashinfer_decode.sums_by_call(reversed(seen), 2) == [5.0, 7.0]
    for wrong in (seen[:-1], [], seen[1:2]):
        with pytest.raises(RuntimeError, match="in 2 calls"):
            flashinfer_decode.sums_by_call(wrong, 2)


def test_flashinfers_process_answers_for_every_case_and_contender(tmp_path, monkeypatch):
    """It has no GPU here, and perhaps no PyTorch: each row says so, and the run goes on."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def ceiling(work):
        return timing.Ceiling("GB/s", 1000.0, {}, "made up")

    benchmark = dataclasses.replace(bench_decode.BENCHMARK, ceiling=ceiling, peers={})
    two = [TINY, dataclasses.replace(TINY, name="small", seq_lens=(5,))]
    found = harness.run(benchmark, two, [], peers.FLASHINFER, pool_bytes=1 << 18, timer=fake_timer)
    rows = [(row["case"], row["contender"]) for row in found["rows"]]
    assert rows == [(case.name, name) for case in two for name in peers.FLASHINFER]
    reasons = {row["absent"] for row in found["rows"]}
    assert "its process ended early" not in reasons
    assert all(reasons)
