"""The prefix cache remembers which full block holds which tokens, so that equal beginnings are computed once.

A block's name is a hash of the name of the block before it and of its own tokens. Blocks of equal names therefore hold
equal tokens after equal beginnings, and their keys and values are equal too. The cache holds one reference to each of
its blocks (`allocator.retain`), so that a block outlives its sequence. Blocks that no sequence holds can be evicted:
the least recently used go first and, among the blocks of one sequence, the last one, because a lookup starts at the
first block and finds nothing behind a gap.

Nothing here depends on time, on object ids or on Python's own hashes, so that every process decides alike.
"""

import collections
import collections.abc
import hashlib
import struct


def extend_hashes(hashes: list[bytes], tokens: list[int], block_size: int) -> None:
    """Appends the names of those full blocks of a sequence that have none yet.

    Args:
      hashes: names of the sequence's first blocks; the function appends to this list.
      tokens: the sequence's tokens.
      block_size: tokens in a block.
    """
    for block in range(len(hashes), len(tokens) // block_size):
        content = struct.pack(f"={block_size}i", *tokens[block * block_size : (block + 1) * block_size])
        parent = hashes[-1] if hashes else b""
        hashes.append(hashlib.blake2b(parent + content, digest_size=16).digest())


class PrefixCache:
    """The cached blocks by their names; the module's docstring says what a name is and who holds references.

    Attributes:
      block_of: the cached block of each name.
    """

    def __init__(self):
        self.block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._unused: collections.OrderedDict[int, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self.block_of)

    @property
    def num_unused(self) -> int:
        """How many cached blocks no sequence holds."""
        return len(self._unused)

    def __contains__(self, block: int) -> bool:
        return block in self._name_of

    def count_cached(self, names: collections.abc.Sequence[bytes]) -> int:
        """Counts the leading names that are cached."""
        return next((i for i, name in enumerate(names) if name not in self.block_of), len(names))

    def count_unused(self, blocks: collections.abc.Iterable[int]) -> int:
        """How many of these blocks no sequence holds."""
        return sum(block in self._unused for block in blocks)

    def insert(self, name: bytes, block: int) -> bool:
        """Enters a block that a sequence holds, and returns True; returns False if another block has this name."""
        if name in self.block_of:
            return False
        self.block_of[name], self._name_of[block] = block, name
        return True

    def use(self, blocks: collections.abc.Iterable[int]) -> None:
        """Notes that a sequence holds these blocks now."""
        for block in blocks:
            self._unused.pop(block, None)

    def disuse(self, blocks: collections.abc.Iterable[int]) -> None:
        """Notes that no sequence holds these blocks: from then on they can be evicted, in this order."""
        for block in blocks:
            if block in self._name_of:
                self._unused[block] = None

    def evict(self, num_blocks: int) -> list[int]:
        """Removes up to `num_blocks` blocks that no sequence holds, and returns them."""
        evicted = []
        while self._unused and len(evicted) < num_blocks:
            block, _ = self._unused.popitem(last=False)
            del self.block_of[self._name_of.pop(block)]
            evicted.append(block)
        return evicted
