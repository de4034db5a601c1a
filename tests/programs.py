"""Makes the table in `programs.txt`: which operations GPU kernels have, and a digest of what they compute.

    python -m tests.programs > tests/programs.txt

Interpreters show that a kernel's numbers are right for small arrays. They do not show that an offset has 64 bits, that
a load has a mask which only other sizes need, or in which order a GPU's threads run. So no operation of a kernel, and
none that XLA computes for it, may change unnoticed. Kernels are traced, which any machine can do. The digest leaves out
the MLIR and PTX of Hopper's inline functions, which `warpgroup.py` runs. With versions of JAX or Triton that the table
does not name, nothing is compared.
"""

import collections
import functools
import hashlib
import importlib.metadata
import re
import types
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from paged_jax import BlockSparse
from paged_jax.compat import rpa
from paged_jax.kernels import problem
from paged_jax.kernels.problem import Device
from tests import conftest, guards, test_triton_compiled, triton_interpreter  # noqa: F401 (`conftest` sets JAX's flags)

KEPT = Path(__file__).with_name("programs.txt")
COMMAND = "python -m tests.programs > tests/programs.txt"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_INLINED = "jit", "pjit", "closed_call"  # what they call counts, not their names


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


class Traced:
    """What a traced program computes.

    Attributes:
      counts: the number of its operations, by their names.
      digest: of its results and its effects, each with all operations from which it is computed. Names of variables do
        not change it, and neither does the order of operations without effects.
    """

    def __init__(self, jaxpr: Any):
        self.counts: collections.Counter[str] = collections.Counter()
        self._effects: list[str] = []
        results = self._results(jaxpr, [f"argument {i}" for i, _ in enumerate(jaxpr.invars)])
        self.digest = _digest(*(str(x.aval) for x in jaxpr.invars), "effects", *self._effects, "results", *results)

    def _results(self, jaxpr: Any, arguments: list[str]) -> list[str]:
        constants = [f"constant of {x.aval}" for x in jaxpr.constvars]
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

        def value(x: Any) -> str:
            return f"{x.val} {x.aval}" if isinstance(x, Literal) else values[x]

        for equation in jaxpr.eqns:
            name, operands = equation.primitive.name, [value(x) for x in equation.invars]
            if name in _INLINED:
                (called,) = guards._inner(equation)
                results = self._results(called, operands)
            else:
                self.counts[name] += 1
                for inner in guards._inner(equation):
                    self.counts += _traced(inner).counts
                params = [f"{key}={_of(x)}" for key, x in sorted(equation.params.items())]
                types_of_results = [str(x.aval) for x in equation.outvars]
                made = _digest(name, *params, *operands, *types_of_results)
                if equation.effects:
                    self._effects.append(made)
                results = [f"{made} {i}" for i, _ in enumerate(equation.outvars)]
            values |= zip(equation.outvars, results, strict=True)
        return [value(x) for x in jaxpr.outvars]


@functools.cache
def _traced(jaxpr: Any) -> Traced:
    return Traced(jaxpr)


def _of(x: Any) -> str:
    """A word for a constant, or for a parameter of an operation; it is the same in every process."""
    if hasattr(x := getattr(x, "jaxpr", x), "eqns"):
        return _traced(x).digest
    if isinstance(x, np.ndarray | jax.Array):
        return _digest(str(x.dtype), str(x.shape), np.asarray(x).tobytes().hex())
    if isinstance(x, tuple | list):
        return f"[{', '.join(map(_of, x))}]"
    if isinstance(x, dict):
        return _of(sorted((str(key), _of(each)) for key, each in x.items()))
    if isinstance(x, set | frozenset):
        return _of(sorted(map(_of, x)))
    if isinstance(x, types.FunctionType):
        inside = [cell.cell_contents for cell in x.__closure__ or ()]
        return f"{x.__qualname__} {_of([each for each in inside if isinstance(each, int | float | str | tuple)])}"
    return _ADDRESS.sub("", str(x))


