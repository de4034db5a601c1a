"""Changes logits before a token is drawn: biases, minimum lengths, penalties, min_p and masks.

Each seat has a row in `Adjustments`, a few arrays on the device. The host fills the row when a sequence that needs it
gets the seat, from all tokens that the sequence then has. Afterwards the program that draws a token also counts it,
because the host launches the next step before it reads that token.

Only steps that draw a token for such a sequence run a program with `Adjustments` (the adjusted kinds of sampling.py).
In these programs all other rows use the model's logits unchanged.

The order is vLLM's: biases and minimum lengths, repetition penalty, frequency and presence penalties, mask; then the
temperature and `min_p`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from paged_jax.engine.request import MAX_BIASES
from paged_jax.engine.sequence import Sequence

_IN_PROMPT = 1 << 15  # bit of a token's count: the prompt has the token
_MOST = _IN_PROMPT - 1  # counts stop here
_ALWAYS = 2**31 - 1  # a bias that holds at every position


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adjustments:
    """The changes of each seat's logits. Without the first axis of every array: of one seat, or of each row.

    Attributes:
      counts: u16 [num_seats, vocab_size], how often the output has each token, and the bit `_IN_PROMPT`.
      bias_ids: i32 [num_seats, MAX_BIASES], tokens with a bias; vocab_size for none.
      biases: f32 [num_seats, MAX_BIASES], summands of their logits; -inf forbids a token.
      until: i32 [num_seats, MAX_BIASES], the first position at which a bias has no effect.
      repetition, presence, frequency: f32 [num_seats], the penalties.
      min_p: f32 [num_seats], as in `SamplingParams`.
    """

    # Any: a tree of shapes, shardings or NumPy arrays has the same form.
    counts: Any
    bias_ids: Any
    biases: Any
    until: Any
    repetition: Any
    presence: Any
    frequency: Any
    min_p: Any

    @staticmethod
    def of(sequence: Sequence | None, vocab_size: int) -> "Adjustments":
        """The row of a sequence, from the tokens that the host knows, in NumPy arrays; None for zeros."""
        ids = np.full(MAX_BIASES, vocab_size, np.int32)
        biases, until = np.zeros(MAX_BIASES, np.float32), np.zeros(MAX_BIASES, np.int32)
        counts, numbers = np.zeros(vocab_size, np.uint16), np.zeros(4, np.float32)
        if sequence is not None:
            params = sequence.params
            entries = [(token_id, bias, _ALWAYS) for token_id, bias in dict(params.logit_bias).items()]
            if params.min_tokens:
                end = sequence.num_prompt + params.min_tokens
                entries += [(token_id, -np.inf, end) for token_id in params.stop_token_ids]
            for i, entry in enumerate(entries):
                ids[i], biases[i], until[i] = entry
            if params.has_penalties:
                output = np.bincount(_known(sequence.tokens[sequence.num_prompt :], vocab_size), minlength=vocab_size)
                counts[:] = np.minimum(output, _MOST)
                counts[_known(sequence.tokens[: sequence.num_prompt], vocab_size)] |= _IN_PROMPT
            numbers[:] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty, params.min_p
        return Adjustments(counts, ids, biases, until, *numbers)

    @staticmethod
    def zeros(num_seats: int, vocab_size: int) -> "Adjustments":
        """Rows for all seats, in NumPy arrays."""
        row = Adjustments.of(None, vocab_size)
        return jax.tree.map(lambda x: np.tile(x, (num_seats,) + (1,) * np.ndim(x)), row)

    def set_row(self, seat: Int32[Array, ""], row: "Adjustments") -> "Adjustments":
        """Replaces a seat's row; a seat out of range replaces none."""
        return jax.tree.map(lambda all_rows, one: all_rows.at[seat].set(one, mode="drop"), self, row)

    def rows(self, seats: Int32[Array, " num_rows"]) -> "Adjustments":
        """Takes the rows of some seats; those of a seat out of range may hold anything."""
        return jax.tree.map(lambda array: array.at[seats].get(mode="clip"), self)

    def count(self, seats: Int32[Array, " num_rows"], token_ids: Int32[Array, " num_rows"]) -> "Adjustments":
        """Counts a drawn token for each of these seats; seats out of range are skipped."""
        before = self.counts.at[seats, token_ids].get(mode="clip")
        after = before + ((before & _MOST) < _MOST).astype(jnp.uint16)
        return dataclasses.replace(self, counts=self.counts.at[seats, token_ids].set(after, mode="drop"))


def adjust(
    logits: Float32[Array, "num_rows vocab_size"],
    rows: Adjustments,
    position: Int32[Array, " num_rows"],
    allowed: UInt32[Array, "num_rows num_words"],
) -> Float32[Array, "num_rows vocab_size"]:
    """Applies all of `Adjustments` to logits except `min_p`, which depends on the temperature.

    Args:
      logits: f32 [num_rows, vocab_size].
      rows: how the logits of each row are changed.
      position: i32 [num_rows], the positions of the tokens that are drawn.
      allowed: u32 [num_rows, ceil(vocab_size / 32)]; bit t % 32 of word t // 32 says whether token t may come.

    Returns:
      f32 [num_rows, vocab_size]; -inf forbids a token. Where a minimum length would forbid every token that the mask
      allows, the mask alone counts.
    """
    num_rows, vocab_size = logits.shape
    may_come = unpack_bits(allowed, vocab_size)
    holds = jnp.where(position[:, None] < rows.until, rows.biases, 0.0)
    changed = logits.at[jnp.arange(num_rows)[:, None], rows.bias_ids].add(holds, mode="drop")
    count = (rows.counts & _MOST).astype(jnp.float32)
    repetition = jnp.where(rows.counts > 0, rows.repetition[:, None], 1.0)
    changed = jnp.where(changed > 0, changed / repetition, changed * repetition)
    changed = changed - rows.frequency[:, None] * count
    changed = changed - jnp.where(count > 0, rows.presence[:, None], 0.0)
    changed = jnp.where(may_come, changed, -jnp.inf)
    is_empty = (changed == -jnp.inf).all(axis=-1, keepdims=True)
    return jnp.where(is_empty, jnp.where(may_come, logits, -jnp.inf), changed)


def unpack_bits(words: UInt32[Array, "n num_words"], count: int) -> Bool[Array, "n count"]:
    """Unpacks the bits of each row of words, the lowest bit of the first word first."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & 1
    return bits.reshape(words.shape[0], -1)[:, :count].astype(jnp.bool_)


def num_words(vocab_size: int) -> int:
    """How many words of 32 bits are needed for a bit for each token."""
    return -(-vocab_size // 32)


def _known(token_ids: list[int], vocab_size: int) -> np.ndarray:
    """Drops token ids that the model does not have: the engine does not check prompts for them."""
    found = np.asarray(token_ids, np.int64)
    return found[found < vocab_size]
