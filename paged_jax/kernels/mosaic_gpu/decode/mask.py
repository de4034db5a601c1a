"""Masks: the rows of a tile to which a query attends."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.problem import Problem


def seen(low, high, shape: tuple[int, ...], geometry: Geometry):
    """Whether low <= token < high, for each row. Only a sliding window sets `low` above 0."""
    token = token_of_row(shape, geometry)
    before_end = token < high
    return before_end & (token >= low) if geometry.problem.sliding_window is not None else before_end


def some_unseen(low, high, first: int, count: int, problem: Problem):
    """Whether any of `count` tokens from `first` on is outside low <= token < high."""
    some = high < first + count
    return some | (low > first) if problem.sliding_window is not None else some


def token_of_row(shape: tuple[int, ...], geometry: Geometry):
    """The token of each row, numbered from the tile's first token.

    Folded kv heads alternate: some tokens of the first head, then the same tokens of the next head.
    """
    row = _iota(shape, 0)
    if geometry.tuning.fold == 1:
        return row
    size = jnp.int32(geometry.rows_of_head)
    run = lax.div(row, jnp.int32(geometry.tuning.fold * geometry.rows_of_head))
    return run * size + lax.rem(row, size)


def same_kv_head(shape: tuple[int, ...], geometry: Geometry):
    """Whether row and column belong to the same folded kv head; any result in columns of zeros."""
    row, column = _iota(shape, 0), _iota(shape, 1)
    of_row, of_column = (
        lax.div(row, jnp.int32(geometry.rows_of_head)),
        lax.div(column, jnp.int32(geometry.problem.group)),
    )
    fold = jnp.int32(geometry.tuning.fold)
    return lax.rem(of_row, fold) == lax.rem(of_column, fold)


def _iota(shape: tuple[int, ...], axis: int):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
