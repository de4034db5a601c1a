"""Tests the arguments of the allocator's functions: counts and ids of any form and width, for both forms of state."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import allocator
from tests.test_allocator import assert_same, both, i32, on_device

create_unchecked = inspect.unwrap(allocator.create)  # without the run-time check of annotations, which users lack too


def is_host(state):
    return all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(state))


def walk(state, make):
    """Calls every function once, with arguments that `make` makes of lists."""
    grow, ids = make([6, 9, 0, 0]), make([6])
    state, block_mapping, ok = allocator.append_tokens(state, grow)
    state = allocator.fork(state, make(0), make(2))
    state = allocator.share(state, make(1), make(3), make(2))
    state, *_ = allocator.append_tokens(state, make([0, 0, 1, 4]), row_by_row=True)
    state = allocator.retain(state, ids)
    state = allocator.truncate(state, make([6, 5, 3, 8]))
    state = allocator.free_blocks(state, ids)
    state = allocator.free(state, make([False, False, True, False]))
    state = allocator.adopt(state, make(2), make([7, 6]))
    return state, block_mapping, ok, allocator.slots(state, make([0, 3, -1]), make([5, 7, 0]))


FORMS = {
    "list": lambda x: x,
    "tuple": lambda x: tuple(x) if isinstance(x, list) else x,
    "int64": np.asarray,
    "uint8 or bool": lambda x: np.asarray(x).astype(np.int8) if np.asarray(x).dtype != bool else np.asarray(x),
    "jax": jnp.asarray,
    "list of jax": lambda x: [jnp.asarray(value) for value in x] if isinstance(x, list) else jnp.asarray(x),
}


@pytest.mark.sampled(4)
@both
@pytest.mark.parametrize("form", FORMS)
def test_counts_and_ids_of_any_form_do_the_same_and_keep_the_states_form(xp, form):
    expected = walk(allocator.create(8, 4, 4, 4), np.asarray)
    results = walk(allocator.create(8, 4, 4, 4, xp=xp), FORMS[form])
    assert_same(results, expected)
    assert is_host(results) == (xp is np)


@pytest.mark.slow_on_cpu
def test_a_host_state_that_a_jitted_function_closes_over_becomes_a_traced_one():
    state = allocator.create(8, 4, 4, 4)
    expected = walk(state, np.asarray)
    assert_same(
        jax.jit(lambda zero: walk(state, lambda x: jnp.asarray(x) | zero.astype(jnp.asarray(x).dtype)))(jnp.int32(0)),
        expected,
    )
    # Every function is called by itself, since any of its arguments may be the traced one.
    grown, *_ = allocator.append_tokens(state, i32(6, 9, 0, 0))
    one, mask = np.int32(1), np.array([True, False, False, False])
    calls = {
        "append_tokens": (i32(1, 1, 1, 1),),
        "truncate": (i32(4, 4, 0, 0),),
        "fork": (one, np.int32(2)),
        "share": (one, np.int32(2), one),
        "adopt": (np.int32(2), i32(7, 6)),
        "retain": (i32(7),),
        "free": (mask,),
        "free_blocks": (i32(7),),
        "slots": (i32(0, 1), i32(0, 1)),
    }
    for name, arguments in calls.items():
        function = getattr(allocator, name)
        for i in range(len(arguments)):

            def traced(x, i=i, function=function, arguments=arguments):
                return function(grown, *arguments[:i], x, *arguments[i + 1 :])

            assert_same(jax.jit(traced)(arguments[i]), function(grown, *arguments))


def test_a_list_of_tracers_is_taken():
    state = allocator.create(8, 4, 2, 4)
    grown = jax.jit(lambda n: allocator.append_tokens(state, [n, n + 1])[0])(jnp.int32(3))
    assert_same(grown, allocator.append_tokens(state, [3, 4])[0])


FITTING = {"the smallest": -(2**31), "the largest": 2**31 - 1}
UNFITTING = {"-2**63": -(2**63), "-2**31 - 1": -(2**31) - 1, "2**31": 2**31, "2**63 - 1": 2**63 - 1}


@both
def test_integers_of_64_bits_that_fit_are_taken(xp):
    state = allocator.create(8, 4, 2, 4, xp=xp)
    for value in FITTING.values():
        np.testing.assert_array_equal(allocator.slots(state, np.array([0]), np.array([value])), -1)
    assert_same(allocator.free_blocks(state, np.array([-(2**31)])), state)


@both
@pytest.mark.parametrize("value", UNFITTING.values(), ids=UNFITTING)
def test_integers_that_do_not_fit_are_refused_whatever_their_sign(xp, value):
    state = allocator.create(8, 4, 2, 4, xp=xp)
    with pytest.raises(ValueError, match=f"num_tokens must fit in int32, got {value}$"):
        allocator.append_tokens(state, np.array([0, value]))
    with pytest.raises(ValueError, match=f"positions must fit in int32, got {value}$"):
        allocator.slots(state, [0, 0], [0, value])
    with pytest.raises(ValueError, match=r"positions must fit in int32, got 18446744073709551615$"):
        allocator.slots(state, [0, 0], np.array([0, 2**64 - 1], np.uint64))


@both
@pytest.mark.parametrize("value", UNFITTING.values(), ids=UNFITTING)
def test_concrete_jax_integers_that_do_not_fit_are_refused(xp, value):
    state = allocator.create(8, 4, 2, 4, xp=xp)
    with jax.enable_x64(True):
        wide = jnp.array([0, value])
        assert wide.dtype == jnp.int64
        with pytest.raises(ValueError, match=f"num_tokens must fit in int32, got {value}$"):
            allocator.append_tokens(state, wide)
        with pytest.raises(ValueError, match=f"parent must fit in int32, got {value}$"):
            allocator.fork(state, wide[1], 1)


@pytest.mark.parametrize("value", [2**32 + 1, 2**32, 2**31, 2**63 - 1])
def test_traced_integers_that_do_not_fit_are_not_wrapped(value):
    """If they wrapped around, they would be 1, 0 or negative, and have an effect."""
    state = allocator.append_tokens(allocator.create(8, 4, 2, 4, xp=jnp), i32(4, 0))[0]
    with jax.enable_x64(True):
        wide = jnp.array([value])
        assert jax.jit(allocator.free_blocks)(state, wide).bad_free
        assert jax.jit(allocator.retain)(state, wide).bad_share
        assert jax.jit(allocator.fork)(state, jnp.int32(0), wide[0]).bad_share
        after, _, ok = jax.jit(allocator.append_tokens)(state, jnp.array([0, value]))
        assert not ok
        assert_same(after, state)
        np.testing.assert_array_equal(jax.jit(allocator.slots)(state, jnp.array([0]), wide), -1)


@both
def test_what_is_no_integer_is_refused(xp):
    state = allocator.create(8, 4, 2, 4, xp=xp)
    for wrong in ([1.0, 2.0], np.ones(2, np.float32), jnp.ones(2), [True, False], ["1", "2"]):
        with pytest.raises(TypeError, match="num_tokens must be of dtype int32, got "):
            allocator.append_tokens(state, wrong)
    assert is_host(on_device(state)) is False


@pytest.mark.parametrize("sizes", [(0, 4, 2, 3), (4, 0, 2, 3), (4, 4, 0, 3), (4, 4, 2, 0), (2**20, 2**12, 1, 1)])
def test_create_refuses(sizes):
    with pytest.raises(ValueError, match="must be"):
        allocator.create(*sizes)


@both
def test_sizes_become_ints_of_python(xp):
    """NumPy's integers would make the host's slots int64, and integers of few bits would wrap around."""
    state = create_unchecked(*np.array([8, 64, 2, 4], np.int8), xp=xp)
    assert type(state.block_size) is int
    assert_same(state, allocator.create(8, 64, 2, 4))
    state, *_ = allocator.append_tokens(state, i32(200, 0))
    slots = allocator.slots(state, i32(0, 0), i32(199, 200))
    assert_same(slots, i32(4 * 64 + 199 % 64, -1))
    with pytest.raises(ValueError, match=r"num_blocks \* block_size must be at most 2\*\*31"):
        create_unchecked(np.int32(2**24), np.int32(256), 1, 1, xp=xp)


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_num_seqs", "max_blocks_per_seq"])
def test_sizes_are_integers(name):
    sizes = {"num_blocks": 4, "block_size": 4, "max_num_seqs": 2, "max_blocks_per_seq": 3}
    with pytest.raises(TypeError, match=rf"{name} must be an int, got [\d.]+$"):
        create_unchecked(**sizes | {name: 4.0})


def stack_and_pick(state):
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), state, state)
    return jax.tree.map(lambda leaf: leaf[0], stacked)


def add_nothing(state):
    return jax.tree.map(lambda leaf: leaf + leaf.dtype.type(0), state)


SCALARS = {"picked": stack_and_pick, "summed": add_nothing}


@pytest.mark.parametrize("form", SCALARS)
def test_a_host_state_stays_one_if_its_leaves_are_scalars_of_numpy(form):
    """NumPy turns arrays of no axes into scalars. If that made a state one of JAX, the host's errors would not come."""
    state = SCALARS[form](allocator.create(8, 4, 4, 4))
    assert not isinstance(state.num_free, np.ndarray)
    results = walk(state, np.asarray)
    assert is_host(results)
    assert_same(results, walk(allocator.create(8, 4, 4, 4), np.asarray))
    with pytest.raises(allocator.OutOfBlocks):
        allocator.append_tokens(state, [99, 0, 0, 0])
    with pytest.raises(ValueError, match="num_tokens must not be negative"):
        allocator.append_tokens(state, [-1, 0, 0, 0])


