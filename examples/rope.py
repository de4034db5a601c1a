"""Rotary position embedding: angles, the ways to stretch them to longer contexts, and the rotation itself.

Source: https://arxiv.org/abs/2104.09864. A head's numbers are rotated in pairs, each pair by an angle that grows with
the position: a `Rope` says by how much. A scaling is one small class with a method `frequencies`, which gives each
pair's angle from one position to the next, and the factor that cosine and sine are multiplied by.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

type Rotation = tuple[Float32[Array, "num_tokens pairs"], Float32[Array, "num_tokens pairs"]]


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor` (https://arxiv.org/abs/2306.15595)."""

    factor: float

    def frequencies(self, theta: float, size: int, longest: int) -> tuple[np.ndarray, float]:
        """See the module's docstring."""
        return _plain(theta, size) / self.factor, 1.0


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: wavelengths longer than the trained context become `factor` times longer.

    Source: https://arxiv.org/abs/2407.21783, section 3.4, and the `rope_type: llama3` of transformers.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, theta: float, size: int, longest: int) -> tuple[np.ndarray, float]:
        """See the module's docstring."""
        plain = _plain(theta, size)
        # The place of each frequency between the trained context's low (0) and high (1) frequencies.
        turns = self.original_max_position_embeddings * plain / (2 * np.pi)
        high = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return high * plain + (1 - high) * plain / self.factor, 1.0


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): pairs that turn rarely in the trained context are slowed down.

    Pairs that turn more than `beta_fast` times keep their frequency, pairs that turn less than `beta_slow` times get
    1 / `factor` of it, and a ramp over the pairs joins the two; `truncate` rounds the ramp's ends to whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, theta: float, size: int, longest: int) -> tuple[np.ndarray, float]:
        """See the module's docstring."""

        def pair_that_turns(times: float) -> float:
            return size * math.log(self.original_max_position_embeddings / (times * 2 * math.pi)) / 2 / math.log(theta)

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        last += 0.001 if first == last else 0
        slowed = np.clip((np.arange(size // 2) - first) / (last - first), 0, 1)
        plain = _plain(theta, size)
        return plain * (1 - slowed) + plain / self.factor * slowed, self.attention_factor


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (https://arxiv.org/abs/2402.13753): a divisor for each pair, from one of two lists.

    A model whose texts are no longer than `original_max_position_embeddings` takes the short list, any other the long
    one. Keys stay in the cache as they were rotated, so that one list serves a text from start to end. As in vLLM and
    llama.cpp, the longest text that the model is set up for decides (`Decoder.limit`); transformers takes the short
    list until a text outgrows it, then computes the whole text anew.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float

    def frequencies(self, theta: float, size: int, longest: int) -> tuple[np.ndarray, float]:
        """See the module's docstring."""
        is_long = longest > self.original_max_position_embeddings
        return _plain(theta, size) / np.array(self.long_factor if is_long else self.short_factor), self.attention_factor


type Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class Rope:
    """How the heads of a layer are rotated.

    Args:
        theta: the base; pair i of n turns by theta ** (-i / n) from one position to the next.
        scaling: how the angles are stretched, or None.
        size: how many numbers of each head are rotated, the first ones; None for all.
        is_interleaved: whether neighbours are a pair. Otherwise each number is paired with the one `size / 2` after it.
    """

    theta: float
    scaling: Scaling | None = None
    size: int | None = None
    is_interleaved: bool = False


def rope_frequencies(rope: Rope, head_size: int, longest: int) -> tuple[np.ndarray, float]:
    """The angle in radians by which each pair turns from one position to the next, and the factor of cosine and sine.

    Args:
        rope: base, scaling and size.
        head_size: numbers in a head; even.
        longest: tokens of the longest sequence that the model is to read.

    Returns:
        float32 `[rope.size // 2]`, or `[head_size // 2]` if all of a head is rotated; and a number.
    """
    size = rope.size or head_size
    frequencies, factor = (
        (_plain(rope.theta, size), 1.0) if rope.scaling is None else rope.scaling.frequencies(rope.theta, size, longest)
    )
    return frequencies.astype(np.float32), factor


def make_rotation(rope: Rope, head_size: int, longest: int, positions: Int32[Array, " num_tokens"]) -> Rotation:
    """Computes cosine and sine of each token's angles, f32 `[num_tokens, pairs]` each.

    Args:
        rope, head_size, longest: see `rope_frequencies`.
        positions: i32 `[num_tokens]`.
    """
    frequencies, factor = rope_frequencies(rope, head_size, longest)
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def rotate(
    heads: Float[Array, "num_tokens num_heads head_size"],
    rotation: Rotation,
    is_interleaved: bool = False,
) -> Float32[Array, "num_tokens num_heads head_size"]:
    """Rotates queries or keys by the angles of their positions.

    Args:
        heads: `[num_tokens, num_heads, head_size]`.
        rotation: cosine and sine of each token's angles, f32 `[num_tokens, pairs]` each. The first `2 * pairs` numbers
            of each head are rotated.
        is_interleaved: whether neighbours are a pair.

    Returns:
        f32 `[num_tokens, num_heads, head_size]`.
    """
    size = 2 * rotation[0].shape[-1]
    if size < heads.shape[-1]:
        rotated = rotate(heads[..., :size], rotation, is_interleaved)
        return jnp.concatenate([rotated, heads[..., size:].astype(jnp.float32)], axis=-1)
    axis = 3 if is_interleaved else 2  # of the two members of a pair
    cos, sin = (jnp.expand_dims(x if x.ndim == 3 else x[:, None, :], axis) for x in rotation)
    sign = jnp.expand_dims(jnp.array([-1.0, 1.0], jnp.float32), [i for i in range(4) if i != axis])
    pairs = heads.astype(jnp.float32).reshape(*heads.shape[:-1], *((-1, 2) if is_interleaved else (2, -1)))
    # XLA makes one kernel of all this because the pairs are flipped; concatenating two results would need another.
    return (pairs * cos + jnp.flip(pairs, axis=axis) * (sign * sin)).reshape(heads.shape)


def _plain(theta: float, size: int) -> np.ndarray:
    return theta ** -(np.arange(0, size, 2) / size)
