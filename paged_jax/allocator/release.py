"""Releasing: sequences and prefix caches give up references, and blocks without references go back to the stack."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from paged_jax.allocator.arguments import Values, bools, integers
from paged_jax.allocator.state import AllocatorState, prepare, writable


def truncate(state: AllocatorState, seq_lens: Values, *, donate: bool = False) -> AllocatorState:
    """Shortens sequences and releases the blocks past their new lengths, for example after rejected speculative tokens.

    A sequence may end inside a block that it shares; it copies that block when it grows again.

    Args:
      state: the allocator's state.
      seq_lens: i32 [max_num_seqs], new lengths in tokens, each from 0 to the sequence's length so far.
      donate: see `append_tokens`.

    Returns:
      The new state. Blocks that nobody holds any more go on the stack by rising id, as in `free`. If a length is
      negative or longer than the sequence, or ends in a block that `release_before` has released, a traced call only
      sets `bad_free`.

    Raises:
      ValueError: a wrong shape; on the host also a length that a traced call would refuse.
      TypeError: the lengths are not integers.

    Example:
      >>> from paged_jax import allocator
      >>> state, *_ = allocator.append_tokens(allocator.create(8, 4, 2, 4), [6, 3])
      >>> state = allocator.truncate(state, [4, 3])
      >>> state.seq_lens.tolist(), state.block_tables[0].tolist(), int(state.num_free)
      ([4, 3], [7, -1, -1, -1], 6)
    """
    xp, state = prepare(state, seq_lens)
    lens = integers(xp, "seq_lens", seq_lens, state.seq_lens.shape)
    fits = (lens >= 0) & (lens <= state.seq_lens)
    last = state.block_tables[xp.arange(lens.shape[0]), xp.where(fits, lens - 1, 0) // state.block_size]
    is_held = (lens % state.block_size == 0) | (last >= 0)
    if xp is not np:
        return _shorten_traced(state, lens, (fits & is_held).all())
    if not fits.all():
        row = fits.argmin()
        raise ValueError(f"seq_lens must be in [0, {state.seq_lens[row]}] for sequence {row}, got {lens[row]}")
    if not is_held.all():
        row = is_held.argmin()
        raise ValueError(f"sequence {row} cannot end at {lens[row]} tokens: it has released the block of the last one")
    rows = (lens < state.seq_lens).nonzero()[0]
    return _shorten_host(state, rows, lens[rows], donate)


def release_before(state: AllocatorState, positions: Values, *, donate: bool = False) -> AllocatorState:
    """Releases those blocks of each sequence that hold only tokens before a position, which nobody will read again.

    This is for layers with a sliding window: before a query at position p they need no token before
    ``p + 1 - sliding_window``, whatever the operations find in those entries of the block tables.

    Args:
      state: the allocator's state.
      positions: i32 [max_num_seqs], each at most the sequence's length; 0 or less releases nothing.
      donate: see `append_tokens`.

    Returns:
      The new state, in which the sequences have the lengths that they had, and the released entries of their tables are
      -1. Blocks that nobody holds any more go on the stack by rising id, as in `free`. If a position is past its
      sequence's end, a traced call only sets `bad_free`.

    Raises:
      ValueError: a wrong shape; on the host also a position past its sequence's end.
      TypeError: the positions are not integers.

    Example:
      >>> from paged_jax import allocator
      >>> state, *_ = allocator.append_tokens(allocator.create(8, 4, 2, 4), [10, 3])
      >>> state = allocator.release_before(state, [7, 0])
      >>> state.seq_lens.tolist(), state.block_tables.tolist(), int(state.num_free)
      ([10, 3], [[-1, 6, 5, -1], [4, -1, -1, -1]], 5)
    """
    xp, state = prepare(state, positions)
    at = integers(xp, "positions", positions, state.seq_lens.shape)
    fits = at <= state.seq_lens
    num_columns = xp.maximum(at, 0) // state.block_size
    if xp is not np:
        columns = np.arange(state.block_tables.shape[1], dtype=np.int32)
        return _drop_traced(state, columns[None, :] < num_columns[:, None], fits.all())[0]
    if not fits.all():
        row = fits.argmin()
        raise ValueError(f"positions must be at most {state.seq_lens[row]} for sequence {row}, got {at[row]}")
    # What is released lies at a row's beginning: where the entry before the position's is -1, all before it are.
    rows = num_columns.nonzero()[0]
    rows = rows[state.block_tables[rows, num_columns[rows] - 1] >= 0]
    return _drop_host(state, *_last_held(state.block_tables, rows, num_columns[rows]), donate) if rows.size else state


def free(state: AllocatorState, seq_ids_mask: Values, *, donate: bool = False) -> AllocatorState:
    """Empties sequences; blocks that nobody holds any more become free.

    Args:
      state: the allocator's state.
      seq_ids_mask: bool [max_num_seqs], True for the sequences to empty. Sequences that are empty may be among them.
      donate: see `append_tokens`.

    Returns:
      The new state. Blocks go on the stack by rising id, so that the highest id is taken first again. If a table names
      a block that is free already (see `free_blocks`), a traced call only sets `bad_free`.

    Raises:
      ValueError: a wrong shape; on the host also a table that names a block that is free already.
      TypeError: the mask does not hold bools.

    Example:
      >>> from paged_jax import allocator
      >>> state, *_ = allocator.append_tokens(allocator.create(8, 4, 2, 4), [6, 3])
      >>> int(allocator.free(state, [True, False]).num_free)
      7
    """
    xp, state = prepare(state, seq_ids_mask)
    mask = bools(xp, "seq_ids_mask", seq_ids_mask, state.seq_lens.shape)
    if xp is not np:
        return _shorten_traced(state, jnp.where(mask, 0, state.seq_lens), jnp.asarray(True))
    rows = mask.nonzero()[0]
    return _shorten_host(state, rows, np.zeros(rows.size, np.int32), donate)


def free_blocks(state: AllocatorState, blocks: Values, *, donate: bool = False) -> AllocatorState:
    """Takes from each named block one of the references that `retain` added.

    The caller must not drop the references that stand for block table entries; `free` and `truncate` drop those.

    Args:
      state: the allocator's state.
      blocks: i32 [n], block ids. Negative ids are skipped, and a block named k times loses k references.
      donate: see `append_tokens`.

    Returns:
      The new state. If any block is out of range or has fewer references than it would lose, a traced call only sets
      `bad_free`.

    Raises:
      ValueError: a wrong shape; on the host also a block that is free already or out of range.
      TypeError: the ids are not integers.

    Example:
      >>> from paged_jax import allocator
      >>> state, *_ = allocator.append_tokens(allocator.create(8, 4, 2, 4), [8, 0])  # blocks 7 and 6
      >>> state = allocator.retain(state, [7])
      >>> state.ref_counts[7].item(), allocator.free_blocks(state, [7]).ref_counts[7].item()
      (2, 1)
    """
    xp, state = prepare(state, blocks)
    ids = integers(xp, "blocks", blocks, None)
    return _release_host(state, ids[ids >= 0], donate) if xp is np else _release_traced(state, ids)[0]


def _shorten_host(state: AllocatorState, rows: np.ndarray, seq_lens: np.ndarray, donate: bool) -> AllocatorState:
    """Shortens the rows `rows`, i32 [n], to the lengths `seq_lens`, i32 [n], none longer than before."""
    num_kept = -(-seq_lens // state.block_size)
    num_dropped = -(-state.seq_lens[rows] // state.block_size) - num_kept
    starts = num_dropped.cumsum() - num_dropped
    columns = np.arange(num_dropped.sum()) - (starts - num_kept).repeat(num_dropped)
    state = _drop_host(state, rows.repeat(num_dropped), columns, donate)
    all_lens = state.seq_lens.copy()
    all_lens[rows] = seq_lens
    return dataclasses.replace(state, seq_lens=all_lens)


def _shorten_traced(state: AllocatorState, seq_lens: Array, valid: Array) -> AllocatorState:
    """Shortens every row to `seq_lens`, i32 [max_num_seqs], none longer than before; sets `bad_free` if not `valid`."""
    state, valid = _drop_traced(state, _columns_past(state, seq_lens), valid)
    return dataclasses.replace(state, seq_lens=jnp.where(valid, seq_lens, state.seq_lens))


def _last_held(tables: np.ndarray, rows: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Names entries before the columns `ends`, [n], of `rows`; all entries there that are not -1 are among them.

    It looks at few others: in each row such entries stand next to one another, and the last of them is the last one.
    """
    width = 1
    while width < ends.max() and (tables[rows, np.maximum(ends - width, 0)] >= 0).any():
        width *= 2
    columns = ends[:, None] - np.arange(width, 0, -1)
    picked = (columns >= 0).nonzero()
    return rows[picked[0]], columns[picked]


