"""Tests that `jax.set_mesh` of any mesh does not change an op's results on operands that lie on no mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.test_flags import CALLS, call_of, is_op

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
# On a CPU `paged_attention` is v1; caches of 8 bits differ in a dtype; the others are lowered as another op is.
LIKE_OTHERS = "paged_attention", "float8_e4m3fn", "swap_blocks", "write_to_latent_cache", "ragged_mla_attention"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("axis_types", "name"),
    [
        *(((EXPLICIT, EXPLICIT), name) for name in CALLS if name not in LIKE_OTHERS),
        ((AUTO, AUTO), "paged_attention"),
        ((AUTO, EXPLICIT), "ragged_paged_attention"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(axis_type.name for axis_type in x),
)
def test_within_set_mesh(axis_types, name):
    """Ops run without jit on arrays of one device and of NumPy, and are traced under jit, where all else runs."""
    function, arrays, wanted = call_of(name)
    jitted = jax.jit(lambda *arrays: function(*arrays))
    calls = [(jitted, arrays)]
    if is_op(name):
        calls = [(function, arrays), (function, jax.tree.map(np.asarray, arrays))]
    with jax.set_mesh(jax.make_mesh((2, 4), ("dp", "tp"), axis_types=axis_types, devices=jax.devices("cpu"))):
        jitted.trace(*arrays).lower()
        results = [jax.tree.map(np.asarray, run(*given)) for run, given in calls]
    for actual, expected in zip(jax.tree.leaves(results), jax.tree.leaves([wanted] * len(calls)), strict=True):
        np.testing.assert_allclose(actual.astype(np.float64), expected.astype(np.float64), rtol=1e-5, atol=1e-6)
