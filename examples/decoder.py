"""A decoder-only transformer in Flax NNX: OPT, Llama and the descendants of Llama (families.py lists the models).

Tokens are flat, `[num_tokens]`: the sequences follow one another without a batch axis, and only `attend` knows where
each one ends and where its keys and values are. Therefore prefill, paged decode and plain causal attention (attend.py)
share this file. Caches are arguments and results, one for each layer, and never part of the module.

What differs between models is data in the config (config.py), or a module beside this one: rope.py, norms.py, moe.py
(mixtures of experts) and mla.py (latent attention).

The modules compute norms, rotations and logits in float32, and every other product in the dtype of the model.
Matrices that multiply the same input are joined in one (q, k and v; gate and up), because a step of few tokens takes
the time of reading the weights, and XLA reads one wide matrix faster than several narrow ones. If `num_parts` devices
share the model (sharding.py), a joined matrix holds the first device's columns of q, k and v, then the second's, and so
on.

    token_ids ─ embed ─┬─ norm ─ qkv ─ rotate ─ attend ─ o ─ + ─┬─ norm ─ mlp ─ + ─ ... ─ norm ─ logits
                       └────────────────────────────────────┘   └──────────────┘
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from examples.config import DecoderConfig, LayerConfig
from examples.mla import LatentAttention
from examples.moe import MixtureOfExperts
from examples.norms import RMSNorm, make_norm
from examples.products import addends
from examples.rope import Rope, Rotation, make_rotation, rotate

_ROWS_OF_CUBLAS = 64  # from so many rows on, cuBLAS computes products (`examples.step.xla_options`)
_NARROW, _SPLITS = 2560, 4  # so few columns on a device give cuBLAS too few programs, unless it splits the sums
OPT_POSITION_OFFSET = 2  # the row of OPT's table that holds its first position, as in fairseq
ACTIVATIONS = {"relu": jax.nn.relu, "silu": jax.nn.silu, "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True)}

type Attend = Callable[..., tuple[Array, Any]]


@dataclass(frozen=True)
class Tokens:
    """The facts of a step's tokens that all layers need.

    Attributes:
        rotations: cosine and sine of the tokens' angles, for each kind of rotation in the model.
        attend: see `Decoder`.
        num_tokens: how many tokens there are; rows after them are padding.
        peers: see `Decoder`.
    """

    rotations: dict[Rope, Rotation]
    attend: Attend
    num_tokens: int
    peers: Any = None


class Attention(nnx.Module):
    """Grouped-query attention of one layer, which leaves keys, values and caches to `attend`."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        self.num_parts = config.num_parts
        self.rope = layer.rope
        options = {
            "scale": config.attention_scale or self.head_size**-0.5,
            "sliding_window": layer.sliding_window,
            "logits_soft_cap": config.attention_soft_cap,
        }
        self.options = tuple((name, value) for name, value in options.items() if value is not None)
        # In float32, as attention takes them: to cast them in each step would take a kernel in each layer.
        self.sinks = nnx.Param(jnp.zeros(self.num_heads, jnp.float32)) if config.has_sinks else None
        self.dtype = dtype
        heads_size, kv_heads_size = (n * config.head_size for n in (config.num_heads, config.num_kv_heads))
        linear = partial(nnx.Linear, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.qkv_proj = linear(config.hidden_size, heads_size + 2 * kv_heads_size, use_bias=config.qkv_bias)
        self.o_proj = linear(heads_size, config.hidden_size, use_bias=config.o_bias)
        sizes = {None: None, "head": (self.head_size, self.head_size), "all": (heads_size, kv_heads_size)}
        norms = sizes[config.qk_norm]
        self.norms_all_heads = config.qk_norm == "all"
        self.q_norm = make_norm(config, norms[0], rngs=rngs, dtype=dtype) if norms else None
        self.k_norm = make_norm(config, norms[1], rngs=rngs, dtype=dtype) if norms else None

    def __call__(self, hidden, tokens: Tokens, cache, rows=None):
        out, cache = self.heads(hidden, tokens, cache, rows)
        return self.o_proj(out), cache

    def heads(self, hidden, tokens: Tokens, cache, rows=None):
        """Computes what all heads attended to, `[num_rows, num_heads * head_size]`, and the cache."""
        parts = self._projected(hidden, tokens).reshape(hidden.shape[0], self.num_parts, -1, self.head_size)
        ends = np.array([self.num_heads, self.num_heads + self.num_kv_heads]) // self.num_parts
        # Queries and keys are normed and rotated together, which takes fewer kernels.
        both, value = jnp.split(parts, ends[1:], axis=2)
        if self.q_norm is not None and self.k_norm is not None:
            both = self._normed(both, ends[0])
        if self.rope is not None:
            rotation = tokens.rotations[self.rope]
            turned = rotate(both.reshape(both.shape[0], -1, self.head_size), rotation, self.rope.is_interleaved)
            both = turned.reshape(both.shape)
        both = both.astype(self.dtype)
        if tokens.peers is not None and tokens.num_tokens == 1:
            both, value = _of_one_token(both, value)
        query, key = jnp.split(both, ends[:1], axis=2)
        query, key, value = (_join(heads, self.head_size) for heads in (query, key, value))
        options = dict(self.options) | ({} if self.sinks is None else {"sinks": self.sinks[...]})
        out, cache = tokens.attend(query, key, value, cache, **options)
        return _take(out, rows).reshape(-1, self.num_heads * self.head_size), cache

    def _projected(self, hidden, tokens: Tokens):
        """Computes queries, keys and values, `[num_tokens, columns]`."""
        kernel, bias = self.qkv_proj.kernel[...], self.qkv_proj.bias
        is_narrow = kernel.shape[1] <= _NARROW * self.num_parts and kernel.shape[0] % _SPLITS == 0
        if tokens.peers is None or hidden.shape[0] < _ROWS_OF_CUBLAS or not is_narrow:
            return self.qkv_proj(hidden)
        products = addends(hidden.astype(self.dtype), kernel, _SPLITS).sum(axis=0)  # by the kernel that rotates
        return (products if bias is None else products + bias[...]).astype(self.dtype)

    def _normed(self, both, num_queries):
        """Norms queries and keys, `[num_tokens, num_parts, heads, head_size]`; queries are a part's first heads."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        if not self.norms_all_heads and isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            is_query = jnp.arange(both.shape[2])[:, None] < num_queries
            scales = (norm.scale_in_float32()[None] for norm in (self.q_norm, self.k_norm))
            return self.q_norm.divided(both) * jnp.where(is_query, *scales)[None, None]
        heads = zip((self.q_norm, self.k_norm), jnp.split(both, [num_queries], axis=2), strict=True)
        if self.norms_all_heads:
            normed = [norm(x.reshape(x.shape[0], -1)).reshape(x.shape) for norm, x in heads]
        else:
            normed = [norm(x) for norm, x in heads]
        return jnp.concatenate(normed, axis=2)


class Mlp(nnx.Module):
    """OPT's two linear layers with a ReLU between them, or a gated unit (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: DecoderConfig, intermediate_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        hidden_size = config.hidden_size
        self.num_parts = config.num_parts
        self.activation = ACTIVATIONS[config.activation]
        linear = partial(nnx.Linear, use_bias=config.mlp_bias, dtype=dtype, param_dtype=dtype, rngs=rngs)
        is_gated = config.activation != "relu"
        self.gate_up_proj = linear(hidden_size, 2 * intermediate_size) if is_gated else None
        self.up_proj = None if is_gated else linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def __call__(self, hidden):
        return self.down_proj(self.inner(hidden))

    def inner(self, hidden):
        """Computes the units between the linear layers, `[num_rows, intermediate_size]`."""
        if self.up_proj is not None:
            return self.activation(self.up_proj(hidden))
        assert self.gate_up_proj is not None
        parts = self.gate_up_proj(hidden).reshape(hidden.shape[0], self.num_parts, -1)
        gate, up = jnp.split(parts, 2, axis=2)
        return (self.activation(gate) * up).reshape(hidden.shape[0], -1)


class Layer(nnx.Module):
    """Attention and MLP, each added to the residual stream, with norms before, after or around them."""

    def __init__(
        self, config: DecoderConfig, layer: LayerConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, mesh: Mesh | None
    ):
        self.place, self.scale, self.dtype = config.norm_place, config.residual_scale, dtype
        has_norm, has_out_norm = self.place != "after", self.place in ("after", "around")
        norm = partial(make_norm, config, rngs=rngs, dtype=dtype)
        self.attention_norm = norm() if has_norm else None
        attention = Attention if config.latent is None else LatentAttention
        self.attention = attention(config, layer, rngs=rngs, dtype=dtype)
        self.attention_out_norm = norm() if has_out_norm else None
        self.mlp_norm = norm() if has_norm else None
        if layer.has_experts and config.experts is not None:
            size = config.experts.shared_size
            shared = Mlp(config, size, rngs=rngs, dtype=dtype) if size else None
            self.mlp = MixtureOfExperts(config, shared, rngs=rngs, dtype=dtype, mesh=mesh)
        else:
            self.mlp = Mlp(config, config.intermediate_size, rngs=rngs, dtype=dtype)
        self.mlp_out_norm = norm() if has_out_norm else None

    def __call__(self, hidden, tokens: Tokens, cache, rows=None):
        out, cache = self.attention(self._before(self.attention_norm, hidden), tokens, cache, rows)
        hidden = self._add(_take(hidden, rows), out, self.attention_norm, self.attention_out_norm)
        normed = self._before(self.mlp_norm, hidden)
        if isinstance(self.mlp, MixtureOfExperts):
            out = self.mlp(normed, tokens.num_tokens if rows is None else None)
        else:
            out = self.mlp(normed)
        return self._add(hidden, out, self.mlp_norm, self.mlp_out_norm), cache

    def reduce(self, hidden, normed, tokens: Tokens, cache, rows, next_norm):
        """Does what `__call__` does, by kernels that add up all devices' parts and norm the sums.

        Args:
            hidden: the residual stream.
            normed: the same after this layer's first norm.
            tokens, cache, rows: as for `__call__`.
            next_norm: the next layer's first norm, or the norm after the last layer.

        Returns:
            The residual stream, the same after `next_norm`, and the cache.
        """
        assert isinstance(self.attention, Attention)
        assert isinstance(self.mlp, Mlp)
        out, cache = self.attention.heads(normed, tokens, cache, rows)
        hidden, normed = tokens.peers(out, self.attention.o_proj, _take(hidden, rows), self.mlp_norm)
        return *tokens.peers(self.mlp.inner(normed), self.mlp.down_proj, hidden, next_norm), cache

    def _before(self, norm, hidden):
        return norm(hidden) if norm is not None and self.place != "after_sum" else hidden

    def _add(self, hidden, out, norm, out_norm):
        """Adds what attention or MLP computed to the residual stream."""
        if out_norm is not None:
            out = out_norm(out).astype(self.dtype)
        total = hidden + (out if self.scale == 1 else out * self.scale)
        return norm(total).astype(self.dtype) if self.place == "after_sum" else total


class Decoder(nnx.Module):
    """The whole model.

    Args:
        config: sizes and variants (config.py).
        rngs: keys for random initial weights.
        dtype: of the weights, the residual stream, and the queries, keys and values given to `attend`.
        mesh: the devices that share the model, None for one device. Only mixtures of experts need to know them.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
    ):
        self.config = config
        hidden_size, embedding_size = config.hidden_size, config.embedding_size
        num_positions = config.max_position_embeddings + OPT_POSITION_OFFSET
        projected = embedding_size != hidden_size
        embed = partial(nnx.Embed, dtype=dtype, param_dtype=dtype, rngs=rngs)
        linear = partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.embed_tokens = embed(config.vocab_size, embedding_size)
        self.embed_positions = embed(num_positions, hidden_size) if config.has_learned_positions else None
        self.project_in = linear(embedding_size, hidden_size) if projected else None
        self.layers = nnx.List([Layer(config, layer, rngs=rngs, dtype=dtype, mesh=mesh) for layer in config.layers])
        self.final_norm = make_norm(config, rngs=rngs, dtype=dtype) if config.final_norm else None
        self.project_out = linear(hidden_size, embedding_size) if projected else None
        self.lm_head = (
            None
            if config.tie_embeddings
            else linear(embedding_size, config.vocab_size, preferred_element_type=jnp.float32)
        )

    def limit(self, longest: int) -> None:
        """Promises that no sequence gets longer than this many tokens; LongRoPE chooses its frequencies by that."""
        self.config = replace(self.config, max_position_embeddings=min(longest, self.config.max_position_embeddings))

    def __call__(
        self,
        token_ids: Int32[Array, " num_tokens"],
        positions: Int32[Array, " num_tokens"],
        caches: tuple[Any, ...],
        attend: Attend,
        rows: Int32[Array, " num_rows"] | None = None,
        peers: Any = None,
    ) -> tuple[Float[Array, "num_rows hidden_size"], tuple[Any, ...]]:
        """Runs the layers over new tokens.

        Args:
            token_ids: i32 `[num_tokens]`.
            positions: i32 `[num_tokens]`, each token's place in its sequence, from 0.
            caches: one for each layer, of the kind that `attend` takes.
            attend: `attend(query, key, value, cache, **options) -> (out, cache)`, called once in each layer with
                `[num_tokens, heads, head_size]` arrays and those options of the attention ops that the model needs:
                always `scale`, perhaps `sliding_window`, `logits_soft_cap` and `sinks` (attend.py). Latent attention
                gives `[num_tokens, latent_size]` as the key, None as the value, and `value_size` (mla.py).
            rows: i32 `[num_rows]`, the tokens whose results are wanted; None for all, in their order. After the
                last layer's attention nothing is computed for other tokens.
            peers: adds up what the devices computed, with residuals and norms; None to leave that to XLA (sharding.py).

        Returns:
            The residual stream `[num_rows, hidden_size]` after the last layer, for `logits`, and the caches. With
            `peers` the stream is normed already.
        """
        num_tokens = token_ids.shape[0]
        if num_tokens == 1:
            token_ids, positions = (jnp.pad(x, (0, 1)) for x in (token_ids, positions))
            attend = _with_padding(attend)
        hidden = self.embed_tokens(token_ids)
        if self.config.embedding_scale != 1:
            hidden = hidden * jnp.asarray(self.config.embedding_scale, hidden.dtype)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions + OPT_POSITION_OFFSET)
        ropes = dict.fromkeys(layer.rope for layer in self.config.layers if layer.rope is not None)
        longest = self.config.max_position_embeddings
        rotations = {rope: make_rotation(rope, self.config.head_size, longest, positions) for rope in ropes}
        tokens = Tokens(rotations, attend, num_tokens, peers)
        hidden, caches = (self._run if peers is None else self._run_with_peers)(hidden, caches, tokens, rows)
        return hidden[:num_tokens] if rows is None else hidden, caches

    def _run(self, hidden, caches, tokens: Tokens, rows):
        new_caches = []
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True), start=1):
            hidden, cache = layer(hidden, tokens, cache, rows if i == len(self.layers) else None)
            new_caches.append(cache)
        return hidden, tuple(new_caches)

    def _run_with_peers(self, hidden, caches, tokens: Tokens, rows):
        first, *others = (layer.attention_norm for layer in self.layers)
        assert first is not None
        normed, new_caches = first(hidden), []
        for layer, cache, next_norm in zip(self.layers, caches, [*others, self.final_norm], strict=True):
            of_layer = rows if len(new_caches) + 1 == len(self.layers) else None
            hidden, normed, cache = layer.reduce(hidden, normed, tokens, cache, of_layer, next_norm)
            new_caches.append(cache)
        return normed, tuple(new_caches)

    def logits(self, hidden: Float[Array, "n hidden_size"], is_normed: bool = False) -> Float32[Array, "n vocab_size"]:
        """Computes the next token's logits from rows of the residual stream.

        Args:
            hidden: `[n, hidden_size]`.
            is_normed: whether the last norm was applied.

        Returns:
            f32 `[n, vocab_size]`.
        """
        if self.final_norm is not None and not is_normed:
            hidden = self.final_norm(hidden)
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        if self.lm_head is not None:
            logits = self.lm_head(hidden)
        else:
            embedding = self.embed_tokens.embedding[...]
            hidden = hidden.astype(embedding.dtype)
            logits = jnp.einsum("nh,vh->nv", hidden, embedding, preferred_element_type=jnp.float32)
        logits = logits if self.config.logits_scale == 1 else logits * self.config.logits_scale
        cap = self.config.logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _with_padding(attend: Attend) -> Attend:
    """Makes an `attend` for one token and a second row, which is padding and gets the same.

    XLA compiles programs of a single row badly. A lookup becomes a slice, for which XLA gathers a table that is split
    over devices; products with small matrices do without the matrix units; and a norm becomes three kernels.
    """

    def attend_to_one(query, key, value, cache, **options):
        out, cache = attend(query[:1], key[:1], None if value is None else value[:1], cache, **options)
        return jnp.broadcast_to(out, (2, *out.shape[1:])), cache  # XLA fuses it with the next product

    return attend_to_one


def _of_one_token(both: Array, value: Array) -> list[Array]:
    """Lets XLA compute the first token of arrays `[num_tokens, num_parts, heads of a part, head_size]` in one kernel.

    XLA would make a kernel for each shape. Here it makes one array on each device, and attention's kernel reads the
    array's parts in place. Of 64 tokens XLA makes two kernels. One kernel in their place made only some steps shorter
    (benchmarks/LOG.md, "Where the time of a step over several GPUs goes").
    """
    joined = jax.lax.optimization_barrier(jnp.concatenate([both[:1], value[:1]], axis=2))
    return jnp.split(joined, [both.shape[2]], axis=2)


def _join(parts: Array, head_size: int) -> Array:
    """Reshapes `[num_tokens, num_parts, heads of a part, head_size]` to `[num_tokens, num_heads, head_size]`."""
    return parts.reshape(parts.shape[0], -1, head_size)


def _take(array: Array, rows: Array | None) -> Array:
    """Takes these rows of an array, or all of it if `rows` is None."""
    return array if rows is None else array[rows]
