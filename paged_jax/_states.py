"""Attention states: out and lse over some tokens. The states of disjoint sets of tokens merge into one."""

import jax
import jax.numpy as jnp
from jax import Array


def merge_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Computes `merge_attention_states` from arguments that were checked."""
    # Where neither side saw a token, -inf minus -inf would be NaN, in gradients too: such rows compute with 0 instead.
    lse_a, lse_b = (jnp.where(jnp.isposinf(x), -jnp.inf, x) for x in (lse_a, lse_b))
    empty = jnp.isneginf(lse_a) & jnp.isneginf(lse_b)
    base = jnp.logaddexp(jnp.where(empty, 0.0, lse_a), jnp.where(empty, 0.0, lse_b))
    lse = jnp.where(empty, -jnp.inf, base)
    # The weights are divided by their sum. Weights exp(lse - base) would add up to 1 only as far as `base` is exact,
    # which for large logits it is not. The largest lse cancels out of the result, and out of its gradient.
    top = jax.lax.stop_gradient(jnp.where(empty, 0.0, jnp.maximum(lse_a, lse_b)))
    weight_a, weight_b = jnp.exp(lse_a - top)[..., None], jnp.exp(lse_b - top)[..., None]
    total = jnp.where(empty[..., None], 1.0, weight_a + weight_b)
    out = (weight_a * out_a.astype(jnp.float32) + weight_b * out_b.astype(jnp.float32)) / total
    return out.astype(out_a.dtype), lse
