"""Compiles Mosaic GPU kernels to Hopper's machine code on a machine without a GPU.

    python -m tests.hopper_compiler MODULE:NAME[:ARGUMENT]

JAX's CUDA plugin compiles for a description of a GPU, if CUDA's ptxas and nvlink are there. It does so in a process of
its own, as it ends the process where something is amiss. `NAME` is a function of that module that yields pairs: a case,
and a function that traces a call for shapes of arrays, which it passes through a function that puts them on the device.

The assembler's report on each kernel goes to stdout, after a line with the case's name. With MOSAIC_GPU_DUMP_PTX=1
that has the kernels' PTX, too.
"""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

_DEVICE = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  l2_cache_size: 52428800 device_memory_size: 84978434048 memory_bandwidth: 3352320000000 clock_rate_ghz: 1.98
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_PLUGIN = "jax_plugins.xla_cuda13"
_CASE = "compiled case: "


def lacks() -> str | None:
    """Says what is missing here for compilations; None if nothing is."""
    try:
        importlib.import_module(_PLUGIN)
    except ImportError:
        return "needs JAX's CUDA plugin"
    tools = [tool for tool in ("ptxas", "nvlink") if not shutil.which(tool)]
    return f"needs CUDA's {' and '.join(tools)} on the PATH" if tools else None


def reports(cases: str) -> list[tuple[str, str]]:
    """Compiles the cases of `MODULE:NAME[:ARGUMENT]`; returns each one's name and what the assembler says of it."""
    command = [sys.executable, "-m", "tests.hopper_compiler", cases]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    _, *of_cases = done.stdout.split(_CASE)
    return [(name, said) for name, _, said in (of_case.partition("\n") for of_case in of_cases)]


def main(cases: str) -> None:
    """Compiles, and prints what the assembler says."""
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    import jax
    from jax.sharding import SingleDeviceSharding

    sharding = SingleDeviceSharding(_device())

    def on_device(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    module, function, *arguments = cases.split(":")
    for case, trace in getattr(importlib.import_module(module), function)(*arguments):
        print(f"{_CASE}{case}", flush=True)
        trace(on_device).lower(lowering_platforms=("cuda",)).compile()


def _device() -> Any:
    """A device that nothing runs on."""
    from jax._src.lib import xla_client
    from jax.experimental.topologies import TopologyDescription

    library = Path(str(importlib.import_module(_PLUGIN).__file__)).with_name("xla_cuda_plugin.so")
    api = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    xla_client.initialize_pjrt_plugin("cuda")
    topology = xla_client.make_c_api_device_topology(api, "hopper", target_config=_DEVICE, topology="1x1x1")
    return TopologyDescription(topology._make_compile_only_devices()).devices[0]


if __name__ == "__main__":
    main(sys.argv[1])
