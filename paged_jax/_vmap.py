"""Computes a batch of calls of an op, for `vmap`: as one call with more sequences, or one call after the other."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax import _partition
from paged_jax._operands import Copy, Decode, MlaDecode, Swap, Write, WriteAndAttend, WriteLatent

# The pools that decode ops read, by the type of their operands.
_POOLS_READ = {Decode: ("key_cache", "value_cache"), MlaDecode: ("latent_cache",)}
# The pools that each op writes, by the type of its operands. The op returns them as its last results.
_POOLS_WRITTEN = {
    Write: ("key_cache", "value_cache"),
    WriteLatent: ("latent_cache",),
    WriteAndAttend: ("key_cache", "value_cache"),
    Copy: ("key_caches", "value_caches"),
    Swap: ("dst_key_cache", "dst_value_cache"),
}


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
    if isinstance(operands, Decode | MlaDecode) and _fits_in_one_call(in_batched, operands):
        return _as_one_call(call, axis_size, in_batched, operands)
    # Calls follow one another on all devices, so that each device needs its part of every call.
    operands = jax.tree.map(lambda x, flag: _partition.whole_batch(x) if flag else x, operands, in_batched)
    if axis_size and _keep_types_of_pools(call, in_batched, operands):
        return _one_by_one_in_place(call, axis_size, in_batched, operands)
    one_by_one = functools.partial(_one_by_one, in_batched)
    if type(operands) in _POOLS_WRITTEN and any(map(_is_float8, jax.tree.leaves(_pools(operands)))):
        over_bytes = functools.partial(_over_bytes, one_by_one, call)
        return jax.lax.platform_dependent(operands, cpu=over_bytes, default=functools.partial(one_by_one, call))
    return one_by_one(call, operands)


def _fits_in_one_call(in_batched: Decode | MlaDecode, operands: Decode | MlaDecode) -> bool:
    """Whether a batch of decode calls can be computed as one call with more sequences."""
    batched_pools = {getattr(in_batched, name) for name in _POOLS_READ[type(operands)]}
    if any(jax.tree.leaves(in_batched.options)) or len(batched_pools) > 1:
        return False
    if _partition.types_split_rows(in_batched, operands):
        return False
    scales = operands.options.k_scale, operands.options.v_scale
    return not (True in batched_pools and any(scale is not None and scale.ndim == 3 for scale in scales))


def _as_one_call(call: Callable, axis_size: int, in_batched: Decode | MlaDecode, operands: Decode | MlaDecode) -> Any:
    """Computes a batch of `axis_size` decode calls as one call of `call`."""
    num_seqs = operands.query.shape[1 if in_batched.query else 0]
    results = call(_merged(axis_size, in_batched, operands))
    return jax.tree.map(lambda x: x.reshape(axis_size, num_seqs, *x.shape[1:]), results)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _merged[Operands: Decode | MlaDecode](axis_size: int, in_batched: Operands, operands: Operands) -> Operands:
    """Makes one call's operands of a batch. Batched pools become one pool by a reshape, and block ids are shifted."""

    def flat(x, is_batched):
        x = x if is_batched else jnp.broadcast_to(x[None], (axis_size, *x.shape))
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    query = flat(operands.query, in_batched.query)
    tables = flat(operands.block_tables, in_batched.block_tables)
    names = _POOLS_READ[type(operands)]
    pools = {name: getattr(operands, name) for name in names}
    if getattr(in_batched, names[0]):
        num_blocks, num_seqs = pools[names[0]].shape[1], query.shape[0] // max(axis_size, 1)
        rows = jax.lax.broadcasted_iota(tables.dtype, tables.shape, 0)
        tables = tables + rows // max(num_seqs, 1) * num_blocks
        pools = {name: flat(pool, True) for name, pool in pools.items()}
    seq_lens = flat(operands.seq_lens, in_batched.seq_lens)
    return operands._replace(query=query, block_tables=tables, seq_lens=seq_lens, **pools)


