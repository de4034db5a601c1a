"""Makes bugs on purpose, one at a time, and checks that the tests notice each of them.

    python -m tests.mutants                  all mutants; prints a line for each, exit code 1 if one survives
    python -m tests.mutants tp_rank          the mutants whose name contains this word

A mutant is a copy of the repository in which one piece of source is changed. It is killed if the tests that it names
fail on this copy; they are few, so that a run takes seconds. All are expected to be killed.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants_made import MUTANTS, Mutant
from tests.mutants_of_answers import MUTANTS_OF_ANSWERS
from tests.mutants_of_caches import MUTANTS_OF_CACHES
from tests.mutants_of_choices import MUTANTS_OF_CHOICES
from tests.mutants_of_decisions import MUTANTS_OF_DECISIONS
from tests.mutants_of_engine import MUTANTS_OF_ENGINE
from tests.mutants_of_groups import MUTANTS_OF_GROUPS
from tests.mutants_of_hopper import MUTANTS_OF_HOPPER
from tests.mutants_of_kernels import MUTANTS_OF_KERNELS
from tests.mutants_of_limits import MUTANTS_OF_LIMITS
from tests.mutants_of_models import MUTANTS_OF_MODELS
from tests.mutants_of_ptx import MUTANTS_OF_PTX
from tests.mutants_of_ragged import MUTANTS_OF_RAGGED
from tests.mutants_of_scheduler import MUTANTS_OF_SCHEDULER
from tests.mutants_of_server import MUTANTS_OF_SERVER
from tests.mutants_of_text import MUTANTS_OF_TEXT
from tests.mutants_of_triton import MUTANTS_OF_TRITON
from tests.mutants_of_xla import MUTANTS_OF_XLA

ROOT = Path(__file__).parents[1]
_LONGEST_S = 600  # of a mutant's tests, which take seconds
ALL = (
    *MUTANTS,
    *MUTANTS_OF_SCHEDULER,
    *MUTANTS_OF_ENGINE,
    *MUTANTS_OF_DECISIONS,
    *MUTANTS_OF_LIMITS,
    *MUTANTS_OF_GROUPS,
    *MUTANTS_OF_TEXT,
    *MUTANTS_OF_SERVER,
    *MUTANTS_OF_ANSWERS,
    *MUTANTS_OF_MODELS,
    *MUTANTS_OF_CACHES,
    *MUTANTS_OF_KERNELS,
    *MUTANTS_OF_HOPPER,
    *MUTANTS_OF_CHOICES,
    *MUTANTS_OF_PTX,
    *MUTANTS_OF_RAGGED,
    *MUTANTS_OF_TRITON,
    *MUTANTS_OF_XLA,
)
COPIED = ("paged_jax", "tests", "examples", "benchmarks", "pyproject.toml", "README.md")


def file_of(mutant: Mutant, root: str | Path) -> Path:
    """The file that a mutant changes, in a copy of the repository."""
    return Path(root, mutant.file if mutant.file.startswith("examples/") else f"paged_jax/{mutant.file}")


def run(mutant: Mutant) -> tuple[bool, str]:
    """Runs a mutant's tests; returns whether it is killed, and pytest's last line."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source, copy = ROOT / name, Path(folder, name)
            ignore = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, copy, ignore=ignore) if source.is_dir() else shutil.copy(source, copy)
        file = file_of(mutant, folder)
        text = file.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            return False, f"the source to change stands {text.count(mutant.old)} times in {mutant.file}"
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        if interpret := mutant.tests.startswith("interpret "):
            command = f"{sys.executable} -m tests.run_triton {mutant.tests.removeprefix('interpret ')}"
            environment |= {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
        else:
            command = f"{sys.executable} -m pytest -x -q -m 'slow or not slow' -p no:cacheprovider {mutant.tests}"
        try:
            done = subprocess.run(
                command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=_LONGEST_S
            )
        except subprocess.TimeoutExpired:  # a kernel that waits forever is noticed by whoever runs the tests
            return True, f"had not ended after {_LONGEST_S} s"
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()] or [""]
        lines = [line for line in lines if re.match(r"\w*(Error|Exception)\b|Segmentation", line)] or lines
        # pytest must report a failed test; in the interpreter, a mutant that writes to wild memory may end the process.
        return done.returncode == 1 or (interpret and done.returncode != 0), lines[-1]


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--workers", type=int, default=1, help="mutants tried at once")
    args = parser.parse_args(argv)
    chosen = [mutant for mutant in ALL if not args.words or any(word in mutant.name for word in args.words)]
    started, survivors = time.time(), 0
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        for mutant, (killed, last) in zip(chosen, pool.map(run, chosen), strict=True):
            survivors += not killed
            print(f"{'killed  ' if killed else 'SURVIVED'} {mutant.name}  # {last}", flush=True)
    print(f"{len(chosen)} mutants, {survivors} survived, {time.time() - started:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
