"""Times steps of whole models with random weights, beside PyTorch's: `python -m benchmarks.bench_model`.

A decode step runs one token of every sequence through all layers, writes its keys and values, and picks the likeliest
next token (`examples.step` and `examples.sampling.greedy`). Three clocks show where its time goes:

    device   the sum of its kernels' times, as CUPTI measures them
    looped   wall clock of many steps in one compiled loop
    called   wall clock of as many calls of the jitted step, one call a token

The device's row also lists the kernels that take longest, as (name, launches, microseconds) of a step.

The floor is the time in which a kernel that only reads gets through the weights and the cached keys and values, once.
The peer (torch_model.py) is plain PyTorch, compiled and captured in a CUDA graph, with one contiguous piece of cache
for each sequence. It runs first, in a process of its own, because JAX would not give back the memory of a large model.
Then all programs compile at the same time, and nothing is timed before the last one is compiled.
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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, timing
from benchmarks.models import BLOCK_SIZE, MODELS, floor_bytes, make_caches, make_model, make_tables, slots
from benchmarks.peers import environment
from examples.config import DecoderConfig
from examples.sampling import greedy
from examples.step import Batch, Step, make_abstract_step
from paged_jax import PagedKVCache

STEPS = 32  # decode steps in a row: half of them before the context asked for, half of them after it
PROMPTS = 8  # prompts in one step of prefill; the others wait for the next step
PROFILED_STEPS = 4  # steps in a row under CUPTI
KERNELS = 24  # a row names so many kernels of a step at the most
TOLERANCE = 2e-2  # largest difference between what two programs write to the cache, relative to its norm


class State(NamedTuple):
    """What changes from step to step: token ids and positions, i32 [num_seqs] each, and the caches."""

    token_ids: Any
    positions: Any
    caches: tuple[PagedKVCache, ...]


def advance(step: Step, weights: Any, state: State, tables: jax.Array) -> State:
    """Runs a step: one token more of every sequence."""
    token_ids, positions, caches = state
    rows = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    batch = Batch(token_ids, positions, slots(tables, rows, positions), tables, positions + 1, is_decode=True)
    logits, caches = step(weights, caches, batch)
    return State(greedy(logits), positions + 1, caches)


def prompts(tables: Any, context: int) -> Batch:
    """A batch of whole prompts, of which the last tokens' logits are wanted."""
    num_seqs = tables.shape[0]
    rows, positions = np.divmod(np.arange(num_seqs * context, dtype=np.int32), np.int32(context))
    starts = np.arange(num_seqs + 1, dtype=np.int32) * np.int32(context)
    return Batch(
        token_ids=jnp.asarray(positions % 1000),
        positions=jnp.asarray(positions),
        slot_mapping=jnp.asarray(slots(tables, rows, positions)),
        block_tables=jnp.asarray(tables),
        seq_lens=jnp.full(num_seqs, context, jnp.int32),
        query_start_loc=jnp.asarray(starts),
        logit_rows=jnp.asarray(starts[1:] - 1),
    )


class Case(NamedTuple):
    """What is timed: a step of "decode" or "prefill", with so many sequences."""

    kind: str
    num_seqs: int


class Work(NamedTuple):
    """What to time of each model: decode steps of these batches, and prompts of these many sequences."""

    batches: Sequence[int]
    prefill: Sequence[int]
    context: int

    @property
    def cases(self) -> list[Case]:
        """All cases, in the order in which they are timed."""
        return [*(Case("decode", n) for n in self.batches), *(Case("prefill", n) for n in self.prefill)]


def lower_call(config: DecoderConfig, step: Step, weights: Any, case: Case, context: int) -> jax.stages.Lowered:
    """Lowers the step that is called once for each token, or once for `PROMPTS` prompts."""
    tables = make_tables(case.num_seqs, context + STEPS)
    if case.kind == "decode":
        state = _abstract_state(config, tables)
        return jax.jit(partial(advance, step), donate_argnums=1).lower(weights, state, tables)
    caches = _abstract_state(config, tables).caches
    return jax.jit(step, donate_argnums=1).lower(weights, caches, prompts(tables[:PROMPTS], context))


def lower_loop(config: DecoderConfig, step: Step, weights: Any, case: Case, context: int) -> jax.stages.Lowered:
    """Lowers the loop of `STEPS` decode steps. XLA knows this number, so the host need not check after each step."""
    tables = make_tables(case.num_seqs, context + STEPS)

    def loop(weights, state, tables):
        return jax.lax.fori_loop(0, STEPS, lambda _, state: advance(step, weights, state, tables), state)

    state = _abstract_state(config, tables)
    return jax.jit(loop, donate_argnums=1).lower(weights, state, tables)


def _abstract_state(config: DecoderConfig, tables: np.ndarray) -> State:
    ids = jax.ShapeDtypeStruct(tables.shape[:1], jnp.int32)
    return State(ids, ids, jax.eval_shape(lambda: make_caches(config, tables.size)))


