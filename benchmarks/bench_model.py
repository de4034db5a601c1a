"""Times steps of whole models with random weights, beside PyTorch's: `python -m benchmarks.bench_model`.

A decode step runs one token of every sequence through all layers, writes its keys and values, and picks the likeliest
next token (`examples.step` and `examples.sampling.greedy`). Three clocks show where its time goes:

    device   the sum of its kernels' times, as CUPTI measures them
    looped   wall clock of many steps in one compiled loop
    called   wall clock of the same number of calls of the jitted step, one call for each token

The device's row also lists the slowest kernels, as (name, launches, microseconds) of a step.

The floor is the time in which a read-only kernel reads the weights and the cached keys and values once. It counts only
the experts that are used and, in layers with a window, only the tokens inside the window. The peer (torch_model.py) is
plain PyTorch, compiled and captured in a CUDA graph, with one contiguous cache for each sequence; for models with
experts, windows or latents it is transformers (torch_hub_model.py). The peer runs first, in a process of its own,
because JAX would not give back the memory of a large model. Then all our programs compile at the same time, and nothing
is timed before the last one is compiled.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from benchmarks import harness, model_clocks, model_steps, timing
from benchmarks.model_steps import PROMPTS, Case, Work
from benchmarks.models import BLOCK_SIZE, HUB_CONFIGS, MODELS, floor_bytes, make_caches, make_model, make_tables
from benchmarks.peers import environment
from examples.config import DecoderConfig
from examples.step import make_abstract_step


def peer_answers(
    models: dict[str, DecoderConfig], work: Work, seconds: float
) -> dict[tuple[str, str, int], dict[str, Any]]:
    """PyTorch's times by model, phase and number of sequences. Cases that it did not reach are missing."""
    sizes = {name: HUB_CONFIGS.get(name) or dataclasses.asdict(config) for name, config in models.items()}
    command = [sys.executable, "-m", "benchmarks.torch_model"]
    pipe, env = subprocess.PIPE, environment()
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps({"models": sizes, "steps": model_steps.STEPS, **work._asdict()}))
            process.stdin.close()
            answers = [json.loads(line) for line in process.stdout]
        finally:
            timer.cancel()
            process.kill()
    return {(answer.pop("model"), answer.pop("phase"), answer.pop("num_seqs")): answer for answer in answers}


def run(
    models: dict[str, DecoderConfig],
    work: Work,
    *,
    peers: Callable[[], dict[tuple[str, str, int], dict[str, Any]]] = dict,
    options: dict[str, Any] | None = None,
    out: Path | None = None,
    ceiling: Callable[[], timing.Ceiling] = lambda: timing.read_ceiling([]),
) -> dict[str, Any]:
    """Times all models, and returns what it writes to `out`."""
    measured = dataclasses.replace(ceiling(), us={})
    rows: list[dict[str, Any]] = []
    report = {"op": "model", **harness.environment(), "ceiling": dataclasses.asdict(measured), "rows": rows}
    report |= {"xla_options": options or {}, "steps": model_steps.STEPS, "context": work.context}
    peer_rows: list[dict[str, Any]] = []  # these rows are last in the file, but they are saved first
    if answers := peers():
        for name, config in models.items():
            weights, _ = make_abstract_step(config, jnp.bfloat16)
            for case in work.cases:
                answer = answers.get((name, case.phase, case.num_seqs), {"absent": "its process ended early"})
                row = _new_row(name, config, weights, case, work.context, "torch", "peer", answer, measured)
                peer_rows.append(row)
        rows += peer_rows
        harness.save(report, out)
    began = time.perf_counter()
    programs = model_steps.compile_all(models, work, options or None)
    print(f"compiled for {len(programs)} cases in {time.perf_counter() - began:.0f} s", flush=True)
    for name, config in models.items():
        weights, _ = make_model(config)
        for case in work.cases:
            clocks = _clocks(config, weights, programs.get((name, case)), case, work.context)
            for clock, answer in clocks.items():
                row = _new_row(name, config, weights, case, work.context, clock, "implementation", answer, measured)
                rows.insert(len(rows) - len(peer_rows), row)
            harness.save(report, out)
        del weights
    return report


