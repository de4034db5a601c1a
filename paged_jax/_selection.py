"""What is said about which implementation runs a call: `which_implementation` on request, a warning where it is XLA."""

import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import mlir

Platform = Literal["cpu", "cuda"]
_logger = logging.getLogger("paged_jax")


@dataclass(frozen=True)
class Selection:
    """Which implementation a call gets, and what kept those that were tried before it from it.

    Attributes:
      op: the op's name.
      name: of the implementation that runs.
      reasons: what stands in the way of each one that was tried before, in that order; phrases by implementation.
    """

    op: str
    name: str
    reasons: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        refusals = [f"{name!r} {'; '.join(reasons)}" for name, reasons in self.reasons.items()]
        return f"{self.op} runs through {self.name!r}" + (f": {', and '.join(refusals)}" if refusals else "")


def which_implementation(op: Callable, *args: Any, platform: Platform | None = None, **options: Any) -> Selection:
    """Names the implementation that a call gets, and says why not the ones before it; nothing is computed.

    Args:
      op: a public function of this package, such as `paged_attention`, or a method of `PagedKVCache`.
      *args, **options: what `op` would be called with; `jax.ShapeDtypeStruct`s may stand in for arrays.
      platform: "cuda" or "cpu", what the call would be lowered for; None takes where its arrays are, or JAX's default.
        Where JAX sees no GPU, "cuda" answers for an export: the implementation that serves every NVIDIA GPU.

    Returns:
      The selection: its `name`, `reasons` for each implementation that cannot take the call, and a readable `str`.

    Raises:
      ValueError, TypeError: what `op` itself raises, or `op` is none of ours.
      NotImplementedError: the implementation that was asked for by name lacks an option.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from paged_jax import PagedKVCache, paged_attention, which_implementation
      >>> cache = PagedKVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64)
      >>> query, tables = jnp.ones((1, 8, 64), jnp.bfloat16), jnp.zeros((1, 4), jnp.int32)
      >>> arrays = query, cache.key_cache, cache.value_cache, tables, jnp.ones(1, jnp.int32)
      >>> which_implementation(paged_attention, *arrays, platform="cpu").name
      'xla'
    """
    leaves, tree = jax.tree.flatten((args, options))
    abstract = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
    question = _Question(_platform(leaves) if platform is None else platform)

    def call(traced: list) -> Any:
        stand_ins = iter(traced)
        given = [next(stand_ins) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        args, options = jax.tree.unflatten(tree, given)
        return op(*args, **options)

    with _asking(question):
        jax.eval_shape(call, abstract)
    if question.answer is None:
        raise TypeError(f"op must be a function of paged_jax that runs on an implementation, got {op!r}")
    return question.answer


@dataclass
class _Question:
    """`platform` is what is asked for; the op that is called meanwhile leaves its answer."""

    platform: Platform
    answer: Selection | None = None


_question: contextvars.ContextVar[_Question | None] = contextvars.ContextVar("question", default=None)


@contextlib.contextmanager
def _asking(question: _Question) -> Iterator[None]:
    token = _question.set(question)
    try:
        yield
    finally:
        _question.reset(token)


def question() -> _Question | None:
    """What `which_implementation` waits for; None in every other call."""
    return _question.get()


def _platform(leaves: list) -> Platform:
    arrays = [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    platforms = {device.platform for x in arrays for device in x.devices()} or {jax.default_backend()}
    return "cuda" if "gpu" in platforms else "cpu"


# The warning. All branches of a call are traced on every platform, so what is only true on CUDA can be said no earlier
# than when the CUDA branch is lowered: by an operation that does nothing else.

_said: set[tuple[str, str]] = set()


def warn(operands: Any, selection: Selection) -> Any:
    """Returns `operands`; where they are lowered for CUDA, the logger says that XLA runs the call, once a reason."""
    (first, *rest), tree = jax.tree.flatten(operands)
    first = _warn_p.bind(first, op=selection.op, reasons=tuple(selection.reasons.items()))
    return jax.tree.unflatten(tree, [first, *rest])


_warn_p = Primitive("paged_jax_warn")
_warn_p.def_impl(lambda x, **_: x)
_warn_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_warn_p, lambda context, x, **_: [x])


def _lower_for_cuda(context: Any, x: Any, *, op: str, reasons: tuple[tuple[str, tuple[str, ...]], ...]) -> list[Any]:
    each = {(name, reason) for name, phrases in reasons for reason in phrases}
    if not each <= _said:
        _said.update(each)
        _logger.warning("%s", Selection(op, "xla", dict(reasons)))
    return [x]


mlir.register_lowering(_warn_p, _lower_for_cuda, platform="cuda")