@both
def test_wrong_arguments(xp):
    state = allocator.create(4, 4, 2, 3, xp=xp)
    with pytest.raises(ValueError, match=r"num_tokens must have shape \(2,\), got \(3,\)"):
        allocator.append_tokens(state, i32(1, 1, 1))
    with pytest.raises(TypeError, match="num_tokens must be of dtype int32, got float32"):
        allocator.append_tokens(state, np.ones(2, np.float32))
    with pytest.raises(TypeError, match="seq_ids_mask must be of dtype bool, got int32"):
        allocator.free(state, i32(1, 0))
    with pytest.raises(ValueError, match=r"blocks must have shape \(n,\), got \(1, 2\)"):
        allocator.free_blocks(state, i32(1, 0)[None, :])
    with pytest.raises(ValueError, match=r"positions must have shape \(2,\), got \(1,\)"):
        allocator.slots(state, i32(1, 0), i32(1))


@both
def test_lists_and_other_integers_are_taken_as_int32(xp):
    state = allocator.create(4, 4, 2, 3, xp=xp)
    expected, *_ = allocator.append_tokens(state, i32(5, 1))
    for num_tokens in ([5, 1], np.array([5, 1], np.uint8), np.array([5, 1], np.int64)):
        assert_same(allocator.append_tokens(state, num_tokens)[0], expected)


@pytest.mark.parametrize("xp", [np, jnp])
def test_integers_that_do_not_fit_are_refused(xp):
    """If they wrapped around at 32 bits, they would name other blocks, rows or tokens."""
    state = allocator.create(8, 4, 3, 4, xp=xp)
    with pytest.raises(ValueError, match="blocks must fit in int32, got 4294967303"):
        allocator.free_blocks(state, np.array([2**32 + 7]))
    with pytest.raises(ValueError, match="num_tokens must fit in int32, got 4294967297"):
        allocator.append_tokens(state, np.array([2**32 + 1, 0, 0]))
    with pytest.raises(ValueError, match="positions must fit in int32"):
        allocator.slots(state, np.array([0], np.int32), np.array([2**32 + 1]))
    with pytest.raises(ValueError, match="parent must fit in int32"):
        allocator.fork(state, np.int64(2**32), 2)
