"""Chooses the kernels of the cache ops: the quantisation and write of new tokens, and copies of blocks.

`write_and_attend` quantises its tokens in the same way.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from paged_jax.kernels.problem import Device, Granularity, Pool
from paged_jax.kernels.triton.integers import cdiv, power_of_two

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """How a write quantises new keys and values.

    Attributes:
      k_scale, v_scale: the granularities of the scales that divide keys and values.
      cache_dtype: the dtype of the result.
      narrower: whether the result's dtype has fewer bytes or a smaller range, so that keys and values are clipped.
      native: whether the cache's dtype is a float8 to which the GPU has an instruction that converts.
    """

    k_scale: Granularity
    v_scale: Granularity
    cache_dtype: str
    narrower: bool
    native: bool

    @property
    def smallest(self) -> float:
        """The least finite value of the cache's dtype."""
        return _range(self.cache_dtype)[0]

    @property
    def largest(self) -> float:
        """The greatest finite value of the cache's dtype."""
        return _range(self.cache_dtype)[1]


def _range(dtype: str) -> tuple[float, float]:
    """The least and the greatest finite value."""
    info = (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype)
    return float(info.min), float(info.max)


@dataclass(frozen=True, kw_only=True)
class WriteKernel:
    """The compile-time argument of the write kernel.

    Attributes:
      pool: the call's facts.
      quantisation: how new tokens are quantised.
      width: elements of a vector in registers, a power of two >= head_size.
      tokens: tokens of one program.
      num_warps, num_stages: arguments of Triton's compiler.
    """

    pool: Pool
    quantisation: Quantisation
    width: int
    tokens: int
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True, kw_only=True)
class CopyKernel:
    """The compile-time argument of the kernels that copy blocks.

    Attributes:
      key_words, value_words: 8-byte words of a block in each cache.
      within: whether sources and destinations are in the same pools.
      chunk: words of each cache that one program copies.
      scan: how many pairs are read at once.
      num_warps, num_stages: arguments of Triton's compiler.
    """

    key_words: int
    value_words: int
    within: bool
    chunk: int = 512
    scan: int = 1024
    num_warps: int = 4
    num_stages: int = 1

    @property
    def chunks(self) -> int:
        """How many programs copy a pair."""
        return cdiv(max(self.key_words, self.value_words), self.chunk)


def quantisation(dtype: str, pool: Pool, gpu: Device, *, scaled: bool = True) -> Quantisation:
    """The quantisation of keys and values of `dtype` for a pool; without `scaled` its scales do not divide them."""
    narrower = pool.cache_itemsize < jnp.dtype(dtype).itemsize or (pool.cache_dtype, dtype) == ("float16", "bfloat16")
    return Quantisation(
        k_scale=pool.k_scale if scaled else Granularity.NONE,
        v_scale=pool.v_scale if scaled else Granularity.NONE,
        cache_dtype=pool.cache_dtype,
        narrower=narrower,
        native=pool.cache_dtype in _FLOAT8 and gpu.capability >= 89,
    )


def write(dtype: str, num_tokens: int, pool: Pool, gpu: Device) -> WriteKernel:
    """Chooses how `num_tokens` tokens are written. A program has 1 to 16: few if tokens are few, to fill the GPU."""
    tokens = min(16, power_of_two(num_tokens * pool.num_kv_heads // (8 * gpu.num_multiprocessors)))
    return WriteKernel(
        pool=pool,
        quantisation=quantisation(dtype, pool, gpu),
        width=power_of_two(pool.head_size),
        tokens=tokens,
        num_warps=2 if tokens == 16 and pool.cache_itemsize == 1 else 4,  # benchmarks/LOG.md, "Cache operations"
    )
