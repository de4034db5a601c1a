"""The clocks of bench_model.py, whose docstring explains each of them."""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, model_steps, timing
from benchmarks.model_steps import PROMPTS, State, prompts
from benchmarks.models import BLOCK_SIZE, slots
from paged_jax import PagedLatentCache

PROFILED_STEPS = 4  # steps in a row under CUPTI
KERNELS = 24  # the most kernels of a step that a row names
TOLERANCE = 2e-2  # largest difference of two programs' writes to the cache, relative to the norm of the writes


def best_seconds(run: Callable[[Any], Any], begin: Callable[[Any], Any], caches: Any) -> tuple[float, Any]:
    """Returns the fewest seconds of a run of `run(begin(caches))`, after one warm-up run, and the final caches."""
    times = []
    for _ in range(4):
        state = jax.block_until_ready(begin(caches))
        began = time.perf_counter()
        caches = jax.block_until_ready(run(state)).caches
        times.append(time.perf_counter() - began)
    return min(times[1:]), caches


class DecodeRun(NamedTuple):
    """Decode steps around a context length: half of them are shorter, and half of them longer."""

    call: Any
    weights: Any
    tables: np.ndarray
    context: int

    @property
    def start(self) -> int:
        """Tokens of each sequence before the first step."""
        return self.context - model_steps.STEPS // 2

    def begin(self, caches: Any) -> State:
        """The first state, in new arrays, because the next call gets them donated."""
        num_seqs = self.tables.shape[0]
        tokens = jnp.arange(num_seqs, dtype=jnp.int32) + 7
        return State(tokens, jnp.full(num_seqs, self.start, jnp.int32), caches)

    def calls(self, state: State, num_steps: int | None = None) -> State:
        """Calls the step once for each token."""
        tables = jnp.asarray(self.tables)
        for _ in range(model_steps.STEPS if num_steps is None else num_steps):
            state = self.call(self.weights, state, tables)
        return state

    def written(self, caches: Any) -> np.ndarray:
        """The keys or latents that the first step writes in the last layer, f32 [num_seqs, ...]."""
        num_seqs = self.tables.shape[0]
        first = slots(self.tables, np.arange(num_seqs), np.full(num_seqs, self.start))
        cache, block, offset = caches[-1], first // BLOCK_SIZE, first % BLOCK_SIZE
        if isinstance(cache, PagedLatentCache):
            return np.asarray(cache.latent_cache[block, offset], np.float32)
        return np.asarray(cache.key_cache[block, :, offset], np.float32)


def time_decode(
    programs: dict[str, Any], weights: Any, caches: Any, tables: np.ndarray, context: int
) -> dict[str, dict[str, Any]]:
    """Times decode steps around a context length by all three clocks. Returns the fields of each clock's row.

    Raises:
        ValueError: the loop and the single calls do not write the same tokens to the cache.
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
        "looped": {"us": 1e6 * looped / model_steps.STEPS},
        "called": {"us": 1e6 * called / model_steps.STEPS},
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
    """Microseconds of the kernels in one of `run`'s steps, and the kernels; or the reason why CUPTI sees none."""
    if jax.default_backend() != "gpu":
        return {"absent": "no GPU"}
    try:
        return by_kernel(timing.kernel_times(run), num_steps)
    except Exception as error:  # the other clocks' times are still worth having
        return {"failed": harness.first_line(error)}


def by_kernel(launches: Sequence[tuple[str, float]], num_steps: int) -> dict[str, Any]:
    """Fields of a row from launches (name, microseconds): the time of all of them, and the slowest kernels."""
    total: dict[str, tuple[int, float]] = {}
    for name, us in launches:
        name = re.sub(r"^all_reduce_[\d_]*", "all_reduce_", name)[:120]  # XLA numbers these kernels
        count, before = total.get(name, (0, 0.0))
        total[name] = count + 1, before + us
    longest = sorted(total.items(), key=lambda item: -item[1][1])[:KERNELS]
    kernels = [[name, count / num_steps, us / num_steps] for name, (count, us) in longest]
    return {"us": sum(us for _, us in launches) / num_steps, "kernels": kernels}
