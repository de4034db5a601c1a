"""Tests that the error criterion fails for one bad row of many, infinities, NaN, and values that must be zero."""

import numpy as np
import pytest

from tests import plain


def results():
    """Makes exact results of a short sequence, a long one whose mean is small, and an empty one, and rounds them."""
    exact = np.random.default_rng(0).standard_normal((3, 4, 16)) * np.array([1.0, 0.01, 0.0])[:, None, None]
    ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 1e-30))) - 7)
    return exact, np.round(exact / ulp) * ulp


def test_what_errs_as_the_yardstick_does_passes():
    exact, rounded = results()
    plain.assert_close(rounded, exact, rounded, "out")
    plain.assert_close(exact + 1.9 * (rounded - exact), exact, rounded, "out")


def test_one_row_does_not_err_by_what_another_may():
    exact, rounded = results()
    wrong = rounded.copy()
    wrong[1] *= 1.05  # far below the bound of row 0
    assert np.abs(wrong - exact)[1].max() < 2 * np.abs(rounded - exact).max()
    with pytest.raises(AssertionError, match=r"out: error .* at \(1, .* values in 1 rows are off"):
        plain.assert_close(wrong, exact, rounded, "out")


def test_where_the_yardstick_is_lucky_a_row_may_err_as_rows_do():
    exact = np.random.default_rng(0).standard_normal((5, 4, 16))
    rounded = exact.astype(np.float16)
    lucky = np.where(np.arange(5)[:, None, None] == 2, exact, rounded)
    plain.assert_close(rounded, exact, lucky, "out")
    wrong = rounded.astype(np.float64)
    wrong[2] *= 1.003
    with pytest.raises(AssertionError, match=r"at \(2, .* values in 1 rows are off"):
        plain.assert_close(wrong, exact, lucky, "out")


def test_a_row_of_zeros_has_to_be_zero():
    exact, rounded = results()
    wrong = rounded.copy()
    wrong[2, 3, 5] = 1e-7
    with pytest.raises(AssertionError, match=r"at \(2, 3, 5\)"):
        plain.assert_close(wrong, exact, rounded, "out")


@pytest.mark.parametrize(("value", "words"), [(np.nan, "NaN"), (3.0, "infinities"), (np.inf, "infinities")])
def test_infinities_have_their_places(value, words):
    exact, rounded = results()
    exact[2, 0, 0] = rounded[2, 0, 0] = -np.inf
    plain.assert_close(rounded, exact, rounded, "lse")
    wrong = rounded.copy()
    wrong[2, 0, 0] = value
    with pytest.raises(AssertionError, match=words):
        plain.assert_close(wrong, exact, rounded, "lse")


def test_where_all_rows_are_lucky_one_rounding_is_granted():
    exact = np.random.default_rng(0).standard_normal((5, 4, 16))
    plain.assert_close(exact.astype(np.float16), exact, exact, "out")
    with pytest.raises(AssertionError, match="out: error"):
        plain.assert_close((exact * 1.003).astype(np.float16), exact, exact, "out")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_yardstick_rounds_weights_to_the_queries_dtype(dtype):
    logits = np.log(np.array([[[1.0, 1 / 3]]], np.float32))
    values = np.array([[[0.0], [1.0]]], np.float32)
    total, _, out = plain.softmax_parts(logits, values, np.dtype(dtype))
    assert out[0, 0, 0] == np.float32(np.asarray(1 / 3, dtype)) / total[0, 0]
