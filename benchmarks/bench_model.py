"""Steps of whole models with random weights, beside PyTorch's: `python -m benchmarks.bench_model`.

A decode step is one token of every sequence through all layers, its keys and values written, its likeliest next token
picked: `examples.step` and `examples.sampling.greedy`. Three clocks show where its time goes:

    device   the sum of its kernels, as CUPTI measures them
    looped   wall clock of many steps in one compiled `lax.while_loop`
    called   wall clock of as many calls of the jitted step, one a token

The floor is the time in which a kernel that only reads gets through the weights and the cached keys and values, once.
The peer (torch_model.py) is plain PyTorch, compiled and captured in a CUDA graph, over caches of one contiguous piece
a sequence. It runs first, in a process of its own, so that its memory is free again when JAX takes its own.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, timing
from examples.config import DecoderConfig, Rope
from examples.sampling import greedy
from examples.step import Batch, Step, make_abstract_step
from paged_jax import PagedKVCache

BLOCK_SIZE = 16
STEPS = 32  # in a row; half of them before the context asked for, half of them after it
PROFILED_STEPS = 4  # in a row, under CUPTI
TOLERANCE = 2e-2  # between what two programs write to the cache, of its norm


def _llama(num_layers: int, sizes: tuple[int, int, int], heads: tuple[int, int], qkv_bias: bool) -> DecoderConfig:
    vocab_size, hidden_size, intermediate_size = sizes
    return DecoderConfig(
        family="llama",
        vocab_size=vocab_size,
        embedding_size=hidden_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=128,
        max_position_embeddings=8192,
        norm_eps=1e-5,
        pre_norm=True,
        final_norm=True,
        qk_norm=False,
        qkv_bias=qkv_bias,
        o_bias=False,
        mlp_bias=False,
        tie_embeddings=False,
        rope=Rope(5e5),
        sliding_windows=(None,) * num_layers,
    )


MODELS = {
    "llama3-8b": _llama(32, (128256, 4096, 14336), (32, 8), False),
    "qwen2-7b": _llama(28, (152064, 3584, 18944), (28, 4), True),
    "opt-30b": dataclasses.replace(
        _llama(48, (50272, 7168, 28672), (56, 56), True),
        family="opt",
        max_position_embeddings=2048,
        o_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
        rope=None,
    ),
}


class State(NamedTuple):
    """What changes from step to step: i32 [num_seqs] each, and the caches."""

    token_ids: jax.Array
    positions: jax.Array
    caches: tuple[PagedKVCache, ...]


class Times(NamedTuple):
    """Microseconds a step; see the top of this file."""

    device: float | None
    looped: float
    called: float


def make_model(config: DecoderConfig) -> tuple[Any, Step]:
    """Random weights, normal with deviation 1/50 (norms: 1, biases: 0), and the step that takes them."""
    shapes, step = make_abstract_step(config, jnp.bfloat16)

    @partial(jax.jit, static_argnums=(1, 2))
    def normal(key, shape, dtype):
        return (jax.random.normal(key, shape, dtype) * 0.02).astype(dtype)

    def random(path, leaf):
        name = path[-1].key
        if name in ("scale", "bias"):
            return jnp.full(leaf.shape, 1 if name == "scale" else 0, leaf.dtype)
        key = jax.random.fold_in(jax.random.key(0), zlib.crc32(jax.tree_util.keystr(path).encode()) % 2**31)
        return normal(key, leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(random, shapes), step


def make_caches(config: DecoderConfig, num_seqs: int, context: int) -> tuple[tuple[PagedKVCache, ...], np.ndarray]:
    """Caches full of random numbers, and block tables whose blocks lie in no order."""
    blocks_per_seq = -(-(context + STEPS) // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_per_seq
    tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(num_seqs, blocks_per_seq)

    @jax.jit
    def fill(key):
        shape = num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_size
        return jax.random.normal(key, shape, jnp.bfloat16)

    keys = jax.random.split(jax.random.key(1), (config.num_layers, 2))
    return tuple(PagedKVCache(fill(key), fill(value)) for key, value in keys), tables


def floor_bytes(config: DecoderConfig, weights: Any, num_seqs: int, context: int) -> int:
    """Bytes that a step cannot do without: the weights, of lookup tables nothing, and all keys and values."""
    tables = ["embed_positions"] if config.tie_embeddings else ["embed_positions", "embed_tokens"]
    read = {name: part for name, part in weights.items() if name not in tables}
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(read))
    return size + 2 * config.num_layers * config.num_kv_heads * config.head_size * 2 * num_seqs * context


def slots(tables: Any, rows: Any, positions: Any) -> Any:
    """Where the tokens at these positions of these rows lie in the cache, of NumPy or of JAX arrays."""
    return tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


def advance(step: Step, weights: Any, state: State, tables: jax.Array) -> State:
    """One token more of every sequence."""
    token_ids, positions, caches = state
    rows = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    batch = Batch(token_ids, positions, slots(tables, rows, positions), tables, positions + 1, is_decode=True)
    logits, caches = step(weights, caches, batch)
    return State(greedy(logits), positions + 1, caches)


def time_decode(
    step: Step, weights: Any, caches: Any, tables: np.ndarray, context: int, options: dict[str, Any] | None
) -> tuple[Times, Any]:
    """Times decode steps around a context, in both ways of running them, and returns the caches too.

    Raises:
        ValueError: the two ways do not write the same to the cache.
    """
    num_seqs, start = tables.shape[0], context - STEPS // 2
    block_tables = jnp.asarray(tables)
    call = jax.jit(partial(advance, step), donate_argnums=1, compiler_options=options)

    @partial(jax.jit, donate_argnums=1, compiler_options=options)
    def loop(weights, state, tables, num_steps):
        return jax.lax.fori_loop(0, num_steps, lambda _, state: advance(step, weights, state, tables), state)

    def calls(state):
        for _ in range(STEPS):
            state = call(weights, state, block_tables)
        return state

    def begin(caches):
        # Arrays of their own, since the next call takes them for good.
        tokens = jnp.arange(num_seqs, dtype=jnp.int32) + 7
        return State(tokens, jnp.full(num_seqs, start, jnp.int32), caches)

    def best(run, caches):
        times = []
        for _ in range(4):  # the first one compiles
            state = jax.block_until_ready(begin(caches))
            began = time.perf_counter()
            caches = jax.block_until_ready(run(state)).caches
            times.append(time.perf_counter() - began)
        return 1e6 * min(times[1:]) / STEPS, caches

    def written(caches):
        first = slots(tables, np.arange(num_seqs), np.full(num_seqs, start))
        pool = caches[-1].key_cache
        return np.asarray(pool[first // BLOCK_SIZE, :, first % BLOCK_SIZE], np.float32)

    called, caches = best(calls, caches)
    by_calls = written(caches)
    looped, caches = best(lambda state: loop(weights, state, block_tables, jnp.int32(STEPS)), caches)
    error = np.linalg.norm(written(caches) - by_calls) / np.linalg.norm(by_calls)
    if not error <= TOLERANCE:
        raise ValueError(f"looped and called steps differ, relative error {error:.2g}")

    def few_calls():
        nonlocal caches
        state = begin(caches)
        for _ in range(PROFILED_STEPS):
            state = call(weights, state, block_tables)
        caches = state.caches
        return state

    return Times(_device_us(few_calls), looped, called), caches


def _device_us(run: Callable[[], Any]) -> float | None:
    """Microseconds of kernels in each of `run`'s steps; None where CUPTI sees none, as on a CPU."""
    if jax.default_backend() != "gpu":
        return None
    try:
        return sum(us for _, us in timing.kernel_times(run)) / PROFILED_STEPS
    except Exception as error:  # the other clocks' times are still worth having
        print(f"no device time: {harness.first_line(error)}", flush=True)
        return None


