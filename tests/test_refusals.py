"""Tests that GPU implementations refuse the cases that `refusals.txt` says, so that no more are skipped unnoticed."""

from tests import refusals


def test_refusals_are_those_that_are_kept():
    table = refusals.table()
    assert table == refusals.KEPT.read_text(encoding="utf-8"), "python -m tests.refusals > tests/refusals.txt"


def test_a_new_refusal_is_seen(monkeypatch):
    """If Triton took no case at all, the table would say so for each case."""
    monkeypatch.setattr(refusals.cases, "DECODE_CASES", refusals.cases.DECODE_CASES[:3])
    monkeypatch.setattr(refusals, "WRITE_CASES", [])
    monkeypatch.setattr("paged_jax.kernels.triton.tuning.compute_dtype", _refuse)
    lines = refusals.table().splitlines()
    assert "triton paged_attention: 0 of 3 cases" in lines
    assert "      3 x lacks everything" in lines


def _refuse(*_):
    raise refusals.Unsupported("triton", ["lacks everything"])
