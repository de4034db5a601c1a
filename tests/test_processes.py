"""One engine over two processes. Each has one CPU device of a mesh of two."""

import concurrent.futures
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paged_jax import engine
from tests import run_engine
from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[1]


def free_ports():
    """A port that is free, and so is the next. The system gives neither to a process that asks for any port."""
    for port in random.SystemRandom().sample(range(20000, 30000, 2), 100):
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            socket.create_server(("localhost", port + 1)).close()
            return port
    raise OSError("no two ports are free")


@pytest.fixture(scope="module")
def wanted():
    """The tokens of one process on one device."""
    return run_engine.texts(run_engine.make_engine(engine.Engine, 1))


@pytest.mark.slow
def test_two_processes_write_the_same(wanted):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONWARNINGS": "ignore"}
    port = str(free_ports())
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.run_engine", "2", str(index), port, "2"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]

    def outputs(process):
        try:
            return process.communicate(timeout=5 * PATIENCE)
        finally:
            if process.returncode != 0:  # the others would wait for it
                for other in processes:
                    other.kill()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        (out, err), (_, other_err) = pool.map(outputs, processes)
    assert [process.returncode for process in processes] == [0, 0], err + other_err
    assert json.loads(out.splitlines()[-1]) == wanted