def _drop_host(state: AllocatorState, rows: np.ndarray, columns: np.ndarray, donate: bool) -> AllocatorState:
    """Drops the references of the tables' entries at `rows` and `columns`, [n]; those that are -1 have none."""
    block_tables = writable(state.block_tables, donate)
    blocks = block_tables[rows, columns]
    state = _release_host(state, blocks[blocks >= 0], donate)
    block_tables[rows, columns] = -1
    return dataclasses.replace(state, block_tables=block_tables)


def _drop_traced(state: AllocatorState, dropped: Any, valid: Array) -> tuple[AllocatorState, Array]:
    """Drops the references of entries, bool [max_num_seqs, max_blocks_per_seq]; sets `bad_free` if not `valid`.

    Returns the new state, and whether the call was valid.
    """
    released, held = _release_traced(state, jnp.where(dropped & valid, state.block_tables, -1))
    valid &= held
    block_tables = jnp.where(dropped & valid, -1, state.block_tables)
    return dataclasses.replace(released, block_tables=block_tables, bad_free=state.bad_free | ~valid), valid


def _columns_past(state: AllocatorState, seq_lens: Any) -> Any:
    """Which table columns lie past the lengths `seq_lens`, [n]; bool [n, max_blocks_per_seq]."""
    columns = np.arange(state.block_tables.shape[1], dtype=np.int32)
    num_kept = (seq_lens - 1) // state.block_size + 1
    return columns[None, :] >= num_kept[:, None]


