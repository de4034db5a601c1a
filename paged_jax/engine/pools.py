"""The blocks of all groups of layers: each change to a sequence is made in the pools of every group.

A sequence grows in all groups or in none. It can begin with cached blocks up to a token for which every group has what
it needs: layers that see everything need all blocks before the token, and layers with a window only the last ones.
Arguments and results for each group are lists in the order of the groups.
"""

import collections.abc
import itertools
from typing import NamedTuple

import numpy as np

from paged_jax.engine.blocks import BlockManager, Counted, Counts, Pairs
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.groups import Group, blocks_used, host_blocks, most_blocks
from paged_jax.engine.prefix import extend_hashes
from paged_jax.engine.seats import Seats
from paged_jax.engine.sequence import Sequence


class Hits(NamedTuple):
    """Cached blocks with which a sequence can begin.

    Attributes:
      num_blocks: how many of the sequence's first blocks need not be computed.
      blocks: for each group, the cached blocks that it needs.
    """

    num_blocks: int
    blocks: list[list[int]]


class Entry(NamedTuple):
    """A part of a block table that has changed: the blocks of a group from a column on, for the sequence at a seat."""

    group: int
    seat: int
    column: int
    blocks: list[int]


def make_pools(
    groups: collections.abc.Sequence[Group],
    config: EngineConfig,
    block_size: int,
    max_blocks_per_seq: int,
    num_shards: int = 1,
) -> "Pools":
    """Makes the pools of an engine, in which every block is free.

    Args:
      groups: the groups of layers.
      config: the engine's config.
      block_size: tokens in a block.
      max_blocks_per_seq: blocks of the longest sequence.
      num_shards: how many devices the blocks of each pool are split over.
    """
    managers = [
        BlockManager(
            num_blocks,
            block_size,
            config.max_num_seqs,
            max_blocks_per_seq,
            host_blocks(group, block_size, config),
            config.prefix_caching,
            num_shards,
            sliding_window=group.sliding_window,
            most_held=most_blocks(group.sliding_window, block_size, config),
        )
        for group, num_blocks in zip(groups, blocks_used(config, groups), strict=True)
    ]
    return Pools(managers, [group.block_bytes for group in groups])


