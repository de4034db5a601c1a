"""The bugs that `tests.mutants` makes on purpose in the engine; most would give wrong tokens only now and then."""

from tests.mutants_made import Mutant

SIMULATED = "tests/test_engine_simulated.py"

MUTANTS_OF_ENGINE = [
    Mutant(
        "engine: a decode step reads what it writes",
        "engine/scheduler.py",
        " and plan.adopted.isdisjoint(written)",
        "",
        SIMULATED,
    ),
]
