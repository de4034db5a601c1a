"""Products whose sums are split. Where columns are few, a GPU would run too few programs to read weights fast."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def addends(
    x: Float[Array, "rows size"], kernel: Float[Array, "size columns"], splits: int
) -> Float32[Array, "splits rows columns"]:
    """Computes the parts of x @ kernel whose sum it is, each of neighbouring rows of the kernel."""
    x, kernel = x.reshape(x.shape[0], splits, -1), kernel.reshape(splits, -1, kernel.shape[1])
    return jnp.einsum("rsk,skh->srh", x, kernel, preferred_element_type=jnp.float32)
