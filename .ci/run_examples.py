"""Runs every example in the docstrings of the installed package; it needs nothing but the package and JAX."""

import doctest
import importlib
import importlib.metadata
import pkgutil
import sys

import paged_jax

_PARTS = ("paged_jax.kernels.triton.", "paged_jax.kernels.mosaic_gpu.")  # no examples there, and they may need extras


def main() -> int:
    """Returns 0 if all examples do what they show."""
    version = importlib.metadata.version("paged_jax")
    assert version == paged_jax.__version__, f"the metadata say {version}, the package {paged_jax.__version__}"
    attempted = failed = 0
    for module in pkgutil.walk_packages(paged_jax.__path__, "paged_jax."):
        if not module.name.startswith(_PARTS):
            results = doctest.testmod(importlib.import_module(module.name))
            attempted, failed = attempted + results.attempted, failed + results.failed
    jax = importlib.metadata.version("jax")
    print(f"paged_jax {version} with jax {jax}: {attempted} lines of examples, {failed} failed")
    return int(failed > 0 or attempted < 100)


if __name__ == "__main__":
    sys.exit(main())
