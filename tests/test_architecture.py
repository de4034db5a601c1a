"""Tests the source by reading it: which module may import which, and that every name is defined."""

import ast
import builtins
import symtable
from pathlib import Path
from typing import get_args

import pytest

from paged_jax import Implementation

ROOT = Path(__file__).parents[1]
FILES = sorted(p for folder in ("paged_jax", "examples", "benchmarks") for p in (ROOT / folder).rglob("*.py"))

OPS_KNOW = (
    *("paged_jax._checks", "paged_jax._validate", "paged_jax._validate_latent", "paged_jax._dispatch"),
    *("paged_jax.options", "paged_jax.shapes"),
)
KERNELS_KNOW = ("paged_jax.options", "paged_jax.shapes", "paged_jax.kernels.in_place", "paged_jax.kernels.problem")
HOPPER_KERNELS = "paged_jax.kernels.mosaic_gpu"
# The modules of the package that each module may import; a folder's name stands for all modules in it.
ALLOWED = {
    "paged_jax._static": (),
    "paged_jax.allocator": ("paged_jax._static", "paged_jax.allocator"),
    "paged_jax.metadata": ("paged_jax._static",),
    "paged_jax.options": (),
    "paged_jax.shapes": ("paged_jax._static", "paged_jax.options"),
    "paged_jax.flat_pool": ("paged_jax.options", "paged_jax.shapes"),
    "paged_jax._operands": ("paged_jax.options", "paged_jax.shapes"),
    "paged_jax._checks": ("paged_jax._static", "paged_jax.shapes"),
    "paged_jax._validate": ("paged_jax._checks", "paged_jax._operands", "paged_jax.options", "paged_jax.shapes"),
    "paged_jax._validate_latent": ("paged_jax._checks", "paged_jax._operands", "paged_jax.options", "paged_jax.shapes"),
    "paged_jax._selection": (),
    "paged_jax._states": (),
    "paged_jax._splits": ("paged_jax.options",),
    "paged_jax._lowered": (),
    "paged_jax._context_parallel": ("paged_jax._operands", "paged_jax._states", "paged_jax.options"),
    "paged_jax._partition": (
        "paged_jax._context_parallel",
        "paged_jax._lowered",
        "paged_jax._splits",
        "paged_jax.options",
    ),
    "paged_jax._vmap": ("paged_jax._operands", "paged_jax._partition"),
    "paged_jax._dispatch": (
        "paged_jax._partition",
        "paged_jax._selection",
        "paged_jax._states",
        "paged_jax._vmap",
        "paged_jax.kernels",
    ),
    "paged_jax.ops": (*OPS_KNOW, "paged_jax._states", "paged_jax.ops"),
    "paged_jax.cache_ops": OPS_KNOW,
    "paged_jax.cache": ("paged_jax.ops", "paged_jax.cache_ops", *OPS_KNOW),
    "paged_jax.compat": ("paged_jax._operands", "paged_jax.compat", *OPS_KNOW),
    "paged_jax.latent_cache": ("paged_jax.ops", "paged_jax.cache_ops", *OPS_KNOW),
    "paged_jax._export": (
        *("paged_jax.allocator", "paged_jax.cache", "paged_jax.latent_cache", "paged_jax.metadata"),
        "paged_jax.options",
    ),
    "paged_jax.engine": (
        "paged_jax._static",
        "paged_jax.allocator",
        "paged_jax.cache",
        "paged_jax.cache_ops",
        "paged_jax.engine",
        "paged_jax.latent_cache",
        "paged_jax.metadata",
        "paged_jax.ops",
    ),
    "paged_jax.kernels": (),
    "paged_jax.kernels.problem": ("paged_jax.options",),
    **{f"paged_jax.kernels.{name}": (*KERNELS_KNOW, f"paged_jax.kernels.{name}") for name in get_args(Implementation)},
    f"{HOPPER_KERNELS}.hopper": (*KERNELS_KNOW, f"{HOPPER_KERNELS}.hopper"),
    # No kernel imports another one: what two of them need is in `hopper`.
    **{
        f"{HOPPER_KERNELS}.{kernel}": (*KERNELS_KNOW, f"{HOPPER_KERNELS}.hopper", f"{HOPPER_KERNELS}.{kernel}")
        for kernel in ("decode", "ragged", "mla")
    },
}
# Packages that only these folders may import.
OWNERS = {
    "flax": ("examples",),
    "triton": ("paged_jax.kernels.triton",),
    "jax_triton": ("paged_jax.kernels.triton",),
    "jax.experimental.pallas": (
        "paged_jax.kernels.mosaic_gpu",
        "benchmarks.peers",
        "examples.all_reduce",
        "examples.exchange",
        "examples.expert_kernel",
        "examples.moe",
    ),
}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# Benchmarks of choices that the library does not offer, or of a part of the engine, and the internals that they need.
INTERNALS = {
    "benchmarks.bench_choice": ("paged_jax._validate", "paged_jax.kernels.triton", "paged_jax.options"),
    "benchmarks.bench_commits": ("paged_jax.kernels.problem",),
    "benchmarks.bench_pools": ("paged_jax.engine",),
    "benchmarks.bench_scheduler": ("paged_jax.engine",),
    "benchmarks.plan_model": ("paged_jax._validate", "paged_jax.kernels.mosaic_gpu", "paged_jax.kernels.problem"),
}


