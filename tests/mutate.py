"""Mutation testing of the modules that need no GPU, with Cosmic Ray's operators: thousands of small bugs, or a sample.

    pip install cosmic-ray                             (not a dependency of the tests)
    python -m tests.mutate --count 25 --seed 15        25 mutants of each module; prints one line for each survivor
    python -m tests.mutate --count 25 grow softmax     only the modules whose path contains one of these words

A mutant is one change of an operator, a number, a condition or the like (annotations, decorators, messages and `strict`
of `zip` are left alone). A sample takes random places of a module, and one of the possible changes at each. A mutant is
killed if the module's tests, listed in `TESTS`, fail or run longer than `--timeout` seconds. A survivor is a bug that
the tests miss, or a change that alters no result: an index into an axis of one element, a number that a mask hides, a
condition that holds anyway. Whoever reads the list decides.

Importing JAX takes seconds, so a process that has imported it forks for every mutant. XLA's compilations are kept
between mutants, since most of them leave most programs as they are. But XLA calls some modules while it compiles.
Programs of these modules are not kept, because XLA's key of a program does not depend on a mutant's answers.
"""

import argparse
import ast
import importlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.mutants import COPIED, ROOT

# These cases of the attention ops have every option, layout, and granularity of scales, the edge cases, random lengths.
_ATTENTION = (
    "tests/test_transforms.py tests/test_memory.py tests/test_decode.py tests/test_ragged.py tests/test_xla.py "
)
_ATTENTION += "tests/test_causal.py "
_ATTENTION += "-k 'no_room or without_sequences or never_gathered or test_xla or "
_ATTENTION += "test_causal or hnd-float16 or nhd-e5m2 or vllm-int8 or sparse-step or sparse-negative-step or "
_ATTENTION += "sparse-vllm or one-query or everything or max-seq-len or all-empty or long or random or stop or "
_ATTENTION += "number or zero'"
_WRITE_AND_ATTEND = "tests/test_write_and_attend.py -k 'nhd-e5m2 or vllm-int8 or unsplit or past_max or returns'"
# The tests of each module; those that fail soonest come first. A folder stands for all of its modules.
TESTS = {
    "allocator": (
        "tests/test_allocator_edges.py tests/test_allocator.py tests/test_allocator_rows.py "
        "tests/test_allocator_arguments.py tests/test_allocator_walk.py tests/test_allocator_jit.py"
    ),
    "metadata.py": "tests/test_metadata.py",
    "_states.py": "tests/test_merge.py tests/test_transforms.py -k 'merge or merging'",
    "ops/ragged.py": "tests/test_cache_methods.py tests/test_ragged.py -k 'methods or flags or causal'",
    "ops/fused.py": _WRITE_AND_ATTEND,
    "ops/decode.py": "tests/test_decode.py -k 'flags or stop or everything or test_paged or partition'",
    "_checks.py": "tests/test_validation.py tests/test_selection.py tests/test_merge.py",
    "_validate.py": "tests/test_validation.py tests/test_merge.py tests/test_causal.py tests/test_decode.py "
    "tests/test_block_ops.py tests/test_host_memory.py -k 'test_validation or test_merge or test_causal or everything "
    "or stop or returns or many_layers or swap or test_host_memory'",
    "_dispatch.py": "tests/test_validation.py tests/test_selection.py tests/test_transforms.py tests/test_memory.py",
    "_splits.py": "tests/test_splits.py tests/test_partition.py tests/test_partition_options.py",
    "_partition.py": "tests/test_partition.py tests/test_partition_kernels.py tests/test_vmap.py",
    "_lowered.py": "tests/test_partition.py tests/test_partition_kernels.py",
    "_vmap.py": "tests/test_vmap.py tests/test_transforms.py tests/test_partition.py -k 'vmap or transformations'",
    "cache.py": "tests/test_cache.py tests/test_cache_methods.py",
    "kernels/xla/cache_ops.py": "tests/test_cache_ops.py tests/test_block_ops.py tests/test_host_memory.py "
    "tests/test_xla.py tests/test_transforms.py tests/test_memory.py -k 'test_cache_ops or test_block_ops or "
    "test_host_memory or (test_xla and (pool or slot)) or donated or empty_batches'",
    "kernels/xla/decode.py": "tests/test_write_and_attend.py " + _ATTENTION,
    "kernels/xla/ragged.py": _ATTENTION,
    "kernels/xla/softmax.py": _ATTENTION,
}

# XLA calls functions of these modules back while it compiles.
_CALLED_BACK = ("_splits.py", "_partition.py", "_lowered.py")

