"""What is chosen for a call of ragged attention: its kernels, and how many programs any lengths may need.

How queries and tokens are tiled is chosen where decode's tiles are: `tuning.py`.
"""

from dataclasses import dataclass, replace

from paged_jax.kernels.problem import Device, Problem
from paged_jax.kernels.triton import tuning
from paged_jax.kernels.triton.tuning import AttentionKernel, Tuning, cdiv, power_of_two

PIECE_FIELDS = 8  # int32 that describe a piece: `device/pieces.py`, which uses seven


@dataclass(frozen=True, kw_only=True)
class RaggedReduceKernel:
    """What the reduce of a ragged batch's splits is compiled for.

    Attributes:
      attention: what the splits were computed by.
      rows: of a tile of queries that one program joins.
      splits: that are read at once.
      parts: programs that share a row's output.
      num_warps, num_stages: for Triton.
    """

    attention: AttentionKernel
    rows: int
    splits: int
    parts: int = 1
    num_warps: int = 1
    num_stages: int = 1

    @property
    def groups(self) -> int:
        """Programs that share a tile's rows."""
        return self.attention.tuning.rows // self.rows


@dataclass(frozen=True)
class Grid:
    """How many programs a ragged batch may need, whatever its lengths: `device/pieces.py` finds out how many it does.

    Attributes:
      tiles: of queries, the padding rows' included.
      at_once: pieces that run at once, for each tile of heads; 0 where no context is split.
    """

    tiles: int
    at_once: int

    @property
    def pieces(self) -> int:
        """Tiles of queries, and the splits beyond the first: together these are less than what runs at once."""
        return self.tiles + self.at_once

    @property
    def split_tiles(self) -> int:
        """Tiles of queries with several splits."""
        return min(self.tiles, self.at_once)

    @property
    def places(self) -> int:
        """Splits of tiles that have several: no more of them are first ones than are not."""
        return 2 * self.at_once


def tune(problem: Problem, gpu: Device, *, prefix: bool) -> tuple[AttentionKernel, Grid]:
    """For ragged attention: what the kernel is compiled for, and its grid."""
    # The average: batches of decodes get small tiles, prompts large ones. At least 2: 1 is decode's tuning.
    queries_per_seq = max(2, cdiv(problem.num_tokens, max(problem.num_seqs, 1)))
    tuned = tuning.attention(problem, gpu, queries_per_seq=queries_per_seq, prefix=prefix)
    head_tiles = problem.num_kv_heads * AttentionKernel(problem.attention, tuned).head_tiles
    at_once = gpu.num_multiprocessors * _programs_at_once(tuned) // head_tiles
    # Full tiles of queries that fill the GPU leave nothing to split for: LOG, "Triton, ragged: contexts split".
    filled = problem.num_tokens // tuned.queries >= at_once
    scan = 32 if problem.num_seqs < 32 else 128
    if filled or at_once < 2 or cdiv(problem.max_seq_len, tuned.tile) < 2 * tuned.least_split:
        tiles = problem.num_tokens // tuned.queries + problem.num_seqs + 1  # the last ones are for the padding rows
        return AttentionKernel(problem.attention, tuned, prefix), Grid(tiles, 0)
    # Each sequence, and the padding rows, may leave a tile all but empty.
    tiles = (problem.num_tokens + (problem.num_seqs + 1) * (tuned.queries - 1)) // tuned.queries
    kernel = AttentionKernel(problem.attention, replace(tuned, final=False, scan=scan), prefix)
    return kernel, Grid(min(problem.num_tokens, tiles), at_once)


def _programs_at_once(tuned: Tuning) -> int:
    """Programs of a multiprocessor, as their registers let them be (benchmarks/LOG.md)."""
    return max(1, (4 if tuned.rows <= 16 else 2) * 4 // tuned.num_warps)


def reduce(kernel: AttentionKernel, grid: Grid, gpu: Device) -> RaggedReduceKernel:
    """The reduce that follows: a warp for each row, for a few of them where rows are many, for a part where few.

    A warp has up to 32 elements a thread in flight: all splits of a row that the average tile may have.
    """
    tuned = kernel.tuning
    all_rows = grid.split_tiles * kernel.problem.num_kv_heads * kernel.head_tiles * tuned.rows
    rows = min(8, power_of_two(cdiv(all_rows, 16 * gpu.num_multiprocessors)))
    parts = min(tuned.width // 16, power_of_two(8 * gpu.num_multiprocessors // all_rows))
    splits = min(power_of_two(cdiv(2 * grid.at_once, grid.split_tiles)), 1024 * parts // (rows * tuned.width))
    return RaggedReduceKernel(attention=kernel, rows=rows, splits=max(1, splits), parts=parts)
