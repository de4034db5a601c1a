"""Times the host's part of a decode step, without a model or a device: `python -m benchmarks.bench_scheduler`.

Each row runs sequences of one length in a pool of one size. A step is planned, is packed for the device, and ends with
the tokens that the previous step drew. All sequences decode, and each takes a new block every 16 steps. The time of a
step should depend on how many sequences run, and neither on their lengths nor on the pool. Times are CPU time: nothing
here waits.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time

import jax

from benchmarks.harness import environment
from paged_jax.engine import EngineConfig, SamplingParams
from paged_jax.engine.batch import StepShape
from paged_jax.engine.blocks import BlockManager
from paged_jax.engine.pack import pack
from paged_jax.engine.pools import Pools
from paged_jax.engine.sampling import Kind
from paged_jax.engine.scheduler import Scheduler
from paged_jax.engine.sequence import Sequence

BLOCK_SIZE, POSITIONS, STEPS = 16, 131_072, 64


@dataclasses.dataclass(frozen=True)
class Row:
    """The times of one case: milliseconds of the median step and of its two parts, and the bytes sent in each step."""

    num_seqs: int
    context_len: int
    num_blocks: int
    step_ms: float
    plan_ms: float
    pack_ms: float
    sent_bytes: int


def make_scheduler(num_seqs: int, context_len: int, num_blocks: int) -> Scheduler:
    """Makes a scheduler with running sequences. Each has only its last token left to compute."""
    config = EngineConfig(max_model_len=POSITIONS, max_num_seqs=num_seqs, max_tokens_per_step=max(num_seqs, 512))
    blocks = Pools([BlockManager(num_blocks, BLOCK_SIZE, num_seqs, POSITIONS // BLOCK_SIZE, 0, True)], [1])
    scheduler = Scheduler(config, blocks)
    for seat in range(num_seqs):
        tokens = [seat] * (context_len - seat % BLOCK_SIZE)  # so that not all take a block in the same step
        sequence = Sequence(seat, 0, SamplingParams(), tokens, len(tokens), POSITIONS + 1, seat)
        sequence.seat, sequence.num_computed = scheduler.free_seats.pop(), len(tokens) - 1
        sequence.num_cached = sequence.num_computed // BLOCK_SIZE
        sequence.hashes = [seat.to_bytes(16)] * sequence.num_cached
        blocks.append({sequence.seat: sequence.num_computed})
        scheduler.running.append(sequence)
    return scheduler


def measure(num_seqs: int, context_len: int, num_blocks: int) -> Row:
    """Times steps of one case."""
    scheduler = make_scheduler(num_seqs, context_len, num_blocks)
    shape = StepShape(num_seqs, num_seqs, POSITIONS // BLOCK_SIZE, True, 0)
    times, before, size = [], None, 0
    for _ in range(STEPS):
        began = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        assert plan is not None
        size = pack(plan, shape, num_seqs, Kind.GREEDY).nbytes
        packed = time.thread_time()
        for sample in before.samples if before is not None else ():
            sample.sequence.num_unread -= 1
            sample.sequence.tokens.append(7)
        before = plan
        times.append((time.thread_time() - began, planned - began, packed - planned))
    step, plan_time, pack_time = (1e3 * statistics.median(part) for part in zip(*times[4:], strict=True))
    return Row(num_seqs, context_len, num_blocks, step, plan_time, pack_time, size)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_scheduler")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context-lens", type=int, nargs="+", default=[1024, 16_384, 130_000])
    parser.add_argument("--pools", type=float, nargs="+", default=[1.05, 2.0], help="blocks, over those that are held")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for num_seqs, context_len, pool in itertools.product(args.num_seqs, args.context_lens, args.pools):
        held = num_seqs * (-(-context_len // BLOCK_SIZE) + STEPS // BLOCK_SIZE + 1)
        rows.append(measure(num_seqs, context_len, int(held * pool)))
        if not args.json:
            row = rows[-1]
            print(
                f"{num_seqs:4} sequences of {context_len:7,} tokens, {row.num_blocks:9,} blocks: {row.step_ms:7.3f} ms "
                f"a step (plan {row.plan_ms:.3f}, pack {row.pack_ms:.3f}), {row.sent_bytes:9,} bytes sent",
                flush=True,
            )
    if args.json:
        print(json.dumps({"environment": environment(), "rows": [dataclasses.asdict(row) for row in rows]}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
