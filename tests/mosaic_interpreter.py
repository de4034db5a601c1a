"""Runs the Mosaic GPU kernels without a GPU, in Pallas's interpreter, with substitutes for what the interpreter lacks.

`call` and `run_op` run a decode op. Within `interpreted()`, all calls of ops run in the interpreter, with the tunings
of one of the GPUs below. These GPUs are so small that short contexts get tunings of all sorts.
"""

import contextlib
from functools import partial
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from paged_jax import _dispatch, _validate
from paged_jax.kernels import mosaic_gpu, problem
from paged_jax.kernels.mosaic_gpu.decode import call as decode_call
from paged_jax.kernels.mosaic_gpu.decode import ptx, tiles
from paged_jax.kernels.mosaic_gpu.decode.tiles import class_of
from paged_jax.kernels.mosaic_gpu.decode.tiles.eight_bit import EightBitTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.eight_bit_vllm import EightBitVllmTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.pairs import EightBitPairTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.plain import PlainTiles
from paged_jax.kernels.mosaic_gpu.decode.tiles.vllm import VllmTiles
from paged_jax.kernels.mosaic_gpu.hopper import fence
from paged_jax.kernels.problem import Device
from tests import interpreted_decode, ragged_interpreter

SMALL_GPU = Device(90, 2)  # so small that items are split
MIDDLE_GPU = Device(90, 8)  # large enough to split them unevenly
TINY_GPU = Device(90, 1)  # so small that heads are folded
OPS = {"v1": "paged_attention_v1", "v2": "paged_attention_v2", "auto": "paged_attention"}


