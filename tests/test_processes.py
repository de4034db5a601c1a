"""One engine over two processes, each of which has one CPU device of a mesh of two."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paged_jax import engine
from tests import run_engine

ROOT = Path(__file__).parents[1]


def free_ports():
    """A port that is free, and so is the next."""
    while True:
        with socket.create_server(("localhost", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("localhost", port + 1)).close()
            except OSError:
                continue
            return port


@pytest.fixture(scope="module")
def wanted():
    """What one process writes on one device."""
    return run_engine.texts(run_engine.make_engine(engine.Engine, 1))


def test_an_engine_over_a_mesh_writes_the_same(wanted):
    assert run_engine.texts(run_engine.make_engine(engine.Engine, 2)) == wanted


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
    try:
        (out, err), (_, other_err) = (process.communicate(timeout=240) for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], err + other_err
    assert json.loads(out.splitlines()[-1]) == wanted
