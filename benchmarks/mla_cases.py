"""The timed cases of multi-head latent attention, and their block tables. This file needs neither JAX nor PyTorch."""

from dataclasses import dataclass

import numpy as np

LATENT_SIZE, VALUE_SIZE, SCALE = 576, 512, 192**-0.5  # as in DeepSeek V3
BLOCK_SIZE = 64  # the only block size that FlashMLA takes
POOL_BYTES = 12 * 10**8  # all calls in a row have blocks of their own, and find nothing in L2


@dataclass(frozen=True)
class Case:
    """A batch.

    Attributes:
      name: the case's name.
      num_heads: query heads: 128, or fewer if the model is divided over GPUs.
      lengths: tokens of each sequence, including the new ones.
      num_queries: queries of each sequence.
    """

    name: str
    num_heads: int
    lengths: tuple[int, ...]
    num_queries: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of latents."""
        return 2 * LATENT_SIZE * sum(self.lengths)

    @property
    def operations(self) -> int:
        """Operations of both products, for each pair of a query and a token that it sees."""
        unseen = self.num_queries * (self.num_queries - 1) // 2
        pairs = sum(self.num_queries * length - unseen for length in self.lengths)
        return 2 * self.num_heads * (LATENT_SIZE + VALUE_SIZE) * pairs

    @property
    def blocks_per_seq(self) -> int:
        """Columns of the block tables."""
        return -(-max(self.lengths) // BLOCK_SIZE)

    @property
    def num_tables(self) -> int:
        """The number of block tables, which calls take in turn. No two tables share a block."""
        return max(1, min(16, -(-POOL_BYTES // self.bytes)))

    def tables(self) -> tuple[np.ndarray, int]:
        """Block tables i32 [num_tables, num_seqs, blocks_per_seq] of shuffled blocks, and the number of blocks."""
        needed = [-(-length // BLOCK_SIZE) for length in self.lengths]
        num_blocks = self.num_tables * sum(needed)
        free = iter(np.random.default_rng(0).permutation(num_blocks))
        tables = np.zeros((self.num_tables, len(self.lengths), self.blocks_per_seq), np.int32)
        for table in tables:
            for row, count in zip(table, needed, strict=True):
                row[:count] = [next(free) for _ in range(count)]
        return tables, num_blocks


def _case(num_seqs: int, length: int, num_heads: int, num_queries: int = 1) -> Case:
    queries = "" if num_queries == 1 else f"-{num_queries}-queries"
    return Case(f"{num_seqs}x{length}-{num_heads}-heads{queries}", num_heads, (length,) * num_seqs, num_queries)


def _skewed(num_heads: int) -> Case:
    lengths = np.random.default_rng(1).integers(1024, 16385, 64)
    return Case(f"64xskewed-{num_heads}-heads", num_heads, tuple(int(x) for x in lengths))


CASES = (
    *(_case(128, 4096, heads) for heads in (128, 64, 16, 8)),
    _case(128, 4096, 128, 2),
    _case(128, 4096, 16, 4),
    _case(128, 4096, 16, 16),
    _case(64, 8192, 16),
    _case(8, 16384, 128),
    _case(8, 16384, 16),
    _case(1, 32768, 128),
    _case(1, 32768, 16),
    _case(128, 1024, 16),
    _skewed(128),
    _skewed(16),
)
BY_NAME = {case.name: case for case in CASES}
