"""Serves many requests by `paged_jax.engine`, with a whole model's shapes: `python -m benchmarks.bench_serving`.

No token ends a request early. The lengths of requests are one of the workloads of serving_requests.py. The runs are:

    at-once            all requests wait at the beginning
    at-once-shared     the same, but the first half of each prompt is the beginning of one text
    prompts            some of the requests, with one token each: this shows the time of their prompts alone
    prompts-shared     the same with the shared halves of at-once-shared
    poisson            requests come one by one at random times, at a given mean rate
    subset             some of the requests at once, beside transformers' continuous batching (transformers_serving.py)

The bound of a run is the time in which the bare model could do its work. It has two terms. The first is the time of the
prompt tokens that the engine computed, at the rate of its best step full of prompts. The second adds, for each step,
the time of a bare decode step with one row for each token of that step. (A request's first token comes from its prompt,
and does not count.) Both are measured here: the engine's own compiled steps run on made-up sequences, one after the
other, with nothing between them.

How busy the GPU is: the sum of all kernels' times by CUPTI, over the wall clock of the same run. Kernels run one after
the other, so gaps between two of them count as idle. All other times come from that run, too.

Contiguous preallocation would give each sequence room for the longest request. The report says how many sequences would
then fit in the pool.
"""

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, model_clocks, timing
from benchmarks.models import BLOCK_SIZE, MODELS, make_model
from benchmarks.peers import environment
from benchmarks.serving_requests import WORKLOADS, Request, Workload, make_requests, workload
from examples.config import DecoderConfig
from examples.step import xla_options
from paged_jax import PagedKVCache, engine

SAMPLED = 16  # steps from one sample of the engine's statistics to the next
START_S = 45  # seconds that transformers may take to start, and to end
RUNS = ("at-once", "at-once-shared", "prompts", "prompts-shared", "poisson", "subset")


class Step(NamedTuple):
    """A step: when it was done, in seconds; its tokens, except requests' first ones; how many sequences ran in it."""

    seconds: float
    num_decoded: int
    num_running: int


@dataclasses.dataclass
class Trace:
    """The record of a run.

    Attributes:
        stamps: for each request, the seconds at which its tokens arrived.
        steps: the steps, in order.
        samples: the engine's statistics, once every `SAMPLED` steps.
        seconds: how long the whole run took.
        stats: the engine's statistics at the end.
    """

    stamps: list[list[float]]
    steps: list[Step]
    samples: list[engine.Stats]
    seconds: float
    stats: engine.Stats


def serve(the_engine: engine.Engine, requests: Sequence[Request]) -> Trace:
    """Runs the requests through an engine that has been reset; its requests' numbers start at 0."""
    stamps: list[list[float]] = [[] for _ in requests]
    steps, samples, added = [], [], 0
    began = time.perf_counter()
    while added < len(requests) or the_engine.has_work:
        now = time.perf_counter() - began
        while added < len(requests) and requests[added].arrival <= now:
            request = requests[added]
            the_engine.add_request(request.prompt, engine.SamplingParams(max_tokens=request.max_tokens))
            added += 1
        if not the_engine.has_work:
            time.sleep(max(requests[added].arrival - now, 0))
            continue
        deltas = the_engine.step()
        now = time.perf_counter() - began
        decoded = sum(bool(stamps[delta.request_id]) for delta in deltas)
        for delta in deltas:
            stamps[delta.request_id] += [now] * len(delta.token_ids)
        steps.append(Step(now, decoded, the_engine.num_running))
        if len(steps) % SAMPLED == 0:
            samples.append(the_engine.stats())
    return Trace(stamps, steps, samples, time.perf_counter() - began, the_engine.stats())


def serve_and_profile(the_engine: engine.Engine, requests: Sequence[Request]) -> tuple[Trace, dict[str, Any]]:
    """Runs the requests. On a GPU it also sums the times of all kernels, and of each of the slowest ones."""
    if jax.default_backend() != "gpu":
        return serve(the_engine, requests), {}
    traces: list[Trace | None] = []

    def run():
        traces.append(serve(the_engine, requests) if traces else None)  # the first call only warms up

    launches = timing.kernel_times(run)
    trace = cast(Trace, traces[1])
    longest = model_clocks.by_kernel(launches, len(trace.steps))
    return trace, {"busy": 1e-6 * sum(us for _, us in launches) / trace.seconds, "kernels": longest["kernels"]}


