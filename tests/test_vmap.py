"""How `vmap` computes a batch of decode calls: as one call, where it can. test_transforms.py holds its results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.every_op import DECODE_OPS, assert_equal, bind

POOLS = (1, 2)


def loops(fun, *arrays):
    """How many loops over a known number of elements there are in a function."""
    return str(jax.make_jaxpr(fun)(*arrays)).count("scan[")


@pytest.mark.parametrize("batched", [(0,), POOLS, (0, *POOLS, 3, 4)], ids=str)
@pytest.mark.parametrize("op", DECODE_OPS)
def test_a_batch_of_decode_calls_is_one_call(op, batched):
    fun, arrays = bind(op)
    stacked = [jnp.stack([x, x]) if i in batched else x for i, x in enumerate(arrays)]
    axes = [0 if i in batched else None for i in range(len(arrays))]
    assert loops(jax.vmap(fun, in_axes=axes), *stacked) == loops(fun, *arrays)


def test_calls_that_share_no_options_are_made_one_after_the_other():
    fun, arrays = bind("paged_attention_v1")
    scales = jnp.stack([arrays[-1], arrays[-1]])
    assert loops(jax.vmap(lambda scale: fun(*arrays[:-1], scale)), scales) == loops(fun, *arrays) + 1


@pytest.mark.parametrize(("axis_size", "num_seqs"), [(1, 3), (3, 1), (1, 1)])
@pytest.mark.parametrize("op", DECODE_OPS)
def test_batches_of_one(op, axis_size, num_seqs):
    """One call, or calls of one sequence: the block ids are shifted by the pool that each row is in."""
    fun, arrays = bind(op)
    few = [x[-num_seqs:] if i in (0, 3, 4) else x for i, x in enumerate(arrays)]
    pools = [jnp.stack([few[i] + float(n) for n in range(axis_size)]) for i in POOLS]

    def with_pools(*pools):
        return fun(few[0], *pools, *few[3:])

    out = jax.vmap(with_pools)(*pools)
    for n in range(axis_size):
        wanted = with_pools(*(pool[n] for pool in pools))
        assert all(np.asarray(x).any() for x in jax.tree.leaves(wanted))
        assert_equal(jax.tree.map(lambda x, n=n: x[n], out), wanted)


def test_a_batch_of_no_calls():
    fun, arrays = bind("paged_attention_v1")
    pools = [jnp.zeros((0, *arrays[i].shape), arrays[i].dtype) for i in POOLS]
    out = jax.vmap(lambda *pools: fun(arrays[0], *pools, *arrays[3:]))(*pools)
    assert jax.tree.leaves(out)[0].shape == (0, *arrays[0].shape)
