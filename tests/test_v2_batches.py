"""Tests that a row of v2 depends on its own sequence alone: its bits, its implementation and its tuning."""

import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from paged_jax import _dispatch, _validate
from paged_jax.kernels.mosaic_gpu.decode import call as decode
from paged_jax.kernels.triton import launch
from tests import inputs
from tests.cases import Case, Sparse
from tests.conftest import FULL_COMPILE
from tests.test_decode import op_options

NAMES = ("out", "lse", "exp_sums", "max_logits", "tmp_out")
LENGTHS = 37, 130, 200, 64, 90
# 54 tokens of heads that share query tiles: the row of a sequence in these depends on its place in the batch.
MHA = Case("mha-256", 4, 4, 256, 16, "bfloat16", seq_lens=(54, 200, 54, 9), query_lens=None, partition_size=64)
PLACES = [
    Case("float32", 8, 2, 64, 16, seq_lens=LENGTHS, query_lens=None),
    Case(
        "float8",
        7,
        1,
        112,
        8,
        "bfloat16",
        "float8_e4m3fn",
        "vllm",
        seq_lens=LENGTHS,
        query_lens=None,
        alibi=True,
        sinks=True,
        block_sparse=Sparse(2, 3, 16, 1),
        k_scale="head",
        v_scale="slot",
    ),
    MHA,
]


def drawn(count):
    """Random cases; both GPU implementations take most of them."""
    rng = np.random.default_rng(0)
    return [draw(rng, number) for number in range(count)]


def draw(rng, number):
    kv_heads, group = int(rng.choice([1, 2, 4, 8])), int(rng.choice([1, 2, 3, 4, 8, 12, 16]))
    layout, cache = (
        str(rng.choice(["hnd", "nhd", "vllm"])),
        rng.choice([None, "float8_e4m3fn", "int8"], p=[0.6, 0.2, 0.2]),
    )
    head_size = int(rng.choice([64, 128, 256] if cache or layout == "vllm" else [64, 80, 96, 112, 128, 192, 256]))
    return Case(
        f"drawn-{number}",
        group * kv_heads,
        kv_heads,
        head_size,
        int(rng.choice([16, 32])),
        "bfloat16",
        cache,
        layout,
        seq_lens=tuple(int(n) for n in rng.integers(1, 400, 4)),
        query_lens=None,
        partition_size=int(rng.choice([64, 128, 512])),
        alibi=bool(rng.random() < 0.2),
        sinks=bool(rng.random() < 0.2),
        sliding_window=[None, 100][rng.random() < 0.2],
        logits_soft_cap=[None, 30.0][rng.random() < 0.2],
        k_scale=[None, "head"][rng.random() < 0.3],
    )


