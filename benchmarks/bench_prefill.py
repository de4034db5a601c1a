"""Times prefill attention beside peers that have contiguous keys: `python -m benchmarks.bench_prefill`."""

import sys
from collections.abc import Sequence

from benchmarks import cases, harness, peers, timing
from benchmarks.bench_ragged import implementation

BENCHMARK = harness.Benchmark(
    op="prefill",
    cases=cases.PREFILL,
    prefill=True,
    work=lambda case: case.causal_flops,
    ceiling=lambda _: timing.matmul_ceiling(),
    implementation=implementation,
    peers=peers.PREFILL,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    return harness.main(BENCHMARK, argv)


if __name__ == "__main__":
    sys.exit(main())
