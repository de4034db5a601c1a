"""Tests the plan of ragged attention in Mosaic GPU: its work items, their order, and how they are split.

On a GPU the kernel runs these functions. Here they run on arrays.
"""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import _validate
from paged_jax.kernels.mosaic_gpu.hopper.integers import cdiv
from paged_jax.kernels.mosaic_gpu.ragged import choose, count, plan
from paged_jax.kernels.mosaic_gpu.ragged import sequence as sequences
from paged_jax.kernels.mosaic_gpu.ragged.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.ragged.kinds import LOADING_WARPS, kinds_of, num_counters
from paged_jax.kernels.mosaic_gpu.ragged.refs import Counted, Lengths
from paged_jax.kernels.problem import Device, Problem


def planned(
    query_lens,
    seq_lens,
    *shape,
    block_size=16,
    table_width=64,
    prefix=False,
    options=None,
    cache_dtype="bfloat16",
    **tuning,
):
    """Returns a batch's geometry, its counts, as XLA counts them before the kernel, and its lengths."""
    num_heads, num_kv_heads, head_size, window = shape
    num_tokens = sum(query_lens) + 3
    cache = jax.ShapeDtypeStruct((9, num_kv_heads, block_size, head_size), jnp.dtype(cache_dtype))
    arrays = (
        jax.ShapeDtypeStruct((num_tokens, num_heads, head_size), jnp.bfloat16),
        *[jax.ShapeDtypeStruct((num_tokens, num_kv_heads, head_size), jnp.bfloat16)] * (2 if prefix else 0),
        *(cache, cache),
        jax.ShapeDtypeStruct((len(seq_lens), table_width), jnp.int32),
        jax.ShapeDtypeStruct((len(seq_lens),), jnp.int32),
        jax.ShapeDtypeStruct((len(seq_lens) + 1,), jnp.int32),
    )
    validate = _validate.prefix_operands if prefix else _validate.ragged_operands
    operands = jax.eval_shape(lambda *x: validate(*x, True, {"sliding_window": window, **(options or {})}), *arrays)
    caches = operands.key_cache, operands.value_cache, operands.block_tables
    problem = Problem.of_call(operands.query, *caches, operands.options, prefix=prefix)
    chosen = replace(choose.tune(problem, Device()), counts_in_kernel=False, **tuning)
    geometry = Geometry(problem, chosen)
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(query_lens)]), jnp.int32)
    lengths = Lengths(jnp.asarray(seq_lens, jnp.int32), starts)
    return geometry, count.count_before_kernel(starts, lengths.seq_lens, geometry), lengths


def test_the_cost_of_a_long_prompt_does_not_overflow():
    """With an overflow, all items would be split, and partial results written far past the end of their array."""
    geometry, counts, _ = planned((371_000,), (371_000,), 64, 1, 128, None, table_width=23_188)
    for kind in kinds_of(geometry):
        assert int(count.total(Counted.PARTIALS, kind, counts)) <= kind.num_partials


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_every_loading_warp_has_runs_of_every_tile(block_size, head_size):
    """A warp without runs waits for stages, but nobody waits for it. If it falls a ring behind, it waits forever."""
    geometry, *_ = planned((1, 40), (70, 40), 8, 2, head_size, None, block_size=block_size)
    for kind in kinds_of(geometry):
        assert kind.runs_per_tile >= LOADING_WARPS
        assert block_size % kind.run_tokens == kind.tile % kind.run_tokens == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("of_kind", [0, 1], ids=["wide", "thin"])
def test_there_is_room_for_all_partial_results(of_kind):
    """The fullest batch needs more than half of the room, so these batches come close to the bound."""
    rng, fullest = np.random.default_rng(3 * of_kind), 0.0
    for _ in range(20):
        num_seqs, programs = int(rng.choice((1, 4) if of_kind == 0 else (2, 9))), int(rng.choice((20, 40)))
        queries = rng.choice((64, 192) if of_kind == 0 else (1, 5, 16), num_seqs)
        lens = (30_000 * rng.uniform(rng.choice((0.01, 0.98)), 1, num_seqs)).astype(int)
        geometry, counts, _ = planned(
            tuple(queries), tuple(lens), 8, 2, 64, None, num_programs=programs, tile=64, thin_tile=64, least_split=1
        )
        kind = kinds_of(geometry)[of_kind]
        partials = int(count.total(Counted.PARTIALS, kind, counts))
        assert partials <= kind.num_partials
        fullest = max(fullest, partials / kind.num_partials)
    assert fullest > 0.5


