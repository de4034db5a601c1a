"""Times decode attention over prefixes that rows share: `python -m benchmarks.bench_shared_prefix --out FILE`.

64 sequences have 512 own tokens after a prefix of 8192 tokens. All of them share one prefix, or every 16 share one.
Three calls are timed on a GPU: attention to all tokens row by row, attention that reads shared prefixes once
(`SharedPrefixes.attend`), and attention to own tokens only, which is a lower bound for sharing. None of them writes to
the cache. The first two must agree. The peer is FlashInfer's cascade attention (flashinfer_cascade.py). It runs first,
in a process of its own.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, timing
from benchmarks.flashinfer_cascade import BLOCK_SIZE, Sizes
from benchmarks.peers import environment
from paged_jax import PagedKVCache
from paged_jax.engine import SharedPrefixes


def make(sizes: Sizes) -> tuple[jax.Array, PagedKVCache, list[tuple[Any, SharedPrefixes]]]:
    """Makes queries, a cache of shuffled blocks, and block tables.

    Returns:
      The queries, the cache, and for each copy of the block tables: the tables of all tokens, and the shared prefixes.
    """
    num_heads, num_kv_heads, head_size = sizes.heads
    keys = jax.random.split(jax.random.key(0), 3)
    shape = sizes.num_blocks, num_kv_heads, BLOCK_SIZE, head_size
    pools = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2]]
    query = jax.random.normal(keys[2], (sizes.num_seqs, num_heads, head_size), jnp.bfloat16)
    per_prefix, sets = sizes.num_seqs // sizes.num_prefixes, []
    for prefixes, own_tables in sizes.tables():
        whole = np.concatenate([np.repeat(prefixes, per_prefix, axis=0), own_tables], axis=1)
        shared = SharedPrefixes(
            tables=jnp.asarray(prefixes),
            lens=jnp.full(sizes.num_prefixes, sizes.prefix_len, jnp.int32),
            start_loc=jnp.arange(sizes.num_prefixes + 1, dtype=jnp.int32) * per_prefix,
            own_tables=jnp.asarray(own_tables),
            own_lens=jnp.full(sizes.num_seqs, sizes.own_len, jnp.int32),
        )
        sets.append((jnp.asarray(whole), shared.joined()))
    return query, PagedKVCache(pools[0], pools[1]), sets


def peer_answers(sizes: Sequence[Sizes]) -> list[dict[str, Any]]:
    """FlashInfer's answers: a time each, or why there is none."""
    command = [sys.executable, "-m", "benchmarks.flashinfer_cascade"]
    asked = json.dumps([each._asdict() for each in sizes]) + "\n"
    done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, env=environment(), check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return answers + [{"absent": "its process ended early"}] * (len(sizes) - len(answers))


def row_by_row(query: jax.Array, cache: PagedKVCache, tables: jax.Array, prefixes: SharedPrefixes) -> jax.Array:
    """Attention that reads a prefix once for each of its rows."""
    return cache.attend(query, tables, prefixes.own_lens + prefixes.lens[0])


def shared(query: jax.Array, cache: PagedKVCache, tables: jax.Array, prefixes: SharedPrefixes) -> jax.Array:
    """Attention that reads a prefix once for all of its rows."""
    return prefixes.attend(query, cache)


def own(query: jax.Array, cache: PagedKVCache, tables: jax.Array, prefixes: SharedPrefixes) -> jax.Array:
    """Attention to the tokens after the prefixes alone."""
    return cache.attend(query, prefixes.own_tables, prefixes.own_lens)


def check(query: jax.Array, cache: PagedKVCache, tables: jax.Array, prefixes: SharedPrefixes) -> None:
    """Raises an AssertionError if shared and row by row differ by more than rounding."""
    one, other = (np.asarray(each(query, cache, tables, prefixes), np.float32) for each in (shared, row_by_row))
    np.testing.assert_allclose(one, other, atol=2e-2)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_shared_prefix", description=__doc__)
    parser.add_argument("--num-seqs", type=int, default=64, help="default 64")
    parser.add_argument("--prefix-len", type=int, default=8192, help="default 8192")
    parser.add_argument("--own-len", type=int, default=512, help="default 512")
    parser.add_argument("--num-prefixes", type=int, nargs="+", default=[1, 4], help="default 1 4")
    parser.add_argument("--heads", type=harness.numbers, default=[32, 8, 128], help="query, kv, size; default 32,8,128")
    parser.add_argument("--peers", choices=("flashinfer", "none"), default="flashinfer")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    # JAX would take most of the memory at once, and the peer could not run.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not harness.has_gpu("shared_prefix"):
        return 2
    rows: list[dict[str, Any]] = []
    report = {"op": "shared_prefix", **harness.environment(), "rows": rows}
    measured = [
        Sizes(args.num_seqs, count, args.prefix_len, args.own_len, args.heads, copies=4) for count in args.num_prefixes
    ]
    answers = peer_answers(measured) if args.peers == "flashinfer" else [{"absent": "not asked"}] * len(measured)
    for sizes, answer in zip(measured, answers, strict=True):
        query, cache, sets = make(sizes)
        check(query, cache, *sets[0])
        times = {}
        for each in (row_by_row, shared, own):
            # The cache is an argument: a constant would be copied into the program.
            call = functools.partial(jax.jit(each), query, cache)
            times[each.__name__] = round(timing.time_calls(call, sets).us, 1)
        over_own = times["shared"] / times["own"]
        rows.append({"num_prefixes": sizes.num_prefixes, "us": times, "over_own": over_own, "peer": answer})
        peer = answer.get("us") or answer.get("absent")
        print(f"{sizes.num_prefixes} prefixes: {times} us, shared / own {over_own:.2f}, cascade {peer}", flush=True)
        harness.write(report, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
