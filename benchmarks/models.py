"""Whole models for the benchmarks: the shapes of real ones, random weights, full caches, and the bytes of a step."""

import dataclasses
import zlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.config import DecoderConfig, LayerConfig
from examples.rope import Rope
from examples.step import Step, make_abstract_step
from paged_jax import PagedKVCache

BLOCK_SIZE = 16


def _llama(num_layers: int, sizes: tuple[int, int, int], heads: tuple[int, int], qkv_bias: bool) -> DecoderConfig:
    vocab_size, hidden_size, intermediate_size = sizes
    return DecoderConfig(
        family="llama",
        vocab_size=vocab_size,
        embedding_size=hidden_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=128,
        max_position_embeddings=8192,
        norm_eps=1e-5,
        layers=(LayerConfig(Rope(5e5)),) * num_layers,
        qkv_bias=qkv_bias,
    )


MODELS = {
    "llama3-8b": _llama(32, (128256, 4096, 14336), (32, 8), False),
    "llama3-70b": _llama(80, (128256, 8192, 28672), (64, 8), False),
    "qwen2-7b": _llama(28, (152064, 3584, 18944), (28, 4), True),
    "opt-30b": dataclasses.replace(
        _llama(48, (50272, 7168, 28672), (56, 56), True),
        family="opt",
        max_position_embeddings=2048,
        o_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
        layers=(LayerConfig(),) * 48,
        norm="layer",
        has_learned_positions=True,
        activation="relu",
    ),
}


def make_model(config: DecoderConfig, **options: Any) -> tuple[Any, Step]:
    """Makes random weights, normal with deviation 1/50 (norms: 1, biases: 0), and the step that takes them.

    Args:
        config: the model's sizes.
        options: the options of `examples.step.make_step`.
    """
    shapes, step = make_abstract_step(config, jnp.bfloat16, **options)

    @partial(jax.jit, static_argnums=(1, 2))
    def normal(key, shape, dtype):
        return (jax.random.normal(key, shape, dtype) * 0.02).astype(dtype)

    def random(path, leaf):
        name = path[-1].key
        if name in ("scale", "bias"):
            return jnp.full(leaf.shape, 1 if name == "scale" else 0, leaf.dtype)
        key = jax.random.fold_in(jax.random.key(0), zlib.crc32(jax.tree_util.keystr(path).encode()) % 2**31)
        return normal(key, leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(random, shapes), step


def make_tables(num_seqs: int, longest: int) -> np.ndarray:
    """Makes block tables of shuffled blocks for so many tokens a sequence, i32 [num_seqs, blocks]."""
    blocks_per_seq = -(-longest // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_per_seq
    return np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(num_seqs, blocks_per_seq)


def make_caches(config: DecoderConfig, num_blocks: int) -> tuple[PagedKVCache, ...]:
    """Makes caches full of random numbers."""

    @jax.jit
    def fill(key):
        shape = num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_size
        return jax.random.normal(key, shape, jnp.bfloat16)

    keys = jax.random.split(jax.random.key(1), (config.num_layers, 2))
    return tuple(PagedKVCache(fill(key), fill(value)) for key, value in keys)


def floor_bytes(config: DecoderConfig, weights: Any, num_seqs: int, context: int) -> int:
    """Bytes that a step must read: the weights except tables that it only looks up, and all keys and values."""
    tables = ["embed_positions"] if config.tie_embeddings else ["embed_positions", "embed_tokens"]
    read = {name: part for name, part in weights.items() if name not in tables}
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(read))
    return size + 2 * config.num_layers * config.num_kv_heads * config.head_size * 2 * num_seqs * context


def slots(tables: Any, rows: Any, positions: Any) -> Any:
    """The cache slots of the tokens at these positions of these rows. All arrays are NumPy's or all are JAX's."""
    return tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
