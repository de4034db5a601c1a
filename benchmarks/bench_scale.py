"""Times what several GPUs gain: ops, all-reduces and steps of whole models on 1, 2, ... GPUs.

    python -m benchmarks.bench_scale --part ops --out ops.json
    python -m benchmarks.bench_scale --part models --models llama3-8b,llama3-70b --tp 1,2 --out models.json
    python -m benchmarks.bench_scale --part all-reduce --reduce called,xla --tp 2,4 --out all-reduce.json
    python -m benchmarks.bench_scale --part models --tp 2,8 --processes --out processes.json
    python -m benchmarks.bench_scale --part models --tp 8 --batches 1 --pieces 2,3-queued --out prompts.json

Every time is the wall clock of many calls in a row; each call needs the previous call's result. The GPUs work without a
pause: an op's calls are iterations of a loop in one compiled program, and a model's steps are calls of the jitted step.
A step of prompts is timed call by call (`us`) and as calls in a row (`us_in_a_row`). An op's row also has the time of
its kernels alone (`device_us`, by CUPTI), which is less than the wall clock. A step's row has a summary of its trace
(scale_trace.py). `jit` is plain jit on sharded arrays; `shard_map` is the same op on each device's shard, written by
hand.

Weights are random and made on the devices, shard by shard. If a model does not fit, its row says so. With `--processes`
each GPU has a process of its own (scale_processes.py), and the first one's times are taken.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_jax
from benchmarks import harness, scale_processes, scale_reduce, timing
from benchmarks.model_steps import PROMPTS, State
from benchmarks.scale_steps import BLOCK_SIZE, MODELS, PIECES, STEPS, VARIANTS, Model, make_weights, put
from benchmarks.scale_trace import trace
from examples.config import DecoderConfig
from examples.sharding import make_mesh, split_config

ITERATIONS = 40  # iterations of an op's loop
PROMPT_STEPS = 4  # steps of prompts in a row


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of the ops' problem; heads of 128 in bfloat16."""

    num_seqs: int = 32
    context: int = 8192
    num_heads: int = 64
    num_kv_heads: int = 8
    num_new: int = 1024  # new tokens of ragged ops and of writes, the same number for each sequence


# For each op: the arrays that a call takes from the previous call, and its other arrays. "keys" and "values" are the
# pools.
OPS = {
    "paged_attention": (["query"], ["keys", "values", "tables", "lens"]),
    "paged_attention_v1": (["query"], ["keys", "values", "tables", "lens"]),
    "paged_attention_v2": (["query"], ["keys", "values", "tables", "lens"]),
    "write_and_attend": (["query", "keys", "values"], ["key", "value", "tables", "lens", "slots"]),
    "ragged_paged_attention": (["queries"], ["keys", "values", "tables", "lens", "starts"]),
    "prefix_attention": (["queries"], ["new_keys", "new_values", "keys", "values", "tables", "lens", "starts"]),
    "write_to_paged_cache": (["keys", "values"], ["new_keys", "new_values", "new_slots"]),
    "copy_blocks": (["keys", "values"], ["pairs"]),
    "swap_blocks": (["keys", "values"], ["source_keys", "source_values", "pairs"]),
}


def advance(op: str, state: tuple, rest: tuple) -> tuple:
    """Calls an op on the arrays that change (`state`) and the others (`rest`); returns the next state."""
    if op == "write_and_attend":
        return paged_jax.write_and_attend(state[0], *rest[:2], *state[1:], *rest[2:])
    if op == "write_to_paged_cache":
        return paged_jax.write_to_paged_cache(rest[0], rest[1], state[0], state[1], rest[2])
    if op == "copy_blocks":
        keys, values = paged_jax.copy_blocks([state[0]], [state[1]], rest[0])
        return keys[0], values[0]
    if op == "swap_blocks":
        return paged_jax.swap_blocks(rest[0], rest[1], state[0], state[1], rest[2])
    attend: Callable[..., jax.Array] = getattr(paged_jax, op)
    return (attend(*state, *rest),)


