"""Runs each case with each contender on the GPU: checks the result, times it, compares it with a ceiling, writes JSON.

A contender is one of our implementations or a peer. If it cannot do a case, or gives a wrong result, its row has the
reason in place of a time. The harness writes the whole file after each row, so a run that is cut short keeps its rows.

`row_of` defines a row's share: the least time of the work by the ceiling, over the row's time. In decode, the least
time is measured: a kernel merely reads the same number of bytes.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import measure, peers
from benchmarks.cases import Case, select, with_blocks
from benchmarks.measure import TOLERANCE as TOLERANCE
from benchmarks.measure import Benchmark as Benchmark
from benchmarks.measure import Programs, Work
from benchmarks.measure import answer_of as answer_of
from benchmarks.processes import Processes
from benchmarks.report import first_line as first_line
from benchmarks.report import lower_us
from benchmarks.timing import Ceiling


def main(benchmark: Benchmark, argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark from its command line; returns the exit code, 2 where there is no GPU."""
    args = _arguments(benchmark, argv)
    if not has_gpu(benchmark.op, args.processes):
        return 2
    cases = with_blocks(select(benchmark.cases, args.cases), args.block_sizes)
    run(benchmark, cases, args.implementations, args.peers, out=args.out, processes=args.processes)
    return 0


def has_gpu(op: str, processes: int = 1) -> bool:
    """Whether there is a GPU to time `op` on; if not, says so. If there are several processes, all share this GPU."""
    if processes > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if jax.default_backend() == "gpu":
        return True
    print(f"bench_{op}: no GPU here, so there is nothing to time (JAX runs on {jax.default_backend()})")
    return False


def check_names(parser: argparse.ArgumentParser, what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Ends the program with a message if a given name is not known."""
    if unknown := set(given) - set(known):
        parser.error(f"no {what} is named {', '.join(sorted(unknown))}; there are {', '.join(known)}")


def numbers(text: str) -> tuple[int, ...]:
    """Reads the value of an option: numbers with commas between them, or "none"."""
    return () if text == "none" else tuple(int(number) for number in text.split(","))


def _arguments(benchmark: Benchmark, argv: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [] if text == "none" else text.split(",")

    known = [*benchmark.peers, *benchmark.elsewhere]
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
    parser.add_argument("--block-sizes", type=numbers, help="of each case, such as 16,128; default the case's own")
    parser.add_argument("--processes", type=int, default=1, help="how many compile side by side; default 1")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    try:
        select(benchmark.cases, args.cases)
        for name in args.implementations:
            benchmark.implementation(name)
    except ValueError as error:
        parser.error(str(error))
    check_names(parser, "peer", args.peers, known)
    return args


def run(
    benchmark: Benchmark,
    cases: Sequence[Case],
    implementations: Sequence[str],
    peer_names: Sequence[str],
    *,
    out: Path | None = None,
    processes: int = 1,
    notes: Callable[[], dict[str, Any]] = dict,
    **how: Any,
) -> dict[str, Any]:
    """Times every case with every contender. Returns the report, which it writes to `out` after each row.

    Args:
      benchmark: the benchmark to run.
      cases, implementations, peer_names: the cases to time, and the contenders' names.
      out: the file, or None.
      processes: how many processes compile side by side. With 1, this process compiles and measures by turns.
      notes: returns further fields of the report; called at the start, while other processes compile.
      **how: "pool_bytes" and "timer" of `measure.Work`.
    """
    elsewhere = [name for name in peer_names if name in benchmark.elsewhere]
    here = [name for name in peer_names if name not in elsewhere]
    stats = jax.devices()[0].memory_stats() or {}
    memory = int(0.9 * stats["bytes_limit"]) if "bytes_limit" in stats else None
    work = Work(benchmark, cases, implementations, here, memory=memory, **how)
    by_name = {case.name: case for case in cases}
    contenders = [*implementations, *here, *elsewhere]
    places = {pair: i for i, pair in enumerate(itertools.product(by_name, contenders))}
    rows: list[dict[str, Any]] = []
    # The ceiling is measured before other processes start, because they keep memory that a large read needs.
    ceiling = benchmark.ceiling({benchmark.work(case) for case in cases})
    print(f"ceiling: {ceiling.rate and round(ceiling.rate)} {ceiling.unit} ({ceiling.note})", flush=True)
    torch = peers.TorchPeers(cases, elsewhere, **benchmark.peer_timing) if elsewhere else None
    others = Processes(work, processes) if processes > 1 else None
    try:
        noted = notes()
        if others is not None:
            others.wait()
        report = {"op": benchmark.op, **environment(), "ceiling": dataclasses.asdict(ceiling), **noted, "rows": rows}
        save(report, out)
        ours = measure.measure(work, Programs()) if others is None else others.answers()
        theirs = () if torch is None else torch.answers()
        for answer in itertools.chain(ours, theirs):
            amount = benchmark.work(by_name[answer.case])
            row = row_of(answer.case, amount, answer.contender, answer.kind, answer.fields, ceiling)
            print_row(row)
            which = row["case"], row["contender"]  # a second answer takes the place of the first
            rows[:] = [*(row for row in rows if (row["case"], row["contender"]) != which), row]
            rows.sort(key=lambda row: places[row["case"], row["contender"]])
            save(report, out)
        return report
    finally:
        for process in (torch, others):
            if process is not None:
                process.close()


def compile_all(
    lowered: dict[Any, Callable[[], jax.stages.Lowered]], options: dict[str, Any] | None = None
) -> dict[Any, concurrent.futures.Future]:
    """Lowers programs one after the other, while those already lowered compile, each in a thread of its own.

    This returns only when all are compiled, because a compiler beside a measurement would make the times wrong.

    Args:
      lowered: by name, functions; each lowers one program.
      options: XLA's options, or None.
    """
    futures: dict[Any, concurrent.futures.Future] = {}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for name, lower in lowered.items():
            try:
                futures[name] = pool.submit(lower().compile, options)
            except Exception as error:  # the program's row gives the reason
                futures[name] = concurrent.futures.Future()
                futures[name].set_exception(error)
    return futures


def row_of(
    case: str, work: int, contender: str, kind: str, answer: dict[str, Any], ceiling: Ceiling | None
) -> dict[str, Any]:
    """Makes a row of the report.

    Args:
      case: the case's name.
      work: bytes or operations of the case, in the ceiling's unit.
      contender: the contender's name.
      kind: "implementation" for ours, "peer" for others.
      answer: the row's own fields, with the time "us", or with a reason, "absent" or "failed".
      ceiling: the ceiling of the work; None if no least time is known.

    Returns:
      The row. If there are a time and a ceiling, it also has the "rate" in the ceiling's unit and the "share": the
      least time by the ceiling over the row's time.
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
    """Adds the ratios of peers' times to ours to our rows (above 1 where ours is faster), and writes the file."""
    times = {(r["case"], r["contender"]): lower_us(r) for r in report["rows"] if r["kind"] == "peer" and "us" in r}
    for row in report["rows"]:
        if row["kind"] == "implementation" and "us" in row:
            ours = lower_us(row)
            row["ratios"] = {peer: us / ours for (case, peer), us in times.items() if case == row["case"]}
    write(report, out)


def write(report: dict[str, Any], out: Path | None) -> None:
    """Writes a report as JSON, unless `out` is None."""
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
