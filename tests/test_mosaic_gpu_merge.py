"""Tests the merge of partial results in registers (`hopper/merge.py` and its two callers) without a GPU.

It is written in MLIR and PTX, so Pallas's interpreter replaces it. Here a warpgroup in NumPy runs it (`warpgroup.py`).
"""

import dataclasses

import numpy as np
import pytest

from paged_jax.kernels.mosaic_gpu.hopper.refs import Partials
from paged_jax.kernels.mosaic_gpu.mla import choose as mla_choose
from paged_jax.kernels.mosaic_gpu.mla import plan as mla_plan
from paged_jax.kernels.mosaic_gpu.mla.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.mla.ptx import merge as mla_merge
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry as RaggedGeometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import kinds_of
from paged_jax.kernels.mosaic_gpu.ragged.ptx import merge as ragged_merge
from paged_jax.kernels.problem import Problem
from paged_jax.options import PerHead
from tests.inputs import dtype_of
from tests.test_mosaic_gpu_mla import problem_of
from tests.test_mosaic_gpu_ptx import as_stored
from tests.test_mosaic_gpu_ragged_plan import planned
from tests.warpgroup import SHARED, THREADS

SINKS = np.array([-3, 2, 700, -900, 0, 1, -1, 5], np.float32)  # some hide all tokens, or have no weight


def partials_of(rng, shape, head_size):
    """Partial results [*shape, head_size] and the binary logarithms of their sums; some splits saw no token."""
    log_sums = (10 * rng.standard_normal(shape)).astype(np.float32)
    log_sums[rng.random(shape) < 0.2] = -np.inf
    return rng.standard_normal((*shape, head_size)).astype(np.float32), log_sums


def merged(out, log_sums, sink):
    """The softmax over all splits: out [splits, head_size], log_sums [splits]; sink may be None."""
    log_sums = log_sums.astype(np.float64) * np.log(2)
    if np.isneginf(log_sums).all():
        return np.zeros(out.shape[1]), -np.inf
    lse = np.logaddexp.reduce([*log_sums, *([] if sink is None else [sink])])
    return np.exp(log_sums - lse) @ out, lse


def check(refs, expected):
    """Compares rows with {row: (out, lse)}; nothing may be written into the other rows."""
    out, lse = refs.out.get().astype(np.float64), refs.lse.get()
    assert {tuple(row) for row in np.argwhere(~np.isnan(lse)).tolist()} == set(expected)
    for row, (wanted, wanted_lse) in expected.items():
        np.testing.assert_allclose(out[row], wanted, rtol=0.01, atol=1e-2, err_msg=str(row))
        np.testing.assert_allclose(lse[row], wanted_lse, rtol=1e-5, atol=1e-4, err_msg=str(row))
        lse[row] = np.nan
        out[row] = np.nan
    assert np.isnan(out).all()


def scalars(*values):
    return [np.int32(x) for x in values]


@pytest.mark.parametrize(
    ("of_kind", "band", "num_tokens", "splits", "has_sinks", "head_size"),
    [
        (0, 0, 16, 6, False, 64),
        (0, 1, 5, 3, True, 128),
        (1, 0, 13, 11, False, 80),
        (1, 0, 16, 4, True, 96),
        (1, 0, 1, 2, True, 256),
        (1, 0, 2, 19, True, 64),
        (1, 0, 1, 33, False, 128),
    ],
    ids=["wide", "wide-second-band", "many-splits", "many-rows", "one-query", "few-rows", "few-rows-three-times"],
)
def test_rows_of_ragged_attention(gpu, of_kind, band, num_tokens, splits, has_sinks, head_size):
    """Threads share rows of any size, and the rows and splits are loaded in as many steps as they need."""
    rng, options = np.random.default_rng(of_kind), {"sinks": SINKS} if has_sinks else None
    geometry, *_ = planned((40,), (900,), 8, 2, head_size, None, options=options, num_programs=4)
    kind, problem = kinds_of(geometry)[of_kind], geometry.problem
    first_token, first_partial, kv_head = 2, 3, 1
    out, log_sums = partials_of(rng, (first_partial + splits + 1, kind.bands, 64), head_size)
    log_sums[:, band, 1] = -np.inf  # a row that sees no token at all
    shape = first_token + num_tokens + 2, 8, head_size
    refs = ragged_merge.RowRefs(
        Partials(gpu.put(out), gpu.put(log_sums)),
        gpu.put(SINKS) if has_sinks else None,
        gpu.put(np.full(shape, np.nan, dtype_of(problem.query_dtype))),
        gpu.put(np.full(shape[:-1], np.nan, np.float32)),
    )
    rows = scalars(first_token, num_tokens, kv_head, band, first_partial, splits)
    ragged_merge.merge_item(refs, ragged_merge.SplitRows(*rows), kind)
    expected = {}
    for token, of_group in np.ndindex(num_tokens, 4):
        head, at = 4 * kv_head + of_group, (slice(first_partial, first_partial + splits), band, 4 * token + of_group)
        expected[first_token + token, head] = merged(out[at], log_sums[at], SINKS[head] if has_sinks else None)
    assert any(np.isneginf(lse) for _, lse in expected.values())
    check(refs, expected)