class Rates(NamedTuple):
    """The bare model's speed: prompt tokens a second, and the microseconds of a decode step by its number of rows."""

    prompt_tokens_per_s: float
    decode_us: dict[int, float]

    def bound(self, num_prompt_tokens: int, decoded: Sequence[int]) -> float:
        """The least time, in seconds, for this many tokens of prompts and for decode steps of these numbers of rows."""
        rows = sorted(self.decode_us)
        times = np.interp([n for n in decoded if n], rows, [self.decode_us[n] for n in rows])
        return num_prompt_tokens / self.prompt_tokens_per_s + 1e-6 * float(times.sum())


def measure_rates(the_engine: engine.Engine, context: int) -> Rates:
    """Times the engine's bare steps, of decode rows and of prompts of `context` tokens."""
    times = the_engine.measure_steps(context)
    prompts = [
        shape.num_tokens / seconds for shape, seconds in times.items() if shape.num_prompts and not shape.is_verify
    ]
    return Rates(max(prompts), {shape.num_rows: 1e6 * times[shape] for shape in times if shape.is_decode})


def describe(
    trace: Trace, requests: Sequence[Request], rates: Rates | None, num_blocks: int, longest: int
) -> dict[str, Any]:
    """Makes a run's row of the report."""
    first = [stamps[0] - request.arrival for stamps, request in zip(trace.stamps, requests, strict=True)]
    row = {"us": 1e6 * trace.seconds, "requests": len(requests), **latencies(trace.stamps, first)}
    num_tokens = sum(map(len, trace.stamps))
    row["requests_per_s"] = len(requests) / trace.seconds
    row |= {"output_tokens": num_tokens, "tokens_per_s": num_tokens / trace.seconds}
    row["prompt_tokens"] = sum(len(request.prompt) for request in requests)
    row["prompt_tokens_computed"] = trace.stats.num_prompt_tokens
    if rates is not None:
        row["bound_s"] = rates.bound(trace.stats.num_prompt_tokens, [step.num_decoded for step in trace.steps])
        row["share_of_bound"] = row["bound_s"] / trace.seconds
    if trace.samples:
        waste = [stats.waste for stats in trace.samples]
        row["waste"] = {"mean": float(np.mean(waste)), "most": max(waste)}
    running = [step.num_running for step in trace.steps]
    sequences: dict[str, float] = {"most": max(running), "contiguous": num_blocks * BLOCK_SIZE // longest}
    if crowded := [stats.num_running for stats in trace.samples if stats.num_waiting]:
        sequences["mean while others wait"] = float(np.mean(crowded))
    row["sequences"] = sequences
    stats = trace.stats
    row |= {"steps": len(running), "hit_rate": stats.hit_rate, "preempted": stats.num_recomputed + stats.num_swapped}
    every = max(len(running) // 200, 1)
    row["timeline"] = [[round(step.seconds, 3), step.num_running] for step in trace.steps[::every]]
    return row


def latencies(stamps: Sequence[Sequence[float]], first: Sequence[float]) -> dict[str, Any]:
    """Milliseconds to first tokens and between tokens: medians, 99th percentiles, and every percentile for plots."""
    gaps = np.concatenate([np.diff(times) for times in stamps])
    found = {}
    for name, seconds in {"first_token_ms": np.asarray(first), "between_tokens_ms": gaps}.items():
        ms = np.percentile(1e3 * seconds, np.arange(101)) if seconds.size else np.zeros(101)
        found[name] = {"median": ms[50], "p99": ms[99], "percentiles": np.round(ms, 2).tolist()}
    return found


def transformers_answer(config: DecoderConfig, requests: Sequence[Request], limit_s: float) -> dict[str, Any]:
    """The row of transformers' continuous batching on these requests, stopped after `limit_s`, or why there is none."""
    work = {"sizes": dataclasses.asdict(config), "requests": [(r.prompt, r.max_tokens) for r in requests]}
    command = [sys.executable, "-m", "benchmarks.transformers_serving"]
    text, limit = json.dumps(work | {"limit_s": limit_s}), limit_s + START_S
    pipe, env = subprocess.PIPE, environment()
    try:
        done = subprocess.run(command, input=text, stdout=pipe, text=True, timeout=limit, check=False, env=env)
    except subprocess.TimeoutExpired:
        return {"absent": f"gave nothing in {limit:.0f} s"}
    if not done.stdout.strip():
        return {"absent": f"its process ended with exit code {done.returncode}"}
    answer = json.loads(done.stdout.splitlines()[-1])
    if "absent" in answer:
        return answer
    stamps = answer.pop("stamps")
    num_tokens = sum(map(len, stamps))
    answer |= {"requests": len(requests), "output_tokens": num_tokens, "tokens_per_s": num_tokens / answer["us"] * 1e6}
    answer["all_tokens"] = sum(r.max_tokens for r in requests)
    return answer | latencies([times for times in stamps if times], [times[0] for times in stamps if times])


class Setup(NamedTuple):
    """A model, its engine and its requests.

    Attributes:
        name, config: the model's name and sizes.
        options: the options of `examples.step.make_step`.
        num_blocks: the number of blocks of the pool.
        engine_config: the engine's sizes.
        workload: the lengths of requests.
        requests: how many requests the runs have.
        few, streamed: how many requests the runs "prompts" and "subset" have, and the run "poisson".
        rate: requests a second in the Poisson run; None for 0.8 times the rate that the run at-once reached.
        compiler_options: the engine's compiler options.
    """

    name: str
    config: DecoderConfig
    options: dict[str, Any]
    num_blocks: int
    engine_config: engine.EngineConfig
    workload: Workload = workload("mixed")
    requests: int = 1000
    few: int = 256
    streamed: int = 1000
    rate: float | None = None
    compiler_options: engine.CompilerOptions = xla_options


def make_engine(setup: Setup, step: Any, weights: Any) -> engine.Engine:
    """The engine, compiled and warmed up."""
    shape = setup.num_blocks, BLOCK_SIZE, setup.config.num_kv_heads, setup.config.head_size
    caches = tuple(PagedKVCache.create(*shape, dtype=jnp.bfloat16) for _ in range(setup.config.num_layers))
    return engine.Engine(
        step, weights, caches, setup.engine_config, show_progress=True, compiler_options=setup.compiler_options
    )


def run(
    setup: Setup, runs: Sequence[str] = RUNS, *, peer_seconds: float | None = None, out: Path | None = None
) -> dict[str, Any]:
    """Does the runs, and returns what it writes to `out`. transformers gets `peer_seconds`, or does not run (None)."""
    rows: list[dict[str, Any]] = []
    report = {"op": "serving", "model": setup.name, **harness.environment(), "rows": rows}
    lengths = {name: getattr(setup.workload, name) for name in ("prompt_lens", "output_lens")}
    report |= {"workload": lengths, "step": setup.options, "num_blocks": setup.num_blocks, "block_size": BLOCK_SIZE}
    report |= {"engine": {key: value for key, value in vars(setup.engine_config).items() if value is not None}}
    weights, step = make_model(setup.config, **setup.options)
    began = time.perf_counter()
    the_engine = make_engine(setup, step, weights)
    report["start_s"] = time.perf_counter() - began
    gc.freeze()  # as examples/serve.py does
    print(f"the engine has started in {report['start_s']:.1f} s", flush=True)
    rates = measure_rates(the_engine, setup.workload.context)
    report |= {"rates": rates._asdict()}
    print(rates, flush=True)
    vocab_size = setup.config.vocab_size
    for name in runs:
        rate, count = None, setup.requests
        if name == "poisson":
            count = setup.streamed
            rate = setup.rate or 0.8 * next((r["requests"] / r["us"] * 1e6 for r in rows if r["case"] == "at-once"), 20)
        if name in ("prompts", "prompts-shared", "subset"):
            count = setup.few
        requests = make_requests(setup.workload, count, vocab_size, is_shared=name.endswith("-shared"), rate=rate)
        if name.startswith("prompts"):
            requests = [request._replace(max_tokens=1) for request in requests]
        the_engine.reset()
        trace, profile = serve_and_profile(the_engine, requests)
        row = {"case": name, "contender": "engine", "kind": "implementation"}
        row |= describe(trace, requests, rates, setup.num_blocks, setup.workload.longest) | profile
        rows.append(row | ({"rate_per_s": rate} if rate else {}))
        _say(report, out)
    if peer_seconds is not None:  # the engine keeps its memory meanwhile: there is enough for both
        rows.append({"case": "subset", "contender": "transformers", "kind": "peer"})
        requests = make_requests(setup.workload, setup.few, vocab_size)
        rows[-1] |= transformers_answer(setup.config, requests, peer_seconds)
        _say(report, out)
    return report


def _say(report: dict[str, Any], out: Path | None) -> None:
    """Prints the last row in a few words, and writes the file anew."""
    row = report["rows"][-1]
    words = [f"{row['case']:16} {row['contender']:12}"]
    if "us" in row:
        words += [f"{row['us'] / 1e6:7.2f} s {row['tokens_per_s']:7.0f} tokens/s"]
        words += [f"{name} {row[name]:.1%}" for name in ("busy", "share_of_bound") if name in row]
        words += [f"{row['requests_per_s']:.1f} requests/s"] if "requests_per_s" in row else []
        words += [f"first token {row['first_token_ms']['median']:.0f} ms"]
        words += [f"between tokens {row['between_tokens_ms']['median']:.1f} ms, {row['between_tokens_ms']['p99']:.1f}"]
    print(*words, row.get("absent", ""), flush=True)
    for row in report["rows"]:  # tokens a second are compared, not times, because a peer may be stopped
        if row["kind"] == "implementation":
            peers = [r for r in report["rows"] if (r["kind"], r["case"]) == ("peer", row["case"])]
            speeds = {peer["contender"]: peer.get("tokens_per_s") for peer in peers}
            row["times"] = {name: row["tokens_per_s"] / speed for name, speed in speeds.items() if speed}
    harness.write(report, out)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_serving", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )

    add = parser.add_argument
    add("--model", choices=tuple(MODELS), default="llama3-8b", help="whose shapes; default llama3-8b")
    add("--workload", choices=WORKLOADS, default="mixed", help="how long requests are; default mixed")
    add("--requests", type=int, default=1000, help="default 1000")
    add("--few", type=int, default=256, help="of the runs of some requests; default 256")
    add("--streamed", type=int, default=1000, help="of the Poisson run; default 1000")
    add("--rate", type=float, help="requests a second; default 0.8 times what the engine did when all came at once")
    add("--runs", type=lambda text: text.split(","), default=list(RUNS), help=f"default {','.join(RUNS)}")
    add("--num-blocks", type=int, default=16000, help="blocks of 16 tokens; default 16000")
    add("--max-num-seqs", type=int, default=512, help="sequences that run at the same time; default 512")
    add("--max-tokens-per-step", type=int, default=2048, help="default 2048")
    add("--decode-rows", type=harness.numbers, default=(64, 128, 256, 512), help="as the engine's")
    add("--mixed-tokens", type=harness.numbers, default=(1024, 2048), help="as the engine's")
    add("--speculate", type=int, default=0, help="guessed tokens of a text that a step verifies; default 0")
    add("--implementation", help="of the paged ops; default the library's choice")
    add("--peer-seconds", type=float, default=200, help="when to stop transformers, 0 = without it; default 200")
    add("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    harness.check_names(parser, "run", args.runs, RUNS)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code, 2 where there is no GPU."""
    args = parse(argv)
    # JAX would take most of the memory at once, and the peer could not run.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not harness.has_gpu("serving"):
        return 2
    lengths = workload(args.workload)
    engine_config = engine.EngineConfig(
        max_model_len=lengths.longest,
        max_num_seqs=args.max_num_seqs,
        max_tokens_per_step=args.max_tokens_per_step,
        decode_rows=args.decode_rows,
        mixed_tokens=args.mixed_tokens,
        max_draft_tokens=args.speculate,
    )
    options = {"implementation": args.implementation}
    sizes = MODELS[args.model], options, args.num_blocks, engine_config
    setup = Setup(args.model, *sizes, lengths, args.requests, args.few, args.streamed, args.rate)
    run(setup, args.runs, peer_seconds=args.peer_seconds or None, out=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
