"""Sharing: sequences and prefix caches gain references to blocks that somebody holds already."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from paged_jax.allocator.arguments import Values, integers
from paged_jax.allocator.state import AllocatorState, prepare, writable


def fork(state: AllocatorState, parent: Values, child: Values, *, donate: bool = False) -> AllocatorState:
    """Makes an empty sequence share all of another one's tokens and blocks.

    Args:
      state: the allocator's state.
      parent: i32 [], row of the sequence to share.
      child: i32 [], row of an empty sequence.
      donate: see `append_tokens`.

    Returns:
      The new state. If a row is out of range or the child is not empty, a traced call only sets `bad_share`.

    Raises:
      ValueError: a wrong shape; on the host also a row out of range or a child that is not empty.
      TypeError: the rows are not integers.

    Example:
      >>> from paged_jax import allocator
      >>> state, *_ = allocator.append_tokens(allocator.create(8, 4, 2, 4), [6, 0])
      >>> state = allocator.fork(state, parent=0, child=1)
      >>> state.seq_lens.tolist(), state.block_tables[1].tolist()
      ([6, 6], [7, 6, -1, -1])
    """
    xp, state = prepare(state, parent, child)
    source, target = integers(xp, "parent", parent, ()), integers(xp, "child", child, ())
    valid = _is_row(state, source) & _is_empty(xp, state, target)
    if xp is np and not valid:
        raise ValueError(f"fork needs two rows of {_rows(state)} and an empty child, got {source} and {target}")
    return _begin(xp, state, target, state.block_tables[source], state.seq_lens[source], valid, donate)


def share(
    state: AllocatorState, parent: Values, child: Values, num_blocks: Values, *, donate: bool = False
) -> AllocatorState:
    """Makes an empty sequence start with the first full blocks of another one.

    Args:
      state: the allocator's state.
      parent: i32 [], row of the sequence to share.
      child: i32 [], row of an empty sequence; it gets num_blocks * block_size tokens.
      num_blocks: i32 [], how many blocks, at most as many as the parent has filled.
      donate: see `append_tokens`.

    Returns:
      The new state. If a row is out of range, the child is not empty or the parent has fewer full blocks, a traced call
      only sets `bad_share`.

    Raises:
      ValueError: a wrong shape; on the host also a row out of range, a child that is not empty, or too many blocks.
      TypeError: the rows or the number of blocks are not integers.

    Example:
      >>> from paged_jax import allocator
      >>> state, *_ = allocator.append_tokens(allocator.create(8, 4, 2, 4), [11, 0])
      >>> state = allocator.share(state, parent=0, child=1, num_blocks=2)
      >>> state.seq_lens.tolist(), state.block_tables[1].tolist()
      ([11, 8], [7, 6, -1, -1])
    """
    xp, state = prepare(state, parent, child, num_blocks)
    source, target = integers(xp, "parent", parent, ()), integers(xp, "child", child, ())
    count = integers(xp, "num_blocks", num_blocks, ())
    valid = _is_row(state, source) & _is_empty(xp, state, target)
    if xp is np and not valid:
        raise ValueError(f"share needs two rows of {_rows(state)} and an empty child, got {source} and {target}")
    num_full = state.seq_lens[xp.where(valid, source, 0)] // state.block_size
    valid &= (count >= 0) & (count <= num_full)
    if xp is np and not valid:
        raise ValueError(f"num_blocks must be in [0, {num_full}], the full blocks of sequence {source}, got {count}")
    count = xp.where(valid, count, 0)
    columns = xp.arange(state.block_tables.shape[1], dtype=xp.int32)
    blocks = xp.where(columns < count, state.block_tables[xp.where(valid, source, 0)], -1)
    return _begin(xp, state, target, blocks, count * state.block_size, valid, donate)


def adopt(
    state: AllocatorState, child: Values, blocks: Values, *, num_skipped: Values = 0, donate: bool = False
) -> AllocatorState:
    """Makes an empty sequence start with full blocks given by their ids, which somebody else holds.

    A sequence can begin in this way with the blocks of one that is gone, if `retain` kept them. If it needs the last of
    its tokens only, as behind a sliding window, it can begin as if `release_before` had released the blocks before.

    Args:
      state: the allocator's state.
      child: i32 [], row of an empty sequence; it gets block_size tokens for each block, skipped ones included.
      blocks: i32 [n], ids of the child's first blocks in order, all different, each with a reference; n is at most
        max_blocks_per_seq. Negative ids are padding, which may only stand at the end.
      num_skipped: i32 [], how many columns of the child's table stay without a block before the first of `blocks`.
      donate: see `append_tokens`.

    Returns:
      The new state. If the child or the blocks are not as described, a traced call only sets `bad_share`.

    Raises:
      ValueError: a wrong shape; on the host also a child or blocks that are not as described.
      TypeError: the child or the ids are not integers.

    Example:
      >>> from paged_jax import allocator
      >>> state, *_ = allocator.append_tokens(allocator.create(8, 4, 2, 4), [8, 0])  # blocks 7 and 6
      >>> state = allocator.free(allocator.retain(state, [7]), [True, True])
      >>> state = allocator.adopt(state, child=1, blocks=[7])
      >>> state.seq_lens.tolist(), state.block_tables[1].tolist()
      ([0, 4], [7, -1, -1, -1])
    """
    xp, state = prepare(state, child, blocks, num_skipped)
    target, ids = integers(xp, "child", child, ()), integers(xp, "blocks", blocks, None)
    skipped = integers(xp, "num_skipped", num_skipped, ())
    num_blocks, max_blocks_per_seq = state.ref_counts.shape[0], state.block_tables.shape[1]
    if ids.shape[0] > max_blocks_per_seq:
        raise ValueError(f"blocks must have at most the {max_blocks_per_seq} of a table row, got {ids.shape[0]}")
    empty = _is_empty(xp, state, target)
    if xp is np and not empty:
        raise ValueError(f"adopt needs an empty row of {_rows(state)}, got {target}")
    named = ids >= 0
    in_order = (named[:-1] | ~named[1:]).all()
    held = _are_held(xp, state, ids)
    ordered = xp.sort(ids)
    repeats = ((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).any()
    valid = empty & in_order & (held | ~named).all() & ~repeats
    if xp is np and not valid:
        raise ValueError(
            f"blocks must be different, held, below {num_blocks}, and end at the first negative one, got {ids.tolist()}"
        )
    count = named.sum(dtype=xp.int32)
    fits = (skipped >= 0) & (skipped <= max_blocks_per_seq - count)
    if xp is np and not fits:
        raise ValueError(f"num_skipped must be in [0, {max_blocks_per_seq - count}], got {skipped}")
    valid &= fits
    skipped = xp.where(valid, skipped, 0)
    source = xp.arange(max_blocks_per_seq, dtype=xp.int32) - skipped
    padded = xp.concatenate([ids, xp.full(max_blocks_per_seq - ids.shape[0], -1, xp.int32)])
    row = xp.where((source >= 0) & (padded[source] >= 0), padded[source], -1)
    return _begin(xp, state, target, row, (skipped + count) * state.block_size, valid, donate)


def retain(state: AllocatorState, blocks: Values, *, donate: bool = False) -> AllocatorState:
    """Gives each named block a reference that belongs to no table, so that the block outlives its sequences.

    `free_blocks` drops such references. A sequence never writes to a block that has other references than its own.

    Args:
      state: the allocator's state.
      blocks: i32 [n], ids of blocks that somebody holds. Negative ids are skipped, and a block named k times gains k
        references.
      donate: see `append_tokens`.

    Returns:
      The new state. If any block is free or out of range, a traced call only sets `bad_share`.

    Raises:
      ValueError: a wrong shape; on the host also a block that is free or out of range.
      TypeError: the ids are not integers.

    Example:
      >>> from paged_jax import allocator
      >>> state, *_ = allocator.append_tokens(allocator.create(8, 4, 2, 4), [8, 0])  # blocks 7 and 6
      >>> state = allocator.free(allocator.retain(state, [7, 6]), [True, False])
      >>> int(state.num_free), int(allocator.free_blocks(state, [7, 6]).num_free)
      (6, 8)
    """
    xp, state = prepare(state, blocks)
    ids = integers(xp, "blocks", blocks, None)
    if xp is np:
        named, size = ids[ids >= 0], state.ref_counts.size
        bad = (named >= size) | (state.ref_counts.take(named, mode="clip") == 0)
        if bad.any():
            raise ValueError(f"block {named[bad.argmax()]} is free or not one of the pool's {size}")
        ref_counts = writable(state.ref_counts, donate)
        np.add.at(ref_counts, named, 1)
        return dataclasses.replace(state, ref_counts=ref_counts)
    valid = ((ids < 0) | _are_held(xp, state, ids)).all()
    ref_counts = _add_references(state, jnp.where(valid, ids, -1))
    return dataclasses.replace(state, ref_counts=ref_counts, bad_share=state.bad_share | ~valid)


def _begin(
    xp: Any, state: AllocatorState, child: Any, blocks: Any, seq_len: Any, valid: Any, donate: bool
) -> AllocatorState:
    """Gives an empty row its first blocks, i32 [max_blocks_per_seq] padded with -1, and its length."""
    if xp is np:
        arrays = (state.block_tables, state.seq_lens, state.ref_counts)
        block_tables, seq_lens, ref_counts = (writable(array, donate) for array in arrays)
        block_tables[child], seq_lens[child] = blocks, seq_len
        ref_counts[blocks[blocks >= 0]] += 1  # no block is named twice
        return dataclasses.replace(state, block_tables=block_tables, seq_lens=seq_lens, ref_counts=ref_counts)
    row = jnp.where(valid, child, state.seq_lens.shape[0])
    return dataclasses.replace(
        state,
        block_tables=state.block_tables.at[row].set(blocks, mode="drop"),
        seq_lens=state.seq_lens.at[row].set(seq_len, mode="drop"),
        ref_counts=_add_references(state, jnp.where(valid, blocks, -1)),
        bad_share=state.bad_share | ~valid,
    )


def _add_references(state: AllocatorState, blocks: Any) -> Any:
    """The reference counts with one more for each of `blocks` that is not negative."""
    return state.ref_counts.at[jnp.where(blocks >= 0, blocks, state.ref_counts.shape[0])].add(1, mode="drop")


def _are_held(xp: Any, state: AllocatorState, ids: Any) -> Any:
    """Whether each id is a block of the pool that has a reference."""
    in_pool = (ids >= 0) & (ids < state.ref_counts.shape[0])
    return in_pool & (state.ref_counts[xp.where(in_pool, ids, 0)] > 0)


def _is_row(state: AllocatorState, row: Any) -> Any:
    return (row >= 0) & (row < state.seq_lens.shape[0])


def _is_empty(xp: Any, state: AllocatorState, row: Any) -> Any:
    return _is_row(state, row) & (state.seq_lens[xp.where(_is_row(state, row), row, 0)] == 0)


def _rows(state: AllocatorState) -> str:
    return f"[0, {state.seq_lens.shape[0]})"
