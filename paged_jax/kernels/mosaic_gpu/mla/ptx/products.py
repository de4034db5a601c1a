"""The products of the MLA kernel, whose sums stay in registers: wgmma reads latents and P from shared memory."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array

from paged_jax.kernels.mosaic_gpu.hopper.limits import WGMMA_ROWS
from paged_jax.kernels.mosaic_gpu.hopper.memory import Slice
from paged_jax.kernels.mosaic_gpu.hopper.products import accumulator
from paged_jax.kernels.mosaic_gpu.hopper.refs import Ref
from paged_jax.kernels.mosaic_gpu.mla.geometry import TILE


class Tile(NamedTuple):
    """A tile of latents: its parts, and the barriers on which they arrive."""

    parts: Sequence[Slice]
    smem: Sequence[Ref]
    ready: Sequence[Ref]


def scores(query_smem: Ref, tile: Tile) -> Array:
    """S, the products of the query with a tile's latents."""

    def multiply(acc):
        _score(acc, query_smem, tile)
        return acc[...]

    return pl.run_scoped(multiply, accumulator((WGMMA_ROWS, TILE)))


def _score(acc: Ref, query_smem: Ref, tile: Tile) -> None:
    """Starts S, in the order in which the parts of a tile arrive."""
    for part, part_smem, ready in zip(*tile, strict=True):
        plgpu.barrier_wait(ready)
        plgpu.wgmma(acc, query_smem.at[:, pl.ds(*part)], part_smem.T)


def accumulate(
    out: list[Array], weights_smem: Ref, values_smem: Sequence[Ref], release: Callable[[int], None]
) -> list[Array]:
    """O + P V for some parts of O. `release(i)` runs when part i of V has been read."""

    def multiply(accs):
        _start(accs, out, weights_smem, values_smem)
        return _sums(accs, release)

    return pl.run_scoped(multiply, [accumulator(x.shape) for x in out])


def score_and_accumulate(
    out: list[Array],
    weights_smem: Ref,
    values_smem: Sequence[Ref],
    release: Callable[[int], None],
    query_smem: Ref,
    next_tile: Tile,
    then: Callable[[Array], Any],
) -> tuple[list[Array], Any]:
    """S of the next tile, and `accumulate` of this one behind it. `then(S)` runs under the latter."""

    def multiply(accs, scores_acc):
        _score(scores_acc, query_smem, next_tile)
        _start(accs, out, weights_smem, values_smem)
        result = then(plgpu.wgmma_accumulator_load(scores_acc, wait_n=len(accs)))
        return _sums(accs, release), result

    return pl.run_scoped(multiply, [accumulator(x.shape) for x in out], accumulator((WGMMA_ROWS, TILE)))


def _start(accs: Sequence[Ref], out: list[Array], weights_smem: Ref, values_smem: Sequence[Ref]) -> None:
    """Starts O + P V."""
    for acc, x, part_smem in zip(accs, out, values_smem, strict=True):
        acc[...] = x
        plgpu.wgmma(acc, weights_smem, part_smem)


def _sums(accs: Sequence[Ref], release: Callable[[int], None]) -> list[Array]:
    """Waits for O + P V, one part after the other."""
    sums = []
    for i, acc in enumerate(accs):
        sums.append(plgpu.wgmma_accumulator_load(acc, wait_n=len(accs) - 1 - i))
        release(i)
    return sums
