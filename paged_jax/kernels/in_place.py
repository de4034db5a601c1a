"""Keeps XLA from giving two buffers to an array that a kernel updates in place.

In a loop over stacked arrays XLA fuses a kernel with the slices that it reads, and with the update of the slice that it
writes (its "dynamic slice fusion", which is on by default). It then forgets that an operand and a result of the kernel
are one buffer, and the kernel updates a slice that was never written: a loop's results were zeros on an H200, with jax
0.11.2. XLA fuses nothing across an optimization barrier: with one, a loop over stacked arrays copies its slice, and an
array that is no slice is updated in place as before (benchmarks/LOG.md, "Kernels in place and XLA's loops").
"""

from typing import Any

import jax


def apart(arrays: Any) -> Any:
    """Returns these operands or results of a kernel that updates arrays, behind a barrier to fusion."""
    return jax.lax.optimization_barrier(arrays)
