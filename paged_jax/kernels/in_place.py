"""Keeps XLA from giving two buffers to an array that a kernel updates in place.

In a loop over stacked arrays, XLA's "dynamic slice fusion" is on by default. It fuses a kernel with the slices that the
kernel reads, and with the update of the slice that it writes. XLA then forgets that an operand and a result of the
kernel are one buffer, and the kernel updates a slice that was never written. With jax 0.11.2 on an H200, such a loop
gave zeros. XLA fuses nothing across an optimization barrier. With one, a loop over stacked arrays copies its slice, and
an array that is not a slice is still updated in place (benchmarks/LOG.md, "Kernels in place and XLA's loops").
"""

from typing import Any

import jax


def apart(arrays: Any) -> Any:
    """Puts operands or results of a kernel that updates arrays in place behind a barrier to fusion."""
    return jax.lax.optimization_barrier(arrays)
