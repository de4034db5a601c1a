"""Projects a decode step's time on more GPUs than were measured, from the times of its parts.

    python -m benchmarks.scale_projection MODEL.json ALL_REDUCE.json

It takes a result of `bench_model` on one GPU and a result of `bench_scale --part all-reduce` on two GPUs, and prints a
table. A step with tensor parallelism over N GPUs is assumed to take

    bytes / N / rate  +  layers * rest  +  (2 * layers + 1) * all_reduce(N)

- bytes / N / rate: a GPU reads its weights, keys and values once, at the rate of a kernel that merely reads.
- rest: the time of one layer on one GPU minus the time of its bytes, as measured on Llama-3-8B with the same batch. It
  is assumed not to shrink with N. In fact products shrink, so the projected times are too long in this respect.
- all_reduce(N): the time to all-reduce the residual stream, as measured on two GPUs by the loop's wall clock. Each
  doubling of N is assumed to add a quarter of that time, with all N GPUs on one switch of full bandwidth. A host has at
  most eight GPUs. 16 GPUs are two copies of the model over eight GPUs each, which exchange nothing and serve twice the
  sequences.

It is also assumed that these parts follow one another, and that none overlaps with another.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.scale_steps import MODELS, Model
from examples.sharding import make_mesh

MEASURED = "llama3-8b"
GPUS_OF_A_HOST = 8
_GROWTH = 0.25  # the part of an all-reduce's time that each doubling of the GPUs adds
_CONTEXT = 1024


def step_ms(name: str, num_seqs: int, num_gpus: int, model: dict[str, Any], all_reduces: dict[str, Any]) -> float:
    """Milliseconds of a step of `num_seqs` sequences on a copy of the model over `num_gpus` GPUs.

    Raises:
      ValueError: the results lack a case.
    """
    rate = model["ceiling"]["rate"] * 1e9
    measured = 1e-6 * _us(model, f"{MEASURED}-decode-{num_seqs}x{_CONTEXT}", "device")
    rest = (measured - _bytes(MEASURED, num_seqs) / rate) / MODELS[MEASURED].num_layers
    config, seconds = MODELS[name], 0.0
    if num_gpus > 1:
        one = 1e-6 * _us(all_reduces, f"all_reduce/tp=2/{num_seqs}x{config.hidden_size}", "jit")
        seconds = (2 * config.num_layers + 1) * one * (1 + _GROWTH * math.log2(num_gpus / 2))
    return 1e3 * (_bytes(name, num_seqs) / num_gpus / rate + config.num_layers * rest + seconds)


def table(model: dict[str, Any], all_reduces: dict[str, Any], batches: Sequence[int]) -> str:
    """The projection as a table in Markdown. A model that one GPU cannot hold begins at two GPUs."""
    lines = ["| model, batch | 1 GPU | 2 | 4 | 8 | 16: tokens/s |", "|---|---|---|---|---|---|"]
    for name in MODELS:
        for batch in batches:
            sizes = [size for size in (1, 2, 4, 8) if _bytes(name, 0) / size < 120e9]
            times = {size: step_ms(name, batch, size, model, all_reduces) for size in sizes}
            cells = [f"{times[size]:.1f} ms" if size in times else "-" for size in (1, 2, 4, 8)]
            rate = 2 * batch / times[GPUS_OF_A_HOST] * 1e3
            lines.append(f"| {name}, {batch} | {' | '.join(cells)} | {rate:.0f} |")
    return "\n".join(lines)


def _bytes(name: str, num_seqs: int) -> int:
    mesh = make_mesh({"dp": 1, "tp": 1}, jax.devices()[:1])
    return Model(MODELS[name], mesh, _CONTEXT).floor_bytes(num_seqs)


def _us(report: dict[str, Any], case: str, contender: str) -> float:
    for row in report["rows"]:
        if (row["case"], row["contender"]) == (case, contender) and "us" in row:
            return row["us"]
    raise ValueError(f"the result has no time of {case} by {contender}")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale_projection", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="result of bench_model, one GPU")
    parser.add_argument("all_reduce", type=Path, help="result of bench_scale --part all-reduce, two GPUs")
    args = parser.parse_args(argv)
    model, all_reduces = (json.loads(path.read_text()) for path in (args.model, args.all_reduce))
    print(table(model, all_reduces, (1, 64)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
