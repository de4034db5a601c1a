"""Makes the table in `guards.txt`: how often each Hopper kernel waits, arrives, copies, fences and stores, and on what.

    python -m tests.guards > tests/guards.txt

Pallas's interpreter runs a warpgroup as one thread, so it cannot miss a fence between a warpgroup's own threads, nor a
wait for a copy that has long ended there. Only a GPU would, and rarely. So a lost guard must show in this table. The
kernels are traced, which any machine can do.
"""

import collections
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import paged_jax
from paged_jax import BlockSparse, _dispatch
from paged_jax.kernels import problem
from paged_jax.kernels.problem import Device
from paged_jax.ops.shared import attend_in_one_call

KEPT = Path(__file__).with_name("guards.txt")
_COUNTED = re.compile("barrier_|commit_|wait_|copy_|set_max|wgmma|inline_|async_|swap|store|addupdate")
_SHOWN = "n", "action", "wait_n", "wait_read_only", "commit_group", "has_user_predicate", "mgpu_fn"


def _array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _call(op, *, cache_dtype="bfloat16", num_seqs=4, queries=1, heads=(8, 2), head_size=128, width=64, **options):
    """A call of an op: a function and its arguments, as shapes."""
    num_heads, kv_heads = heads
    cache = _array(cache_dtype, 9, kv_heads, 16, head_size)
    tokens = num_seqs * queries + (queries > 1)
    arrays = {"query": _array("bfloat16", tokens, num_heads, head_size), "key_cache": cache, "value_cache": cache}
    arrays |= {"block_tables": _array("int32", num_seqs, width), "seq_lens": _array("int32", num_seqs)}
    if op in ("prefix_attention", "write_and_attend"):
        arrays |= dict.fromkeys(("key", "value"), _array("bfloat16", tokens, kv_heads, head_size))
    if op == "write_and_attend":
        arrays["slot_mapping"] = _array("int32", num_seqs)
    if op.endswith("mla_attention") or op.startswith("mla"):
        arrays = {name: arrays[name] for name in ("block_tables", "seq_lens")}
        arrays |= {"query": _array("bfloat16", tokens, num_heads, 576), "latent_cache": _array("bfloat16", 9, 64, 576)}
        options |= {"value_size": 512, "scale": 0.1}
    if op in ("ragged_paged_attention", "prefix_attention", "ragged_mla_attention"):
        arrays["query_start_loc"] = _array("int32", num_seqs + 1)
    return lambda arrays: getattr(paged_jax, op)(**arrays, **options, implementation="mosaic_gpu"), arrays


def _shared(num_queries, num_prefixes):
    """A call that gives each query two rows of a ragged batch, and its arguments, as shapes."""
    num_seqs = num_prefixes + 1 + num_queries
    _, arrays = _call("ragged_paged_attention", num_seqs=num_seqs)
    arrays["query"] = _array("bfloat16", num_queries, 8, 128)

    def run(arrays):
        with mock.patch.object(_dispatch, "merges_copies", return_value=True):
            return attend_in_one_call(**arrays, implementation="mosaic_gpu")

    return run, arrays


_SCALES: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0}
_SLOTS: dict[str, Any] = dict.fromkeys(("k_scale", "v_scale"), jnp.ones((9, 2, 16), jnp.float32))
_SINKS = jnp.ones(8, jnp.float32)
# Calls by name, each with the GPU for which its tuning is chosen.
_CALLS = {
    "decode in a cluster": (_call("paged_attention", sinks=_SINKS), Device()),
    "decode by queues": (_call("paged_attention", width=4096, num_seqs=40), Device()),
    "decode by queues over 8 bits": (
        _call("paged_attention", width=4096, cache_dtype="int8", **_SCALES),
        Device(90, 4),
    ),
    "decode of one split": (_call("paged_attention_v1", head_size=80), Device()),
    "decode in partitions, scales of slots": (_call("paged_attention_v2", **_SLOTS), Device()),
    "decode of a group of 32": (_call("paged_attention_v1", heads=(64, 2)), Device()),
    "decode of heads of 64": (_call("paged_attention_v1", head_size=64), Device()),
    "decode of heads of 64 by queues": (_call("paged_attention", head_size=64, width=4096, num_seqs=40), Device()),
    "decode that writes": (_call("write_and_attend"), Device()),
    "decode by queues that writes": (_call("write_and_attend", width=4096, num_seqs=40), Device()),
    "ragged": (_call("ragged_paged_attention", queries=100, alibi_slopes=_SINKS), Device()),
    "ragged, thin": (_call("ragged_paged_attention", queries=4, max_query_len=4), Device()),
    "ragged over 8 bits": (_call("ragged_paged_attention", queries=100, cache_dtype="int8", **_SCALES), Device()),
    "ragged, scales of slots": (_call("ragged_paged_attention", queries=100, **_SLOTS), Device()),
    "ragged, a pattern": (_call("ragged_paged_attention", queries=100, block_sparse=BlockSparse(2, 4)), Device()),
    "prefix": (_call("prefix_attention", queries=100), Device()),
    "shared prefixes": (_shared(64, 2), Device()),
    "mla": (_call("mla_paged_attention", heads=(16, 1)), Device()),
    "ragged mla": (
        _call("ragged_mla_attention", heads=(128, 1), queries=3, num_seqs=90, sinks=jnp.ones(128)),
        Device(),
    ),
}


def _kernels(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program that are kernels."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "mpmd_map":
            yield equation
        else:
            for inner in _inner(equation):
                yield from _kernels(inner)


def _inner(equation: Any) -> Iterator[Any]:
    """The programs within an equation."""
    for value in equation.params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            x = getattr(x, "jaxpr", x)
            if hasattr(x, "eqns"):
                yield x


def _count(jaxpr: Any, counts: collections.Counter) -> None:
    for equation in jaxpr.eqns:
        if _COUNTED.match(equation.primitive.name):
            refs = [str(x.aval) for x in equation.invars if "Ref" in str(x.aval)]
            params = {name: equation.params[name] for name in _SHOWN if equation.params.get(name)}
            if "mgpu_fn" in params:
                params["mgpu_fn"] = params["mgpu_fn"].__qualname__.replace(".<locals>", "")
            counts[" ".join([equation.primitive.name, *map(str, params.values()), *refs])] += 1
        for inner in _inner(equation):
            _count(inner, counts)


@functools.cache
def programs() -> dict[str, Any]:
    """The traced calls by name."""
    traced = {}
    for title, ((function, arrays), gpu) in _CALLS.items():
        with mock.patch.object(problem, "device", return_value=gpu):
            traced[title] = jax.make_jaxpr(function)(arrays)
    return traced


def table() -> str:
    """The table's lines."""
    lines = []
    for title, program in programs().items():
        for kernel in _kernels(program.jaxpr):
            counts = collections.Counter()
            for inner in _inner(kernel):
                _count(inner, counts)
            params, [mesh] = kernel.params["compiler_params"], kernel.params["meshes"]
            flags = params.approx_math, params.reduction_scratch_bytes, params.unsafe_no_auto_barriers
            lines.append(
                f"{title}: {kernel.params['name']} {flags} {mesh.num_threads} threads, clusters {mesh.cluster}"
            )
            lines += [f"    {count} x {what}" for what, count in sorted(counts.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
