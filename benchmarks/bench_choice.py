"""Times random decode shapes with every implementation, and what the automatic choice between these loses.

    python -m benchmarks.bench_choice

The shapes are nobody's: a seeded generator draws heads, groups, head sizes, dtypes, layouts and lengths
(`cases.random_decode`). A shape's regret is the chosen implementation's time over the fastest one's, less 1.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import paged_jax
from benchmarks import bench_decode, cases, harness

NUM_CASES = 40
IMPLEMENTATIONS = ("mosaic_gpu", "triton")


def chosen(case: cases.Case) -> str:
    """The implementation that `paged_attention` gets for a case."""
    pools = jax.eval_shape(
        functools.partial(
            paged_jax.PagedKVCache.create, 2, case.block_size, case.num_kv_heads, case.head_size,
            dtype=case.cache_dtype, layout=case.layout,
        )
    )  # fmt: skip
    query = jax.ShapeDtypeStruct((case.num_seqs, case.num_heads, case.head_size), jnp.bfloat16)
    tables = jax.ShapeDtypeStruct((case.num_seqs, max(case.blocks_per_seq)), jnp.int32)
    seq_lens = jax.ShapeDtypeStruct((case.num_seqs,), jnp.int32)
    arrays = query, pools.key_cache, pools.value_cache, tables, seq_lens
    return paged_jax.which_implementation(
        paged_jax.paged_attention, *arrays, platform="cuda", layout=case.layout,
        **({} if jnp.dtype(case.cache_dtype).itemsize > 1 else {"k_scale": jnp.float32(1), "v_scale": jnp.float32(1)}),
    ).name  # fmt: skip


def regrets(times: Mapping[str, Mapping[str, float]], choices: Mapping[str, str]) -> dict[str, float]:
    """The regret of each case, from the times of each implementation that could do it and the chosen ones."""
    return {case: by_name[choices[case]] / min(by_name.values()) - 1 for case, by_name in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_choice", description=__doc__)
    parser.add_argument("--count", type=int, default=NUM_CASES, help=f"how many shapes; default {NUM_CASES}")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if not harness.has_gpu("choice"):
        return 2
    benchmark = dataclasses.replace(
        bench_decode.BENCHMARK, op="choice", cases=cases.random_decode(args.count), peers={}
    )
    report = harness.run(benchmark, benchmark.cases, IMPLEMENTATIONS, [], out=args.out)
    report["regret"] = summary(drawn, report["rows"])
    harness.save(report, args.out)
    return 0


def summary(drawn: Sequence[cases.Case], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Prints and returns each case's regret, their mean and the largest."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if "us" in row:
            times.setdefault(row["case"], {})[row["contender"]] = row["us"]
    by_case = regrets(times, {case.name: chosen(case) for case in drawn if case.name in times})
    found = {"mean": statistics.mean(by_case.values()), "largest": max(by_case.values()), "cases": by_case}
    for name, regret in sorted(by_case.items(), key=lambda item: -item[1]):
        print(f"{name:48} {regret:6.1%}")
    print(f"regret: {found['mean']:.1%} on the mean, at most {found['largest']:.1%}")
    return found


if __name__ == "__main__":
    sys.exit(main())
