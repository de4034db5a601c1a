"""Compiles the Mosaic GPU kernels to Hopper's machine code, without a GPU, and checks the assembler's report.

Only here is the kernels' PTX assembled: the interpreter replaces it, and lowering for CUDA does not read it.
"""

import functools
import itertools
import re
from dataclasses import replace

import jax
import pytest

from paged_jax import _validate, _validate_latent
from paged_jax.kernels import mosaic_gpu
from paged_jax.kernels.mosaic_gpu.ragged import call as ragged
from tests import (
    hopper_compiler,
    inputs,
    latent_cases,
    test_decode,
    test_mosaic_gpu,
    test_mosaic_gpu_ragged,
    test_mosaic_gpu_sparse,
    test_mosaic_gpu_write,
    test_write_and_attend,
)

LACKS = hopper_compiler.lacks()
pytestmark = pytest.mark.skipif(LACKS is not None, reason=str(LACKS))

# The most bytes of spilled registers that a thread may read back. With CUDA 13.0 the largest number is 1536, for ragged
# attention with ALiBi and heads of 256. A change that raises this number must say why.
_MOST_SPILLED = 1700
_MOST_SPILLED_BY = {
    "deepseek-8-heads": 200,  # spills begin each item of latent attention
    "one-tile": 0,
    "wide-64": 0,  # three computing warpgroups: each item would wait for values that are read back
    "wide-64-8-bits": 100,  # who converts tiles has few registers, and reads some values back for each of them
}
_WIDE = test_mosaic_gpu_ragged.small("wide-64", 64, 8, 64, 16, "bfloat16", seq_lens=(300,), query_lens=(200,))
_WIDE_8_BITS = replace(_WIDE, name="wide-64-8-bits", cache_dtype="float8_e4m3fn")
_ONE_TILE = test_mosaic_gpu.small("one-tile", 4, 1, 256, 16, "bfloat16", seq_lens=(512,) * 4)


def decode_cases(every=2):
    for op, case in list(test_mosaic_gpu.pairs())[:: int(every)]:
        yield f"{op}-{case}", lambda on_device, op=op, case=case: test_mosaic_gpu.traced(op, case, on_device=on_device)


def ragged_cases(every=2):
    for case in (_WIDE, _WIDE_8_BITS, *test_mosaic_gpu_sparse.LOWERED, *test_mosaic_gpu_ragged.LOWERED)[:: int(every)]:
        operands = test_mosaic_gpu_ragged.operands_of(case, inputs.make(case))
        yield case, lambda on_device, operands=operands: _traced(ragged.ragged_paged_attention, operands, on_device)


def prefix_cases(every=2):
    for case in (*test_mosaic_gpu_ragged.PREFIXES, *test_mosaic_gpu_sparse.PREFIXES)[:: int(every)]:
        operands = test_mosaic_gpu_ragged.prefix_operands_of(case, inputs.make(case))
        yield case, lambda on_device, operands=operands: _traced(ragged.prefix_attention, operands, on_device)


def writing_cases(every=2):
    for case in (*test_mosaic_gpu_write.WRITING, *test_mosaic_gpu_write.UNEVENLY_WRITING)[:: int(every)]:
        made = test_write_and_attend.with_new_tokens(case)
        options = made.arrays | test_decode.op_options(made.static) | {"max_seq_len": case.max_seq_len}
        query, *decode = _validate.decode_operands(*made.decode.values(), options)
        operands = query, made.key, made.value, *decode[:-1], made.slots, decode[-1]
        yield case, lambda on_device, operands=operands: _traced(mosaic_gpu.write_and_attend, operands, on_device)


def mla_cases(every=2):
    for case in latent_cases.HOPPER_CASES[:: -int(every)]:
        made = latent_cases.make(case)
        flags = {name: x for name, x in (made.arrays | made.static).items() if name != "value_size"}
        arrays = [
            made.ragged[name] for name in ("query", "latent_cache", "block_tables", "seq_lens", "query_start_loc")
        ]
        operands = _validate_latent.ragged_operands(*arrays, flags.pop("scale"), True, flags)
        attend = functools.partial(mosaic_gpu.ragged_mla_attention, value_size=case.value_size)
        yield case, lambda on_device, attend=attend, operands=operands: _traced(attend, operands, on_device)


def _traced(function, operands, on_device):
    return jax.jit(function).trace(*jax.tree.map(on_device, operands))


def some_cases(which):
    """A few cases, which a process compiles one after the other: the cheap ones, or cases of every kernel.

    A prefix's kernel has all that the ragged kernel has, and reads the new tokens beside it. So only two ragged kernels
    are compiled, which must spill little.
    """
    yield from writing_cases(99)
    yield from mla_cases(99)
    yield _ONE_TILE, lambda on_device: test_mosaic_gpu.traced("auto", _ONE_TILE, on_device=on_device)
    if which == "cheap":
        yield from decode_cases(999)
    else:
        yield from decode_cases(40)
        yield from prefix_cases(99)
        yield from itertools.islice(ragged_cases(1), 2)


def test_compiles(pytestconfig):
    """ptxas serializes no products that should overlap, and spills few registers. Without slow tests few are compiled.

    `python -m tests.hopper_compiler tests.test_mosaic_gpu_compiled:ragged_cases:1` prints the same facts for every
    case.
    """
    which = "every" if "slow" in pytestconfig.option.markexpr else "cheap"
    reports = hopper_compiler.reports(f"{__name__}:some_cases:{which}")
    assert len(reports) == len(list(some_cases(which)))
    for case, said in reports:
        assert re.search(r"Used \d+ registers", said), case
        assert "serialized" not in said, case
        most = _MOST_SPILLED_BY.get(case, _MOST_SPILLED)
        assert max(int(x) for x in re.findall(r"(\d+) bytes spill loads", said)) <= most, case
