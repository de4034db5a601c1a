"""Tests the decode kernel at its edges: grids of more than 65535 programs, nothing to attend to, vmap and export."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from tests.mosaic_interpreter import OPS, call


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_more_items_than_65535(op):
    """CUDA limits a grid to 65535 programs in all but one of its dimensions."""
    num_seqs, heads, rng = 2100, 32, np.random.default_rng(0)
    caches = [jnp.asarray(rng.normal(size=(50, heads, 64, 64)), jnp.bfloat16) for _ in "kv"]
    query = jnp.asarray(rng.normal(size=(num_seqs, heads, 64)), jnp.bfloat16)
    tables = jnp.asarray(rng.integers(0, 50, (num_seqs, 1)), jnp.int32)
    seq_lens = jnp.asarray(rng.integers(0, 33, num_seqs), jnp.int32)
    attend = getattr(paged_jax, OPS[op])
    out, expected = (attend(query, *caches, tables, seq_lens, implementation=x) for x in ("mosaic_gpu", "xla"))
    np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_more_partitions_than_65535():
    rng = np.random.default_rng(0)
    caches = [jnp.asarray(rng.normal(size=(50, 1, 16, 64)), jnp.bfloat16) for _ in "kv"]
    query = jnp.asarray(rng.normal(size=(2, 1, 64)), jnp.bfloat16)
    tables, seq_lens = jnp.asarray(rng.integers(0, 50, (2, 70_000)), jnp.int32), jnp.array([40, 1_119_990], jnp.int32)
    attend = partial(paged_jax.paged_attention_v2, query, *caches, tables, seq_lens, partition_size=16)
    out, expected = (attend(implementation=x) for x in ("mosaic_gpu", "triton"))
    np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("num_seqs", "width", "num_blocks"), [(0, 3, 9), (2, 0, 9), (2, 3, 0)])
def test_nothing_to_attend(op, num_seqs, width, num_blocks):
    decode = {
        "query": jnp.zeros((num_seqs, 4, 64), jnp.bfloat16),
        "key_cache": jnp.zeros((num_blocks, 2, 16, 64), jnp.bfloat16),
        "value_cache": jnp.zeros((num_blocks, 2, 16, 64), jnp.bfloat16),
        "block_tables": jnp.zeros((num_seqs, width), jnp.int32),
        "seq_lens": jnp.zeros((num_seqs,), jnp.int32),
    }
    out, lse, *residuals = call(op, decode, {}, {}, 32)
    assert out.shape == (num_seqs, 4, 64)
    assert np.all(out == 0)
    assert np.all(lse == -np.inf)
    residual = num_seqs, 4, -(-width // 2)
    assert [x.shape for x in residuals] == ([residual, residual, (*residual, 64)] if op == "v2" else [])


def test_vmap_and_export():
    cache = jax.ShapeDtypeStruct((9, 2, 16, 64), jnp.bfloat16)
    arrays = (
        jax.ShapeDtypeStruct((3, 2, 4, 64), jnp.bfloat16), cache, cache,
        jax.ShapeDtypeStruct((3, 2, 4), jnp.int32), jax.ShapeDtypeStruct((3, 2), jnp.int32),
    )  # fmt: skip
    op = jax.vmap(partial(paged_jax.paged_attention, implementation="mosaic_gpu"), (0, None, None, 0, 0))
    exported = jax.export.export(jax.jit(op), platforms=["cuda"])(*arrays)
    assert jax.export.deserialize(exported.serialize()).out_avals[0].shape == (3, 2, 4, 64)
