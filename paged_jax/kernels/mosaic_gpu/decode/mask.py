"""Which rows of a tile a query attends to."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.problem import Problem


def seen(low, high, shape: tuple[int, ...], geometry: Geometry):
    """Where rows have tokens of low <= token < high. Only a sliding window sets a `low` above 0."""
    token = token_of_row(shape, geometry)
    before_end = token < high
    return before_end & (token >= low) if geometry.problem.sliding_window is not None else before_end


def some_unseen(low, high, first: int, count: int, problem: Problem):
    """Whether `count` tokens, from `first` on, are not all low <= token < high."""
    some = high < first + count
    return some | (low > first) if problem.sliding_window is not None else some


def token_of_row(shape: tuple[int, ...], geometry: Geometry):
    """The token of each row, counted from the tile's first one.

    The runs of folded kv heads take turns: a run of tokens of the first head, the same tokens of the next one.
    """
    row = _iota(shape, 0)
    if geometry.tuning.fold == 1:
        return row
    run, size = lax.div(row, jnp.int32(geometry.tuning.fold * geometry.run_tokens)), jnp.int32(geometry.run_tokens)
    return run * size + lax.rem(row, size)


def same_kv_head(shape: tuple[int, ...], geometry: Geometry):
    """Where row and column are of the same one of an item's folded kv heads; columns of other items may be of any."""
    row, column = _iota(shape, 0), _iota(shape, 1)
    of_row, of_column = lax.div(row, jnp.int32(geometry.run_tokens)), lax.div(column, jnp.int32(geometry.problem.group))
    fold = jnp.int32(geometry.tuning.fold)
    return lax.rem(of_row, fold) == lax.rem(of_column, fold)


def _iota(shape: tuple[int, ...], axis: int):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
