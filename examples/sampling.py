"""Picks the next token of every sequence from its logits: greedy, temperature, top-k and top-p.

Logits may lie on a mesh of devices, each with a part of the vocabulary (sharding.py): the devices exchange sums and
candidates, and all logits only for a cut that leaves more tokens than there are candidates.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, Int32

_PARTS = 8  # of the vocabulary, from each of which a cut looks at so many tokens
_CANDIDATES = 128


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
    if logits.shape[1] % _PARTS or logits.shape[1] // _PARTS <= _CANDIDATES:
        return _cut_all(logits, top_k, top_p)
    kept, is_right = cut_candidates(logits, top_k, top_p)
    return jax.lax.cond(is_right.all(), lambda: kept, lambda: _cut_all(logits, top_k, top_p))


def cut_candidates(logits: Array, top_k: Array, top_p: Array) -> tuple[Array, Array]:
    """Cuts by the likeliest tokens of each part of the vocabulary, which are all that leaves a device of a mesh.

    Returns:
        f32 `[num_seqs, vocab_size]`, the logits with -inf for what is left out, and bool `[num_seqs]`, whether it is
        right: not where a cut leaves all candidates of a part, so that the part may have more tokens that stay.
    """
    num_seqs, vocab_size = logits.shape
    token = jnp.broadcast_to(jnp.arange(vocab_size, dtype=jnp.int32)[None, :], logits.shape)
    # Each part sorts its own; XLA would gather all logits for `jax.lax.top_k`.
    parts = [x.reshape(num_seqs, _PARTS, -1) for x in (-logits, token)]
    candidates, ids = (x[:, :, :_CANDIDATES] for x in jax.lax.sort(parts, num_keys=1))
    is_last = jnp.arange(_CANDIDATES)[None, None, :] == _CANDIDATES - 1
    joined = [jnp.broadcast_to(x, ids.shape).reshape(num_seqs, -1) for x in (candidates, ids, is_last)]
    ranked, ids, is_last = jax.lax.sort(joined, num_keys=1)
    ranked = -ranked
    stays = _stays(ranked, jax.nn.logsumexp(logits, axis=-1, keepdims=True), top_k, top_p)
    is_uncut = (top_k <= 0) & (top_p >= 1)
    # Tokens stay down to the last one that does: no less likely than it, and before it among equals.
    last = stays.sum(axis=-1, keepdims=True) - 1
    limit, limit_id = (jnp.take_along_axis(x, last, axis=-1) for x in (ranked, ids))
    kept = (logits > limit) | ((logits == limit) & (token <= limit_id)) | is_uncut[:, None]
    return jnp.where(kept, logits, -jnp.inf), is_uncut | ~(stays & is_last).any(axis=-1)


def _cut_all(logits: Array, top_k: Array, top_p: Array) -> Array:
    """The same by sorting the whole vocabulary."""
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    stays = _stays(ranked, jax.nn.logsumexp(logits, axis=-1, keepdims=True), top_k, top_p)
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.full_like(logits, -jnp.inf).at[rows, order].set(jnp.where(stays, ranked, -jnp.inf))


def _stays(ranked: Array, total: Array, top_k: Array, top_p: Array) -> Array:
    """Which of the likeliest tokens, in falling order, stay; `total` is the logarithm of the sum of all of exp."""
    rank = jnp.arange(ranked.shape[1], dtype=jnp.int32)[None, :]
    stays = (rank < top_k[:, None]) | (top_k <= 0)[:, None]
    # With top_k the probabilities are those of the tokens that it leaves.
    left = jax.nn.logsumexp(jnp.where(stays, ranked, -jnp.inf), axis=-1, keepdims=True)
    probabilities = jnp.where(stays, jnp.exp(ranked - jnp.where(top_k[:, None] > 0, left, total)), 0.0)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # Rounding may carry the sum past 1 before the last tokens, so that 1 is not left to the comparison.
    return stays & ((before < top_p[:, None]) | (top_p >= 1)[:, None] | (rank == 0))