def _words(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _of_layout_vllm(**facts: Any) -> tuple[Any, dict[str, Any]]:
    function, arrays = guards._call("paged_attention", **facts, layout="vllm")
    num_blocks, kv_heads, block_size, head_size = arrays["key_cache"].shape
    dtype = arrays["key_cache"].dtype
    x = 16 // dtype.itemsize
    keys = guards._array(dtype, num_blocks, kv_heads, head_size // x, block_size, x)
    values = guards._array(dtype, num_blocks, kv_heads, head_size, block_size)
    return function, arrays | {"key_cache": keys, "value_cache": values}


def _of_one_pool(cache_dtype: str, queries: int) -> tuple[Any, dict[str, Any]]:
    tokens, heads, num_seqs = 4 * queries, guards._array("bfloat16", 4 * queries, 2, 128), 4
    arrays = {"queries": guards._array("bfloat16", tokens, 8, 128), "keys": heads, "values": heads}
    arrays |= {"kv_cache": guards._array(cache_dtype, 9, 16, 2, 2, 128), "kv_lens": guards._array("int32", num_seqs)}
    arrays |= {"page_indices": guards._array("int32", num_seqs * 64), "cu_q_lens": guards._array("int32", num_seqs + 1)}
    arrays |= {"distribution": guards._array("int32", 3)}
    return lambda arrays: rpa.ragged_paged_attention(
        **arrays, max_query_len=queries, k_scale=0.5, v_scale=0.5, update_kv_cache=False, implementation="mosaic_gpu"
    ), arrays


_SINKS, _LOGITS = jnp.ones(8, jnp.float32), dict[str, Any](sliding_window=100, logits_soft_cap=5.0)
# Calls that have the same guards as others, but other numbers.
_MORE = {
    "decode, every option": guards._call("paged_attention_v1", sinks=_SINKS, alibi_slopes=_SINKS, **_LOGITS),
    "decode of scales for each head": guards._call("paged_attention_v1", k_scale=jnp.ones(2), v_scale=jnp.ones(2)),
    "decode of folded heads": guards._call("paged_attention", heads=(16, 8), num_seqs=120, width=8),
    "decode of layout vllm": _of_layout_vllm(),
    "decode of layout vllm over 8 bits": _of_layout_vllm(cache_dtype="float8_e4m3fn"),
    "decode of heads of 512": guards._call("paged_attention_v1", head_size=512),
    "decode of a ragged batch": guards._call("ragged_paged_attention", num_seqs=90, width=4096, max_query_len=1),
    "decode of a pattern": guards._call("paged_attention", block_sparse=BlockSparse(2, 4, head_sliding_step=-1)),
    "decode of one pool": _of_one_pool("bfloat16", 1),
    "ragged of one pool": _of_one_pool("int8", 9),
    "ragged, every option": guards._call(
        "ragged_paged_attention", queries=9, head_size=192, sinks=_SINKS, alibi_slopes=_SINKS, **_LOGITS
    ),
    "ragged, without causality": guards._call("ragged_paged_attention", queries=50, num_seqs=90, causal=False),
    "ragged, a pattern for each head": guards._call(
        "ragged_paged_attention", queries=100, head_size=64, block_sparse=BlockSparse(2, 5, head_sliding_step=2)
    ),
    "prefix over 8 bits": guards._call(
        "prefix_attention", queries=100, cache_dtype="float8_e4m3fn", sliding_window=40, **guards._SCALES
    ),
    "mla, every option": guards._call(
        "ragged_mla_attention", heads=(20, 1), queries=40, max_query_len=40, logits_soft_cap=5.0, sinks=jnp.ones(20),
        latent_scale=0.5, causal=False,
    ),
}  # fmt: skip


def hopper() -> Iterator[str]:
    """The lines of Hopper's kernels: one for each call, and two for each of its kernels."""
    with mock.patch.object(problem, "device", return_value=Device()):
        more = {title: jax.make_jaxpr(function)(arrays) for title, (function, arrays) in _MORE.items()}
    for title, program in {**guards.programs(), **more}.items():
        for kernel in guards._kernels(program.jaxpr):
            for inner in guards._inner(kernel):
                made = _traced(inner)
                yield f"{title}: {kernel.params['name']} {made.digest}"
                yield f"    {_words(made.counts)}"
        yield f"{title}, in all: {_of([*program.consts, program])}"


# Calls of Triton's kernels: a compute capability, an op and a case of `test_triton_compiled.py`.
_LAUNCHED = (
    *((80, "v1", "hnd-float16"), (90, "v1", "hnd-int8"), (80, "v1", "small-blocks"), (89, "auto", "wild-mask")),
    *(
        (90, "v2", "everything"),
        (80, "ragged", "hnd-bfloat16"),
        (90, "ragged", "everything"),
        (89, "ragged", "nhd-e4m3"),
    ),
    *((80, "not-causal", "hnd-e5m2"), (90, "prefix", "split-everything"), (120, "ragged", "split")),
    *((80, "write", "nhd-e5m2"), (89, "write", "vllm-e4m3"), (90, "write", "vllm-int8"), (89, "fused", "everything")),
    *((120, "fused", "vllm-float16"), (120, "copy", "vllm-int8"), (90, "swap", "hnd-bfloat16")),
    *((90, "rpa", "padded-lanes"), (80, "latents", "deepseek"), (90, "latents", "everything")),
)


def _described(made: Any, capability: int) -> str:
    """The program in Triton's language that a launch runs, before the compiler changes it, without names and lines."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    source, options = triton_interpreter.source_of(made)
    target, context = GPUTarget("cuda", capability, 32), ir.context()
    backend: Any = make_backend(target)
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(options)
    rest = options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines = str(source.make_ir(target, *rest)).splitlines()
    text = "\n".join(
        re.sub(r" loc\([^()]*(?:\([^()]*\))*\)", "", line) for line in lines if not line.startswith("#loc")
    )
    names: dict[str, str] = {}
    return re.sub(r"%[\w.-]+", lambda found: names.setdefault(found[0], f"%{len(names)}"), text)


def triton() -> Iterator[str]:
    """The lines of Triton's kernels: two for each launch."""
    for capability, op, name in _LAUNCHED:
        launches: list[Any] = []
        case = name if op == "latents" else test_triton_compiled.COMPILED_CASES[name]
        with triton_interpreter.recorded(launches, Device(capability, 100)):
            test_triton_compiled.call(op, case)
        for made in launches:
            text = _described(made, capability)
            operations = re.findall(r"^ *(?:%.* = )?\"?([a-z_]+\.[a-z_.]+)", text, re.M)
            sizes = [x if isinstance(x, int) else (x.shape, x.dtype.name) for x in (*made.inputs, *made.outputs)]
            digest = _digest(text, _of([sizes, made.grid, made.aliases]))
            yield f"{op} of {name}, {capability}: {made.kernel.__name__} {digest}"
            yield f"    {_words(collections.Counter(operations))}"


def hold(name: str, made: Iterable[str]) -> None:
    """Compares lines with the lines that the table has for a library's version, if that is the version in use."""
    kept = KEPT.read_text(encoding="utf-8").splitlines()
    begins = [i for i, line in enumerate(kept) if line.startswith(("jax ", "triton "))]
    begin = next(i for i in begins if kept[i].startswith(name))
    if kept[begin] != f"{name} {importlib.metadata.version(name)}":
        pytest.skip(f"the table has the programs of {kept[begin]}: {COMMAND}")
    end = min([i for i in begins if i > begin], default=len(kept))
    assert list(made) == kept[begin + 1 : end], COMMAND


def table() -> str:
    """The table's lines: Hopper's kernels behind JAX's version, and Triton's kernels behind Triton's."""
    of_jax, of_triton = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "triton"))
    return "\n".join([of_jax, *hopper(), of_triton, *triton()]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