def places_of(copy, head, kind):
    """The indices of a row's partial results."""
    tile, of_tile = divmod(copy.token, kind.tokens)
    later, kv_head = copy.query_tiles - 1 - tile, head // 4
    item = later * 2 + kv_head if copy.heads_together == 2 else kv_head * copy.query_tiles + later
    band, of_band = divmod(of_tile, kind.geometry.band_tokens)
    first = copy.first_partial + item * copy.splits
    return slice(first, first + copy.splits), band, of_band * 4 + head % 4


@pytest.mark.parametrize("has_sinks", [False, True])
def test_copies_of_queries(gpu, has_sinks):
    """The two rows of a query have partial results in items of any kind, or none; nine are loaded in two steps."""
    rng, options = np.random.default_rng(2), {"sinks": SINKS} if has_sinks else None
    geometry, *_ = planned((40,), (900,), 8, 2, 64, None, options=options, num_programs=4)
    geometry = RaggedGeometry(dataclasses.replace(geometry.problem, copies=2), geometry.tuning)
    none = ragged_merge.Copy(*scalars(0, 0, 1, 2, 0, 0))
    wide = ragged_merge.Copy(*scalars(1, kinds_of(geometry)[0].tokens + 21, 2, 1, 2, 3))
    thin = ragged_merge.Copy(*scalars(0, 5, 1, 2, 7, 1))
    pairs = [(wide, thin), (none, thin), (none, none), (thin, wide._replace(heads_together=np.int32(2)))]
    kinds = {int(kind.is_wide): kind for kind in kinds_of(geometry)}
    partials = {is_wide: partials_of(rng, (16, kind.bands, 64), 64) for is_wide, kind in kinds.items()}
    shape = len(pairs) + 1, 8, 64
    refs = ragged_merge.CopyRefs(
        *(Partials(*map(gpu.put, partials[is_wide])) for is_wide in (1, 0)),
        gpu.put(SINKS) if has_sinks else None,
        gpu.put(np.full(shape, np.nan, dtype_of("bfloat16"))),
        gpu.put(np.full(shape[:-1], np.nan, np.float32)),
    )
    expected = {}
    for query, pair in enumerate(pairs):
        for group in range(8 // geometry.merged_rows):
            number = np.int32(query * 8 // geometry.merged_rows + group)
            ragged_merge.merge_copies(refs, number, list(pair), geometry)
        for head in range(8):
            found = [[x[places_of(copy, head, kinds[copy.is_wide])] for x in partials[copy.is_wide]] for copy in pair]
            out, log_sums = (np.concatenate(parts) for parts in zip(*found, strict=True))
            expected[query, head] = merged(out, log_sums, SINKS[head] if has_sinks else None)
    check(refs, expected)


@pytest.mark.parametrize(("queues", "num_splits", "has_sinks"), [(8, 23, True), (100, 23, True), (100, 29, False)])
def test_rows_of_latent_attention(gpu, queues, num_splits, has_sinks):
    """With many queues, four warps share the splits of a row; of 29 splits the first warp alone loads in two steps."""
    rng = np.random.default_rng(queues)
    problem = problem_of(4, 8, 128, 128)
    problem = Problem(**vars(problem) | {"per_head": PerHead(sinks=has_sinks)})
    geometry = Geometry(problem, mla_choose.Tuning(queues=queues, width=2, left=64), one_query=True)
    assert mla_merge.shares(geometry) == (4 if queues == 100 else 1)
    first_partial, row, num_rows, block = 5, 8, 7, 1
    places = [int(mla_plan.partial_of(np.int32(first_partial), np.int32(i))) for i in range(num_splits)]
    out, log_sums = partials_of(rng, (max(places) + 1, 2, 64), 128)
    log_sums[places, block, 3] = -np.inf
    shape = 32, 128
    refs = mla_merge.MergeRefs(
        None,
        Partials(gpu.put(as_stored(out)), gpu.put(log_sums)),
        gpu.put(SINKS) if has_sinks else None,
        gpu.put(np.full(shape, np.nan, dtype_of("bfloat16"))),
        gpu.put(np.full(shape[:-1], np.nan, np.float32)),
    )
    sums_smem = gpu.put(np.zeros(THREADS * 6, np.float32), SHARED)
    fields = mla_merge.RowBlock(*scalars(first_partial, num_splits, row, num_rows, block))
    for part in range(0, mla_merge.parts_side_by_side(geometry), mla_merge.parts_of_program(geometry)):
        mla_merge.merge_parts(refs, fields, *scalars(part), sums_smem, geometry)
    expected = {}
    for i in range(num_rows):
        sink = SINKS[(row + i) % 8] if has_sinks else None
        expected[(row + i,)] = merged(out[places, block, i], log_sums[places, block, i], sink)
    check(refs, expected)
