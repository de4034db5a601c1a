"""Makes the table in `refusals.txt`: which cases of the suite each GPU implementation refuses, and why.

    python -m tests.refusals > tests/refusals.txt

Every refusal is a test that is skipped on a GPU, so a new one must not go unnoticed. The table can be made on any
machine, by tracing: an implementation refuses before it builds a kernel, and no kernel is built here.
"""

import collections
import contextlib
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

import paged_jax
from paged_jax import _dispatch
from paged_jax.kernels.problem import Unsupported
from tests import cases, inputs
from tests.test_decode import op_options
from tests.test_write_and_attend import CASES as WRITE_CASES
from tests.test_write_and_attend import with_new_tokens

KEPT = Path(__file__).with_name("refusals.txt")
IMPLEMENTATIONS = ("triton", "mosaic_gpu")


class _Taken(Exception):
    """Raised where a kernel would be launched."""


def _take(*_, **__):
    raise _Taken


def _load(implementation, op, load=_dispatch._load):
    """Finds an implementation of an op; instead of XLA's, a function that gives zeros, which traces in no time."""
    if implementation != "xla":
        return load(implementation, op)

    def zeros(query, *arrays, **_):
        pools = arrays[2:4] if op == "write_and_attend" else ()
        return jnp.zeros_like(query), jnp.zeros(query.shape[:2], jnp.float32), *pools

    return zeros


@contextlib.contextmanager
def _no_kernels():
    """Makes every launch raise `_Taken`, and Triton find all packages that it needs."""
    with (
        mock.patch.object(_dispatch, "_load", _load),
        mock.patch("paged_jax.kernels.triton.launch.call", _take),
        mock.patch("paged_jax.kernels.triton.launch.missing", list),
        mock.patch("jax.experimental.pallas.mosaic_gpu.kernel", _take),
    ):
        yield


def _calls():
    """Yields `(op, static keywords, arrays)` for all cases of the suite."""
    for case in cases.DECODE_CASES:
        made = inputs.make(case)
        static = op_options(made.static) | {"max_seq_len": case.max_seq_len}
        calls = {"paged_attention": made.decode}  # v1 and v2 refuse the same cases
        if case.query_lens is not None:
            calls |= {"ragged_paged_attention": made.ragged, "prefix_attention": made.prefix}
        for op, arrays in calls.items():
            yield op, static, arrays | made.arrays
    for case in WRITE_CASES:
        made = with_new_tokens(case)
        static = op_options(made.static) | {"max_seq_len": case.max_seq_len}
        new = {"key": made.key, "value": made.value, "slot_mapping": made.slots}
        yield "write_and_attend", static, made.decode | made.arrays | new


def table():
    """Gives the table's lines: `implementation op, taken/all cases` and, below each, `count x reason`; sorted."""
    taken, tried, reasons = collections.Counter(), collections.Counter(), collections.Counter()
    with _no_kernels():
        for op, static, arrays in _calls():
            for name in IMPLEMENTATIONS:
                tried[name, op] += 1
                function = getattr(paged_jax, op)
                try:
                    jax.eval_shape(lambda x, f=function, n=name, s=static: f(**x, **s, implementation=n), arrays)
                except _Taken:
                    taken[name, op] += 1
                except Unsupported as refusal:
                    reasons.update((name, op, reason) for reason in refusal.reasons)
                else:
                    taken[name, op] += 1  # nothing to compute
    lines = []
    for name, op in sorted(tried):
        lines.append(f"{name} {op}: {taken[name, op]} of {tried[name, op]} cases")
        lines += [f"    {n:3} x {why}" for (*where, why), n in sorted(reasons.items()) if (name, op) == tuple(where)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
