"""Draws the next tokens on the device: greedy, temperature, top-k, top-p, and log-probabilities.

The token that a row draws depends on its logits, its seed, its index and its position alone. The random numbers are a
function of these (a counter-based generator), so that a request gets the same tokens in any batch.

No code here branches on values, because the host would have to wait for a branch on the device. Instead the program is
compiled once for each `Kind`, and each step runs the kind that does no more than its requests ask for.

Top-k and top-p keep all tokens above a threshold. `_threshold` finds it bit by bit: this takes 32 sums over the
vocabulary, which is less work than sorting it.
"""

import collections.abc
import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

from paged_jax.engine.adjust import adjust
from paged_jax.engine.batch import Draws
from paged_jax.engine.seats import Need

# A quotient by a larger number may be computed as a product with its inverse, which becomes 0, and 0 * -inf is NaN.
_HOTTEST = 1e30


class Kind(enum.IntEnum):
    """What the program that draws tokens can do: take the most likely one, draw one, leave out unlikely ones first
    (top-k, top-p), report log-probabilities, adjust.

    A kind also does all that the kinds before it do, except that ADJUSTED reports no log-probabilities.
    """

    GREEDY = 0
    RANDOM = 1
    TOP = 2
    LOGPROBS = 3
    ADJUSTED = 4
    ADJUSTED_LOGPROBS = 5

    @property
    def has_logprobs(self) -> bool:
        """Whether the program gives log-probabilities."""
        return self in (Kind.LOGPROBS, Kind.ADJUSTED_LOGPROBS)

    @property
    def is_adjusted(self) -> bool:
        """Whether the program changes logits first (adjust.py)."""
        return self >= Kind.ADJUSTED

    @staticmethod
    def of(needs: int) -> "Kind":
        """The kind that does no more than these bits of `Need` ask for."""
        if needs & Need.ADJUSTED:
            return Kind.ADJUSTED_LOGPROBS if needs & Need.LOGPROBS else Kind.ADJUSTED
        if needs & Need.LOGPROBS:
            return Kind.LOGPROBS
        if needs & Need.TOP:
            return Kind.TOP
        return Kind.RANDOM if needs & Need.RANDOM else Kind.GREEDY

    @staticmethod
    def all_of(max_logprobs: int | None, adjustments: bool) -> list["Kind"]:
        """The kinds that an engine with these fields of its config needs."""
        kinds = [kind for kind in Kind if adjustments or not kind.is_adjusted]
        return [kind for kind in kinds if max_logprobs is not None or not kind.has_logprobs]


class Drawn(NamedTuple):
    """The drawn tokens, and log-probabilities if the kind has them (the last three are None if it has not).

    Attributes:
      token_ids: i32 [num_rows], the drawn tokens.
      logprobs: f32 [num_rows], the log-probabilities of the drawn tokens, or of those in `Draws.scored`.
      top_ids: i32 [num_rows, max_logprobs], the most likely tokens, in falling order.
      top_logprobs: f32 [num_rows, max_logprobs], their log-probabilities.
    """

    token_ids: Array
    logprobs: Array | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None


def draw(
    logits: Float32[Array, "num_rows vocab_size"],
    draws: Draws,
    kind: Kind,
    max_logprobs: int,
    adjusted: Float32[Array, "num_rows vocab_size"] | None = None,
    min_p: Float32[Array, " num_rows"] | None = None,
) -> Drawn:
    """Draws one token for each row of logits.

    Args:
      logits: f32 [num_rows, vocab_size].
      draws: the sampling parameters of each row.
      kind: what the program can do (static).
      max_logprobs: how many of the most likely tokens to return (static).
      adjusted: f32 [num_rows, vocab_size], the logits from which tokens are drawn; None for `logits`, which
        log-probabilities are always of.
      min_p: f32 [num_rows]; None for zeros.

    Returns:
      The drawn tokens. A greedy row takes the lowest id of equally likely tokens.
    """
    logits = logits.astype(jnp.float32)
    to_draw = logits if adjusted is None else adjusted
    token_ids = jnp.argmax(to_draw, axis=-1).astype(jnp.int32)
    if kind >= Kind.RANDOM:
        is_random = draws.temperature > 0
        # The largest logit becomes 0, so that a small temperature makes no two of them infinite and equal.
        scaled = to_draw - jnp.max(to_draw, axis=-1, keepdims=True)
        scaled = scaled / jnp.where(is_random, jnp.minimum(draws.temperature, _HOTTEST), 1)[:, None]
        if min_p is not None:
            scaled = jnp.where(scaled >= jnp.log(min_p)[:, None], scaled, -jnp.inf)
        noisy = scaled + _noise(draws, logits.shape[-1])
        if kind >= Kind.TOP:
            noisy = jnp.where(keep_top(scaled, draws.top_k, draws.top_p), noisy, -jnp.inf)
        drawn = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
        token_ids = jnp.where(is_random, drawn, token_ids)
    if not kind.has_logprobs:
        return Drawn(token_ids)
    total = jax.nn.logsumexp(logits, axis=-1)
    scored = jnp.where(draws.scored < 0, token_ids, draws.scored)
    logprobs = jnp.take_along_axis(logits, scored[:, None], axis=-1)[:, 0] - total
    top, top_ids = jax.lax.top_k(logits, min(max_logprobs, logits.shape[-1]))
    return Drawn(token_ids, logprobs, top_ids.astype(jnp.int32), top - total[:, None])


