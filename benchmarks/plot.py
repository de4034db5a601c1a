"""Draws the shares of a benchmark's JSON, as in its table: `python -m benchmarks.plot FILE.json OUT.png`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import contenders, share


def plot(report: dict[str, Any], out: Path) -> None:
    """Draws every row with a share: a line for each case, filled dots for ours, hollow marks for peers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in report["rows"]))
    figure = Figure(figsize=(9, 1.2 + 0.36 * len(cases)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    found = {(row["case"], row["contender"]): share(row) for row in report["rows"]}
    shares = {key: 100 * value for key, value in found.items() if value is not None}
    for kind, markers, filled in (("peer", "Ds^vP*Xh", False), ("implementation", "o", True)):
        for index, name in enumerate(contenders(report, kind)):
            color = f"C{index + (0 if filled else 3)}"
            points = [(shares[case, name], y) for y, case in enumerate(cases) if (case, name) in shares]
            if not points:
                continue
            face = color if filled else "none"
            x, y = zip(*points, strict=True)
            label = f"paged_jax {name}" if filled else name
            style = {"s": 64 if filled else 36, "marker": markers[index % len(markers)]}
            axes.scatter(x, y, **style, facecolors=face, edgecolors=color, label=label)
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set_xlim(0, 105)
    axes.axvline(100, color="0.6", linewidth=1)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.set_xlabel(_what_is_all(report["op"], report["ceiling"]))
    axes.set_title(f"{report['op']}, {report['gpu']}, {report['date']}, commit {(report['commit'] or '?')[:7]}")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(out, dpi=100)


def _what_is_all(op: str, ceiling: dict[str, Any]) -> str:
    """The axis's label, which says what 100% stands for."""
    if ceiling["unit"] == "GB/s":
        return "share of a kernel that merely moves as many bytes, %"
    rate = "" if ceiling["rate"] is None else f" of {ceiling['rate']:.0f} {ceiling['unit']}"
    return f"share{rate}{', or of the time that merely reading takes' if 'ragged' in op else ''}, %"


def main(argv: Sequence[str] | None = None) -> int:
    """Draws a file's picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    plot(json.loads(args.file.read_text()), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
