"""Whole models for the benchmarks: real models' shapes, random weights, full caches, and the bytes of a step."""

import dataclasses
import json
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples import loop
from examples.config import DecoderConfig, LayerConfig
from examples.families import parse_config
from examples.rope import Rope
from examples.step import Caches, Step, make_abstract_step

BLOCK_SIZE = 16

_REAL = json.loads((Path(__file__).parents[1] / "tests" / "data" / "real" / "configs.json").read_text("utf-8"))

# The configs of folders on the hub, by the models' names here. transformers makes PyTorch's side from the same configs.
HUB_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": _REAL["openai/gpt-oss-20b (in bfloat16)"]["config"],
    "qwen3-30b-a3b": _REAL["Qwen/Qwen3-30B-A3B"]["config"],
    "gemma-3-12b": _REAL["google/gemma-3-12b-it (text)"]["config"],
    "deepseek-v2-lite": _REAL["deepseek-ai/DeepSeek-V2-Lite"]["config"],
}


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
    **{name: parse_config(fields) for name, fields in HUB_CONFIGS.items()},
}


def hub_config(name: str) -> DecoderConfig:
    """The config of a folder on the hub, by its name in tests/data/real/configs.json."""
    return parse_config(_REAL[name]["config"])


def make_model(config: DecoderConfig, **options: Any) -> tuple[Any, Step]:
    """Makes random weights, normal with deviation 1/50 (norms: 1, biases: 0), and the step that takes them.

    Embeddings have deviation 4, so that the residual streams of different tokens stay apart. Otherwise the tokens of a
    step would choose the same experts, and it would read fewer of them than a trained model's step does. All numbers
    are drawn in float32. In bfloat16, JAX draws numbers whose mean is slightly below 0, by 1/100 of their deviation;
    over dozens of layers this error grows to the largest part of every token's residual stream.

    Args:
        config: the model's sizes.
        options: the options of `examples.step.make_step`.
    """
    shapes, step = make_abstract_step(config, jnp.bfloat16, **options)

    @partial(jax.jit, static_argnums=(1, 2))
    def normal(key, shape, dtype, deviation):
        return (jax.random.normal(key, shape, jnp.float32) * deviation).astype(dtype)

    def random(path, leaf):
        name = path[-1].key
        if name in ("scale", "bias"):
            return jnp.full(leaf.shape, 1 if name == "scale" else 0, leaf.dtype)
        key = jax.random.fold_in(jax.random.key(0), zlib.crc32(jax.tree_util.keystr(path).encode()) % 2**31)
        return normal(key, leaf.shape, leaf.dtype, 4.0 if name == "embedding" else 0.02)

    return jax.tree_util.tree_map_with_path(random, shapes), step


def make_tables(num_seqs: int, longest: int) -> np.ndarray:
    """Makes block tables of shuffled blocks for this many tokens a sequence, i32 [num_seqs, blocks]."""
    blocks_per_seq = -(-longest // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_per_seq
    return np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(num_seqs, blocks_per_seq)


def make_caches(config: DecoderConfig, num_blocks: int) -> Caches:
    """Makes caches full of random numbers."""
    empty = jax.eval_shape(lambda: loop.make_caches(config, num_blocks, BLOCK_SIZE, jnp.bfloat16))
    leaves, structure = jax.tree.flatten(empty)
    fill = jax.jit(jax.random.normal, static_argnums=(1, 2))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return structure.unflatten(fill(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True))


def floor_bytes(config: DecoderConfig, weights: Any, num_seqs: int, context: int) -> int:
    """Bytes that a step must read.

    They are the weights, except tables in which the step looks up rows, and the keys and values that the layers see.
    Of the experts, the expected number of used ones counts, if each token draws its experts evenly. That is
    `num_experts` times the chance that at least one of the step's tokens draws an expert.
    """
    tables = ["embed_positions"] if config.tie_embeddings else ["embed_positions", "embed_tokens"]
    used = 1.0
    if config.experts is not None:
        used -= (1 - config.experts.num_chosen / config.experts.num_experts) ** num_seqs
    size = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path({n: part for n, part in weights.items() if n not in tables}):
        is_of_experts = any(getattr(key, "key", None) == "experts" for key in path)
        size += leaf.size * leaf.dtype.itemsize * (used if is_of_experts else 1.0)
    for layer in config.layers:
        seen = context if layer.sliding_window is None else min(context, layer.sliding_window)
        size += cached_bytes(config) * num_seqs * seen
    return round(size)


def cached_bytes(config: DecoderConfig) -> int:
    """Bytes that a layer's cache holds for each token, in bfloat16."""
    if config.latent is not None:
        return 2 * (config.latent.kv_rank + config.latent.rope_size)
    return 2 * 2 * config.num_kv_heads * config.head_size


def slots(tables: Any, rows: Any, positions: Any) -> Any:
    """The cache slots of the tokens at these positions of these rows. All arrays are NumPy's or all are JAX's."""
    return tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