def compile_all(
    models: dict[str, DecoderConfig], work: Work, options: dict[str, Any] | None
) -> dict[tuple[str, Case], dict[str, concurrent.futures.Future]]:
    """Compiles the programs of all cases that fit, by model and case: "call" and, for decode, "loop"."""
    lowers: dict[tuple[str, Case, str], Callable[[], jax.stages.Lowered]] = {}
    for name, config in models.items():
        weights, step = make_abstract_step(config, jnp.bfloat16)
        for case in work.cases:
            if excess(config, weights, case, work.context) is None:
                made = config, step, weights, case, work.context
                lowers[name, case, "call"] = partial(lower_call, *made)
                if case.kind == "decode":
                    lowers[name, case, "loop"] = partial(lower_loop, *made)
    found: dict[tuple[str, Case], dict[str, concurrent.futures.Future]] = {}
    for (name, case, program), future in harness.compile_all(lowers, options).items():
        found.setdefault((name, case), {})[program] = future
    return found


def excess(config: DecoderConfig, weights: Any, case: Case, context: int) -> str | None:
    """Says why a case does not fit into the device's memory; None where it does, or where its memory is not known."""
    most = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))
    needed = floor_bytes(config, weights, case.num_seqs, context + STEPS)
    return f"weights, keys and values take {needed / 1e9:.0f} GB of {most / 1e9:.0f}" if needed > most else None


def best_seconds(run: Callable[[Any], Any], begin: Callable[[Any], Any], caches: Any) -> tuple[float, Any]:
    """The fewest seconds that `run(begin(caches))` takes, after one run to warm up, and the caches that it leaves."""
    times = []
    for _ in range(4):
        state = jax.block_until_ready(begin(caches))
        began = time.perf_counter()
        caches = jax.block_until_ready(run(state)).caches
        times.append(time.perf_counter() - began)
    return min(times[1:]), caches


