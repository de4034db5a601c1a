"""Keeps track of who holds which block, with the allocator's host functions, the prefix cache and the host blocks.

There is a `BlockManager` for each group of layers (groups.py). `Pools` (pools.py) makes one of all of them.

A block is free, or held by sequences, or kept by the prefix cache alone. `counts` says how many blocks are in each of
these three states; the three numbers always add up to the pool.
"""

import collections.abc
from typing import Any, NamedTuple

import numpy as np

from paged_jax import allocator
from paged_jax.allocator import OutOfBlocks
from paged_jax.engine.prefix import PrefixCache

type Pairs = list[tuple[int, int]]
type Counted = collections.abc.Mapping[int, int] | np.ndarray


class Counts(NamedTuple):
    """How many blocks of the pool are free, kept by the prefix cache alone, and held by sequences."""

    free: int
    cached: int
    held: int


class BlockManager:
    """Gives blocks of one group of layers to the sequences at their seats and takes them back.

    Args:
      num_blocks: blocks of the pool.
      block_size: tokens in a block.
      num_seats: sequences that can hold blocks at the same time.
      max_blocks_per_seq: blocks of the longest sequence.
      num_host_blocks: blocks in host memory, for swapping.
      prefix_caching: whether full blocks are kept for later requests that begin alike.
      num_shards: how many devices the pool's blocks are split over.
      sliding_window: the group's window, behind which blocks are released; None for none.
      most_held: the most blocks that a sequence holds at the same time; None for all.
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
        *,
        sliding_window: int | None = None,
        most_held: int | None = None,
    ):
        self.num_blocks, self.block_size, self.num_seats = num_blocks, block_size, num_seats
        self.sliding_window, self.most_held = sliding_window, most_held
        # Only a whole pool lies evenly on the devices: its number of blocks is a multiple of the number of devices.
        num_shards = num_shards if num_blocks % num_shards == 0 else 1
        self.state = allocator.create(num_blocks, block_size, num_seats, max_blocks_per_seq, num_shards=num_shards)
        self.prefix = PrefixCache() if prefix_caching else None
        self.free_host_blocks = list(range(num_host_blocks))[::-1]

    @property
    def room(self) -> int | None:
        """The most tokens that a single sequence can have; None if their number does not matter."""
        if self.most_held is not None and self.num_blocks >= self.most_held:
            return None
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: Any) -> Any:
        """How many blocks `num_tokens` tokens need; the last one may be filled in part."""
        return -(-num_tokens // self.block_size)

    def first_column(self, num_tokens: int) -> int:
        """The column of the first block that the next token of a sequence of `num_tokens` tokens needs."""
        return int(self._first_columns(num_tokens))

    def _first_columns(self, num_tokens: Any) -> Any:
        """Does what `first_column` does, for one number of tokens or for an array of them."""
        window = self.sliding_window
        return num_tokens * 0 if window is None else np.maximum(num_tokens - window + 1, 0) // self.block_size

    def held_for(self, num_tokens: Any) -> Any:
        """How many blocks a sequence with `num_tokens` computed tokens holds."""
        return self.blocks_for(num_tokens) - self._first_columns(num_tokens)

    def needed(self, num_computed: Any, num_tokens: Any) -> Any:
        """How many blocks, beside those that it holds, a sequence may need until `num_tokens` tokens are computed.

        Both numbers of tokens, and the result, may be those of several sequences, in arrays.
        """
        return self._within(num_computed, self.blocks_for(num_tokens) - self.blocks_for(num_computed))

    def needed_for(self, num_computed: int, num_new: int) -> int:
        """How many blocks more a sequence may need for new tokens, wherever in its last block they begin."""
        return self._within(num_computed, self.blocks_for(num_new))

    def _within(self, num_computed: Any, num_blocks: Any) -> Any:
        if self.most_held is None:
            return num_blocks
        return np.minimum(num_blocks, self.most_held - self.held_for(num_computed))

    @property
    def num_available(self) -> int:
        """How many blocks are free or can be freed by evicting them from the prefix cache."""
        return int(self.state.num_free) + (self.prefix.num_unused if self.prefix is not None else 0)

    def can_append(self, tokens: Counted) -> bool:
        """Whether `append` would give the sequences at some seats their blocks."""
        counts, num_available = self._counts(tokens), self.num_available
        # A sequence needs no more blocks than its tokens fill, one for the rest, and one for a copy.
        most = int(counts.sum()) // self.block_size + 2 * int(np.count_nonzero(counts))
        return most <= num_available or int(allocator.count_new_blocks(self.state, counts)) <= num_available

    def _counts(self, tokens: Counted) -> np.ndarray:
        if isinstance(tokens, np.ndarray):
            return tokens
        counts = np.zeros(self.num_seats, np.int32)
        counts[list(tokens.keys())] = list(tokens.values())
        return counts

    def append(self, tokens: Counted) -> Pairs | None:
        """Grows the sequences at some seats, all of them or none; if need be, evicts blocks from the prefix cache.

        Args:
          tokens: how many new tokens each seat gets: of some seats, or of all in an array.

        Returns:
          The (source, destination) pairs of shared blocks, which must be copied before anything is written; None if
          there are too few blocks.
        """
        counts = self._counts(tokens)
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

    def count_found(self, names: collections.abc.Sequence[bytes]) -> int:
        """Counts how many of the named blocks a sequence could begin with, as far as this group is concerned.

        Args:
          names: the names of a sequence's first blocks.

        Returns:
          The largest n for which the cache has every block that the token after the first n blocks needs.
        """
        if self.prefix is None:
            return 0
        if self.sliding_window is None:
            return self.prefix.count_cached(names)
        count, column = len(names), len(names) - 1
        while column >= self.first_column(count * self.block_size):
            if names[column] not in self.prefix.block_of:
                count = column
            column -= 1
        return count

    def find(self, names: collections.abc.Sequence[bytes]) -> list[int]:
        """Returns the cached blocks that a sequence needs to continue after the blocks of these names."""
        assert self.prefix is not None
        first = self.first_column(len(names) * self.block_size)
        return [self.prefix.block_of[name] for name in names[first:]]

    def count_unused(self, blocks: list[int]) -> int:
        """How many of these cached blocks no sequence holds."""
        return self.prefix.count_unused(blocks) if self.prefix is not None else 0

    def begin(self, seat: int, num_tokens: int, blocks: list[int]) -> None:
        """Makes the sequence at an empty seat begin after full blocks; it holds those that it still needs.

        Args:
          seat: the seat.
          num_tokens: tokens in the sequence's full blocks.
          blocks: the blocks that it needs of them, from the prefix cache; none for blocks that `append` is to give.
        """
        skipped = self.first_column(num_tokens)
        if not blocks and not skipped:
            return
        self.state = allocator.adopt(self.state, seat, blocks, num_skipped=skipped, donate=True)
        if self.prefix is not None:
            self.prefix.use(blocks)

    def fork(self, parent: int, child: int) -> None:
        """Makes the sequence at an empty seat share all blocks of another one."""
        self.state = allocator.fork(self.state, parent, child, donate=True)

    def table(self, seat: int) -> list[int]:
        """The blocks of the sequence at a seat, in order."""
        row = self.state.block_tables[seat]
        return row[row >= 0].tolist()

    def part(self, seat: int, start: int, end: int) -> tuple[int, list[int]]:
        """The blocks that a seat holds of its tokens from `start` to `end`, and the column of the first of them."""
        column = start // self.block_size
        blocks = self.state.block_tables[seat, column : self.blocks_for(end)]
        num_released = int((blocks < 0).sum())  # they are the first ones
        return column + num_released, blocks[num_released:].tolist()

    def last_blocks(self, seats: np.ndarray) -> np.ndarray:
        """The block of the last token of each of these seats, i32 of the seats' shape."""
        columns = (self.state.seq_lens[seats] - 1) // self.block_size
        return self.state.block_tables[seats, columns]

    def cache(self, columns: collections.abc.Iterable[tuple[int, int, bytes]]) -> None:
        """Enters full blocks in the prefix cache.

        Args:
          columns: the seat, the column and the name of each block, at least one; released ones may be among them.
        """
        if self.prefix is None:
            return
        seats, places, names = zip(*columns, strict=True)
        blocks = self.state.block_tables[seats, places]
        is_new = [
            block >= 0 and self.prefix.insert(name, block) for name, block in zip(names, blocks.tolist(), strict=True)
        ]
        self.state = allocator.retain(self.state, blocks[is_new], donate=True)

    def find_behind(self) -> np.ndarray:
        """The seats with blocks that no later token needs, and the first column that one needs: i64 [n, 2]."""
        if self.sliding_window is None:
            return np.zeros((0, 2), np.int64)
        firsts = self._first_columns(self.state.seq_lens)
        seats = firsts.nonzero()[0]
        seats = seats[self.state.block_tables[seats, firsts[seats] - 1] >= 0]
        return np.stack([seats, firsts[seats]], axis=1)

    def release_behind(self, found: np.ndarray) -> None:
        """Releases the blocks before the columns that `find_behind` gave; those in the prefix cache stay there."""
        positions, released = np.zeros(self.num_seats, np.int32), []
        positions[found[:, 0]] = found[:, 1] * self.block_size
        for seat, column in found.tolist():
            row, first = self.state.block_tables[seat], column - 1
            while first and row[first - 1] >= 0:  # what is released before lies at the row's beginning
                first -= 1
            released += row[first:column].tolist()
        self.state = allocator.release_before(self.state, positions, donate=True)
        self._disuse(released)

    def truncate(self, lengths: collections.abc.Mapping[int, int]) -> None:
        """Shortens the sequences at some seats to these numbers of tokens; they give up the blocks behind."""
        lens, released = self.state.seq_lens.copy(), []
        for seat, length in lengths.items():
            lens[seat] = length
            row = self.state.block_tables[seat, self.blocks_for(length) :]
            released += row[row >= 0].tolist()
        self.state = allocator.truncate(self.state, lens, donate=True)
        self._disuse(released)

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
        self._disuse(blocks)

    def _disuse(self, blocks: list[int]) -> None:
        """Tells the prefix cache of blocks that a sequence has given up."""
        if self.prefix is not None:
            # Where a cached block has one reference left, that is the prefix cache's own: no sequence holds the block.
            self.prefix.disuse(block for block in reversed(blocks) if self.state.ref_counts[block] == 1)

    def swap_out(self, seat: int) -> Pairs:
        """Takes a host block for each block of a seat; there are enough, and the caller then releases the seat.

        Returns:
          The (device block, host block) pairs in order.
        """
        return [(block, self.free_host_blocks.pop()) for block in self.table(seat)]

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
