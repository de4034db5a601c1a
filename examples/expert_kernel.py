"""The products of experts with few rows each, in one kernel (Pallas Mosaic GPU, Hopper).

Such products take as long as reading the experts' matrices, so the matrices are wgmma's left operand, whose 64
rows they fill, and the tokens its right one, which may be 8 columns narrow. Tokens lie in tiles of one expert's.

    tile of tokens [size, in] ──────────────────────────────┐
    gate [64 units, in] of the tile's expert ─ product ─ + ─┴─ swiglu ─ [size, 64 units]
    up   [64 units, in]                      ─ product ─ + ─┘

Grid: a program of one warpgroup for each 64 outputs of each tile. It loads and multiplies `_DEPTH` inputs at a time;
the loads of `_STAGES` such steps are in flight. Programs of tiles without an expert end at once.

Shared memory: a ring of the matrices' parts, 8 or 16 KiB a step; one of the tokens' parts; the outputs. Two or three
programs run on a multiprocessor at the same time, so the end of one is covered by the loads of the others.

Roofline: the bytes of the experts that are used, each read once for each of its tiles.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float32, Int32

_WIDTH = 64  # outputs of a program: the rows of a wgmma
_DEPTH = 64  # inputs of a step, 128 bytes: as wide as a swizzle is
_STAGES = 6  # steps whose loads are in flight

LARGEST_TILE = 64

type Activation = Callable[[Array, Array], Array]


def fits(*matrices: Array | jax.ShapeDtypeStruct) -> bool:
    """Says whether the kernel takes these matrices: bfloat16 in whole steps."""
    return all(x.dtype == jnp.bfloat16 and not any(size % _DEPTH for size in x.shape[1:]) for x in matrices)


@partial(jax.jit, static_argnames=("size", "activation"))  # so that all layers share what it is lowered to
def multiply_tiles(
    rows: BFloat16[Array, "num_tiles*size in"],
    matrices: BFloat16[Array, "num_experts out in"],
    bias: Float[Array, "num_experts out"] | None,
    experts: Int32[Array, " num_tiles"],
    *,
    size: int,
    activation: Activation | None = None,
) -> BFloat16[Array, "num_tiles*size out"]:
    """Multiplies each tile of rows by the matrix of its expert.

    Args:
        rows: bf16 `[num_tiles * size, in]`.
        matrices: bf16 `[num_experts, out, in]`.
        bias: `[num_experts, out]`, or None.
        experts: i32 `[num_tiles]`; a tile with an expert from `num_experts` on is left out, and its results are not
            defined.
        size: rows of a tile, a multiple of 8.
        activation: a function of the first and the second half of the outputs, f32 `[64, size]` each, if given.

    Returns:
        bf16 `[num_tiles * size, out]`; `[num_tiles * size, out // 2]` with an activation.
    """
    (num_tiles,), (_, out_size, in_size) = experts.shape, matrices.shape
    num_halves = 1 if activation is None else 2
    half, stages = out_size // num_halves, min(_STAGES, in_size // _DEPTH)
    call = plgpu.kernel(
        partial(_kernel, size=size, activation=activation),
        out_type=jax.ShapeDtypeStruct((num_tiles * size, half), jnp.bfloat16),
        scratch_types=(
            _swizzled(stages, size, _DEPTH),
            _swizzled(stages, num_halves, _WIDTH, _DEPTH),
            _swizzled(size, _WIDTH),
            plgpu.Barrier(num_arrivals=1 + num_halves, num_barriers=stages),
        ),
        grid=(num_tiles * half // _WIDTH,),
        grid_names=("program",),
        kernel_name="experts" if activation is None else "experts_gated",
    )
    return call(rows, matrices, experts, *([] if bias is None else [bias]))


def _kernel(rows_gmem, matrices_gmem, experts_gmem, *others, size: int, activation: Activation | None):
    """Computes 64 outputs of a tile; see `multiply_tiles`."""
    *biases_gmem, out_gmem, rows_smem, matrices_smem, out_smem, ready = others
    num_experts, out_size, in_size = matrices_gmem.shape
    num_steps, (stages, num_halves) = in_size // _DEPTH, matrices_smem.shape[:2]
    half = out_size // num_halves
    num_blocks = half // _WIDTH
    tile, block = (f(lax.axis_index("program"), jnp.int32(num_blocks)) for f in (lax.div, lax.rem))
    expert = experts_gmem[tile]

    def copy(step):
        stage, inputs = lax.rem(step, jnp.int32(stages)), pl.ds(step * _DEPTH, _DEPTH)
        plgpu.copy_gmem_to_smem(rows_gmem.at[pl.ds(tile * size, size), inputs], rows_smem.at[stage], ready.at[stage])
        for i in range(num_halves):
            part = matrices_gmem.at[expert, pl.ds(i * half + block * _WIDTH, _WIDTH), inputs]
            plgpu.copy_gmem_to_smem(part, matrices_smem.at[stage, i], ready.at[stage])

    def multiply(*accs):
        @pl.loop(0, num_steps)
        def step(i):
            stage = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(ready.at[stage])
            for j, acc in enumerate(accs):
                plgpu.wgmma(acc, matrices_smem.at[stage, j], rows_smem.at[stage].T)
            plgpu.wgmma_wait(num_halves)  # the previous step has read its stage

            @pl.when((i > 0) & (i + (stages - 1) < num_steps))
            def refill():
                copy(i + (stages - 1))

        return [acc[...] for acc in accs]

    @pl.when(expert < num_experts)
    def compute():
        for i in range(stages):
            copy(jnp.int32(i))
        acc = plgpu.ACC((_WIDTH, size), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        parts = pl.run_scoped(multiply, *[acc] * num_halves)
        for bias_gmem in biases_gmem:
            firsts = [i * half + block * _WIDTH for i in range(num_halves)]
            biases = [_bias(bias_gmem, expert, first, size) for first in firsts]
            parts = [part + bias for part, bias in zip(parts, biases, strict=True)]
        out = parts[0] if activation is None else activation(*parts)
        out_smem.T[...] = plgpu.layout_cast(out.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        to = out_gmem.at[pl.ds(tile * size, size), pl.ds(block * _WIDTH, _WIDTH)]
        plgpu.copy_smem_to_gmem(out_smem, to)
        plgpu.wait_smem_to_gmem(0)


def _bias(bias_gmem, expert, first, size):
    """A bias of 64 outputs, [64, size]."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    bias = plgpu.load(bias_gmem.at[expert, pl.ds(first, _WIDTH)], layout=layout, optimized=False)
    return lax.broadcast_in_dim(bias.astype(jnp.float32), (_WIDTH, size), (0,))


