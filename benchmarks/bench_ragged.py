"""Times ragged batches of decodes, chunks and prompts: `python -m benchmarks.bench_ragged`.

The floor of a batch is the larger of two times: its operations at the rate of a large matrix product, and its bytes of
keys and values at the rate of a large read. Both are counted in operations, so that one ceiling serves all rows.
Prompts bring a GPU to its power limit, so each row also has a time after a pause.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

import jax

import paged_jax
from benchmarks import cases, harness, peers, timing
from benchmarks.inputs import Inputs

IMPLEMENTATIONS: tuple[paged_jax.Implementation, ...] = get_args(paged_jax.Implementation)

# An H200 has reached 816 TFLOP/s in a matrix product and 4653 GB/s in a read. `bench_ceilings` measures both.
_OPERATIONS_PER_BYTE = 175

# Up to this many rows (queries times a group's heads) a sequence, `mosaic_gpu` has a smaller kernel; for one query, it
# has the decode kernel.
_BOUNDED_ROWS = 64


def work(case: cases.Case) -> int:
    """A batch's operations, or those that fit into the time of a read of its keys and values, whichever are more."""
    return max(case.seen_flops, case.kv_bytes * _OPERATIONS_PER_BYTE)


def ceiling(_: Iterable[int]) -> timing.Ceiling:
    """The rate of a large matrix product, which does not depend on the work."""
    return timing.matmul_ceiling()


def implementation(name: str) -> peers.Build:
    """Makes a contender of ours from its name on the command line, "auto" or an implementation.

    With a name that ends in "/bounded", the op is told the most queries of a sequence (`max_query_len`).

    Raises:
      ValueError: the name is neither, or ends in something else.
    """
    base, slash, ending = name.partition("/")
    chosen = base.removeprefix("auto:")
    if slash and ending != "bounded":
        raise ValueError(f"nothing is named {ending}; there is {base}/bounded")
    if chosen not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"no implementation is named {name}; there are auto, {', '.join(IMPLEMENTATIONS)}")
    op = functools.partial(paged_jax.ragged_paged_attention, implementation=None if chosen == "auto" else chosen)
    return functools.partial(candidates, op, bounded=bool(ending))


def candidates(op: Callable, case: cases.Case, inputs: Inputs, *, bounded: bool = False) -> list[peers.Candidate]:
    """The only candidate for a case with `op`, which has the parameters of `ragged_paged_attention`.

    Raises:
      peers.Absent: a bound would change nothing.
    """
    group = case.num_heads // case.num_kv_heads
    if bounded and not max(case.num_queries) * group <= _BOUNDED_ROWS < len(inputs.query) * group:
        raise peers.Absent("the kernel is the same with a bound and without one")
    bounds = {"max_query_len": max(case.num_queries)} if bounded else {}

    @jax.jit
    def attend(*arrays):
        *arrays, k_scale, v_scale = arrays
        options = {"layout": case.layout, "sliding_window": case.sliding_window, **bounds}
        return op(*arrays, **options, k_scale=k_scale, v_scale=v_scale)

    pools = inputs.query, inputs.key_cache, inputs.value_cache
    rest = inputs.seq_lens, inputs.query_start_loc, inputs.k_scale, inputs.v_scale
    label = ", ".join(f"{name} {bound}" for name, bound in bounds.items())
    return [peers.Candidate(label, attend, [(*pools, table, *rest) for table in inputs.block_tables])]


BENCHMARK = harness.Benchmark(
    op="ragged",
    cases=(*cases.RAGGED, *cases.MORE_RAGGED),
    work=work,
    ceiling=ceiling,
    implementation=implementation,
    peers=peers.RAGGED,
    elsewhere=peers.TORCH,
    timer=functools.partial(timing.time_calls, rested=True),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    return harness.main(BENCHMARK, argv)


if __name__ == "__main__":
    sys.exit(main())
