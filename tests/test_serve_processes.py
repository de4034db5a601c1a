"""Tests servers of several processes: who starts them, who gets signals, and how they end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from examples import serve
from examples.server import processes
from tests.conftest import PATIENCE
from tests.http_server import wait_for
from tests.test_processes import free_ports

ROOT = Path(__file__).parents[1]

# The first process waits for a signal, as a server does, and tells the others of its end by a file.
SERVER = """
import os, pathlib, signal, sys, time
folder, index = pathlib.Path(sys.argv[1]), int(sys.argv[3])
ended = folder / "ended"
def end(*_):
    ended.touch()
    sys.exit({first})
if index == 0:
    signal.signal(signal.SIGTERM, end)
(folder / str(index)).write_text(f"{{os.environ['JAX_LOCAL_DEVICE_IDS']}} {{os.getpid()}} {{os.getsid(0)}}")
if index:
    {other}
while not ended.exists():
    time.sleep(0.01)
"""


def start(folder, first=0, other="pass"):
    """Three processes, and what they wrote once all have begun."""
    command = [sys.executable, "-c", SERVER.format(first=first, other=other), str(folder)]
    code = f"import sys; from examples.server import processes; sys.exit(processes.run({command!r}, 3))"
    runner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_for(lambda: all((folder / str(i)).exists() and (folder / str(i)).read_text() for i in range(3)))
    return runner, [list(map(int, (folder / str(i)).read_text().split())) for i in range(3)]


def ends(pid):
    """Whether a process ends soon."""
    with contextlib.suppress(ProcessLookupError):
        for _ in range(100 * PATIENCE):
            os.kill(pid, 0)
            time.sleep(0.01)
        return False
    return True


@pytest.mark.parametrize("code", [0, 3])
def test_a_signal_goes_to_the_first_process(tmp_path, code):
    """Each process has a device and a session of its own. The first one's exit code is that of all."""
    runner, found = start(tmp_path, first=code)
    assert [device for device, _, _ in found] == [0, 1, 2]
    assert all(session == pid != os.getsid(0) for _, pid, session in found)
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(PATIENCE) == code
    assert all(ends(pid) for _, pid, _ in found)


def test_a_process_that_fails_ends_the_others(tmp_path):
    runner, found = start(tmp_path, other="time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)")
    assert runner.wait(PATIENCE) == 128 + signal.SIGKILL
    assert all(ends(pid) for _, pid, _ in found)


def test_who_starts_processes(monkeypatch):
    """Without --process this process starts the others, with the same options; with it, it is one of them."""
    started = []
    monkeypatch.setattr(processes, "run", lambda *given: started.append(given) or 7)
    arguments = ["--mesh", "tp=2", "--processes", "2"]
    assert serve.main(arguments) == 7
    [(command, count)] = started
    assert command[1:] == ["-m", "examples.serve", *arguments]
    assert count == 2
    assert serve.parse([]).process == 0
    assert serve.parse([*arguments, "--process", "1"]).process == 1


@pytest.mark.slow
def test_a_server_of_two_processes(tmp_path):
    """A client gets a text of a model that two processes share, and a signal ends both."""
    port = free_ports()
    options = ["--max-num-seqs", "2", "--max-tokens-per-step", "8", "--mesh", "tp=2", "--processes", "2"]
    where = ["--port", "0", "--coordinator", f"localhost:{port}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONWARNINGS": "ignore"}
    log = tmp_path / "log"
    with log.open("w") as stderr:
        server = subprocess.Popen(
            [sys.executable, "-m", "examples.serve", *options, *where], cwd=ROOT, env=environment, stderr=stderr
        )
    try:
        wait_for(lambda: " at http" in log.read_text() or server.poll() is not None)
        url = log.read_text().partition(" at ")[2].split()[0]
        body = json.dumps({"model": "tiny", "prompt": "A list is ", "max_tokens": 4, "temperature": 0}).encode()
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(PATIENCE)
    assert code == 0
