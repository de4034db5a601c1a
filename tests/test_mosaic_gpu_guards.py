"""Tests that no Hopper kernel changes unnoticed: `guards.txt` has its guards, and `programs.txt` what it computes."""

import jax
import pytest

from tests import guards, programs


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the table has the names that jax 0.12 gives to operations")
def test_guards_are_those_that_are_kept():
    kept = guards.KEPT.read_text(encoding="utf-8").splitlines()
    assert guards.table().splitlines() == kept, "python -m tests.guards > tests/guards.txt"


def test_programs_are_those_that_are_kept():
    """The kernels have the same numbers, masks, orders and widths of offsets as the table."""
    programs.hold("jax", programs.hopper())