def _clocks(
    config: DecoderConfig, weights: Any, programs: dict[str, concurrent.futures.Future] | None, case: Case, context: int
) -> dict[str, dict[str, Any]]:
    """Each clock's answer for a case: a time or, if the case fails or does not fit, a reason."""
    if programs is None:
        return {"called": {"absent": model_steps.excess(config, weights, case, context)}}
    try:
        compiled = {program: future.result() for program, future in programs.items()}
        tables = make_tables(case.num_seqs, context + model_steps.STEPS)
        caches = make_caches(config, tables.size)
        timer = model_clocks.time_prefill if case.phase == "prefill" else model_clocks.time_decode
        return timer(compiled, weights, caches, tables, context)
    except Exception as error:  # mostly because memory ran out: the next case may fit
        return {"called": {"failed": harness.first_line(error)}}


def _new_row(
    name: str,
    config: DecoderConfig,
    weights: Any,
    case: Case,
    context: int,
    contender: str,
    kind: str,
    answer: dict[str, Any],
    ceiling: timing.Ceiling,
) -> dict[str, Any]:
    """Makes a contender's row, and prints it."""
    is_prefill = case.phase == "prefill"
    label = f"{name}-{case.phase}-{case.num_seqs}x{context}"
    needed = floor_bytes(config, weights, case.num_seqs, context)
    row = harness.row_of(label, needed, contender, kind, answer, None if is_prefill else ceiling)
    row |= {"model": name, "phase": case.phase, "num_seqs": case.num_seqs}
    text = f"{row['case']:28} {row['contender']:8}"
    if "us" not in row:
        print(f"{text} {row.get('absent') or row.get('failed')}", flush=True)
        return row
    text += f" {row['us'] / 1e3:9.3f} ms"
    if is_prefill:
        row["tokens_per_s"] = case.num_seqs * context / row["us"] * 1e6
        text += f" {row['tokens_per_s']:9.0f} tokens/s"
    print(text + (f" {row['share']:.0%} of the floor's speed" if "share" in row else ""), flush=True)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_model", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )

    def option(text: str) -> tuple[str, Any]:
        name, _, value = text.partition("=")
        return name, json.loads(value) if value in ("true", "false") or value.isdigit() else value

    parser.add_argument("--models", default="llama3-8b", help=f"of {','.join(MODELS)}; default llama3-8b")
    parser.add_argument(
        "--batches", type=harness.numbers, default=[1, 8, 64, 256], help="that decode; default 1,8,64,256"
    )
    parser.add_argument(
        "--prefill",
        type=harness.numbers,
        default=[64],
        help=f"prompts, a multiple of {PROMPTS} or fewer; or none; default 64",
    )
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence; default 1024")
    parser.add_argument("--peers", choices=("torch", "none"), default="torch")
    parser.add_argument("--peer-seconds", type=float, default=300, help="when to give the peer up; default 300")
    parser.add_argument("--xla", type=option, action="append", default=[], metavar="NAME=VALUE",
        help="an option for XLA, such as xla_gpu_graph_min_graph_size=1073741824 (no command buffers)")  # fmt: skip
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    harness.check_names(parser, "model", args.models.split(","), MODELS)
    if any(count > PROMPTS and count % PROMPTS for count in args.prefill):
        parser.error(f"--prefill must be multiples of {PROMPTS}, or fewer, got {args.prefill}")
    if args.context < model_steps.STEPS or args.context % BLOCK_SIZE:
        parser.error(f"--context must be a multiple of {BLOCK_SIZE} from {model_steps.STEPS} on, got {args.context}")
    # JAX would take most of the memory at once, and the peer could not run.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not harness.has_gpu("model"):
        return 2
    models = {name: MODELS[name] for name in args.models.split(",")}
    work = Work(args.batches, args.prefill, args.context)
    peers = partial(peer_answers, models, work, args.peer_seconds) if args.peers == "torch" else dict
    run(models, work, peers=peers, options=dict(args.xla), out=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
