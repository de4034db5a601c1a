"""Runs the Mosaic GPU kernels with no GPU: in Pallas's interpreter, with stand-ins for what that lacks.

`call` runs an op that attends, `run_op` any op, as if for one of the GPUs here, which are so small that short contexts
get every kind of config.
"""

from functools import partial
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src import state
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, params

from paged_jax import _validate
from paged_jax.kernels import mosaic_gpu
from paged_jax.kernels.mosaic_gpu import attend, choice, narrow, vllm

SMALL_GPU = choice.Device(90, 2)  # so small that items are split
MIDDLE_GPU = choice.Device(90, 8)  # so large that they are split unevenly
TINY_GPU = choice.Device(90, 1)  # so small that heads are folded
OPS = {"v1": "paged_attention_v1", "v2": "paged_attention_v2", "auto": "paged_attention"}


def dot(a, b_smem, wgmma=attend._dot):
    """A product, also of what is in registers."""
    if isinstance(a, state.TransformedRef) or isinstance(jax.typeof(a), state.AbstractRef):
        return wgmma(a, b_smem)
    return jnp.dot(a.astype(jnp.float32), b_smem[...].astype(jnp.float32))


def tokens_of(rows, cfg):
    by_head = jnp.arange(rows // cfg.fold).reshape(-1, 1, cfg.run)
    return jnp.broadcast_to(by_head, (len(by_head), cfg.fold, cfg.run)).reshape(-1)


def zero_rows(rows_smem, low, high, cfg):
    rows = rows_smem[...]
    token = tokens_of(len(rows), cfg)[:, None]
    rows_smem[...] = jnp.where((token >= low) & (token < high), rows, jnp.zeros_like(rows))


def zero_pages(tile_smem, low, high, cfg):
    pages = tile_smem[...].reshape(-1, cfg.head_size, cfg.block_size)
    token = tokens_of(cfg.tile, cfg).reshape(-1, 1, cfg.block_size)
    kept = jnp.where((token >= low) & (token < high), pages, jnp.zeros_like(pages))
    tile_smem[...] = kept.reshape(tile_smem.shape)


def read(tile_smem):
    """A tile in registers. The interpreter misses a fence between reads and copies that wait for them."""
    tile = tile_smem[...]
    plgpu.commit_smem()
    return tile


def keys_of_pages(tile_smem, cfg):
    pages = read(tile_smem).reshape(-1, cfg.head_size // 8, cfg.block_size, 8)
    return pages.swapaxes(1, 2).reshape(cfg.tile, cfg.head_size)


def values_of_pages(tile_smem, cfg):
    pages = read(tile_smem).reshape(-1, cfg.head_size, cfg.block_size)
    return pages.swapaxes(0, 1).reshape(cfg.head_size, cfg.tile)


def store(ref, x, cfg):
    ref[...] = x


def store_transposed(ref, x, cfg):
    ref[...] = x.T


# What the interpreter lacks, with nothing out of order; test_mosaic_gpu_narrow.py is about the order.
IN_THE_INTERPRETER = {
    "keys": lambda tile_smem, cfg: read(tile_smem).astype(jnp.float16),
    "values": lambda tile_smem, cfg: read(tile_smem).astype(jnp.float16).T,
    "token_scales": lambda scales_smem, cfg: scales_smem[...][:, : cfg.run].reshape(-1),
    "zero_rows": zero_rows,
    "store": store,
    "store_query": store_transposed,
    "store_transposed": store_transposed,
}
PAGES_IN_THE_INTERPRETER = {"keys": keys_of_pages, "values": values_of_pages, "zero_rows": zero_pages}


def call(op, decode, arrays, static, partition_size, device=SMALL_GPU):
    """The results of the implementation's function in the interpreter."""
    operands = _validate.decode_operands(*decode.values(), arrays | static)
    keywords = {"partition_size": partition_size} if op == "v2" else {}
    return run_op(OPS[op], device, *operands, **keywords)


def run_op(name, device, *operands, **keywords):
    gpu = mock.patch.object(choice, "device", return_value=device)
    registers, products = mock.patch.multiple(narrow, **IN_THE_INTERPRETER), mock.patch.object(attend, "_dot", dot)
    pages = mock.patch.multiple(vllm, **PAGES_IN_THE_INTERPRETER)
    interpreted = params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=True))
    try:
        with gpu, registers, pages, products, interpreted:
            return jax.tree.map(np.asarray, jax.jit(partial(getattr(mosaic_gpu, name), **keywords))(*operands))
    except Exception:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        raise
