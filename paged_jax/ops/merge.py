"""Merges attention over two sets of tokens into attention over both; this op is plain arithmetic and has no kernels."""

import jax
from jax import Array
from jaxtyping import Float, Float32

from paged_jax import _validate
from paged_jax._states import merge_states

Out = Float[Array, "... num_heads head_size"]
AnyLse = Float32[Array, "... num_heads"]


def merge_attention_states(out_a: Out, lse_a: AnyLse, out_b: Out, lse_b: AnyLse) -> tuple[Out, AnyLse]:
    """Attention over two disjoint sets of tokens, from the attention over each: cascade or shared-prefix attention.

    The op is associative and commutative up to rounding, and (0, -inf) is its identity. Unlike the other ops it is
    differentiable.

    Args:
      out_a, out_b: [..., num_heads, head_size], one dtype: float16, bfloat16 or float32.
      lse_a, lse_b: f32 [..., num_heads], natural log-sum-exp of the logits. Sinks may be part of one of them only. A
        row without tokens has -inf here; inf, which some libraries give to such a row, means the same.

    Returns:
      ``(out, lse)`` over both sets, of out_a's dtype and f32.

    Raises:
      ValueError, TypeError: shapes or dtypes do not match.

    Aliasing: none. vmap and sharding: like any arithmetic on arrays. Source: FlashInfer (arXiv:2501.01005),
    section 2.2.

    Example:
      Two sequences share a prefix of 16 tokens in block 7, which is read once for both; each also has its own tokens.

      >>> import jax.numpy as jnp
      >>> from paged_jax import PagedKVCache, merge_attention_states
      >>> cache = PagedKVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64)
      >>> query, both = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.array([0, 2], jnp.int32)
      >>> prefix_table, prefix_len = jnp.array([[7]], jnp.int32), jnp.array([16], jnp.int32)
      >>> prefix = cache.attend_ragged(query, prefix_table, prefix_len, both, causal=False, return_lse=True)
      >>> own_tables, own_lens = jnp.array([[0], [1]], jnp.int32), jnp.array([3, 5], jnp.int32)
      >>> own = cache.attend(query, own_tables, own_lens, return_lse=True)
      >>> out, lse = merge_attention_states(*prefix, *own)
      >>> out.shape, round(float(jnp.exp(lse[1, 0])))
      ((2, 8, 64), 21)
    """
    return _merge_states(*_validate.states(out_a, lse_a, out_b, lse_b))


_merge_states = jax.jit(merge_states)
