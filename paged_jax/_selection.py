"""Tells users which implementation runs a call: `which_implementation` if they ask, a warning if it is XLA on a GPU."""

import contextlib
import contextvars
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import jax
from jax.core import ShapedArray, Tracer
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import mlir

Platform = Literal["cpu", "cuda"]
_logger = logging.getLogger("paged_jax")


@dataclass(frozen=True)
class Selection:
    """The implementation that runs a call, and why those that were tried before it do not.

    Attributes:
      op: the op's name.
      name: the name of the implementation that runs.
      reasons: for each implementation that was tried before, in order, the reasons why it cannot take the call.
    """

    op: str
    name: str
    reasons: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        refusals = [f"{name!r} {'; '.join(reasons)}" for name, reasons in self.reasons.items()]
        return f"{self.op} runs through {self.name!r}" + (f": {', and '.join(refusals)}" if refusals else "")


def which_implementation(op: Callable, *args: Any, platform: Platform | None = None, **options: Any) -> Selection:
    """Says which implementation would run a call, and why the preferred ones would not; nothing is computed.

    Args:
      op: a public function of this package, such as `paged_attention`, or a method of `PagedKVCache`.
      *args, **options: the arguments of the call; `jax.ShapeDtypeStruct`s may stand in for arrays.
      platform: "cuda" or "cpu", the platform for which the call would be lowered. None takes the platform of its arrays
        or, if none is concrete, JAX's default. If JAX sees no GPU, the answer for "cuda" is the one for an exported
        program, which may use only the implementation that serves every NVIDIA GPU.

    Returns:
      The selection: its `name`, the `reasons` of each implementation that cannot take the call, and a readable `str`.

    Raises:
      ValueError, TypeError: the call itself raises it, `platform` is no such name, or `op` is not a function of this
        package.
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
    if platform not in (None, *get_args(Platform)):
        raise ValueError(f"platform must be one of {get_args(Platform)} or None, got {platform!r}")
    leaves, tree = jax.tree.flatten((args, options))
    abstract = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
    question = _Question(_platform(leaves) if platform is None else platform)

    def call(traced: list) -> Any:
        stand_ins = iter(traced)
        given = [next(stand_ins) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        args, options = jax.tree.unflatten(tree, given)
        return op(*args, **options)

    # JAX does not trace a jitted function twice, so that the op in it might not be reached. It does for metadata that
    # it has not met before, and keeps that trace apart from what the function computes at other times.
    with _asking(question), set_xla_metadata(paged_jax_question=next(_numbers)):
        jax.eval_shape(call, abstract)
    if question.answer is None:
        raise TypeError(f"op must be a function of paged_jax that runs on an implementation, got {op!r}")
    return question.answer


@dataclass
class _Question:
    """A question of `which_implementation` for a platform; `_dispatch` puts the answer here when the op is called."""

    platform: Platform
    answer: Selection | None = None


_numbers = itertools.count()
_question: contextvars.ContextVar[_Question | None] = contextvars.ContextVar("question", default=None)


@contextlib.contextmanager
def _asking(question: _Question) -> Iterator[None]:
    token = _question.set(question)
    try:
        yield
    finally:
        _question.reset(token)


def question() -> _Question | None:
    """The question that `which_implementation` is asking, or None in every ordinary call."""
    return _question.get()


def _platform(leaves: list) -> Platform:
    arrays = [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    platforms = {device.platform for x in arrays for device in x.devices()} or {jax.default_backend()}
    return "cuda" if "gpu" in platforms else "cpu"


# The warning. JAX traces all branches of a call on every platform, and lowers only the branch of the platform at hand.
# So an operation that does nothing else logs the warning when the CUDA branch is lowered.

_said: set[tuple[str, str]] = set()


def warn(operands: Any, selection: Selection) -> Any:
    """Returns `operands`; when they are lowered for CUDA, logs that XLA runs the call, once for each reason."""
    (first, *rest), tree = jax.tree.flatten(operands)
    first = _warn_p.bind(first, op=selection.op, reasons=tuple(selection.reasons.items()))
    return jax.tree.unflatten(tree, [first, *rest])


_warn_p = Primitive("paged_jax_warn")
_warn_p.def_impl(lambda x, **_: x)
_warn_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_warn_p, lambda context, x, **_: [x])


def refuse(error: Exception, function: Callable, operands: Any) -> Any:
    """Stands in for the results of `function(operands)` in a branch of a platform that cannot compute them.

    JAX traces all branches of a call on every platform, and their results must be alike, also in which memory they are
    in. The error is raised when this one is lowered.
    """
    traced, results = jax.make_jaxpr(function, return_shape=True)(operands)
    types = tuple((x.shape, x.dtype, x.memory_space) for x in cast(list[ShapedArray], traced.out_avals))
    return jax.tree.unflatten(jax.tree.structure(results), _refuse_p.bind(error=error, types=types))


_refuse_p = Primitive("paged_jax_refuse")
_refuse_p.multiple_results = True
_refuse_p.def_abstract_eval(
    lambda *, error, types: [ShapedArray(shape, dtype, memory_space=memory) for shape, dtype, memory in types]
)


def _lower_refusal(context: Any, *, error: Exception, types: tuple) -> Any:
    raise error


mlir.register_lowering(_refuse_p, _lower_refusal)


def _lower_for_cuda(context: Any, x: Any, *, op: str, reasons: tuple[tuple[str, tuple[str, ...]], ...]) -> list[Any]:
    each = {(name, reason) for name, phrases in reasons for reason in phrases}
    if not each <= _said:
        _said.update(each)
        _logger.warning("%s", Selection(op, "xla", dict(reasons)))
    return [x]


mlir.register_lowering(_warn_p, _lower_for_cuda, platform="cuda")
