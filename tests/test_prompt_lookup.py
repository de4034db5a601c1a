"""Tests the engine's own proposer, which looks up a text's last tokens in the text."""

import numpy as np
import pytest

from paged_jax.engine import DraftRow, PromptLookup


@pytest.mark.parametrize(
    ("tokens", "most", "guess"),
    [
        ([7, 8, 9, 4, 5, 7, 8], 3, [9, 4, 5]),
        ([7, 8, 9, 4, 5, 7, 8], 2, [9, 4]),
        ([1, 2, 3, 5, 9, 2, 3, 6, 1, 2, 3], 2, [5, 9]),
        ([9, 2, 3, 5, 1, 2, 3, 6, 4, 2, 3], 1, [6]),
        ([5, 5, 5], 4, [5, 5, 5, 5]),
        ([1, 2, 1, 2, 1], 5, [2, 1, 2, 1, 2]),
        ([1, 2, 3, 4], 4, []),
        ([8, 9, 8], 4, []),
        ([8], 4, []),
        ([1, 2, 3, 1, 2], 0, []),
    ],
)
def test_what_is_looked_up(tokens, most, guess):
    """The look-up tries the longest n-gram first, takes its last occurrence, and continues a repetition."""
    assert PromptLookup().propose([DraftRow((0, 0), tokens, most)]) == [guess]


def test_a_growing_text_is_looked_up_as_one_that_is_new():
    """The look-up forgets a text when its sample ends."""
    rng, lookup = np.random.default_rng(0), PromptLookup(4, 1)
    texts = {(i, 0): [] for i in range(3)}
    for _ in range(40):
        for text in texts.values():
            text += rng.integers(0, 4, rng.integers(1, 4)).tolist()
        rows = [DraftRow(key, text, 5) for key, text in texts.items()]
        assert lookup.propose(rows) == [PromptLookup(4, 1).propose([row])[0] for row in rows]
    lookup.forget((0, 0))
    assert set(lookup._indices) == {(1, 0), (2, 0)}
