"""Times ragged batches, of decodes, chunks and prompts: `python -m benchmarks.bench_ragged`.

The floor of a batch is the larger of two times: its operations at the rate of a large matrix product, and the bytes of
its keys and values at the rate of a large read. Both are counted in operations, so that one ceiling serves all rows.
"""

import functools
import sys
from collections.abc import Sequence
from typing import get_args

import jax

import paged_jax
from benchmarks import cases, harness, peers, timing
from benchmarks.inputs import Inputs

IMPLEMENTATIONS: tuple[paged_jax.Implementation, ...] = get_args(paged_jax.Implementation)

# Of an H200: 816 TFLOP/s of a matrix product, 4653 GB/s of a read (benchmarks/README.md, "Ceilings").
_OPERATIONS_PER_BYTE = 175


def work(case: cases.Case) -> int:
    """Operations of a batch, or those that fit into the time in which its keys and values are read."""
    return max(case.seen_flops, case.kv_bytes * _OPERATIONS_PER_BYTE)


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
        scales = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
        attend = jax.jit(functools.partial(op, layout=case.layout, sliding_window=case.sliding_window, **scales))
        pools = inputs.query, inputs.key_cache, inputs.value_cache
        rest = inputs.seq_lens, inputs.query_start_loc
        return [peers.Candidate("", attend, [(*pools, table, *rest) for table in inputs.block_tables])]

    return build


def _of_whole_prompts(build: peers.Build) -> peers.Build:
    """A peer that attends to contiguous prompts of one length, and to all of each."""

    def checked(case: cases.Case, inputs: Inputs) -> Sequence[peers.Candidate]:
        if case.query_lens != case.seq_lens or len(set(case.seq_lens)) > 1 or case.sliding_window is not None:
            raise peers.Absent("takes whole prompts of one length")
        return build(case, inputs)

    return checked


BENCHMARK = harness.Benchmark(
    op="ragged",
    cases=cases.RAGGED,
    prefill=True,
    work=work,
    ceiling=lambda _: timing.matmul_ceiling(),
    implementation=implementation,
    peers={name: _of_whole_prompts(build) for name, build in peers.PREFILL.items()},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    return harness.main(BENCHMARK, argv)


if __name__ == "__main__":
    sys.exit(main())
