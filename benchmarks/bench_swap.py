"""Times swaps of blocks between device and host memory, beside a plain transfer: `python -m benchmarks.bench_swap`.

Times are wall clock, from the call until the result is there, because kernels do little of a transfer.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import paged_jax
from benchmarks import harness

_BLOCK = (8, 16, 128)  # a block of 16 tokens with 8 kv heads of 128
_PAIRS = (16, 256, 4096)  # blocks that a swap moves
_MEMORIES = {"out": ("device", "pinned_host"), "in": ("pinned_host", "device")}  # from, to


def _place(x: Any, memory: str) -> jax.Array:
    return jax.device_put(x, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory))


def _pools(num_blocks: int, memory: str, seed: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed))
    return [_place(jax.random.normal(key, (num_blocks, *_BLOCK), jnp.bfloat16), memory) for key in keys]


def _median(call: Callable[[], Any], samples: int = 9) -> float:
    """The median seconds of a call. Two earlier calls warm up."""
    times = []
    for _ in range(samples + 2):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def swap_seconds(pairs: int, direction: str, implementation: Any, num_blocks: int) -> float:
    """Measures the seconds of a swap of random blocks, after a check of one result.

    Raises:
      ValueError: the result is wrong.
    """
    source_memory, memory = _MEMORIES[direction]
    sources, caches = _pools(num_blocks, source_memory, 0), _pools(num_blocks, memory, 1)
    rng = np.random.default_rng(0)
    mapping = jnp.asarray(np.stack([rng.permutation(num_blocks)[:pairs] for _ in range(2)], 1), jnp.int32)
    expected = [
        _place(cache, "device").at[mapping[:, 1]].set(_place(source, "device")[mapping[:, 0]])
        for source, cache in zip(sources, caches, strict=True)
    ]
    swap = jax.jit(partial(paged_jax.swap_blocks, implementation=implementation), donate_argnums=(2, 3))
    caches = swap(*sources, *caches, mapping)
    for cache, exact in zip(caches, expected, strict=True):
        if cache.sharding.memory_kind != memory or not bool((_place(cache, "device") == exact).all()):
            raise ValueError("wrong result")

    def call():
        nonlocal caches
        caches = swap(*sources, *caches, mapping)
        return caches

    return _median(call)


def plain_seconds(pairs: int, direction: str) -> float:
    """Measures the seconds of a transfer of one array with the same bytes as a swap. It allocates its result."""
    source_memory, memory = _MEMORIES[direction]
    x = _place(jnp.ones((2 * pairs, *_BLOCK), jnp.bfloat16), source_memory)
    return _median(lambda: _place(x, memory))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_swap", description=__doc__)
    parser.add_argument("--blocks", type=int, default=8192, help="blocks of each pool; default 8192")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if not harness.has_gpu("swap"):
        return 2
    rows: list[dict[str, Any]] = []
    report = {"op": "swap", **harness.environment(), "rows": rows}
    for direction in _MEMORIES:
        for pairs in _PAIRS:
            bytes_moved = 2 * pairs * int(np.prod(_BLOCK)) * 2
            contenders: dict[str, Callable[[], float]] = {
                "plain transfer": partial(plain_seconds, pairs, direction),
                "auto": partial(swap_seconds, pairs, direction, None, args.blocks),
                "xla": partial(swap_seconds, pairs, direction, "xla", args.blocks),
            }
            for name, measure in contenders.items():
                row = {"case": f"swap-{direction}-{pairs}", "contender": name, "work": bytes_moved}
                try:
                    seconds = measure()
                    row |= {"us": 1e6 * seconds, "rate": bytes_moved / seconds / 1e9}
                    print(f"{row['case']:16} {name:16} {row['us']:10.0f} us {row['rate']:6.1f} GB/s", flush=True)
                except Exception as error:  # the rows of the others still count
                    row["failed"] = harness.first_line(error)
                    print(f"{row['case']:16} {name:16} {row['failed']}", flush=True)
                rows.append(row)
    harness.write(report, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
