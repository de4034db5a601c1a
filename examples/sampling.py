"""Draws the next token of every sequence from its logits: greedy, temperature, top-k and top-p.

The vocabulary may be split over a mesh of devices (sharding.py). The devices then exchange sums and the likeliest
tokens of each part, the candidates. They exchange all logits only if top-k or top-p keeps every candidate of a part,
since that part may have more tokens to keep, or if the vocabulary is small.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, Int32

_COLDEST = 1e-30  # temperature by which finite logits of up to 10 ** 8 can be divided
_HOTTEST = 1e30  # the inverse of a larger one may become 0, and 0 * -inf is NaN
_PARTS = 8  # the vocabulary is cut in this many parts
_CANDIDATES = 128  # the likeliest tokens of each part, from which top-k and top-p choose


def greedy(logits: Float32[Array, "num_seqs vocab_size"]) -> Int32[Array, " num_seqs"]:
    """Takes the likeliest token of each row, the one with the lowest id among equals.

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

    `sample` first divides the logits by the temperature. Then it keeps only the `top_k` most likely tokens. It then
    renormalises their probabilities, and keeps the smallest set of most likely tokens whose probabilities add up to
    `top_p`, at least one token. Of two equal logits, the one with the lower token id counts as the more likely.

    Args:
        logits: f32 `[num_seqs, vocab_size]`; -inf forbids a token.
        key: a JAX random key; greedy rows do not use it.
        temperature: f32 scalar or `[num_seqs]`; 0 = greedy.
        top_k: i32 scalar or `[num_seqs]`; 0 = off, as are vocab_size and larger numbers.
        top_p: f32 scalar or `[num_seqs]`, in (0, 1]; 1 = off.

    Returns:
        i32 `[num_seqs]` token ids. All arguments may be traced. The rows are sorted only if one of them has a top_k or
        top_p. If every row is greedy, `greedy` gives the same tokens without drawing random numbers.
    """
    num_seqs = logits.shape[0]
    temperature, top_p = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), (num_seqs,)) for x in (temperature, top_p))
    top_k = jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), (num_seqs,))
    is_drawn = temperature > 0
    # Colder draws take the likeliest token anyway, and their logits would not be finite.
    scaled = logits / jnp.where(is_drawn, jnp.clip(temperature, _COLDEST, _HOTTEST), 1)[:, None]
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
    """Applies top_k and top_p to the likeliest tokens of each part of the vocabulary; devices exchange only these.

    Returns:
        f32 `[num_seqs, vocab_size]`, the logits with -inf for the tokens that are left out, and bool `[num_seqs]`,
        whether the row is right. It may be wrong if all candidates of a part are kept, since the part may have further
        tokens that ought to be kept.
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
    # The kept tokens are all those not less likely than the last one kept and, among equals, those with lower ids.
    last = stays.sum(axis=-1, keepdims=True) - 1
    limit, limit_id = (jnp.take_along_axis(x, last, axis=-1) for x in (ranked, ids))
    kept = (logits > limit) | ((logits == limit) & (token <= limit_id)) | is_uncut[:, None]
    return jnp.where(kept, logits, -jnp.inf), is_uncut | ~(stays & is_last).any(axis=-1)


def _cut_all(logits: Array, top_k: Array, top_p: Array) -> Array:
    """Does what `_cut` does, by sorting the whole vocabulary."""
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    stays = _stays(ranked, jax.nn.logsumexp(logits, axis=-1, keepdims=True), top_k, top_p)
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.full_like(logits, -jnp.inf).at[rows, order].set(jnp.where(stays, ranked, -jnp.inf))


def _stays(ranked: Array, total: Array, top_k: Array, top_p: Array) -> Array:
    """Which of the likeliest tokens, in falling order, are kept; `total` is the log-sum-exp of all logits of a row."""
    rank = jnp.arange(ranked.shape[1], dtype=jnp.int32)[None, :]
    stays = (rank < top_k[:, None]) | (top_k <= 0)[:, None]
    # With top_k the probabilities are renormalised over the tokens that it keeps.
    left = jax.nn.logsumexp(jnp.where(stays, ranked, -jnp.inf), axis=-1, keepdims=True)
    probabilities = jnp.where(stays, jnp.exp(ranked - jnp.where(top_k[:, None] > 0, left, total)), 0.0)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # Rounding may bring the sum to 1 before the last tokens, so a top_p of 1 does not rely on the comparison.
    return stays & ((before < top_p[:, None]) | (top_p >= 1)[:, None] | (rank == 0))
