"""Tests the allocator inside JAX's transformations: loops, vmap, one compilation; it has no loops or callbacks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import allocator
from tests.test_allocator import append_jit, assert_same, fork_jit, free_jit, i32, on_device


def test_a_decode_loop_runs_inside_while_loop_and_scan():
    """One sequence grows until the pool is empty, is freed, and grows again; the host form does the same."""
    state = allocator.create(6, 4, 2, 4)

    def step(state):
        grown, _, ok = allocator.append_tokens(state, jnp.array([1, 3], jnp.int32))
        return jax.lax.cond(ok, lambda: grown, lambda: allocator.free(state, jnp.array([False, True])))

    expected = state
    for _ in range(9):
        try:
            expected, *_ = allocator.append_tokens(expected, i32(1, 3))
        except allocator.OutOfBlocks:
            expected = allocator.free(expected, np.array([False, True]))
    device = on_device(state)
    assert_same(jax.lax.scan(lambda s, _: (step(s), None), device, length=9)[0], expected)
    start = (jnp.int32(0), device)
    looped = jax.jit(lambda c: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, step(c[1])), c))(start)
    assert_same(looped[1], expected)


def test_vmap_runs_pools_side_by_side():
    counts = np.array([[5, 0, 2], [1, 1, 9], [12, 12, 12]], np.int32)
    states = [allocator.create(6, 4, 3, 3, xp=jnp) for _ in counts]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    together = jax.jit(jax.vmap(allocator.append_tokens))(stacked, counts)
    for i, (state, num_tokens) in enumerate(zip(states, counts, strict=True)):
        alone = append_jit(state, num_tokens)
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], together), alone)


def test_fixed_shapes_compile_once():
    traces = []

    @jax.jit
    def append(state, num_tokens):
        traces.append(num_tokens.shape)
        return allocator.append_tokens(state, num_tokens)

    state = allocator.create(14, 4, 5, 5, xp=jnp)
    for num_tokens in range(4):
        state, *_ = append(state, np.full(5, num_tokens, np.int32))
    assert traces == [(5,)]


def primitives(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


def test_traced_forms_hold_no_loops_and_no_callbacks():
    state = allocator.create(64, 4, 8, 4, xp=jnp)
    row, rows, mask = jnp.int32(0), jnp.zeros(8, jnp.int32), jnp.zeros(8, jnp.bool_)
    sizes = {}
    by_row = functools.partial(allocator.append_tokens, row_by_row=True)
    for function, args in {
        allocator.append_tokens: (rows,),
        by_row: (rows,),
        allocator.truncate: (rows,),
        allocator.fork: (row, row),
        allocator.share: (row, row, row),
        allocator.adopt: (row, rows[:4]),
        allocator.retain: (rows,),
        allocator.free: (mask,),
        allocator.free_blocks: (rows,),
        allocator.slots: (rows, rows),
    }.items():
        names = list(primitives(jax.make_jaxpr(function)(state, *args).jaxpr))
        assert {"while", "scan", "cond", "pure_callback", "io_callback", "debug_callback"}.isdisjoint(names)
        sizes[function] = len(names)
    # The program is not unrolled over the sequences.
    state, rows = allocator.create(64, 4, 80, 4, xp=jnp), jnp.zeros(80, jnp.int32)
    for function in (allocator.append_tokens, by_row, allocator.truncate):
        assert len(list(primitives(jax.make_jaxpr(function)(state, rows).jaxpr))) == sizes[function]


def test_int64_mode_changes_nothing():
    state = allocator.append_tokens(allocator.create(8, 4, 3, 3), i32(6, 4, 0))[0]
    expected = allocator.free(
        allocator.append_tokens(allocator.fork(state, 0, 2), i32(1, 0, 2))[0], [True, False, False]
    )
    with jax.enable_x64(True):
        device = on_device(state)
        device, *_ = append_jit(fork_jit(device, np.int32(0), np.int32(2)), i32(1, 0, 2))
        assert_same(free_jit(device, np.array([True, False, False])), expected)
