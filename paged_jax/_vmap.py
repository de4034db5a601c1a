"""Computes a batch of calls of an op, for `vmap`: as one call with more sequences, or one call after the other."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax import _partition
from paged_jax._operands import Decode


def batch_of_calls(call: Callable, axis_size: int, in_batched: Any, operands: Any) -> Any:
    """Computes a batch of calls of an op.

    Args:
      call: the op as a function of its operands.
      axis_size: how many calls the batch has.
      in_batched: for each operand, whether it has an axis of the batch, which is then its first one.
      operands: the operands of all calls.

    Returns:
      The results, which all have an axis of the batch.
    """
    if isinstance(operands, Decode) and _fits_in_one_call(in_batched, operands):
        return _as_one_call(call, axis_size, in_batched, operands)
    return _one_by_one(call, in_batched, operands)


def _fits_in_one_call(in_batched: Decode, operands: Decode) -> bool:
    """Whether a batch of decode calls can be computed as one call with more sequences."""
    if any(jax.tree.leaves(in_batched.options)) or in_batched.key_cache != in_batched.value_cache:
        return False
    if _partition.types_split_rows(in_batched, operands):
        return False
    scales = operands.options.k_scale, operands.options.v_scale
    return not (in_batched.key_cache and any(scale is not None and scale.ndim == 3 for scale in scales))


def _as_one_call(call: Callable, axis_size: int, in_batched: Decode, operands: Decode) -> Any:
    """Computes a batch of `axis_size` decode calls as one call of `call`."""
    num_seqs = operands.query.shape[1 if in_batched.query else 0]
    results = call(_merged(axis_size, in_batched, operands))
    return jax.tree.map(lambda x: x.reshape(axis_size, num_seqs, *x.shape[1:]), results)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _merged(axis_size: int, in_batched: Decode, operands: Decode) -> Decode:
    """Makes one call's operands of a batch. Batched pools become one pool by a reshape, and block ids are shifted."""

    def flat(x, is_batched):
        x = x if is_batched else jnp.broadcast_to(x[None], (axis_size, *x.shape))
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    query = flat(operands.query, in_batched.query)
    tables = flat(operands.block_tables, in_batched.block_tables)
    key_cache, value_cache = operands.key_cache, operands.value_cache
    if in_batched.key_cache:
        num_blocks, num_seqs = key_cache.shape[1], query.shape[0] // max(axis_size, 1)
        rows = jax.lax.broadcasted_iota(tables.dtype, tables.shape, 0)
        tables = tables + rows // max(num_seqs, 1) * num_blocks
        key_cache, value_cache = flat(key_cache, True), flat(value_cache, True)
    seq_lens = flat(operands.seq_lens, in_batched.seq_lens)
    return Decode(query, key_cache, value_cache, tables, seq_lens, operands.options)


def _one_by_one(call: Callable, in_batched: Any, operands: Any) -> Any:
    """Computes a batch of calls of `call` one after the other."""
    leaves, tree = jax.tree.flatten(operands)
    flags = jax.tree.leaves(in_batched)
    # Calls follow one another on all devices, so that each device needs its part of every call.
    batched = [_partition.whole_batch(x) for x, flag in zip(leaves, flags, strict=True) if flag]

    def one(element):
        element = iter(element)
        merged = [next(element) if flag else x for x, flag in zip(leaves, flags, strict=True)]
        return call(jax.tree.unflatten(tree, merged))

    return jax.lax.map(one, batched)
