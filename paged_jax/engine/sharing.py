"""Finds running sequences that begin with the same blocks, so that a decode step reads these blocks once for all.

The prefix cache and forks put equal beginnings into the same blocks, so block tables alone show which rows share what.
The rows of a step form a tree that branches where their block tables begin to differ. The groups that save the most
reads are chosen; a row is in one group at most.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from paged_jax.engine.blocks import BlockManager
from paged_jax.engine.config import EngineConfig


class Group(NamedTuple):
    """Rows that share a prefix: their indices in the batch, and the length of the prefix in blocks."""

    rows: list[int]
    num_blocks: int

    @property
    def num_spared(self) -> int:
        """How many reads of blocks the group saves."""
        return (len(self.rows) - 1) * self.num_blocks


@dataclasses.dataclass
class Sharing:
    """Chooses the prefixes that decode steps read once.

    Args:
      config: the engine's config.
      blocks: holds the block tables, of layers that see everything.
    """

    config: EngineConfig
    blocks: BlockManager
    _seats: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    _groups: list[Group] = dataclasses.field(default_factory=list)
    _order: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))

    def forget(self) -> None:
        """Notes that a sequence has got a seat, which may change the groups."""
        self._seats = self._seats[:0]

    def find(self, seats: np.ndarray) -> tuple[list[Group], np.ndarray]:
        """Finds the groups of the step's rows that share a prefix worth reading once.

        The blocks that sequences share are full. They stay as they are while the sequences run, and so do the groups.

        Args:
          seats: i64 [num_rows], the seat of each row.

        Returns:
          At most `max_shared_prefixes` groups; none if they would save a step too few reads. And the order of the rows
          in which those of each group stand together, before all others, i64 [num_rows].
        """
        if not np.array_equal(seats, self._seats):
            state = self.blocks.state
            num_full = (state.seq_lens[seats] - 1) // self.blocks.block_size  # no block that the step writes
            groups = find_groups(state.block_tables[seats], num_full)
            groups = sorted(groups, key=lambda group: -group.num_spared)[: self.config.max_shared_prefixes]
            num_spared = sum(group.num_spared for group in groups) * self.blocks.block_size
            self._groups = groups if num_spared >= self.config.least_shared_tokens else []
            first = [row for group in self._groups for row in group.rows]
            self._order = np.array([*first, *np.setdiff1d(np.arange(len(seats)), first)], np.int64)
            self._seats = seats
        return self._groups, self._order


def find_groups(tables: np.ndarray, num_full: np.ndarray) -> list[Group]:
    """The groups of rows that save the most reads, without a limit on their number.

    Args:
      tables: i32 [num_rows, num_columns], block tables.
      num_full: i32 [num_rows], how many leading blocks of each row may be shared.

    Returns:
      Groups of two rows or more, whose rows agree in at least one block.
    """
    groups = _best(tables, num_full, list(range(len(tables))), 0)
    return [group for group in groups if group.num_spared]


def _best(tables: np.ndarray, num_full: np.ndarray, rows: list[int], column: int) -> list[Group]:
    """The best groups of rows that agree in the columns before `column`; each row is in one, perhaps alone."""
    limit = int(num_full[rows].min())
    if column < limit:
        part = tables[rows, column:limit]
        differs = (part != part[0]).any(axis=0)
        column += int(differs.argmax()) if differs.any() else limit - column
    if len(rows) == 1:
        return [Group(rows, column)]
    followers: dict[int, list[int]] = {}
    groups = []
    for row in rows:
        if column < num_full[row]:
            followers.setdefault(int(tables[row, column]), []).append(row)
        else:
            groups.append(Group([row], column))
    for some in followers.values():
        groups += _best(tables, num_full, some, column)
    # A group joins the group of all rows if its rows save more reads there than by themselves.
    joining = [group for group in groups if len(group.rows) * column > group.num_spared]
    if sum(len(group.rows) * column - group.num_spared for group in joining) <= column:
        return groups
    whole = Group(sorted(row for group in joining for row in group.rows), column)
    return [whole] + [group for group in groups if group not in joining]
