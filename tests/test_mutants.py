"""Tests that the bugs that `tests.mutants` makes can be made: what they change stands in the source, once."""

import pytest

from tests.mutants import ALL, ROOT, file_of


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_the_source_stands_there_once(mutant):
    """Otherwise a list that nobody runs for a while goes stale."""
    assert file_of(mutant, ROOT).read_text(encoding="utf-8").count(mutant.old) == 1
