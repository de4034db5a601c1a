"""Kernels between the products of a decode step over several GPUs (Pallas Mosaic GPU, Hopper).

A step of few tokens takes the time of reading the weights, and all other kernels are time lost. XLA splits products of
few rows over the programs of a GPU, adds up the results in a kernel of its own, and rotates heads in another one, whose
results it slices in a third one if there are many rows. Here a product leaves its addends (`product`) to the next
kernel: `rotate_heads`, `activate`, or `sum_norm` (all_reduce.py).

    product ─ rotate_heads ─ attend ─ product ─ sum_norm ─ product ─ activate ─ product ─ sum_norm ─ ...

Roofline: the addends are in L2, so each kernel takes the time of a launch and of two trips to L2.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

FEW_ROWS = 8  # up to so many rows, products are split
SPLITS = 4
_WARPGROUP = 128

type Activation = Callable[[Array], Array]


def is_split(rows: int, size: int) -> bool:
    """Whether a product of this many rows of this size leaves addends."""
    return rows <= FEW_ROWS and size % SPLITS == 0


def product(x: Float[Array, "rows size"], weights: Float[Array, "size out"]) -> Array:
    """Multiplies: `[rows, out]`, or f32 `[addends, rows, out]` of few rows."""
    (rows, size), (_, out_size) = x.shape, weights.shape
    if not is_split(rows, size):
        return jnp.dot(x, weights)
    x, weights = x.reshape(rows, SPLITS, -1), weights.reshape(SPLITS, -1, out_size)
    return jnp.einsum("rsk,skh->srh", x, weights, preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnames="activation")  # lowered once for all layers
def activate(addends: Float32[Array, "addends rows 2*size"], *, activation: Activation) -> Float[Array, "rows size"]:
    """Computes the units of a gated MLP: activation(first half) * second half of a product.

    Args:
        addends: f32 `[addends, rows, 2 * size]`, which make up the product.
        activation: the activation.

    Returns:
        bf16 `[rows, size]`.
    """
    num_addends, rows, size = addends.shape
    size //= 2
    width = width_of(size)
    blocks, layout = size // width, plgpu.Layout.WG_STRIDED((width,), vec_size=width // _WARPGROUP)

    def kernel(addends_gmem, out_gmem):
        row, first = lax.axis_index("row"), lax.axis_index("block") * width

        def total(half):
            at = row, pl.ds(half * size + first, width)
            parts = (plgpu.load(addends_gmem.at[i, *at], layout=layout, optimized=False) for i in range(num_addends))
            return functools.reduce(jnp.add, parts)

        out_gmem[row, pl.ds(first, width)] = (activation(total(0)) * total(1)).astype(jnp.bfloat16)

    out = jax.ShapeDtypeStruct((rows, size), jnp.bfloat16)
    call = plgpu.kernel(kernel, out_type=out, grid=(rows, blocks), grid_names=("row", "block"), kernel_name="activate")
    return call(addends)


def width_of(size: int) -> int:
    """How many numbers a program of `activate` computes: the most that divide `size`; 0 if none do."""
    return next((width for width in (512, 256, 128) if size % width == 0), 0)


@functools.partial(jax.jit, static_argnames=("num_heads", "num_kv_heads"))  # lowered once for all layers
def rotate_heads(
    parts: Float[Array, "rows size"] | Float32[Array, "addends rows size"],
    cos: Float32[Array, "rows pairs"],
    sin: Float32[Array, "rows pairs"],
    *,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Array, Array, Array]:
    """Separates a product's queries, keys and values, and rotates queries and keys; see `rope.rotate`.

    Args:
        parts: the product, or f32 addends that make it up.
        cos, sin: f32 `[rows, head_size / 2]`, of the angles by which each pair is rotated.
        num_heads, num_kv_heads: how many heads there are.

    Returns:
        bf16 `[rows, num_heads, head_size]` and twice `[rows, num_kv_heads, head_size]`.
    """
    addends = parts if parts.ndim == 3 else parts[None]
    num_addends, rows, _ = addends.shape
    head_size, total_heads = 2 * cos.shape[1], num_heads + 2 * num_kv_heads
    group = next(n for n in (4, 2, 1) if num_heads % n == 0 and num_kv_heads % n == 0)  # heads of a program
    groups, layout = total_heads // group, plgpu.Layout.WG_STRIDED((head_size,), vec_size=head_size // _WARPGROUP)
    turns = jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)

    def kernel(addends_gmem, cos_gmem, sin_gmem, query_gmem, key_gmem, value_gmem, twice_smem):
        row, first = lax.axis_index("row"), lax.axis_index("group") * group

        def load(ref, *at):
            return plgpu.load(ref.at[at], layout=layout, optimized=False).astype(jnp.float32)

        def head(i):
            at = row, pl.ds((first + i) * head_size, head_size)
            return functools.reduce(jnp.add, (load(addends_gmem, j, *at) for j in range(num_addends)))

        def store(i, x, *places):
            for ref, begin, count in places:

                @pl.when((first >= begin) & (first < begin + count))
                def put(ref=ref, begin=begin):
                    ref[row, first + i - begin] = x.astype(jnp.bfloat16)

        heads = [head(i) for i in range(group)]

        @pl.when(first < num_heads + num_kv_heads)
        def rotate():
            cos, sin = load(cos_gmem, row), load(sin_gmem, row)
            for i, x in enumerate(heads):
                twice_smem[i, pl.ds(0, head_size)] = x
                twice_smem[i, pl.ds(head_size, head_size)] = x
            plgpu.commit_smem()
            for i, x in enumerate(heads):
                other = load(twice_smem, i, pl.ds(head_size // 2, head_size))  # the halves swapped
                store(i, x * cos + other * sin, (query_gmem, 0, num_heads), (key_gmem, num_heads, num_kv_heads))

        @pl.when(first >= num_heads + num_kv_heads)
        def leave():
            for i, x in enumerate(heads):
                store(i, x, (value_gmem, num_heads + num_kv_heads, num_kv_heads))

    outs = (jax.ShapeDtypeStruct((rows, n, head_size), jnp.bfloat16) for n in (num_heads, *[num_kv_heads] * 2))
    call = plgpu.kernel(
        kernel,
        out_type=tuple(outs),
        scratch_types=(plgpu.SMEM((group, 2 * head_size), jnp.float32),),
        grid=(rows, groups),
        grid_names=("row", "group"),
        kernel_name="rotate_heads",
    )
    return call(addends, *turns)
