"""Tests that no Hopper kernel has lost a fence, a wait or an arrival: their numbers are those in `guards.txt`."""

import jax
import pytest

from tests import guards


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the table has the names that jax 0.12 gives to operations")
def test_guards_are_those_that_are_kept():
    kept = guards.KEPT.read_text(encoding="utf-8").splitlines()
    assert guards.table().splitlines() == kept, "python -m tests.guards > tests/guards.txt"
