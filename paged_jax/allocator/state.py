"""The allocator's state, how it is made, and the slots that it gives to tokens."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32

from paged_jax._static import integer
from paged_jax.allocator.arguments import Values, integers, namespace, on_host


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AllocatorState:
    """Free blocks, reference counts and block tables of one pool; make it with `create`.

    Attributes:
      free_blocks: i32 [num_blocks], a stack: the first `num_free` entries are the ids of the free blocks, and the last
        of them is taken next. Entries past `num_free` have no meaning.
      num_free: i32 [], how many blocks are free.
      ref_counts: i32 [num_blocks], references of each block: the block table entries that name it, and those that
        `retain` added.
      block_tables: i32 [max_num_seqs, max_blocks_per_seq], the block of each logical block of a sequence, -1 for none
        and for one that `release_before` released.
      seq_lens: i32 [max_num_seqs], tokens of each sequence.
      bad_free: bool [], whether any traced call of `free`, `free_blocks`, `release_before` or `truncate` so far was
        invalid. Such a call only sets this; on the host it raises instead.
      bad_share: bool [], the same for `fork`, `share`, `adopt` and `retain`.
      block_size: tokens in a block (static).

    Example:
      >>> from paged_jax import allocator
      >>> state = allocator.create(num_blocks=8, block_size=4, max_num_seqs=2, max_blocks_per_seq=4)
      >>> isinstance(state, allocator.AllocatorState), state.seq_lens.tolist()
      (True, [0, 0])
    """

    # Any: a transformation may put other leaves than arrays here (specs, shapes, axes).
    free_blocks: Any
    num_free: Any
    ref_counts: Any
    block_tables: Any
    seq_lens: Any
    bad_free: Any
    bad_share: Any
    block_size: int = dataclasses.field(metadata={"static": True})


def create(
    num_blocks: int, block_size: int, max_num_seqs: int, max_blocks_per_seq: int, *, num_shards: int = 1, xp: Any = np
) -> AllocatorState:
    """Makes a state in which every block is free and every sequence empty.

    Args:
      num_blocks: blocks in the pool.
      block_size: tokens in a block.
      max_num_seqs: rows of the block tables.
      max_blocks_per_seq: columns of the block tables.
      num_shards: how many devices the pool's blocks are split over. Blocks are taken from one device after the other,
        so that each has about as many of a sequence's.
      xp: `numpy` for a state on the host, `jax.numpy` for one on the device.

    Returns:
      The state. The highest block id will be taken first, and with several shards then the highest of the others.

    Raises:
      ValueError: a size below 1, more slots than int32 can count, or shards of unequal sizes.
      TypeError: a size is not an integer.

    Example:
      >>> from paged_jax import allocator
      >>> state = allocator.create(num_blocks=8, block_size=4, max_num_seqs=2, max_blocks_per_seq=4)
      >>> int(state.num_free)
      8
    """
    num_blocks, block_size = integer("num_blocks", num_blocks), integer("block_size", block_size)
    max_num_seqs = integer("max_num_seqs", max_num_seqs)
    max_blocks_per_seq = integer("max_blocks_per_seq", max_blocks_per_seq)
    sizes = (num_blocks, block_size, max_num_seqs, max_blocks_per_seq)
    if min(sizes) < 1:
        raise ValueError(f"num_blocks, block_size, max_num_seqs, max_blocks_per_seq must be positive, got {sizes}")
    if num_blocks * block_size > 2**31:
        raise ValueError(
            f"num_blocks * block_size must be at most 2**31 (int32 slots), got {num_blocks} * {block_size}"
        )
    num_shards = integer("num_shards", num_shards)
    if num_shards < 1 or num_blocks % num_shards:
        raise ValueError(f"num_shards must divide num_blocks = {num_blocks}, got {num_shards}")
    return AllocatorState(
        free_blocks=xp.arange(num_blocks, dtype=xp.int32).reshape(num_shards, -1).T.reshape(-1),
        num_free=xp.asarray(num_blocks, dtype=xp.int32),
        ref_counts=xp.zeros(num_blocks, dtype=xp.int32),
        block_tables=xp.full((max_num_seqs, max_blocks_per_seq), -1, dtype=xp.int32),
        seq_lens=xp.zeros(max_num_seqs, dtype=xp.int32),
        bad_free=xp.asarray(False),
        bad_share=xp.asarray(False),
        block_size=block_size,
    )


def slots(state: AllocatorState, seq_ids: Values, positions: Values) -> Int32[Array | np.ndarray, " num_tokens"]:
    """Finds the slots of tokens: the places of their keys and values in the cache.

    Args:
      state: the allocator's state.
      seq_ids: i32 [num_tokens], row of each token's sequence; negative for padding.
      positions: i32 [num_tokens], position of each token in its sequence.

    Returns:
      i32 [num_tokens], block * block_size + offset; -1 if there is no such sequence or position, or its block is
      released (`release_before`).

    Raises:
      ValueError: the two shapes differ or have not one axis, or a concrete integer does not fit in int32.
      TypeError: the ids or positions are not integers.

    Example:
      >>> from paged_jax import allocator
      >>> state, *_ = allocator.append_tokens(allocator.create(8, 4, 2, 4), [6, 0])  # sequence 0 gets blocks 7 and 6
      >>> allocator.slots(state, [0, 0, 0, -1], [0, 5, 6, 0]).tolist()
      [28, 25, -1, -1]
    """
    xp, state = prepare(state, seq_ids, positions)
    rows = integers(xp, "seq_ids", seq_ids, None)
    at = integers(xp, "positions", positions, rows.shape)
    valid = (rows >= 0) & (rows < state.seq_lens.shape[0]) & (at >= 0)
    rows = xp.where(valid, rows, 0)
    valid &= at < state.seq_lens[rows]
    logical, offsets = xp.divmod(xp.where(valid, at, 0), state.block_size)
    blocks = state.block_tables[rows, logical]
    return xp.where(valid & (blocks >= 0), blocks * state.block_size + offsets, -1)


def writable(array: np.ndarray, donate: bool) -> np.ndarray:
    """The array itself if its state was donated, or else a copy that can be written."""
    return array if donate and array.flags.writeable else array.copy()


def prepare(state: AllocatorState, *arguments: Values) -> tuple[Any, AllocatorState]:
    """Picks the form of a call, `numpy` or `jax.numpy`, and converts the whole state to that form.

    A state on the host meets traced arguments if a jitted function closes over it; it then becomes a traced state.
    """
    xp = namespace(state, *arguments)
    return xp, state if xp is np and on_host(state) else jax.tree.map(xp.asarray, state)
