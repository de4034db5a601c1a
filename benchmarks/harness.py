"""Runs cases x contenders on the GPU: checks each result, times it, holds it against a ceiling, writes JSON.

A contender is an implementation of ours or a peer. Where one cannot do a case, or does it wrongly, its row has the
reason in place of a time. The harness writes the file anew after each case, so that a run cut short keeps what it has.

A row's share is defined once, in `row_of`: the least time that the work takes by the ceiling, over the row's time. For
decode the ceiling is a kernel that merely reads as many bytes, at that size.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import inputs as inputs_lib
from benchmarks import peers, timing
from benchmarks.cases import Case, select
from benchmarks.inputs import Inputs
from benchmarks.timing import Ceiling

TOLERANCE = 2e-2  # relative error that a result may have, of the norm; bfloat16 kernels have 1e-3 to 1e-2


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What tells one benchmark from another.

    Attributes:
      op: the benchmark's name, as in ``bench_<op>``.
      cases: what it can time.
      prefill: whether every token has a query, or each sequence's last one only.
      work: gives the bytes or operations of a case, in the ceiling's unit.
      ceiling: measures the ceiling, given the work of all cases.
      implementation: makes a contender of ours from a name on the command line; raises ValueError for other names.
      peers: the peers that run in this process, by name.
    """

    op: str
    cases: Sequence[Case]
    prefill: bool
    work: Callable[[Case], int]
    ceiling: Callable[[Iterable[int]], Ceiling]
    implementation: Callable[[str], peers.Build]
    peers: dict[str, peers.Build]


def main(benchmark: Benchmark, argv: Sequence[str] | None = None) -> int:
    """The command line of a benchmark; returns the exit code, 2 where there is no GPU."""
    args = _arguments(benchmark, argv)
    if not has_gpu(benchmark.op):
        return 2
    stats = jax.devices()[0].memory_stats() or {}
    run(
        benchmark,
        select(benchmark.cases, args.cases),
        args.implementations,
        args.peers,
        out=args.out,
        memory=int(0.9 * stats["bytes_limit"]) if "bytes_limit" in stats else None,
    )
    return 0


def has_gpu(op: str) -> bool:
    """Whether there is a GPU to time `op` on; prints that there is none otherwise."""
    if jax.default_backend() == "gpu":
        return True
    print(f"bench_{op}: no GPU here, so there is nothing to time (JAX runs on {jax.default_backend()})")
    return False


