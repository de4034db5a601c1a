"""Logits: products of queries and keys, scaled and capped."""

import jax.numpy as jnp

from paged_jax.kernels.mosaic_gpu.hopper.integers import Scalar
from paged_jax.kernels.mosaic_gpu.hopper.registers import exp
from paged_jax.kernels.problem import Granularity, Problem

_SERIES_BELOW = 0.04
"""If x squared is below this, four terms of the series of tanh(x) err by less than one unit of float32."""


def scaled_logits(products, factor, problem: Problem):
    """Scales and caps products of queries and keys."""
    logits = products * factor
    return logits if problem.logits_soft_cap is None else _capped(logits, problem.logits_soft_cap)


def _capped(logits, cap: float):
    """cap * tanh(logits / cap). Near 0 a formula with an exponential would lose bits, so a series replaces it."""
    x = logits * (1 / cap)
    square = x * x
    series = logits * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return jnp.where(square < _SERIES_BELOW, series, cap - (2 * cap) / (exp(2 * x) + 1))


def cache_scale(scale_gmem, granularity: Granularity, kv_head: Scalar):
    """The scale of a kv head; 1 if the cache has no scale, or one for each slot."""
    if granularity in (Granularity.NONE, Granularity.SLOT):
        return 1.0
    return scale_gmem[kv_head if granularity is Granularity.HEAD else 0]
