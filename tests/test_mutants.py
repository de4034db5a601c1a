"""Tests that each bug of `tests.mutants` can be made: the source that it changes occurs exactly once."""

import pytest

from tests.mutants import ALL, ROOT, file_of


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_the_source_stands_there_once(mutant):
    """Otherwise a list that nobody runs for a while goes stale."""
    assert file_of(mutant, ROOT).read_text(encoding="utf-8").count(mutant.old) == 1
