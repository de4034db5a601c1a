"""Tests the block allocator by a random walk: the host form, the jitted form and a naive model get the same calls.

After each call the two states must be bit-equal, equal to the model's dicts and lists, and satisfy the invariants. The
model also keeps the contents of every token, and a pool in which it writes and copies as the allocator says. However
blocks were shared, copied, truncated or retained, each sequence must find its own tokens there.
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
    adopt_jit,
    append_jit,
    append_rows_jit,
    assert_same,
    count_new_blocks_jit,
    fork_jit,
    free_blocks_jit,
    free_jit,
    i32,
    on_device,
    release_before_jit,
    retain_jit,
    share_jit,
    slots_jit,
    truncate_jit,
)

NUM_BLOCKS, BLOCK_SIZE, NUM_SEQS, NUM_COLUMNS = 14, 4, 5, 5


class Model:
    """The allocator in the plainest Python: one sequence and one block at a time."""

    def __init__(self):
        self.free = list(range(NUM_BLOCKS))
        self.refs = Counter()
        self.tables = [[] for _ in range(NUM_SEQS)]
        self.lens = [0] * NUM_SEQS
        self.retained = Counter()

    def grow(self, s, n):
        """Gives one sequence its tokens; returns its copy (old, new) or None. Raises if blocks or columns run out."""
        free, refs, table, copy = list(self.free), Counter(self.refs), list(self.tables[s]), None
        if self.lens[s] + n > NUM_COLUMNS * BLOCK_SIZE:
            raise RuntimeError("columns")
        for length in range(self.lens[s], self.lens[s] + n):
            if length % BLOCK_SIZE == 0 or refs[table[-1]] > 1:
                if not free:
                    raise RuntimeError("blocks")
                new = free.pop()
                refs[new] += 1
                if length % BLOCK_SIZE:
                    copy = (table.pop(), new)
                    refs[copy[0]] -= 1
                table.append(new)
        self.free, self.refs, self.tables[s] = free, refs, table
        self.lens[s] += n
        return copy

    def append(self, num_tokens):
        """Grows all sequences or none; returns the copies {sequence: (old, new)}, or None if there is no room."""
        before = list(self.free), Counter(self.refs), list(self.tables), list(self.lens)
        try:
            copies = {s: self.grow(s, n) for s, n in enumerate(num_tokens)}
        except RuntimeError:
            self.free, self.refs, self.tables, self.lens = before
            return None
        return {s: copy for s, copy in copies.items() if copy}

    def append_rows(self, num_tokens):
        """Grows each sequence if it can; returns the copies, and for each sequence whether it got its tokens."""
        copies, ok, blocks_last = {}, [False] * NUM_SEQS, True
        for s, n in enumerate(num_tokens):
            before = list(self.free), Counter(self.refs), list(self.tables), list(self.lens)
            try:
                copy = self.grow(s, n)
            except RuntimeError as error:
                blocks_last &= str(error) != "blocks"
                continue
            if not blocks_last and self.free != before[0]:
                self.free, self.refs, self.tables, self.lens = before
                continue
            ok[s] = True
            copies.update({s: copy} if copy else {})
        return copies, ok

    def start(self, child, blocks, length):
        self.tables[child], self.lens[child] = list(blocks), length
        self.refs.update(block for block in blocks if block >= 0)

    def release(self, blocks):
        self.refs.subtract(blocks)
        self.free += sorted(block for block in set(blocks) if self.refs[block] == 0)

    def truncate(self, lens):
        released = []
        for s, length in enumerate(lens):
            kept = -(-length // BLOCK_SIZE)
            released += self.tables[s][kept:]
            self.tables[s], self.lens[s] = self.tables[s][:kept], length
        self.release([block for block in released if block >= 0])

    def release_before(self, positions):
        released = []
        for table, position in zip(self.tables, positions, strict=True):
            for column in range(position // BLOCK_SIZE):
                released += [table[column]] if table[column] >= 0 else []
                table[column] = -1
        self.release(released)


def slots_of(table, positions):
    blocks = [table[p // BLOCK_SIZE] for p in positions]
    return [-1 if b < 0 else b * BLOCK_SIZE + p % BLOCK_SIZE for b, p in zip(blocks, positions, strict=True)]


num_tokens_each = st.lists(st.sampled_from([0, 1, 0, 1, 2, 5]), min_size=NUM_SEQS, max_size=NUM_SEQS)
rows = st.integers(0, NUM_SEQS - 1)


class Walk(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.host = allocator.create(NUM_BLOCKS, BLOCK_SIZE, NUM_SEQS, NUM_COLUMNS)
        self.device = on_device(self.host)
        self.model = Model()
        # The contents of the cache's slots, and those that sequences and retained blocks must find there.
        self.pool = np.full(NUM_BLOCKS * BLOCK_SIZE, -1)
        self.tokens = [[] for _ in range(NUM_SEQS)]
        self.retained_slots = {}
        self.num_tokens = 0

    def block_slots(self, block):
        return np.arange(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)

    def write_new_tokens(self, before, copies):
        """Makes the copies of a growth and writes its new tokens, as a cache would; `before`: the lengths before it."""
        pool = self.pool.copy()
        for old, new in copies.values():
            pool[self.block_slots(new)] = self.pool[self.block_slots(old)]
        for s, length in enumerate(self.model.lens):
            for slot in slots_of(self.model.tables[s], range(before[s], length)):
                assert self.model.refs[slot // BLOCK_SIZE] == 1  # no other sequence has the block that is written to
                pool[slot] = self.num_tokens
                self.tokens[s].append(self.num_tokens)
                self.num_tokens += 1
        self.pool = pool

    def refused(self, error, call_host, call_device, flag):
        """Checks that both forms refuse a call: the host by an error, the device by a flag; nothing else changes."""
        with pytest.raises(ValueError, match=error):
            call_host()
        after = call_device()
        assert getattr(after, flag)
        assert_same(dataclasses.replace(after, **{flag: getattr(self.host, flag)}), self.host)

    @rule(num_tokens=num_tokens_each)
    def append(self, num_tokens):
        num_tokens, before = i32(*num_tokens), list(self.model.lens)
        count, num_free = allocator.count_new_blocks(self.host, num_tokens), len(self.model.free)
        assert_same(count_new_blocks_jit(self.device, num_tokens), count)
        copies = self.model.append(num_tokens)
        assert (count <= num_free) if copies is not None else (count > num_free)
        assert copies is None or count == num_free - len(self.model.free)
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
            self.write_new_tokens(before, copies)
        np.testing.assert_array_equal(block_mapping, expected)

    @rule(num_tokens=num_tokens_each)
    def append_row_by_row(self, num_tokens):
        before = list(self.model.lens)
        copies, ok = self.model.append_rows(num_tokens)
        expected = np.full((NUM_SEQS, 2), -1, np.int32)
        for seq_id, pair in copies.items():
            expected[seq_id] = pair
        self.device, *of_device = append_rows_jit(self.device, i32(*num_tokens))
        self.host, *of_host = allocator.append_tokens(self.host, num_tokens, row_by_row=True)
        assert_same(of_host, [expected, np.array(ok)])
        assert_same(of_device, [expected, np.array(ok)])
        self.write_new_tokens(before, copies)

    @rule(parent=rows, child=rows)
    def fork(self, parent, child):
        if parent != child and self.model.lens[child]:
            self.free({child})
        calls = (
            lambda: allocator.fork(self.host, parent, child),
            lambda: fork_jit(self.device, np.int32(parent), np.int32(child)),
        )
        if self.model.lens[child]:
            self.refused("an empty child", *calls, "bad_share")
        else:
            self.model.start(child, self.model.tables[parent], self.model.lens[parent])
            self.tokens[child] = list(self.tokens[parent])
            self.host, self.device = calls[0](), calls[1]()

    @rule(parent=rows, child=rows, num_blocks=st.integers(-1, NUM_COLUMNS), clamp=st.booleans())
    def share(self, parent, child, num_blocks, clamp):
        if parent != child and self.model.lens[child]:
            self.free({child})
        num_full = self.model.lens[parent] // BLOCK_SIZE
        num_blocks = max(0, min(num_blocks, num_full)) if clamp else num_blocks
        calls = (
            lambda: allocator.share(self.host, parent, child, num_blocks),
            lambda: share_jit(self.device, np.int32(parent), np.int32(child), np.int32(num_blocks)),
        )
        if self.model.lens[child]:
            self.refused("an empty child", *calls, "bad_share")
        elif not 0 <= num_blocks <= num_full:
            self.refused(rf"in \[0, {num_full}\], the full blocks of", *calls, "bad_share")
        else:
            self.model.start(child, self.model.tables[parent][:num_blocks], num_blocks * BLOCK_SIZE)
            self.tokens[child] = self.tokens[parent][: num_blocks * BLOCK_SIZE]
            self.host, self.device = calls[0](), calls[1]()

    @rule(child=rows, data=st.data(), skipped=st.sampled_from([0, 0, 1, 2, 4, -1]))
    def adopt(self, child, data, skipped):
        held = sorted(block for block, count in self.model.refs.items() if count)
        candidates = held * 3 + list(range(-2, NUM_BLOCKS + 1))  # most of them are valid
        blocks = data.draw(st.lists(st.sampled_from(candidates), max_size=3))
        if self.model.lens[child]:
            self.free({child})
            held = [block for block in held if self.model.refs[block]]
        ids = blocks[: next((i for i, block in enumerate(blocks) if block < 0), len(blocks))]
        valid = all(b < 0 for b in blocks[len(ids) :]) and set(ids) <= set(held) and len(set(ids)) == len(ids)
        padded = i32(*blocks, *[-1] * (NUM_COLUMNS - len(blocks)))
        calls = (
            lambda: allocator.adopt(self.host, child, blocks, num_skipped=skipped),
            lambda: adopt_jit(self.device, np.int32(child), padded, num_skipped=np.int32(skipped)),
        )
        if not valid:
            self.refused("blocks must be different, held", *calls, "bad_share")
        elif not 0 <= skipped <= NUM_COLUMNS - len(ids):
            self.refused("num_skipped must be in", *calls, "bad_share")
        else:
            ids = [-1] * skipped + ids
            self.model.start(child, ids, len(ids) * BLOCK_SIZE)
            self.tokens[child] = [-1] * skipped * BLOCK_SIZE
            self.tokens[child] += [token for b in ids[skipped:] for token in self.pool[self.block_slots(b)].tolist()]
            self.host, self.device = calls[0](), calls[1]()

    @rule(blocks=st.lists(st.integers(-2, NUM_BLOCKS), min_size=3, max_size=3), only_held=st.booleans())
    def retain(self, blocks, only_held):
        named = [block for block in blocks if block >= 0]
        if only_held:
            named = [block for block in named if self.model.refs[block]]
        ids = i32(*named, *[-1] * (3 - len(named)))
        calls = lambda: allocator.retain(self.host, ids), lambda: retain_jit(self.device, ids)
        if not all(self.model.refs[block] for block in named):
            self.refused("is free or not one of the pool's", *calls, "bad_share")
        else:
            self.model.refs.update(named)
            self.model.retained.update(named)
            self.retained_slots.update({block: self.pool[self.block_slots(block)] for block in named})
            self.host, self.device = calls[0](), calls[1]()

    @rule(data=st.data())
    def drop_retained(self, data):
        retained = sorted(self.model.retained.elements())
        if not retained:
            return
        blocks = data.draw(st.lists(st.sampled_from(range(len(retained))), max_size=3, unique=True))
        blocks = [retained[i] for i in blocks]
        self.model.retained.subtract(blocks)
        self.model.release(blocks)
        ids = i32(*blocks, *[-1] * (3 - len(blocks)))
        self.host = allocator.free_blocks(self.host, ids)
        self.device = free_blocks_jit(self.device, ids)

    @rule(cuts=st.lists(st.sampled_from([0, 0, 1, 2, 3, 6]), min_size=NUM_SEQS, max_size=NUM_SEQS))
    def truncate(self, cuts):
        lens = i32(*[max(0, length - cut) for length, cut in zip(self.model.lens, cuts, strict=True)])
        tables = self.model.tables
        ends = [length % BLOCK_SIZE and tables[s][length // BLOCK_SIZE] < 0 for s, length in enumerate(lens)]
        if any(ends):
            calls = lambda: allocator.truncate(self.host, lens), lambda: truncate_jit(self.device, lens)
            self.refused(f"sequence {ends.index(True)} cannot end at", *calls, "bad_free")
            return
        self.model.truncate(lens.tolist())
        self.tokens = [tokens[:length] for tokens, length in zip(self.tokens, lens, strict=True)]
        self.host = allocator.truncate(self.host, lens)
        self.device = truncate_jit(self.device, lens)

    @rule(backs=st.lists(st.sampled_from([-1, 0, 2, 5, 99, 99]), min_size=NUM_SEQS, max_size=NUM_SEQS))
    def release_before(self, backs):
        positions = i32(*[length - back for length, back in zip(self.model.lens, backs, strict=True)])
        calls = (
            lambda: allocator.release_before(self.host, positions),
            lambda: release_before_jit(self.device, positions),
        )
        if -1 in backs:
            row = backs.index(-1)
            self.refused(f"at most {self.model.lens[row]} for sequence {row}", *calls, "bad_free")
            return
        self.model.release_before([max(0, position) for position in positions.tolist()])
        for s, tokens in enumerate(self.tokens):
            num_gone = sum(block < 0 for block in self.model.tables[s]) * BLOCK_SIZE
            self.tokens[s] = [-1] * num_gone + tokens[num_gone:]
        self.host, self.device = calls[0](), calls[1]()

    @rule(row=rows, longer=st.booleans())
    def truncate_to_what_is_not_shorter(self, row, longer):
        lens = np.array(self.model.lens, np.int32)
        lens[row] = lens[row] + 1 if longer else -1
        calls = lambda: allocator.truncate(self.host, lens), lambda: truncate_jit(self.device, lens)
        self.refused(f"for sequence {row}, got {lens[row]}", *calls, "bad_free")

    @rule(seqs=st.sets(rows, min_size=1, max_size=2))
    def free(self, seqs):
        mask = np.isin(np.arange(NUM_SEQS), list(seqs))
        self.model.truncate([0 if s in seqs else length for s, length in enumerate(self.model.lens)])
        self.tokens = [[] if s in seqs else tokens for s, tokens in enumerate(self.tokens)]
        self.host = allocator.free(self.host, mask)
        self.device = free_jit(self.device, mask)

    @invariant()
    def all_agree(self):
        host, model = self.host, self.model
        assert_same(self.device, host)
        assert all(isinstance(leaf, np.ndarray) for leaf in (host.seq_lens, host.num_free, host.ref_counts))
        assert host.free_blocks[: int(host.num_free)].tolist() == model.free
        assert host.ref_counts.tolist() == [model.refs[b] for b in range(NUM_BLOCKS)]
        assert host.seq_lens.tolist() == model.lens
        assert host.block_tables.tolist() == [t + [-1] * (NUM_COLUMNS - len(t)) for t in model.tables]

    @invariant()
    def what_is_not_held_cannot_be_freed(self):
        bad = self.model.free[0] if self.model.free else NUM_BLOCKS
        self.refused(
            f"block {bad} ",
            lambda: allocator.free_blocks(self.host, i32(-1, bad)),
            lambda: free_blocks_jit(self.device, i32(-1, bad)),
            "bad_free",
        )

    @invariant()
    def every_block_is_free_once_or_counted(self):
        free = Counter(self.host.free_blocks[: int(self.host.num_free)].tolist())
        assert all(free[b] == (self.host.ref_counts[b] == 0) for b in range(NUM_BLOCKS))
        assert (self.host.ref_counts >= 0).all()

    @invariant()
    def references_are_table_entries_and_retained_ones_and_no_table_holds_a_free_block(self):
        held = Counter(self.host.block_tables[self.host.block_tables >= 0].tolist()) + self.model.retained
        assert [held[b] for b in range(NUM_BLOCKS)] == self.host.ref_counts.tolist()
        assert not set(held) & set(self.host.free_blocks[: int(self.host.num_free)].tolist())

    @invariant()
    def every_sequence_finds_its_own_tokens(self):
        """The slots of two sequences overlap only where nobody has written since they were shared."""
        seq_ids, positions = (a.ravel().astype(np.int32) for a in np.indices((NUM_SEQS, NUM_COLUMNS * BLOCK_SIZE + 1)))
        slots = allocator.slots(self.host, seq_ids, positions)
        np.testing.assert_array_equal(slots_jit(self.device, seq_ids, positions), slots)
        slots = slots.reshape(NUM_SEQS, -1)
        for table, length, row, tokens in zip(self.model.tables, self.model.lens, slots, self.tokens, strict=True):
            assert row[:length].tolist() == slots_of(table, range(length))
            assert (row[length:] == -1).all()
            found = np.where(row[:length] < 0, -1, self.pool[row[:length]])
            assert found.tolist() == tokens

    @invariant()
    def nobody_writes_to_a_retained_block(self):
        for block in self.model.retained.elements():
            np.testing.assert_array_equal(self.pool[self.block_slots(block)], self.retained_slots[block])


Walk.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True, database=None
)
TestRandomWalk = Walk.TestCase