def arrays(shape: Shape, mesh: Mesh) -> dict[str, Callable[[], jax.Array]]:
    """Functions that make the ops' arrays on their devices; pools and tokens are sharded by heads."""
    width = shape.context // BLOCK_SIZE
    num_blocks = shape.num_seqs * width
    random = np.random.default_rng(0)

    def normal(*sizes):
        def make(key):
            return jax.random.normal(key, sizes, jnp.bfloat16)

        made = jax.jit(make, out_shardings=NamedSharding(mesh, P(None, "tp")))
        return lambda: made(jax.random.key(len(sizes)))

    def whole(array):
        return lambda: jax.device_put(array.astype(np.int32), NamedSharding(mesh, P()))

    pool = normal(num_blocks, shape.num_kv_heads, BLOCK_SIZE, 128)
    new = normal(shape.num_new, shape.num_kv_heads, 128)
    one = normal(shape.num_seqs, shape.num_kv_heads, 128)
    tables = random.permutation(num_blocks).reshape(shape.num_seqs, width)
    return {
        "query": normal(shape.num_seqs, shape.num_heads, 128),
        "queries": normal(shape.num_new, shape.num_heads, 128),
        **dict.fromkeys(("keys", "values", "source_keys", "source_values"), pool),
        **dict.fromkeys(("new_keys", "new_values"), new),
        **dict.fromkeys(("key", "value"), one),
        "tables": whole(tables),
        "lens": whole(np.full(shape.num_seqs, shape.context)),
        "starts": whole(np.arange(shape.num_seqs + 1) * (shape.num_new // shape.num_seqs)),
        "slots": whole(tables[:, -1] * BLOCK_SIZE + BLOCK_SIZE - 1),
        "new_slots": whole(random.permutation(num_blocks * BLOCK_SIZE)[: shape.num_new]),
        "pairs": whole(random.permutation(num_blocks)[: min(128, num_blocks) // 2 * 2].reshape(-1, 2)),
    }


def lower_op(op: str, shape: Shape, mesh: Mesh, how: str) -> jax.stages.Lowered:
    """Lowers the loop of an op's calls, under plain jit or under a `shard_map` written by hand."""
    shapes = tuple(
        tuple(_sharded(jax.eval_shape(arrays(shape, mesh)[name]), mesh) for name in names) for names in OPS[op]
    )
    call = functools.partial(advance, op)
    if how == "shard_map":
        specs = jax.tree.map(lambda x: x.sharding.spec, shapes)
        call = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=specs[0])

    def run(state, rest):
        return jax.lax.fori_loop(0, ITERATIONS, lambda _, state: call(state, rest), state)

    return jax.jit(run, donate_argnums=0).lower(*shapes)


def _sharded(x: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    is_split = x.dtype == jnp.bfloat16
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(None, "tp") if is_split else P()))


def best_us(run: Callable[[Any], Any], state: Any, iterations: int, repeats: int = 5) -> tuple[float, Any]:
    """Returns the fewest microseconds of an iteration of `run(state) -> state`, and the last state."""
    state = jax.block_until_ready(run(state))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        state = jax.block_until_ready(run(state))
        times.append(time.perf_counter() - began)
    return 1e6 * min(times) / iterations, state


COLLECTIVES = ("all-gather", "all-reduce", "collective-permute", "all-to-all", "reduce-scatter")


class Report:
    """The file of a run, which is written anew after each row. Of several processes, the first one writes it."""

    def __init__(self, part: str, out: Path | None):
        self.rows: list[dict[str, Any]] = []
        self._report = {
            "op": f"scale-{part}",
            **harness.environment(),
            "num_gpus": len(jax.devices()),
            "rows": self.rows,
        }
        self._out = out

    def add(self, case: str, contender: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measures a row. If that fails, the row says why, and the next row may still succeed."""
        try:
            answer = measure()
        except Exception as error:
            answer = {"failed": harness.first_line(error)}
        processes = {"processes": jax.process_count()} if jax.process_count() > 1 else {}
        self.rows.append({"case": case, "contender": contender, "kind": "implementation", **processes, **answer})
        if jax.process_index():
            return
        harness.print_row(self.rows[-1])
        harness.save(self._report, self._out)


def run_ops(report: Report, shape: Shape, sizes: Sequence[int]) -> None:
    """Times every op on the widest mesh, under jit and shard_map, and decode attention also on narrower meshes."""
    cases = [(op, sizes[-1], how) for op in OPS for how in ("shard_map", "jit")]
    cases += [("paged_attention", size, "jit") for size in sizes[:-1]]
    meshes = {size: make_mesh({"dp": 1, "tp": size}) for size in sizes}
    programs = harness.compile_all(
        {case: functools.partial(lower_op, case[0], shape, meshes[case[1]], case[2]) for case in cases}
    )
    for op, size, how in cases:
        made = arrays(shape, meshes[size])
        report.add(f"{op}/tp={size}", how, functools.partial(_measure_op, programs[op, size, how], op, made))


def _measure_op(
    program: concurrent.futures.Future, op: str, made: dict[str, Callable[[], jax.Array]]
) -> dict[str, Any]:
    compiled = program.result()
    state, rest = (tuple(made[name]() for name in names) for names in OPS[op])
    us, state = best_us(lambda state: compiled(state, rest), state, ITERATIONS)
    by_kernels, state = _device_time(lambda state: compiled(state, rest), state)
    text = compiled.as_text()
    return {
        "us": us,
        **by_kernels,
        "collectives": sum(text.count(f" {name}(") + text.count(f" {name}-start(") for name in COLLECTIVES),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "sum": float(jnp.abs(state[0].astype(jnp.float32)).sum()),  # both ways must give the same sum
    }


def _device_time(run: Callable[[Any], Any], state: Any) -> tuple[dict[str, Any], Any]:
    """Returns the row's mean microseconds of an iteration's kernels on one GPU, and the last state."""
    if jax.default_backend() != "gpu":
        return {}, state

    def again():
        nonlocal state
        state = run(state)
        return state

    try:
        launches = timing.kernel_times(again)
    except Exception as error:  # the wall clock's time is still worth having
        return {"device_failed": harness.first_line(error)}, state
    return {"device_us": sum(us for _, us in launches) / ITERATIONS / len(state[0].devices())}, state


def run_models(
    report: Report,
    configs: dict[str, DecoderConfig],
    sizes: Sequence[int],
    batches: Sequence[int],
    context: int,
    prompts: int = PROMPTS,
    variants: Sequence[str] = ("called",),
    pieces: Sequence[str] = (),
) -> None:
    """Times each model on meshes of these sizes: decode steps with each of the `variants`, and a step of prompts.

    Several devices also run that step in `pieces`: a number, and names in `scale_steps.PIECES` after hyphens.
    """
    programs: dict[Any, concurrent.futures.Future] = {}
    models: dict[tuple[str, int], dict[str, Model]] = {}
    for name, size in itertools.product(configs, sizes):
        mesh = make_mesh({"dp": 1, "tp": size})
        config = split_config(configs[name], mesh)
        models[name, size] = {how: Model(config, mesh, context, how) for how in variants[: None if size > 1 else 1]}
        if size > 1:  # XLA reduces prompts, whatever reduces decode steps
            for text in pieces:
                count, *by = text.split("-")
                models[name, size][f"in {text}"] = Model(config, mesh, context, "xla", int(count), tuple(by))
    cases = {
        (name, size, how, *case): functools.partial(model.lower, *case)
        for (name, size), ways in models.items()
        for how, model in ways.items()
        for case in [
            *(("decode", n) for n in (batches if how in variants else [])),
            *([("prefill", prompts)] if prompts and (how == variants[0] or how not in variants) else []),
        ]
        if model.floor_bytes(0) <= 0.9 * _memory()
    }
    programs = harness.compile_all(cases)
    for (name, size), ways in models.items():
        of_model = [key for key in cases if key[:2] == (name, size)]
        if not of_model:
            least = ways[variants[0]].floor_bytes(0)
            report.add(f"{name}/tp={size}", "called", functools.partial(_too_large, least))
            continue
        largest = max(ways.values(), key=lambda model: len(model.parts[0]))  # some variants also have a table
        weights = make_weights(largest.parts[0], largest.mesh)
        for key in of_model:
            _, _, how, phase, num_seqs = key
            model = ways[how]
            given = {part: value for part, value in weights.items() if part in model.parts[0]}
            measure = functools.partial(_measure_step, programs[key], model, given, phase, num_seqs)
            report.add(f"{name}/tp={size}/{phase}/{num_seqs}x{context}", how, measure)
        del weights, given, measure


def _memory() -> float:
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))


def _too_large(least: int) -> dict[str, Any]:
    return {"absent": f"a device's part of the weights is {least / 1e9:.0f} GB"}


def _measure_step(
    program: concurrent.futures.Future, model: Model, weights: Any, phase: str, num_seqs: int
) -> dict[str, Any]:
    call = program.result()
    text = call.as_text()
    answer = {"all_reduces": text.count(" all-reduce(") + text.count(" all-reduce-start(")}
    if phase == "prefill":
        batch = jax.tree.map(lambda x: put(x, model.mesh), model.prompts(num_seqs))
        return answer | _measure_prompts(lambda caches: call(weights, caches, batch)[1], model, num_seqs)
    tables = put(model.tables(num_seqs), model.mesh)

    def steps(caches):
        state = State(*model.start(num_seqs), caches)
        for _ in range(STEPS):
            state = call(weights, state, tables)
        return state.caches

    us, caches = best_us(steps, model.caches(num_seqs), STEPS)
    answer |= {"us": us, "floor_bytes": model.floor_bytes(num_seqs), "xla_options": model.options(num_seqs)}

    return answer | _traced(steps, caches, STEPS)


def _measure_prompts(run: Callable[[Any], Any], model: Model, num_seqs: int) -> dict[str, Any]:
    us, caches = best_us(run, model.caches(num_seqs), 1)

    def several(caches):
        for _ in range(PROMPT_STEPS):
            caches = run(caches)
        return caches

    in_a_row, caches = best_us(several, caches, PROMPT_STEPS)
    times = {"us": us, "us_in_a_row": in_a_row, "tokens_per_s": num_seqs * model.context / us * 1e6}
    return times | _traced(several, caches, PROMPT_STEPS)


def _traced(run: Callable[[Any], Any], caches: Any, steps: int) -> dict[str, Any]:
    """Returns the summary of a trace of a run, which is so many equal steps."""

    def again():
        nonlocal caches
        caches = run(caches)
        return caches

    try:
        return trace(again, steps)
    except Exception as error:  # the wall clock's time is still worth having
        return {"trace_failed": harness.first_line(error)}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a part of the benchmark; returns the exit code, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_scale", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", choices=("ops", "all-reduce", "models"), default="ops")
    parser.add_argument(
        "--tp", type=harness.numbers, help="how many GPUs, in rising order; default 1 and all there are"
    )
    parser.add_argument("--models", default="llama3-8b", help=f"of {','.join(MODELS)}; default llama3-8b")
    parser.add_argument("--batches", type=harness.numbers, default=[1, 64], help="sequences that decode; default 1,64")
    parser.add_argument(
        "--prompts", type=int, default=PROMPTS, help="sequences of a step of prompts; 0 for no such step"
    )
    parser.add_argument(
        "--reduce",
        type=lambda text: text.split(","),
        default=["called"],
        help=f"of {','.join(VARIANTS)}; default called",
    )
    parser.add_argument(
        "--pieces",
        type=lambda text: text.split(","),
        default=[],
        help=f"also runs prompts in pieces: numbers, perhaps with -{', -'.join(PIECES)}; such as 2,3-queued",
    )
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence of a model; default 1024")
    parser.add_argument("--processes", action="store_true", help="a process for each GPU; not with --part ops")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    harness.check_names(parser, "model", args.models.split(","), MODELS)
    harness.check_names(parser, "way to reduce", args.reduce, VARIANTS)
    harness.check_names(parser, "way", [name for text in args.pieces for name in text.split("-")[1:]], PIECES)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast may need rights that a machine's guests lack
    if args.processes and not scale_processes.join():
        if args.part == "ops" or not args.tp or min(args.tp) < 2:
            parser.error("--processes needs --part all-reduce or models, and --tp with sizes of at least 2")
        return scale_processes.run(sys.argv[1:] if argv is None else argv, args.tp, args.out)
    if not harness.has_gpu("scale"):
        return 2
    sizes = args.tp or sorted({1, len(jax.devices())})
    report = Report(args.part, args.out)
    if args.part == "ops":
        run_ops(report, Shape(), sizes)
    elif args.part == "all-reduce":
        scale_reduce.run(report.add, [size for size in sizes if size > 1], args.reduce)
    else:
        configs = {name: MODELS[name] for name in args.models.split(",")}
        run_models(report, configs, sizes, args.batches, args.context, args.prompts, args.reduce, args.pieces)
    return 0


if __name__ == "__main__":
    sys.exit(main())
