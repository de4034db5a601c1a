"""Prints a benchmark's JSON as a Markdown table: `python -m benchmarks.report FILE.json`."""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_EQUAL = 1.01  # two times count as equal up to this ratio
_WORST = 10  # how many of the worst ratios are listed


def contenders(report: dict[str, Any], kind: str) -> list[str]:
    """The contenders of a kind ("implementation" or "peer") that have a time in any case, in the report's order."""
    return list(dict.fromkeys(r["contender"] for r in report["rows"] if r["kind"] == kind and "us" in r))


def share(row: dict[str, Any]) -> float | None:
    """A row's share of the ceiling, as `benchmarks.harness.row_of` defines it; None if the row has none.

    Files of commits up to 26b3ebd call it "share_at_size"; their "share" is relative to the rate of a read of 8 GiB.
    """
    return row.get("share_at_size", row.get("share"))


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown: a table of times, then the missing times with the reasons.

    Our columns give the time in microseconds and its share of the ceiling. A peer's column gives the peer's time, and
    that time over the time of our first implementation. If we have several, there is a column of `regrets`.
    """
    ours, theirs = contenders(report, "implementation"), contenders(report, "peer")
    ceiling, chosen = report["ceiling"], report.get("chosen")
    regret = regrets(report) if len(ours) > 1 else None
    header = ["case", "mere read, us" if ceiling["us"] else None, "chosen" if chosen else None, *ours]
    header = [*filter(None, header), *(["regret"] if regret is not None else []), *theirs]
    lines = [_title(report), "", table_line(header), table_line(["---"] * len(header))]
    for case in dict.fromkeys(row["case"] for row in report["rows"]):
        rows = {row["contender"]: row for row in report["rows"] if row["case"] == case}
        cells = [case]
        if ceiling["us"]:
            cells.append(_mere_read(ceiling, next(iter(rows.values()))["work"]))
        if chosen:
            cells.append(chosen[case])
        cells += [_own_cell(rows.get(name, {})) for name in ours]
        first = rows[ours[0]].get("us") if ours and ours[0] in rows else None
        if regret is not None:
            cells.append(f"{regret[case]:.1%}" if case in regret else "-")
        cells += [_peer_cell(rows.get(name, {}), first) for name in theirs]
        lines.append(table_line(cells))
    if chosen:
        lines += ["", regret_text(report)]
    missing = _missing(report)
    return "\n".join([*lines, *(["", "Not timed:", "", *missing] if missing else []), ""])


def regrets(report: dict[str, Any]) -> dict[str, float]:
    """The loss of the choice between implementations in each case: the chosen one's time over the best one's, minus 1.

    The chosen one is our first implementation, or the one that a file of `benchmarks.bench_choice` names. If the chosen
    one has no time in a case, the case has no regret.
    """
    times: dict[str, dict[str, float]] = {}
    for row in report["rows"]:
        if row["kind"] == "implementation" and "us" in row:
            times.setdefault(row["case"], {})[row["contender"]] = row["us"]
    first = next(iter(contenders(report, "implementation")), "")
    chosen = report.get("chosen") or dict.fromkeys(times, first)
    return {
        case: by_name[chosen[case]] / min(by_name.values()) - 1
        for case, by_name in times.items()
        if chosen[case] in by_name
    }


def regret_text(report: dict[str, Any]) -> str:
    """A line with the mean and the largest regret."""
    found = regrets(report)
    if not found:
        return "No regret: nothing that was chosen has a time."
    worst = max(found, key=lambda case: found[case])
    return (
        f"Regret of {len(found)} cases: {statistics.mean(found.values()):.1%} on the mean, "
        f"at most {found[worst]:.1%} ({worst})."
    )


def peers_text(report: dict[str, Any]) -> str:
    """The share of cases in which our first implementation leads all peers, and a line for each of its worst ratios.

    It leads if it takes at most 1% longer than the fastest peer, because times within 1% count as equal. If cases have
    blocks of several sizes, each size has a share of its own.
    """
    ratios = peer_ratios(report)
    if not ratios:
        return "No case has a time of ours and one of a peer."
    ours, lines = contenders(report, "implementation")[0], []
    sizes = {case: case.partition("-blocks-of-")[2] for case in ratios}
    for size in dict.fromkeys(sizes.values()):
        some = [ratio for case, ratio in ratios.items() if sizes[case] == size]
        ahead, blocks = sum(ratio <= _EQUAL for ratio in some), f" with blocks of {size}" if size else ""
        middle = f"its median time is {statistics.median(some):.2f} of a peer's"
        lines.append(f"{ours} leads in {ahead} of {len(some)} cases{blocks}; {middle}.")
    worst = sorted(ratios, key=lambda case: -ratios[case])[:_WORST]
    return "\n".join([*lines, "Its worst times, over a peer's:", *(f"  {ratios[case]:.3f} {case}" for case in worst)])


def peer_ratios(report: dict[str, Any]) -> dict[str, float]:
    """Our first implementation's time over the fastest peer's time, in each case that has both.

    Times are those of `lower_us`.
    """
    ours = next(iter(contenders(report, "implementation")), "")
    ratios = {}
    for case in dict.fromkeys(row["case"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["case"] == case and "us" in row]
        own = [lower_us(row) for row in rows if row["contender"] == ours]
        theirs = [lower_us(row) for row in rows if row["kind"] == "peer"]
        if own and theirs:
            ratios[case] = own[0] / min(theirs)
    return ratios


def lower_us(row: dict[str, Any]) -> float:
    """The lower one of a row's times in a row and after a pause, if both were measured."""
    return min(row["us"], row.get("rested_us", row["us"]))


