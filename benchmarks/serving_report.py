"""Makes a table and a picture of bench_serving's JSON: `python -m benchmarks.serving_report FILE.json [OUT.png]`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import table_line

COLUMNS = (
    "run",
    "requests",
    "total, s",
    "output tokens/s",
    "GPU busy",
    "share of its bound",
    "first token, ms (median, 99%)",
    "between tokens, ms (median, 99%)",
    "cache waste",
    "found in cache",
    "preempted",
    "sequences: most, mean while others wait (contiguous)",
)


def markdown(report: dict[str, Any]) -> str:
    """A table of the runs, then the bare model's speed, from which the bounds are computed."""
    title = f"{report['gpu']}, JAX {report['jax']}, {report['date']}, commit {report['commit']}: {report['model']}, "
    title += f"{report['num_blocks']} blocks of {report['block_size']} tokens, "
    title += f"at most {report['engine']['max_num_seqs']} sequences, "
    title += f"{report['engine']['max_tokens_per_step']} tokens a step."
    lines = [title, "", table_line(COLUMNS), table_line(["---"] * len(COLUMNS))]
    lines += [table_line(_cells(row)) for row in report["rows"] if "us" in row]
    lines += [""] + [f"- {_name(row)}: {row['absent']}" for row in report["rows"] if "absent" in row]
    lines += [f"- {line}" for line in _comparisons(report["rows"])]
    if "rates" in report:
        rates = report["rates"]
        steps = ", ".join(f"{rows}: {us / 1e3:.2f} ms" for rows, us in rates["decode_us"].items())
        lines += [
            f"Bare steps: prompts {rates['prompt_tokens_per_s']:.0f} tokens/s; decode, by sequences: {steps}.",
            "",
        ]
    return "\n".join(lines)


def _comparisons(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines that compare rows: how much faster ours are than peers, and what shared prompts save."""
    found = []
    for row in rows:
        for name, times in row.get("times", {}).items():
            peer = next(r for r in rows if (r["contender"], r["case"]) == (name, row["case"]))
            told = f"{_name(row)}: {times:.1f} times the output tokens a second of {name}"
            if peer["output_tokens"] != row["output_tokens"]:
                told += f", stopped at {peer['output_tokens']} tokens"
            found.append(told)
    seconds = {row["case"]: row["us"] / 1e6 for row in rows if row["contender"] == "engine"}
    if {"prompts", "prompts-shared"} <= seconds.keys():
        share = seconds["prompts-shared"] / seconds["prompts"]
        found.append(f"prompts-shared takes {share:.2f} of the time of prompts")
    return found


def _name(row: dict[str, Any]) -> str:
    name = row["case"] if row["contender"] == "engine" else f"{row['case']}, {row['contender']}"
    return f"{name}, {row['rate_per_s']:.0f}/s" if "rate_per_s" in row else name


def _cells(row: dict[str, Any]) -> list[str]:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    first, between = (row[name] for name in ("first_token_ms", "between_tokens_ms"))
    sequences = row.get("sequences")
    return [
        _name(row),
        str(row["requests"]),
        f"{row['us'] / 1e6:.2f}",
        f"{row['tokens_per_s']:.0f}",
        percent(row.get("busy")),
        percent(row.get("share_of_bound")),
        f"{first['median']:.0f}, {first['p99']:.0f}",
        f"{between['median']:.1f}, {between['p99']:.1f}",
        percent(row.get("waste", {}).get("mean")),
        percent(row.get("hit_rate")),
        str(row.get("preempted", "-")),
        _sequences(sequences) if sequences else "-",
    ]


def _sequences(counts: dict[str, Any]) -> str:
    mean = counts.get("mean while others wait")
    return f"{counts['most']}, {'-' if mean is None else f'{mean:.0f}'} ({counts['contiguous']})"


def plot(report: dict[str, Any], out: Path) -> None:
    """Draws the distributions of times to first and to next tokens, and the number of running sequences over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    latencies = figure.subplots(1, 3)
    first, between, running = latencies
    for index, row in enumerate(row for row in report["rows"] if "us" in row and "prompts" not in row["case"]):
        style = {"color": f"C{index}", "linestyle": "-" if row["kind"] == "implementation" else "--"}
        for axes, name in ((first, "first_token_ms"), (between, "between_tokens_ms")):
            percentiles = row[name]["percentiles"]
            label = _name(row) if axes is first else None
            axes.plot(percentiles, range(len(percentiles)), label=label, **style)
        if "timeline" in row:
            running.plot(*zip(*row["timeline"], strict=True), **style)
    for axes, name in ((first, "time to the first token, ms"), (between, "time between tokens, ms")):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(name)
        axes.set_ylabel("% of the tokens that take at most as long")
    running.set_xlabel("seconds")
    running.set_ylabel("sequences that run")
    for axes in latencies:
        axes.grid(color="0.9")
    figure.suptitle(f"{report['model']}, {report['gpu']}, {report['date']}, commit {(report['commit'] or '?')[:7]}")
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(out, dpi=100)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table of a file, and draws its picture if the command line names one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_report", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    args = parser.parse_args(argv)
    report = json.loads(args.file.read_text())
    print(markdown(report), end="")
    if args.out is not None:
        plot(report, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
