"""Claims of work items, and their descriptions."""

import jax.numpy as jnp
from jax import lax


def number_after(number, unclaimed, kind, refs):
    """Program p takes every num_programs-th number from unclaimed + p on. Claims of concurrent threads would race."""
    step = kind.geometry.tuning.num_programs
    return jnp.where(number < unclaimed, unclaimed + lax.axis_index("program"), number + step)


def store_fields(fields_smem, row, values):
    for i, value in enumerate(values):
        fields_smem[row, i] = value


def prefetch_block(tables_gmem, seq, column):
    """Changes no result."""
