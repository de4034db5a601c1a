"""Tests that the bugs that `tests.mutants` makes can be made: what they change stands in the source, once."""

import pytest

from tests.mutants import ROOT
from tests.mutants_made import MUTANTS
from tests.mutants_of_engine import MUTANTS_OF_ENGINE
from tests.mutants_of_kernels import MUTANTS_OF_KERNELS


@pytest.mark.parametrize("mutant", [*MUTANTS, *MUTANTS_OF_ENGINE, *MUTANTS_OF_KERNELS], ids=lambda mutant: mutant.name)
def test_the_source_stands_there_once(mutant):
    """Otherwise a list that nobody runs for a while goes stale."""
    assert (ROOT / "paged_jax" / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