class DecodeRun(NamedTuple):
    """Decode steps around a context: half of them before it, half of them after it."""

    call: Any
    weights: Any
    tables: np.ndarray
    context: int

    @property
    def start(self) -> int:
        """Tokens of each sequence before the first step."""
        return self.context - STEPS // 2

    def begin(self, caches: Any) -> State:
        """The first state, in new arrays, since they are donated to the next call."""
        num_seqs = self.tables.shape[0]
        tokens = jnp.arange(num_seqs, dtype=jnp.int32) + 7
        return State(tokens, jnp.full(num_seqs, self.start, jnp.int32), caches)

    def calls(self, state: State, num_steps: int | None = None) -> State:
        """Calls the step once a token."""
        tables = jnp.asarray(self.tables)
        for _ in range(STEPS if num_steps is None else num_steps):
            state = self.call(self.weights, state, tables)
        return state

    def written(self, caches: Any) -> np.ndarray:
        """The keys of the first step's tokens in the last layer, f32 [num_seqs, num_kv_heads, head_size]."""
        num_seqs = self.tables.shape[0]
        first = slots(self.tables, np.arange(num_seqs), np.full(num_seqs, self.start))
        return np.asarray(caches[-1].key_cache[first // BLOCK_SIZE, :, first % BLOCK_SIZE], np.float32)


def time_decode(
    programs: dict[str, Any], weights: Any, caches: Any, tables: np.ndarray, context: int
) -> dict[str, dict[str, Any]]:
    """Times decode steps around a context by all three clocks, and gives what the row of each clock says.

    Raises:
        ValueError: the loop and the single calls do not write the same to the cache.
    """
    steps, block_tables = DecodeRun(programs["call"], weights, tables, context), jnp.asarray(tables)

    def loop(state):
        return programs["loop"](weights, state, block_tables)

    called, caches = best_seconds(steps.calls, steps.begin, caches)
    by_calls = steps.written(caches)
    looped, caches = best_seconds(loop, steps.begin, caches)
    error = np.linalg.norm(steps.written(caches) - by_calls) / np.linalg.norm(by_calls)
    if not error <= TOLERANCE:
        raise ValueError(f"looped and called steps differ, relative error {error:.2g}")

    def few_calls():
        nonlocal caches
        state = steps.calls(steps.begin(caches), PROFILED_STEPS)
        caches = state.caches
        return state

    return {
        "device": device_time(few_calls, PROFILED_STEPS),
        "looped": {"us": 1e6 * looped / STEPS},
        "called": {"us": 1e6 * called / STEPS},
    }


def time_prefill(
    programs: dict[str, Any], weights: Any, caches: Any, tables: np.ndarray, context: int
) -> dict[str, dict[str, Any]]:
    """Times the steps that write whole prompts, `PROMPTS` in each step, and compute the logits of their last tokens.

    Raises:
        ValueError: the logits are not finite.
    """
    batches = [prompts(tables[i : i + PROMPTS], context) for i in range(0, len(tables), PROMPTS)]

    def calls():
        nonlocal caches
        logits = None
        for batch in batches:
            logits, caches = programs["call"](weights, caches, batch)
        return logits

    times = []
    for _ in range(4):  # the first one warms up
        began = time.perf_counter()
        logits = jax.block_until_ready(calls())
        times.append(time.perf_counter() - began)
        if not np.isfinite(np.asarray(logits)).all():
            raise ValueError("the prompts' logits are not finite")
    return {"device": device_time(calls, 1), "called": {"us": 1e6 * min(times[1:])}}


def device_time(run: Callable[[], Any], num_steps: int) -> dict[str, Any]:
    """Microseconds of kernels in one of `run`'s steps, and the kernels; no "us" where CUPTI sees none, as on a CPU."""
    if jax.default_backend() != "gpu":
        return {"absent": "no GPU"}
    try:
        return by_kernel(timing.kernel_times(run), num_steps)
    except Exception as error:  # the other clocks' times are still worth having
        return {"failed": harness.first_line(error)}


def by_kernel(launches: Sequence[tuple[str, float]], num_steps: int) -> dict[str, Any]:
    """A row made of launches, (name, microseconds): the time of all together, and the kernels that take most of it."""
    total: dict[str, tuple[int, float]] = {}
    for name, us in launches:
        count, before = total.get(name[:120], (0, 0.0))
        total[name[:120]] = count + 1, before + us
    longest = sorted(total.items(), key=lambda item: -item[1][1])[:KERNELS]
    kernels = [[name, count / num_steps, us / num_steps] for name, (count, us) in longest]
    return {"us": sum(us for _, us in launches) / num_steps, "kernels": kernels}


def peer_answers(
    models: dict[str, DecoderConfig], work: Work, seconds: float
) -> dict[tuple[str, str, int], dict[str, Any]]:
    """PyTorch's times by model, kind of step and number of sequences; cases that it did not get to are missing."""
    sizes = {name: dataclasses.asdict(config) for name, config in models.items()}
    command = [sys.executable, "-m", "benchmarks.torch_model"]
    pipe, env = subprocess.PIPE, environment()
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps({"models": sizes, "steps": STEPS, **work._asdict()}))
            process.stdin.close()
            answers = [json.loads(line) for line in process.stdout]
        finally:
            timer.cancel()
            process.kill()
    return {(answer.pop("model"), answer.pop("kind"), answer.pop("num_seqs")): answer for answer in answers}


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
    report |= {"xla_options": options or {}, "steps": STEPS, "context": work.context}
    peer_rows: list[dict[str, Any]] = []  # these rows are last in the file, but they are saved first
    if answers := peers():
        for name, config in models.items():
            weights, _ = make_abstract_step(config, jnp.bfloat16)
            for case in work.cases:
                answer = answers.get((name, case.kind, case.num_seqs), {"absent": "its process ended early"})
                row = _new_row(name, config, weights, case, work.context, "torch", "peer", answer, measured)
                peer_rows.append(row)
        rows += peer_rows
        harness.save(report, out)
    began = time.perf_counter()
    programs = compile_all(models, work, options or None)
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
    """Yields what each clock says of a case."""
    try:
        if programs is None:
            raise ValueError(excess(config, weights, case, context))
        compiled = {program: future.result() for program, future in programs.items()}
        tables = make_tables(case.num_seqs, context + STEPS)
        caches = make_caches(config, tables.size)
        timer = time_prefill if case.kind == "prefill" else time_decode
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
    is_prefill = case.kind == "prefill"
    label = f"{name}-{case.kind}-{case.num_seqs}x{context}"
    needed = floor_bytes(config, weights, case.num_seqs, context)
    row = harness.row_of(label, needed, contender, kind, answer, None if is_prefill else ceiling)
    row |= {"model": name, "kind_of_step": case.kind, "num_seqs": case.num_seqs}
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

    def numbers(text: str) -> list[int]:
        return [] if text == "none" else [int(number) for number in text.split(",")]

    def option(text: str) -> tuple[str, Any]:
        name, _, value = text.partition("=")
        return name, json.loads(value) if value in ("true", "false") or value.isdigit() else value

    parser.add_argument("--models", default="llama3-8b", help=f"of {','.join(MODELS)}; default llama3-8b")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 64, 256], help="that decode; default 1,8,64,256")
    parser.add_argument(
        "--prefill", type=numbers, default=[64], help=f"prompts, a multiple of {PROMPTS} or fewer; or none; default 64"
    )
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence; default 1024")
    parser.add_argument("--peers", choices=("torch", "none"), default="torch")
    parser.add_argument("--peer-seconds", type=float, default=300, help="when to give the peer up; default 300")
    parser.add_argument("--xla", type=option, action="append", default=[], metavar="NAME=VALUE",
        help="an option for XLA, such as xla_gpu_graph_min_graph_size=1073741824 (no command buffers)")  # fmt: skip
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if unknown := set(args.models.split(",")) - set(MODELS):
        parser.error(f"no model is named {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    if any(count > PROMPTS and count % PROMPTS for count in args.prefill):
        parser.error(f"--prefill must be multiples of {PROMPTS}, or fewer, got {args.prefill}")
    if args.context < STEPS or args.context % BLOCK_SIZE:
        parser.error(f"--context must be a multiple of {BLOCK_SIZE} from {STEPS} on, got {args.context}")
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
