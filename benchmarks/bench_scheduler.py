"""Times the host's part of a decode step, without a model or a device: `python -m benchmarks.bench_scheduler`.

Each row runs sequences of one length through an engine whose programs do nothing and draw the same token each time. The
time of a step is all that the engine does between two launches: it plans the step, packs its arrays, starts its
programs, reads the tokens of the previous step, and returns them to the caller. All sequences decode, and each takes a
new block every 16 steps. The time should depend on how many sequences run, but not on their lengths or on the pool.
Times are CPU time, because nothing here waits. They do not include JAX's dispatch of programs or the detokenizing of
texts.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import jax
import numpy as np

from benchmarks.harness import environment
from paged_jax.engine import Engine, EngineConfig, SamplingParams
from paged_jax.engine.batch import StepShape
from paged_jax.engine.runner import Runner
from paged_jax.engine.sampling import Drawn

BLOCK_SIZE, POSITIONS, STEPS, WINDOW = 16, 131_072, 64, 1024


@dataclasses.dataclass(frozen=True)
class Row:
    """The times of one case in milliseconds (of the median step, the best step, the median parts), and bytes sent.

    The parts are the scheduler's plan, the launch with its arrays, and the rest, which reads tokens.
    """

    num_seqs: int
    context_len: int
    num_blocks: int
    num_groups: int
    num_waiting: int
    step_ms: float
    best_ms: float
    plan_ms: float
    launch_ms: float
    read_ms: float
    sent_bytes: int


class _Tokens(np.ndarray):
    """Drawn tokens, which are on the host already."""

    def copy_to_host_async(self):
        """Does nothing."""


class NoDevice(Runner):
    """A `Runner` whose programs do nothing; it counts the bytes that they are given from the host."""

    def __init__(self, step, weights, caches, config, groups, **_):
        self.config, self.groups, self.block_size, self.num_shards = config, groups, caches[0].block_size, 1
        self.vocab_size = 8
        self._weights = self._caches = self._host_caches = self._last_tokens = self._tables = self._adjustments = None
        tokens: Any = np.full(config.max_num_seqs, 7, np.int32).view(_Tokens)
        self._drawn = Drawn(tokens)
        self.num_compiled = self.sent_bytes = 0

    def reset(self):
        """Does nothing."""

    def _start(self, name: Any, *arguments: Any) -> Any:
        self.sent_bytes += sum(x.nbytes for x in jax.tree.leaves(arguments) if isinstance(x, np.ndarray))
        if isinstance(name, str):
            return None
        return (None,) * 4 if isinstance(name, StepShape) else (None, self._drawn)


def make_engine(num_seqs: int, context_len: int, num_blocks: int, num_groups: int, num_waiting: int) -> Engine:
    """Makes an engine with running sequences whose prompts are computed, and with others that wait for a seat."""
    config = EngineConfig(max_model_len=POSITIONS, max_num_seqs=num_seqs, max_tokens_per_step=max(POSITIONS, num_seqs))
    windows, no_step = (None, WINDOW)[:num_groups], cast(Any, None)
    caches: list[Any] = [
        SimpleNamespace(num_blocks=num_blocks, block_size=BLOCK_SIZE, nbytes=num_blocks) for _ in windows
    ]
    with mock.patch("paged_jax.engine.engine.Runner", NoDevice):
        engine = Engine(no_step, None, tuple(caches), config, sliding_windows=windows)
    for seat in range(num_seqs):
        # Lengths differ, so that not all sequences take a block in the same step.
        engine.add_request([seat] * (context_len - seat % BLOCK_SIZE), SamplingParams(seed=seat))
    while engine.num_running < num_seqs or engine._scheduler.running[-1].num_to_compute > 1:
        engine.step()
    for _ in range(num_waiting):
        engine.add_request([7] * context_len, SamplingParams(seed=0))
    for _ in range(4):
        engine.step()
    return engine


def measure(num_seqs: int, context_len: int, num_blocks: int, num_groups: int = 1, num_waiting: int = 0) -> Row:
    """Times steps of one case."""
    engine = make_engine(num_seqs, context_len, num_blocks, num_groups, num_waiting)
    runner: Any = engine._runner
    spent: dict[str, float] = {}

    def timed(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def wrapped(*arguments):
            began = time.thread_time()
            result = call(*arguments)
            spent[name] += time.thread_time() - began
            return result

        setattr(owner, name, wrapped)

    timed(engine._scheduler, "schedule")
    timed(runner, "launch")
    times = []
    runner.sent_bytes = 0
    for _ in range(STEPS):
        spent |= dict.fromkeys(("schedule", "launch"), 0.0)
        began = time.thread_time()
        deltas = engine.step()
        step = time.thread_time() - began
        assert len(deltas) == num_seqs
        times.append((step, spent["schedule"], spent["launch"], step - sum(spent.values())))
    step, plan, launch, read = (1e3 * statistics.median(part) for part in zip(*times, strict=True))
    best, sent = 1e3 * min(times)[0], runner.sent_bytes // STEPS
    return Row(num_seqs, context_len, num_blocks, num_groups, num_waiting, step, best, plan, launch, read, sent)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_scheduler")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context-lens", type=int, nargs="+", default=[1024, 16_384, 130_000])
    parser.add_argument("--pools", type=float, nargs="+", default=[1.05, 2.0], help="blocks, over those that are held")
    parser.add_argument(
        "--groups", type=int, nargs="+", default=[1], choices=(1, 2), help=f"2: also layers with a window of {WINDOW}"
    )
    parser.add_argument("--waiting", type=int, default=0, help="requests that wait for a seat meanwhile")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for num_seqs, context_len, pool, groups in itertools.product(
        args.num_seqs, args.context_lens, args.pools, args.groups
    ):
        held = num_seqs * (-(-context_len // BLOCK_SIZE) + STEPS // BLOCK_SIZE + 2)
        rows.append(measure(num_seqs, context_len, int(held * pool), groups, args.waiting))
        if not args.json:
            row = rows[-1]
            print(
                f"{num_seqs:4} sequences of {context_len:7,} tokens, {row.num_blocks:9,} blocks, {groups} group(s): "
                f"{row.step_ms:7.3f} ms a step (best {row.best_ms:.3f}; plan {row.plan_ms:.3f}, launch "
                f"{row.launch_ms:.3f}, read {row.read_ms:.3f}), {row.sent_bytes:7,} bytes sent",
                flush=True,
            )
    if args.json:
        print(json.dumps({"environment": environment(), "rows": [dataclasses.asdict(row) for row in rows]}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
