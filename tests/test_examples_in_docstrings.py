"""Tests that the examples in the docstrings of public names run, and that every op has one."""

import doctest

import jax
import pytest

import paged_jax

OPS = [
    name
    for name in paged_jax.__all__
    if getattr(getattr(paged_jax, name), "__module__", "").startswith(("paged_jax.ops.", "paged_jax.cache_ops"))
]
DOCUMENTED = [
    *OPS,
    *(
        "BlockSparse",
        "PagedKVCache",
        "PagedLatentCache",
        "build_metadata",
        "check_metadata",
        "get_kv_cache_shape",
        "split_kv_cache",
    ),
    "which_implementation",
]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_example(name):
    (test, *others) = doctest.DocTestFinder(recurse=False).find(getattr(paged_jax, name), name, globs={})
    assert test.examples
    assert not others
    with jax.default_device(jax.devices("cpu")[0]):
        assert doctest.DocTestRunner().run(test).failed == 0


def test_every_op_is_among_them():
    assert len(OPS) == 13
