"""What keeps a kernel that works in place in one place: XLA may otherwise give it two.

In a loop over stacked arrays XLA fuses a kernel with the slices that it reads, and with the update of the slice that it
writes (its "dynamic slice fusion", which is on by default), and forgets that an operand and a result of the kernel are
one buffer. The kernel then finds the slice that it updates unwritten: a loop's results were zeros on an H200, with jax
0.11.2. XLA fuses nothing across an optimization barrier, which costs nothing.
"""

from typing import Any

import jax


def apart(arrays: Any) -> Any:
    """The arrays, as operands or results of a kernel that updates them, fused with nothing that slices them."""
    return jax.lax.optimization_barrier(arrays)