def _one_by_one(in_batched: Any, call: Callable, operands: Any) -> Any:
    """Computes a batch of calls of `call` one after the other."""
    leaves, tree = jax.tree.flatten(operands)
    flags = jax.tree.leaves(in_batched)
    batched = [x for x, flag in zip(leaves, flags, strict=True) if flag]

    def one(element):
        element = iter(element)
        merged = [next(element) if flag else x for x, flag in zip(leaves, flags, strict=True)]
        return call(jax.tree.unflatten(tree, merged))

    return jax.lax.map(one, batched)


def _keep_types_of_pools(call: Callable, in_batched: Any, operands: Any) -> bool:
    """Whether the calls write to pools that are all batched, so that a loop can carry them.

    A loop must give back what it carries as it took it. A call may give a pool another sharding, or one that varies
    from device to device inside a `shard_map`.
    """
    if type(operands) not in _POOLS_WRITTEN or not all(jax.tree.leaves(_pools(in_batched))):
        return False

    def first() -> tuple[Any, Any]:
        one = _call_of_batch(0, in_batched, operands)
        return _pools(one), tuple(call(one)[-len(_POOLS_WRITTEN[type(operands)]) :])

    before, after = jax.eval_shape(first)
    return before == after


def _one_by_one_in_place(call: Callable, axis_size: int, in_batched: Any, operands: Any) -> Any:
    """Computes a batch of calls of `call` one after the other; each writes its pools into the stacks of all pools.

    A loop that took all pools and stacked the calls' results would make XLA keep both copies.
    """
    names = _POOLS_WRITTEN[type(operands)]

    def step(stacks, i):
        one = _call_of_batch(i, in_batched, operands._replace(**dict(zip(names, stacks, strict=True))))
        results = call(one)
        others, pools = results[: -len(names)], tuple(results[-len(names) :])
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
        return jax.tree.map(functools.partial(_bit_for_bit, put), stacks, pools), others

    stacks, others = jax.lax.scan(step, _pools(operands), jnp.arange(axis_size, dtype=jnp.int32))
    return (*others, *stacks)


def _over_bytes(loop: Callable, call: Callable, operands: Any) -> Any:
    """Computes a batch of calls of `call` in a `loop` that takes and stacks the bytes of float8 (`_bit_for_bit`)."""

    def call_of_bytes(one):
        return jax.tree.map(_bytes, call(jax.tree.map(_from_bytes, one, operands)))

    results, count = loop(call_of_bytes, jax.tree.map(_bytes, operands)), len(_POOLS_WRITTEN[type(operands)])
    return (*results[:-count], *jax.tree.map(_from_bytes, tuple(results[-count:]), _pools(operands)))


def _bit_for_bit(move: Callable, *arrays: jax.Array) -> jax.Array:
    """Returns `move(*arrays)`, which moves parts of arrays of one dtype and keeps their bits.

    XLA's CPU backend would convert float8 to float16 and back, which changes NaNs, so there bytes are moved. On a GPU
    arrays keep their dtype: kernels write to the pools in place, and a view as bytes might be a copy.
    """
    if not _is_float8(arrays[0]):
        return move(*arrays)

    def of_bytes(*arrays):
        return _from_bytes(move(*map(_bytes, arrays)), arrays[0])

    return jax.lax.platform_dependent(*arrays, cpu=of_bytes, default=move)


def _is_float8(x: Any) -> bool:
    return x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating)


def _bytes(x: jax.Array) -> jax.Array:
    """Views float8 as bytes."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8) if _is_float8(x) else x


def _from_bytes(x: jax.Array, like: jax.Array) -> jax.Array:
    """Undoes `_bytes` of an array of `like`'s dtype."""
    return jax.lax.bitcast_convert_type(x, like.dtype) if _is_float8(like) else x


def _call_of_batch(i: Any, in_batched: Any, operands: Any) -> Any:
    """The operands of the batch's call `i`."""
    take = functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
    return jax.tree.map(lambda x, flag: _bit_for_bit(take, x) if flag else x, operands, in_batched)


def _pools(operands: Any) -> tuple[Any, ...]:
    """The pools that an op writes, of its operands or of facts about them."""
    return tuple(getattr(operands, name) for name in _POOLS_WRITTEN[type(operands)])
