"""Tests that everything runs under each of JAX's debugging and numerics flags as it does without it.

`conftest.py` sets strict promotion of dtypes and ranks for all tests.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from examples.sampling import sample
from paged_jax import PagedKVCache, _dispatch, allocator
from paged_jax.engine.sampling import Kind, draw
from tests.every_op import ARRAYS, DECODE, OPS, bind
from tests.test_engine_parts import draws

# Together those that look at results; without jit a call of each kind is enough.
FLAGS = {"x64": ["jax_enable_x64"], "debug": ["jax_debug_nans", "jax_debug_infs"], "disable_jit": ["jax_disable_jit"]}
FLAGS["x64 and debug"] = FLAGS["x64"] + FLAGS["debug"]  # for calls of many ops, which compile for long
WITHOUT_JIT = "paged_attention_v2", "write_and_attend", "allocator"
LOGITS = np.array([[-np.inf, 10.0, 20.0, 3.0], [1.0, 2.0, 3.0, 4.0]], np.float32)


def without_infinities(op):
    """Makes the op a function of its arrays that returns no lse and no residuals, which empty rows make infinite."""
    return bind(op, **{name: False for name in OPS[op][2] if name.startswith("return_")})


def merged():
    out, lse = ARRAYS["query"], np.array([[1.0, 2.0, 3.0, 4.0], [2.0] * 4, [-np.inf] * 4], np.float32)
    return paged_jax.merge_attention_states, [jnp.asarray(x) for x in (out, lse, out[::-1], lse[::-1])]


def narrow(dtype):
    """Writing, attending and copying over a cache of 8 bits."""

    def steps(query, key, tables, lens, slots, pairs):
        sizes = {"num_blocks": 16, "block_size": 4, "num_kv_heads": 2, "head_size": 16, "dtype": dtype}
        cache = PagedKVCache.create(**sizes, k_scale=0.05, v_scale=jnp.array([0.1, 0.2], jnp.float32))
        cache = cache.write(key, key, slots).copy_blocks(pairs)
        out, cache = cache.write_and_attend(query, key[: len(query)], key[: len(query)], tables, lens, slots[:3])
        return out, cache.key_cache

    names = "query", "key", "block_tables", "seq_lens", "slot_mapping", "block_mapping"
    return steps, [jnp.asarray(ARRAYS[name]) for name in names]


def methods():
    def attend(query, tokens, key, value, key_cache, value_cache, tables, lens, starts, slots):
        cache = PagedKVCache(key_cache, value_cache)
        ragged = cache.attend_ragged(tokens, tables, lens, starts)
        prefix = cache.attend_prefix(tokens, key, value, tables, lens, starts)
        out, cache = cache.write_and_attend(query, key[:3], value[:3], tables, lens, slots)
        return ragged, prefix, out, cache.attend(query, tables, lens)

    names = "query", "tokens", "key", "value", *DECODE[1:], "query_start_loc", "last_slots"
    return attend, [jnp.asarray(ARRAYS[name]) for name in names]


def allocated():
    def steps(lens, mask):
        state = jax.tree.map(
            jnp.asarray, allocator.create(num_blocks=8, block_size=4, max_num_seqs=2, max_blocks_per_seq=4)
        )
        state, pairs, ok = allocator.append_tokens(state, lens)
        state = allocator.truncate(allocator.fork(state, 0, 1), jnp.array([4, 4], jnp.int32))
        return allocator.free(state, mask), pairs, ok

    return steps, [jnp.array([5, 0], jnp.int32), jnp.array([True, False])]


def drawn():
    how = draws(2, top_k=jnp.array([2, 0], jnp.int32), top_p=jnp.array([1.0, 0.7], jnp.float32))
    return lambda logits, how: draw(logits, how, Kind.RANDOM, 0), [jnp.asarray(LOGITS), how]


def sampled():
    def choose(logits, key):
        return sample(logits, jax.random.wrap_key_data(key), temperature=0.7, top_k=3, top_p=0.9)

    return choose, [jnp.asarray(LOGITS), jax.random.key_data(jax.random.key(0))]


CALLS = {
    **{op: functools.partial(without_infinities, op) for op in OPS},
    "merge_attention_states": merged,
    "PagedKVCache": methods,
    **{dtype: functools.partial(narrow, dtype) for dtype in ("int8", "float8_e4m3fn")},
    "allocator": allocated,
    "draw": drawn,
    "sample": sampled,
}


@contextlib.contextmanager
def flagged(flags):
    _dispatch._bind.cache_clear()
    before = {flag: getattr(jax.config, flag) for flag in flags}
    for flag in flags:
        jax.config.update(flag, True)
    try:
        yield
    finally:
        for flag, value in before.items():
            jax.config.update(flag, value)
        _dispatch._bind.cache_clear()


def is_op(name):
    """Whether a call is of one op, which also runs without jit around it; the others are of many."""
    return name in OPS or name == "merge_attention_states"


@functools.cache
def call_of(name):
    """A call's function and arrays, and what it returns without a flag: of an op without jit around it."""
    function, arrays = CALLS[name]()
    run = function if is_op(name) else jax.jit(function)
    return function, arrays, jax.tree.map(np.asarray, run(*arrays))


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("name", "flag"),
    [
        (name, flag)
        for name in CALLS
        for flag in FLAGS
        if (name in WITHOUT_JIT if flag == "disable_jit" else is_op(name) == (flag != "x64 and debug"))
        and (name, flag) != ("paged_attention", "debug")  # which is v1 here
    ],
)
def test_everything_runs_under_every_flag(name, flag):
    """Under the flags that look at results an op runs without jit around it, so that JAX checks each program's.

    In 64 bits most ops are only traced: what may differ there are dtypes, with which nothing would be traced.
    """
    function, arrays, wanted = call_of(name)
    # A function of its own, since `jit` knows the other one, and of its name, with which programs are kept.
    again = functools.wraps(function)(lambda *arrays: function(*arrays))
    run = function if is_op(name) and flag != "x64" else jax.jit(again)
    with flagged(FLAGS[flag]):
        if flag == "x64" and name in OPS and name not in WITHOUT_JIT:
            found = [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(run, *arrays))]
            assert found == [(x.shape, x.dtype) for x in jax.tree.leaves(wanted)]
            return
        results = jax.tree.map(np.asarray, run(*arrays))
    for actual, expected in zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(actual.astype(np.float64), expected.astype(np.float64), rtol=1e-5, atol=1e-6)
