"""A functional block allocator: which blocks of the paged KV cache belong to which sequence.

The state is an immutable pytree and every function returns a new one. The same functions run on NumPy arrays on the
host and on JAX arrays or tracers inside `jit`, `scan`, `while_loop` and `vmap`: the type of the state's leaves picks
the form, and both give bit-equal states. What is decided (who grows, who copies, which ids come next) is written once
over `xp`; only the updates of the arrays exist twice: the host touches just the blocks concerned and raises errors, a
traced program needs static shapes and reports `ok` and `bad_free`.

Free blocks are a stack. A block's reference count is the number of block table entries that name it; a block that
several sequences share is copied before one of them writes to it (copy-on-write).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int32


class OutOfBlocks(RuntimeError):
    """Raised on the host when a batch of sequences cannot grow; nothing has changed.

    Attributes:
      requested: new blocks that the call asked for.
      free: blocks that were free.
    """

    def __init__(self, requested: int, free: int, detail: str = ""):
        super().__init__(requested, free, detail)
        self.requested, self.free, self.detail = requested, free, detail

    def __str__(self) -> str:
        return f"{self.requested} blocks requested, {self.free} free{self.detail}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AllocatorState:
    """Free blocks, reference counts and block tables of one pool; make it with `create`.

    Attributes:
      free_blocks: i32 [num_blocks], a stack: the first `num_free` entries are the free ids, the last of them is taken
        next. Entries past `num_free` are stale.
      num_free: i32 [], how many blocks are free.
      ref_counts: i32 [num_blocks], how many block table entries name each block.
      block_tables: i32 [max_num_seqs, max_blocks_per_seq], block of each logical block of a sequence, -1 for none.
      seq_lens: i32 [max_num_seqs], tokens mapped so far.
      bad_free: bool [], set and kept inside jit once a free was invalid, and had no effect; the host raises instead.
      block_size: tokens in a block (static).
    """

    # Any: a transformation may put other leaves than arrays here (specs, shapes, axes).
    free_blocks: Any
    num_free: Any
    ref_counts: Any
    block_tables: Any
    seq_lens: Any
    bad_free: Any
    block_size: int = dataclasses.field(metadata={"static": True})


def create(
    num_blocks: int, block_size: int, max_num_seqs: int, max_blocks_per_seq: int, *, xp: Any = np
) -> AllocatorState:
    """Makes a state in which every block is free and every sequence empty.

    Args:
      num_blocks: blocks in the pool.
      block_size: tokens in a block.
      max_num_seqs: rows of the block tables.
      max_blocks_per_seq: columns of the block tables.
      xp: `numpy` for a state on the host, `jax.numpy` for one on the device.

    Returns:
      The state. Its highest block id is taken first.

    Raises:
      ValueError: a size below 1, or more slots than int32 can count.
    """
    sizes = (num_blocks, block_size, max_num_seqs, max_blocks_per_seq)
    if min(sizes) < 1:
        raise ValueError(f"num_blocks, block_size, max_num_seqs, max_blocks_per_seq must be positive, got {sizes}")
    if num_blocks * block_size > 2**31:
        raise ValueError(
            f"num_blocks * block_size must be at most 2**31 (int32 slots), got {num_blocks} * {block_size}"
        )
    return AllocatorState(
        free_blocks=xp.arange(num_blocks, dtype=xp.int32),
        num_free=xp.asarray(num_blocks, dtype=xp.int32),
        ref_counts=xp.zeros(num_blocks, dtype=xp.int32),
        block_tables=xp.full((max_num_seqs, max_blocks_per_seq), -1, dtype=xp.int32),
        seq_lens=xp.zeros(max_num_seqs, dtype=xp.int32),
        bad_free=xp.asarray(False),
        block_size=block_size,
    )


def append_tokens(
    state: AllocatorState, num_tokens: ArrayLike | Sequence[int]
) -> tuple[AllocatorState, Int32[Array | np.ndarray, "max_num_seqs 2"], Bool[Array | np.ndarray, ""]]:
    """Grows each sequence by some tokens, taking the blocks that they need; all of them or none.

    New blocks go to the sequences in order, and within a sequence to its logical blocks in order. A growing sequence
    whose partly filled last block is shared takes a new block for it and gives up its reference; the caller then
    copies the old block to the new one (`copy_blocks`) before it writes. If every holder of such a block grows in one
    call, all but the last of them in sequence order copy and the last keeps the block: it is the only holder by then.

    Args:
      state: the allocator's state.
      num_tokens: i32 [max_num_seqs], tokens to add to each sequence; 0 leaves it untouched.

    Returns:
      The new state; `block_mapping` i32 [max_num_seqs, 2], row s the (source, destination) of sequence s's copy or
      (-1, -1); and `ok`, bool []. Where blocks or table columns run out, or a count is negative, a traced call gives
      the unchanged state, a mapping of -1 and `ok` False.

    Raises:
      OutOfBlocks: on the host, blocks or table columns run out.
      ValueError: wrong shape; on the host also a negative count.
      TypeError: counts that are not integers.
    """
    xp = _namespace(state)
    counts = _checked(xp, "num_tokens", num_tokens, state.seq_lens.shape)
    append = _append_host if xp is np else _append_traced
    return append(state, counts, _plan_growth(xp, state, counts))


def fork(state: AllocatorState, parent: ArrayLike, child: ArrayLike) -> AllocatorState:
    """Makes an empty sequence share all of another one's tokens and blocks.

    Args:
      state: the allocator's state.
      parent: i32 [], row of the sequence to share.
      child: i32 [], row of an empty sequence.

    Returns:
      The new state; unchanged where a traced call names a row out of range or a child that is not empty.

    Raises:
      ValueError: on the host, a row out of range or a child that is not empty.
    """
    xp = _namespace(state)
    source, target = _checked(xp, "parent", parent, ()), _checked(xp, "child", child, ())
    num_blocks, max_num_seqs = state.ref_counts.shape[0], state.seq_lens.shape[0]
    valid = (source >= 0) & (source < max_num_seqs) & (target >= 0) & (target < max_num_seqs)
    valid &= state.seq_lens[xp.where(valid, target, 0)] == 0
    if xp is np and not valid:
        raise ValueError(f"fork needs two rows of [0, {max_num_seqs}) and an empty child, got {source} and {target}")
    shared = state.block_tables[source]
    if xp is np:
        arrays = (state.block_tables, state.seq_lens, state.ref_counts)
        block_tables, seq_lens, ref_counts = (array.copy() for array in arrays)
        block_tables[target], seq_lens[target] = shared, seq_lens[source]
        ref_counts[shared[shared >= 0]] += 1  # a sequence holds a block once
    else:
        row = jnp.where(valid, target, max_num_seqs)
        block_tables = state.block_tables.at[row].set(shared, mode="drop")
        seq_lens = state.seq_lens.at[row].set(state.seq_lens[source], mode="drop")
        blocks = jnp.where(valid & (shared >= 0), shared, num_blocks)
        ref_counts = state.ref_counts.at[blocks].add(1, mode="drop")
    return dataclasses.replace(state, block_tables=block_tables, seq_lens=seq_lens, ref_counts=ref_counts)


def free(state: AllocatorState, seq_ids_mask: ArrayLike | Sequence[bool]) -> AllocatorState:
    """Empties sequences; blocks that nobody holds any more become free.

    Args:
      state: the allocator's state.
      seq_ids_mask: bool [max_num_seqs], True for the sequences to empty. Empty ones may be among them.

    Returns:
      The new state. Blocks go on the stack by rising id, so that the highest is taken first again.

    Raises:
      ValueError: wrong shape; on the host also a table that names a block already free (see `free_blocks`).
      TypeError: the mask is not of bools.
    """
    xp = _namespace(state)
    mask = _checked(xp, "seq_ids_mask", seq_ids_mask, state.seq_lens.shape, np.bool_)
    if xp is np:
        rows = mask.nonzero()[0]
        held = state.block_tables[rows]
        state = _release_host(state, held[held >= 0])
        block_tables, seq_lens = state.block_tables.copy(), state.seq_lens.copy()
        block_tables[rows] = -1
        seq_lens[rows] = 0
    else:
        state, valid = _release_traced(state, jnp.where(mask[:, None], state.block_tables, -1))
        mask &= valid
        block_tables = jnp.where(mask[:, None], -1, state.block_tables)
        seq_lens = jnp.where(mask, 0, state.seq_lens)
    return dataclasses.replace(state, block_tables=block_tables, seq_lens=seq_lens)


def free_blocks(state: AllocatorState, blocks: ArrayLike | Sequence[int]) -> AllocatorState:
    """Drops one reference of each named block; low level: no table may name a block that is freed this way.

    Args:
      state: the allocator's state.
      blocks: i32 [n], block ids; negative ones are skipped, and one named k times loses k references.

    Returns:
      The new state. If any block is out of range or has fewer references than it would lose, a traced call changes
      nothing but `bad_free`, which it sets.

    Raises:
      ValueError: on the host, a block that is free already or out of range.
    """
    xp = _namespace(state)
    ids = _checked(xp, "blocks", blocks, None)
    return _release_host(state, ids[ids >= 0]) if xp is np else _release_traced(state, ids)[0]


def slots(
    state: AllocatorState, seq_ids: ArrayLike | Sequence[int], positions: ArrayLike | Sequence[int]
) -> Int32[Array | np.ndarray, " num_tokens"]:
    """Finds where tokens' keys and values stand in the cache.

    Args:
      state: the allocator's state.
      seq_ids: i32 [num_tokens], row of each token's sequence; negative for padding.
      positions: i32 [num_tokens], position of each token in its sequence.

    Returns:
      i32 [num_tokens], block * block_size + offset; -1 where there is no such sequence or position.

    Raises:
      ValueError: the two shapes differ or are not of one dimension.
    """
    xp = _namespace(state)
    rows = _checked(xp, "seq_ids", seq_ids, None)
    at = _checked(xp, "positions", positions, rows.shape)
    valid = (rows >= 0) & (rows < state.seq_lens.shape[0]) & (at >= 0)
    rows = xp.where(valid, rows, 0)
    valid &= at < state.seq_lens[rows]
    logical, offsets = xp.divmod(xp.where(valid, at, 0), state.block_size)
    return xp.where(valid, state.block_tables[rows, logical] * state.block_size + offsets, -1)


class _Growth(NamedTuple):
    """What `append_tokens` wants before it looks at how many blocks are free; all [max_num_seqs]."""

    fits: Any  # bool, the count is not negative and the table row has room
    copies: Any  # bool, the last block is shared and must be copied
    last: Any  # i32, the last block so far (meaningful where `copies`)
    first_col: Any  # i32, table column of the first new block
    need: Any  # i32, new blocks; they fill columns first_col, first_col + 1, ...
    starts: Any  # i32, exclusive prefix sum of `need`: how many blocks are popped before


def _plan_growth(xp: Any, state: AllocatorState, num_tokens: Any) -> _Growth:
    max_num_seqs, max_blocks_per_seq = state.block_tables.shape
    block_size, seq_lens = state.block_size, state.seq_lens
    room = min(max_blocks_per_seq * block_size, 2**31 - 1) - seq_lens
    fits = (num_tokens >= 0) & (num_tokens <= room)
    # (n - 1) // size + 1 rounds up without overflowing near 2**31. What does not fit may overflow: `fits` voids it.
    num_old = (seq_lens - 1) // block_size + 1
    num_new = (seq_lens + num_tokens - 1) // block_size + 1

    rows = xp.arange(max_num_seqs, dtype=xp.int32)
    last = state.block_tables[rows, xp.maximum(num_old - 1, 0)]
    writes_last = (num_tokens > 0) & (seq_lens < num_old * block_size)
    holders = xp.where(writes_last, state.ref_counts[last], 0)
    copies = holders > 1
    if xp is jnp or copies.any():
        # Each holder that copies leaves one fewer; the last one left, in sequence order, keeps the block.
        same = copies[:, None] & copies[None, :] & (last[:, None] == last[None, :])
        left_before = (same & (rows[None, :] < rows[:, None])).sum(axis=1, dtype=xp.int32)
        copies &= left_before < holders - 1

    first_col = num_old - copies.astype(xp.int32)
    need = num_new - first_col
    return _Growth(fits, copies, last, first_col, need, need.cumsum(dtype=xp.int32) - need)


def _append_host(state: AllocatorState, num_tokens: np.ndarray, growth: _Growth) -> tuple:
    _, copies, last, first_col, need, starts = growth
    requested, num_free = int(need.sum()), int(state.num_free)
    if requested > num_free or not growth.fits.all():
        raise _append_error(state, num_tokens, growth)
    block_mapping = np.full((need.size, 2), -1, np.int32)
    block_tables, ref_counts = state.block_tables, state.ref_counts
    if requested:  # most decode steps of a few sequences take no block and copy no array of the pool's size
        taken = state.free_blocks[num_free - requested : num_free][::-1]
        rows = np.arange(need.size).repeat(need)
        cols = np.arange(requested) - (starts - first_col).repeat(need)
        block_tables, ref_counts = block_tables.copy(), ref_counts.copy()
        block_tables[rows, cols] = taken
        ref_counts[taken] = 1
        if copies.any():
            block_mapping[copies, 0] = last[copies]
            block_mapping[copies, 1] = taken[starts[copies]]
            np.subtract.at(ref_counts, last[copies], 1)
    num_free, seq_lens = np.asarray(num_free - requested, np.int32), state.seq_lens + num_tokens
    state = dataclasses.replace(
        state, num_free=num_free, ref_counts=ref_counts, block_tables=block_tables, seq_lens=seq_lens
    )
    return state, block_mapping, np.asarray(True)


def _append_error(state: AllocatorState, num_tokens: np.ndarray, growth: _Growth) -> Exception:
    if (num_tokens < 0).any():
        seq_id = int((num_tokens < 0).argmax())
        return ValueError(f"num_tokens must not be negative, got {num_tokens[seq_id]} for sequence {seq_id}")
    # Counted afresh in int64, since the plan of a sequence that does not fit may have overflowed.
    num_blocks = -(-(state.seq_lens.astype(np.int64) + num_tokens) // state.block_size)
    seq_id, columns = growth.fits.argmin(), state.block_tables.shape[1]
    detail = f"; sequence {seq_id} would hold {num_blocks[seq_id]} blocks, its table row has {columns} columns"
    detail = "" if growth.fits.all() else detail
    return OutOfBlocks(int((num_blocks - growth.first_col).sum()), int(state.num_free), detail)


def _append_traced(state: AllocatorState, num_tokens: Array, growth: _Growth) -> tuple:
    fits, copies, last, first_col, need, starts = growth
    num_blocks = state.ref_counts.shape[0]
    requested = need.sum(dtype=jnp.int32)
    ok = fits.all() & (requested <= state.num_free)
    copies &= ok
    offsets = jnp.arange(state.block_tables.shape[1], dtype=jnp.int32)[None, :] - first_col[:, None]
    is_new = ok & (offsets >= 0) & (offsets < need[:, None])
    top = state.num_free - 1
    taken = state.free_blocks[jnp.where(is_new, top - (starts[:, None] + offsets), 0)]
    ref_counts = state.ref_counts.at[jnp.where(is_new, taken, num_blocks)].add(1, mode="drop")
    ref_counts = ref_counts.at[jnp.where(copies, last, num_blocks)].add(-1, mode="drop")
    destination = state.free_blocks[jnp.where(copies, top - starts, 0)]
    block_mapping = jnp.where(copies[:, None], jnp.stack([last, destination], axis=1), -1)
    state = dataclasses.replace(
        state,
        num_free=state.num_free - jnp.where(ok, requested, 0),
        ref_counts=ref_counts,
        block_tables=jnp.where(is_new, taken, state.block_tables),
        seq_lens=state.seq_lens + jnp.where(ok, num_tokens, 0),
    )
    return state, block_mapping, ok


def _release_host(state: AllocatorState, blocks: np.ndarray) -> AllocatorState:
    """Drops one reference for each entry of `blocks`, i32 [n], none negative."""
    num_blocks = state.ref_counts.size
    blocks = np.sort(blocks)
    is_first = np.ones(blocks.size, np.bool_)
    np.not_equal(blocks[1:], blocks[:-1], out=is_first[1:])
    first = is_first.nonzero()[0]
    blocks, drops = blocks[first], np.diff(first, append=blocks.size).astype(np.int32)
    if blocks.size and blocks[-1] >= num_blocks:
        raise ValueError(f"block {blocks[-1]} is out of range, the pool has {num_blocks} blocks")
    left = state.ref_counts[blocks] - drops
    if (left < 0).any():
        bad = (left < 0).argmax()
        raise ValueError(f"block {blocks[bad]} has {left[bad] + drops[bad]} references, cannot drop {drops[bad]}")
    ref_counts = state.ref_counts.copy()
    ref_counts[blocks] = left
    freed = blocks[left == 0]
    stack, num_free = state.free_blocks.copy(), int(state.num_free) + freed.size
    stack[num_free - freed.size : num_free] = freed
    num_free = np.asarray(num_free, np.int32)
    return dataclasses.replace(state, free_blocks=stack, num_free=num_free, ref_counts=ref_counts)


def _release_traced(state: AllocatorState, blocks: Array) -> tuple[AllocatorState, Array]:
    """Drops one reference for each entry of `blocks`, i32 of any shape; negative ones are skipped."""
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


def _namespace(state: AllocatorState) -> Any:
    return np if isinstance(state.ref_counts, np.ndarray) else jnp


def _checked(xp: Any, name: str, x: Any, shape: tuple[int, ...] | None, dtype: type = np.int32) -> Any:
    """Gives `x` as int32 or bool after checking its kind of dtype, its range and its shape (None: one dimension)."""
    array = x if isinstance(x, jax.Array) else np.asarray(x)
    array = array if array.size else array.astype(dtype)  # [] has NumPy's float64
    if array.dtype.kind not in ("iu" if dtype is np.int32 else "b"):
        raise TypeError(f"{name} must be of dtype {np.dtype(dtype)}, got {array.dtype}")
    if isinstance(array, np.ndarray) and array.dtype != dtype and array.size and np.abs(array).max() >= 2**31:
        raise ValueError(f"{name} must fit in int32, got {array.ravel()[np.abs(array).argmax()]}")
    array = xp.asarray(array, dtype) if isinstance(array, np.ndarray) else array
    if array.ndim != 1 if shape is None else array.shape != shape:
        raise ValueError(f"{name} must have shape {'(n,)' if shape is None else shape}, got {array.shape}")
    return array if array.dtype == dtype else array.astype(dtype)
