"""Tests that every script of examples/howto runs and finds its claims true, and that examples/README.md lists it."""

import importlib
from pathlib import Path

import pytest

from paged_jax.engine.sampling import Kind
from tests.engine_model import drawing

HOWTO = Path(__file__).parents[1] / "examples" / "howto"
SCRIPTS = sorted(path.stem for path in HOWTO.glob("*.py") if path.stem != "__init__")


SLOW = "rollouts_in_one_process", "several_gpus"  # engines that compile many programs
DRAWING = {"rollouts_in_one_process": (Kind.GREEDY, Kind.LOGPROBS)}  # an engine warms up with greedy tokens


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in SCRIPTS])
def test_runs(name, capsys):
    with drawing(*DRAWING.get(name, (Kind.GREEDY,))):
        importlib.import_module(f"examples.howto.{name}").main()
    out = capsys.readouterr().out
    assert ": True" in out
    assert "False" not in out


def test_readme_lists_every_script():
    readme = (HOWTO.parent / "README.md").read_text()
    assert all(f"howto/{name}.py" in readme for name in SCRIPTS)
    assert len(SCRIPTS) >= 8
