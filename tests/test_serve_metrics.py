"""Tests the numbers at /metrics: which are counters, that they never fall, and the times of requests."""

import dataclasses

import pytest

from examples.server import metrics
from paged_jax.engine import PoolStats, Stats

POOLS = PoolStats(None, 1, 4, 5, 6, 7), PoolStats(9, 5, 20, 8, 9, 1)
STATS = Stats(**{field.name: 0 for field in dataclasses.fields(Stats)} | {"pools": POOLS})


def values_of(the_metrics):
    lines = the_metrics.render().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_counters_never_fall():
    """They do not fall even if the engine counts from 0 again after a failed step."""
    the_metrics = metrics.Metrics()
    total = 0
    for num_steps, added in ((5, 5), (7, 2), (7, 0), (3, 3), (4, 1)):
        the_metrics.update(dataclasses.replace(STATS, num_steps=num_steps, held_blocks=num_steps), True)
        total += added
        values = values_of(the_metrics)
        assert (values["paged_jax_steps_total"], values["paged_jax_held_blocks"]) == (total, num_steps)
    the_metrics.update(None, False)
    assert values_of(the_metrics)["paged_jax_steps_total"] == total
    assert values_of(the_metrics)["paged_jax_is_well"] == 0


def test_pools_are_counted_apart():
    the_metrics = metrics.Metrics()
    the_metrics.update(STATS, True)
    values = values_of(the_metrics)
    assert values['paged_jax_pool_blocks{state="cached",window="all"}'] == 6
    assert values['paged_jax_pool_blocks{state="free",window="9"}'] == 8
    assert values['paged_jax_pool_usage{window="all"}'] == 7 / 18


def test_what_only_grows_is_a_counter():
    the_metrics = metrics.Metrics()
    stats = dataclasses.replace(STATS, num_looked_up_tokens=10, hit_rate=0.3, num_output_tokens=6)
    the_metrics.update(stats, True)
    text, values = the_metrics.render().decode(), values_of(the_metrics)
    assert values["paged_jax_hit_tokens_total"] == 3
    assert values["paged_jax_output_tokens_total"] == 6
    assert values["paged_jax_is_well"] == 1
    for name in ("looked_up_tokens", "recomputed", "swapped", "steps", "prompt_tokens", "output_tokens", "hit_tokens"):
        assert f"# TYPE paged_jax_{name}_total counter" in text
    for name in ("waiting", "running", "free_blocks", "waste", "hit_rate", "tokens_per_second", "compiled"):
        assert f"# TYPE paged_jax_{name} gauge" in text


def test_times_of_a_request(monkeypatch):
    """The first token counts from the arrival, others from the one before in the same text; steps may bring several."""
    now = 100.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now)
    the_metrics = metrics.Metrics()
    timer = the_metrics.timer()
    for seconds, index, count in ((3.0, 0, 1), (0.5, 1, 1), (0.25, 0, 3), (90.0, 1, 1)):
        now += seconds
        timer.tokens(index, count)
    now += 30
    timer.end()
    values = values_of(the_metrics)
    assert values["paged_jax_first_token_seconds_sum"] == 3.0
    assert values["paged_jax_between_tokens_seconds_count"] == 4
    assert values["paged_jax_between_tokens_seconds_sum"] == pytest.approx(0.75 + 90.25)
    assert values["paged_jax_request_seconds_sum"] == 123.75
    assert values['paged_jax_request_seconds_bucket{le="120.0"}'] == 0
    assert values['paged_jax_request_seconds_bucket{le="240.0"}'] == 1


@pytest.mark.parametrize(
    ("name", "least", "most"), [("first_token", 0.01, 160), ("between_tokens", 0.005, 5), ("request", 0.5, 600)]
)
def test_buckets_fit_language_models(name, least, most):
    bounds = [
        key.split('"')[1] for key in values_of(metrics.Metrics()) if key.startswith(f"paged_jax_{name}_seconds_b")
    ]
    bounds = [float(bound) for bound in bounds]
    assert bounds == sorted(bounds)
    assert bounds[0] <= least
    assert bounds[-2] >= most
    assert sum(least <= bound <= most for bound in bounds) >= 12


def test_every_statistic_is_shown():
    """Each under its own name, with the number that it has."""
    names = [field.name for field in dataclasses.fields(Stats) if field.name != "pools"]
    stats = Stats(**{name: 10.0 + i for i, name in enumerate(names)} | {"hit_rate": 0.3, "pools": POOLS})
    the_metrics = metrics.Metrics()
    the_metrics.update(stats, True)
    found = {name: value for name, value in values_of(the_metrics).items() if "_seconds_" not in name}
    found = {name: value for name, value in found.items() if not name.endswith("_created")}
    counted = {"looked_up_tokens", "shared_tokens", "recomputed", "swapped", "steps", "prompt_tokens", "output_tokens"}
    counted |= {"draft_tokens", "accepted_tokens"}
    shown = {name.removeprefix("num_"): getattr(stats, name) for name in names}
    expected = {f"paged_jax_{name}" + "_total" * (name in counted): value for name, value in shown.items()}
    expected |= {"paged_jax_hit_tokens_total": round(0.3 * stats.num_looked_up_tokens), "paged_jax_is_well": 1}
    for window, pool in (("all", POOLS[0]), ("9", POOLS[1])):
        states = {"free": pool.free_blocks, "cached": pool.cached_blocks, "held": pool.held_blocks}
        for state, count in states.items():
            expected[f'paged_jax_pool_blocks{{state="{state}",window="{window}"}}'] = count
        expected[f'paged_jax_pool_usage{{window="{window}"}}'] = pool.held_blocks / sum(states.values())
    assert found == expected
    assert round(0.3 * stats.num_looked_up_tokens) != int(0.3 * stats.num_looked_up_tokens)
