"""Tests sharded calls with options: each device gets the scales, slopes, sinks and patterns of its own heads."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from paged_jax import BlockSparse
from tests.test_partition import assert_nothing_is_exchanged, assert_same, bind, make_mesh, place, specs_of


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("op", "layout"),
    [("ragged_paged_attention", "hnd"), ("write_and_attend", "nhd")],
)
def test_options_are_split_with_their_heads(op, layout):
    fun, names, arrays = bind(op, ("alibi_slopes", "sinks", "k_scale", "v_scale"), layout=layout)
    wanted = jax.jit(fun)(*arrays)
    placed = place(arrays, specs_of(op, names, None, "tp", layout), make_mesh())
    compiled = jax.jit(fun).lower(*placed).compile()
    assert_nothing_is_exchanged(compiled)
    assert_same(compiled(*placed), wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("op", ["prefix_attention", "write_and_attend"])
def test_every_device_has_the_scales_of_a_whole_cache(op):
    fun, names, arrays = bind(op, ("k_scale", "v_scale"))
    scales = {"k_scale": np.float32(0.5), "v_scale": np.float32(2)}
    arrays = [scales.get(name, x) for name, x in zip(names, arrays, strict=True)]
    specs = zip(names, specs_of(op, names, None, "tp"), strict=True)
    placed = place(arrays, [P() if name in scales else spec for name, spec in specs], make_mesh())
    compiled = jax.jit(fun).lower(*placed).compile()
    assert_nothing_is_exchanged(compiled)
    assert_same(compiled(*placed), jax.jit(fun)(*arrays))


# The pattern shifts from head to head or from kv head to kv head; all devices have one pattern; groups are split.
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("step", "stride", "heads"),
    [
        *((1, 3, "tp"), (-1, 4, "tp"), (1, 3, "dp"), (1, 3, ("tp", "dp")), (3, 3, ("tp", "dp"))),
    ],
)
def test_a_block_sparse_pattern_is_that_of_the_device_s_heads(step, stride, heads):
    sparse = BlockSparse(local_blocks=1, vert_stride=stride, block_size=4, head_sliding_step=step, tp_rank=1)
    fun, names, arrays = bind("paged_attention_v1", block_sparse=sparse)
    wanted, kv_heads = jax.jit(fun)(*arrays), heads[0] if isinstance(heads, tuple) else heads
    specs = [
        P(*(heads if axis == "q" else axis for axis in spec))
        for name, spec in zip(names, specs_of("paged_attention_v1", names, None, kv_heads), strict=True)
        for spec in [P(None, "q") if name == "query" else P("q") if name == "alibi_slopes" else spec]
    ]
    placed = place(arrays, specs, make_mesh(AxisType.Explicit if step == 1 else AxisType.Auto))
    compiled = jax.jit(fun).lower(*placed).compile()
    assert_nothing_is_exchanged(compiled)
    assert ("conditional" in compiled.as_text()) == (step != stride), "a branch for each pattern, if there are several"
    assert_same(compiled(*placed), wanted)
