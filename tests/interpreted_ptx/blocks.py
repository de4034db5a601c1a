"""The blocks that hold a loading warp's runs; here one array holds all of them."""

import jax.numpy as jnp


def of_lanes(tables_gmem, seq, columns):
    return jnp.stack([tables_gmem[seq, column] for column in columns])


def of_run(blocks, run):
    return blocks[run]
