"""Draws decode steps over GPUs, from results of `bench_scale --part models`.

    python -m benchmarks.scale_plot FILE.json ... OUT.png

Each number of GPUs may have a file of its own; of rows of the same case the last file's is drawn. The left plot shows a
step's time, and the right one its share: the time in which each GPU would merely read its part of the weights, keys and
values, over the step's time.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RATES = {"NVIDIA H200": 4.58e12}
"""Bytes per second of a kernel that merely reads (`bench_ceilings`)."""

MARKERS = {"called": "o", "xla": "s", "xla-recorded": "^", "nccl": "v", "nccl-recorded": "D"}


def points(report: dict[str, Any]) -> dict[tuple[str, str, str], list[tuple[int, float, float]]]:
    """Points (GPUs, milliseconds, share) in rising order of GPUs, by (model, number of sequences, way to reduce)."""
    rate, found = RATES[report["gpu"]], {}
    for row in report["rows"]:
        case = re.fullmatch(r"([^/]+)/tp=(\d+)/decode/(\d+)x\d+", row["case"])
        if case is not None and "us" in row and row["contender"] in MARKERS:
            name, size, num_seqs = case.groups()
            point = int(size), row["us"] / 1e3, row["floor_bytes"] / rate / row["us"] * 1e6
            found.setdefault((name, num_seqs, row["contender"]), []).append(point)
    return {key: sorted(line) for key, line in found.items()}


def plot(report: dict[str, Any], out: Path) -> None:
    """Draws a line for each model, number of sequences and way to reduce. Lines of our way ("called") are solid."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    times, shares = figure.subplots(1, 2)
    lines = points(report)
    colors = {key: f"C{i}" for i, key in enumerate(dict.fromkeys(key[:2] for key in lines))}
    first = {key[:2]: line for key, line in lines.items() if key[2] == "called"}
    for (name, num_seqs, how), line in lines.items():
        one = [point for point in first.get((name, num_seqs), []) if point[0] == 1 and point[0] < line[0][0]]
        sizes, ms, share = zip(*one, *line, strict=True)
        style = {"color": colors[name, num_seqs], "linestyle": "-" if how == "called" else ":", "marker": MARKERS[how]}
        if how != "called":
            style |= {"markerfacecolor": "none"}
        times.plot(sizes, ms, label=f"{name}, {num_seqs} sequence{'s' * (num_seqs != '1')}, {how}", **style)
        shares.plot(sizes, [100 * x for x in share], **style)
    times.set_ylabel("ms of a decode step")
    shares.set_ylabel("share of merely reading, %")
    for axes in (times, shares):
        axes.set_xlabel("GPUs")
        axes.set_xscale("log", base=2)
        ticks = sorted({point[0] for line in lines.values() for point in line})
        axes.set_xticks(ticks, map(str, ticks))
        axes.set_ylim(0)
        axes.grid(color="0.9")
    figure.suptitle(f"{report['gpu']}, {report['date']}, jax {report['jax']}")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(out, dpi=100)


def joined(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report with the rows of several; the last one's row of a case takes the place of the others' rows."""
    rows = {(row["case"], row["contender"]): row for report in reports for row in report["rows"]}
    return reports[-1] | {"rows": list(rows.values())}


def main(argv: Sequence[str] | None = None) -> int:
    """Draws a picture of the files' rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale_plot", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    plot(joined([json.loads(file.read_text()) for file in args.files]), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
