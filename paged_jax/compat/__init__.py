"""Calls that other projects write already, on this library's kernels: `rpa` is the one of JAX's TPU stacks."""

from paged_jax.compat import rpa

__all__ = ["rpa"]
