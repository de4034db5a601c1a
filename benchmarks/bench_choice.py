"""Times cases with every implementation, and finds what the automatic choice between them loses.

    python -m benchmarks.bench_choice --op decode
    python -m benchmarks.bench_choice --op ragged --processes 12
    python -m benchmarks.bench_choice --op models

Nobody tuned for these cases. A seeded generator draws heads, groups, head sizes, dtypes, layouts and lengths of decode
(`cases.random_decode`), or batches as engines compose them (`cases.random_ragged`). "models" are not drawn, but real
models' decode shapes that `bench_decode` lacks (`cases.MORE_DECODE`). For ragged attention, Triton is also timed with
other sizes of its query tiles. A case's regret is the chosen implementation's time over the fastest one's, minus 1
(`benchmarks.report`).

    python -m benchmarks.bench_choice --op ragged --count 60 --block-sizes 16,128 --implementations auto \\
        --peers vllm-fa3 --seconds 0.03 --processes 10

With peers, the report has rows of ours and of the peers for each case. The last lines say in how many cases the first
of our implementations leads, and where it is furthest behind. Each case is timed with blocks of each given size.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import jax

import paged_jax
from benchmarks import bench_decode, bench_ragged, cases, harness, measure, peers, report, timing
from benchmarks import inputs as inputs_lib
from paged_jax import _validate
from paged_jax.kernels.triton import ragged, tuning
from paged_jax.options import Options

TILES = (16, 64, 128, 256)  # rows of a query tile, each a query of one head
IMPLEMENTATIONS = {
    "decode": ("mosaic_gpu", "triton"),
    "ragged": ("mosaic_gpu", "triton", "triton/16", "triton/64", "triton/256"),
    "models": ("mosaic_gpu", "triton"),
}
NUM_CASES = {"decode": 40, "ragged": 30, "models": len(cases.MORE_DECODE)}


def ragged_implementation(name: str) -> peers.Build:
    """Makes a contender from its name: an implementation, or "triton/<rows>" for query tiles of this many rows.

    Raises:
      ValueError: the name is neither.
    """
    base, slash, rows = name.partition("/")
    if not slash:
        return bench_ragged.implementation(name)
    if base != "triton" or rows not in map(str, TILES):
        raise ValueError(f"no implementation is named {name}; there are triton/{', triton/'.join(map(str, TILES))}")
    return functools.partial(bench_ragged.candidates, functools.partial(_with_tiles, int(rows)))


def _with_tiles(rows: int, *arrays: Any, **options: Any) -> jax.Array:
    """Calls `ragged_paged_attention` by Triton, with tiles of this many rows."""
    operands = _validate.ragged_operands(*arrays, causal=True, options=cast(Options, options))
    with mock.patch.object(tuning, "attention", functools.partial(_tuned, rows, tuning.attention)):
        return ragged.ragged_paged_attention(*operands)[0]


def _tuned(rows: int, tune: Any, problem: Any, gpu: Any, *, queries_per_seq: int, **options: Any) -> tuning.Tuning:
    """Returns the tuning of `tuning.attention` for sequences whose queries fill a tile of `rows` rows."""
    tuned = tune(problem, gpu, queries_per_seq=max(2, rows // problem.group), **options)
    if tuned.rows != rows:
        raise peers.Absent(f"tiles have {tuned.rows} rows")
    return tuned


def choices(op: str, some: Sequence[cases.Case]) -> dict[str, str]:
    """The implementation that each case gets."""
    found: dict[cases.Case, str] = {}
    for case in some:
        key = measure.program_key(case)  # cases of one key get one choice
        if key not in found:
            found[key] = chosen(op, case)
    return {case.name: found[measure.program_key(case)] for case in some}


def chosen(op: str, case: cases.Case) -> str:
    """The implementation that the op gets for a case."""
    inputs = abstract_inputs(case)
    arrays = [inputs.query, inputs.key_cache, inputs.value_cache, inputs.block_tables[0], inputs.seq_lens]
    function = paged_jax.paged_attention
    if op == "ragged":
        function = paged_jax.ragged_paged_attention
        arrays.append(inputs.query_start_loc)
    options = {"layout": case.layout, "k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
    return paged_jax.which_implementation(function, *arrays, platform="cuda", **options).name


def abstract_inputs(case: cases.Case) -> inputs_lib.Inputs:
    """The shapes and dtypes of a case's inputs."""
    return jax.eval_shape(functools.partial(inputs_lib.make, case))


def models(count: int, seed: int = 0) -> tuple[cases.Case, ...]:
    """The first `count` of `cases.MORE_DECODE`; nothing is drawn."""
    return cases.MORE_DECODE[:count]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_choice", description=__doc__)
    parser.add_argument("--op", choices=list(NUM_CASES), default="decode")
    parser.add_argument("--count", type=int, help=f"how many cases; default {NUM_CASES}")
    parser.add_argument("--seed", type=int, default=0, help="of the generator; default 0")
    parser.add_argument("--numbers", type=harness.numbers, help="of the drawn cases that are timed; default all")
    parser.add_argument("--implementations", help=f"names with commas between them; default {IMPLEMENTATIONS}")
    parser.add_argument("--peers", default="none", help="names of bench_decode's or bench_ragged's peers; default none")
    parser.add_argument("--block-sizes", type=harness.numbers, help="of each case, such as 16,128; default 16")
    parser.add_argument("--seconds", type=float, default=timing.SECONDS, help="of one measurement; default %(default)s")
    parser.add_argument("--processes", type=int, default=1, help="how many compile side by side; default 1")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    drawn = {"decode": cases.random_decode, "ragged": cases.random_ragged, "models": models}[args.op]
    benchmark = bench_decode.BENCHMARK
    if args.op == "ragged":
        benchmark = dataclasses.replace(bench_ragged.BENCHMARK, implementation=ragged_implementation)
    names = args.implementations.split(",") if args.implementations else IMPLEMENTATIONS[args.op]
    beside = [] if args.peers == "none" else args.peers.split(",")
    harness.check_names(parser, "peer", beside, [*benchmark.peers, *benchmark.elsewhere])
    try:
        for name in names:
            benchmark.implementation(name)
    except ValueError as error:
        parser.error(str(error))
    if not harness.has_gpu("choice", args.processes):
        return 2
    all_drawn = drawn(args.count or NUM_CASES[args.op], args.seed)
    numbers = range(len(all_drawn)) if args.numbers is None else args.numbers
    if numbers and max(numbers) >= len(all_drawn):
        parser.error(f"only {len(all_drawn)} cases are drawn; --count draws more")
    some = cases.with_blocks([all_drawn[number] for number in numbers], args.block_sizes)
    # Sums of a peer's kernels follow the pauses between its launches, so long calls of ours need a pause as well.
    how = {"seconds": args.seconds, "rested": bool(beside)}
    timer = functools.partial(timing.time_calls, **how)
    benchmark = dataclasses.replace(benchmark, op=f"choice-{args.op}", cases=some, timer=timer, peer_timing=how)

    def notes() -> dict[str, Any]:
        return {"seed": args.seed, "chosen": choices(args.op, some)}

    found = harness.run(benchmark, some, names, beside, out=args.out, processes=args.processes, notes=notes)
    if len(names) > 1:
        print(report.regret_text(found))
    if beside:
        print(report.peers_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
