"""Measures the memory that sliding windows save: `python -m benchmarks.bench_pools`.

Texts run through a scheduler from the first token of their prompts to their last token, without a model or a device.
Each row compares two ways to group the layers. A single group keeps all blocks of a text until the text ends. Groups by
window release the blocks before the window. For both ways, the row has three numbers: the bytes of pools in which no
text waits for blocks, the peak of the bytes that texts hold, and the mean time in which the host plans a step. Keys and
values are bfloat16.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np

from benchmarks.harness import environment
from benchmarks.models import BLOCK_SIZE, cached_bytes, hub_config
from examples.config import DecoderConfig
from paged_jax.engine import EngineConfig, SamplingParams, pool_sizes
from paged_jax.engine.groups import make_groups
from paged_jax.engine.pools import make_pools
from paged_jax.engine.scheduler import Scheduler
from paged_jax.engine.sequence import Sequence

MODELS = "google/gemma-3-1b-it", "google/gemma-3-12b-it (text)", "openai/gpt-oss-20b (in bfloat16)"
OUTPUT = 64  # tokens of each text after its prompt


@dataclasses.dataclass(frozen=True)
class Row:
    """One case's pools: their bytes, the peak of held bytes, and the host's milliseconds for each step."""

    pool_bytes: int
    held_bytes: int
    plan_ms: float
    num_steps: int


def measure(config: DecoderConfig, num_seqs: int, longest: int, windows: tuple[int | None, ...]) -> Row:
    """Runs `num_seqs` texts side by side from their first token to their last one.

    Args:
      config: the model's sizes.
      num_seqs: texts that run at the same time.
      longest: tokens of each text; the last `OUTPUT` tokens are generated.
      windows: each layer's sliding window, as the engine gets it.
    """
    sizes = EngineConfig(longest, max_num_seqs=num_seqs, max_tokens_per_step=max(512, num_seqs))
    blocks_per_seq = -(-longest // BLOCK_SIZE)
    counts = pool_sizes(windows, num_seqs * (blocks_per_seq + 1), BLOCK_SIZE, sizes)
    block_bytes = cached_bytes(config) * BLOCK_SIZE
    caches = [SimpleNamespace(num_blocks=n, block_size=BLOCK_SIZE, nbytes=n * block_bytes) for n in counts]
    groups = make_groups(caches, windows, longest)
    pools = make_pools(groups, sizes, BLOCK_SIZE, blocks_per_seq)
    scheduler, rng = Scheduler(sizes, pools), np.random.default_rng(0)
    for i in range(num_seqs):
        prompt = rng.integers(0, 50_000, longest - OUTPUT).tolist()
        scheduler.add(Sequence(i, 0, SamplingParams(), prompt, len(prompt), longest, i))
    most, seconds, num_steps, unread = 0, 0.0, 0, None
    while True:
        began = time.thread_time()
        plan = scheduler.schedule()
        seconds += time.thread_time() - began
        for sequence in unread.samples.sequences if unread is not None else ():
            sequence.tokens.append(7)
        if plan is None and unread is None:
            break
        num_steps, unread = num_steps + (plan is not None), plan
        held = [manager.counts().held for manager in pools.managers]
        most = max(most, sum(count * group.block_bytes for count, group in zip(held, groups, strict=True)))
    assert not scheduler.counters.recomputed, "the pools were too small"
    return Row(sum(cache.nbytes for cache in caches), most, 1e3 * seconds / num_steps, num_steps)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_pools")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names of tests/data/real/configs.json")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32_768, 131_072])
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for name, num_seqs, longest in itertools.product(args.models, args.num_seqs, args.contexts):
        config = hub_config(name)
        one = measure(config, num_seqs, longest, (None,) * config.num_layers)
        groups = measure(config, num_seqs, longest, config.sliding_windows)
        rows.append({"model": name, "num_seqs": num_seqs, "context": longest})
        rows[-1] |= {"one_group": dataclasses.asdict(one), "groups": dataclasses.asdict(groups)}
        if not args.json:
            print(
                f"{name:34} {num_seqs:3} x {longest:7,}: {one.pool_bytes / 1e9:8.3f} GB in one group, "
                f"{groups.pool_bytes / 1e9:8.3f} GB in groups ({groups.pool_bytes / one.pool_bytes:.3f}), held "
                f"{groups.held_bytes / 1e9:8.3f} GB ({groups.held_bytes / one.held_bytes:.3f}), "
                f"plan {one.plan_ms:.3f} and {groups.plan_ms:.3f} ms",
                flush=True,
            )
    if args.json:
        print(json.dumps({"environment": environment(), "rows": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