def tokens_of(rows, geometry):
    """The token of each of these rows of a tile. If heads are folded, their runs of tokens alternate in the tile."""
    fold, run = geometry.tuning.fold, geometry.run_tokens
    if fold == 1:  # a run may then be longer than these rows
        return jnp.arange(rows)
    by_head = jnp.arange(rows // fold).reshape(-1, 1, run)
    return jnp.broadcast_to(by_head, (len(by_head), fold, run)).reshape(-1)


def read(smem):
    """Reads copied data, and adds a fence, without which the interpreter sees a race with later copies."""
    copied = smem[...]
    plgpu.commit_smem()
    return copied


class Interpreted:
    """Replaces the methods of tiles that work on threads' registers by methods that work on whole arrays."""

    def slot_scales(self, scales_smem):
        return read(scales_smem)[:, : self.geometry.run_tokens].reshape(-1)


class InterpretedPlainTiles(Interpreted, PlainTiles):
    pass


class InterpretedProduct(Interpreted):
    """The product of an operand in registers (here an array) with one in shared memory."""

    def product(self, a, b_smem):
        return jnp.dot(a.astype(jnp.float32), b_smem[...].astype(jnp.float32))


class InterpretedEightBitTiles(InterpretedProduct, EightBitTiles):
    """Tiles of 8 bits whose elements are in order; test_mosaic_gpu_narrow.py tests the order of the real ones."""

    def keys(self, tile_smem):
        return read(tile_smem).astype(jnp.float16)

    def values(self, tile_smem):
        return read(tile_smem).astype(jnp.float16).T

    def zero_rows(self, rows_smem, start, low, high):
        rows = rows_smem[...]
        token = start + tokens_of(len(rows), self.geometry)[:, None]
        rows_smem[...] = jnp.where((token >= low) & (token < high), rows, jnp.zeros_like(rows))

    def store_query(self, operand_smem, query):
        operand_smem[...] = query.T

    def store_out(self, out_smem, out):
        out_smem[...] = out.T

    def store_partial_out(self, partial, out, row):
        partial[...] = out


class InterpretedEightBitPairTiles(InterpretedEightBitTiles, EightBitPairTiles):
    def heads(self, tile):
        """K and V of a tile by rows: [tokens / 8, heads, 8, 2, head_size]."""
        shape = -1, 8, self.geometry.tuning.fold, 2, self.geometry.problem.head_size
        return jnp.swapaxes(tile.reshape(shape), 1, 2)

    def of_rows(self, tile_smem, values):
        rows = self.heads(read(tile_smem))[:, :, :, values]
        return rows.reshape(self.geometry.tuning.tile, self.geometry.problem.head_size)

    def keys(self, tile_smem):
        return self.of_rows(tile_smem, 0).astype(jnp.float16)

    def values(self, tile_smem):
        return self.of_rows(tile_smem, 1).astype(jnp.float16).T

    def zero_rows(self, rows_smem, start, low, high):
        rows = rows_smem[...]
        token = start + jnp.arange(len(rows))[:, None]
        is_value = (jnp.arange(rows.shape[1]) // self.geometry.problem.head_size % 2 == 1)[None]
        kept = ~is_value | ((token >= low) & (token < high))
        rows_smem[...] = jnp.where(kept, rows, jnp.zeros_like(rows))


class InterpretedVllmTiles(InterpretedProduct, VllmTiles):
    def keys(self, tile_smem):
        problem = self.geometry.problem
        x = 16 // problem.cache_itemsize
        pages = read(tile_smem).reshape(-1, problem.head_size // x, problem.block_size, x)
        return pages.swapaxes(1, 2).reshape(self.geometry.tuning.tile, problem.head_size)

    def values(self, tile_smem):
        problem = self.geometry.problem
        pages = read(tile_smem).reshape(-1, problem.head_size, problem.block_size)
        return pages.swapaxes(0, 1).reshape(problem.head_size, self.geometry.tuning.tile)

    def zero_pages(self, tile_smem, low, high):
        problem = self.geometry.problem
        pages = tile_smem[...].reshape(-1, problem.head_size, problem.block_size)
        token = tokens_of(self.geometry.tuning.tile, self.geometry).reshape(-1, 1, problem.block_size)
        kept = jnp.where((token >= low) & (token < high), pages, jnp.zeros_like(pages))
        tile_smem[...] = kept.reshape(tile_smem.shape)


class InterpretedEightBitVllmTiles(InterpretedVllmTiles, EightBitVllmTiles):
    """Operands are in order; test_mosaic_gpu_vllm.py tests the order of the real ones."""

    def keys(self, tile_smem):
        return super().keys(tile_smem).astype(jnp.float16)

    def values(self, tile_smem):
        return super().values(tile_smem).astype(jnp.float16)

    def store_query(self, operand_smem, query):
        operand_smem[...] = query.T

    def store_weights(self, weights_smem, weights):
        PlainTiles.store_weights(self, weights_smem, weights)


INTERPRETED_TILES = {
    PlainTiles: InterpretedPlainTiles,
    EightBitTiles: InterpretedEightBitTiles,
    EightBitPairTiles: InterpretedEightBitPairTiles,
    VllmTiles: InterpretedVllmTiles,
    EightBitVllmTiles: InterpretedEightBitVllmTiles,
}


def call(op, decode, arrays, static, partition_size, device=SMALL_GPU):
    """Runs the implementation's function in the interpreter and returns its results."""
    operands = _validate.decode_operands(*decode.values(), arrays | static)
    keywords = {"partition_size": partition_size} if op == "v2" else {}
    return run_op(OPS[op], device, *operands, **keywords)


def with_poison(query, geometry, query_tiles=decode_call._query_tiles):
    """Adds the heads that copies read outside of the query. A GPU reads zeros there, and the interpreter cannot.

    They are NaN: a head's result depends on no other head.
    """
    added = geometry.columns // geometry.query_copies - geometry.heads_per_copy
    return jnp.pad(query_tiles(query, geometry), ((0, 0), (0, added), (0, 0)), constant_values=jnp.nan)


@contextlib.contextmanager
def in_lanes():
    """Replaces what decode's plans compute in the lanes of warps."""
    with contextlib.ExitStack() as stack:
        for patch in ragged_interpreter.substitutes(ptx, interpreted_decode):
            stack.enter_context(patch)
        yield


def as_for(device):
    """Makes calls choose tunings for this GPU, or for this machine's GPU if `device` is None."""
    return mock.patch.object(problem, "device", return_value=device) if device else contextlib.nullcontext()


def run_op(name, device, *operands, detect_races=True, **keywords):
    function = jax.jit(partial(getattr(mosaic_gpu, name), **keywords))
    try:
        with (
            as_for(device),
            mock.patch.object(tiles, "class_of", lambda problem: INTERPRETED_TILES[class_of(problem)]),
            mock.patch.object(fence, "show_cluster_what_is_stored"),
            mock.patch.object(decode_call, "_query_tiles", with_poison),
            in_lanes(),
            ragged_interpreter.interpreting(detect_races),
        ):
            return jax.tree.map(np.asarray, function(*operands))
    except Exception:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        raise


@contextlib.contextmanager
def interpreted(device=SMALL_GPU):
    """Runs every op in the interpreter, without jit."""

    def eagerly(op, operands, *, implementation=None, unwanted=(), **static):
        is_sparse = op == "paged_attention" and operands.options.block_sparse is not None
        if is_sparse or op in ("ragged_paged_attention", "prefix_attention"):
            return ragged_interpreter.call(op, operands, device)
        _dispatch._load(implementation, op)  # this raises an error if the implementation has no such op
        return run_op(op, device, *operands, **static)

    with mock.patch.object(_dispatch, "call", eagerly):
        yield
