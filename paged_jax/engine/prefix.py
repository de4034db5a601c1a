"""The prefix cache: which full block holds which tokens, so that requests that begin alike compute that once.

A block's name is a hash of its tokens chained with the name of the block before it: equal names mean equal tokens from
the very beginning, which is what its keys and values depend on. The cache holds one reference to each of its blocks
(`allocator.retain`), so that blocks outlive their sequences. Blocks that nobody else holds can be evicted, the least
recently used first; a sequence's last block before its first, since no chain is found without its beginning.

Nothing here depends on time, on object ids or on Python's own hashes: every process decides alike.
"""

import collections
import collections.abc
import hashlib

import numpy as np


def extend_hashes(hashes: list[bytes], tokens: list[int], block_size: int) -> None:
    """Appends the names of blocks that have become full.

    Args:
      hashes: names of the blocks so far; changed.
      tokens: the sequence's tokens.
      block_size: tokens in a block.
    """
    for block in range(len(hashes), len(tokens) // block_size):
        content = np.asarray(tokens[block * block_size : (block + 1) * block_size], np.int32).tobytes()
        parent = hashes[-1] if hashes else b""
        hashes.append(hashlib.blake2b(parent + content, digest_size=16).digest())


class PrefixCache:
    """Blocks by the name of what they hold; see the module's words for who holds references."""

    def __init__(self):
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._unused: collections.OrderedDict[int, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def num_unused(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._unused)

    def __contains__(self, block: int) -> bool:
        return block in self._name_of

    def match(self, names: collections.abc.Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning of a chain of names."""
        blocks = []
        for name in names:
            if (block := self._block_of.get(name)) is None:
                break
            blocks.append(block)
        return blocks

    def count_unused(self, blocks: collections.abc.Iterable[int]) -> int:
        """How many of these blocks no sequence holds."""
        return sum(block in self._unused for block in blocks)

    def insert(self, name: bytes, block: int) -> bool:
        """Takes a block that a sequence holds; False if another block has this name already."""
        if name in self._block_of:
            return False
        self._block_of[name], self._name_of[block] = block, name
        return True

    def use(self, blocks: collections.abc.Iterable[int]) -> None:
        """Notes that a sequence holds these blocks now."""
        for block in blocks:
            self._unused.pop(block, None)

    def disuse(self, blocks: collections.abc.Iterable[int]) -> None:
        """Notes that no sequence holds these blocks any more, in the order in which to evict them."""
        for block in blocks:
            if block in self._name_of:
                self._unused[block] = None

    def evict(self, num_blocks: int) -> list[int]:
        """Forgets up to this many of the blocks that no sequence holds, and tells which."""
        evicted = []
        while self._unused and len(evicted) < num_blocks:
            block, _ = self._unused.popitem(last=False)
            del self._block_of[self._name_of.pop(block)]
            evicted.append(block)
        return evicted
