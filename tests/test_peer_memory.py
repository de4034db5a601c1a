"""Tests memory that processes share, by processes with a device each, and what runs over it."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import bench_scale, scale_processes
from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[1]


def found_by(count, folder, monkeypatch, **environment):
    """What each of `count` processes of tests/run_peers.py found."""
    monkeypatch.chdir(ROOT)
    processes = scale_processes.start([sys.executable, "-m", "tests.run_peers", str(folder)], count, **environment)
    assert scale_processes.wait(processes, 3 * PATIENCE) == 0
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(count)]


@pytest.mark.slow
def test_processes_on_cpus(tmp_path, monkeypatch):
    """A process's row has its own address and its mappings of the others' memory. All processes get the same errors."""
    first, second = found_by(2, tmp_path, monkeypatch, JAX_PLATFORMS="cpu", XLA_FLAGS="")
    assert first["table"] == [[0, 0, 0, 1 << 8, 0, 2]]
    assert second["table"] == [[1, 0, 1, 1, 0, 2 << 8]]
    name = "cuMemsetD32_v2", "cuCtxSynchronize", "cuIpcGetMemHandle", "cuCtxPopCurrent_v2"
    assert first["called"][3:8] == ["cuMemAlloc_v2", *name]
    assert first["called"].count("cuIpcOpenMemHandle_v2") == 1
    for found in (first, second):
        assert found["lacks"] == "a device is no Hopper GPU"
        assert found["hosts"] == "the processes are on different hosts"
        for name in ("cuMemAlloc_v2", "cuIpcOpenMemHandle_v2"):
            assert found[name] == f"{name} gave error 801, on device 1"
        assert found["sums"] == first["sums"]
        assert found["sums"]["same_bits"]
        assert [(row["case"], row["processes"]) for row in found["rows"]] == [
            ("small/tp=2/decode/2x64", 2),
            ("small/tp=2/prefill/1x64", 2),
        ]
        assert all(row["us"] > 0 for row in found["rows"])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 4, 8])
def test_kernel_with_a_process_for_each_gpu(count, tmp_path, monkeypatch):
    """Results have the same bits in all processes and in each run, and an error that rounding explains."""
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} GPUs")
    # This process may have reserved most of the GPUs' memory.
    found = found_by(count, tmp_path, monkeypatch, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    if found[0]["lacks"] is not None:
        pytest.skip(found[0]["lacks"])
    for sums in zip(*(each["sums"] for each in found), strict=True):
        assert all(each == sums[0] for each in sums)  # a digest of the bits among them
        assert sums[0]["same_bits"]
        assert sums[0]["error"] < 2 * 2**-9


def test_processes_that_wait_for_one_that_failed_are_ended():
    code = "import os, sys, time; time.sleep(600 if os.environ['PAGED_JAX_PROCESS'][0] == '0' else 0); sys.exit(3)"
    processes = scale_processes.start([sys.executable, "-c", code], 2)
    assert scale_processes.wait(processes, PATIENCE) == 3
    assert processes[0].returncode == -9


def test_processes_that_hang_are_ended():
    processes = scale_processes.start([sys.executable, "-c", "import time; time.sleep(600)"], 2)
    with pytest.raises(subprocess.TimeoutExpired):
        scale_processes.wait(processes, 0.1)
    assert [process.returncode for process in processes] == [-9, -9]


def test_files_of_several_sizes_are_joined(tmp_path, monkeypatch):
    """Each size has processes of its own. A size that fails keeps the rows of the sizes before it."""
    started = []

    def start(command, count):
        started.append((command, count))
        Path(command[-1]).write_text(json.dumps({"num_gpus": count, "rows": [f"row of {count}"]}))
        return []

    monkeypatch.setattr(scale_processes, "start", start)
    monkeypatch.setattr(scale_processes, "wait", lambda _: 5 if started[-1][1] == 4 else 0)
    out = tmp_path / "out.json"
    given = ["--part", "models", "--processes", "--tp", "2,4,8", "--out", str(out)]
    assert bench_scale.main(given) == 5
    assert [(command[3:-4], command[-4:-1], count) for command, count in started] == [
        (given, ["--tp", str(count), "--out"], count) for count in (2, 4)
    ]
    assert json.loads(out.read_text()) == {"num_gpus": 4, "rows": ["row of 2", "row of 4"]}


@pytest.mark.parametrize(
    "given", [["--part", "ops", "--tp", "2"], ["--part", "models"], ["--part", "models", "--tp", "1,2"]]
)
def test_what_processes_cannot_run(given, capsys):
    with pytest.raises(SystemExit):
        bench_scale.main([*given, "--processes"])
    assert "--processes needs" in capsys.readouterr().err
