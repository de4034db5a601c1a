"""Times multi-head latent attention beside FlashMLA and FlashAttention 3: `python -m benchmarks.bench_mla`.

Before a case is timed, its result is compared with attention in float32 for a few sequences. A row's share is the least
time of its work over the row's time. The least time is the larger of two: the bytes at the rate of a large read, and
the operations at the rate of a large matrix product. The peers run in a process of PyTorch's, `benchmarks.mla_peers`.
"""

import argparse
import concurrent.futures
import functools
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import paged_jax
from benchmarks import harness, timing
from benchmarks.mla_cases import BLOCK_SIZE, BY_NAME, CASES, LATENT_SIZE, SCALE, VALUE_SIZE, Case
from benchmarks.report import first_line

_CHECKED = 4  # sequences whose results are checked


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code, 2 where there is no GPU."""
    args = _arguments(argv)
    if not harness.has_gpu("mla"):
        return 2
    read, product = timing.read_ceiling([]), timing.matmul_ceiling()
    rows: list[dict[str, Any]] = []
    ceilings = {"read_gb_s": read.rate, "product_tflop_s": product.rate}
    report = {"op": "mla", **harness.environment(), "ceilings": ceilings, "rows": rows}
    contenders = list(itertools.product(args.cases, args.implementations))
    programs = harness.compile_all({each: functools.partial(lower, *each) for each in contenders})
    for case, name in contenders:
        rows.append(_with_share(_row(case, name, programs[case, name]), case, read, product))
        harness.save(report, args.out)
    if args.peers:
        command = [sys.executable, "-m", "benchmarks.mla_peers", *(case.name for case in args.cases)]
        jax.clear_caches()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        for line in done.stdout.splitlines():
            row = json.loads(line)
            rows.append(_with_share(row, BY_NAME[row["case"]], read, product))
        harness.save(report, args.out)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_mla", description=__doc__)

    def cases(text: str) -> list[Case]:
        return [BY_NAME[name] for name in text.split(",")]

    parser.add_argument("--cases", type=cases, default=list(CASES), help=f"some of {', '.join(BY_NAME)}")
    parser.add_argument("--implementations", type=lambda text: text.split(","), default=["auto"], help="default auto")
    parser.add_argument("--peers", type=lambda text: text != "none", default=True, help="none; default all")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args(argv)


def _row(case: Case, name: str, program: concurrent.futures.Future) -> dict[str, Any]:
    """Checks and times one implementation. Its row has the time, or the reason why there is none."""
    row: dict[str, Any] = {"case": case.name, "contender": name, "kind": "implementation"}
    try:
        attend, argsets = program.result(), _argsets(case)
        row["error"] = error = _error(case, argsets[0], attend(*argsets[0]))
        if not error < harness.TOLERANCE:
            return row | {"reason": f"relative error {error:.2g}"}
        timed = timing.time_calls(attend, argsets)
        return row | {"us": timed.us, "kernels": timed.kernels}
    except Exception as error:
        return row | {"reason": first_line(error)}


def lower(case: Case, name: str) -> jax.stages.Lowered:
    """Lowers the op of a case, by an implementation or, with the name "auto", by the automatic choice."""
    chosen: Any = None if name == "auto" else name

    def attend(query, cache, table, lengths, *starts):
        flags = {"value_size": VALUE_SIZE, "scale": SCALE, "implementation": chosen}
        if starts:
            bound = {"max_query_len": case.num_queries}
            return paged_jax.ragged_mla_attention(query, cache, table, lengths, *starts, **flags, **bound)
        return paged_jax.mla_paged_attention(query, cache, table, lengths, **flags)

    shapes = jax.eval_shape(functools.partial(_argsets, case))
    return jax.jit(attend).lower(*shapes[0])


def _argsets(case: Case) -> list[tuple]:
    """The arguments of calls, one for each of the block tables."""
    tables, num_blocks = case.tables()
    num_seqs, (key, of_query) = len(case.lengths), jax.random.split(jax.random.key(0))
    query = jax.random.normal(of_query, (num_seqs * case.num_queries, case.num_heads, LATENT_SIZE), jnp.bfloat16)
    cache = jax.jit(
        functools.partial(jax.random.normal, shape=(num_blocks, BLOCK_SIZE, LATENT_SIZE), dtype=jnp.bfloat16)
    )(key)
    lengths = jnp.asarray(case.lengths, jnp.int32)
    starts = () if case.num_queries == 1 else (jnp.arange(num_seqs + 1, dtype=jnp.int32) * case.num_queries,)
    return [(query, cache, jnp.asarray(table), lengths, *starts) for table in tables]


def _error(case: Case, arrays: tuple, out: jax.Array) -> float:
    """The error of a few sequences' results against attention in float32, relative to the norm of the latter."""
    query, cache, table, *_ = arrays
    wanted, found = [], []
    for seq in sorted({0, len(case.lengths) // 2, len(case.lengths) - 1})[:_CHECKED]:
        length, rows = case.lengths[seq], slice(seq * case.num_queries, (seq + 1) * case.num_queries)
        latents = cache[table[seq]].reshape(-1, LATENT_SIZE)[:length].astype(jnp.float32)
        logits = jnp.einsum("qhd,td->qht", query[rows].astype(jnp.float32), latents, precision="highest") * SCALE
        last = length - case.num_queries + jnp.arange(case.num_queries)
        logits = jnp.where(jnp.arange(length)[None, None] <= last[:, None, None], logits, -jnp.inf)
        weights = jax.nn.softmax(logits)
        wanted.append(jnp.einsum("qht,td->qhd", weights, latents[:, :VALUE_SIZE], precision="highest"))
        found.append(out[rows].astype(jnp.float32))
    exact, actual = np.concatenate(wanted), np.concatenate(found)
    return float(np.linalg.norm(actual - exact) / np.linalg.norm(exact))


def _with_share(row: dict[str, Any], case: Case, read: timing.Ceiling, product: timing.Ceiling) -> dict[str, Any]:
    """The row with its rates and its share of the ceiling; prints it."""
    if "us" in row:
        floors = [time for time in (read.time(case.bytes), product.time(case.operations)) if time is not None]
        row |= {"gb_s": case.bytes / row["us"] / 1e3, "tflop_s": case.operations / row["us"] / 1e6}
        row |= {"share": max(floors) / row["us"]} if floors else {}
        text = f"{row['us']:8.1f} us {row['gb_s']:6.0f} GB/s {row['tflop_s']:5.0f} TFLOP/s {row.get('share', 0):4.0%}"
    else:
        text = row["reason"]
    print(f"{row['case']:32} {row['contender']:12} {text}", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
