"""Tests edges of the block allocator: block 0, the largest tables, flags that stay, negative rows and positions."""

import dataclasses
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import allocator
from tests.test_allocator import (
    adopt_jit,
    append_jit,
    both,
    free_jit,
    i32,
    release_before_jit,
    retain_jit,
    slots_jit,
    truncate_jit,
)


@both
def test_block_0_is_a_block_like_any_other(xp):
    retain, adopt = (allocator.retain, allocator.adopt) if xp is np else (retain_jit, adopt_jit)
    state = allocator.create(1, 4, 2, 2, xp=xp)
    state, *_ = allocator.append_tokens(state, [4, 0])
    state = adopt(retain(state, i32(0)), i32(1)[0], i32(0))
    assert not state.bad_share
    assert state.ref_counts.tolist() == [3]
    assert state.block_tables.tolist() == [[0, -1], [0, -1]]
    state = (allocator.free if xp is np else free_jit)(state, np.array([True, True]))
    assert state.ref_counts.tolist() == [1]
    state = (allocator.free_blocks if xp is np else jax.jit(allocator.free_blocks))(state, i32(0))
    assert (int(state.num_free), bool(state.bad_free)) == (1, False)


@both
def test_sequences_may_release_few_and_many_blocks_at_once(xp):
    """One row has nothing before its last held entry, and the other one has many."""
    release = allocator.release_before if xp is np else release_before_jit
    state = (allocator.append_tokens if xp is np else append_jit)(allocator.create(32, 4, 2, 10, xp=xp), i32(40, 40))[0]
    for positions, num_released in [((0, 20), (0, 5)), ((36, 24), (9, 6)), ((37, 40), (9, 10))]:
        state = release(state, i32(*positions))
        held = np.asarray(state.block_tables) >= 0
        np.testing.assert_array_equal(held, np.arange(10) >= np.array(num_released)[:, None])
        assert int(state.num_free) == 32 - held.sum()


@both
def test_a_table_that_could_hold_more_tokens_than_int32_counts(xp):
    """Its row has columns for 2**31 tokens; the largest length is 2**31 - 1."""
    append = allocator.append_tokens if xp is np else append_jit
    state = allocator.create(2**11, 2**20, 1, 2**11, xp=xp)
    state, _, ok = append(state, i32(2**31 - 2))
    assert ok
    state, _, ok = append(state, i32(1))
    assert ok
    assert state.seq_lens.tolist() == [2**31 - 1]
    assert int(state.num_free) == 0
    if xp is np:
        with pytest.raises(allocator.OutOfBlocks):
            append(state, i32(1))
    else:
        after, _, ok = append(state, i32(1))
        assert not ok
        assert after.seq_lens.tolist() == [2**31 - 1]


@pytest.mark.parametrize(
    ("flag", "wrong", "right"),
    [
        ("bad_free", lambda s: truncate_jit(s, i32(1, 9)), lambda s: free_jit(s, np.zeros(2, np.bool_))),
        ("bad_free", jax.jit(lambda s: allocator.free_blocks(s, [7, 99])), lambda s: truncate_jit(s, i32(0, 0))),
        ("bad_share", lambda s: retain_jit(s, i32(7, 99)), lambda s: retain_jit(s, i32(-1))),
        ("bad_share", lambda s: adopt_jit(s, i32(1)[0], i32(7, 99)), lambda s: adopt_jit(s, i32(1)[0], i32(7))),
    ],
    ids=["truncate", "free_blocks", "retain", "adopt"],
)
def test_a_mistake_only_sets_a_flag_that_stays_whatever_comes_next(flag, wrong, right):
    state = append_jit(allocator.create(8, 4, 2, 2, xp=jnp), i32(4, 0))[0]
    assert not getattr(right(state), flag)
    once = wrong(state)
    assert getattr(once, flag)
    jax.tree.map(np.testing.assert_array_equal, dataclasses.replace(once, **{flag: getattr(state, flag)}), state)
    assert getattr(wrong(once), flag)
    assert getattr(right(once), flag)


def test_traced_integers_of_64_bits_keep_their_values_or_name_nothing():
    state = append_jit(allocator.create(8, 4, 2, 4, xp=jnp), i32(6, 0))[0]
    with jax.enable_x64(True):
        wide = jnp.array([3, 1])
        assert wide.dtype == jnp.int64
        after, _, ok = append_jit(state, wide)
        found = jax.jit(allocator.slots)(after, jnp.array([0, 1, 1]), jnp.array([8, 0, -3]))
        far = jax.jit(allocator.slots)(after, jnp.array([0, 1, 2**32]), jnp.array([8 + 2**32, -(2**32), 0]))
    assert ok
    assert far.tolist() == [-1, -1, -1], "they do not wrap around at 32 bits"
    assert after.seq_lens.tolist() == [9, 1]
    assert found.tolist() == [int(after.block_tables[0, 2]) * 4, int(after.block_tables[1, 0]) * 4, -1]


