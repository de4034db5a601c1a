"""Keeps track of who holds which block, with the allocator's host functions, the prefix cache and the host blocks.

A block is free, or held by sequences, or kept by the prefix cache alone. `counts` says how many blocks are in each of
these three states; the three numbers always add up to the pool.
"""

import collections.abc
from typing import NamedTuple

import numpy as np

from paged_jax import allocator
from paged_jax.allocator import OutOfBlocks
from paged_jax.engine.prefix import PrefixCache, extend_hashes
from paged_jax.engine.request import Sequence

type Pairs = list[tuple[int, int]]


class Counts(NamedTuple):
    """How many blocks of the pool are free, kept by the prefix cache alone, and held by sequences."""

    free: int
    cached: int
    held: int


class BlockManager:
    """Gives blocks to the sequences at their seats and takes them back.

    Args:
      num_blocks: blocks of the pool.
      block_size: tokens in a block.
      num_seats: sequences that can hold blocks at the same time.
      max_blocks_per_seq: blocks of the longest sequence.
      num_host_blocks: blocks in host memory, for swapping.
      prefix_caching: whether full blocks are kept for later requests that begin alike.
      num_shards: how many devices the pool's blocks are split over.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_seats: int,
        max_blocks_per_seq: int,
        num_host_blocks: int,
        prefix_caching: bool,
        num_shards: int = 1,
    ):
        self.num_blocks, self.block_size, self.num_seats = num_blocks, block_size, num_seats
        # Without all blocks of the pool, the first ones may be on few devices, however they are taken.
        num_shards = num_shards if num_blocks % num_shards == 0 else 1
        self.state = allocator.create(num_blocks, block_size, num_seats, max_blocks_per_seq, num_shards=num_shards)
        self.prefix = PrefixCache() if prefix_caching else None
        self.free_host_blocks = list(range(num_host_blocks))[::-1]

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens need; the last one may be filled in part."""
        return -(-num_tokens // self.block_size)

    @property
    def num_available(self) -> int:
        """How many blocks are free or can be freed by evicting them from the prefix cache."""
        return int(self.state.num_free) + (self.prefix.num_unused if self.prefix is not None else 0)

    def append(self, tokens: collections.abc.Mapping[int, int]) -> Pairs | None:
        """Grows the sequences at some seats, all of them or none; if need be, evicts blocks from the prefix cache.

        Args:
          tokens: how many new tokens each seat gets.

        Returns:
          The (source, destination) pairs of shared blocks, which must be copied before anything is written; None if
          there are too few blocks.
        """
        counts = np.zeros(self.num_seats, np.int32)
        counts[list(tokens.keys())] = list(tokens.values())
        try:
            self.state, block_mapping, _ = allocator.append_tokens(self.state, counts, donate=True)
        except OutOfBlocks as error:
            missing = error.requested - error.free
            if self.prefix is None or self.prefix.num_unused < missing:
                return None
            self.state = allocator.free_blocks(self.state, self.prefix.evict(missing), donate=True)
            self.state, block_mapping, _ = allocator.append_tokens(self.state, counts, donate=True)
        copied = block_mapping[:, 0] >= 0
        return [(source, destination) for source, destination in block_mapping[copied].tolist()] if copied.any() else []

    def match(self, sequence: Sequence) -> list[int]:
        """The cached blocks with which a waiting sequence can begin; at least its last token stays to be computed."""
        if self.prefix is None:
            return []
        extend_hashes(sequence.hashes, sequence.tokens, self.block_size)
        return self.prefix.match(sequence.hashes[: (sequence.num_tokens - 1) // self.block_size])

    def count_unused(self, blocks: list[int]) -> int:
        """How many of these cached blocks no sequence holds."""
        return self.prefix.count_unused(blocks) if self.prefix is not None else 0

    def adopt(self, seat: int, blocks: list[int]) -> None:
        """Makes the sequence at an empty seat begin with cached blocks."""
        if blocks and self.prefix is not None:
            self.state = allocator.adopt(self.state, seat, blocks, donate=True)
            self.prefix.use(blocks)

    def fork(self, parent: int, child: int) -> None:
        """Makes the sequence at an empty seat share all blocks of another one."""
        self.state = allocator.fork(self.state, parent, child, donate=True)

    def table(self, seat: int) -> list[int]:
        """The blocks of the sequence at a seat, in order."""
        row = self.state.block_tables[seat]
        return row[row >= 0].tolist()

    def part(self, seat: int, start: int, end: int) -> tuple[int, list[int]]:
        """The blocks of a seat's tokens from `start` to `end`, and the table's column of the first of them."""
        column = start // self.block_size
        return column, self.state.block_tables[seat, column : self.blocks_for(end)].tolist()

    def last_blocks(self, seats: list[int]) -> list[int]:
        """The block of the last token of each of these seats."""
        columns = (self.state.seq_lens[seats] - 1) // self.block_size
        return self.state.block_tables[seats, columns].tolist()

    def cache_full_blocks(self, sequences: collections.abc.Iterable[Sequence]) -> None:
        """Enters full blocks in the prefix cache, once the steps that fill them are planned and all tokens known."""
        if self.prefix is None:
            return
        inserted = []
        for sequence in sequences:
            if sequence.num_computed // self.block_size <= sequence.num_cached:
                continue  # as in most decode steps
            num_full = min(sequence.num_computed, len(sequence.tokens)) // self.block_size
            extend_hashes(sequence.hashes, sequence.tokens, self.block_size)
            row = self.state.block_tables[sequence.seat]
            for column in range(sequence.num_cached, num_full):
                if self.prefix.insert(sequence.hashes[column], int(row[column])):
                    inserted.append(int(row[column]))
            sequence.num_cached = max(num_full, sequence.num_cached)
        if inserted:
            self.state = allocator.retain(self.state, inserted, donate=True)

    def empty_cache(self) -> None:
        """Removes all blocks from the prefix cache while no sequence holds any."""
        if self.prefix is not None:
            self.state = allocator.free_blocks(self.state, self.prefix.evict(self.num_blocks), donate=True)
            assert not len(self.prefix), "a sequence holds a block of the prefix cache"

    def release(self, seat: int) -> None:
        """Empties a seat; blocks that are in the prefix cache stay there."""
        blocks = self.table(seat)
        mask = np.zeros(self.num_seats, np.bool_)
        mask[seat] = True
        self.state = allocator.free(self.state, mask, donate=True)
        if self.prefix is not None:
            # Where a cached block has one reference left, that is the prefix cache's own: no sequence holds the block.
            self.prefix.disuse(block for block in reversed(blocks) if self.state.ref_counts[block] == 1)

    def swap_out(self, seat: int) -> Pairs | None:
        """Takes a host block for each block of a seat; the caller then releases the seat.

        Returns:
          The (device block, host block) pairs in order, or None if there are too few host blocks.
        """
        blocks = self.table(seat)
        if len(blocks) > len(self.free_host_blocks):
            return None
        return [(block, self.free_host_blocks.pop()) for block in blocks]

    def free_on_host(self, blocks: list[int]) -> None:
        """Makes host blocks free again."""
        self.free_host_blocks.extend(reversed(blocks))

    def count_shared(self, seat: int) -> int:
        """How many blocks of a seat are held by other sequences too."""
        cached = self.prefix if self.prefix is not None else ()
        return sum(int(self.state.ref_counts[block]) - (block in cached) > 1 for block in self.table(seat))

    def counts(self) -> Counts:
        """How many blocks are free, kept by the prefix cache alone, and held by sequences."""
        free, cached = int(self.state.num_free), self.prefix.num_unused if self.prefix is not None else 0
        held = np.unique(self.state.block_tables)
        return Counts(free, cached, int((held >= 0).sum()))

    def waste(self) -> float:
        """The fraction of the slots in all held blocks that hold no token."""
        lens, tables = self.state.seq_lens, self.state.block_tables
        num_slots = self.counts().held * self.block_size
        is_partial = lens % self.block_size > 0
        last = tables[is_partial, lens[is_partial] // self.block_size]
        _, rows = np.unique(last, return_index=True)  # forked sequences may share their last block: count it once
        empty = (-lens[is_partial][rows]) % self.block_size
        return int(empty.sum()) / num_slots if num_slots else 0.0
