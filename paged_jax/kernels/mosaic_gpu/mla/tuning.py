"""The choices of a call of multi-head latent attention."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The choices for a `Problem` on a `Device`.

    Attributes:
      queues: queues that share the tiles of the whole batch evenly.
      width: neighbouring row blocks of a sequence that share tiles, and programs of each queue. The first of these
        programs reads a tile from memory, and the others find it in the L2 cache.
      left: the columns of O that the warpgroup with the softmax sums up; the other warpgroup sums up the rest.
    """

    queues: int
    width: int
    left: int

    def __post_init__(self) -> None:
        if self.queues < 1 or self.width < 1 or self.left < 1:
            raise ValueError(f"no kernel has such a grid: {self}")

    @property
    def programs(self) -> int:
        """Programs of the grid."""
        return self.queues * self.width