def within(name, folders):
    return any(name == folder or name.startswith(folder + ".") for folder in folders)


def allowed_for(name):
    """The entry of the longest prefix of `name`."""
    prefix = name
    while prefix not in ALLOWED:
        prefix = prefix.rpartition(".")[0]
        assert prefix, f"{name} is not in ALLOWED"
    return ALLOWED[prefix]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports(path):
    name = module_name(path)
    for imported in imports(path):
        for package, owners in OWNERS.items():
            assert not within(imported, [package]) or within(name, owners), f"{name} imports {imported}"
        if not within(imported, ["paged_jax"]):
            continue
        if name.startswith("paged_jax"):
            # `from paged_jax import x` names the submodule x.
            assert name == "paged_jax" or within(imported, allowed_for(name)), f"{name} imports {imported}"
        else:
            # The names of these two are public too, without being names of the package.
            public = imported.removeprefix("paged_jax").strip(".").removeprefix("engine.").removeprefix("compat.")
            if within(imported, INTERNALS.get(name, ())):
                continue
            assert not public.startswith("_") and "." not in public, f"{name} imports {imported}, which is not public"  # noqa: PT018


def test_no_circles():
    """No module imports another one that, directly or through others, imports it; not even for types alone."""
    names = {module_name(path) for path in FILES}
    graph = {
        module_name(path): {name if name in names else name.rpartition(".")[0] for name in imports(path)}
        for path in FILES
    }
    left = {name: {other for other in others if other in names} - {name} for name, others in graph.items()}
    while ends := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in ends}
    assert not left, f"in circles, or importing what is: {sorted(left)}"


def test_public_names_are_what_init_imports():
    import paged_jax

    tree = ast.parse((ROOT / "paged_jax" / "__init__.py").read_text())
    names = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(paged_jax.__all__) == sorted(name for name in names if not name.startswith("_"))
    assert all(hasattr(paged_jax, name) for name in paged_jax.__all__)


@pytest.mark.parametrize("folder", ["paged_jax", "examples", "benchmarks", "tests"])
def test_every_name_is_defined(folder):
    """Linters cannot tell: to them, the names of axes in jaxtyping's annotations are undefined too."""
    for file in (ROOT / folder).rglob("*.py"):
        module = symtable.symtable(file.read_text("utf-8"), str(file), "exec")
        tables = [module]
        for table in tables:  # which grows by the scopes inside each one
            tables += table.get_children()
        known = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
        known |= {s.get_name() for table in tables for s in table.get_symbols() if s.is_declared_global()}
        used = {
            s.get_name() for table in tables[1:] for s in table.get_symbols() if s.is_referenced() and s.is_global()
        }
        assert not used - known - {*dir(builtins), "__file__"}, file
