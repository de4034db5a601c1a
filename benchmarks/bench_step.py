"""Times whole decode steps, with and without XLA's command buffers (CUDA graphs): `python -m benchmarks.bench_step`.

A step runs a stack of layers, each with its projections, the cache write and attention. These are many short kernels,
so the cost of launching them shows. Times are wall clock, over many steps in a row.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import paged_jax
from benchmarks import harness

_NEVER = 1 << 30  # no program has this many launches in a row, so XLA makes no command buffer
_STEPS = 100  # steps in a row that are timed together


@dataclasses.dataclass(frozen=True)
class Stack:
    """The sizes of a decoder's layers and of its batch."""

    num_layers: int = 16
    num_seqs: int = 8
    context: int = 1024
    num_heads: int = 8
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16

    @property
    def width(self) -> int:
        return self.num_heads * self.head_size


def make(stack: Stack) -> tuple[list[Any], list[Any], jax.Array]:
    """Makes each layer's weights and cache, and the block tables."""
    keys = jax.random.split(jax.random.key(0), (stack.num_layers, 2))
    wide = (stack.num_heads + 2 * stack.num_kv_heads) * stack.head_size
    shapes = (stack.width, wide), (stack.width, stack.width)

    def random(key, shape):
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(stack.width**-0.5)

    weights = [[random(*pair) for pair in zip(row, shapes, strict=True)] for row in keys]
    blocks = stack.context // stack.block_size
    sizes = stack.num_seqs * blocks, stack.block_size, stack.num_kv_heads, stack.head_size
    caches = [paged_jax.PagedKVCache.create(*sizes) for _ in range(stack.num_layers)]
    tables = jax.random.permutation(jax.random.key(1), jnp.arange(stack.num_seqs * blocks, dtype=jnp.int32))
    return weights, caches, tables.reshape(stack.num_seqs, blocks)


def decode_step(stack: Stack, weights, tables, hidden, caches, seq_lens) -> tuple[jax.Array, list[Any]]:
    """Runs one token of every sequence through all layers; `seq_lens` count that token."""
    last = seq_lens - 1
    slots = tables[jnp.arange(stack.num_seqs), last // stack.block_size] * stack.block_size + last % stack.block_size
    kv = stack.num_kv_heads * stack.head_size
    written = []
    for (qkv, out), cache in zip(weights, caches, strict=True):
        parts = jnp.split(hidden @ qkv, (stack.width, stack.width + kv), axis=1)
        query, key, value = (x.reshape(stack.num_seqs, -1, stack.head_size) for x in parts)
        pools = paged_jax.write_to_paged_cache(key, value, cache.key_cache, cache.value_cache, slots)
        attended = paged_jax.paged_attention(query, *pools, tables, seq_lens)
        hidden = jnp.tanh(hidden + attended.reshape(hidden.shape) @ out)
        written.append(paged_jax.PagedKVCache(*pools))
    return hidden, written


def compile_step(stack: Stack, made, **options: Any) -> tuple[Callable, bool]:
    """Compiles the step, a function of (hidden, caches, seq_lens), and says whether it became one command buffer.

    Args:
      stack: the sizes.
      made: what `make` returned.
      options: XLA's own compiler options.
    """
    weights, caches, tables = made
    step = jax.jit(partial(decode_step, stack, weights, tables), donate_argnums=1)
    hidden = jnp.ones((stack.num_seqs, stack.width), jnp.bfloat16)
    lowered = step.lower(hidden, caches, jnp.full(stack.num_seqs, stack.context, jnp.int32))
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True, **options})
        # A dump has one line for each launch of the step; indented lines belong to the launch above them.
        dumps = Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
        launches = [line for dump in dumps for line in dump.read_text().splitlines() if line[:1].isdigit()]
    return compiled, bool(launches) and all("kCommandBuffer" in line for line in launches)


def time_step(stack: Stack, **options: Any) -> tuple[float, bool]:
    """Measures the milliseconds of a step, and says whether XLA captured it in a command buffer."""
    made = make(stack)
    step, captured = compile_step(stack, made, **options)
    hidden, caches = jnp.ones((stack.num_seqs, stack.width), jnp.bfloat16), made[1]
    lengths = jnp.full(stack.num_seqs, stack.context, jnp.int32)
    best = float("inf")
    for _ in range(4):  # the first run warms up
        start = time.perf_counter()
        for _ in range(_STEPS):
            hidden, caches = step(hidden, caches, lengths)
        jax.block_until_ready(hidden)
        best = min(best, (time.perf_counter() - start) / _STEPS)
    return 1e3 * best, captured


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_step", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if not harness.has_gpu("step"):
        return 2
    stack, rows = Stack(), []
    for name, options in {"default": {}, "without command buffers": {"xla_gpu_graph_min_graph_size": _NEVER}}.items():
        ms, captured = time_step(stack, **options)
        rows.append({"case": name, "ms": ms, "captured": captured})
        print(f"{name:26} {ms:.3f} ms a step, {'' if captured else 'not '}captured", flush=True)
    report = {"op": "step", **harness.environment(), "stack": dataclasses.asdict(stack), "rows": rows}
    harness.write(report, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
