"""Times `paged_jax.compat.rpa` beside separate pools: `python -m benchmarks.bench_rpa [CASE ...]`.

Both write the step's new tokens and then attend, over donated pools. The separate pools get their slots ready-made; the
one pool's are computed from the lengths, as its callers expect, which a model of many layers does once for all of them.
Times are those of all kernels, in microseconds.
"""

import concurrent.futures
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import paged_jax
from benchmarks import cases, harness, inputs, timing
from paged_jax.compat import rpa

_CASES = ("64x4096-1", "64x4096-1-e4m3", "64x4096-4", "63-decodes-and-512", "63-decodes-and-2048", "chunk-512-of-32768")
_CALLS = 24
_LAYOUTS: tuple[paged_jax.Layout, ...] = ("hnd", "nhd")


class Step(NamedTuple):
    """What a step attends with, beside its pools."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    block_tables: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array
    slot_mapping: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None


def separate(pools: Any, step: Step, *, layout: paged_jax.Layout) -> Any:
    """A step over separate pools."""
    key_cache, value_cache = pools
    k_scale, v_scale = step.k_scale, step.v_scale
    key_cache, value_cache = paged_jax.write_to_paged_cache(
        step.key, step.value, key_cache, value_cache, step.slot_mapping, layout=layout, k_scale=k_scale, v_scale=v_scale
    )
    batch = step.block_tables, step.seq_lens, step.query_start_loc
    out = paged_jax.ragged_paged_attention(
        step.query, key_cache, value_cache, *batch, layout=layout, k_scale=k_scale, v_scale=v_scale
    )
    return out, (key_cache, value_cache)


def one_pool(pool: Any, step: Step) -> Any:
    """The same step over one pool."""
    num_seqs, head_size = step.seq_lens.shape[0], step.query.shape[2]
    distribution = jnp.array([0, 0, num_seqs], jnp.int32)
    batch = step.seq_lens, step.block_tables.reshape(-1), step.query_start_loc, distribution
    options = {"sm_scale": head_size**-0.5, "k_scale": step.k_scale, "v_scale": step.v_scale}
    return rpa.ragged_paged_attention(step.query, step.key, step.value, pool, *batch, **options)


def interleaved(key_cache: jax.Array, value_cache: jax.Array) -> jax.Array:
    """One pool of two pools of layout "nhd"."""
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


def measure(case: cases.Case) -> dict[str, float]:
    """Times a case, after a check that both kinds of pools give the same results."""
    made = {layout: inputs.make(dataclasses.replace(case, layout=layout)) for layout in _LAYOUTS}
    pools: dict[str, Any] = {layout: (x.key_cache, x.value_cache) for layout, x in made.items()}
    pools["one pool"] = interleaved(*pools["nhd"])
    steps = {layout: steps_of(case, x) for layout, x in made.items()}
    steps["one pool"] = steps["nhd"]
    del made
    functions = {layout: functools.partial(separate, layout=layout) for layout in _LAYOUTS} | {"one pool": one_pool}

    def compiled(name: str) -> Any:
        return jax.jit(functions[name], donate_argnums=0).lower(pools[name], steps[name][0]).compile()

    with concurrent.futures.ThreadPoolExecutor() as threads:
        programs = dict(zip(functions, threads.map(compiled, functions), strict=True))
    outs, times = {}, {}
    for name, program in programs.items():
        state = [pools.pop(name)]

        def run(name: str = name, program: Any = program, state: list = state) -> Any:
            for i in range(_CALLS):
                outs[name], state[0] = program(state[0], steps[name][i % len(steps[name])])
            return outs[name]

        jax.block_until_ready(run())
        rounds = [sum(us for _, us in timing.kernel_times(run)) / _CALLS for _ in range(5)]
        times[name] = statistics.median(rounds)
    np.testing.assert_allclose(np.asarray(outs["one pool"], np.float32), np.asarray(outs["nhd"], np.float32), atol=2e-2)
    return times


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    names = list(sys.argv[1:] if argv is None else argv) or list(_CASES)
    if not harness.has_gpu("rpa"):
        return 1
    for case in cases.RAGGED:
        if case.name in names:
            times = measure(case)
            best = min(times[layout] for layout in _LAYOUTS)
            row = {"case": case.name, **{name: round(us, 1) for name, us in times.items()}}
            print(json.dumps(row | {"one pool / best": round(times["one pool"] / best, 3)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
