"""Tests growth row by row: rows in order get their tokens while blocks and columns last."""

import inspect
from functools import partial

import numpy as np
import pytest

from paged_jax import allocator
from tests.test_allocator import append_rows_jit, both, forms, i32


def append_rows(xp):
    return partial(allocator.append_tokens, row_by_row=True) if xp is np else append_rows_jit


@pytest.mark.parametrize("flag", ["no", 1, np.array([True, False, True])], ids=["words", "number", "mask"])
def test_row_by_row_is_a_static_bool(flag):
    state = allocator.create(8, 4, 3, 4)
    unhooked = inspect.unwrap(allocator.append_tokens)  # the tests' hook has words of its own
    with pytest.raises(TypeError, match=f"row_by_row must be a static bool, got {type(flag).__name__}"):
        unhooked(state, [1, 1, 1], row_by_row=flag)


@both
def test_row_by_row_who_keeps_a_shared_block_waits_for_those_who_copy_it(xp):
    append, fork, *_ = forms(xp)
    state, *_ = append(allocator.create(2, 4, 4, 2, xp=xp), i32(3, 0, 0, 3))
    state = fork(state, np.int32(0), np.int32(1))
    after, block_mapping, ok = append_rows(xp)(state, i32(1, 1, 0, 1))  # a copy for row 0, and row 1 could keep
    np.testing.assert_array_equal(ok, [False, False, True, True])
    np.testing.assert_array_equal(after.seq_lens, [3, 3, 0, 4])
    np.testing.assert_array_equal(block_mapping, -1)


@both
def test_row_by_row_a_sequence_at_its_tables_end_takes_nothing_from_the_others(xp):
    append, *_ = forms(xp)
    state, *_ = append(allocator.create(4, 4, 4, 2, xp=xp), i32(8, 0, 4, 0))
    num_tokens = i32(2**31 - 1, 1, 4, 0)
    after, _, ok = append_rows(xp)(state, num_tokens)  # one block is left: row 1 takes it, row 2 comes too late
    np.testing.assert_array_equal(ok, [False, True, False, True])
    np.testing.assert_array_equal(after.seq_lens, [8, 1, 4, 0])
    if xp is np:
        with pytest.raises(ValueError, match="got -1 for sequence 1"):
            append_rows(xp)(state, i32(0, -1, 0, 0))
    else:
        np.testing.assert_array_equal(append_rows(xp)(state, i32(1, -1, 4, 0))[2], [False, False, True, True])


@both
def test_row_by_row_nobody_overtakes_a_sequence_that_waits_for_blocks(xp):
    append, *_ = forms(xp)
    state, *_ = append(allocator.create(3, 4, 3, 3, xp=xp), i32(0, 4, 2))
    after, _, ok = append_rows(xp)(state, i32(8, 1, 1))  # row 0 wants two blocks of one, row 1 wants one
    np.testing.assert_array_equal(ok, [False, False, True])
    np.testing.assert_array_equal(after.seq_lens, [0, 4, 3])
