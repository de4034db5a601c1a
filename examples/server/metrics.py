"""The numbers at /metrics, in the form that Prometheus reads."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from paged_jax import engine

_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN_TOKENS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 20)
_REQUEST = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
# The engine's statistics that only grow, until it is reset.
_COUNTED = {"looked_up_tokens", "recomputed", "swapped", "steps", "prompt_tokens", "output_tokens", "draft_tokens"}
_COUNTED |= {"accepted_tokens", "shared_tokens"}


class Metrics:
    """The numbers at /metrics: the engine's statistics, and how long requests take."""

    def __init__(self):
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "paged_jax_http_requests", "Requests by route and status", ("route", "status"), registry=registry
        )
        self._first = Histogram(
            "paged_jax_first_token_seconds", "From arrival to the first token", buckets=_FIRST_TOKEN, registry=registry
        )
        self._between = Histogram(
            "paged_jax_between_tokens_seconds",
            "From one token of a text to the next",
            buckets=_BETWEEN_TOKENS,
            registry=registry,
        )
        self._whole = Histogram(
            "paged_jax_request_seconds", "From arrival to the last token", buckets=_REQUEST, registry=registry
        )
        self._is_well = Gauge("paged_jax_is_well", "Whether the engine can be relied on, 0 or 1", registry=registry)
        names = [name.removeprefix("num_") for name in engine.Stats.__dataclass_fields__ if name != "pools"]
        self._gauges = {
            name: Gauge(f"paged_jax_{name}", f"Engine: {name}", registry=registry)
            for name in names
            if name not in _COUNTED
        }
        self._counters = {
            name: Counter(f"paged_jax_{name}", f"Engine: {name} since the start of the server", registry=registry)
            for name in (*_COUNTED, "hit_tokens")
        }
        self._counted = dict.fromkeys(self._counters, 0)
        self._pools = Gauge(
            "paged_jax_pool_blocks",
            "Blocks of the layers of each sliding window (all: those that see everything) by state",
            ("window", "state"),
            registry=registry,
        )
        self._usage = Gauge(
            "paged_jax_pool_usage", "Fraction of each window's blocks in use", ("window",), registry=registry
        )

    def update(self, stats: engine.Stats | None, is_well: bool) -> None:
        """Takes over the engine's statistics, if there are any."""
        self._is_well.set(is_well)
        if stats is None:
            return
        names = [name for name in engine.Stats.__dataclass_fields__ if name != "pools"]
        values = {name.removeprefix("num_"): getattr(stats, name) for name in names}
        values["hit_tokens"] = round(stats.hit_rate * stats.num_looked_up_tokens)
        for name, gauge in self._gauges.items():
            gauge.set(values[name])
        for name, counter in self._counters.items():
            before, self._counted[name] = self._counted[name], values[name]
            # After a reset the engine counts from 0 again.
            counter.inc(values[name] - before if values[name] >= before else values[name])

        for pool in stats.pools:
            window = "all" if pool.sliding_window is None else str(pool.sliding_window)
            counts = {"free": pool.free_blocks, "cached": pool.cached_blocks, "held": pool.held_blocks}
            for state, count in counts.items():
                self._pools.labels(window, state).set(count)
            self._usage.labels(window).set(pool.held_blocks / max(sum(counts.values()), 1))

    def render(self) -> bytes:
        """All numbers as text."""
        return generate_latest(self._registry)

    def timer(self) -> "Timer":
        """Starts to time a request."""
        return Timer(self)


class Timer:
    """Times the tokens of one request, from its making on.

    Args:
        metrics: where the times go.
    """

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._began = time.perf_counter()
        self._last: dict[int, float] = {}  # when each choice had its last token

    def tokens(self, index: int, count: int) -> None:
        """Notes new tokens of a choice."""
        now = time.perf_counter()
        if not self._last:
            self._metrics._first.observe(now - self._began)
        if index in self._last:
            for _ in range(count):
                self._metrics._between.observe((now - self._last[index]) / count)
        self._last[index] = now

    def end(self) -> None:
        """Notes that the request is answered."""
        self._metrics._whole.observe(time.perf_counter() - self._began)
