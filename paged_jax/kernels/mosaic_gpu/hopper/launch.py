"""The launch of a kernel whose arguments are trees, and of a function in each warp.

Leaves of the trees are arrays on the host, and references on the device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu


def launch(body: Callable[[Any, Any, Any], None], inputs: Any, outputs: Any, scratch: Any, **keywords: Any) -> Any:
    """Runs a kernel whose programs have several warpgroups.

    Args:
      body: the kernel, a function of the references to inputs, to outputs, and to the program's scratch.
      inputs: a tree of arrays.
      outputs: a tree of the outputs' shapes and dtypes.
      scratch: a tree of the shared memory and barriers of a program.
      **keywords: further arguments of `plgpu.kernel`.

    Returns:
      The outputs.
    """
    arrays, tree = jax.tree.flatten(inputs)
    out_types, out_tree = jax.tree.flatten(outputs)

    def kernel(*refs):
        *gmem, smem = refs
        inputs_gmem = jax.tree.unflatten(tree, gmem[: len(arrays)])
        body(inputs_gmem, jax.tree.unflatten(out_tree, gmem[len(arrays) :]), smem)

    run = plgpu.kernel(kernel, out_type=tuple(out_types), scratch_types=(scratch,), thread_name="warpgroup", **keywords)
    return jax.tree.unflatten(out_tree, run(*arrays))


def as_warps(function: Callable[[], None]) -> None:
    """Runs a function in each warp of the warpgroup. There `lax.axis_index("warp")` is the warp's number."""
    pl.kernel(function, mesh=plgpu.WarpMesh(axis_name="warp"))()  # pyright: ignore[reportCallIssue]
