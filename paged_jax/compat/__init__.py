"""Calls that other projects write already, on this library's kernels: `rpa` is the one of JAX's TPU stacks."""
