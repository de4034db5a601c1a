"""Times prefill attention beside peers that have contiguous keys: `python -m benchmarks.bench_prefill`."""

import operator
import sys
from collections.abc import Sequence

from benchmarks import cases, harness, peers
from benchmarks.bench_ragged import ceiling, implementation

BENCHMARK = harness.Benchmark(
    op="prefill",
    cases=cases.PREFILL,
    prefill=True,
    work=operator.attrgetter("causal_flops"),
    ceiling=ceiling,
    implementation=implementation,
    peers=peers.PREFILL,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    return harness.main(BENCHMARK, argv)


if __name__ == "__main__":
    sys.exit(main())
