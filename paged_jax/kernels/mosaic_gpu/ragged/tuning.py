"""The choices of a ragged attention call."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The choices for a `Problem` on a `Device`.

    Attributes:
      num_programs: thread blocks, one on each multiprocessor. Each takes work items until none is left.
      tile: tokens of K or V in a tile of wide items.
      thin_tile: tokens of K or V in a tile of thin items; it divides `tile`.
      stages: tiles of wide items in the ring of K; the ring of V has the same number.
      raw_tiles: raw tiles of 8 bits, of K and V together, in shared memory.
      queries: the number of items whose queries fit into shared memory at a time.
      computing_warpgroups: warpgroups that compute, two or three; each has up to 64 rows of a wide item.
      least_split: the least target cost of a wide split. 64 tokens of K and V cost 1 for each band of an
          item's rows.
      least_thin_split: the least target cost of a thin split, if it is less than `least_split`.
      counts_in_kernel: whether each program counts the batch's work in the kernel; otherwise XLA counts it before.
      merge_programs: thread blocks of the kernel that merges the rows of each query, if they are several.
    """

    num_programs: int
    tile: int = 128
    thin_tile: int = 128
    stages: int = 2
    raw_tiles: int = 2
    queries: int = 2
    computing_warpgroups: int = 2
    least_split: int = 16
    least_thin_split: int = 4
    counts_in_kernel: bool = True
    merge_programs: int = 528

    def __post_init__(self) -> None:
        if self.tile not in (64, 128) or self.tile % self.thin_tile or self.thin_tile < 64:
            raise ValueError(f"no kernel has such tiles: {self}")
        if self.stages < 2 or self.stages % 2:
            raise ValueError(f"both warpgroups of a thin item must have stages of their own: {self}")
        if self.computing_warpgroups not in (2, 3):
            raise ValueError(f"no kernel has so many warpgroups: {self}")
        if self.queries not in (1, 2):
            raise ValueError(f"the kernel loads one query ahead, or none: {self}")