def _swizzled(*shape):
    """Shared memory for bfloat16, laid out as wgmma reads it."""
    tiling = plgpu.TilingTransform((8, 64))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(tiling, swizzle))


class Tiles(NamedTuple):
    """The pairs of a token and an expert in tiles of rows.

    Attributes:
        size: rows of a tile.
        experts: i32 `[num_tiles]`, `num_experts` for tiles without pairs.
        slots: i32 `[num_pairs]`, each pair's row. Those of pairs without an expert follow, and may not exist.
        pairs: i32 `[num_tiles * size]`, each row's pair; 0 for rows without one.
    """

    size: int
    experts: Array
    slots: Array
    pairs: Array


def make_tiles(experts: Int32[Array, " num_pairs"], num_experts: int) -> Tiles:
    """Puts pairs in tiles of equal experts; `experts` are each pair's, from `num_experts` on for none.

    Most experts need one tile: it has room for at least twice the mean number of an expert's pairs.
    """
    (num_pairs,) = experts.shape
    size = 8
    while size < min(2 * num_pairs / num_experts, LARGEST_TILE):
        size *= 2
    num_tiles = (num_pairs + min(num_pairs, num_experts) * (size - 1)) // size
    # Sums of comparisons: for XLA each of them is one small kernel, unlike sorts and running sums.
    order, rows = jnp.arange(num_pairs), jnp.arange(num_tiles * size)
    is_before = ((experts[:, None] == experts[None, :]) & (order[:, None] > order[None, :])).astype(jnp.int32)
    rank = jnp.sum(is_before, axis=1)
    rows_begun = jnp.where((rank & (size - 1)) == 0, size, 0)  # by the first pair of each tile
    slots = jnp.sum(jnp.where(experts[:, None] > experts[None, :], rows_begun[None, :], is_before), axis=1)
    pairs = jnp.sum(jnp.where(slots[None, :] == rows[:, None], order[None, :], 0), axis=1)
    begins = slots[None, :] == rows[::size, None]
    of_tiles = jnp.min(jnp.where(begins, experts[None, :], num_experts), axis=1)
    return Tiles(size, of_tiles, slots, pairs)


def compute_in_tiles(
    hidden: Float[Array, "num_tokens hidden_size"],
    experts: Int32[Array, "num_tokens k"],
    weights: Float32[Array, "num_tokens k"],
    parameters: dict[str, Array],
    activation: Activation,
) -> Float32[Array, "num_tokens hidden_size"]:
    """Computes the weighted sum of each token's experts; see `moe.compute_experts`.

    Args:
        hidden, weights: see `moe.compute_experts`.
        experts: i32 `[num_tokens, k]`, from `num_experts` on where the weight is 0.
        parameters: the experts' matrices and biases.
        activation: see `multiply_tiles`.
    """
    num_tokens, num_chosen = experts.shape
    tiles = make_tiles(experts.reshape(-1), parameters["down"].shape[0])
    rows = hidden[tiles.pairs // num_chosen]
    product = partial(multiply_tiles, experts=tiles.experts, size=tiles.size)
    units = product(rows, parameters["gate_up"], parameters.get("gate_up_bias"), activation=activation)
    out = product(units, parameters["down"], parameters.get("down_bias"))
    out = out.at[tiles.slots].get(mode="clip").reshape(num_tokens, num_chosen, -1).astype(jnp.float32)
    # The rows of pairs without an expert hold anything.
    return jnp.sum(jnp.where(weights[:, :, None] != 0, out * weights[:, :, None], 0), axis=1)