# Replacing an operator by each of the others gives many mutants that behave alike. These replacements are enough.
_REPLACED_BY = {
    "Add": ("Sub",),
    "Sub": ("Add",),
    "Mul": ("Add", "FloorDiv"),
    "Div": ("Mul",),
    "FloorDiv": ("Mul", "Mod"),
    "Mod": ("FloorDiv",),
    "Pow": ("Mul",),
    "BitAnd": ("BitOr",),
    "BitOr": ("BitAnd", "BitXor"),
    "Eq": ("NotEq", "LtE", "GtE"),
    "NotEq": ("Eq", "Lt", "Gt"),
    "Lt": ("LtE", "GtE", "NotEq"),
    "LtE": ("Lt", "Gt", "Eq"),
    "Gt": ("GtE", "LtE", "NotEq"),
    "GtE": ("Gt", "Lt", "Eq"),
    "Is": ("IsNot",),
    "IsNot": ("Is",),
    "In": ("NotIn",),
    "NotIn": ("In",),
}
_OTHERS = (
    *("ReplaceUnaryOperator_USub_UAdd", "ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_Delete_Not"),
    *("ReplaceUnaryOperator_Delete_Invert", "AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    *("ExceptionReplacer", "NumberReplacer", "ZeroIterationForLoop"),
)


class Change(NamedTuple):
    """A mutant: the `index`-th change that a Cosmic Ray operator makes to a module. The change begins at `place`."""

    operator: str
    index: int
    place: tuple[int, int]


def changes(source: str) -> Iterator[Change]:
    """All changes that can be made to a module's source."""
    from cosmic_ray.ast import get_ast
    from cosmic_ray.plugins import get_operator

    is_tested = _tested(source)

    def walk(node):
        yield node
        for child in getattr(node, "children", ()):
            yield from walk(child)

    signs = {
        f"Replace{operators}Operator_{old}_{new}"
        for old, news in _REPLACED_BY.items()
        for new in news
        for operators in ("Binary", "Comparison")
    }
    for name in sorted(signs) + list(_OTHERS):
        try:
            operator = get_operator(f"core/{name}")()
        except KeyError:
            continue
        index = 0
        for node in walk(get_ast(source)):
            for place, _ in operator.mutation_positions(node):
                if is_tested(place):
                    yield Change(name, index, place)
                index += 1


def _tested(source: str) -> Callable[[tuple[int, int]], bool]:
    """Whether a place is code that tests can notice.

    Annotations, decorators, overloads, messages, `strict` of `zip`, and signatures except their defaults are not.
    """

    def span(first, last=None):
        return (first.lineno, first.col_offset), (last.lineno, last.col_offset) if last else (
            first.end_lineno,
            first.end_col_offset,
        )

    alone, defaults = [], []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            is_overload = any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
            alone += [span(d) for d in node.decorator_list]
            alone.append(span(node, None if is_overload else node.body[0]))
            defaults += [span(d) for d in (*node.args.defaults, *node.args.kw_defaults) if d and not is_overload]
        elif isinstance(node, ast.AnnAssign):
            alone.append(span(node.annotation))
        elif isinstance(node, ast.JoinedStr) or (isinstance(node, ast.keyword) and node.arg == "strict"):
            alone.append(span(node))

    def within(place, spans):
        return any(begin <= place < end for begin, end in spans)

    return lambda place: within(place, defaults) or not within(place, alone)


def sample(source: str, count: int | None, rng: random.Random) -> list[Change]:
    """One random change at each of `count` random places; all changes if `count` is None."""
    by_place: dict[tuple[int, int], list[Change]] = {}
    for change in changes(source):
        by_place.setdefault(change.place, []).append(change)
    if count is None:
        return [change for place in sorted(by_place) for change in by_place[place]]
    places = rng.sample(sorted(by_place), min(count, len(by_place)))
    return [rng.choice(by_place[place]) for place in sorted(places)]


def mutated(source: str, change: Change) -> str:
    """The source after a change."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    return mutate_code(source, get_operator(f"core/{change.operator}")(), change.index)


def changed_line(source: str, change: Change) -> str:
    """The changed line, as it reads after the change."""
    line = mutated(source, change).splitlines()[change.place[0] - 1].strip()
    return re.sub(r"(?<=[(\[]) ", "", re.sub(r"\s+", " ", line))


def _named(module: str, source: str, change: Change) -> str:
    return f"{module}:{change.place[0]} {change.operator}: {changed_line(source, change)}"


def preload() -> None:
    """Imports what the tests import, except the library and the tests."""
    for name in ("jax", "jax.export", "pytest", "hypothesis", "beartype", "jaxtyping", "flax.nnx", "flatbuffers"):
        importlib.import_module(name)
    for name in ("jax._src.pjit", "jax._src.interpreters.mlir", "jax.experimental.pallas", "jaxlib.mlir.ir"):
        importlib.import_module(name)


def run_tests(
    folder: Path, cache: Path | None, tests: str, timeout: float, keep_bytecode: bool = False
) -> tuple[str, str]:
    """Runs tests in a forked process: ("passed", "failed" or "timeout", what it printed).

    Compilations are kept in the folder `cache`, or not at all.
    """
    log = folder / "log.txt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks, but none of its threads runs here
        child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 1)
        os.dup2(1, 2)
        code = 99
        try:
            code = _child(folder, cache, tests, keep_bytecode)
        finally:
            sys.stdout.flush()
            os._exit(code)
    end = time.time() + timeout
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.time() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "timeout", log.read_text(errors="replace")
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(done[1])
    return "failed" if code else "passed", log.read_text(errors="replace")


def _child(folder: Path, cache: Path | None, tests: str, keep_bytecode: bool) -> int:
    import shlex

    import jax
    import pytest

    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
    sys.dont_write_bytecode = not keep_bytecode
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]

    class KeepCompilations:
        """Turns on XLA's compilation cache, which tests/conftest.py turns off."""

        def pytest_sessionstart(self):
            if cache is None:
                return
            jax.config.update("jax_enable_compilation_cache", True)
            jax.config.update("jax_compilation_cache_dir", str(cache))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-W", "default", *shlex.split(tests)]
    return int(pytest.main(arguments, plugins=[KeepCompilations()]))


def tests_of(module: str) -> str:
    """The tests of a module."""
    return next(tests for name, tests in TESTS.items() if module == name or module.startswith(name + "/"))


def modules() -> list[str]:
    """The modules to change, below `paged_jax/`."""
    package = ROOT / "paged_jax"
    files = [path for name in TESTS for path in (sorted((package / name).glob("*.py")) or [package / name])]
    return [str(path.relative_to(package)) for path in files if path.name != "__init__.py"]


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only modules whose path contains one of these")
    parser.add_argument("--count", type=int, help="places of each module to change (default: every change of each)")
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument(
        "--again", type=Path, help="only the survivors that this file lists, which an earlier run printed"
    )
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for a mutant's tests")
    args = parser.parse_args(argv)
    preload()
    print(f"# python -m tests.mutate {' '.join(sys.argv[1:] if argv is None else argv)}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    print(f"# commit {commit.stdout.strip()}", flush=True)
    totals, started = {"killed": 0, "survived": 0}, time.time()
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = Path(temporary, "tree"), Path(temporary, "xla")
        for name in COPIED:
            source, copy = ROOT / name, folder / name
            ignore = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, copy, ignore=ignore) if source.is_dir() else shutil.copy(source, copy)
        for module in modules():
            if args.words and not any(word in module for word in args.words):
                continue
            counts = _module(module, folder, None if module in _CALLED_BACK else cache, args)
            totals = {name: totals[name] + counts[name] for name in totals}
    print(f"total: {sum(totals.values())} mutants, {totals}, {time.time() - started:.0f} s")


def _module(module: str, folder: Path, cache: Path | None, args: argparse.Namespace) -> dict[str, int]:
    """Runs a module's mutants, and prints the survivors and the counts."""
    path, started = folder / "paged_jax" / module, time.time()
    source, times = path.read_text(encoding="utf-8"), path.stat()
    counts = {"killed": 0, "survived": 0}
    if args.again:
        listed = args.again.read_text(encoding="utf-8")
        chosen = [c for c in sample(source, None, random.Random()) if _named(module, source, c) in listed]
    else:
        chosen = sample(source, args.count, random.Random(f"{args.seed} {module}"))
    if not chosen:
        return counts
    outcome, log = run_tests(folder, cache, tests_of(module), 1200, keep_bytecode=True)
    if outcome != "passed":
        raise SystemExit(f"{module}: its tests do not pass without a change: {log[-3000:]}")
    untouched = time.time() - started
    for change in chosen:
        text = mutated(source, change)
        path.write_text(text, encoding="utf-8")
        outcome, log = run_tests(folder, cache, tests_of(module), args.timeout)
        path.write_text(source, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        counts["survived" if outcome == "passed" else "killed"] += 1
        if outcome == "passed":
            print(f"SURVIVED {_named(module, source, change)}", flush=True)
        elif outcome != "failed":
            print(f"killed by {outcome} {_named(module, source, change)}", flush=True)
    seconds = f"{time.time() - started:.0f} s, of which {untouched:.0f} s without a change"
    print(f"{module}: {sum(counts.values())} mutants, {counts['killed']} killed, {seconds}", flush=True)
    return counts


if __name__ == "__main__":
    main()
