"""How `vmap` computes a batch of decode calls: as one call, where it can. test_transforms.py holds its results."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.every_op import COMPILED_OPS, DECODE_OPS, OPS, WRITING_OPS, assert_equal, bind, is_pool, pools_written
from tests.test_cache_ops import assert_same_bytes

# Blocks of both pools, and elements, are handled in one place for all ops.
FIRST_OPS = "write_and_attend", "copy_blocks"


def pools_read(op):
    """The indices of the pools that a decode op reads among its arrays."""
    return tuple(i for i in range(len(OPS[op][0])) if is_pool(op, i))


def loops(fun, *arrays):
    """How many loops over a known number of elements there are in a function."""
    return str(jax.make_jaxpr(fun)(*arrays)).count("scan[")


@pytest.mark.parametrize("which", ["query", "pools", "everything"])
@pytest.mark.parametrize("op", DECODE_OPS)
def test_a_batch_of_decode_calls_is_one_call(op, which):
    fun, arrays = bind(op)
    batched = {"query": (0,), "pools": pools_read(op), "everything": range(len(OPS[op][0]))}[which]
    stacked = [jnp.stack([x, x]) if i in batched else x for i, x in enumerate(arrays)]
    axes = [0 if i in batched else None for i in range(len(arrays))]
    assert loops(jax.vmap(fun, in_axes=axes), *stacked) == loops(fun, *arrays)


def test_calls_that_share_no_options_are_made_one_after_the_other():
    fun, arrays = bind("paged_attention_v1")
    scales = jnp.stack([arrays[-1], arrays[-1]])
    assert loops(jax.vmap(lambda scale: fun(*arrays[:-1], scale)), scales) == loops(fun, *arrays) + 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("axis_size", "num_seqs"), [(1, 3), (3, 1), (1, 1)])
@pytest.mark.parametrize("op", [op for op in DECODE_OPS if op in COMPILED_OPS])
def test_batches_of_one(op, axis_size, num_seqs):
    """One call, or calls of one sequence: the block ids are shifted by the pool that each row is in."""
    fun, arrays = bind(op)
    places = pools_read(op)
    rows = (0, places[-1] + 1, places[-1] + 2)
    few = [x[-num_seqs:] if i in rows else x for i, x in enumerate(arrays)]
    pools = [jnp.stack([few[i] + float(n) for n in range(axis_size)]) for i in places]

    def with_pools(*pools):
        return fun(few[0], *pools, *few[places[-1] + 1 :])

    out = jax.vmap(with_pools)(*pools)
    for n in range(axis_size):
        wanted = with_pools(*(pool[n] for pool in pools))
        assert all(np.asarray(x).any() for x in jax.tree.leaves(wanted))
        assert_equal(jax.tree.map(lambda x, n=n: x[n], out), wanted)


@pytest.mark.parametrize("op", ["paged_attention_v1", *WRITING_OPS])
def test_a_batch_of_no_calls(op):
    fun, arrays = bind(op)
    out = jax.vmap(fun)(*[jnp.stack([x])[:0] for x in arrays])
    wanted = jax.tree.map(lambda x: (0, *x.shape), jax.eval_shape(fun, *arrays))
    assert jax.tree.map(lambda x: x.shape, out) == wanted


def two_calls(op):
    """The op, the stacked arrays of two calls whose pools differ, and what the calls return."""
    fun, arrays = bind(op)
    calls = [[x + float(n) if is_pool(op, i) else x for i, x in enumerate(arrays)] for n in range(2)]
    wanted = [fun(*call) for call in calls]
    return fun, jax.tree.map(lambda *x: jnp.stack(x), *calls), jax.tree.map(lambda *x: jnp.stack(x), *wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", WRITING_OPS)
def test_one_of_two_pools_that_are_written_is_batched(op):
    fun, arrays, _ = two_calls(op)
    for batched in pools_written(op):
        given = [x if i == batched else x[0] for i, x in enumerate(arrays)]
        out = jax.vmap(fun, in_axes=[0 if i == batched else None for i in range(len(given))])(*given)
        for n in range(2):
            wanted = fun(*[x[n] if i == batched else x for i, x in enumerate(given)])
            assert_equal(jax.tree.map(lambda x, n=n: x[n], out), wanted)


def every_float8(x, step=1):
    """A pool like `x` that holds every bit pattern, all NaNs among them, from the first to the last or back."""
    return np.resize(np.arange(256, dtype=np.uint8)[::step], x.shape).view(ml_dtypes.float8_e5m2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("written", [slice(0, 2), slice(1, 2)], ids=["both", "values"])
@pytest.mark.parametrize("op", WRITING_OPS)
def test_slots_of_float8_that_no_call_writes_keep_their_bits(op, written):
    """XLA's CPU backend would convert a loop's float8 slices to float16 and back, which changes NaNs."""
    fun, arrays = bind(op)
    batched = pools_written(op)[written] or pools_written(op)
    calls = ([every_float8(x, s) if is_pool(op, i) else x for i, x in enumerate(arrays)] for s in (1, -1))
    first, second = calls
    given = [np.stack([x, y]) if i in batched else x for i, (x, y) in enumerate(zip(first, second, strict=True))]
    out = jax.vmap(fun, in_axes=[0 if i in batched else None for i in range(len(given))])(*given)
    for n in range(2):
        wanted = fun(*[x[n] if i in batched else x for i, x in enumerate(given)])
        count = len(pools_written(op))
        for actual, expected in zip(jax.tree.leaves(out)[-count:], jax.tree.leaves(wanted)[-count:], strict=True):
            assert_same_bytes(np.asarray(actual)[n], np.asarray(expected), f"pool of call {n}")


@pytest.mark.parametrize("op", WRITING_OPS)
def test_float8_is_never_seen_as_bytes_on_a_gpu(op):
    """There the kernels write to the pools themselves, and a view of their bytes might be a copy."""
    fun, arrays = bind(op)
    given = [jnp.stack([every_float8(x)] * 2 if is_pool(op, i) else [x] * 2) for i, x in enumerate(arrays)]
    assert "bitcast_convert" in jax.jit(jax.vmap(fun)).lower(*given).as_text()
    assert "bitcast_convert" not in jax.jit(jax.vmap(fun)).trace(*given).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("op", "axis"),
    [(op, axis) for op in WRITING_OPS for axis in (0, 1, 2, 4) if axis in (0, 2) or op in FIRST_OPS],
)
def test_pools_whose_types_say_how_they_are_split(op, axis):
    """Calls, blocks and elements of heads are not split by all ops, so that results may have other types than pools."""
    fun, arrays, wanted = two_calls(op)
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("x",), axis_types=explicit, devices=jax.devices("cpu")[:2])
    axis = min(axis, 3) if op == "write_to_latent_cache" else axis
    specs = [P(*[None] * axis, "x") if is_pool(op, i) or axis == 0 else P() for i in range(len(arrays))]
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, jax.NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
        assert_equal(jax.jit(jax.vmap(fun))(*split), wanted)


@pytest.mark.parametrize("op", ["write_and_attend", "copy_blocks"])
def test_a_split_batch_gathers_no_heads(op):
    """Each device computes all calls, but of its own heads, where the types say that both are split."""
    fun, arrays, wanted = two_calls(op)
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("calls", "heads"), axis_types=explicit, devices=jax.devices("cpu")[:4])
    specs = [P("calls", None, "heads") if is_pool(op, i) else P("calls") for i in range(len(arrays))]
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, jax.NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
        out = jax.jit(jax.vmap(fun))(*split)
    assert_equal(out, wanted)
    assert [x.sharding.spec[2] for x in jax.tree.leaves(out)] == ["heads"] * len(jax.tree.leaves(out))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", WRITING_OPS)
def test_pools_that_begin_to_vary_between_devices(op):
    """Inside a `shard_map` each device has the same pools, but its own pairs or slots."""
    fun, arrays, wanted = two_calls(op)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])

    def on_each(*arrays):
        return jax.tree.map(lambda x: x[None], jax.vmap(fun)(*arrays[:-1], arrays[-1][0]))

    specs = [*[P()] * (len(arrays) - 1), P("x")]
    sharded = jax.shard_map(on_each, mesh=mesh, in_specs=tuple(specs), out_specs=P("x"))
    out = jax.jit(sharded)(*arrays[:-1], jnp.stack([arrays[-1], arrays[-1]]))
    for device in range(2):
        assert_equal(jax.tree.map(lambda x, device=device: x[device], out), wanted)
