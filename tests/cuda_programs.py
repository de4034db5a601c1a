"""Compiles whole programs, Triton's kernels included, for a Hopper GPU on a machine without a GPU.

    python -m tests.cuda_programs IMPLEMENTATION:CASE ...

prints a line of JSON for each case of `rpa_cases`: the bytes of the donated pool, the bytes of results that alias an
argument, the bytes of scratch memory, the operations on whole pools, and whether the program rounds anything to 8 bits.
XLA takes the assembler that triton ships.
"""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests import hopper_compiler

# As if there were a GPU, the plugin then registers Triton's calls. It would look for cuDNN otherwise.
_ENVIRONMENT = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cpu"}


def lacks() -> str | None:
    """Says what is missing here for compilations; None if nothing is."""
    if missing := [name for name in ("jax_plugins.xla_cuda13", "jax_triton", "triton") if not _found(name)]:
        return f"needs {' and '.join(missing)}"
    return None if _assembler().exists() else "needs a triton that ships ptxas-blackwell"


def described(calls: list[tuple[str, str]], folder: Path) -> list[dict]:
    """Compiles calls, each of an implementation and a case; returns what `main` prints.

    It does so in a process of its own, with the assembler in `folder`.
    """
    (folder / "ptxas").symlink_to(_assembler())
    environment = os.environ | _ENVIRONMENT | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "tests.cuda_programs", *map(":".join, calls)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _assembler() -> Path:
    spec = importlib.util.find_spec("triton")
    return Path(str(spec and spec.origin)).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"


def main(calls: list[str]) -> None:
    """Compiles, and prints what the programs do to pools; Triton's kernel writes for every implementation."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from paged_jax import _dispatch
    from tests import rpa_cases

    jax.devices("cpu")  # which registers the plugin
    options = {"target_config": hopper_compiler._DEVICE, "topology": "1x1x1"}
    (device,) = topologies.get_topology_desc("hopper", "cuda", **options).devices
    for implementation, _, name in (call.partition(":") for call in calls):
        _dispatch._on_cuda = lambda *_, first=implementation: [first, "triton"]  # in this order
        case = rpa_cases.BY_NAME[name]
        made = rpa_cases.make(case)
        shapes = [list(x.shape) for x in made.arrays]
        shapes[3][0] *= 64  # beside such a pool all other memory is small
        arrays = [
            jax.ShapeDtypeStruct(shape, x.dtype, sharding=SingleDeviceSharding(device))
            for shape, x in zip(shapes, made.arrays, strict=True)
        ]
        call = jax.jit(functools.partial(rpa_cases.function(case), **made.options), donate_argnums=3)
        program = call.trace(*arrays).lower(lowering_platforms=("cuda",)).compile()
        memory = program.memory_analysis()
        on_pools = set(re.findall(rf"= \w+\[{shapes[3][0]},\S* ([\w-]+)\(", program.as_text()))
        facts = {"pool": 64 * made.pool.nbytes, "aliased": memory.alias_size_in_bytes}
        facts |= {"scratch": memory.temp_size_in_bytes, "on_pools": sorted(on_pools)}
        facts["rounds"] = bool(re.search(r"= f8\w+\[\S* convert\(", program.as_text()))
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
