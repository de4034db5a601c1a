"""Reads of the block tables; one array holds the blocks of all of a loading warp's runs."""

import jax.numpy as jnp


def of_lanes(tables_gmem, seq, columns):
    return jnp.stack([tables_gmem[seq, column] for column in columns])


def of_run(blocks, run):
    return blocks[run]


def prefetch(tables_gmem, seq, column):
    """Changes no result."""
