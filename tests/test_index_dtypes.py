"""Tests which integers lengths, tables, slots and pairs may be."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from tests.every_op import ARRAYS, OPS, expected

INDICES = [name for name, x in ARRAYS.items() if np.issubdtype(x.dtype, np.integer)]


def call(op, **changes):
    names, options, static = OPS[op]
    arrays = ARRAYS | changes
    return getattr(paged_jax, op)(*(arrays[n] for n in names), **{n: arrays[n] for n in options}, **static)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("op", OPS)
def test_numpy_arrays_of_any_integer_dtype(op):
    results = call(op, **{name: ARRAYS[name].astype((np.int64, np.int16)[i % 2]) for i, name in enumerate(INDICES)})
    jax.tree.map(np.testing.assert_array_equal, results, call(op))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint16])
def test_arrays_of_jax_that_always_fit(dtype):
    narrow = {name: jnp.asarray(np.abs(ARRAYS[name]).astype(dtype)) for name in ("block_tables", "seq_lens")}
    results = jax.jit(lambda narrow: call("paged_attention", **narrow))(narrow)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), results, expected("paged_attention")
    )


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**63 - 1])
@pytest.mark.parametrize("name", ["block_tables", "seq_lens"])
def test_values_that_do_not_fit(name, value):
    wrong = ARRAYS[name].astype(np.int64)
    wrong.flat[1] = value
    with pytest.raises(ValueError, match=f"^{name} must fit in int32, got {value}$"):
        call("paged_attention", **{name: wrong})
    with pytest.raises(ValueError, match=f"^{name} must fit in int32, got {2**64 - 1}$"):
        call("paged_attention", **{name: np.full_like(wrong, 2**64 - 1, dtype=np.uint64)})


def test_wide_arrays_of_jax_say_how_to_convert_them():
    with jax.enable_x64(True):
        lens = jnp.asarray(ARRAYS["seq_lens"], jnp.int64)
        words = re.escape("seq_lens must have dtype int32, got int64: convert it by seq_lens.astype('int32')")
        with pytest.raises(TypeError, match=words):
            call("paged_attention", seq_lens=lens)
        call("paged_attention", seq_lens=lens.astype("int32"))


def test_floats_and_bools_are_no_indices():
    for dtype in (np.float32, np.bool_):
        with pytest.raises(TypeError, match="seq_lens must have dtype int32, got"):
            call("paged_attention", seq_lens=ARRAYS["seq_lens"].astype(dtype))
