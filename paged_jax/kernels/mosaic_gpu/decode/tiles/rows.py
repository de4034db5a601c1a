"""The rows of a tile that a thread has, and their tokens, in MLIR."""

from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.hopper.inline import add, div, mul, rem, thread_index
from paged_jax.kernels.mosaic_gpu.hopper.limits import WARP


def first_row():
    """A thread's first row of an array in wgmma's layout: 16 * w + g for lane 4 * g + t of warp w."""
    return add(mul(div(thread_index(), WARP), 16), div(rem(thread_index(), WARP), 4))


def token_of_row(row, geometry: Geometry):
    """The token of a row of a tile; `mask.token_of_row` for one row."""
    fold, run = geometry.tuning.fold, geometry.rows_of_head
    if fold == 1:
        return row
    return add(mul(div(row, fold * run), run), rem(row, run))
