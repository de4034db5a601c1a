"""The model of ragged attention's time: programs that claim the items of a plan."""

import json
from pathlib import Path

import pytest

from benchmarks import cases, plan_model
from benchmarks.plan_model import Plan, modelled_us

MEASURED = Path(cases.__file__).parent / "results" / "2026-11-28-h200-random-ragged-fa3-seed-135.json"


@pytest.mark.parametrize(
    ("plan", "us"),
    [
        (Plan([10] * 3, [1] * 4, 1, 2), 20),  # program 1 has all thin items and then the last wide one
        (Plan([10] * 3, [1] * 4, 2, 2), 20),  # program 0 claims the last wide item, program 1 the thin ones
        (Plan([10] * 3, [1] * 12, 1, 2), 22),
        (Plan([10] * 2, [12], 1, 2), 20),  # program 0 has claimed the second wide item before program 1 claims any
        (Plan([10, 2], [4, 4], 2, 2), 10),  # program 0 claims no thin item before it has ended its wide one
        (Plan([], [9, 9, 2], 0, 2), 11),
        (Plan([10], [], 2, 2), 10),
        (Plan([40, 30, 20, 10], [1], 2, 2), 60),  # both programs claim early, program 0 first
        (Plan([40, 30, 20, 10], [], 2, 2), 50),  # program 1 is done first, and claims the longer item
    ],
)
def test_programs_claim_items(plan, us):
    assert modelled_us(plan) == pytest.approx(11.1 + us)


@pytest.mark.parametrize("number", [0, 2, 5, 7])
def test_batches_that_nothing_was_fitted_to(number):
    """They were drawn and timed after the costs had been fitted."""
    rows = json.loads(MEASURED.read_text())["rows"]
    (case,) = cases.with_blocks([cases.random_ragged(60, 135)[number]], [128])
    (us,) = [row["us"] for row in rows if row["case"] == case.name and row["kind"] == "implementation"]
    assert plan_model.modelled(case) == pytest.approx(us, rel=0.13)


def test_the_command_line(capsys):
    assert plan_model.main(["--random", "135", "--numbers", "17,5", "--beside", str(MEASURED)]) == 0
    (line,) = capsys.readouterr().out.splitlines()  # number 17 has caches of 8 bits
    assert line.startswith("5-32-8x128-bfloat16-2-prompts-0-decodes")
    assert line.endswith(" us, measured 247.6")
