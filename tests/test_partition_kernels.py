"""Tests what kernels are on a device of a mesh: compiled for its part of the call, also inside a `shard_map`."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_jax
from tests.test_partition import make_mesh


def _cuda_operands():
    """Makes operands of a decode op that kernels take: query, pools, tables, lengths."""
    i32, bf16 = jnp.int32, jnp.bfloat16
    pool = jax.ShapeDtypeStruct((64, 8, 16, 64), bf16)
    table = jax.ShapeDtypeStruct((4, 8), i32)
    return jax.ShapeDtypeStruct((4, 32, 64), bf16), pool, pool, table, jax.ShapeDtypeStruct((4,), i32)


# v2 through Mosaic GPU has constants.
@pytest.mark.parametrize(
    ("op", "implementation"),
    [("paged_attention", "mosaic_gpu"), ("paged_attention_v2", "mosaic_gpu"), ("paged_attention", "triton")],
)
def test_a_kernel_is_lowered_for_a_device_s_part(op, implementation):
    """The test calls `partition` as XLA for GPUs does, and lowers the part that it returns."""
    if implementation == "triton":
        pytest.importorskip("jax_triton")
    mesh = make_mesh()
    fun = functools.partial(getattr(paged_jax, op), implementation=implementation)
    (equation,) = _equations(jax.make_jaxpr(fun)(*_cuda_operands()).jaxpr, "custom_partitioning")
    heads = P(None, "tp")
    specs = [heads, heads, heads, P(), P()] + [P()] * (len(equation.invars) - 5)
    operands = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))
        for x, s in zip(equation.params["call"].in_avals, specs, strict=True)
    ]
    _, run, results, kept = equation.params["partition"](mesh, operands, None)
    assert [s.spec for s in kept[:3]] == [P(None, "tp", None), P(None, "tp", None, None), P(None, "tp", None, None)]
    assert [s.spec for s in results[:2]] == [P(None, "tp", None), P(None, "tp")]
    parts = [jax.ShapeDtypeStruct(s.shard_shape(x.shape), x.dtype) for x, s in zip(operands, kept, strict=True)]
    text = jax.jit(run).trace(*parts).lower(lowering_platforms=("cuda",)).as_text()
    assert re.search(rf"custom_call @{implementation}.*tensor<64x2x16x64xbf16>", text)


def test_where_xla_knows_no_mesh_each_device_computes_the_whole_op():
    (equation,) = _equations(jax.make_jaxpr(paged_jax.paged_attention)(*_cuda_operands()).jaxpr, "custom_partitioning")
    on_one = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_one) for x in equation.params["call"].in_avals]
    mesh, run, results, kept = equation.params["partition"](make_mesh(), operands, None)
    assert mesh.size == 1
    assert not any(axis for sharding in (*results, *kept) for axis in sharding.spec)
    assert jax.eval_shape(run, *operands)[0].shape == operands[0].shape


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_kernel_that_writes_runs_inside_a_shard_map(axis_type):
    """Its types say over which mesh axes an array varies, and Pallas takes no reference to an array that varies."""
    query, pool, _, tables, seq_lens = _cuda_operands()
    new = jax.ShapeDtypeStruct((4, 8, 64), jnp.bfloat16)
    fun, heads = functools.partial(paged_jax.write_and_attend, implementation="mosaic_gpu"), P(None, "tp")
    specs = (*[heads] * 5, P(), P(), P())
    mesh = make_mesh(axis_type)
    if axis_type == AxisType.Auto:
        fun = jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=heads)
    operands = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip((query, new, new, pool, pool, tables, seq_lens, seq_lens), specs, strict=True)
    ]
    text = jax.jit(fun).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert re.search("custom_call @mosaic_gpu.*tensor<64x2x16x64xbf16>", text)


def _equations(jaxpr, name):
    """Yields the equations of a primitive, in the jaxpr or in any inside it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        else:
            for inner in jax.tree.leaves(tuple(equation.params.values())):
                if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                    yield from _equations(inner, name)