class Pools:
    """Gives blocks of every group to the sequences at their seats and takes them back.

    Args:
      managers: each group's block manager.
      block_bytes: the bytes of a block in all layers of each group, which a swap moves.
    """

    def __init__(self, managers: list[BlockManager], block_bytes: list[int]):
        self.managers, self.block_bytes = managers, block_bytes
        self.block_size, self._widest = managers[0].block_size, managers[0]

    @property
    def num_blocks(self) -> int:
        """The blocks of all groups together."""
        return sum(manager.num_blocks for manager in self.managers)

    @property
    def room(self) -> int | None:
        """The most tokens that a single sequence can have; None if their number does not matter."""
        return min((manager.room for manager in self.managers if manager.room is not None), default=None)

    def append(self, tokens: Counted) -> list[Pairs] | None:
        """Grows the sequences at some seats, in all groups or in none; if need be, evicts blocks from the prefix cache.

        Args:
          tokens: how many new tokens each seat gets: of some seats, or of all in an array.

        Returns:
          The (source, destination) pairs of shared blocks, which must be copied before anything is written; None if
          there are too few blocks.
        """
        if len(self.managers) > 1 and not all(manager.can_append(tokens) for manager in self.managers):
            return None
        pairs = [copied for manager in self.managers if (copied := manager.append(tokens)) is not None]
        return pairs if len(pairs) == len(self.managers) else None

    def truncate(self, lengths: collections.abc.Mapping[int, int]) -> None:
        """Shortens the sequences at some seats to these numbers of tokens, and frees the blocks behind."""
        for manager in self.managers:
            manager.truncate(lengths)

    def match(self, sequence: Sequence) -> Hits:
        """The cached blocks with which a waiting sequence can begin; at least its last token stays to be computed."""
        if self._widest.prefix is None:
            return self.no_hits
        extend_hashes(sequence.hashes, sequence.tokens, self.block_size)
        count, agreed = (sequence.num_tokens - 1) // self.block_size, 0
        for manager in itertools.cycle(self.managers):
            found = manager.count_found(sequence.hashes[:count])
            count, agreed = found, agreed + 1 if found == count else 1
            if agreed == len(self.managers):
                break
        return Hits(count, [manager.find(sequence.hashes[:count]) for manager in self.managers])

    @property
    def no_hits(self) -> Hits:
        """The result of `match` for a sequence that begins without cached blocks."""
        return Hits(0, [[] for _ in self.managers])

    def to_finish(self, seats: Seats) -> list[int]:
        """How many blocks the running sequences may yet need for the rest of their prompts, and one more for each."""
        num_computed, num_tokens = seats.num_computed[seats.order], seats.num_tokens[seats.order]
        needed = (manager.needed(num_computed, num_tokens + 1) for manager in self.managers)
        return [int(counts.sum()) + len(seats.order) for counts in needed]

    def to_go_on(self, sequence: Sequence) -> list[int]:
        """How many blocks are kept back for a sequence that begins in this step, and for its children."""
        return [
            manager.needed_for(sequence.num_computed, sequence.num_to_compute) + 1 + len(sequence.children)
            for manager in self.managers
        ]

    def has_room(self, sequence: Sequence, hits: Hits, reserve: list[int]) -> bool:
        """Whether a waiting sequence's tokens fit beside what is kept back for others.

        Args:
          sequence: the sequence, which may have been swapped out.
          hits: the cached blocks with which it begins.
          reserve: the blocks that are kept back.
        """
        for manager, blocks, kept in zip(self.managers, hits.blocks, reserve, strict=True):
            restored = sequence.num_computed if sequence.host_blocks is not None else 0
            begun = restored or hits.num_blocks * self.block_size
            count = manager.held_for(restored) + manager.needed(begun, sequence.num_tokens)
            if count + kept > manager.num_available - manager.count_unused(blocks):
                return False
        return True

    def adopt(self, seat: int, hits: Hits) -> None:
        """Makes the sequence at an empty seat begin with cached blocks."""
        for manager, blocks in zip(self.managers, hits.blocks, strict=True):
            manager.begin(seat, hits.num_blocks * self.block_size, blocks)

    def restore(self, seat: int, num_tokens: int, host_blocks: list[list[int]]) -> list[Pairs]:
        """Gives the sequence at an empty seat blocks for what was swapped out, and frees the host's.

        Args:
          seat: the seat.
          num_tokens: tokens of the sequence when it was swapped out.
          host_blocks: the host blocks of each group.

        Returns:
          The (host block, device block) pairs.
        """
        pairs = []
        for manager, blocks in zip(self.managers, host_blocks, strict=True):
            num_skipped = (manager.blocks_for(num_tokens) - len(blocks)) * self.block_size
            manager.begin(seat, num_tokens, [])
            copies = manager.append({seat: num_tokens - num_skipped})
            assert copies == [], "a sequence was admitted without blocks"
            pairs.append(list(zip(blocks, manager.table(seat), strict=True)))
            manager.free_on_host(blocks)
        return pairs

    def fork(self, parent: int, child: int) -> None:
        """Makes the sequence at an empty seat share all blocks of another one."""
        for manager in self.managers:
            manager.fork(parent, child)

    def entries(self, seat: int, start: int, end: int, *, of: int | None = None) -> list[Entry]:
        """The parts of a seat's tables that hold its tokens from `start` to `end`.

        Args:
          seat: the seat that gets the parts.
          start, end: the tokens.
          of: the seat whose tables hold them, if that is another one.
        """
        parts = [manager.part(seat if of is None else of, start, end) for manager in self.managers]
        return [Entry(group, seat, column, blocks) for group, (column, blocks) in enumerate(parts) if blocks]

    def last_blocks(self, seats: np.ndarray) -> np.ndarray:
        """The block of the last token of each of these seats, in each group: i32 [num_groups, num_seats]."""
        return np.array([manager.last_blocks(seats) for manager in self.managers])

    def cache_full_blocks(self, seats: Seats) -> None:
        """Enters full blocks in the prefix cache, once the steps that fill them are planned and all tokens known."""
        if self._widest.prefix is None:
            return
        columns = []
        # In a decode step few sequences have a block that has become full.
        at = (seats.num_computed // self.block_size > seats.num_cached).nonzero()[0]
        numbers = zip(at.tolist(), seats.num_computed[at].tolist(), seats.num_cached[at].tolist(), strict=True)
        for sequence, (seat, num_computed, num_cached) in zip(seats.sequences[at], numbers, strict=True):
            num_full = min(num_computed, len(sequence.tokens)) // self.block_size
            if num_full <= num_cached:
                continue
            extend_hashes(sequence.hashes, sequence.tokens, self.block_size)
            columns += [(seat, i, sequence.hashes[i]) for i in range(num_cached, num_full)]
            seats.num_cached[seat] = num_full
        if columns:
            for manager in self.managers:
                manager.cache(columns)

    def release_behind(self, seats: Seats) -> None:
        """Releases the blocks that no later token of the sequences needs.

        No step that is planned from now on reads them, and the device runs the steps in the order of their plans.
        """
        behind = [(manager, found) for manager in self.managers if len(found := manager.find_behind())]
        if behind:
            self.cache_full_blocks(seats)
        for manager, found in behind:
            manager.release_behind(found)

    def empty_cache(self) -> None:
        """Removes all blocks from the prefix cache while no sequence holds any."""
        for manager in self.managers:
            manager.empty_cache()

    def release(self, seat: int) -> None:
        """Empties a seat; blocks that are in the prefix cache stay there."""
        for manager in self.managers:
            manager.release(seat)

    def swap_out(self, seat: int) -> list[Pairs] | None:
        """Takes a host block for each block of a seat; the caller then releases the seat.

        Returns:
          The (device block, host block) pairs in order, or None if there are too few host blocks.
        """
        if any(len(manager.table(seat)) > len(manager.free_host_blocks) for manager in self.managers):
            return None
        return [manager.swap_out(seat) for manager in self.managers]

    def free_on_host(self, host_blocks: list[list[int]]) -> None:
        """Makes host blocks free again."""
        for manager, blocks in zip(self.managers, host_blocks, strict=True):
            manager.free_on_host(blocks)

    def swapped_bytes(self, seat: int) -> int:
        """How many bytes swapping out the sequence at a seat would move."""
        sizes = zip(self.managers, self.block_bytes, strict=True)
        return sum(len(manager.table(seat)) * block_bytes for manager, block_bytes in sizes)

    def count_shared(self, seat: int) -> int:
        """Counts a seat's blocks that other sequences hold too, in the group whose layers see the most."""
        return self._widest.count_shared(seat)

    def counts(self) -> Counts:
        """How many blocks of all groups are free, kept by the prefix cache alone, and held by sequences."""
        return Counts(*map(sum, zip(*(manager.counts() for manager in self.managers), strict=True)))

    def waste(self) -> float:
        """The fraction of the slots in all held blocks that hold no token."""
        held = [manager.counts().held for manager in self.managers]
        empty = sum(manager.waste() * count for manager, count in zip(self.managers, held, strict=True))
        return empty / sum(held) if any(held) else 0.0
