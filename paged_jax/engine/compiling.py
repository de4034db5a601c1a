"""Compiles all programs of an engine at the same time, with a progress bar."""

import collections.abc
import concurrent.futures
import contextlib
from typing import Any

from paged_jax.engine.batch import StepShape

_COMPILERS = 8  # how many threads compile at the same time

type CompilerOptions = dict[str, Any] | collections.abc.Callable[[int], dict[str, Any]]


def compile_all(lowered: dict[Any, Any], options: CompilerOptions | None, show_progress: bool) -> dict[Any, Any]:
    """Compiles lowered programs, by their names.

    Args:
      lowered: the programs.
      options: XLA's options, or a function as `Engine` takes it.
      show_progress: whether a bar on stderr shows how many are compiled; it needs the package rich.

    Returns:
      The compiled programs.
    """
    with (
        concurrent.futures.ThreadPoolExecutor(_COMPILERS) as compilers,
        _progress(show_progress, len(lowered)) as advance,
    ):
        futures = {
            name: compilers.submit(program.compile, options_of(name, options)) for name, program in lowered.items()
        }
        for future in concurrent.futures.as_completed(futures.values()):
            future.result()
            advance()
    return {name: future.result() for name, future in futures.items()}


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
