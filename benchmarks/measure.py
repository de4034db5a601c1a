"""Measures cases with contenders in one process: draws the inputs, compiles, checks each result, and times it."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import inputs as inputs_lib
from benchmarks import peers, timing
from benchmarks.cases import Case
from benchmarks.peers import Answer
from benchmarks.report import first_line
from benchmarks.timing import Ceiling

TOLERANCE = 2e-2  # a result's largest error, relative to its norm; bfloat16 kernels have 1e-3 to 1e-2


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark: its cases, its unit of work, and its contenders. It must be picklable, to be sent to processes.

    Attributes:
      op: the benchmark's name, as in ``bench_<op>``.
      cases: the cases that it can time.
      work: returns the bytes or operations of a case, in the ceiling's unit.
      ceiling: measures the ceiling, given the work of all cases.
      implementation: makes a contender of ours from a name on the command line; raises ValueError for other names.
      peers: the peers that run in this process, by name.
      elsewhere: the names of `peers.TORCH` that run in PyTorch's process.
      timer: the function that times calls of a compiled function.
      peer_timing: how PyTorch's process times peers: parameters of `timing.time_calls`.
    """

    op: str
    cases: Sequence[Case]
    work: Callable[[Case], int]
    ceiling: Callable[[Iterable[int]], Ceiling]
    implementation: Callable[[str], peers.Build]
    peers: dict[str, peers.Build]
    elsewhere: Sequence[str] = ()
    timer: Callable[..., timing.Timing] = timing.time_calls
    peer_timing: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Work:
    """Cases, and the contenders with which each case is measured.

    Attributes:
      benchmark: the benchmark to which they belong.
      cases: the cases, in the order in which they are measured.
      implementations, peer_names: the contenders' names. These peers run in this process.
      memory: how many bytes the device has for arrays; None for no limit.
      pool_bytes: the parameter of `inputs.make`.
      timer: replaces the benchmark's timer, unless it is None.
    """

    benchmark: Benchmark
    cases: Sequence[Case]
    implementations: Sequence[str]
    peer_names: Sequence[str]
    memory: int | None = None
    pool_bytes: int = inputs_lib.POOL_BYTES
    timer: Callable[..., timing.Timing] | None = None

    @property
    def contenders(self) -> list[tuple[str, str, peers.Build]]:
        """Name, kind and maker of each contender."""
        ours = [(name, "implementation", self.benchmark.implementation(name)) for name in self.implementations]
        return ours + [(name, "peer", self.benchmark.peers[name]) for name in self.peer_names]

    def make(self, case: Case) -> inputs_lib.Inputs:
        """The inputs of a case."""
        return inputs_lib.make(case, pool_bytes=self.pool_bytes, memory=self.memory)


class Programs:
    """Compiles candidates. Cases of one engine share programs, because a program depends on shapes only."""

    def __init__(self):
        self._compiled: dict[Any, tuple[Any, float]] = {}

    def get(self, case: Case, contender: str, kind: str, candidate: peers.Candidate) -> tuple[Any, float]:
        """A candidate's program, and the seconds that compiling it took."""
        key = contender, candidate.label, program_key(case) if kind == "implementation" else case
        if key not in self._compiled:
            start = time.perf_counter()
            compiled = candidate.fn.lower(*candidate.argsets[0]).compile()
            self._compiled[key] = compiled, time.perf_counter() - start
        return self._compiled[key]


def program_key(case: Case) -> Case:
    """Cases with the same key share programs. A case without an engine's shapes is its own key."""
    return case if case.shapes is None else dataclasses.replace(case, name="", seq_lens=(), query_lens=None)


def compile_ahead(work: Work) -> Programs:
    """Compiles all programs, including those that draw inputs and check results. `measure` reports errors."""
    programs = Programs()
    for case in {program_key(case): case for case in work.cases}.values():
        with contextlib.suppress(Exception):
            inputs = work.make(case)
            inputs_lib.truth(case, inputs)
            for name, kind, build in work.contenders:
                with contextlib.suppress(Exception):
                    for candidate in abstract(build, case, inputs):
                        with contextlib.suppress(Exception):
                            programs.get(case, name, kind, candidate)
    return programs


def abstract(build: peers.Build, case: Case, inputs: inputs_lib.Inputs) -> list[peers.Candidate]:
    """A contender's candidates with shapes instead of arguments, so that a peer's copies take no memory yet."""
    found: list[peers.Candidate] = []

    def arguments():
        found.extend(build(case, inputs))
        return [candidate.argsets[0] for candidate in found]

    shapes = jax.eval_shape(arguments)
    return [candidate._replace(argsets=[args]) for candidate, args in zip(found, shapes, strict=True)]


def measure(work: Work, programs: Programs) -> Iterator[Answer]:
    """Measures each contender at each case, one after the other."""
    contenders = work.contenders
    for case in work.cases:
        try:
            inputs = work.make(case)
            expected = inputs_lib.truth(case, inputs)
        except Exception as error:  # mostly because memory ran out: the next case may fit
            for name, kind, _ in contenders:
                yield Answer(case.name, name, kind, {"failed": first_line(error)})
            continue
        for name, kind, build in contenders:
            try:
                time_one = functools.partial(_time_one, work, programs, case, name, kind, inputs, expected)
                fields = _fastest(build(case, inputs), time_one)
            except peers.Absent as reason:
                fields = {"absent": str(reason)}
            except Exception as error:  # compilers and peers may raise anything, and the other contenders still count
                fields = {"failed": first_line(error)}
            yield Answer(case.name, name, kind, fields)


def _fastest(candidates: Sequence[peers.Candidate], time_one: Callable) -> dict[str, Any]:
    """The fastest candidate's fields. If all candidates fail, this raises the last one's error."""
    best, failure = None, None
    for candidate in candidates:
        try:
            fields = time_one(candidate)
        except Exception as error:
            failure = error
            continue
        if best is None or fields["us"] < best["us"]:
            best = fields
    if best is None:
        raise failure or ValueError("no candidates")
    return best


def _time_one(
    work: Work, programs: Programs, case: Case, contender: str, kind: str, inputs, expected, candidate: peers.Candidate
) -> dict[str, Any]:
    compiled, compile_s = programs.get(case, contender, kind, candidate)
    memory = compiled.memory_analysis()
    if kind == "implementation" and memory is not None and memory.temp_size_in_bytes >= inputs.key_cache.nbytes:
        raise RuntimeError(f"needs {memory.temp_size_in_bytes / 1e9:.1f} GB of scratch: is the pool copied?")
    index, truth = expected
    rows = np.asarray(candidate.rows(compiled(*candidate.argsets[0]), index)).astype(np.float32)
    error = float(np.linalg.norm(rows - truth) / np.linalg.norm(truth))
    if not error <= TOLERANCE:
        raise ValueError(f"wrong result, relative error {error:.2g}")
    return {
        **answer_of((work.timer or work.benchmark.timer)(compiled, candidate.argsets)),
        "how": candidate.label,
        "relative_error": error,
        "compile_s": round(compile_s, 2),
    }


def answer_of(timed: timing.Timing) -> dict[str, Any]:
    """A timing as fields of a row."""
    rested = {} if timed.rested_us is None else {"rested_us": timed.rested_us}
    return {"us": timed.us, "min_us": timed.min_us, **rested, "calls": timed.calls, "kernels": timed.kernels}
