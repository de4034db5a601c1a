"""Picks the next token of every sequence from its logits: greedy, temperature, top-k and top-p."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, Int32


def greedy(logits: Float32[Array, "num_seqs vocab_size"]) -> Int32[Array, " num_seqs"]:
    """Takes the likeliest token of each row, the lower token id among equals.

    Args:
        logits: f32 `[num_seqs, vocab_size]`; -inf forbids a token.

    Returns:
        i32 `[num_seqs]` token ids.
    """
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(
    logits: Float32[Array, "num_seqs vocab_size"],
    key: Array,
    *,
    temperature: ArrayLike = 0.0,
    top_k: ArrayLike = 0,
    top_p: ArrayLike = 1.0,
) -> Int32[Array, " num_seqs"]:
    """Draws one token for each row of logits.

    `sample` divides the logits by the temperature; then keeps only the `top_k` most likely tokens; then, of their
    probabilities renormalised, the fewest most likely tokens that together reach `top_p`: a token stays while those
    more likely than it hold less than `top_p`, so the one that crosses the line stays and at least one always does.
    Among equal logits the lower token id counts as the more likely one, for the greedy choice as for both cuts.

    Args:
        logits: f32 `[num_seqs, vocab_size]`; -inf forbids a token.
        key: a JAX random key; not used by greedy rows.
        temperature: f32 scalar or `[num_seqs]`; 0 = greedy.
        top_k: i32 scalar or `[num_seqs]`; 0 = off, as is anything from vocab_size up.
        top_p: f32 scalar or `[num_seqs]`, in (0, 1]; 1 = off.

    Returns:
        i32 `[num_seqs]` token ids. All arguments may be traced. The rows are sorted only if one asks for a cut; where
        every row is greedy, `greedy` gives the same without drawing numbers.
    """
    num_seqs = logits.shape[0]
    temperature, top_p = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), (num_seqs,)) for x in (temperature, top_p))
    top_k = jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), (num_seqs,))
    is_drawn = temperature > 0
    scaled = logits / jnp.where(is_drawn, temperature, 1)[:, None]
    is_cut = is_drawn & ((top_k > 0) | (top_p < 1))
    kept = jax.lax.cond(is_cut.any(), lambda: _cut(scaled, top_k, top_p), lambda: scaled)
    # The likeliest token after Gumbel noise is a draw (https://arxiv.org/abs/1411.0030, section 2).
    noise = jax.random.gumbel(key, logits.shape, logits.dtype)
    return greedy(kept + jnp.where(is_drawn[:, None], noise, 0))


def _cut(logits: Array, top_k: Array, top_p: Array) -> Array:
    """The logits with -inf for every token that top_k or top_p leaves out."""
    num_seqs, vocab_size = logits.shape
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(vocab_size, dtype=jnp.int32)[None, :]
    stays = rank < jnp.where(top_k > 0, top_k, vocab_size)[:, None]
    probabilities = jax.nn.softmax(jnp.where(stays, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # Rounding may carry the sum past 1 before the last tokens, so that 1 is not left to the comparison.
    stays &= (before < top_p[:, None]) | (top_p >= 1)[:, None] | (rank == 0)
    rows = jnp.arange(num_seqs)[:, None]
    return jnp.full_like(logits, -jnp.inf).at[rows, order].set(jnp.where(stays, ranked, -jnp.inf))
