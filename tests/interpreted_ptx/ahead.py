"""Prefetches, which change no result."""

import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.limits import WARPGROUP


def prefetch_queries(query_gmem, starts_gmem, program):
    """Does nothing."""


def load_factors(factors_gmem):
    """Returns zeros, which nobody reads."""
    return jnp.zeros((WARPGROUP,), jnp.int32)


def wait_for_factors(words, factors_gmem):
    """Does nothing."""


def prefetch_tables(tables_gmem, lengths, program, block_size):
    """Does nothing."""


def prefetch_tiles(keys_gmem, values_gmem, tables_gmem, tiles, kind):
    """Does nothing."""
