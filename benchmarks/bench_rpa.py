"""Times `paged_jax.compat.rpa` beside separate pools: `python -m benchmarks.bench_rpa [CASE ...]`.

Calls with one pool and calls with separate pools write the step's new tokens and then attend, over donated pools. Calls
with separate pools take computed slots as an argument. Calls with one pool compute the slots from the lengths. As in a
model, a step has several layers with pools of their own, for which XLA computes the slots once.
Times are microseconds of a layer: of all kernels together, and of all kernels of one name. A case of few queries is
timed twice, with and without their bound (`max_query_len`).
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import paged_jax
from benchmarks import cases, harness, inputs, timing
from paged_jax.compat import rpa

_CASES = ("64x4096-1", "64x4096-1-e4m3", "64x4096-4", "63-decodes-and-512", "63-decodes-and-2048", "chunk-512-of-32768")
_FEW_QUERIES = 16
_LAYERS = 4
_CALLS = 8
_LAYOUTS: tuple[paged_jax.Layout, ...] = ("hnd", "nhd")


class Step(NamedTuple):
    """The arguments of a step besides its pools."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    block_tables: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array
    slot_mapping: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None


def separate(pools: Any, step: Step, *, layout: paged_jax.Layout, max_query_len: int | None) -> Any:
    """A step over separate pools."""
    key_cache, value_cache = pools
    k_scale, v_scale = step.k_scale, step.v_scale
    key_cache, value_cache = paged_jax.write_to_paged_cache(
        step.key, step.value, key_cache, value_cache, step.slot_mapping, layout=layout, k_scale=k_scale, v_scale=v_scale
    )
    batch = step.block_tables, step.seq_lens, step.query_start_loc
    options: Any = {"layout": layout, "k_scale": k_scale, "v_scale": v_scale, "max_query_len": max_query_len}
    out = paged_jax.ragged_paged_attention(step.query, key_cache, value_cache, *batch, **options)
    return out, (key_cache, value_cache)


def one_pool(pool: Any, step: Step, *, max_query_len: int | None) -> Any:
    """The same step over one pool."""
    num_seqs, head_size = step.seq_lens.shape[0], step.query.shape[2]
    distribution = jnp.array([0, 0, num_seqs], jnp.int32)
    batch = step.seq_lens, step.block_tables.reshape(-1), step.query_start_loc, distribution
    options: Any = {"k_scale": step.k_scale, "v_scale": step.v_scale, "max_query_len": max_query_len}
    options["sm_scale"] = head_size**-0.5
    return rpa.ragged_paged_attention(step.query, step.key, step.value, pool, *batch, **options)


def interleaved(key_cache: jax.Array, value_cache: jax.Array) -> jax.Array:
    """Joins two pools of layout "nhd" into one pool."""
    pairs = jnp.stack([key_cache, value_cache], axis=3)
    return pairs.reshape(*key_cache.shape[:2], -1, key_cache.shape[3])


def slots_of(case: cases.Case, table: np.ndarray) -> jax.Array:
    """The slots of a step's new tokens."""
    slots = [
        row[np.arange(length - count, length) // case.block_size] * case.block_size
        + np.arange(length - count, length) % case.block_size
        for row, length, count in zip(table, case.seq_lens, case.num_queries, strict=True)
    ]
    return jnp.asarray(np.concatenate(slots), jnp.int32)


def steps_of(case: cases.Case, made: inputs.Inputs) -> list[Step]:
    """A step for each of the tables."""
    shape = made.query.shape[0], case.num_kv_heads, made.query.shape[2]
    key, value = (jax.random.normal(k, shape, made.query.dtype) for k in jax.random.split(jax.random.key(0)))
    scales = made.k_scale, made.v_scale
    return [
        Step(made.query, key, value, t, made.seq_lens, made.query_start_loc, slots_of(case, np.asarray(t)), *scales)
        for t in made.block_tables
    ]


def measure(case: cases.Case, bound: int | None) -> dict[str, dict[str, Any]]:
    """Times a case, after a check that both pools give the same results."""
    made = {layout: inputs.make(dataclasses.replace(case, layout=layout)) for layout in _LAYOUTS}
    pools: dict[str, Any] = {layout: (x.key_cache, x.value_cache) for layout, x in made.items()}
    pools["one pool"] = interleaved(*pools["nhd"])
    steps = {layout: steps_of(case, x) for layout, x in made.items()}
    steps["one pool"] = steps["nhd"]
    del made
    functions: dict[str, Any] = {layout: functools.partial(separate, layout=layout) for layout in _LAYOUTS}
    functions["one pool"] = one_pool

    def compiled(name: str) -> Any:
        def layers(pools: Sequence[Any], step: Step) -> Any:
            outs, pools = zip(*(functions[name](x, step, max_query_len=bound) for x in pools), strict=True)
            return outs, pools

        return jax.jit(layers, donate_argnums=0).lower((pools[name],) * _LAYERS, steps[name][0]).compile()

    with concurrent.futures.ThreadPoolExecutor() as threads:
        programs = dict(zip(functions, threads.map(compiled, functions), strict=True))
    outs, found = {}, {}
    for name, program in programs.items():
        state = [tuple(jax.tree.map(jnp.copy, pools[name]) for _ in range(_LAYERS))]

        def run(name: str = name, program: Any = program, state: list = state) -> Any:
            for i in range(_CALLS):
                (outs[name], *_), state[0] = program(state[0], steps[name][i % len(steps[name])])
            return outs[name]

        jax.block_until_ready(run())
        found[name] = _timed(run)
    np.testing.assert_allclose(np.asarray(outs["one pool"], np.float32), np.asarray(outs["nhd"], np.float32), atol=2e-2)
    return found


def _timed(run: Any) -> dict[str, Any]:
    """The time of one layer of `run`, and the time of all kernels of each name in it: medians over rounds."""
    rounds = []
    for _ in range(5):
        times: dict[str, float] = collections.defaultdict(float)
        for name, us in timing.kernel_times(run):
            times[name] += us / (_CALLS * _LAYERS)
        rounds.append(times)
    kernels = [(name, round(statistics.median(times[name] for times in rounds), 2)) for name in rounds[0]]
    us = statistics.median(sum(times.values()) for times in rounds)
    return {"us": round(us, 1), "kernels": kernels}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_rpa", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {', '.join(_CASES)}; default all")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if not harness.has_gpu("rpa"):
        return 1
    rows: list[dict[str, Any]] = []
    for case in (*cases.RAGGED, *cases.MORE_RAGGED):
        if case.name not in (args.cases or _CASES):
            continue
        longest = max(case.num_queries)
        for bound in (None, longest) if longest <= _FEW_QUERIES else (None,):
            found = measure(case, bound)
            best = min(found[layout]["us"] for layout in _LAYOUTS)
            row = {"case": case.name, "max_query_len": bound, "ratio": round(found["one pool"]["us"] / best, 3)}
            print(json.dumps(row | {name: x["us"] for name, x in found.items()}), flush=True)
            rows.append(row | found)
            harness.write({"op": "rpa", **harness.environment(), "rows": rows}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
