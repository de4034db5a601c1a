"""Starts the processes that share a model on one host, each with a device of its own.

All get the same command line. The first one serves; the others follow its steps, and end after it. So signals are
passed on to the first one only. A process that fails ends all of them, because the others would wait for it.
"""

import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any


def run(command: Sequence[str], count: int) -> int:
    """Runs a server's processes until they end.

    Args:
        command: the server's command line. It gets the option `--process`.
        count: the number of processes.

    Returns:
        The exit code of the first process that fails, or 0.
    """
    processes: list[subprocess.Popen] = []

    def pass_on(number: int, _: Any) -> None:
        for process in processes[:1]:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for index in range(count):
            environment = os.environ | {"JAX_LOCAL_DEVICE_IDS": str(index)}
            # A terminal sends its signals to all processes of a session.
            own = [*command, "--process", str(index)]
            processes.append(subprocess.Popen(own, env=environment, start_new_session=True))
        code = wait(processes)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code  # as shells say which signal ended a process


def wait(processes: Sequence[subprocess.Popen], timeout_seconds: float = math.inf) -> int:
    """Waits for all processes. Returns the exit code of the first that fails, which ends the others, or 0."""
    deadline = time.monotonic() + timeout_seconds
    try:
        while True:
            codes = [process.poll() for process in processes]
            if failed := next(filter(None, codes), 0):
                return failed
            if None not in codes:
                return 0
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(processes[0].args, timeout_seconds)
            time.sleep(0.05)
    finally:
        for process in processes:  # which would wait for the one that failed
            process.kill()
            process.wait()
