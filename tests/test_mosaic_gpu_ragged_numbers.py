"""Tests numbers that the ragged Mosaic GPU kernel could lose when it multiplies in float16, or converts 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

import paged_jax
from paged_jax import _validate
from paged_jax.kernels.mosaic_gpu.ragged import call as ragged
from tests import inputs, oracle, plain
from tests.ragged_interpreter import call
from tests.test_mosaic_gpu_ragged import (
    SHORT,
    SLOTS,
    TINY_TILES,
    check,
    check_prefix,
    operands_of,
    prefix_operands_of,
    small,
)

# NumPy gives this warning when arithmetic meets the poison, which is NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def of_any_size(case):
    """Makes inputs whose queries are about 2 ** -90 or 2 ** 60, with a scale of keys that keeps logits finite.

    The last query and the padding are not finite. Returns the inputs, and which rows to compare.
    """
    made = inputs.make(case)
    query = made.ragged["query"]
    size = np.where(np.arange(len(query)) % 3 == 1, 2.0**-90, 2.0**60)[:, None, None]
    query = np.asarray(query.astype(np.float32) * size, query.dtype)
    query[made.num_rows - 1, 0] = np.nan
    query[made.num_rows - 1 :, 1] = np.inf
    query[made.num_rows :, 0] = np.nan
    made.ragged["query"], made.arrays["k_scale"] = query, np.float32(2.0**-60)
    return made, np.arange(len(query)) != made.num_rows - 1


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("implementation", ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_queries_of_any_size_over_8_bits(implementation):
    """The kernel multiplies in float16, which holds none of these queries. No row changes another row's result."""
    lens = {"seq_lens": (37, 0, 70), "query_lens": (1, 0, 20)}
    case = small("any-size", 2, 1, 64, 16, "bfloat16", "float8_e4m3fn", k_scale="scalar", **lens)
    made, ordinary = of_any_size(case)
    operands = operands_of(case, made)
    if implementation == "gpu":
        out, lse = jax.jit(ragged.ragged_paged_attention)(*jax.device_put(operands, jax.devices("gpu")[0]))
    else:
        out, lse = call("ragged_paged_attention", operands, **TINY_TILES)
        assert not interpret_pallas_call.get_races().races_found
    exact, rough = (module.ragged(**made.ragged, **made.arrays, **made.static) for module in (oracle, plain))
    for actual, wanted, yardstick in zip((out, lse), exact, rough, strict=True):
        plain.assert_close(np.asarray(actual)[ordinary], wanted[ordinary], yardstick[ordinary], "any size")


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize(
    ("dtypes", "implementation"),
    [
        (("bfloat16", "float8_e4m3fn"), "interpreter"),
        pytest.param(("bfloat16", "float8_e4m3fn"), "gpu", marks=pytest.mark.gpu),
        pytest.param(("float16", "float16"), "gpu", marks=pytest.mark.gpu),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_many_small_weights(dtypes, implementation):
    """The result is the sum of 199 weights of exp(-18), too small for float16. The other token's value is 0."""
    query, keys, values = np.zeros((1, 1, 64)), np.zeros((13, 1, 16, 64)), np.ones((13, 1, 16, 64))
    query[..., 0] = keys[0, 0, 0, 0] = 12  # a logit of 18, as the scale is 1 / 8
    values[0, 0, 0] = 0
    dtypes = dtypes[0], dtypes[1], dtypes[1]
    arrays = [jnp.asarray(x, dtype) for x, dtype in zip((query, keys, values), dtypes, strict=True)]
    ints = [jnp.asarray(x, jnp.int32) for x in ([range(13)], [200], [0, 1])]
    operands = _validate.ragged_operands(*arrays, *ints, True, {})
    if implementation == "gpu":
        out, _ = jax.jit(ragged.ragged_paged_attention)(*jax.device_put(operands, jax.devices("gpu")[0]))
    else:
        out, _ = call("ragged_paged_attention", operands, **TINY_TILES)
    weights = 199 * np.exp(-18.0)
    np.testing.assert_allclose(np.asarray(out, np.float32), weights / (1 + weights), rtol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_number_of_8_bits_on_a_gpu(dtype):
    """A sequence of one token returns its value, so every 8-bit number must come out as it is, finite or not."""
    every = np.arange(256, dtype=np.uint8).view(dtype).reshape(4, 1, 1, 64)
    values = np.zeros((4, 1, 16, 64), every.dtype)
    values[:, :, :1] = every
    one = jnp.ones(4, jnp.int32)
    out = paged_jax.ragged_paged_attention(
        jnp.ones((4, 1, 64), jnp.bfloat16),
        jnp.zeros(values.shape, dtype),
        jnp.asarray(values),
        jnp.arange(4, dtype=jnp.int32)[:, None],
        one,
        jnp.arange(5, dtype=jnp.int32),
        implementation="mosaic_gpu",
    )
    np.testing.assert_array_equal(np.asarray(out, np.float32), every.astype(np.float32).reshape(4, 1, 64))


@pytest.mark.slow
@pytest.mark.parametrize("op", ["ragged_paged_attention", "prefix_attention"])
def test_one_raw_tile_that_all_warps_convert(op):
    """With scales of slots and with new tokens, the whole warpgroup converts a tile of K, and then copies one of V."""
    scales = SLOTS if op == "ragged_paged_attention" else {"v_scale": "head"}
    case = small("together", 4, 2, 64, 16, "bfloat16", "int8", **SHORT, **scales)
    made, tuning = inputs.make(case), TINY_TILES | {"raw_tiles": 1, "queries": 1, "computing_warpgroups": 2}
    if op == "prefix_attention":
        check_prefix(made, call(op, prefix_operands_of(case, made), **tuning))
    else:
        check(case, made, call(op, operands_of(case, made), **tuning))
    assert not interpret_pallas_call.get_races().races_found