def draw_program(kind: Kind, max_logprobs: int, num_seats: int) -> collections.abc.Callable[..., Any]:
    """Makes the function that draws the tokens of a step and keeps them for the next one.

    Args:
      kind: what it can do.
      max_logprobs: how many of the most likely tokens it returns.
      num_seats: how many seats there are.

    Returns:
      A function of the logits, the packed `Draws` and the last tokens of all seats, which returns the last tokens and a
      `Drawn`. If the kind is adjusted, it also takes the `Adjustments` of all seats, i32 [num_rows] seats of the rows
      that are adjusted (`num_seats` for the others) and u32 [num_rows, num_words] masks, and returns the adjustments
      behind the last tokens.
    """

    def keep(last_tokens, unpacked, drawn):
        return last_tokens.at[unpacked.seats].set(drawn.token_ids, mode="drop")

    def draw_plain(logits, draws, last_tokens):
        unpacked = Draws.unpack(draws)
        drawn = draw(logits, unpacked, kind, max_logprobs)
        return keep(last_tokens, unpacked, drawn), drawn

    def draw_adjusted(logits, draws, last_tokens, adjustments, seats, masks):
        unpacked, rows, is_adjusted = Draws.unpack(draws), adjustments.rows(seats), seats < num_seats
        plain = logits.astype(jnp.float32)
        # A select, so that rows which want no change get the very logits that they get in other programs.
        changed = jnp.where(is_adjusted[:, None], adjust(plain, rows, unpacked.position, masks), plain)
        min_p = jnp.where(is_adjusted, rows.min_p, 0.0)
        drawn = draw(plain, unpacked, kind, max_logprobs, changed, min_p)
        return keep(last_tokens, unpacked, drawn), adjustments.count(seats, drawn.token_ids), drawn

    return draw_adjusted if kind.is_adjusted else draw_plain


def keep_top(
    logits: Float32[Array, "num_rows vocab_size"],
    top_k: Int32[Array, " num_rows"],
    top_p: Float32[Array, " num_rows"],
) -> Array:
    """Says which tokens can be drawn.

    First the `top_k` most likely tokens are kept. Their probabilities are then renormalised, and the smallest set of
    most likely tokens is kept whose probabilities add up to `top_p`. Tokens that are as likely as the last one kept
    are kept as well.

    Args:
      logits: f32 [num_rows, vocab_size]; -inf forbids a token.
      top_k: i32 [num_rows]; 0 for all.
      top_p: f32 [num_rows]; 1 for all.

    Returns:
      bool [num_rows, vocab_size].
    """
    keys = _rising_keys(logits)
    kept = keys >= _threshold(keys, jnp.ones_like(logits), top_k.astype(jnp.float32), top_k <= 0)[:, None]
    weights = jnp.where(kept, jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), 0.0)
    # A limit of 0 would be reached without any token; the most likely one has weight 1 and reaches any other.
    limit = jnp.maximum(top_p * weights.sum(axis=-1), jnp.finfo(jnp.float32).tiny)
    return kept & (keys >= _threshold(keys, weights, limit, top_p >= 1)[:, None])


def _rising_keys(logits: Float32[Array, "n v"]) -> UInt32[Array, "n v"]:
    """Maps the logits to unsigned integers that are in the same order."""
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign != 0, ~bits, bits | sign)


def _threshold(
    keys: UInt32[Array, "n v"], weights: Float32[Array, "n v"], limit: Float32[Array, " n"], is_off: Array
) -> UInt32[Array, " n"]:
    """The highest threshold for which the weights of all tokens with keys at or above it add up to the limit or more.

    The threshold is 0, which keeps every token, where `is_off`.
    """

    def try_bit(i, threshold):
        candidate = threshold | (jnp.uint32(1 << 31) >> jnp.asarray(i, jnp.uint32))
        reached = jnp.where(keys >= candidate[:, None], weights, 0.0).sum(axis=-1) >= limit
        return jnp.where(reached, candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(keys.shape[0], jnp.uint32))
    return jnp.where(is_off, jnp.uint32(0), threshold)


def _noise(draws: Draws, vocab_size: int) -> Float32[Array, "n v"]:
    """Gumbel noise for each row: the token whose logit is largest after adding it is a draw from the softmax."""

    def row(seed_high, seed_low, index, position):
        seed = jax.lax.bitcast_convert_type(jnp.stack([seed_high, seed_low]), jnp.uint32)
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, index), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(row)(draws.seed_high, draws.seed_low, draws.index, draws.position)