def test_each_band_of_a_split_item_has_a_counter():
    geometry, *_ = planned((1, 40), (70, 4000), 8, 2, 64, None, table_width=250)
    places = [
        (kind, i, band) for kind in kinds_of(geometry) for i in range(kind.num_partials) for band in range(kind.bands)
    ]
    assert [kind.split_counter(i, band) for kind, i, band in places] == list(range(2, num_counters(geometry)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("padding", [0, 200])
@pytest.mark.parametrize("query_lens", [(1,) * 7, (1, 60, 0, 5, 100, 33, 1)], ids=["thin", "both"])
def test_the_longest_items_come_first(query_lens, padding):
    """The last items of a call are short. Sequences of equal length keep their order, as do those without queries."""
    lens, query_lens = (300, 900, 0, 4000, 900, 140, 20_000) + (0,) * padding, query_lens + (0,) * padding
    geometry, counts, lengths = planned(query_lens, lens, 8, 2, 64, None, table_width=1250, num_programs=4)
    most_cost = dict.fromkeys(range(len(lens) + 1), 0)
    for kind in kinds_of(geometry):
        for number in range(int(count.total(Counted.ITEMS, kind, counts))):
            item = plan.find(jnp.int32(number), counts, lengths, kind)
            most_cost[int(item.seq)] = max(most_cost[int(item.seq)], int(item.num_tiles) * kind.tile_cost)
    order = np.asarray(counts.order).tolist()
    assert sorted(order) == list(most_cost)
    assert order == sorted(most_cost, key=lambda seq: -most_cost[seq])
    assert len(set(most_cost.values())) > 3


@pytest.mark.parametrize("last", [127, 128, 149])
def test_late_sequences_are_sorted_with_the_first_ones(last):
    lens, query_lens = [0] * 150, [0] * 150
    for seq, seq_len in ((0, 100), (5, 900), (last, 3000)):
        lens[seq], query_lens[seq] = seq_len, 1
    _, counts, _ = planned(query_lens, lens, 8, 2, 64, None, table_width=250, num_programs=4)
    assert np.asarray(counts.order)[:3].tolist() == [last, 5, 0]


def test_sequences_keep_their_order_if_all_items_begin_at_once():
    _, counts, _ = planned((1, 1, 1), (100, 300, 200), 8, 2, 64, None, num_programs=6)
    assert np.asarray(counts.order).tolist() == [0, 1, 2, 3]
    _, counts, _ = planned((1, 1, 1), (100, 300, 200), 8, 2, 64, None, num_programs=5)
    assert np.asarray(counts.order).tolist() == [1, 2, 0, 3]


def test_wide_items_are_split_to_fill_their_last_wave():
    """The 184 items of 736 queries would fill a second wave of programs by less than half."""
    query_lens, lens = (736, 1, 1, 1, 1, 1), (44_000, 12_000, 20_000, 30_000, 12_000, 20_000)
    geometry, counts, _ = planned(query_lens, lens, 32, 8, 128, None, table_width=4096, num_programs=132)
    assert int(count.total(Counted.ITEMS, kinds_of(geometry)[0], counts)) == 2 * 8 * 23
    geometry, counts, _ = planned((4096,), (4096,), 32, 8, 128, None, table_width=4096, num_programs=132)
    assert int(count.total(Counted.ITEMS, kinds_of(geometry)[0], counts)) == 8 * 128


@pytest.mark.parametrize(("seq_len", "splits"), [(626, 1), (1500, 1), (4668, 2)])
def test_short_wide_items_stay_whole(seq_len, splits):
    """128 items fill some 90 programs by one and a half waves; halves would waste less of the last wave.

    But to store and merge a partial result takes as long as the products with some 390 tokens.
    """
    query_lens, lens = (498,) + (1,) * 14, (seq_len,) * 15
    geometry, counts, _ = planned(query_lens, lens, 32, 8, 128, None, table_width=1024, num_programs=132)
    assert int(count.total(Counted.ITEMS, kinds_of(geometry)[0], counts)) == 8 * 16 * splits


def test_wide_items_stay_whole_that_cost_a_share_and_more():
    """The 48 items of 192 queries take one wave of 68 programs. Their halves would take 1.4 waves."""
    query_lens = (1,) * 8 + (192, 1, 1, 1, 1)
    lens = (1403, 399, 665, 212, 834, 1388, 754, 383, 959, 279, 838, 1438, 1325)
    geometry, counts, _ = planned(query_lens, lens, 32, 8, 128, None, table_width=1024, num_programs=132)
    assert int(count.total(Counted.ITEMS, kinds_of(geometry)[0], counts)) == 8 * 6


def test_a_few_wide_items_of_two_shares_are_split():
    """Eight of 128 items would take twice as long as the others, and end last. Their mean does not show that."""
    geometry, counts, _ = planned((480, 32), (8000, 17500), 32, 8, 128, None, table_width=2048, num_programs=132)
    assert int(count.total(Counted.ITEMS, kinds_of(geometry)[0], counts)) > 128


@pytest.mark.parametrize("decodes", [5, 10])
def test_as_many_programs_begin_with_wide_items_as_save_a_wave(decodes):
    """By their part of the work, 126 and 121 programs would begin with 256 items; four and fourteen would be last."""
    query_lens, lens = (1031,) + (1,) * decodes, (44_000,) + (20_000,) * decodes
    geometry, counts, _ = planned(query_lens, lens, 32, 8, 128, None, table_width=4096, num_programs=132)
    assert int(count.total(Counted.ITEMS, kinds_of(geometry)[0], counts)) == 8 * 32
    assert int(counts.wide_programs[0]) == 128


@pytest.mark.parametrize(("seq_len", "wide_programs"), [(1024, 119), (4096, 128)])
def test_a_short_wave_is_not_saved(seq_len, wide_programs):
    """By their part of the work, 119 and 120 programs would begin with 256 items. Ten thin ones a head are left."""
    query_lens, lens = (1024,) + (1,) * 10, (seq_len,) + (seq_len * 6 // 10,) * 10
    _, counts, _ = planned(query_lens, lens, 32, 8, 128, None, table_width=1024, num_programs=132)
    assert int(counts.wide_programs[0]) == wide_programs


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
def test_wide_items_that_all_begin_at_once_stay_whole(cache_dtype):
    """By their part of the work, 111 programs would begin with 384 thirds. 128 whole items take one wave of 128."""
    query_lens, lens, shapes = (506,) + (1,) * 6, (32_000,) * 7, {"table_width": 4096, "cache_dtype": cache_dtype}
    geometry, counts, _ = planned(query_lens, lens, 32, 8, 128, None, num_programs=132, **shapes)
    assert int(count.total(Counted.ITEMS, kinds_of(geometry)[0], counts)) == 8 * 16


def test_some_program_begins_with_thin_items():
    """By their part of the work, 128 programs begin with 528 wide items, halves. All 132 would save a wave."""
    query_lens, lens = (1056,) + (1,) * 5, (44_000,) + (20_000,) * 5
    geometry, counts, _ = planned(query_lens, lens, 32, 8, 128, None, table_width=4096, num_programs=132)
    assert int(count.total(Counted.ITEMS, kinds_of(geometry)[0], counts)) == 2 * 8 * 33
    assert int(counts.wide_programs[0]) == 128


def test_sequences_are_sorted_if_wide_items_alone_begin_at_once():
    """By their part of the work, eight programs would begin with eight thin items. 128 wide ones leave them four."""
    _, counts, _ = planned((512, 1), (1000, 2100), 32, 8, 128, None, table_width=1024, num_programs=132)
    assert int(counts.wide_programs[0]) == 128
    assert np.asarray(counts.order).tolist()[:2] == [1, 0]


@pytest.mark.parametrize(("decodes", "wide_programs"), [(4, 128), (30, 68)])
def test_wide_items_begin_at_once_beside_little_else(decodes, wide_programs):
    """By their part of the work, 117 programs would begin with the 128 items of 500 queries, and eleven items be last.

    Beside 30 decodes, the thin items would take longer at the end than that wave.
    """
    query_lens, lens = (500,) + (1,) * decodes, (12_000,) * (decodes + 1)
    geometry, counts, _ = planned(query_lens, lens, 32, 8, 128, None, table_width=1024, num_programs=132)
    assert int(count.total(Counted.ITEMS, kinds_of(geometry)[0], counts)) == 8 * 16
    assert int(counts.wide_programs[0]) == wide_programs


@pytest.mark.parametrize(
    ("queries", "seq_len", "cache_dtype", "wide_programs"),
    [
        (2048, 4096, "bfloat16", 74),
        (2048, 4096, "float8_e4m3fn", 88),
        (608, 13800, "bfloat16", 88),
        (4096, 8192, "bfloat16", 117),
    ],
)
def test_many_wide_items_leave_half_of_the_programs_to_thin_ones(queries, seq_len, cache_dtype, wide_programs):
    """By their part of the work, 88 programs would begin with wide items, and do so with the 152 of 608 queries."""
    query_lens, lens = (1,) * 63 + (queries,), (4096,) * 63 + (seq_len,)
    shapes = {"table_width": 128, "block_size": 128, "num_programs": 132, "cache_dtype": cache_dtype}
    _, counts, _ = planned(query_lens, lens, 32, 8, 128, None, **shapes)
    assert int(counts.wide_programs[0]) == wide_programs


def test_wide_items_keep_four_fifths_of_their_programs():
    """Half of the programs would be fewer than 0.8 of 82. In whole waves they would be 65, and the batch 1% slower."""
    query_lens, lens = (1,) * 109 + (1939,), (1756,) * 109 + (1939,)
    _, counts, _ = planned(query_lens, lens, 40, 8, 128, None, table_width=128, block_size=128, num_programs=132)
    assert int(counts.wide_programs[0]) > 70


@pytest.mark.parametrize(("query_lens", "thin_tiles"), [((1,) * 4, 32), ((1,) * 4 + (2048,), 26), ((8192, 1), 128)])
def test_long_thin_items_beside_wide_ones_are_split(query_lens, thin_tiles):
    """One that begins when no wide item is left ends last. It does not matter in a call that is long beside it."""
    lens = tuple(8192 if queries == 1 else queries for queries in query_lens)
    geometry, counts, lengths = planned(query_lens, lens, 32, 8, 128, None, table_width=512, num_programs=132)
    thin = kinds_of(geometry)[1]
    numbers = jnp.arange(int(count.total(Counted.ITEMS, thin, counts)), dtype=jnp.int32)
    of = functools.partial(plan.find, counts=counts, lengths_gmem=lengths, kind=thin)
    assert int(jax.jit(jax.vmap(of))(numbers).num_tiles.max()) == thin_tiles


@pytest.mark.parametrize("tiles", [6, 12, 20, 216])
def test_few_heads_are_read_at_a_time(tiles):
    """One or two waves of items alternate between heads, or all do if fewer heads are left; last query tiles first."""
    num_tokens = 8 * tiles
    geometry, counts, lengths = planned((num_tokens,), (num_tokens,), 5 * 16, 5, 64, None, num_programs=12)
    kind = kinds_of(geometry)[0]
    tiles = num_tokens // kind.tokens
    found = jax.jit(jax.vmap(lambda i: plan.find(i, counts, lengths, kind)))(jnp.arange(5 * tiles, dtype=jnp.int32))
    heads = min(5, max(1, (2 if 5 * tiles <= 8 * 12 else 1) * 12 // tiles))
    heads = 5 if heads > 5 - heads else heads
    expected = []
    for first in range(0, 5, heads):
        group = range(first, min(first + heads, 5))
        expected += [(tile * kind.tokens, head) for tile in reversed(range(tiles)) for head in group]
    assert np.stack([found.first_token, found.kv_head], 1).tolist() == [list(x) for x in expected]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("num_seqs", "seq_len", "splits"),
    [(64, 4096, 1), (8, 8192, 2), (6, 5000, 4), (10, 5000, 3), (1, 32768, 16), (11, 16000, 3), (11, 6483, 1)],
)
def test_splits_leave_no_turn_nearly_empty(num_seqs, seq_len, splits):
    """Even shares of 6 x 5000 tokens for 132 programs would be 144 splits: 12 of them would start when others end.

    11 x 16000 fill two waves with splits of about half a share. 11 x 6483 are too short for that.
    """
    lens = (seq_len,) * num_seqs
    geometry, counts, _ = planned((1,) * num_seqs, lens, 32, 8, 128, None, table_width=2048, num_programs=132)
    num_items = int(count.total(Counted.ITEMS, kinds_of(geometry)[1], counts))
    assert num_items == 8 * num_seqs * splits


def test_the_last_split_may_have_no_tile():
    """Ten splits of 9 tiles cover all 89 tiles, so an eleventh would be empty."""
    shape, tuning = (32, 8, 128, None), {"num_programs": 132, "thin_tile": 128, "least_thin_split": 16}
    geometry, counts, lengths = planned((1,), (89 * 128,), *shape, table_width=2048, **tuning)
    kind = kinds_of(geometry)[1]
    items = [jax.tree.map(int, plan.find(jnp.int32(i), counts, lengths, kind)) for i in range(11)]
    assert {item.kv_head for item in items} == {0}
    assert [item.num_tiles for item in items] == [9] * 9 + [8, 0]
    assert [item.cached_tiles for item in items] == [9] * 9 + [8, 0]


@pytest.mark.parametrize("shape", [(8, 2, 64, None), (5, 1, 128, 100), (16, 1, 64, None)], ids=str)
def test_items_cover_each_row_and_token_once(shape):
    """Each query token of each kv head is in one item or in its splits, which see each token of the context once."""
    query_lens, seq_lens = (1, 0, 70, 5, 33, 1), (900, 0, 70, 400, 1000, 1)
    geometry, counts, lengths = planned(
        query_lens, seq_lens, *shape, num_programs=32, tile=64, thin_tile=64, least_split=2
    )
    seen, partials, splits, counters = {}, ([], []), {}, {}
    for kind, found in zip(kinds_of(geometry), partials, strict=True):
        num_items = int(count.total(Counted.ITEMS, kind, counts))
        for number in range(num_items):
            item = jax.tree.map(int, plan.find(jnp.int32(number), counts, lengths, kind))
            assert item.kind == kind.code
            assert 0 < item.num_tokens <= kind.tokens
            span = item.origin, max(item.origin, min(item.origin + item.num_tiles * kind.tile, item.end))
            for token in range(item.first_token, item.first_token + item.num_tokens):
                seen.setdefault((token, item.kv_head), []).append(span)
            assert (item.partial < 0) == (item.splits == 1)
            if item.partial >= 0:
                found.append(item.partial)
                whole = item.kind, item.first_partial, item.splits, item.first_token, item.num_tokens, item.kv_head
                splits.setdefault(whole, []).append(item.partial - item.first_partial)
                for band in range(kind.bands):
                    counters.setdefault(kind.split_counter(item.first_partial, band), set()).add((*whole, band))
        assert not plan.exists(jnp.int32(num_items), counts, kind)
        assert sorted(found) == list(range(len(found)))
        assert len(found) <= kind.num_partials
    assert any(partials)
    assert all(found == list(range(number)) for (_, _, number, *_), found in splits.items()), "whose results are merged"
    assert all(len(bands) == 1 for bands in counters.values()), "each band of an item has a counter of its own"
    positions = np.concatenate([np.arange(n - q, n) for q, n in zip(query_lens, seq_lens, strict=True)])
    for token in range(len(positions)):
        for head in range(shape[1]):
            spans = sorted(span for span in seen.pop((token, head)) if span[0] < span[1])
            assert all(one[1] == following[0] for one, following in itertools.pairwise(spans))
            assert spans[0][0] <= max(0, positions[token] + 1 - (shape[3] or 1000))
            assert spans[-1][1] > positions[token]
    assert not seen


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window", [None, 150])
def test_tiles_cover_cached_and_new_tokens_once(window):
    """Splits begin anywhere among both. Tiles of new tokens come from their own arrays, not from the cache."""
    query_lens, seq_lens = (300, 9), (420, 500)
    geometry, counts, lengths = planned(
        query_lens, seq_lens, 8, 2, 64, window, prefix=True, num_programs=32, tile=64, thin_tile=64, least_split=2
    )
    tokens_of, new_splits = {}, set()
    for kind in kinds_of(geometry):
        for item, spans in items_and_spans(counts, lengths, kind, most_tiles=9):
            tokens = tokens_of.setdefault((item.seq, item.kv_head, item.first_token, item.num_tokens), [])
            new_splits |= {start for start, *_, is_new in spans[:1] if is_new}
            for start, begin, end, is_new in spans:
                assert item.context_len <= start if is_new else end <= item.context_len
                tokens.extend(range(max(start, begin), min(start + kind.tile, end)))
    assert len(new_splits) > 1, "splits begin at several new tokens"
    for (seq, _, first, count_of), tokens in tokens_of.items():
        if first >= sum(query_lens):  # padding
            assert not tokens
            continue
        position = seq_lens[seq] - query_lens[seq] + first - (query_lens[0] if seq else 0)
        begin = max(0, position + 1 - (window or 1000))
        assert tokens == list(range(begin, position + count_of)), (seq, first)


def items_and_spans(counts, lengths, kind, most_tiles):
    """The items of a kind in order, each with the first token, the bounds and `is_new` of its tiles."""

    def one(number):
        item = plan.find(number, counts, lengths, kind)
        spans = [plan.span_of(item, jnp.int32(tile), kind) for tile in range(most_tiles)]
        return item, [(span.starts[0], span.begin, span.end, span.is_new) for span in spans]

    numbers = jnp.arange(int(count.total(Counted.ITEMS, kind, counts)), dtype=jnp.int32)
    items, spans = jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(numbers))
    for i in range(len(numbers)):
        item, of_item = jax.tree.map(lambda x, i=i: x[i].item(), (items, spans))
        assert item.num_tiles <= most_tiles
        yield item, of_item[: item.num_tiles]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (5, 1)])
def test_each_query_is_in_items_of_one_kind(num_heads, num_kv_heads):
    """Queries that fill one band of a wide item are in a thin one, whose rows the merge counts by the same rule."""
    geometry, *_ = planned((1, 40), (70, 40), num_heads, num_kv_heads, 64, None)
    lens = jnp.arange(1, 6 * geometry.band_tokens + 1)
    sequence, queries = sequences.Sequence(lens, lens, lens), 0
    for kind in kinds_of(geometry):
        tiles, of_kind = (np.asarray(f(sequence, kind)) for f in (sequences.query_tiles, sequences.num_queries))
        first = np.where(of_kind > 0, np.asarray(sequences.first_query(sequence, kind)), queries)
        np.testing.assert_array_equal(first, queries)
        np.testing.assert_array_equal(tiles, -(-of_kind // kind.tokens))
        queries = queries + of_kind
    np.testing.assert_array_equal(queries, lens)


def test_nothing_has_no_negative_number_of_tiles():
    """A span may end before it begins: far before its window, or after the last split."""
    spans = jnp.asarray([-1000, -64, -63, -1, 0, 1, 64, 65])
    assert cdiv(spans, 64).tolist() == [0, 0, 0, 0, 0, 1, 1, 2]
    assert [int(cdiv(span, 64)) for span in spans] == [0, 0, 0, 0, 0, 1, 1, 2]
