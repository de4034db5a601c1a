"""A decoder-only transformer in Flax NNX that covers OPT and the Llama family (Llama, Mistral, Qwen2, Qwen3).

Tokens are flat, `[num_tokens]`: sequences lie one after the other with no batch axis, and only `attend` knows where
one ends and where its keys and values are kept. Prefill, paged decode and plain causal attention (attend.py) thus
share this file. Caches go in and come out, one a layer, and are never part of the module.

Norms, rotations and logits are computed in float32, every other product in the dtype of the model.

    token_ids ─ embed ─┬─ norm ─ q,k,v ─ rotate ─ attend ─ o ─ + ─┬─ norm ─ mlp ─ + ─ ... ─ norm ─ logits
                       └──────────────────────────────────────┘   └──────────────┘
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from examples.config import DecoderConfig, Rope

OPT_POSITION_OFFSET = 2  # OPT's first position is row 2 of its table, as in fairseq

type Attend = Callable[..., tuple[Array, Any]]


def rope_frequencies(rope: Rope, head_size: int) -> np.ndarray:
    """Radians a position turns each pair of a head's numbers.

    Args:
        rope: base and scaling.
        head_size: numbers in a head; even.

    Returns:
        float32 `[head_size // 2]`.
    """
    frequencies = rope.theta ** -(np.arange(0, head_size, 2) / head_size)
    if (scaling := rope.scaling) is not None:
        # How far each wave lies between the trained context's low (0) and high (1) frequencies.
        turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
        high = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        high = np.clip(high, 0, 1)
        frequencies = high * frequencies + (1 - high) * frequencies / scaling.factor
    return frequencies.astype(np.float32)


def rotate(
    heads: Float[Array, "num_tokens num_heads head_size"],
    angles: Float32[Array, "num_tokens half_head_size"],
) -> Float32[Array, "num_tokens num_heads head_size"]:
    """Turns queries or keys by their positions; each number is paired with the one half a head away.

    Source: https://arxiv.org/abs/2104.09864, with the pairing of the Llama checkpoints that transformers writes.

    Args:
        heads: `[num_tokens, num_heads, head_size]`.
        angles: f32 `[num_tokens, head_size // 2]`, radians.

    Returns:
        f32 `[num_tokens, num_heads, head_size]`.
    """
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def make_norm(config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> nnx.LayerNorm | nnx.RMSNorm:
    """The family's norm of the residual stream; it computes in and returns float32."""
    norm = nnx.LayerNorm if config.family == "opt" else nnx.RMSNorm
    return norm(
        config.hidden_size,
        epsilon=config.norm_eps,
        dtype=jnp.float32,
        param_dtype=dtype,
        use_fast_variance=False,
        rngs=rngs,
    )


