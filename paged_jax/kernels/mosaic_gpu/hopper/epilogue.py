"""The end of a softmax: sinks, divisors, and the logarithm of the sum of exponentials (lse)."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from paged_jax.kernels.mosaic_gpu.hopper.registers import LOG2E, exp, log


def saw_tokens(sums: Array) -> Array:
    """Tells from the sums of exponentials which rows saw a token. NaN counts as seen: it must reach the result."""
    return sums != 0


def join_sinks(sinks: Array, maxima: Array, sums: Array) -> tuple[Array, Array, Array]:
    """Adds each head's sink to a softmax. Returns maxima, sums, and the factor by which O shrinks."""
    with_sinks = lax.max(maxima, sinks)
    rescale = exp(maxima - with_sinks)
    return with_sinks, sums * rescale + exp(sinks - with_sinks), rescale


class Epilogue(NamedTuple):
    """A softmax after its last token.

    Attributes:
      seen: which rows saw a token.
      maxima: the maxima of logits, of each row.
      divisors: the sums of exponentials; 1 for rows that saw no token, so that their out is 0.
    """

    seen: Array
    maxima: Array
    divisors: Array

    @classmethod
    def of(cls, seen: Array, maxima: Array, sums: Array) -> "Epilogue":
        """Ends a softmax. `seen` comes from the sums without sinks."""
        return cls(seen, maxima, jnp.where(seen, sums, 1.0))

    @property
    def lse(self) -> Array:
        """The natural logarithm of the sum of exponentials; -inf for rows that saw no token."""
        return jnp.where(self.seen, self.maxima + log(self.divisors), -jnp.inf)

    @property
    def lse_of_base_2(self) -> Array:
        """`lse` divided by log(2)."""
        return jnp.where(self.seen, self.maxima * LOG2E + jnp.log2(self.divisors), -jnp.inf)