def results_of(case, implementation, device):
    """Gives a function that computes some rows of a case, in this order, with tables of this width."""
    made = inputs.make(case)
    static = op_options(made.static) | {"partition_size": case.partition_size, "implementation": implementation}
    pools = jax.device_put({name: made.decode[name] for name in ("key_cache", "value_cache")}, device)

    @partial(jax.jit, compiler_options=FULL_COMPILE if implementation == "xla" else None)
    def function(pools, rows, options):
        flags = rows | options | static
        return paged_jax.paged_attention_v2(**pools, **flags, return_lse=True, return_residuals=True)

    def results(order, width):
        tables = made.decode["block_tables"][list(order)]
        tables = np.pad(tables, ((0, 0), (0, max(0, width - tables.shape[1]))), constant_values=-1)[:, :width]
        rows = {name: made.decode[name][list(order)] for name in ("query", "seq_lens")} | {"block_tables": tables}
        return jax.tree.map(np.asarray, function(pools, *jax.device_put((rows, made.arrays), device)))

    return results


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.gpu) for case in PLACES[:2]),
        MHA,
        *(pytest.param(case, marks=pytest.mark.gpu) for case in drawn(10)),
    ],
    ids=str,
)
def test_a_row_is_bit_equal_alone_and_anywhere_in_a_batch(case, implementation, device, skip_lacking):
    """Each row alone, in halves of the batch and in all of it, and one in wider tables and in the narrowest."""
    results, rows = results_of(case, implementation, device), range(len(case.seq_lens))
    blocks = [max(1, -(-length // case.block_size)) for length in case.seq_lens]
    half, width, first = len(rows) // 2, max(blocks), rows[1]
    batches = [([row], width) for row in rows]
    batches += [(rows[:half], width), (rows[half:], width), ([*rows[half:], first, *rows[:half]], 4 * width)]
    batches += [([first], blocks[first]), ([first] * 3, blocks[first])]
    with skip_lacking(), ThreadPoolExecutor() as pool:  # they compile side by side
        whole, *others = pool.map(lambda batch: results(*batch), [(rows, width), *batches])
    for (order, columns), other in zip(batches, others, strict=True):
        for place, row in enumerate(order):
            for name, one, many in zip(NAMES, other, whole, strict=True):
                mine, its = one[place], many[row]
                if name in NAMES[2:]:
                    count = min(mine.shape[1], its.shape[1])
                    rest = [x[:, count:].astype(np.float32) for x in (mine, its)]
                    assert all((x == (-np.inf if name == "max_logits" else 0)).all() for x in rest)
                    mine, its = mine[:, :count], its[:, :count]
                assert mine.tobytes() == its.tobytes(), f"{name} of row {row} in rows {list(order)} of {columns} blocks"


class Found(Exception):
    """Carries the implementation that a call gets, and the tuning that it was told to compile."""


def found(case, num_seqs, num_blocks):
    """The implementation and the tuning that a case gets with this many sequences, and tables of this many blocks."""
    made = inputs.make(replace(case, seq_lens=(1,)))
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in made.decode.values()]
    arrays[0] = jax.ShapeDtypeStruct((num_seqs, *arrays[0].shape[1:]), arrays[0].dtype)
    arrays[3:] = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((num_seqs, num_blocks), (num_seqs,))]
    told = []

    def launched(module, kernel, config, num_programs, arrays, scalars, outputs, gpu):
        told.append(config)
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]

    def attend(query, key_cache, value_cache, block_tables, seq_lens, options, new, geometry):
        raise Found("mosaic_gpu", replace(geometry.tuning, splits=1))  # the width sets their number

    def call(arrays, options):
        operands = _validate.decode_operands(*arrays, options | op_options(made.static))
        selection, _ = _dispatch._try("paged_attention_v2", operands, {"partition_size": case.partition_size})
        raise Found(selection.name, *told)

    with (
        mock.patch.multiple(launch, call=launched, missing=list),
        mock.patch.object(decode, "_attend", attend),
        pytest.raises(Found) as raised,
    ):
        jax.eval_shape(call, arrays, made.arrays)
    return raised.value.args


@pytest.mark.parametrize("case", drawn(12), ids=str)
def test_the_choice_depends_on_no_batch_and_no_table(case, monkeypatch):
    hopper = types.SimpleNamespace(compute_capability="9.0", core_count=132, platform="gpu")
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: [hopper])
    rng = np.random.default_rng(0)
    batches = [
        (1, 1),
        (1, 4096),
        (6, 64),
        (300, 3),
        *zip(rng.integers(1, 600, 4), rng.integers(1, 9000, 4), strict=True),
    ]
    choices = [found(case, int(num_seqs), int(num_blocks)) for num_seqs, num_blocks in batches]
    assert set(map(repr, choices)) == {repr(choices[0])}
    assert choices[0][0] in ("mosaic_gpu", "triton")


def test_the_drawn_cases_get_both_implementations(monkeypatch):
    hopper = types.SimpleNamespace(compute_capability="9.0", core_count=132, platform="gpu")
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: [hopper])
    assert {found(case, 3, 20)[0] for case in drawn(40)} == {"mosaic_gpu", "triton"}
