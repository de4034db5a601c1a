"""A random walk of the block allocator: the host form, the jitted form and a naive model take the same calls.

After each call the two states are bit-equal, equal to the model's dicts and lists, and inside the invariants.
"""

import dataclasses
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paged_jax import allocator
from tests.test_allocator import (
    append_jit,
    assert_same,
    fork_jit,
    free_blocks_jit,
    free_jit,
    i32,
    on_device,
    slots_jit,
)

NUM_BLOCKS, BLOCK_SIZE, NUM_SEQS, NUM_COLUMNS = 14, 4, 5, 5


class Model:
    """The allocator in the plainest Python: one sequence and one block at a time."""

    def __init__(self):
        self.free = list(range(NUM_BLOCKS))
        self.refs = Counter()
        self.tables = [[] for _ in range(NUM_SEQS)]
        self.lens = [0] * NUM_SEQS

    def append(self, num_tokens):
        """Returns the copies {sequence: (old, new)}, or None if it does not fit."""
        free, refs = list(self.free), Counter(self.refs)
        tables, lens, copies = [list(t) for t in self.tables], list(self.lens), {}
        for s, n in enumerate(num_tokens):
            for _ in range(n):
                if lens[s] % BLOCK_SIZE == 0 or refs[tables[s][-1]] > 1:
                    if not free:
                        return None
                    new = free.pop()
                    refs[new] += 1
                    if lens[s] % BLOCK_SIZE:
                        old = tables[s].pop()
                        refs[old] -= 1
                        copies[s] = (old, new)
                    tables[s].append(new)
                lens[s] += 1
            if len(tables[s]) > NUM_COLUMNS:
                return None
        self.free, self.refs, self.tables, self.lens = free, refs, tables, lens
        return copies

    def fork(self, parent, child):
        self.tables[child], self.lens[child] = list(self.tables[parent]), self.lens[parent]
        self.refs.update(self.tables[parent])

    def release(self, seqs):
        freed = []
        for s in seqs:
            for block in self.tables[s]:
                self.refs[block] -= 1
                if self.refs[block] == 0:
                    freed.append(block)
            self.tables[s], self.lens[s] = [], 0
        self.free += sorted(freed)


class Walk(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.host = allocator.create(NUM_BLOCKS, BLOCK_SIZE, NUM_SEQS, NUM_COLUMNS)
        self.device = on_device(self.host)
        self.model = Model()

    @rule(num_tokens=st.lists(st.sampled_from([0, 1, 0, 1, 2, 5]), min_size=NUM_SEQS, max_size=NUM_SEQS))
    def append(self, num_tokens):
        num_tokens = i32(*num_tokens)
        copies = self.model.append(num_tokens)
        expected = np.full((NUM_SEQS, 2), -1, np.int32)
        self.device, block_mapping, ok = append_jit(self.device, num_tokens)
        assert ok == (copies is not None)
        if copies is None:
            with pytest.raises(allocator.OutOfBlocks) as caught:
                allocator.append_tokens(self.host, num_tokens)
            assert caught.value.free == len(self.model.free)
            assert caught.value.requested > caught.value.free or "columns" in str(caught.value)
        else:
            for seq_id, pair in copies.items():
                expected[seq_id] = pair
            self.host, host_mapping, host_ok = allocator.append_tokens(self.host, num_tokens)
            assert host_ok
            np.testing.assert_array_equal(host_mapping, expected)
        np.testing.assert_array_equal(block_mapping, expected)

    @rule(parent=st.integers(0, NUM_SEQS - 1), child=st.integers(0, NUM_SEQS - 1))
    def fork(self, parent, child):
        if parent != child and self.model.lens[child]:
            self.free({child})
        if self.model.lens[child]:
            with pytest.raises(ValueError, match="an empty child"):
                allocator.fork(self.host, parent, child)
        else:
            self.model.fork(parent, child)
            self.host = allocator.fork(self.host, parent, child)
        self.device = fork_jit(self.device, np.int32(parent), np.int32(child))

    @rule(seqs=st.sets(st.integers(0, NUM_SEQS - 1), min_size=1, max_size=2))
    def free(self, seqs):
        mask = np.isin(np.arange(NUM_SEQS), list(seqs))
        self.model.release(sorted(seqs))
        self.host = allocator.free(self.host, mask)
        self.device = free_jit(self.device, mask)

    @invariant()
    def all_agree(self):
        host, model = self.host, self.model
        assert_same(self.device, host)
        assert host.free_blocks[: int(host.num_free)].tolist() == model.free
        assert host.ref_counts.tolist() == [model.refs[b] for b in range(NUM_BLOCKS)]
        assert host.seq_lens.tolist() == model.lens
        assert host.block_tables.tolist() == [t + [-1] * (NUM_COLUMNS - len(t)) for t in model.tables]

    @invariant()
    def what_is_not_held_cannot_be_freed(self):
        bad = self.model.free[0] if self.model.free else NUM_BLOCKS
        with pytest.raises(ValueError, match=f"block {bad} "):
            allocator.free_blocks(self.host, i32(-1, bad))
        after = free_blocks_jit(self.device, i32(-1, bad))
        assert after.bad_free
        assert_same(dataclasses.replace(after, bad_free=self.host.bad_free), self.host)

    @invariant()
    def every_block_is_free_once_or_counted(self):
        free = Counter(self.host.free_blocks[: int(self.host.num_free)].tolist())
        assert all(free[b] == (self.host.ref_counts[b] == 0) for b in range(NUM_BLOCKS))
        assert (self.host.ref_counts >= 0).all()

    @invariant()
    def references_are_table_entries_and_no_table_holds_a_free_block(self):
        held = self.host.block_tables[self.host.block_tables >= 0]
        np.testing.assert_array_equal(np.bincount(held, minlength=NUM_BLOCKS), self.host.ref_counts)

    @invariant()
    def slots_overlap_only_where_nobody_can_write(self):
        """Shared slots lie in blocks that both hold at one place, full or left alone since the fork."""
        seq_ids, positions = (a.ravel().astype(np.int32) for a in np.indices((NUM_SEQS, NUM_COLUMNS * BLOCK_SIZE + 1)))
        slots = allocator.slots(self.host, seq_ids, positions)
        np.testing.assert_array_equal(slots_jit(self.device, seq_ids, positions), slots)
        holders = {}
        for seq_id, position, slot in zip(seq_ids.tolist(), positions.tolist(), slots.tolist(), strict=True):
            table, length = self.model.tables[seq_id], self.model.lens[seq_id]
            if position >= length:
                assert slot == -1
                continue
            assert slot == table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            is_full = position // BLOCK_SIZE < length // BLOCK_SIZE
            # A partly filled block is shared only by forks that have not grown since: they have one length.
            assert holders.setdefault(slot, (position, is_full or length)) == (position, is_full or length)


Walk.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True, database=None
)
TestRandomWalk = Walk.TestCase
