"""Times the experts of one layer of a mixture, for few tokens to many: `python -m benchmarks.bench_experts`.

Each call has other tokens and other experts, drawn evenly. The floor is the time in which a read-only kernel reads the
matrices of the chosen experts once. Contenders:

    ours      `examples.moe.compute_experts`
    tiles     the same with our kernel for all numbers of pairs
    jax       the same without our kernel: gathered matrices and sums by XLA, or JAX's `ragged_dot_mgpu`

Times are sums of a call's kernels by CUPTI, and ("looped") wall clock of calls one after the other in a program.
"""

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, timing
from examples import moe
from examples.config import ExpertsConfig

_CALLS = 32  # with other tokens and experts each
_REPEATS = 10
_MOST_ERROR = 0.03

_GPT_OSS: dict[str, Any] = {"has_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
LAYERS = {
    "qwen3-30b-a3b": (2048, ExpertsConfig(num_experts=128, num_chosen=8, intermediate_size=768)),
    "gpt-oss-20b": (2880, ExpertsConfig(num_experts=32, num_chosen=4, intermediate_size=2880, **_GPT_OSS)),
    "deepseek-v2-lite": (2048, ExpertsConfig(num_experts=64, num_chosen=6, intermediate_size=1408)),
    "mixtral-8x7b": (4096, ExpertsConfig(num_experts=8, num_chosen=2, intermediate_size=14336)),
}

CONTENDERS: dict[str, Callable[[], Any]] = {
    "ours": contextlib.nullcontext,
    "tiles": lambda: mock.patch.object(moe, "_FEWEST_EXPERTS", 1 << 20),
    "jax": lambda: mock.patch.object(moe, "fits", return_value=False),
}


def make_parameters(hidden_size: int, config: ExpertsConfig) -> dict[str, jax.Array]:
    """Draws a layer's matrices and biases."""
    num_experts, size = config.num_experts, config.intermediate_size
    shapes = {"gate_up": (2 * size, hidden_size), "down": (hidden_size, size)}
    if config.has_bias:
        shapes |= {"gate_up_bias": (2 * size,), "down_bias": (hidden_size,)}

    def draw(key, shape):
        return jax.random.normal(key, (num_experts, *shape), jnp.bfloat16) * shape[-1] ** -0.5

    keys = jax.random.split(jax.random.key(0), len(shapes))
    draw = jax.jit(draw, static_argnums=1)
    return {name: draw(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def make_calls(hidden_size: int, config: ExpertsConfig, num_tokens: int) -> list[tuple[jax.Array, ...]]:
    """Draws the tokens of each call, their experts and weights."""
    draw = np.random.default_rng(num_tokens)
    calls = []
    for _ in range(_CALLS):
        hidden = jnp.asarray(draw.normal(size=(num_tokens, hidden_size)), jnp.bfloat16)
        order = draw.random((num_tokens, config.num_experts)).argsort(axis=1)
        experts = jnp.asarray(order[:, : config.num_chosen], jnp.int32)
        calls.append(
            (hidden, experts, jnp.asarray(draw.dirichlet(np.ones(config.num_chosen), num_tokens), jnp.float32))
        )
    return calls


def used_bytes(calls: Sequence[tuple[jax.Array, ...]], parameters: dict[str, jax.Array]) -> int:
    """The bytes of the matrices that a call reads, on average."""
    used = np.mean([np.unique(experts).size for _, experts, _ in calls])
    return int(used * sum(parameters[name][0].nbytes for name in ("gate_up", "down")))


def expected(call: tuple[jax.Array, ...], parameters: dict[str, jax.Array], config: ExpertsConfig) -> np.ndarray:
    """The results of a call's first and last token, in float32 on the host."""
    out = []
    for token in (0, -1):
        hidden, experts, weights = (np.asarray(x[token]) for x in call)
        chosen = {name: np.asarray(x[experts]).astype(np.float32) for name, x in parameters.items()}
        gate_up = chosen["gate_up"] @ hidden.astype(np.float32) + chosen.get("gate_up_bias", 0)
        gate, up = jnp.split(jnp.asarray(gate_up), 2, axis=-1)
        units = np.asarray(moe._swiglu(gate, up, config))
        down = np.einsum("koi,ki->ko", chosen["down"], units) + chosen.get("down_bias", 0)
        out.append(weights @ down)
    return np.stack(out)


def error_of(out: jax.Array, numbers: np.ndarray) -> float:
    """The largest error of the first and the last token, as a part of the largest number."""
    return float(np.abs(np.asarray(out)[[0, -1]] - numbers).max() / np.abs(numbers).max())


def time_contender(
    context: Callable[[], Any], calls: Sequence[tuple], parameters: dict[str, jax.Array], config: ExpertsConfig
) -> dict[str, Any]:
    """A contender's error and its times; or why it has none."""

    def compute(hidden, experts, weights, parameters):
        return moe.compute_experts(hidden, experts, weights, parameters, config=config)

    def chain(calls, parameters):
        (total, _, _), *_ = calls
        for hidden, experts, weights in calls:
            total = hidden + compute(total, experts, weights, parameters).astype(hidden.dtype)
        return total

    try:
        with context():
            compiled = jax.jit(compute).lower(*calls[0], parameters).compile()
            chained = jax.jit(chain).lower(calls, parameters).compile()
        error = error_of(compiled(*calls[0], parameters), expected(calls[0], parameters, config))
        if not error < _MOST_ERROR:
            return {"failed": f"error {error:.3g}"}
        timed = timing.time_calls(compiled, [(*call, parameters) for call in calls])
        looped = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            jax.block_until_ready(chained(calls, parameters))
            looped.append((time.perf_counter() - start) / len(calls))
        kernels = [[name, us] for name, us in timed.kernels]
        return {"us": timed.us, "looped_us": 1e6 * min(looped), "error": error, "kernels": kernels}
    except Exception as error:  # the next one may be able to
        return {"failed": harness.first_line(error)}


def run(
    layers: Sequence[str],
    numbers: Sequence[int],
    contenders: dict[str, Callable[[], Any]],
    *,
    out: Path | None = None,
    ceiling: timing.Ceiling | None = None,
) -> dict[str, Any]:
    """Times all contenders with each layer and number of tokens; returns the report, which it writes to `out`."""
    rows: list[dict[str, Any]] = []
    report = {"op": "experts", **harness.environment(), "rows": rows}
    for layer in layers:
        hidden_size, config = LAYERS[layer]
        parameters = make_parameters(hidden_size, config)
        cases = {num_tokens: make_calls(hidden_size, config, num_tokens) for num_tokens in numbers}
        sizes = {num_tokens: used_bytes(calls, parameters) for num_tokens, calls in cases.items()}
        measured = ceiling or timing.read_ceiling(sizes.values())
        report[f"ceiling {layer}"] = dataclasses.asdict(measured)
        at_rate = dataclasses.replace(measured, us={})
        for num_tokens, calls in cases.items():
            for name, context in contenders.items():
                answer = time_contender(context, calls, parameters, config)
                case = f"{layer}-{num_tokens}"
                row = harness.row_of(case, sizes[num_tokens], name, "implementation", answer, at_rate)
                row |= {"read_us": measured.us.get(sizes[num_tokens])}
                rows.append(row)
                harness.save(report, out)
                _print(row)
        del parameters
    return report


def _print(row: dict[str, Any]) -> None:
    text = f"{row['case']:22} {row['contender']:12} "
    if "us" not in row:
        print(text + row["failed"], flush=True)
        return
    products = " ".join(f"{us:.1f}" for _, us in row["kernels"])
    read = f" (a read: {row['read_us']:.1f})" if row["read_us"] else ""
    share = f" {row['share']:.0%} of the floor's speed{read}" if "share" in row else ""
    print(f"{text}{row['us']:7.1f} us, looped {row['looped_us']:7.1f}{share}; {products}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_experts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", default="qwen3-30b-a3b", help=f"of {','.join(LAYERS)}; default qwen3-30b-a3b")
    parser.add_argument("--tokens", type=harness.numbers, default=(1, 2, 4, 8, 16, 64), help="default 1,2,4,8,16,64")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help=f"default {','.join(CONTENDERS)}")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    layers, names = args.layers.split(","), args.contenders.split(",")
    harness.check_names(parser, "layer", layers, LAYERS)
    harness.check_names(parser, "contender", names, CONTENDERS)
    if not harness.has_gpu("experts"):
        return 2
    run(layers, args.tokens, {name: CONTENDERS[name] for name in names}, out=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
