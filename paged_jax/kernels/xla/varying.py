"""Loops inside `shard_map`: a carry must be declared to vary over the mesh axes that a step makes it vary over."""

from typing import Any

import jax
from jax import lax


def vary_as(carry: Any, *operands: Any) -> Any:
    """Declares each array of `carry` to vary over the manual mesh axes that any of the operands varies over.

    Under `shard_map(..., check_vma=True)` a loop's carry has one type throughout, and zeros that a loop starts from
    vary over no axis while the sums that it makes of sharded operands do. Elsewhere nothing varies and nothing is done.

    Args:
      carry: a pytree of arrays.
      *operands: pytrees of all arrays that a step of the loop computes with.
    """
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves((carry, operands))))

    def vary(x):
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, carry) if axes else carry
