"""Which implementation runs an op, and what holds for every op whichever it is: vmap, gradients, platforms.

An implementation is a package `paged_jax.kernels.<name>` with one function per op it has, named like the op.
It raises `NotImplementedError`, with every reason, for what it cannot do. Functions take the op's arrays in
the op's order, then `AttentionOptions` for the attention ops, then static keywords, and return:

- paged_attention_v1, paged_attention, ragged_paged_attention, prefix_attention: ``(out, lse)``
- paged_attention_v2: ``(out, lse, exp_sums, max_logits, tmp_out)``
- write_and_attend: ``(out, lse, key_cache, value_cache)``
- write_to_paged_cache, swap_blocks: ``(key_cache, value_cache)``
- copy_blocks: the same, where both are tuples with an item a layer, as they are taken
"""

import contextlib
import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")
_DECODE = ("paged_attention_v1", "paged_attention_v2", "paged_attention")


def call(op: str, *operands: Any, implementation: str | None, **static: Any) -> Any:
    """Runs `op` on `operands` (pytrees of arrays; None for what is absent) with hashable `static` keywords."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS} or None, got {implementation!r}")
    return _bind(op, implementation, tuple(sorted(static.items())))(*operands)


@functools.cache
def _bind(op: str, implementation: str | None, static: tuple[tuple[str, Any], ...]) -> Callable:
    """The op as a function of its arrays alone: batched by our rule, refused under differentiation."""

    @jax.jit
    def run(*operands):
        return _on_platform(op, implementation, operands, dict(static))

    batched = jax.custom_batching.custom_vmap(run)

    @batched.def_vmap
    def _(axis_size, in_batched, *operands):
        if op in _DECODE and (folded := _fold(axis_size, in_batched, operands)) is not None:
            results = batched(*folded)
            num_seqs = operands[0].shape[1 if in_batched[0] else 0]
            results = jax.tree.map(lambda x: x.reshape(axis_size, num_seqs, *x.shape[1:]), results)
        else:
            results = _one_by_one(batched, in_batched, operands)
        return results, jax.tree.map(lambda _: True, results)

    @jax.custom_jvp
    def guarded(*operands):
        return batched(*operands)

    @guarded.defjvp
    def _(primals, tangents):
        raise TypeError(f"{op} is inference only: it has no gradient. Differentiate through dense attention.")

    return guarded


def _on_platform(op: str, implementation: str | None, operands: tuple, static: dict[str, Any]) -> Any:
    """Chooses at lowering time; every branch is traced, so none of them may need a device."""
    if implementation == "xla":
        return _load("xla", op)(*operands, **static)
    if implementation is not None:
        kernel = functools.partial(_load(implementation, op), **static)
        return jax.lax.platform_dependent(*operands, cuda=kernel)

    default = jax.jit(functools.partial(_load("xla", op), **static))  # so that both branches share one trace

    def first_that_can(*operands):
        for name in _gpu_implementations(op, operands):
            with contextlib.suppress(NotImplementedError):
                return _load(name, op)(*operands, **static)
        return default(*operands)

    return jax.lax.platform_dependent(*operands, cuda=first_that_can, default=default)


def _gpu_implementations(op: str, operands: tuple) -> tuple[str, ...]:
    """In the order they are tried: the fastest first. With no GPU to ask for its generation, the one for many."""
    try:
        jax.local_devices(backend="gpu")
    except RuntimeError:
        return ("triton",)
    value_cache = 2 if op in _DECODE else 4 if op == "write_and_attend" else None  # which operand
    if value_cache and _package("mosaic_gpu").leads(operands[0], operands[value_cache], operands[-1]):
        return "mosaic_gpu", "triton"
    return "triton", "mosaic_gpu"


@functools.cache
def _package(implementation: str) -> ModuleType:
    name = f"paged_jax.kernels.{implementation}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise NotImplementedError(f"implementation {implementation!r} is not part of this version") from None


def _load(implementation: str, op: str) -> Callable:
    kernel = getattr(_package(implementation), op, None)
    if kernel is None:
        raise NotImplementedError(f"implementation {implementation!r} has no {op}")
    return kernel


def _fold(axis_size: int, in_batched: tuple, operands: tuple) -> tuple | None:
    """A batch of decode calls as one call with more sequences, or None where it cannot be one.

    Batched pools become one pool whose block ids are shifted: a reshape, no copy.
    """
    query, key_cache, value_cache, block_tables, seq_lens, options = operands
    *batched, options_batched = in_batched
    if any(jax.tree.leaves(options_batched)) or batched[1] != batched[2]:
        return None
    per_token_scales = any(s is not None and s.ndim == 3 for s in (options.k_scale, options.v_scale))
    pools_batched = batched[1]
    if pools_batched and per_token_scales:
        return None

    def flat(x, is_batched):
        x = x if is_batched else jax.numpy.broadcast_to(x[None], (axis_size, *x.shape))
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    tables = flat(block_tables, batched[3])
    if pools_batched:
        num_blocks, num_seqs = key_cache.shape[1], query.shape[-3]
        rows = jax.lax.broadcasted_iota(tables.dtype, tables.shape, 0)
        tables = tables + rows // num_seqs * num_blocks
        key_cache, value_cache = flat(key_cache, True), flat(value_cache, True)
    return flat(query, batched[0]), key_cache, value_cache, tables, flat(seq_lens, batched[4]), options


def _one_by_one(fun: Callable, in_batched: tuple, operands: tuple) -> Any:
    """`fun` once for each element of the batch, in turn."""
    leaves, tree = jax.tree.flatten(operands)
    flags = jax.tree.leaves(in_batched)
    batched = [x for x, flag in zip(leaves, flags, strict=True) if flag]

    def one(element):
        element = iter(element)
        merged = [next(element) if flag else x for x, flag in zip(leaves, flags, strict=True)]
        return fun(*jax.tree.unflatten(tree, merged))

    return jax.lax.map(one, batched)
