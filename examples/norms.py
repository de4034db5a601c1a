"""The norms of the decoder, which compute and return float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from examples.config import DecoderConfig


class RMSNorm(nnx.RMSNorm):
    """Flax's RMSNorm, computed and returned in float32.

    Flax multiplies the scale by 1 / rms first. XLA makes one kernel of the norm only if x is divided first.

    Args:
        offset: a constant to add to the scale; Gemma stores the scale minus 1.
        others: see `flax.nnx.RMSNorm`.
    """

    def __init__(self, *args, offset: float = 0.0, **others):
        super().__init__(*args, **others)
        self.offset = offset

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        return self.divided(x, mask) * jnp.expand_dims(self.scale_in_float32(), range(x.ndim - 1))

    def divided(self, x: Array, mask: Array | None = None) -> Array:
        """Divides x by its rms, in float32."""
        x = x.astype(jnp.float32)
        squares = jnp.mean(x * x, axis=-1, keepdims=True, where=mask)
        return x * jax.lax.rsqrt(squares + self.epsilon)

    def scale_in_float32(self) -> Array:
        """The factors of x after it is divided."""
        assert self.scale is not None
        scale = self.scale[...].astype(jnp.float32)
        return scale + self.offset if self.offset else scale


def make_norm(
    config: DecoderConfig, size: int | None = None, *, eps: float | None = None, rngs: nnx.Rngs, dtype: DTypeLike
) -> nnx.LayerNorm | RMSNorm:
    """Makes a norm of the family's kind.

    Args:
        config: the decoder's config.
        size: numbers in a vector; None for the residual stream's.
        eps: a constant to add to the variance; None for the config's.
        rngs: keys for the initial weights.
        dtype: of the weights.
    """
    options = {
        "epsilon": config.norm_eps if eps is None else eps,
        "dtype": jnp.float32,
        "param_dtype": dtype,
        "use_fast_variance": False,
        "rngs": rngs,
    }
    if config.norm == "layer":
        return nnx.LayerNorm(size or config.hidden_size, **options)
    return RMSNorm(size or config.hidden_size, offset=config.norm_offset, **options)