def _arguments(benchmark: Benchmark, argv: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [] if text == "none" else text.split(",")

    known = [*benchmark.peers, *(peers.FLASHINFER if benchmark.op == "decode" else ())]
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.bench_{benchmark.op}",
        description=f"Device time of {benchmark.op} attention. Cases: {', '.join(c.name for c in benchmark.cases)}.",
    )
    parser.add_argument("--cases", type=names, help="names with commas between them; default all")
    parser.add_argument(
        "--implementations", type=names, default=["auto"], help="such as auto,v1,v2/1024,v1:triton; default auto"
    )
    parser.add_argument(
        "--peers",
        type=names,
        default=list(benchmark.peers),
        help=f"none, or some of {','.join(known)}; default {','.join(benchmark.peers)}",
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    try:
        select(benchmark.cases, args.cases)
        for name in args.implementations:
            benchmark.implementation(name)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(args.peers) - set(known):
        parser.error(f"no peer is named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return args


def run(
    benchmark: Benchmark,
    cases: Sequence[Case],
    implementations: Sequence[str],
    peer_names: Sequence[str],
    *,
    out: Path | None = None,
    memory: int | None = None,
    pool_bytes: int = inputs_lib.POOL_BYTES,
    timer: Callable[..., timing.Timing] = timing.time_calls,
) -> dict[str, Any]:
    """Times every case with every contender. Returns the report that it writes to `out`."""
    contenders = [(name, "implementation", benchmark.implementation(name)) for name in implementations]
    contenders += [(name, "peer", benchmark.peers[name]) for name in peer_names if name not in peers.FLASHINFER]
    elsewhere = [name for name in peer_names if name in peers.FLASHINFER]
    flashinfer = peers.FlashInfer(cases, elsewhere) if elsewhere else None
    rows: list[dict[str, Any]] = []
    try:
        ceiling = benchmark.ceiling({benchmark.work(case) for case in cases})
        print(f"ceiling: {ceiling.rate and round(ceiling.rate)} {ceiling.unit} ({ceiling.note})", flush=True)
        report = {"op": benchmark.op, **environment(), "ceiling": dataclasses.asdict(ceiling), "rows": rows}
        for case in cases:
            rows += _case_rows(benchmark, case, contenders, ceiling, memory, pool_bytes, timer)
            save(report, out)
        if flashinfer is not None:
            left = {(name, case.name): case for case in cases for name in elsewhere}
            for name, case_name, answer in flashinfer.results():
                rows.append(_case_row(benchmark, left.pop((name, case_name)), name, "peer", answer, ceiling))
                print_row(rows[-1])
                save(report, out)
            ended = {"absent": "its process ended early"}
            rows += [_case_row(benchmark, case, name, "peer", ended, ceiling) for (name, _), case in left.items()]
            save(report, out)
        return report
    finally:
        if flashinfer is not None:
            flashinfer.close()


def _case_rows(benchmark, case, contenders, ceiling, memory, pool_bytes, timer) -> list[dict[str, Any]]:
    try:
        inputs = inputs_lib.make(case, prefill=benchmark.prefill, pool_bytes=pool_bytes, memory=memory)
        expected = inputs_lib.truth(case, inputs, prefill=benchmark.prefill)
    except Exception as error:  # mostly for want of memory: the next case may fit
        print(f"{case.name}: {first_line(error)}", flush=True)
        failed = {"failed": first_line(error)}
        return [_case_row(benchmark, case, name, kind, failed, ceiling) for name, kind, _ in contenders]
    rows = []
    for name, kind, build in contenders:
        try:
            answer = _fastest(build(case, inputs), inputs, expected, timer, ours=kind == "implementation")
        except peers.Absent as reason:
            answer = {"absent": str(reason)}
        except Exception as error:  # compilers and peers raise anything, and the other contenders' rows still count
            answer = {"failed": first_line(error)}
        rows.append(_case_row(benchmark, case, name, kind, answer, ceiling))
        print_row(rows[-1])
    return rows


def _fastest(candidates, inputs: Inputs, expected, timer, *, ours: bool) -> dict[str, Any]:
    """The fastest candidate's numbers. If all candidates fail, raises the last one's failure."""
    best, failure = None, None
    for candidate in candidates:
        try:
            answer = _time_one(candidate, inputs, expected, timer, ours=ours)
        except Exception as error:
            failure = error
            continue
        if best is None or answer["us"] < best["us"]:
            best = answer
    if best is None:
        raise failure or ValueError("no candidates")
    return best


def _time_one(candidate: peers.Candidate, inputs: Inputs, expected, timer, *, ours: bool) -> dict[str, Any]:
    label, fn, argsets = candidate
    start = time.perf_counter()
    compiled = fn.lower(*argsets[0]).compile()
    compile_s = time.perf_counter() - start
    memory = compiled.memory_analysis()
    if ours and memory is not None and memory.temp_size_in_bytes >= inputs.key_cache.nbytes:
        raise RuntimeError(f"needs {memory.temp_size_in_bytes / 1e9:.1f} GB of scratch: is the pool copied?")
    index, truth = expected
    rows = np.asarray(compiled(*argsets[0])[index]).astype(np.float32)
    error = float(np.linalg.norm(rows - truth) / np.linalg.norm(truth))
    if not error <= TOLERANCE:
        raise ValueError(f"wrong result, relative error {error:.2g}")
    return {
        **answer_of(timer(compiled, argsets)),
        "how": label,
        "relative_error": error,
        "compile_s": round(compile_s, 2),
    }


def answer_of(timed: timing.Timing) -> dict[str, Any]:
    """A timing in a row's words."""
    return {"us": timed.us, "min_us": timed.min_us, "calls": timed.calls, "kernels": timed.kernels}


def _case_row(benchmark, case: Case, contender: str, kind: str, answer: dict[str, Any], ceiling: Ceiling):
    return row_of(case.name, benchmark.work(case), contender, kind, answer, ceiling)


def row_of(
    case: str, work: int, contender: str, kind: str, answer: dict[str, Any], ceiling: Ceiling | None
) -> dict[str, Any]:
    """Makes a row of the report.

    Args:
      case: its name.
      work: bytes or operations of the case, in the ceiling's unit.
      contender: who did it.
      kind: "implementation" for ours, "peer" for others.
      answer: the row's own fields, with the time "us" or with a reason, "absent" or "failed".
      ceiling: what the time is held against; None where nothing is known to take as long at the least.

    Returns:
      The answer with, where there is a time and a ceiling, the "rate" in the ceiling's unit and the "share": the least
      time by the ceiling over the row's time.
    """
    row = {"case": case, "contender": contender, "kind": kind, "work": work, **answer}
    if "us" in answer and ceiling is not None:
        row["rate"] = work / answer["us"] / (1e3 if ceiling.unit == "GB/s" else 1e6)
        least = ceiling.time(work)
        if least is not None:
            row["share"] = least / answer["us"]
    return row


def print_row(row: dict[str, Any]) -> None:
    """Prints a row's time and share, or its reason, on one line."""
    what = row.get("absent") or row.get("failed")
    if "us" in row:
        share = f"{row['share']:6.1%}" if "share" in row else ""
        what = f"{row['us']:9.1f} us {share} {row.get('how', '')}"
    print(f"{row['case']:28} {row['contender']:16} {what}", flush=True)


def save(report: dict[str, Any], out: Path | None) -> None:
    """Adds to each of our rows the peers' times over ours, above 1 where ours is faster, and writes the file."""
    times = {(r["case"], r["contender"]): r["us"] for r in report["rows"] if r["kind"] == "peer" and "us" in r}
    for row in report["rows"]:
        if row["kind"] == "implementation" and "us" in row:
            row["ratios"] = {peer: us / row["us"] for (case, peer), us in times.items() if case == row["case"]}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """The GPU, the versions, the date and the commit of a run."""
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    name, _, driver = (gpu[0] if gpu else jax.devices()[0].device_kind).partition(", ")
    commit = os.environ.get("PAGED_JAX_COMMIT") or _output("git", "describe", "--always", "--dirty", "--abbrev=40")
    return {
        "gpu": name,
        "driver": driver or None,
        "jax": jax.__version__,
        **{name: _version(name) for name in ("jax-triton", "triton")},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit or None,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}"
