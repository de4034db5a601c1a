"""A process for each GPU: `bench_scale --processes`.

The command starts itself once for each GPU of a mesh, and for each size of a mesh anew. The environment tells a process
its rank. All of them run the same steps; the first one prints the rows and writes the file.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from examples.server.processes import wait

_NAME = "PAGED_JAX_PROCESS"  # a process's rank, the number of processes, and the first one's port


def start(command: Sequence[str], count: int, **environment: str) -> list[subprocess.Popen]:
    """Starts processes that call `join`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", **environment}
    return [subprocess.Popen(command, env={**environment, _NAME: f"{rank},{count},{port}"}) for rank in range(count)]


def join() -> bool:
    """Whether `start` has started this process; if so, it gets the GPU of its rank, and JAX knows of the others."""
    if (told := os.environ.get(_NAME)) is None:
        return False
    rank, count, port = map(int, told.split(","))
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank, local_device_ids=[rank])
    return True


def run(arguments: Sequence[str], sizes: Sequence[int], out: Path | None) -> int:
    """Runs the benchmark on meshes of these sizes, and joins the files. Returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for size in sizes:
            part = Path(folder, f"{size}.json")
            command = [
                sys.executable,
                "-m",
                "benchmarks.bench_scale",
                *arguments,
                "--tp",
                str(size),
                "--out",
                str(part),
            ]
            code = wait(start(command, size))
            if part.exists():
                report = json.loads(part.read_text())
                rows += report["rows"]
                if out is not None:
                    out.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n")
            if code:
                return code
    return 0