class Attention(nnx.Module):
    """Grouped-query attention of one layer, its keys and values left to `attend`."""

    def __init__(self, config: DecoderConfig, sliding_window: int | None, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.head_size = config.head_size
        self.sliding_window = sliding_window
        self.dtype = dtype
        heads_size, kv_heads_size = (n * config.head_size for n in (config.num_heads, config.num_kv_heads))
        linear = partial(nnx.Linear, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.q_proj = linear(config.hidden_size, heads_size, use_bias=config.qkv_bias)
        self.k_proj = linear(config.hidden_size, kv_heads_size, use_bias=config.qkv_bias)
        self.v_proj = linear(config.hidden_size, kv_heads_size, use_bias=config.qkv_bias)
        self.o_proj = linear(heads_size, config.hidden_size, use_bias=config.o_bias)
        norm = partial(
            nnx.RMSNorm, config.head_size, epsilon=config.norm_eps, dtype=jnp.float32, param_dtype=dtype, rngs=rngs
        )
        self.q_norm = norm() if config.qk_norm else None
        self.k_norm = norm() if config.qk_norm else None

    def __call__(self, hidden, angles, cache, attend: Attend):
        query, key, value = (
            project(hidden).reshape(hidden.shape[0], -1, self.head_size)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        out, cache = attend(
            query.astype(self.dtype),
            key.astype(self.dtype),
            value,
            cache,
            scale=self.head_size**-0.5,
            sliding_window=self.sliding_window,
        )
        return self.o_proj(out.reshape(hidden.shape[0], -1)), cache


class Mlp(nnx.Module):
    """OPT's two layers around a ReLU, or SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        linear = partial(nnx.Linear, use_bias=config.mlp_bias, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.gate_proj = None if config.family == "opt" else linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def __call__(self, hidden):
        up = self.up_proj(hidden)
        if self.gate_proj is None:
            return self.down_proj(jax.nn.relu(up))
        return self.down_proj(jax.nn.silu(self.gate_proj(hidden)) * up)


class Layer(nnx.Module):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, sliding_window: int | None, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.pre_norm = config.pre_norm
        self.attention_norm = make_norm(config, rngs=rngs, dtype=dtype)
        self.attention = Attention(config, sliding_window, rngs=rngs, dtype=dtype)
        self.mlp_norm = make_norm(config, rngs=rngs, dtype=dtype)
        self.mlp = Mlp(config, rngs=rngs, dtype=dtype)

    def __call__(self, hidden, angles, cache, attend: Attend):
        if self.pre_norm:
            out, cache = self.attention(self.attention_norm(hidden), angles, cache, attend)
            hidden = hidden + out
            return hidden + self.mlp(self.mlp_norm(hidden)), cache
        out, cache = self.attention(hidden, angles, cache, attend)
        hidden = self.attention_norm(hidden + out).astype(hidden.dtype)
        return self.mlp_norm(hidden + self.mlp(hidden)).astype(hidden.dtype), cache


class Decoder(nnx.Module):
    """The whole model.

    Args:
        config: sizes and variants (config.py).
        rngs: keys for random initial weights.
        dtype: of the weights, the residual stream, and the queries, keys and values given to `attend`.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.config = config
        hidden_size, embedding_size = config.hidden_size, config.embedding_size
        num_positions = config.max_position_embeddings + OPT_POSITION_OFFSET
        projected, learned = embedding_size != hidden_size, config.rope is None
        embed = partial(nnx.Embed, dtype=dtype, param_dtype=dtype, rngs=rngs)
        linear = partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.embed_tokens = embed(config.vocab_size, embedding_size)
        self.embed_positions = embed(num_positions, hidden_size) if learned else None
        self.project_in = linear(embedding_size, hidden_size) if projected else None
        self.layers = nnx.List([Layer(config, window, rngs=rngs, dtype=dtype) for window in config.sliding_windows])
        self.final_norm = make_norm(config, rngs=rngs, dtype=dtype) if config.final_norm else None
        self.project_out = linear(hidden_size, embedding_size) if projected else None
        self.lm_head = (
            None
            if config.tie_embeddings
            else linear(embedding_size, config.vocab_size, preferred_element_type=jnp.float32)
        )

    def __call__(
        self,
        token_ids: Int32[Array, " num_tokens"],
        positions: Int32[Array, " num_tokens"],
        caches: tuple[Any, ...],
        attend: Attend,
    ) -> tuple[Float[Array, "num_tokens hidden_size"], tuple[Any, ...]]:
        """Runs the layers over new tokens.

        Args:
            token_ids: i32 `[num_tokens]`.
            positions: i32 `[num_tokens]`, each token's place in its sequence, from 0.
            caches: one a layer, of whatever kind `attend` takes.
            attend: `attend(query, key, value, cache, *, scale, sliding_window) -> (out, cache)`, called once a
                layer with `[num_tokens, heads, head_size]` arrays (attend.py).

        Returns:
            The residual stream `[num_tokens, hidden_size]` after the last layer, for `logits`, and the caches.
        """
        hidden = self.embed_tokens(token_ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        angles = None
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions + OPT_POSITION_OFFSET)
        if self.config.rope is not None:
            frequencies = rope_frequencies(self.config.rope, self.config.head_size)
            angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden, cache = layer(hidden, angles, cache, attend)
            new_caches.append(cache)
        return hidden, tuple(new_caches)

    def logits(self, hidden: Float[Array, "n hidden_size"]) -> Float32[Array, "n vocab_size"]:
        """The next token's logits, of as many rows of the residual stream as are wanted.

        Args:
            hidden: `[n, hidden_size]`.

        Returns:
            f32 `[n, vocab_size]`.
        """
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        if self.lm_head is not None:
            return self.lm_head(hidden)
        embedding = self.embed_tokens.embedding[...]
        hidden = hidden.astype(embedding.dtype)
        return jnp.einsum("nh,vh->nv", hidden, embedding, preferred_element_type=jnp.float32)
