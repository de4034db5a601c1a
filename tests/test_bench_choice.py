"""The benchmark of the choice between implementations, as far as it goes without a GPU."""

import pytest

from benchmarks import bench_choice, cases


def test_shapes_are_drawn_the_same_every_time():
    drawn = cases.random_decode(12)
    assert drawn == cases.random_decode(12)
    assert drawn[:5] == cases.random_decode(5)
    assert drawn != cases.random_decode(12, seed=1)
    assert len({case.name for case in drawn}) == 12
    assert len({(case.num_heads, case.num_kv_heads, case.head_size, case.cache_dtype) for case in drawn}) > 8


def test_regret_is_over_the_fastest():
    times = {"a": {"triton": 3.0, "mosaic_gpu": 2.0}, "b": {"triton": 4.0}}
    choices = {"a": "triton", "b": "triton"}
    assert bench_choice.regrets(times, choices) == pytest.approx({"a": 0.5, "b": 0.0})


def test_rows_become_regrets():
    drawn = cases.random_decode(2)
    one = bench_choice.chosen(drawn[0])
    other = "fastest"
    rows = [
        {"case": drawn[0].name, "contender": one, "us": 30.0},
        {"case": drawn[0].name, "contender": other, "us": 24.0},
        {"case": drawn[1].name, "contender": "mosaic_gpu", "failed": "no"},
    ]
    found = bench_choice.summary(drawn, rows)
    assert found["cases"] == pytest.approx({drawn[0].name: 0.25})
    assert found["largest"] == found["mean"] == pytest.approx(0.25)
