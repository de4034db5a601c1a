"""A decoder-only transformer in Flax NNX that covers OPT and the Llama family (Llama, Mistral, Qwen2, Qwen3).

Tokens are flat, `[num_tokens]`: the sequences follow one another without a batch axis, and only `attend` knows where
each one ends and where its keys and values are. Therefore prefill, paged decode and plain causal attention (attend.py)
share this file. Caches are arguments and results, one for each layer, and never part of the module.

The modules compute norms, rotations and logits in float32, and every other product in the dtype of the model.
Matrices that multiply the same input are joined in one (q, k and v; gate and up), because a step of few tokens takes
the time of reading the weights, and XLA reads one wide matrix faster than several narrow ones. If `num_parts` devices
share the model (sharding.py), a joined matrix holds the first device's columns of q, k and v, then the second's, and so
on.

    token_ids ─ embed ─┬─ norm ─ qkv ─ rotate ─ attend ─ o ─ + ─┬─ norm ─ mlp ─ + ─ ... ─ norm ─ logits
                       └────────────────────────────────────┘   └──────────────┘
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

OPT_POSITION_OFFSET = 2  # the row of OPT's table that holds its first position, as in fairseq

type Attend = Callable[..., tuple[Array, Any]]
type Rotation = tuple[Float32[Array, "num_tokens half_head_size"], Float32[Array, "num_tokens half_head_size"]]


def rope_frequencies(rope: Rope, head_size: int) -> np.ndarray:
    """The angle in radians by which each pair of a head's numbers turns from one position to the next.

    Args:
        rope: base and scaling.
        head_size: numbers in a head; even.

    Returns:
        float32 `[head_size // 2]`.
    """
    frequencies = rope.theta ** -(np.arange(0, head_size, 2) / head_size)
    if (scaling := rope.scaling) is not None:
        # The place of each frequency between the trained context's low (0) and high (1) frequencies.
        turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
        high = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        high = np.clip(high, 0, 1)
        frequencies = high * frequencies + (1 - high) * frequencies / scaling.factor
    return frequencies.astype(np.float32)


def rotate(
    heads: Float[Array, "num_tokens num_heads head_size"],
    rotation: Rotation,
) -> Float32[Array, "num_tokens num_heads head_size"]:
    """Turns queries or keys by the angles of their positions; each number is paired with the one half a head away.

    Source: https://arxiv.org/abs/2104.09864, with the pairing of the Llama checkpoints that transformers writes.

    Args:
        heads: `[num_tokens, num_heads, head_size]`.
        rotation: cosine and sine of each token's angles, f32 `[num_tokens, head_size // 2]` each.

    Returns:
        f32 `[num_tokens, num_heads, head_size]`.
    """
    cos, sin = (x[:, None, None, :] for x in rotation)
    sign = jnp.array([-1.0, 1.0], jnp.float32)[None, None, :, None]
    halves = heads.astype(jnp.float32).reshape(*heads.shape[:-1], 2, -1)
    # XLA makes one kernel of all this because the halves are flipped; concatenating two results would need another.
    return (halves * cos + jnp.flip(halves, axis=2) * (sign * sin)).reshape(heads.shape)


class RMSNorm(nnx.RMSNorm):
    """Flax's RMSNorm, computed and returned in float32.

    Flax multiplies the scale by 1 / rms first. XLA makes one kernel of the norm only if x is divided first.
    """

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        x = x.astype(jnp.float32)
        squares = jnp.mean(x * x, axis=-1, keepdims=True, where=mask)
        assert self.scale is not None
        scale = jnp.expand_dims(self.scale[...].astype(jnp.float32), range(x.ndim - 1))
        return x * jax.lax.rsqrt(squares + self.epsilon) * scale


def make_norm(config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> nnx.LayerNorm | RMSNorm:
    """Makes the family's norm of the residual stream, which computes and returns float32."""
    norm = nnx.LayerNorm if config.family == "opt" else RMSNorm
    return norm(
        config.hidden_size,
        epsilon=config.norm_eps,
        dtype=jnp.float32,
        param_dtype=dtype,
        use_fast_variance=False,
        rngs=rngs,
    )


