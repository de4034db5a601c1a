"""Tests merge_attention_states: its algebra, edge cases, and attention with a shared prefix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from tests import inputs, oracle, plain
from tests.cases import Case

merge = jax.jit(paged_jax.merge_attention_states)


def states(seed, dtype=np.float32, shape=(3, 5)):
    """Draws a random `(out, lse)`, in which some rows are empty: out 0, lse -inf."""
    rng = np.random.default_rng(seed)
    out = rng.standard_normal((*shape, 8)).astype(dtype)
    lse = (4 * rng.standard_normal(shape)).astype(np.float32)
    empty = rng.random(shape) < 0.3
    lse[empty], out[empty] = -np.inf, 0
    return out, lse


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_against_the_oracle_with_empty_states_as_identity(dtype):
    a, b = states(0, inputs.dtype_of(dtype), (6, 5)), states(1, inputs.dtype_of(dtype), (6, 5))
    assert np.any(np.isinf(a[1]) & np.isinf(b[1]))
    assert np.any(np.isinf(a[1]) != np.isinf(b[1]))
    out, lse = map(np.asarray, merge(*a, *b))
    assert out.dtype == a[0].dtype
    assert lse.dtype == np.float32
    exact, rough = oracle.merge(*a, *b), plain.merge(*a, *b)
    plain.assert_close(out, exact[0], rough[0], "out")
    plain.assert_close(lse, exact[1], rough[1], "lse")
    swapped = merge(*b, *a)
    plain.assert_close(swapped[0], exact[0], rough[0], "out, exchanged")
    plain.assert_close(swapped[1], exact[1], rough[1], "lse, exchanged")
    zero = np.zeros_like(a[0]), np.full_like(a[1], -np.inf)
    for same in (merge(*a, *zero), merge(*zero, *a)):
        assert np.asarray(same[0]).tobytes() == a[0].tobytes()
        assert np.asarray(same[1]).tobytes() == a[1].tobytes()


def test_associative():
    a, b, c = states(2), states(3), states(4)
    left, right = merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c))
    np.testing.assert_allclose(left[0], right[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(left[1], right[1], rtol=1e-6, atol=1e-6)


def test_magnitudes_far_apart():
    a, b = states(5), states(6)
    for shift_a, shift_b in ((1e5, -1e5), (-1e5, 1e5), (1e5, 1e5), (-1e38, 1e38)):
        moved_a, moved_b = (a[0], a[1] + np.float32(shift_a)), (b[0], b[1] + np.float32(shift_b))
        out, lse = merge(*moved_a, *moved_b)
        exact, rough = oracle.merge(*moved_a, *moved_b), plain.merge(*moved_a, *moved_b)
        plain.assert_close(out, exact[0], rough[0], "out")
        plain.assert_close(lse, exact[1], rough[1], "lse")


def test_an_infinite_lse_says_that_there_are_no_tokens():
    (out, lse), empty = states(3, shape=(2, 3)), jnp.zeros((2, 3, 8))
    infinite = jnp.full((2, 3), jnp.inf)
    for one, other in (((out, lse), (empty, infinite)), ((empty, infinite), (out, lse))):
        merged, total = merge(*one, *other)
        np.testing.assert_array_equal(merged, out)
        np.testing.assert_allclose(total, lse, rtol=1e-6)
    merged, total = merge(empty, infinite, empty, -infinite)
    assert (merged == 0).all()
    assert (total == -jnp.inf).all()


@pytest.mark.parametrize("lse", [0.0, 1e2, 1e5, -1e5, 2e7, 1e38])
def test_weights_add_up_to_one(lse):
    """However large logits are: if each of two states is 1 alone, their merge is 1."""
    one, lses = jnp.ones((1, 3, 8)), jnp.float32(lse) + jnp.array([[0.0, 0.5, 3.0]])
    out, _ = merge(one, lses, one, jnp.full_like(lses, lse))
    np.testing.assert_allclose(out, 1, rtol=1e-6)


def test_weights_are_not_rounded_to_the_dtype_of_out():
    """Two opposite values almost cancel: if both weights were rounded to bfloat16, they would be 0.5, and out 0."""
    odds = np.log((0.5 + 2**-11) / (0.5 - 2**-11))
    one = jnp.ones((1, 1, 8), jnp.bfloat16)
    out, _ = paged_jax.merge_attention_states(one, jnp.full((1, 1), odds, jnp.float32), -one, jnp.zeros((1, 1)))
    np.testing.assert_allclose(out.astype(jnp.float32), 2**-10, rtol=1e-2)


def test_one_row_and_many_leading_axes():
    for shape in ((4,), (1, 1), (2, 3, 4)):
        a, b = states(7, shape=shape), states(8, shape=shape)
        out, lse = jax.jit(paged_jax.merge_attention_states)(*a, *b)
        exact, rough = oracle.merge(*a, *b), plain.merge(*a, *b)
        plain.assert_close(out, exact[0], rough[0], "out")
        plain.assert_close(lse, exact[1], rough[1], "lse")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sinks", [False, True])
def test_shared_prefix_is_two_calls_and_a_merge(sinks, run):
    case = Case("cascade", 8, 2, seq_lens=(70, 64, 90, 65), query_lens=None, shared_blocks=4, sinks=sinks)
    made = inputs.make(case)

    def cascade(arrays, options, implementation):
        common = arrays | {"return_lse": True, "implementation": implementation}
        tables = arrays["block_tables"]
        shared = common | {"block_tables": tables[:, :4], "seq_lens": jnp.full(4, 64, jnp.int32)}
        own = common | options | {"block_tables": tables[:, 4:], "seq_lens": arrays["seq_lens"] - 64}
        prefix = paged_jax.paged_attention_v2(**shared, partition_size=32)
        rest = paged_jax.paged_attention_v1(**own)
        return paged_jax.merge_attention_states(*prefix, *rest)

    out, lse = run(cascade, arrays=made.decode, options=made.arrays)
    # Row 1 has no tokens of its own: its second call is empty, and an empty call has no sink.
    options = made.arrays | made.static
    exact, rough = oracle.decode(**made.decode, **options), plain.decode(**made.decode, **options)
    keep = [0, 2, 3] if sinks else [0, 1, 2, 3]
    plain.assert_close(out[keep], exact[0][keep], rough[0][keep], "out")
    plain.assert_close(lse[keep], exact[1][keep], rough[1][keep], "lse")
