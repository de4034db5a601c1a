"""Chooses the implementation that runs an op, and does what all implementations share: vmap, gradients, platforms.

An implementation is a package `paged_jax.kernels.<name>` with one function for each op that it has, named like the op.
The function takes the fields of the op's operands (`paged_jax._operands`), then static keywords. If it cannot do a
call, it raises `Unsupported` with every reason; any other error is a mistake and reaches the user. It returns:

- paged_attention_v1, paged_attention, ragged_paged_attention, prefix_attention: ``(out, lse)``
- paged_attention_v2: ``(out, lse, exp_sums, max_logits, tmp_out)``
- write_and_attend: ``(out, lse, key_cache, value_cache)``
- mla_paged_attention, ragged_mla_attention: ``(out, lse)``
- write_to_paged_cache, swap_blocks: ``(key_cache, value_cache)``; latents have None for the second
- write_to_latent_cache: ``(latent_cache,)``
- copy_blocks: ``(key_caches, value_caches)``, two tuples with one cache for each layer

A package for GPUs may also have ``leads(op, operands) -> bool``, which says whether the package is the fastest for a
call and should be tried first. A package whose ragged attention merges the rows of a query (`AttentionOptions.copies`)
has ``merges_copies(operands) -> bool``, which says whether it takes the call, and faster than one call for each row.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from paged_jax import _partition, _selection, _vmap
from paged_jax._selection import Selection
from paged_jax._states import merge_states
from paged_jax.kernels.problem import Unsupported

Implementation = Literal[  # a line for each
    "mosaic_gpu",
    "triton",
    "xla",
]
"""The implementations by name."""

IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
_ON_CUDA = tuple(name for name in IMPLEMENTATIONS if name != "xla")
# These run on every NVIDIA GPU. They are tried before the others, unless one of the others leads. If JAX sees no GPU,
# only these are tried, because nothing says for which generation of GPUs the program is lowered.
_FOR_EVERY_GPU = ("triton",)


def call(op: str, operands: Any, *, implementation: str | None, unwanted: tuple[int, ...] = (), **static: Any) -> Any:
    """Runs `op` on its operands (a pytree of arrays, with None for absent ones) with hashable `static` keywords.

    `unwanted` has the indices of results that the caller does not want; they are None. So if the caller wants out
    only, the lse of an empty row, -inf, raises no error under `jax_debug_infs`.
    """
    if implementation is not None and not (isinstance(implementation, str) and implementation in IMPLEMENTATIONS):
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS} or None, got {implementation!r}")
    if (question := _selection.question()) is not None:

        def answer(operands: Any) -> None:
            question.answer = _answer(op, operands, static, implementation, question.platform)

        # Kernels are traced for the answer in a separate program. Then the call is traced as always, because a jitted
        # function that makes this call keeps its trace and runs it later.
        jax.eval_shape(answer, operands)
    return _bind(op, implementation, tuple(sorted(static.items())), unwanted)(operands)


def merges_copies(operands: Any, implementation: str | None) -> bool:
    """Whether an implementation runs ragged attention here that merges the rows of each query, and this is faster."""
    if _has_symbolic_sizes(operands):
        return False
    try:
        jax.local_devices(backend="gpu")
    except RuntimeError:
        return False
    names = _ON_CUDA if implementation is None else (implementation,)
    return any(_has_copies(name) and _package(name).merges_copies(operands) for name in names)


@functools.cache
def _bind(
    op: str, implementation: str | None, static: tuple[tuple[str, Any], ...], unwanted: tuple[int, ...]
) -> Callable:
    """Makes the op a function of its operands alone, with a vmap rule, and with an error if it is differentiated."""

    def run_op(name, operands, keywords):
        """Runs this op, or another one that does a part of its work."""
        asked = implementation if name == op or implementation == "xla" else None
        return _on_platform(name, asked, operands, dict(keywords))

    @jax.jit
    def run(operands):
        keywords = dict(static)
        results = _partition.split(op, run_op, operands, keywords)
        return tuple(None if place in unwanted else x for place, x in enumerate(results))

    batched = jax.custom_batching.custom_vmap(run)

    @batched.def_vmap
    def vmap_rule(axis_size, in_batched, operands):
        results = _vmap.batch_of_calls(batched, axis_size, in_batched[0], operands)
        return results, jax.tree.map(lambda _: True, results)

    @jax.custom_jvp
    def guarded(operands):
        return batched(operands)

    @guarded.defjvp
    def refuse_gradients(primals, tangents):
        raise TypeError(f"{op} is inference only: it has no gradient. Differentiate through dense attention.")

    return guarded


def _on_platform(op: str, implementation: str | None, operands: Any, static: dict[str, Any]) -> Any:
    """Runs the op. JAX traces all branches, which must not need a device, and picks one when it lowers the call."""

    def run(name, operands):
        return _run(name, op, operands, static)

    if implementation == "xla":
        return run("xla", operands)
    if implementation is not None:
        elsewhere = Unsupported(implementation, ["needs an NVIDIA GPU"])
        return jax.lax.platform_dependent(
            operands,
            cuda=functools.partial(run, implementation),
            default=functools.partial(_selection.refuse, elsewhere, functools.partial(run, "xla")),
        )

    through_xla = jax.jit(functools.partial(run, "xla"))  # as a jitted function it is traced once for both branches

    def first_that_can(operands):
        selection, results = _try(op, operands, static)
        return through_xla(_selection.warn(operands, selection)) if results is None else results

    return jax.lax.platform_dependent(operands, cuda=first_that_can, default=through_xla)


def _try(op: str, operands: Any, static: dict[str, Any]) -> tuple[Selection, Any]:
    """The first implementation for CUDA that can run the op, and its results; XLA and None if none can."""
    reasons = {}
    for name in _on_cuda(op, operands):
        try:
            return Selection(op, name, reasons), _run(name, op, operands, static)
        except Unsupported as refusal:
            reasons[name] = refusal.reasons
    return Selection(op, "xla", reasons), None


def _answer(op: str, operands: Any, static: dict[str, Any], implementation: str | None, platform: str) -> Selection:
    """The answer for `which_implementation`."""
    if implementation is not None:
        if implementation in _ON_CUDA and platform != "cuda":
            raise Unsupported(implementation, [f"needs an NVIDIA GPU, this is a {platform}"])
        _run(implementation, op, operands, static)
        return Selection(op, implementation, {})
    if platform == "cuda":
        return _try(op, operands, static)[0]
    return Selection(op, "xla", {name: (f"needs an NVIDIA GPU, this is a {platform}",) for name in _ON_CUDA})


def _on_cuda(op: str, operands: Any) -> list[str]:
    """The implementations for CUDA, in the order in which they are tried."""
    if _has_symbolic_sizes(operands):
        return list(_ON_CUDA)  # none of them takes the call
    try:
        jax.local_devices(backend="gpu")
    except RuntimeError:
        return [name for name in _ON_CUDA if name in _FOR_EVERY_GPU]

    def place(name: str) -> tuple[bool, bool]:
        leads = getattr(_package(name), "leads", None)
        return leads is None or not leads(op, operands), name not in _FOR_EVERY_GPU

    return sorted(_ON_CUDA, key=place)


def _run(implementation: str, op: str, operands: Any, static: dict[str, Any]) -> Any:
    """Runs the op by this implementation."""
    if implementation in _ON_CUDA and _has_symbolic_sizes(operands):
        raise Unsupported(implementation, ["lacks symbolic sizes"])  # tilings and grids are chosen for numbers
    function = functools.partial(_load(implementation, op), **static)
    is_plain = op != "ragged_paged_attention" or operands.options.copies == 1 or _has_copies(implementation)
    return function(*operands) if is_plain else _row_by_row(function, operands)


def _row_by_row(attend: Callable, operands: Any) -> Any:
    """Attends to all rows of the batch as if each had a query of its own, and merges the results of a query's rows."""
    copies = operands.options.copies
    options = dataclasses.replace(operands.options, copies=1)
    out, lse = attend(*operands._replace(query=jnp.concatenate([operands.query] * copies), options=options))
    states = zip(jnp.split(out, copies), jnp.split(lse, copies), strict=True)
    return functools.reduce(lambda one, other: merge_states(*one, *other), states)


def _has_copies(implementation: str) -> bool:
    """Whether the implementation merges the rows of each query by itself."""
    return implementation in _ON_CUDA and hasattr(_package(implementation), "merges_copies")


def _has_symbolic_sizes(operands: Any) -> bool:
    """Whether some size is a symbol, as it may be in an exported function."""
    return any(is_symbolic_dim(size) for x in jax.tree.leaves(operands) for size in x.shape)


def _package(implementation: str) -> ModuleType:
    return importlib.import_module(f"paged_jax.kernels.{implementation}")


def _load(implementation: str, op: str) -> Callable:
    kernel = getattr(_package(implementation), op, None)
    if kernel is None:
        raise Unsupported(implementation, [f"has no {op}"])
    return kernel