def time_prefill(
    step: Step, weights: Any, caches: Any, tables: np.ndarray, context: int, options: dict[str, Any] | None
) -> float:
    """Microseconds in which a step writes whole prompts, and finds the logits of their last tokens."""
    num_seqs = tables.shape[0]
    rows, positions = np.divmod(np.arange(num_seqs * context, dtype=np.int32), np.int32(context))
    starts = np.arange(num_seqs + 1, dtype=np.int32) * np.int32(context)
    batch = Batch(
        token_ids=jnp.asarray(positions % 1000),
        positions=jnp.asarray(positions),
        slot_mapping=jnp.asarray(slots(tables, rows, positions)),
        block_tables=jnp.asarray(tables),
        seq_lens=jnp.full(num_seqs, context, jnp.int32),
        query_start_loc=jnp.asarray(starts),
        logit_rows=jnp.asarray(starts[1:] - 1),
    )
    call = jax.jit(step, donate_argnums=1, compiler_options=options)
    times = []
    for _ in range(4):  # the first one compiles
        began = time.perf_counter()
        logits, caches = jax.block_until_ready(call(weights, caches, batch))
        times.append(time.perf_counter() - began)
    if not np.isfinite(np.asarray(logits)).all():
        raise ValueError("the prompts' logits are not finite")
    return 1e6 * min(times[1:])


