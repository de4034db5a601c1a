"""Multi-head latent attention (DeepSeek V2 and V3): the cache holds one compressed vector for each token.

Source: https://arxiv.org/abs/2405.04434. A head's key and value are products of the token's compressed vector c with
the head's matrices W_UK and W_UV. Neither is ever computed: the query is multiplied by W_UK in place of c, and the
result of attention, a weighted sum of compressed vectors, by W_UV. So attention has one key for all heads, c beside
the rotated part of the key that all heads share, and its values are those keys' first numbers.

    hidden ─┬─ q ──┬─ not rotated ─ W_UK ─┬─ query  ─┐
            │      └─ rotated ────────────┘          ├─ attend ─ W_UV ─ o ─
            └─ kv ─┬─ c, normed ──────────┬─ latent ─┘
                   └─ rotated ────────────┘
"""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from examples.config import DecoderConfig, LayerConfig
from examples.norms import make_norm
from examples.rope import rotate

_EPS = 1e-6  # epsilon of the norms of compressed vectors; the config's value is for the other norms


class LatentAttention(nnx.Module):
    """Latent attention of one layer, which leaves latents and caches to `attend`."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        assert config.latent is not None
        self.sizes = latent = config.latent
        self.num_heads, self.rope, self.dtype = config.num_heads, layer.rope, dtype
        self.scale = config.attention_scale or (latent.nope_size + latent.rope_size) ** -0.5
        linear = partial(nnx.Linear, dtype=dtype, param_dtype=dtype, rngs=rngs)
        norm = partial(make_norm, config, eps=_EPS, rngs=rngs, dtype=dtype)
        query_size = self.num_heads * (latent.nope_size + latent.rope_size)
        rank = latent.query_rank
        self.q_proj = None if rank else linear(config.hidden_size, query_size, use_bias=False)
        self.q_a_proj = linear(config.hidden_size, rank, use_bias=config.qkv_bias) if rank else None
        self.q_a_norm = norm(rank) if rank else None
        self.q_b_proj = linear(rank, query_size, use_bias=False) if rank else None
        self.kv_a_proj = linear(config.hidden_size, latent.kv_rank + latent.rope_size, use_bias=config.qkv_bias)
        self.kv_a_norm = norm(latent.kv_rank)
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=0)
        self.k_up = nnx.Param(init(rngs.params(), (self.num_heads, latent.nope_size, latent.kv_rank), dtype))
        self.v_up = nnx.Param(init(rngs.params(), (self.num_heads, latent.value_size, latent.kv_rank), dtype))
        self.o_proj = linear(self.num_heads * latent.value_size, config.hidden_size, use_bias=config.o_bias)

    def __call__(self, hidden, tokens, cache, rows=None):
        """Attends; `tokens` are decoder.py's `Tokens`."""
        assert self.rope is not None
        rotated = partial(rotate, rotation=tokens.rotations[self.rope], is_interleaved=self.rope.is_interleaved)
        compressed, shared = jnp.split(self.kv_a_proj(hidden), [self.sizes.kv_rank], axis=1)
        shared = rotated(shared[:, None, :])[:, 0]
        latent = jnp.concatenate([self.kv_a_norm(compressed), shared], axis=1).astype(self.dtype)
        query = self._query(hidden).reshape(hidden.shape[0], self.num_heads, -1)
        nope, turned = jnp.split(query, [self.sizes.nope_size], axis=2)
        absorbed = jnp.einsum("thn,hnr->thr", nope, self.k_up[...])
        query = jnp.concatenate([absorbed, rotated(turned).astype(self.dtype)], axis=2)
        out, cache = tokens.attend(query, latent, None, cache, scale=self.scale, value_size=self.sizes.kv_rank)
        out = out if rows is None else out[rows]
        values = jnp.einsum("thr,hvr->thv", out, self.v_up[...])
        return self.o_proj(values.reshape(values.shape[0], -1)), cache

    def _query(self, hidden):
        if self.q_proj is not None:
            return self.q_proj(hidden)
        assert self.q_a_proj is not None
        assert self.q_a_norm is not None
        assert self.q_b_proj is not None
        return self.q_b_proj(self.q_a_norm(self.q_a_proj(hidden)))
