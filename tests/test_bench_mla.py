"""The benchmark of latent attention, without a GPU: its calls by XLA, and results that are wrong."""

import jax
import pytest

from benchmarks import bench_mla, timing
from benchmarks.mla_cases import Case


@pytest.fixture(autouse=True)
def made_up_times(monkeypatch):
    monkeypatch.setattr(timing, "time_calls", lambda fn, argsets: timing.Timing(20.0, 19.0, 2, (("kernel", 20.0),)))


@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_row_is_compiled_ahead_and_checked(num_queries):
    case = Case("small", 2, (40, 70), num_queries)
    compiled = bench_mla.harness.compile_all({"small": lambda: bench_mla.lower(case, "xla")})
    row = bench_mla._row(case, "xla", compiled["small"])
    assert (row["us"], row["kernels"]) == (20.0, (("kernel", 20.0),))
    assert row["error"] < 1e-2


def test_rows_without_a_time_say_why():
    case = Case("small", 2, (40, 70))

    def of_the_query():
        shapes = jax.eval_shape(lambda: bench_mla._argsets(case))
        return jax.jit(lambda query, *_: query[..., : bench_mla.VALUE_SIZE]).lower(*shapes[0])

    compiled = bench_mla.harness.compile_all({"wrong": of_the_query, "none": lambda: 1 / 0})
    assert "relative error" in bench_mla._row(case, "xla", compiled["wrong"])["reason"]
    assert "division by zero" in bench_mla._row(case, "xla", compiled["none"])["reason"]
