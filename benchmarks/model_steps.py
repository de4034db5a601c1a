"""The steps of whole models that bench_model.py times: their programs, and the batches that they run on."""

import concurrent.futures
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.models import floor_bytes, make_caches, make_tables, slots
from examples.config import DecoderConfig
from examples.sampling import greedy
from examples.step import Caches, Step, make_abstract_step, xla_options
from paged_jax.engine import Batch

STEPS = 32  # decode steps in a row: half of them have shorter contexts than the case, half of them longer ones
PROMPTS = 8  # prompts in one step of prefill; the others wait for the next step


class State(NamedTuple):
    """The state between steps: token ids and positions, i32 [num_seqs] each, and the caches."""

    token_ids: Any
    positions: Any
    caches: Caches


def advance(step: Step, weights: Any, state: State, tables: jax.Array) -> State:
    """Runs a step with one token of every sequence.

    A row's next token is the likeliest one plus the row's number. Otherwise rows with the same likeliest token would
    continue with the same token, and choose the same experts.
    """
    token_ids, positions, caches = state
    rows = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    batch = Batch(token_ids, positions, slots(tables, rows, positions), tables, positions + 1, is_decode=True)
    logits, caches = step(weights, caches, batch)
    return State((greedy(logits) + rows) % logits.shape[1], positions + 1, caches)


def prompts(tables: Any, context: int) -> Batch:
    """A batch of whole prompts; the step computes the logits of their last tokens."""
    num_seqs = tables.shape[0]
    rows, positions = np.divmod(np.arange(num_seqs * context, dtype=np.int32), np.int32(context))
    starts = np.arange(num_seqs + 1, dtype=np.int32) * np.int32(context)
    return Batch(
        token_ids=jnp.asarray(positions % 1000),
        positions=jnp.asarray(positions),
        slot_mapping=jnp.asarray(slots(tables, rows, positions)),
        block_tables=jnp.asarray(tables),
        seq_lens=jnp.full(num_seqs, context, jnp.int32),
        query_start_loc=jnp.asarray(starts),
        logit_rows=jnp.asarray(starts[1:] - 1),
    )


class Case(NamedTuple):
    """A case: a step of "decode" or "prefill" with this many sequences."""

    phase: str
    num_seqs: int


class Work(NamedTuple):
    """The cases of a model: decode steps of batches of these sizes, and these numbers of prompts."""

    batches: Sequence[int]
    prefill: Sequence[int]
    context: int

    @property
    def cases(self) -> list[Case]:
        """All cases, in the order in which they are timed."""
        return [*(Case("decode", n) for n in self.batches), *(Case("prefill", n) for n in self.prefill)]


def lower_call(config: DecoderConfig, step: Step, weights: Any, case: Case, context: int) -> jax.stages.Lowered:
    """Lowers the step, which is called once for each token, or once for `PROMPTS` prompts."""
    tables = make_tables(case.num_seqs, context + STEPS)
    state = _abstract_state(config, tables)
    if case.phase == "decode":
        options = xla_options(case.num_seqs)
        call = jax.jit(partial(advance, step), donate_argnums=1, compiler_options=options)
        return call.lower(weights, state, tables)
    batch = prompts(tables[:PROMPTS], context)
    options = xla_options(batch.token_ids.shape[0])
    return jax.jit(step, donate_argnums=1, compiler_options=options).lower(weights, state.caches, batch)


def lower_loop(config: DecoderConfig, step: Step, weights: Any, case: Case, context: int) -> jax.stages.Lowered:
    """Lowers the loop of `STEPS` decode steps. XLA knows this number, so the host need not check after each step."""
    tables = make_tables(case.num_seqs, context + STEPS)

    def loop(weights, state, tables):
        return jax.lax.fori_loop(0, STEPS, lambda _, state: advance(step, weights, state, tables), state)

    state = _abstract_state(config, tables)
    options = xla_options(case.num_seqs)
    return jax.jit(loop, donate_argnums=1, compiler_options=options).lower(weights, state, tables)


def _abstract_state(config: DecoderConfig, tables: np.ndarray) -> State:
    ids = jax.ShapeDtypeStruct(tables.shape[:1], jnp.int32)
    return State(ids, ids, jax.eval_shape(lambda: make_caches(config, tables.size)))


def compile_all(
    models: dict[str, DecoderConfig], work: Work, options: dict[str, Any] | None
) -> dict[tuple[str, Case], dict[str, concurrent.futures.Future]]:
    """Compiles the programs of all cases that fit. Each case has a program "call"; decode also has a program "loop"."""
    lowers: dict[tuple[str, Case, str], Callable[[], jax.stages.Lowered]] = {}
    for name, config in models.items():
        weights, step = make_abstract_step(config, jnp.bfloat16)
        for case in work.cases:
            if excess(config, weights, case, work.context) is None:
                made = config, step, weights, case, work.context
                lowers[name, case, "call"] = partial(lower_call, *made)
                if case.phase == "decode":
                    lowers[name, case, "loop"] = partial(lower_loop, *made)
    found: dict[tuple[str, Case], dict[str, concurrent.futures.Future]] = {}
    for (name, case, program), future in harness.compile_all(lowers, options).items():
        found.setdefault((name, case), {})[program] = future
    return found


def excess(config: DecoderConfig, weights: Any, case: Case, context: int) -> str | None:
    """Says why a case does not fit into the device's memory; None if it fits, or if the memory is unknown."""
    most = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))
    needed = floor_bytes(config, weights, case.num_seqs, context + STEPS)
    return f"weights, keys and values take {needed / 1e9:.0f} GB of {most / 1e9:.0f}" if needed > most else None
