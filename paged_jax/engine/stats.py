"""The statistics of an engine, and of several engines together."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """The blocks of one group of layers: those with the same sliding window, which have pools of their own.

    Attributes:
      sliding_window: tokens that a query of these layers sees; None for all.
      num_layers: how many layers they are.
      block_bytes: the bytes of one block in all of these layers together.
      free_blocks, cached_blocks, held_blocks: as in `Stats`.

    Example:
      >>> from paged_jax.engine import PoolStats
      >>> pool = PoolStats(1024, 22, 22 * 65_536, free_blocks=30, cached_blocks=3, held_blocks=67)
      >>> pool.held_bytes
      96600064
    """

    sliding_window: int | None
    num_layers: int
    block_bytes: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int

    @property
    def held_bytes(self) -> int:
        """The bytes of the blocks that sequences hold."""
        return self.held_blocks * self.block_bytes

    @staticmethod
    def join(parts: Sequence["PoolStats"]) -> "PoolStats":
        """Gives the counts of the same group in several engines."""
        names = "free_blocks", "cached_blocks", "held_blocks"
        return dataclasses.replace(parts[0], **{name: sum(getattr(part, name) for part in parts) for name in names})


@dataclasses.dataclass(frozen=True)
class Stats:
    """The state of an engine, and its counters since its start or its last `reset`.

    Attributes:
      num_waiting, num_running: unfinished sequences without and with blocks.
      free_blocks, cached_blocks, held_blocks: blocks that nobody holds, that the prefix cache alone holds, and that
        sequences hold; the three add up to the pools of all groups of layers.
      waste: fraction of the slots in the held blocks that hold no token.
      num_looked_up_tokens: tokens of admitted sequences, which were looked up in the prefix cache.
      hit_rate: fraction of those tokens that were found there.
      num_shared_tokens: tokens of shared prefixes that decode steps did not read once more.
      num_recomputed, num_swapped: how many times a preempted sequence's blocks were dropped, and were swapped out.
      num_steps: steps launched.
      num_prompt_tokens: prompt tokens computed, those that were computed again included; prefix cache hits are not.
      num_output_tokens: tokens given out.
      num_draft_tokens, num_accepted_tokens: guessed tokens that steps verified, and tokens that they gave in addition
        because guesses were right.
      tokens_per_second: output tokens divided by the seconds spent in `Engine.step`.
      num_compiled: compiled programs; it never changes.
      pools: the blocks of each group of layers apart, the widest sliding window first.

    Example:
      `Engine.stats` makes one. Here are the statistics of two engines and of both together.

      >>> from paged_jax.engine import Stats
      >>> parts = [Stats(0, 2, 6, 0, 2, 0.25, 8, 0.0, 0, 0, 0, 3, 8, 4, 0, 0, 100.0, 5)] * 2
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
    num_shared_tokens: int
    num_recomputed: int
    num_swapped: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    tokens_per_second: float
    num_compiled: int
    pools: tuple[PoolStats, ...] = ()

    @staticmethod
    def join(parts: Sequence["Stats"]) -> "Stats":
        """Gives the statistics of engines that run at the same time: sums, and means of the two fractions.

        The engines' blocks must have one size, and their layers the same sliding windows.
        """
        names = [field.name for field in dataclasses.fields(Stats) if field.name != "pools"]
        sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in names}
        pools = tuple(PoolStats.join(group) for group in zip(*(part.pools for part in parts), strict=True))
        waste = sum(part.waste * part.held_blocks for part in parts) / max(sums["held_blocks"], 1)
        hits = sum(part.hit_rate * part.num_looked_up_tokens for part in parts)
        return Stats(pools=pools, **sums | {"waste": waste, "hit_rate": hits / max(sums["num_looked_up_tokens"], 1)})
