"""Shares memory between processes with a device each: `python -m tests.run_peers FOLDER`.

tests/test_peer_memory.py starts the processes. Each of them writes what it found as JSON to a file in the folder. With
CPU devices a substitute of CUDA's driver gives addresses, and the steps reduce by XLA.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks import bench_scale, scale_processes, scale_reduce, scale_steps
from examples import all_reduce, peer_memory
from examples.sharding import make_mesh


class Driver:
    """A substitute of CUDA's driver, whose calls get the objects of ctypes. A handle is a process's number + 1."""

    def __init__(self):
        self.called: list[str] = []
        self.broken = ""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name == self.broken:
                return 801
            if name == "cuMemAlloc_v2":
                arguments[0]._obj.value = (jax.process_index() + 1) << 40
            elif name == "cuIpcGetMemHandle":
                arguments[0]._obj.content[0] = jax.process_index() + 1
            elif name == "cuIpcOpenMemHandle_v2":
                arguments[0]._obj.value = arguments[1].content[0] << 32 | jax.process_index()
            return 0

        return call


def lack(mesh: Mesh) -> str | None:
    """Says why the processes cannot share memory."""
    try:
        peer_memory.of_processes(mesh, 1, 0)
    except peer_memory.PeerMemoryError as error:
        return str(error)


def with_substitute(mesh: Mesh) -> dict[str, Any]:
    """Finds this process's row of the table, and the error of each call of CUDA that fails in one process."""
    driver = Driver()
    peer_memory._driver = lambda: driver  # type: ignore[assignment]
    table = all_reduce.PeerSum.over(mesh, all_reduce.MULTIPLE).table
    found: dict[str, Any] = {
        "table": np.asarray(table.addressable_shards[0].data).tolist(),
        "called": list(driver.called),
    }
    for broken in ("cuMemAlloc_v2", "cuIpcOpenMemHandle_v2"):
        with mock.patch.object(driver, "broken", broken if jax.process_index() else ""):
            found[broken] = lack(mesh)
    with mock.patch.object(peer_memory, "_host", return_value=bytes([jax.process_index()] * 32)):
        found["hosts"] = lack(mesh)
    return found


def sum_norm(part: jax.Array, residual: jax.Array, scale: jax.Array, table: jax.Array, **_: Any) -> Any:
    """XLA's sum and norm, in the kernel's place."""
    assert table.shape == (2 + 2 * jax.process_count(),)
    if part.ndim == 3:
        part = part.sum(axis=0).astype(jnp.bfloat16)
    return scale_reduce.sum_norm(part, residual, scale)


def rows_of_a_model() -> list[dict[str, Any]]:
    """Rows of `bench_scale` of a small model, which takes the kernel's place."""
    all_reduce.lacks, all_reduce.sum_norm = (lambda *_: None), sum_norm  # type: ignore[assignment]
    report = bench_scale.Report("test", None)
    config = scale_steps.MODELS["llama3-8b"]
    small = {"vocab_size": 64, "embedding_size": 32, "hidden_size": 32, "intermediate_size": 64, "head_size": 16}
    heads = {"layers": config.layers[:1], "num_heads": 4, "num_kv_heads": 2}
    models = {"small": dataclasses.replace(config, **small, **heads)}
    bench_scale.run_models(report, models, [jax.process_count()], [2], 64, prompts=1)
    return report.rows


def main(folder: str) -> None:
    """Runs one process."""
    assert scale_processes.join()
    mesh = make_mesh({"dp": 1, "tp": jax.process_count()})
    found: dict[str, Any] = {"lacks": all_reduce.lacks(mesh, all_reduce.MULTIPLE, jnp.bfloat16)}
    shapes = [(rows, size * all_reduce.MULTIPLE) for rows in (1, 37, all_reduce.MOST_ROWS) for size in (1, 8)]
    if jax.default_backend() == "cpu":
        found |= with_substitute(mesh) | {"sums": scale_reduce.check(mesh, 2, 64, "xla"), "rows": rows_of_a_model()}
    elif found["lacks"] is None:
        found["sums"] = [scale_reduce.check(mesh, *shape, "called") for shape in shapes]
    Path(folder, f"{jax.process_index()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
