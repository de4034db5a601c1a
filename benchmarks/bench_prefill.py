"""Times prefill attention beside peers that have contiguous keys: `python -m benchmarks.bench_prefill`."""

import functools
import sys
from collections.abc import Sequence
from typing import get_args

import jax

import paged_jax
from benchmarks import cases, harness, peers, timing
from benchmarks.inputs import Inputs

IMPLEMENTATIONS: tuple[paged_jax.Implementation, ...] = get_args(paged_jax.Implementation)


def implementation(name: str) -> peers.Build:
    """Makes a contender of ours from its name on the command line, "auto" or an implementation.

    Raises:
      ValueError: another name.
    """
    chosen = name.removeprefix("auto:")
    if chosen not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"no implementation is named {name}; there are auto, {', '.join(IMPLEMENTATIONS)}")
    op = functools.partial(paged_jax.ragged_paged_attention, implementation=None if chosen == "auto" else chosen)

    def build(case: cases.Case, inputs: Inputs) -> list[peers.Candidate]:
        attend = jax.jit(functools.partial(op, layout=case.layout))
        pools = inputs.query, inputs.key_cache, inputs.value_cache
        rest = inputs.seq_lens, inputs.query_start_loc
        return [peers.Candidate("", attend, [(*pools, table, *rest) for table in inputs.block_tables])]

    return build


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
