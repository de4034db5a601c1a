"""The choices of a decode call."""

import enum
from dataclasses import dataclass

from paged_jax.kernels.mosaic_gpu.hopper.limits import LARGEST_CLUSTER


class Merge(enum.StrEnum):
    """Where an item's partial results are merged."""

    NONE = "none"  # each item has one split
    CLUSTER = "cluster"  # in the cluster of programs that computed them
    KERNEL = "kernel"  # in a kernel of its own


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The choices for a `Problem` on a `Device`.

    Attributes:
      fold: neighbouring kv heads of one work item. If their tokens of a block are neighbours in memory, one larger copy
        brings the tokens of all of them.
      splits: the number of splits of each work item; in v2 they are its partitions; 0 if only queues cut items.
      queues: programs that share the tiles of the batch evenly; 0 if every program has one split. With queues, `splits`
        apply if the lengths turn out to be alike; the grid has programs for all of them.
      merge: where partial results are merged.
      programs: thread blocks that fit on a multiprocessor.
      tile: rows of a tile of K or V: tokens of each of the item's kv heads.
      stages: tiles in the ring of K; the ring of V has the same number.
    """

    fold: int = 1
    splits: int = 1
    queues: int = 0
    merge: Merge = Merge.NONE
    programs: int = 2
    tile: int = 64
    stages: int = 2

    def __post_init__(self) -> None:
        if self.fold not in (1, 2, 4) or self.tile not in (64, 128) or self.programs not in (1, 2) or self.stages < 1:
            raise ValueError(f"no kernel has such tiles: {self}")
        if self.splits < (0 if self.queues else 1) or (self.splits != 1 and not self.merges):
            raise ValueError(f"the splits of an item must be merged: {self}")
        if self.merges_in_cluster and not 1 < self.splits <= LARGEST_CLUSTER:
            raise ValueError(f"a cluster has 2 to {LARGEST_CLUSTER} programs: {self}")
        if self.queues and self.merge is not Merge.KERNEL:
            raise ValueError(f"only a kernel of its own merges queues' results: {self}")

    @property
    def merges(self) -> bool:
        """Whether there are partial results."""
        return self.merge is not Merge.NONE

    @property
    def merges_in_cluster(self) -> bool:
        """Whether the programs of an item are one cluster, and merge their own partial results."""
        return self.merge is Merge.CLUSTER