class Work(NamedTuple):
    """What to time of each model: decode steps of these batches, and prompts of these many sequences."""

    batches: Sequence[int]
    prefill: Sequence[int]
    context: int


def peer_answers(
    models: dict[str, DecoderConfig], work: Work, seconds: float
) -> dict[tuple[str, str, int], dict[str, Any]]:
    """What PyTorch takes, by model, kind of step and number of sequences; nothing where it got no further."""
    sizes = {name: dataclasses.asdict(config) for name, config in models.items()}
    command = [sys.executable, "-m", "benchmarks.torch_model"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
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
    """Times all of it, and returns what it writes to `out`."""
    answers = peers()
    measured = dataclasses.replace(ceiling(), us={})
    rows: list[dict[str, Any]] = []
    report = {"op": "model", **harness.environment(), "ceiling": dataclasses.asdict(measured), "rows": rows}
    report |= {"xla_options": options or {}, "steps": STEPS, "context": work.context}
    for name, config in models.items():
        weights, step = make_model(config)
        cases = [("decode", n) for n in work.batches] + [("prefill", n) for n in work.prefill]
        for kind, num_seqs in cases:
            case = f"{name}-{kind}-{num_seqs}x{work.context}"
            needed = floor_bytes(config, weights, num_seqs, work.context)
            prompts = {"tokens": num_seqs * work.context} if kind == "prefill" else {}
            bound = None if prompts else measured
            try:
                times = _times(kind, config, step, weights, num_seqs, work.context, options or None)
            except Exception as error:  # out of memory, mostly: the next case may fit
                times = {"failed": harness.first_line(error)}
            if "failed" in times:
                rows.append(harness.row_of(case, needed, "looped", "implementation", times, bound))
            for clock, us in times.items():
                if clock != "failed" and us is not None:
                    rows.append(harness.row_of(case, needed, clock, "implementation", {"us": us}, bound))
            if answers:
                answer = answers.get((name, kind, num_seqs), {"absent": "its process ended early"})
                rows.append(harness.row_of(case, needed, "torch", "peer", answer, bound))
            for row in rows:
                if row["case"] == case:
                    _finish(row, prompts)
            harness.save(report, out)
        del weights
    return report


def _times(kind, config, step, weights, num_seqs, context, options) -> dict[str, Any]:
    caches, tables = make_caches(config, num_seqs, context)
    if kind == "prefill":
        return {"called": time_prefill(step, weights, caches, tables, context, options)}
    return time_decode(step, weights, caches, tables, context, options)[0]._asdict()


def _finish(row: dict[str, Any], prompts: dict[str, int]) -> None:
    """Adds tokens a second where prompts were written, and says what the row holds."""
    label = f"{row['case']:28} {row['contender']:8}"
    if "us" not in row:
        print(f"{label} {row.get('absent') or row.get('failed')}", flush=True)
        return
    text = f"{label} {row['us'] / 1e3:9.3f} ms"
    if prompts:
        row["tokens_per_s"] = prompts["tokens"] / row["us"] * 1e6
        text += f" {row['tokens_per_s']:9.0f} tokens/s"
    print(text + (f" {row['share']:.0%} of the floor's speed" if "share" in row else ""), flush=True)


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
    parser.add_argument("--batches", type=numbers, default=[1, 64], help="sequences that decode; default 1,64")
    parser.add_argument("--prefill", type=numbers, default=[64], help="prompts in one step, or none; default 64")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence; default 1024")
    parser.add_argument("--peers", choices=("torch", "none"), default="torch")
    parser.add_argument("--peer-seconds", type=float, default=300, help="when to give the peer up; default 300")
    parser.add_argument("--xla", type=option, action="append", default=[], metavar="NAME=VALUE",
        help="an option for XLA, such as xla_gpu_graph_min_graph_size=1073741824 (no command buffers)")  # fmt: skip
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if unknown := set(args.models.split(",")) - set(MODELS):
        parser.error(f"no model is named {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
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
