"""Compiles the programs of an engine in threads, while further ones are lowered, with a progress bar."""

import collections.abc
import concurrent.futures
import contextlib
from typing import Any

from paged_jax.engine.batch import StepShape

_COMPILERS = 8  # how many threads compile at the same time

type CompilerOptions = dict[str, Any] | collections.abc.Callable[[int], dict[str, Any]]


class Compiler:
    """Compiles lowered programs at the same time. As a context it ends its threads.

    Args:
      options: XLA's options, or a function as `Engine` takes it.
      show_progress: whether a bar on stderr shows how many programs are compiled; it needs the package rich.
    """

    def __init__(self, options: CompilerOptions | None, show_progress: bool):
        self._options, self._show_progress = options, show_progress
        self._threads = concurrent.futures.ThreadPoolExecutor(_COMPILERS)
        self._programs: dict[Any, concurrent.futures.Future] = {}

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def __contains__(self, name: Any) -> bool:
        return name in self._programs

    def add(self, name: Any, lowered: Any) -> None:
        """Starts to compile a lowered program, and returns at once."""
        self._programs[name] = self._threads.submit(lowered.compile, options_of(name, self._options))

    def finish(self) -> dict[Any, Any]:
        """Waits for all programs, and returns them by their names."""
        with _progress(self._show_progress, len(self._programs)) as advance:
            for future in concurrent.futures.as_completed(self._programs.values()):
                future.result()
                advance()
        return {name: future.result() for name, future in self._programs.items()}


def options_of(name: Any, options: CompilerOptions | None) -> dict[str, Any] | None:
    """XLA's options for the program of this name."""
    if callable(options):
        return options(name.num_tokens) if isinstance(name, StepShape) else None
    return options


@contextlib.contextmanager
def _progress(is_shown: bool, total: int) -> collections.abc.Iterator[collections.abc.Callable[[], None]]:
    """Shows a progress bar; the caller calls what this yields after each of the `total` programs."""
    if not is_shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Compiling", total=total)
        yield lambda: progress.advance(task)
