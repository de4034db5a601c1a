"""Measures in several processes: all of them compile side by side, and then measure one after the other.

Compiling a kernel takes up to half a minute of one core, and timing it takes less than a second. Nothing compiles while
anything is timed. If a call breaks its process, as an illegal access does, only the cases of that process are lost.
"""

import dataclasses
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import measure
from benchmarks.cases import Case
from benchmarks.measure import Work
from benchmarks.peers import Answer

_PATIENCE_S = 240.0  # how long to wait for processes that compile
_LONGEST_S = 120.0  # how long to wait for an answer; a process that takes longer counts as hanging
_SHORT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "All configs failed")  # messages of XLA and its autotuner


def dealt(cases: Sequence[Case], processes: int) -> list[list[Case]]:
    """Deals out the cases to processes. Cases that share programs go to the same process."""
    groups: dict[Any, list[Case]] = {}
    for case in cases:
        groups.setdefault(measure.program_key(case), []).append(case)
    hands = [[] for _ in range(min(processes, len(groups)))]
    for i, group in enumerate(groups.values()):
        hands[i % len(hands)] += group
    return hands


class Processes:
    """Processes that share the cases of some work. They compile from the start.

    Args:
      work: what to measure; pickle must take it.
      processes: the largest number of processes.
    """

    def __init__(self, work: Work, processes: int):
        context = multiprocessing.get_context("spawn")  # a fork would share JAX's state of the GPU
        self._work = work
        self._works = [dataclasses.replace(work, cases=hand) for hand in dealt(work.cases, processes)]
        self._processes, self._connections = [], []
        for part in self._works:
            here, there = context.Pipe()
            process = context.Process(target=_run, args=(there, part), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)

    def wait(self, patience_s: float = _PATIENCE_S) -> list[int]:
        """Waits, up to a limit, until all processes have compiled or ended. Returns the numbers of those that have."""
        waiting = dict(zip(self._connections, range(len(self._connections)), strict=True))
        deadline = time.monotonic() + patience_s
        while waiting:
            found = multiprocessing.connection.wait(list(waiting), max(0, deadline - time.monotonic()))
            if not found:
                break
            for connection in found:
                waiting.pop(connection)  # type: ignore[arg-type]
        return [i for i in range(len(self._processes)) if i not in waiting.values()]

    def answers(self) -> Iterator[Answer]:
        """Yields all answers, one process after the other. Processes that still compile come last.

        A process keeps its part of the GPU's memory until it ends, so the first ones to measure may find too little.
        Cases that fail for this reason are measured again, by a single process, and yield second answers.
        """
        short = set()
        for answer in self._one_after_the_other():
            if any(words in answer.fields.get("failed", "") for words in _SHORT_OF_MEMORY):
                short.add(answer.case)
            yield answer
        if short and len(self._works) > 1:
            cases = [case for case in self._work.cases if case.name in short]
            alone = Processes(dataclasses.replace(self._work, cases=cases), 1)
            try:
                alone.wait()
                yield from alone._one_after_the_other()
            finally:
                alone.close()

    def _one_after_the_other(self) -> Iterator[Answer]:
        ready = self.wait(0)
        for i in ready + [i for i in range(len(self._processes)) if i not in ready]:
            part, connection = self._works[i], self._connections[i]
            left = {(case.name, name): kind for case in part.cases for name, kind, _ in part.contenders}
            reason = "its process ended early"
            try:
                _receive(connection)
                connection.send("go")
                while (answer := _receive(connection)) is not None:
                    left.pop((answer.case, answer.contender))
                    yield answer
            except TimeoutError:
                reason = f"took more than {_LONGEST_S:.0f} s"
            except (EOFError, ConnectionError):
                pass
            self._processes[i].kill()  # this frees its memory on the GPU sooner than an orderly end would
            self._processes[i].join()
            for (case, name), kind in left.items():
                yield Answer(case, name, kind, {"failed": reason})

    def close(self) -> None:
        """Ends all processes."""
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.kill()
            process.join()
            connection.close()


def _receive(connection: multiprocessing.connection.Connection) -> Any:
    if not connection.poll(_LONGEST_S):
        raise TimeoutError
    return connection.recv()


def _run(connection: multiprocessing.connection.Connection, work: Work) -> None:
    programs = measure.compile_ahead(work)
    connection.send("compiled")
    connection.recv()
    for answer in measure.measure(work, programs):
        connection.send(answer)
    connection.send(None)
