"""Times decode attention over prefixes that rows share: `python -m benchmarks.bench_shared_prefix --out FILE`.

64 sequences have 512 own tokens behind a prefix of 8192 tokens; all of them share one prefix, or 16 each share one.
Three calls are timed on a GPU: attention to all tokens row by row, attention that reads shared prefixes once
(`SharedPrefixes.attend`), and attention to own tokens only, which is a lower bound for sharing. All three write
nothing. Shared and row by row must agree.
"""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, timing
from paged_jax import PagedKVCache
from paged_jax.engine import SharedPrefixes

BLOCK_SIZE = 16


def make(
    num_seqs: int, num_prefixes: int, prefix_len: int, own_len: int, heads: tuple[int, int, int], *, copies: int = 1
) -> tuple[jax.Array, PagedKVCache, list[tuple[Any, SharedPrefixes]]]:
    """Makes queries, a cache of shuffled blocks, and block tables.

    Args:
      num_seqs, num_prefixes: sequences, and the prefixes that they share in equal parts.
      prefix_len, own_len: tokens of a prefix, and of each sequence behind it.
      heads: query heads, kv heads and the size of a head.
      copies: how many sets of tables there are, which share no block.

    Returns:
      The queries, the cache, and for each copy the whole tables and the shared prefixes.
    """
    num_heads, num_kv_heads, head_size = heads
    shared, own = prefix_len // BLOCK_SIZE, -(-own_len // BLOCK_SIZE)
    num_blocks = copies * (num_prefixes * shared + num_seqs * own)
    keys = jax.random.split(jax.random.key(0), 3)
    pools = [
        jax.random.normal(key, (num_blocks, num_kv_heads, BLOCK_SIZE, head_size), jnp.bfloat16) for key in keys[:2]
    ]
    query = jax.random.normal(keys[2], (num_seqs, num_heads, head_size), jnp.bfloat16)
    blocks = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(copies, -1)
    per_prefix, sets = num_seqs // num_prefixes, []
    for some in blocks:
        prefixes = some[: num_prefixes * shared].reshape(num_prefixes, shared)
        own_tables = some[num_prefixes * shared :].reshape(num_seqs, own)
        whole = np.concatenate([np.repeat(prefixes, per_prefix, axis=0), own_tables], axis=1)
        sets.append(
            (
                jnp.asarray(whole),
                SharedPrefixes(
                    tables=jnp.asarray(prefixes),
                    lens=jnp.full(num_prefixes, prefix_len, jnp.int32),
                    start_loc=jnp.arange(num_prefixes + 1, dtype=jnp.int32) * per_prefix,
                    own_tables=jnp.asarray(own_tables),
                    own_lens=jnp.full(num_seqs, own_len, jnp.int32),
                ),
            )
        )
    return query, PagedKVCache(pools[0], pools[1]), sets


def row_by_row(query: jax.Array, cache: PagedKVCache, tables: jax.Array, prefixes: SharedPrefixes) -> jax.Array:
    """Attention that reads a prefix once for each of its rows."""
    return cache.attend(query, tables, prefixes.own_lens + prefixes.lens[0])


def shared(query: jax.Array, cache: PagedKVCache, tables: jax.Array, prefixes: SharedPrefixes) -> jax.Array:
    """Attention that reads a prefix once for all of its rows."""
    return prefixes.attend(query, cache)


def own(query: jax.Array, cache: PagedKVCache, tables: jax.Array, prefixes: SharedPrefixes) -> jax.Array:
    """Attention to the tokens behind the prefixes alone."""
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
    parser.add_argument("--heads", type=harness.numbers, default=(32, 8, 128), help="query, kv, size; default 32,8,128")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if not harness.has_gpu("shared_prefix"):
        return 2
    rows: list[dict[str, Any]] = []
    for num_prefixes in args.num_prefixes:
        sizes = args.num_seqs, num_prefixes, args.prefix_len, args.own_len, args.heads
        query, cache, sets = make(*sizes, copies=4)
        check(query, cache, *sets[0])
        times = {}
        for each in (row_by_row, shared, own):
            # The cache is an argument: a constant would be copied into the program.
            call = functools.partial(jax.jit(each), query, cache)
            times[each.__name__] = round(timing.time_calls(call, sets).us, 1)
        rows.append({"num_prefixes": num_prefixes, "us": times, "over_own": times["shared"] / times["own"]})
        print(f"{num_prefixes} prefixes: {times} us, shared / own {rows[-1]['over_own']:.2f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"op": "shared_prefix", **harness.environment(), "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
