"""Tests that the GPU implementations choose what `choices.txt` says, so that no choice changes unnoticed."""

from tests import choices


def test_choices_are_those_that_are_kept():
    kept, made = (x.splitlines() for x in (choices.KEPT.read_text(encoding="utf-8"), choices.table()))
    assert len(made) == len(kept)
    changed = [f"- {old}\n+ {new}" for old, new in zip(kept, made, strict=True) if old != new]
    if changed:
        lines = "\n".join(changed[:4])
        message = f"{len(changed)} of {len(kept)} lines changed; python -m tests.choices > tests/choices.txt\n{lines}"
        raise AssertionError(message)