def _release_host(state: AllocatorState, blocks: np.ndarray, donate: bool) -> AllocatorState:
    """Drops one reference for each entry of `blocks`, i32 [n], none negative."""
    num_blocks = state.ref_counts.size
    blocks = np.sort(blocks)
    is_first = np.ones(blocks.size, np.bool_)
    np.not_equal(blocks[1:], blocks[:-1], out=is_first[1:])
    first = is_first.nonzero()[0]
    drops = (np.append(first[1:], blocks.size) - first).astype(np.int32)
    blocks = blocks[first]
    if blocks.size and blocks[-1] >= num_blocks:
        raise ValueError(f"block {blocks[-1]} is out of range, the pool has {num_blocks} blocks")
    left = state.ref_counts[blocks] - drops
    if (left < 0).any():
        bad = (left < 0).argmax()
        raise ValueError(f"block {blocks[bad]} has {left[bad] + drops[bad]} references, cannot drop {drops[bad]}")
    ref_counts = writable(state.ref_counts, donate)
    ref_counts[blocks] = left
    freed = blocks[left == 0]
    stack, num_free = writable(state.free_blocks, donate), int(state.num_free) + freed.size
    stack[num_free - freed.size : num_free] = freed
    num_free = np.asarray(num_free, np.int32)
    return dataclasses.replace(state, free_blocks=stack, num_free=num_free, ref_counts=ref_counts)


def _release_traced(state: AllocatorState, blocks: Array) -> tuple[AllocatorState, Array]:
    """Drops one reference for each entry of `blocks`, i32 of any shape; negative entries are skipped.

    Returns the new state, and whether the call was valid; if it was not, only `bad_free` is set.
    """
    num_blocks = state.ref_counts.shape[0]
    named = jnp.where(blocks >= 0, blocks, num_blocks)
    drops = jnp.zeros_like(state.ref_counts).at[named].add(1, mode="drop")
    valid = (blocks < num_blocks).all() & (drops <= state.ref_counts).all()
    drops = jnp.where(valid, drops, 0)
    ref_counts = state.ref_counts - drops
    freed = (drops > 0) & (ref_counts == 0)
    top = state.num_free + freed.cumsum(dtype=jnp.int32)
    stack = state.free_blocks.at[jnp.where(freed, top - 1, num_blocks)]
    state = dataclasses.replace(
        state,
        free_blocks=stack.set(jnp.arange(num_blocks, dtype=jnp.int32), mode="drop"),
        num_free=top[-1],
        ref_counts=ref_counts,
        bad_free=state.bad_free | ~valid,
    )
    return state, valid