@both
def test_negative_rows_and_positions_do_not_count_from_the_end(xp):
    slots = allocator.slots if xp is np else slots_jit
    state = allocator.append_tokens(allocator.create(8, 4, 2, 1, xp=xp), i32(4, 3))[0]
    assert slots(state, i32(-1, 1), i32(0, 0)).tolist() == [-1, int(state.block_tables[1, 0]) * 4]
    assert slots(state, i32(0, 0), i32(-1, 0)).tolist() == [-1, int(state.block_tables[0, 0]) * 4]
    alone = allocator.append_tokens(allocator.create(8, 4, 1, 1, xp=xp), i32(4))[0]
    assert slots(alone, i32(-1, 1), i32(0, 0)).tolist() == [-1, -1]


def test_the_error_names_the_sequence_that_outgrows_its_table():
    state = allocator.create(8, 4, 2, 3)
    message = "sequence 1 would hold 4 blocks, its table row has 3 columns"
    with pytest.raises(allocator.OutOfBlocks, match=f"5 blocks requested, 8 free; {message}"):
        allocator.append_tokens(state, [4, 13])
    with pytest.raises(allocator.OutOfBlocks, match=r"^4 blocks requested, 3 free$"):  # the table has room
        allocator.append_tokens(allocator.create(3, 4, 2, 3), [8, 5])


def test_a_block_past_a_pool_of_one_block_is_refused_in_words():
    state = allocator.create(1, 4, 1, 1)
    with pytest.raises(ValueError, match="5"):
        allocator.retain(state, [5])


def test_a_state_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        allocator.create(1, 4, 1, 1).num_free = 0


def test_adopting_many_blocks_takes_little_memory():
    """A row of 8,192 blocks: comparing each with each would take 64 MiB."""
    count = 8192
    state, *_ = allocator.append_tokens(allocator.create(count, 1, 2, count), [count, 0])
    blocks = state.block_tables[0].copy()
    tracemalloc.start()
    state = allocator.adopt(state, 1, blocks)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert state.seq_lens.tolist() == [count, count]
    assert peak < 2**20


def test_a_donated_state_gives_the_same_states():
    """The same calls with and without `donate`: without it the old state stays as it was."""
    kept = allocator.create(20, 4, 4, 6)
    donated = allocator.create(20, 4, 4, 6)
    calls = [
        (allocator.append_tokens, ([9, 0, 5, 0],)),
        (allocator.fork, (0, 1)),
        (allocator.append_tokens, ([2, 3, 0, 0],)),
        (allocator.retain, ([19, 18],)),
        (allocator.truncate, ([9, 12, 1, 0],)),
        (allocator.free, ([True, False, False, False],)),
        (allocator.share, (1, 3, 2)),
        (allocator.adopt, (0, [19, 18])),
        (allocator.free, ([False, True, True, True],)),
        (allocator.free_blocks, ([19, 18],)),
    ]
    for call, arguments in calls:
        before = jax.tree.map(np.copy, kept)
        after = call(kept, *arguments)
        donated = call(donated, *arguments, donate=True)
        after, donated = (found[0] if isinstance(found, tuple) else found for found in (after, donated))
        jax.tree.map(np.testing.assert_array_equal, kept, before)
        jax.tree.map(np.testing.assert_array_equal, after, donated)
        kept = after
    assert donated.num_free == 18
    table, counts = donated.block_tables, donated.ref_counts
    again, *_ = allocator.append_tokens(donated, [0, 4, 0, 0], donate=True)
    assert again.block_tables is table
    assert again.ref_counts is counts
    with pytest.raises(allocator.OutOfBlocks):
        allocator.append_tokens(again, [0, 4, 90, 0], donate=True)
    assert int(again.num_free) == 17, "a call that raises changes nothing"


@both
def test_what_never_fits_needs_more_blocks_than_the_pool_has(xp):
    count = allocator.count_new_blocks if xp is np else jax.jit(allocator.count_new_blocks)
    state = allocator.create(4, 4, 2, 2, xp=xp)
    found = [int(count(state, i32(*tokens))) for tokens in ((8, 8), (9, 0), (0, -1), (-1, 9))]
    assert found == [4, 5, 5, 5]


def test_the_arrays_of_a_device_are_not_written_to():
    """They are read-only on the host, so that a donated state is copied."""
    state = jax.device_get(append_jit(allocator.create(8, 4, 2, 4, xp=jnp), i32(9, 0))[0])
    assert not state.ref_counts.flags.writeable
    before = jax.tree.map(np.copy, state)
    for call, *arguments in (
        (allocator.append_tokens, [1, 5]),
        (allocator.fork, 0, 1),
        (allocator.retain, [7]),
        (allocator.release_before, [8, 0]),
        (allocator.truncate, [4, 0]),
        (allocator.free, [True, False]),
    ):
        call(state, *arguments, donate=True)
        jax.tree.map(np.testing.assert_array_equal, state, before)


@both
def test_a_sequence_may_end_right_behind_what_it_has_released(xp):
    release, truncate = (
        (allocator.release_before, allocator.truncate) if xp is np else (release_before_jit, truncate_jit)
    )
    state, *_ = allocator.append_tokens(allocator.create(8, 4, 1, 4, xp=xp), i32(10))
    state = truncate(release(state, i32(8)), i32(8))
    assert (state.seq_lens.tolist(), int(state.num_free), bool(state.bad_free)) == ([8], 8, False)
    if xp is jnp:
        assert truncate(state, i32(7)).bad_free
