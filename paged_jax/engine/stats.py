"""The statistics of an engine, and of several engines together."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Stats:
    """The state of an engine, and its counters since its start or its last `reset`.

    Attributes:
      num_waiting, num_running: unfinished sequences without and with blocks.
      free_blocks, cached_blocks, held_blocks: blocks that nobody holds, that the prefix cache alone holds, and that
        sequences hold; the three add up to the pool.
      waste: fraction of the slots in the held blocks that hold no token.
      num_looked_up_tokens: tokens of admitted sequences, which were looked up in the prefix cache.
      hit_rate: fraction of those tokens that were found there.
      num_recomputed, num_swapped: how many times a preempted sequence's blocks were dropped, and were swapped out.
      num_steps: steps launched.
      num_prompt_tokens: prompt tokens computed, those that were computed again included; prefix cache hits are not.
      num_output_tokens: tokens given out.
      tokens_per_second: output tokens divided by the seconds spent in `Engine.step`.
      num_compiled: compiled programs; it never changes.

    Example:
      `Engine.stats` makes one. Here are those of two engines and of both together.

      >>> from paged_jax.engine import Stats
      >>> parts = [Stats(0, 2, 6, 0, 2, 0.25, 8, 0.0, 0, 0, 3, 8, 4, 100.0, 5)] * 2
      >>> Stats.join(parts).num_running, Stats.join(parts).waste
      (4, 0.25)
    """

    num_waiting: int
    num_running: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    waste: float
    num_looked_up_tokens: int
    hit_rate: float
    num_recomputed: int
    num_swapped: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    tokens_per_second: float
    num_compiled: int

    @staticmethod
    def join(parts: Sequence["Stats"]) -> "Stats":
        """Gives the statistics of engines that run at the same time: sums, and means of the two fractions.

        The engines' blocks must have one size.
        """
        sums: dict[str, Any] = {
            field.name: sum(getattr(part, field.name) for part in parts) for field in dataclasses.fields(Stats)
        }
        waste = sum(part.waste * part.held_blocks for part in parts) / max(sums["held_blocks"], 1)
        hits = sum(part.hit_rate * part.num_looked_up_tokens for part in parts)
        return Stats(**sums | {"waste": waste, "hit_rate": hits / max(sums["num_looked_up_tokens"], 1)})