class Attention(nnx.Module):
    """Grouped-query attention of one layer, which leaves keys, values and caches to `attend`."""

    def __init__(self, config: DecoderConfig, sliding_window: int | None, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        self.num_parts = config.num_parts
        self.sliding_window = sliding_window
        self.dtype = dtype
        heads_size, kv_heads_size = (n * config.head_size for n in (config.num_heads, config.num_kv_heads))
        linear = partial(nnx.Linear, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.qkv_proj = linear(config.hidden_size, heads_size + 2 * kv_heads_size, use_bias=config.qkv_bias)
        self.o_proj = linear(heads_size, config.hidden_size, use_bias=config.o_bias)
        norm = partial(RMSNorm, config.head_size, epsilon=config.norm_eps, param_dtype=dtype, rngs=rngs)
        self.q_norm = norm() if config.qk_norm else None
        self.k_norm = norm() if config.qk_norm else None

    def __call__(self, hidden, rotation: Rotation | None, cache, attend: Attend, rows=None):
        parts = self.qkv_proj(hidden).reshape(hidden.shape[0], self.num_parts, -1, self.head_size)
        ends = np.array([self.num_heads, self.num_heads + self.num_kv_heads]) // self.num_parts
        query, key, value = (_join(heads, self.head_size) for heads in jnp.split(parts, ends, axis=2))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        out, cache = attend(
            query.astype(self.dtype),
            key.astype(self.dtype),
            value,
            cache,
            scale=self.head_size**-0.5,
            sliding_window=self.sliding_window,
        )
        return self.o_proj(_take(out, rows).reshape(-1, self.num_heads * self.head_size)), cache


class Mlp(nnx.Module):
    """OPT's two linear layers with a ReLU between them, or SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        self.num_parts = config.num_parts
        linear = partial(nnx.Linear, use_bias=config.mlp_bias, dtype=dtype, param_dtype=dtype, rngs=rngs)
        is_gated = config.family != "opt"
        self.gate_up_proj = linear(hidden_size, 2 * intermediate_size) if is_gated else None
        self.up_proj = None if is_gated else linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def __call__(self, hidden):
        if self.up_proj is not None:
            return self.down_proj(jax.nn.relu(self.up_proj(hidden)))
        assert self.gate_up_proj is not None
        parts = self.gate_up_proj(hidden).reshape(hidden.shape[0], self.num_parts, -1)
        gate, up = jnp.split(parts, 2, axis=2)
        return self.down_proj((jax.nn.silu(gate) * up).reshape(hidden.shape[0], -1))


class Layer(nnx.Module):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, sliding_window: int | None, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.pre_norm = config.pre_norm
        self.attention_norm = make_norm(config, rngs=rngs, dtype=dtype)
        self.attention = Attention(config, sliding_window, rngs=rngs, dtype=dtype)
        self.mlp_norm = make_norm(config, rngs=rngs, dtype=dtype)
        self.mlp = Mlp(config, rngs=rngs, dtype=dtype)

    def __call__(self, hidden, rotation: Rotation | None, cache, attend: Attend, rows=None):
        normed = self.attention_norm(hidden) if self.pre_norm else hidden
        out, cache = self.attention(normed, rotation, cache, attend, rows)
        hidden = _take(hidden, rows) + out
        if self.pre_norm:
            return hidden + self.mlp(self.mlp_norm(hidden)), cache
        hidden = self.attention_norm(hidden).astype(out.dtype)
        return self.mlp_norm(hidden + self.mlp(hidden)).astype(out.dtype), cache


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
        rows: Int32[Array, " num_rows"] | None = None,
    ) -> tuple[Float[Array, "num_rows hidden_size"], tuple[Any, ...]]:
        """Runs the layers over new tokens.

        Args:
            token_ids: i32 `[num_tokens]`.
            positions: i32 `[num_tokens]`, each token's place in its sequence, from 0.
            caches: one for each layer, of the kind that `attend` takes.
            attend: `attend(query, key, value, cache, *, scale, sliding_window) -> (out, cache)`, called once in each
                layer with `[num_tokens, heads, head_size]` arrays (attend.py).
            rows: i32 `[num_rows]`, the tokens whose results are wanted; None for all, in their order. After the
                last layer's attention nothing is computed for other tokens.

        Returns:
            The residual stream `[num_rows, hidden_size]` after the last layer, for `logits`, and the caches.
        """
        num_tokens = token_ids.shape[0]
        if num_tokens == 1:
            token_ids, positions = (jnp.pad(x, (0, 1)) for x in (token_ids, positions))
            attend = _with_padding(attend)
        hidden = self.embed_tokens(token_ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        rotation = None
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions + OPT_POSITION_OFFSET)
        if self.config.rope is not None:
            frequencies = rope_frequencies(self.config.rope, self.config.head_size)
            angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
            rotation = jnp.cos(angles), jnp.sin(angles)
        new_caches = []
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True), start=1):
            hidden, cache = layer(hidden, rotation, cache, attend, rows if i == len(self.layers) else None)
            new_caches.append(cache)
        return hidden[:num_tokens] if rows is None else hidden, tuple(new_caches)

    def logits(self, hidden: Float[Array, "n hidden_size"]) -> Float32[Array, "n vocab_size"]:
        """Computes the next token's logits from rows of the residual stream.

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


def _with_padding(attend: Attend) -> Attend:
    """Makes an `attend` for one token of one that is followed by a row of padding, which gets zeros.

    XLA is at its worst with a single row. It makes a slice of a lookup, and gathers a table that is split over devices
    for it; it multiplies a row by a small matrix without the matrix units; and it makes three kernels of a norm.
    """

    def attend_to_one(query, key, value, cache, **options):
        out, cache = attend(query[:1], key[:1], value[:1], cache, **options)
        return jnp.pad(out, ((0, 1), (0, 0), (0, 0))), cache

    return attend_to_one


def _join(parts: Array, head_size: int) -> Array:
    """Reshapes `[num_tokens, num_parts, heads of a part, head_size]` to `[num_tokens, num_heads, head_size]`."""
    return parts.reshape(parts.shape[0], -1, head_size)


def _take(array: Array, rows: Array | None) -> Array:
    """Takes these rows of an array, or all of it if `rows` is None."""
    return array if rows is None else array[rows]