def _title(report: dict[str, Any]) -> str:
    ceiling = report["ceiling"]
    rate = "not measured" if ceiling["rate"] is None else f"{ceiling['rate']:.0f} {ceiling['unit']}"
    machine = f"{report['gpu']}, driver {report['driver']}, JAX {report['jax']}"
    return f"{machine}, {report['date']}, commit {report['commit']}. Ceiling: {rate} ({ceiling['note']})."


def table_line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}"


def _mere_read(ceiling: dict[str, Any], work: int) -> str:
    times = {int(size): us for size, us in ceiling["us"].items()}  # JSON's keys are strings
    us = times.get(work, work / ceiling["rate"] / 1e3)
    return number(us)


def _own_cell(row: dict[str, Any]) -> str:
    if "us" not in row:
        return "-"
    of_ceiling = share(row)
    return number(row["us"]) + ("" if of_ceiling is None else f" ({of_ceiling:.0%})")


def _peer_cell(row: dict[str, Any], ours: float | None) -> str:
    if "us" not in row:
        return "-"
    return number(row["us"]) + (f" ({row['us'] / ours:.2f}x)" if ours else "")


def number(us: float) -> str:
    """Formats microseconds, with one decimal below 100."""
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _missing(report: dict[str, Any]) -> list[str]:
    """A line for each contender and each reason why its times are missing, with the cases."""
    cases: dict[tuple[str, str], list[str]] = {}
    for row in report["rows"]:
        if "us" not in row:
            cases.setdefault((row["contender"], row.get("absent") or row.get("failed") or "?"), []).append(row["case"])
    return [f"- {name}, {', '.join(which)}: {reason}" for (name, reason), which in cases.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table of a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", help="names with commas between them; default all")
    args = parser.parse_args(argv)
    report = json.loads(args.file.read_text())
    if args.cases is not None:
        wanted = args.cases.split(",")
        if unknown := set(wanted) - {row["case"] for row in report["rows"]}:
            parser.error(f"no case is named {', '.join(sorted(unknown))}")
        report["rows"] = [row for row in report["rows"] if row["case"] in wanted]
    print(markdown(report), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
