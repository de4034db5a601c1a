"""Tests the block allocator: goldens, copy-on-write, edge cases on the host and compiled, and speed on the host."""

import dataclasses
import doctest
import inspect
import json
import pathlib
import pickle
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import allocator

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden" / "slot_mapping_5x195.json").read_text())

append_jit = jax.jit(allocator.append_tokens)
fork_jit = jax.jit(allocator.fork)
free_jit = jax.jit(allocator.free)
free_blocks_jit = jax.jit(allocator.free_blocks)
append_rows_jit = jax.jit(partial(allocator.append_tokens, row_by_row=True))
truncate_jit = jax.jit(allocator.truncate)
share_jit = jax.jit(allocator.share)
adopt_jit = jax.jit(allocator.adopt)
retain_jit = jax.jit(allocator.retain)
slots_jit = jax.jit(allocator.slots)
release_before_jit = jax.jit(allocator.release_before)
count_new_blocks_jit = jax.jit(allocator.count_new_blocks)


def frozen(state):
    """Copies a state to the host, in arrays that cannot be written."""
    state = jax.tree.map(np.array, state)
    for leaf in jax.tree.leaves(state):
        leaf.flags.writeable = False
    return state


def on_device(state):
    return jax.tree.map(jnp.asarray, state)


def assert_same(a, b):
    """Checks that all leaves have equal dtypes, shapes and bits."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(x, y, err_msg=str(path), strict=True)


def forms(xp):
    """The functions append_tokens, fork, free, free_blocks and slots, on the host or compiled."""
    if xp is np:
        return allocator.append_tokens, allocator.fork, allocator.free, allocator.free_blocks, allocator.slots
    return append_jit, fork_jit, free_jit, free_blocks_jit, slots_jit


def i32(*values):
    return np.array(values, np.int32)


both = pytest.mark.parametrize("xp", [np, jnp], ids=["host", "jit"])


# Goldens.


@both
@pytest.mark.parametrize("calls", [1, 5])
def test_golden_of_five_prompts(xp, calls):
    append, _, _, _, slots = forms(xp)
    num_seqs, prompt_len = GOLDEN["num_seqs"], GOLDEN["prompt_len"]
    state = allocator.create(GOLDEN["num_blocks"], GOLDEN["block_size"], num_seqs, 13, xp=xp)
    for step in np.eye(5, dtype=np.int32) if calls == 5 else [np.ones(5, np.int32)]:
        state, block_mapping, ok = append(state, step * np.int32(prompt_len))
        assert ok
        np.testing.assert_array_equal(block_mapping, -1)
    seq_ids = np.repeat(np.arange(num_seqs, dtype=np.int32), prompt_len)
    positions = np.tile(np.arange(prompt_len, dtype=np.int32), num_seqs)
    np.testing.assert_array_equal(slots(state, seq_ids, positions), GOLDEN["prefill"]["slot_mapping"])
    np.testing.assert_array_equal(state.seq_lens, GOLDEN["prefill"]["seq_lens"])

    state, _, ok = append(state, np.ones(num_seqs, np.int32))
    decode = GOLDEN["decode"]
    assert ok
    np.testing.assert_array_equal(state.seq_lens, decode["seq_lens"])
    np.testing.assert_array_equal(state.block_tables, decode["block_tables"])
    seq_ids = np.arange(num_seqs, dtype=np.int32)
    np.testing.assert_array_equal(slots(state, seq_ids, np.asarray(state.seq_lens) - 1), decode["slot_mapping"])


# Copy-on-write.


@both
def test_a_shared_partly_filled_block_is_copied_before_it_grows(xp):
    append, fork, *_ = forms(xp)
    state, *_ = append(allocator.create(10, 4, 3, 4, xp=xp), i32(6, 0, 0))  # blocks 9, 8
    state = fork(state, np.int32(0), np.int32(2))
    state, block_mapping, _ = append(state, i32(0, 0, 7))  # the blocks of 13 tokens: 9, a copy of 8, two new ones
    np.testing.assert_array_equal(block_mapping, [[-1, -1], [-1, -1], [8, 7]])
    np.testing.assert_array_equal(state.block_tables, [[9, 8, -1, -1], [-1] * 4, [9, 7, 6, 5]])
    np.testing.assert_array_equal(state.ref_counts, [0, 0, 0, 0, 0, 1, 1, 1, 1, 2])
    # The parent is the last holder and grows in place.
    state, block_mapping, _ = append(state, i32(1, 0, 0))
    np.testing.assert_array_equal(block_mapping, -1)
    np.testing.assert_array_equal(state.block_tables[0], [9, 8, -1, -1])


@both
def test_a_shared_full_block_is_not_copied(xp):
    append, fork, *_ = forms(xp)
    state, *_ = append(allocator.create(10, 4, 2, 4, xp=xp), i32(8, 0))
    state, block_mapping, _ = append(fork(state, np.int32(0), np.int32(1)), i32(1, 1))
    np.testing.assert_array_equal(block_mapping, -1)
    np.testing.assert_array_equal(state.block_tables[:, :3], [[9, 8, 7], [9, 8, 6]])


@both
def test_when_all_holders_grow_at_once_the_last_keeps_the_block(xp):
    append, fork, *_ = forms(xp)
    state, *_ = append(allocator.create(10, 4, 4, 2, xp=xp), i32(0, 3, 0, 0))
    for child in (0, 3):
        state = fork(state, np.int32(1), np.int32(child))
    grown, block_mapping, _ = append(state, i32(1, 1, 0, 1))
    np.testing.assert_array_equal(block_mapping, [[9, 8], [9, 7], [-1, -1], [-1, -1]])
    np.testing.assert_array_equal(grown.block_tables[:, 0], [8, 7, -1, 9])
    np.testing.assert_array_equal(grown.ref_counts[7:], [1, 1, 1])
    # If one holder does not grow, all others copy.
    grown, block_mapping, _ = append(state, i32(0, 1, 0, 1))
    np.testing.assert_array_equal(block_mapping, [[-1, -1], [9, 8], [-1, -1], [9, 7]])
    np.testing.assert_array_equal(grown.ref_counts[7:], [1, 1, 1])


# All or nothing.

TOO_MUCH = {
    "blocks": (i32(8, 9), 5, 4),
    "columns": (i32(0, 13), 4, 4),
    "overflow": (i32(1, 2**31 - 1), 1 + 2**29, 4),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_out_of_blocks_changes_nothing(case):
    num_tokens, requested, free = TOO_MUCH[case]
    state = frozen(allocator.create(4, 4, 2, 3))
    with pytest.raises(allocator.OutOfBlocks, match=f"{requested} blocks requested, {free} free") as caught:
        allocator.append_tokens(state, num_tokens)
    assert (caught.value.requested, caught.value.free) == (requested, free)
    assert isinstance(caught.value, RuntimeError)
    assert ("sequence 1" in str(caught.value)) == (case != "blocks")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    after, block_mapping, ok = append_jit(on_device(state), num_tokens)
    assert not ok
    np.testing.assert_array_equal(block_mapping, -1)
    assert_same(after, state)


@both
def test_copies_count_as_requested_blocks(xp):
    append, fork, *_ = forms(xp)
    state, *_ = append(allocator.create(2, 4, 3, 2, xp=xp), i32(2, 0, 0))
    for child in (1, 2):
        state = fork(state, np.int32(0), np.int32(child))
    if xp is np:
        with pytest.raises(allocator.OutOfBlocks, match="2 blocks requested, 1 free"):
            append(state, i32(1, 1, 1))
    else:
        after, block_mapping, ok = append(state, i32(1, 1, 1))
        assert not ok
        assert_same(after, state)
        np.testing.assert_array_equal(block_mapping, -1)
    assert append(state, i32(1, 0, 0))[2]


def test_exactly_all_blocks_and_columns_fit():
    state, _, ok = allocator.append_tokens(allocator.create(6, 4, 2, 3), i32(12, 12))
    assert ok
    assert state.num_free == 0


def test_negative_counts():
    state = allocator.create(4, 4, 2, 3)
    with pytest.raises(ValueError, match="got -3 for sequence 1"):
        allocator.append_tokens(state, i32(1, -3))
    after, _, ok = append_jit(on_device(state), i32(1, -3))
    assert not ok
    assert_same(after, state)


@both
@pytest.mark.parametrize(
    "blocks", [(7, 7), (-1, 7), (7, -1, 6), (5,), (8,)], ids=["twice", "late", "gap", "free", "out of range"]
)
def test_what_cannot_be_adopted(xp, blocks):
    append, *_ = forms(xp)
    state, *_ = append(allocator.create(8, 4, 2, 4, xp=xp), i32(8, 0))
    if xp is np:
        with pytest.raises(ValueError, match="must be different, held, below 8, and end at the first negative one"):
            allocator.adopt(state, 1, blocks)
    else:
        after = adopt_jit(state, np.int32(1), i32(*blocks))
        assert after.bad_share
        assert_same(dataclasses.replace(after, bad_share=state.bad_share), state)


# Free.


@both
def test_freed_blocks_are_taken_again_from_the_highest_down(xp):
    append, _, free, *_ = forms(xp)
    state, *_ = append(allocator.create(8, 4, 3, 3, xp=xp), i32(8, 8, 8))
    state = free(state, np.array([True, False, True]))
    assert int(state.num_free) == 6
    np.testing.assert_array_equal(state.block_tables, [[-1] * 3, [5, 4, -1], [-1] * 3])
    np.testing.assert_array_equal(state.seq_lens, [0, 8, 0])
    state, *_ = append(state, i32(0, 0, 12))
    np.testing.assert_array_equal(state.block_tables[2], [7, 6, 3])


@both
def test_a_shared_block_is_free_after_its_last_holder(xp):
    append, fork, free, *_ = forms(xp)
    state, *_ = append(allocator.create(4, 4, 3, 2, xp=xp), i32(6, 0, 0))
    for child in (1, 2):
        state = fork(state, np.int32(0), np.int32(child))
    state = free(state, np.array([True, False, False]))
    assert int(state.num_free) == 2
    np.testing.assert_array_equal(state.ref_counts, [0, 0, 2, 2])
    state = free(state, np.array([True, True, True]))  # an empty row among them does no harm
    assert int(state.num_free) == 4
    assert_same(state, allocator.create(4, 4, 3, 2, xp=xp))


INVALID_FREES = {
    "free already": (i32(0), "block 0 has 0 references, cannot drop 1"),
    "too often": (i32(3, 2, 3), "block 3 has 1 references, cannot drop 2"),
    "just out of range": (i32(4), "block 4 is out of range"),
    "far out of range": (i32(2, 2**31 - 1, -1), "block 2147483647 is out of range"),
}


@pytest.mark.parametrize("case", INVALID_FREES)
def test_an_invalid_free_changes_nothing_and_is_told(case):
    blocks, message = INVALID_FREES[case]
    state = frozen(allocator.append_tokens(allocator.create(4, 4, 2, 3), i32(8, 0))[0])
    with pytest.raises(ValueError, match=message):
        allocator.free_blocks(state, blocks)
    after = free_blocks_jit(on_device(state), blocks)
    assert after.bad_free
    assert_same(dataclasses.replace(after, bad_free=state.bad_free), state)
    # The flag stays set, and later calls work.
    after = free_jit(after, np.array([True, False]))
    assert after.bad_free
    assert int(after.num_free) == 4


def test_free_of_a_sequence_whose_block_was_dropped_by_hand():
    state = frozen(allocator.append_tokens(allocator.create(4, 4, 2, 3), i32(8, 0))[0])
    state = frozen(allocator.free_blocks(state, i32(3, -1)))
    mask = np.array([True, False])
    with pytest.raises(ValueError, match="block 3 has 0 references"):
        allocator.free(state, mask)
    after = free_jit(on_device(state), mask)
    assert after.bad_free
    assert_same(dataclasses.replace(after, bad_free=state.bad_free), state)


# Fork, slots, create and arguments.


@pytest.mark.parametrize(("parent", "child"), [(0, 1), (0, 0), (0, 3), (3, 2), (-1, 2), (0, -1)])
def test_invalid_forks(parent, child):
    state = frozen(allocator.append_tokens(allocator.create(4, 4, 3, 3), i32(6, 1, 0))[0])
    with pytest.raises(ValueError, match=rf"an empty child, got {parent} and {child}$"):
        allocator.fork(state, parent, child)
    after = fork_jit(on_device(state), np.int32(parent), np.int32(child))
    assert after.bad_share
    assert_same(dataclasses.replace(after, bad_share=state.bad_share), state)


@both
def test_slots_of_what_is_not_there_are_negative(xp):
    append, *_, slots = forms(xp)
    state, *_ = append(allocator.create(4, 4, 2, 3, xp=xp), i32(6, 0))
    seq_ids = i32(0, 0, 0, 0, 1, -1, 2, 2**31 - 1)
    positions = i32(0, 5, 6, -1, 0, 0, 0, 2**31 - 1)
    np.testing.assert_array_equal(slots(state, seq_ids, positions), [12, 9, -1, -1, -1, -1, -1, -1])


def test_slots_reach_the_end_of_int32():
    state = allocator.create(2**20, 2**11, 1, 1)
    state, *_ = allocator.append_tokens(state, i32(2**11))
    assert allocator.slots(state, i32(0), i32(2**11 - 1)) == 2**31 - 1


def test_the_host_never_writes_to_the_state_it_was_given():
    # A write to a `frozen` array raises.
    state = frozen(allocator.append_tokens(allocator.create(16, 4, 4, 4), i32(6, 4, 0, 0))[0])
    before = jax.tree.map(np.copy, state)
    forked = frozen(allocator.fork(state, 0, 2))
    allocator.append_tokens(forked, i32(3, 1, 9, 0))
    allocator.append_tokens(forked, i32(0, 0, 0, 0))
    allocator.free(forked, np.array([True, False, True, False]))
    allocator.free_blocks(forked, i32(13))
    assert_same(state, before)


# Speed on the host.


def num_lines(function, *arguments):
    """How many lines of Python a call runs."""

    def trace(_frame, event, _value):
        nonlocal count
        count += event == "line"
        return trace

    count, before = 0, sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("takes_blocks", [False, True])
def test_a_host_decode_step_loops_over_no_sequences_and_blocks(takes_blocks):
    """A step of 256 sequences takes 100 us, because Python runs the lines of a step of two."""
    counts = []
    for num_seqs in (2, 256):
        one = np.ones(num_seqs, np.int32)
        state = allocator.create(100_000, 16, num_seqs, 400)
        state, *_ = allocator.append_tokens(state, one * (1008 if takes_blocks else 1000))
        grown, *_ = allocator.append_tokens(state, one)
        assert state.num_free - grown.num_free == takes_blocks * num_seqs
        mask = np.arange(num_seqs) == 1
        counts.append((num_lines(allocator.append_tokens, state, one), num_lines(allocator.free, state, mask)))
    assert counts[0] == counts[1]
    assert min(counts[0]) > 10


def test_freeing_no_blocks_changes_nothing():
    state = allocator.create(8, 4, 3, 4)
    assert allocator.free_blocks(state, []).num_free == state.num_free


FUNCTIONS = [function for _, function in inspect.getmembers(allocator, inspect.isfunction)]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_examples_of_the_docstrings_hold(function):
    examples = doctest.DocTestFinder(recurse=False).find(inspect.unwrap(function), globs={"allocator": allocator})
    assert sum(len(test.examples) for test in examples) > 1
    for test in examples:
        assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("xp", [np, jnp], ids=["host", "device"])
def test_blocks_come_from_one_shard_after_the_other(xp):
    state = allocator.create(12, 4, 2, 6, num_shards=3, xp=xp)
    state, _, _ = allocator.append_tokens(state, xp.array([24, 8], dtype=xp.int32))
    assert state.block_tables[0].tolist() == [11, 7, 3, 10, 6, 2]
    assert state.block_tables[1, :2].tolist() == [9, 5]
    with pytest.raises(ValueError, match="num_shards must divide num_blocks = 12, got 5"):
        allocator.create(12, 4, 2, 6, num_shards=5)
