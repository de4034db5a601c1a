"""Growing: sequences take blocks from the stack, and copy a shared block before they write to it."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from paged_jax._static import flag
from paged_jax.allocator.arguments import Values, integers
from paged_jax.allocator.state import AllocatorState, prepare, writable


class OutOfBlocks(RuntimeError):
    """Raised on the host when a batch of sequences cannot grow; the state has not changed.

    Attributes:
      requested: new blocks that the call asked for.
      free: blocks that were free.

    Example:
      >>> from paged_jax import allocator
      >>> state = allocator.create(num_blocks=2, block_size=4, max_num_seqs=1, max_blocks_per_seq=4)
      >>> try:
      ...     allocator.append_tokens(state, [9])
      ... except allocator.OutOfBlocks as error:
      ...     error.requested, error.free
      (3, 2)
    """

    def __init__(self, requested: int, free: int, detail: str = ""):
        super().__init__(requested, free, detail)
        self.requested, self.free, self.detail = requested, free, detail

    def __str__(self) -> str:
        return f"{self.requested} blocks requested, {self.free} free{self.detail}"


def append_tokens(
    state: AllocatorState, num_tokens: Values, *, row_by_row: bool = False, donate: bool = False
) -> tuple[AllocatorState, Int32[Array | np.ndarray, "max_num_seqs 2"], Bool[Array | np.ndarray, "..."]]:
    """Grows each sequence by some tokens and gives it the blocks that they need; either all sequences grow or none.

    New blocks go to the sequences in order, and within a sequence to its logical blocks in order. If a growing
    sequence's last block is partly filled and has other references, the sequence takes a new block in its place; the
    caller must then copy the old block to the new one (`copy_blocks`) before it writes. If all references of such a
    block belong to sequences that grow in one call, then all of them copy but the last in sequence order, which keeps
    the block: by then it is the only holder.

    With `row_by_row`, each sequence by itself gets all of its tokens or none. A sequence whose table row has too few
    columns takes no blocks from the others. If too few blocks are left for a sequence, it does not grow, and later
    sequences grow only if they need no block, so that none overtakes a sequence that waits for blocks.

    Args:
      state: the allocator's state.
      num_tokens: i32 [max_num_seqs], tokens to add to each sequence; 0 leaves it unchanged.
      row_by_row: whether to grow each sequence that can grow, instead of all or none.
      donate: whether the call may change the arrays of a state on the host in place. The caller must then not use the
        old state any more, unless the call raises. Traced calls ignore it: `jax.jit` donates their arrays.

    Returns:
      The new state; `block_mapping` i32 [max_num_seqs, 2], whose row s is the (source, destination) of the copy for
      sequence s, or (-1, -1); and `ok`. Without `row_by_row`, `ok` is bool []: if blocks or table columns run out, or a
      count is negative, a traced call returns the unchanged state, a mapping of -1 and `ok` False. With `row_by_row`,
      `ok` is bool [max_num_seqs]: it is False for the sequences that did not get their tokens and are unchanged.

    Raises:
      OutOfBlocks: on the host and without `row_by_row`, if blocks or table columns run out.
      ValueError: a wrong shape; a concrete count that does not fit in int32; on the host also a negative count.
      TypeError: the counts are not integers, or `row_by_row` is no static bool.

    Example:
      >>> from paged_jax import allocator
      >>> state = allocator.create(num_blocks=3, block_size=4, max_num_seqs=3, max_blocks_per_seq=2)
      >>> state, _, ok = allocator.append_tokens(state, [6, 0, 3])
      >>> bool(ok), state.block_tables.tolist()
      (True, [[2, 1], [-1, -1], [0, -1]])
      >>> state, _, ok = allocator.append_tokens(state, [1, 1, 1], row_by_row=True)
      >>> ok.tolist(), state.seq_lens.tolist()
      ([True, False, True], [7, 0, 4])
    """
    row_by_row = flag("row_by_row", row_by_row)
    xp, state = prepare(state, num_tokens)
    counts = integers(xp, "num_tokens", num_tokens, state.seq_lens.shape)
    fits = (counts >= 0) & (counts <= _room(state))
    if xp is np and not fits.all() and (counts < 0).any():
        seq_id = int((counts < 0).argmax())
        raise ValueError(f"num_tokens must not be negative, got {counts[seq_id]} for sequence {seq_id}")
    # With row_by_row, sequences that do not fit ask for nothing. Otherwise one of them makes the whole call fail, so
    # that it does not matter that its part of the plan may overflow.
    growth = _plan_growth(xp, state, xp.where(fits, counts, 0) if row_by_row else counts)
    if row_by_row:
        requested = growth.starts + growth.need
        # A sequence may keep a shared block only if those before it copy the block: if they wait, it waits too.
        served = fits & ((requested <= state.num_free) | ((growth.need == 0) & ~growth.relies_on_copies))
        ok = served
    else:
        ok = fits.all() & (growth.starts[-1] + growth.need[-1] <= state.num_free)
        if xp is np and not ok:
            raise _out_of_blocks(state, counts, fits, growth)
        served = ok
    if xp is np:
        state, block_mapping = _grow_host(state, counts, served, growth, donate)
    else:
        state, block_mapping = _grow_traced(state, counts, served, growth)
    return state, block_mapping, xp.asarray(ok)


def count_new_blocks(state: AllocatorState, num_tokens: Values) -> Int32[Array | np.ndarray, ""]:
    """Counts the blocks that `append_tokens` would take from the stack, those that become copies included.

    Args:
      state: the allocator's state.
      num_tokens: i32 [max_num_seqs], as for `append_tokens`.

    Returns:
      i32 []. If a count is negative or a table row has too few columns, it is one more than the pool has blocks: with
      more blocks than are free, `append_tokens` fails.

    Raises:
      ValueError: a wrong shape, or a concrete count that does not fit in int32.
      TypeError: the counts are not integers.

    Example:
      >>> from paged_jax import allocator
      >>> state = allocator.create(num_blocks=8, block_size=4, max_num_seqs=2, max_blocks_per_seq=4)
      >>> int(allocator.count_new_blocks(state, [6, 3]))
      3
    """
    xp, state = prepare(state, num_tokens)
    counts = integers(xp, "num_tokens", num_tokens, state.seq_lens.shape)
    fits = (counts >= 0) & (counts <= _room(state))
    growth = _plan_growth(xp, state, xp.where(fits, counts, 0))
    count = xp.where(fits.all(), growth.need.sum(dtype=xp.int32), state.ref_counts.shape[0] + 1)
    return xp.asarray(count, xp.int32)


class _Growth(NamedTuple):
    """The needs of each sequence that grows, however many blocks are free; all arrays are [max_num_seqs]."""

    copies: Any  # bool, the last block is shared and must be copied
    relies_on_copies: Any  # bool, the last block is shared, but all its other holders copy it in this call
    last: Any  # i32, the last block so far (meaningful where `copies`)
    first_col: Any  # i32, table column of the first new block
    need: Any  # i32, how many new blocks; they fill columns first_col, first_col + 1, ...
    starts: Any  # i32, exclusive prefix sum of `need`: how many blocks earlier sequences take


def _room(state: AllocatorState) -> Any:
    """How many more tokens each table row has columns for, i32 [max_num_seqs]."""
    return min(state.block_tables.shape[1] * state.block_size, 2**31 - 1) - state.seq_lens


def _plan_growth(xp: Any, state: AllocatorState, num_tokens: Any) -> _Growth:
    block_size, seq_lens = state.block_size, state.seq_lens
    # (n - 1) // size + 1 rounds up without overflowing near 2**31.
    num_old = (seq_lens - 1) // block_size + 1
    num_new = (seq_lens + num_tokens - 1) // block_size + 1

    rows = xp.arange(seq_lens.shape[0], dtype=xp.int32)
    last = state.block_tables[rows, xp.maximum(num_old - 1, 0)]
    writes_last = (num_tokens > 0) & (seq_lens < num_old * block_size)
    holders = state.ref_counts[last] * writes_last.astype(xp.int32)
    shared = copies = holders > 1
    if xp is jnp or shared.any():
        # Each sequence that copies gives up a reference. In sequence order, the holder of the last one keeps the block.
        same = shared[:, None] & shared[None, :] & (last[:, None] == last[None, :])
        left_before = (same & (rows[None, :] < rows[:, None])).sum(axis=1, dtype=xp.int32)
        copies = shared & (left_before < holders - 1)

    first_col = num_old - copies.astype(xp.int32)
    need = num_new - first_col
    return _Growth(copies, shared & ~copies, last, first_col, need, need.cumsum(dtype=xp.int32) - need)


def _out_of_blocks(state: AllocatorState, num_tokens: np.ndarray, fits: np.ndarray, growth: _Growth) -> OutOfBlocks:
    # The blocks are counted again, in int64, since the plan of a sequence that does not fit may have overflowed.
    num_blocks = -(-(state.seq_lens.astype(np.int64) + num_tokens) // state.block_size)
    seq_id, columns = fits.argmin(), state.block_tables.shape[1]
    detail = f"; sequence {seq_id} would hold {num_blocks[seq_id]} blocks, its table row has {columns} columns"
    detail = "" if fits.all() else detail
    return OutOfBlocks(int((num_blocks - growth.first_col).sum()), int(state.num_free), detail)


def _grow_host(
    state: AllocatorState, num_tokens: np.ndarray, served: np.ndarray | np.bool_, growth: _Growth, donate: bool
) -> tuple[AllocatorState, np.ndarray]:
    """Gives the served sequences, or all, their blocks and tokens; returns the new state and the block mapping."""
    copies, need = growth.copies, growth.need
    if isinstance(served, np.ndarray):
        copies, need, num_tokens = copies & served, need * served, num_tokens * served
    taken_blocks, num_free = int(need.sum()), int(state.num_free)
    block_mapping = np.full((need.size, 2), -1, np.int32)
    block_tables, ref_counts = state.block_tables, state.ref_counts
    if taken_blocks:  # most decode steps of a few sequences take no block, and need not copy these two arrays
        taken = state.free_blocks[num_free - taken_blocks : num_free][::-1]
        rows = np.arange(need.size).repeat(need)
        cols = np.arange(taken_blocks) - (growth.starts - growth.first_col).repeat(need)
        block_tables, ref_counts = writable(block_tables, donate), writable(ref_counts, donate)
        block_tables[rows, cols] = taken
        ref_counts[taken] = 1
        if copies.any():
            block_mapping[copies, 0] = growth.last[copies]
            block_mapping[copies, 1] = taken[growth.starts[copies]]
            np.subtract.at(ref_counts, growth.last[copies], 1)
    state = dataclasses.replace(
        state,
        num_free=np.asarray(num_free - taken_blocks, np.int32),
        ref_counts=ref_counts,
        block_tables=block_tables,
        seq_lens=state.seq_lens + num_tokens,
    )
    return state, block_mapping


def _grow_traced(
    state: AllocatorState, num_tokens: Array, served: Array, growth: _Growth
) -> tuple[AllocatorState, Array]:
    """Does what `_grow_host` does, with static shapes."""
    num_blocks = state.ref_counts.shape[0]
    copies, need = growth.copies & served, jnp.where(served, growth.need, 0)
    offsets = jnp.arange(state.block_tables.shape[1], dtype=jnp.int32)[None, :] - growth.first_col[:, None]
    is_new = (offsets >= 0) & (offsets < need[:, None])
    top = state.num_free - 1
    taken = state.free_blocks[jnp.where(is_new, top - (growth.starts[:, None] + offsets), 0)]
    ref_counts = state.ref_counts.at[jnp.where(is_new, taken, num_blocks)].add(1, mode="drop")
    ref_counts = ref_counts.at[jnp.where(copies, growth.last, num_blocks)].add(-1, mode="drop")
    destination = state.free_blocks[jnp.where(copies, top - growth.starts, 0)]
    state = dataclasses.replace(
        state,
        num_free=state.num_free - need.sum(dtype=jnp.int32),
        ref_counts=ref_counts,
        block_tables=jnp.where(is_new, taken, state.block_tables),
        seq_lens=state.seq_lens + jnp.where(served, num_tokens, 0),
    )
    return state, jnp.where(copies[:, None], jnp.stack([growth.last, destination], axis=1), -1)
