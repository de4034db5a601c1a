"""Tests block-sparse patterns in the ragged Mosaic GPU kernels without a GPU, like `test_mosaic_gpu_ragged.py`.

Here cached blocks to which no query of a kv head attends are NaN.
"""

import itertools
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from paged_jax import BlockSparse, _dispatch, _validate
from paged_jax.kernels import mosaic_gpu, xla
from paged_jax.kernels.mosaic_gpu.ragged import call as ragged
from paged_jax.kernels.mosaic_gpu.ragged import count as ragged_count
from paged_jax.kernels.mosaic_gpu.ragged import pattern as ragged_pattern
from paged_jax.kernels.mosaic_gpu.ragged import plan, softmax
from paged_jax.kernels.mosaic_gpu.ragged.kinds import kinds_of
from paged_jax.kernels.mosaic_gpu.ragged.load_tiles import TileLoader
from paged_jax.kernels.mosaic_gpu.ragged.refs import Counted
from paged_jax.kernels.problem import Unsupported
from tests import inputs, oracle, plain
from tests.cases import Sparse
from tests.interpreted_ptx import lanes as interpreted_lanes
from tests.ragged_interpreter import call
from tests.test_decode import op_options
from tests.test_mosaic_gpu_ragged import (
    TINY_TILES,
    check,
    check_on_a_gpu,
    check_prefix,
    operands_of,
    prefix_operands_of,
    small,
    some,
)
from tests.test_mosaic_gpu_ragged_plan import planned as planned_batch

# NumPy gives this warning when arithmetic meets the poison, which is NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def attended(position, num_heads, num_kv_heads, kv_head, options):
    """Which tokens some head of a group attends to, for a query at `position`."""
    tokens, group = np.arange(position + 1), num_heads // num_kv_heads
    heads = range(kv_head * group, (kv_head + 1) * group)
    pattern = options["block_sparse"]
    masks = [oracle.sparse_mask(tokens, position + 1, head, num_heads, num_kv_heads, pattern) for head in heads]
    window = options.get("sliding_window") or 2**30
    return np.any(masks, axis=0) & (tokens > position - window)


PATTERNS = [
    Sparse(1, 3, 16),
    Sparse(2, 8, 64, 1),
    Sparse(0, 4, 32),
    Sparse(0, 5, 16, 2),
    Sparse(3, 7, 48, 3, 1),
    Sparse(1, 6, 16, 5, 2),
    Sparse(1, 2, 256, 1),
    Sparse(4, 5, 32, -2, 3),
    Sparse(100, 2, 64),
    Sparse(2, 2**30, 64),
    Sparse(2**31 - 1, 3, 64),
]


# The cases take different heads, windows, bounds and ops in turn.
SHAPES = (8, 2, None, 1024), (5, 1, 150, 700)
BATCHES = [(pattern, *SHAPES[i % 2], i // 2 % 2 == 1) for i, pattern in enumerate(PATTERNS)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("pattern", "num_heads", "num_kv_heads", "window", "most", "prefix"), BATCHES)
def test_items_have_the_tokens_that_some_row_attends_to(pattern, num_heads, num_kv_heads, window, most, prefix):
    """The tiles of an item, or of its splits, hold each visible token once, and read only blocks with such tokens."""
    query_lens, seq_lens = (1, 0, 70, 5, 33), (900, 0, 70, 400, 1000)
    geometry, counts, lengths = planned(query_lens, seq_lens, num_heads, num_kv_heads, pattern, window, most, prefix)
    options = {"block_sparse": pattern, "sliding_window": window}
    first_token, split = np.cumsum([0, *query_lens]), False
    for kind in kinds_of(geometry):
        items = {}
        for number in range(int(ragged_count.total(Counted.ITEMS, kind, counts))):
            item = jax.tree.map(int, plan.find(jnp.int32(number), counts, lengths, kind))
            items.setdefault((item.seq, item.kv_head, item.first_token), []).append(item)
        for (seq, kv_head, first), splits in items.items():
            if first >= first_token[-1]:  # padding
                assert not any(item.num_tiles for item in splits)
                continue
            position = seq_lens[seq] - query_lens[seq] + first - first_token[seq]
            wanted = set()
            for at in range(position, position + splits[0].num_tokens):
                wanted |= set(np.flatnonzero(attended(at, num_heads, num_kv_heads, kv_head, options)[:most]))
            split |= len(splits) > 1
            found, read = tokens_of(splits, kind)
            assert sorted(x for x in found if x in wanted) == sorted(wanted)
            assert {x // 16 for x in found} <= {x // 16 for x in wanted}
            assert {x // 16 for x in read} <= {x // 16 for x in wanted}
    assert split


@pytest.mark.parametrize(("pattern", "heads"), [(Sparse(2, 5, 32), 1), (Sparse(2, 5, 32, 1), 4), (Sparse(0, 3, 16), 1)])
def test_tiles_without_a_mask_need_none(pattern, heads):
    """The pattern hides no token of these tiles from any row. If heads share a pattern, some such tiles are stripes."""
    geometry, counts, lengths = planned((40,), (1000,), 4, 1, pattern, None, 1024, prefix=False)
    kind, far = kinds_of(geometry)[0], 0
    for number in range(int(ragged_count.total(Counted.ITEMS, kind, counts))):
        item = plan.find(jnp.int32(number), counts, lengths, kind)
        first, last = int(item.position), int(item.position) + int(item.num_tokens) - 1
        for tile in range(int(item.num_tiles)):
            span = plan.span_of(item, jnp.int32(tile), kind)
            args = span.pattern, span.rank, span.starts[0], jnp.int32(last), kind
            tokens = np.repeat([int(x) for x in span.starts], kind.segment_tokens) + np.arange(kind.tile)
            if ragged_pattern.hides_nothing(*args) and tokens[-1] < 1000:
                far += tokens[-1] < (first // pattern.block_size - pattern.local_blocks) * pattern.block_size
                for at, head in itertools.product((first, last), range(4)):
                    assert oracle.sparse_mask(tokens, at + 1, head, 4, 1, pattern).all()
    assert (far > 0) == (heads == 1)


@pytest.mark.parametrize("window", [None, 6, 40])
def test_masks_show_each_row_its_tokens_once(window):
    """The first tile of new tokens begins with cached ones, which some windows reach and others do not."""
    seq_len, query_len, heads, pattern = 110, 9, 2, Sparse(1, 2, 32)
    geometry, counts, lengths = planned((query_len,), (seq_len,), heads, 1, pattern, window, 1024, prefix=True)
    shown, row = np.zeros((query_len, heads, seq_len), int), jnp.arange(64)
    token, head = row // heads, row % heads
    with mock.patch.object(softmax, "lanes", interpreted_lanes):
        for kind in kinds_of(geometry):
            for number in range(int(ragged_count.total(Counted.ITEMS, kind, counts))):
                item = plan.find(jnp.int32(number), counts, lengths, kind)
                stripes = ragged_pattern.stripes_of_rows(head, item.kv_head, geometry)
                rows = SimpleNamespace(position=item.position + token, stripes=stripes)
                for tile in range(int(item.num_tiles)):
                    span = plan.span_of(item, jnp.int32(tile), kind)
                    tokens = np.repeat(np.array(span.starts), kind.segment_tokens) + np.arange(kind.tile)
                    masked = softmax._masked(jnp.zeros((64, kind.tile)), span, rows, kind)
                    for i, column in np.argwhere(np.isfinite(masked[: item.num_tokens * heads])):
                        shown[int(item.position) - (seq_len - query_len) + i // heads, i % heads, tokens[column]] += 1
    for i, head in np.ndindex(query_len, heads):
        position = seq_len - query_len + i
        wanted = np.zeros(seq_len, int)
        wanted[: position + 1] = oracle.sparse_mask(np.arange(position + 1), position + 1, head, heads, 1, pattern)
        wanted[: max(0, position + 1 - (window or seq_len))] = 0
        np.testing.assert_array_equal(shown[i, head], wanted)


def tokens_of(splits, kind):
    """The tokens in an item's tiles that some row may see, and the first tokens of the cached runs that it reads."""
    found, read = [], []
    for item in splits:
        item = jax.tree.map(jnp.int32, item)
        for tile in range(int(item.num_tiles)):
            span = plan.span_of(item, jnp.int32(tile), kind)
            rows = np.arange(kind.tile)
            tokens = np.repeat([int(x) for x in span.starts], kind.segment_tokens) + rows
            found += list(tokens[(tokens >= int(span.begin)) & (tokens < int(span.end))])
            if not span.is_new:
                loader = TileLoader(item, jnp.int32(0), kind, refs=None)
                last = loader.last_run(span.end)
                read += [int(loader.not_before_window(jnp.minimum(x, last))) for x in tokens[:: kind.run_tokens]]
    return found, read


def planned(query_lens, seq_lens, num_heads, num_kv_heads, pattern, window, most, prefix):
    """Returns a batch's geometry, its counts, as XLA counts them before the kernel, and its lengths."""
    options = {"block_sparse": BlockSparse(**pattern._asdict()), "max_seq_len": most}
    shape, tuning = (num_heads, num_kv_heads, 64, window), {"num_programs": 16, "least_split": 2}
    return planned_batch(query_lens, seq_lens, *shape, prefix=prefix, options=options, **tuning)


def poison_unattended(case, made, arrays):
    """The arrays, with NaN or the largest code in the cached blocks to which no query of a kv head attends."""
    poisoned = {name: arrays[name].copy() for name in ("key_cache", "value_cache")}
    rng, count = inputs.rng_of(case.name), 0
    for row, (seq_len, query_len) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        for kv_head in range(case.num_kv_heads):
            seen = np.zeros(seq_len, bool)
            for at in range(seq_len - query_len, seq_len):
                seen[: at + 1] |= attended(at, case.num_heads, case.num_kv_heads, kv_head, made.static)
            seen[case.max_seq_len or seq_len :] = False
            for first in range(0, seq_len, case.block_size):
                if seen[first : first + case.block_size].any():
                    continue
                block = arrays["block_tables"][row, first // case.block_size]
                if not 0 <= block < len(poisoned["key_cache"]):
                    continue  # the block lies before the windows of all queries, and its id is wild
                count += 1
                for cache in poisoned.values():
                    at = (block, slice(None), kv_head) if case.layout == "nhd" else (block, kv_head)
                    cache[at] = inputs.poison(rng, cache[at].shape, cache.dtype)
    assert count, "some block is poison"
    return arrays | poisoned


# Stripes of one head and of several heads, tiles of one segment and of many, whole items and split ones.
INTERPRETED = [
    small("plain", 4, 2, 64, 16, "bfloat16", block_sparse=Sparse(1, 3, 16)),
    small("heads", 4, 1, 64, 16, "bfloat16", seq_lens=(330, 3, 200), query_lens=(1, 3, 40),
          block_sparse=Sparse(1, 8, 32, 1)),
    small("kv-heads", 4, 2, 64, 16, "float16", layout="nhd", block_sparse=Sparse(2, 5, 16, -1, 1), sinks=True),
    small("whole-tiles", 2, 1, 64, 16, "bfloat16", seq_lens=(900,), query_lens=(20,), block_sparse=Sparse(2, 4, 64)),
    small("stripes-only", 4, 2, 64, 16, "bfloat16", seq_lens=(37, 0, 330), query_lens=(1, 0, 170), alibi=True,
          block_sparse=Sparse(0, 3, 32, 1, 2)),
    small("window", 4, 1, 64, 16, "bfloat16", seq_lens=(37, 0, 330), query_lens=(1, 0, 20), sliding_window=200,
          block_sparse=Sparse(1, 7, 48, 2)),
    small("large", 2, 1, 64, 256, "bfloat16", "float8_e5m2", seq_lens=(1300,), query_lens=(9,),
          block_sparse=Sparse(1, 2, 256)),
    small("slots", 4, 2, 64, 16, "bfloat16", "int8", k_scale="slot", v_scale="slot", block_sparse=Sparse(1, 4, 32, 1)),
    small("e4m3", 4, 2, 64, 8, "float16", "float8_e4m3fn", "nhd", logits_soft_cap=3.0, block_sparse=Sparse(2, 7, 8, 3)),
]  # fmt: skip
ON_GPUS = "kv-heads", "heads", "plain", "whole-tiles", "window", "large", "slots", "e4m3"


@pytest.mark.slow
@pytest.mark.parametrize("case", some(INTERPRETED, (), ON_GPUS))
def test_in_the_interpreter(case):
    made = inputs.make(case)
    poisoned = inputs.make(case)
    poisoned.ragged = poison_unattended(case, made, made.ragged)
    check(case, made, call("ragged_paged_attention", operands_of(case, poisoned), **TINY_TILES))
    assert not interpret_pallas_call.get_races().races_found


PREFIXES = [
    small("heads", 4, 2, 64, 16, "bfloat16", seq_lens=(37, 0, 230), query_lens=(5, 0, 90),
          block_sparse=Sparse(1, 6, 32, 1)),
    small("window", 2, 1, 64, 8, "float16", layout="nhd", seq_lens=(300, 40), query_lens=(30, 40), sliding_window=190,
          block_sparse=Sparse(2, 5, 24), k_scale="scalar"),
    small("stripes-only", 4, 2, 64, 16, "bfloat16", "int8", block_sparse=Sparse(0, 3, 16, 1, 1), sinks=True),
    small("thin", 2, 1, 64, 16, "bfloat16", seq_lens=(110,), query_lens=(9,), padding=0, block_sparse=Sparse(1, 6, 32),
          k_scale="head"),
]  # fmt: skip


@pytest.mark.parametrize("case", some(PREFIXES, (), ("heads", "window", "stripes-only")))
def test_new_tokens_in_the_interpreter(case):
    made = inputs.make(case)
    poisoned = inputs.make(case)
    poisoned.prefix = poison_unattended(case, made, made.prefix)
    check_prefix(made, call("prefix_attention", prefix_operands_of(case, poisoned), **TINY_TILES))
    assert not interpret_pallas_call.get_races().races_found


DECODE = small("decode", 4, 1, 64, 16, "bfloat16", seq_lens=(330, 0, 37), query_lens=(1, 0, 1), sinks=True,
               block_sparse=Sparse(1, 5, 32, 1))  # fmt: skip


def decode_operands_of(case, made):
    options = made.arrays | op_options(made.static) | {"max_seq_len": case.max_seq_len}
    return _validate.decode_operands(*made.decode.values(), options)


def check_decode(made, results):
    options = made.arrays | made.static
    exact, rough = (module.decode(**made.decode, **options) for module in (oracle, plain))
    for actual, wanted, yardstick in zip(results, exact, rough, strict=True):
        plain.assert_close(actual, wanted, yardstick, "decode")


def test_decode_is_ragged_attention():
    """With a pattern, decode is a ragged batch with one query for each sequence."""
    made, poisoned = inputs.make(DECODE), inputs.make(DECODE)
    poisoned.decode = poison_unattended(DECODE, made, made.decode)
    with mock.patch.object(ragged, "ragged_paged_attention", xla.ragged_paged_attention):
        check_decode(made, jax.jit(mosaic_gpu.paged_attention)(*decode_operands_of(DECODE, poisoned)))


LOWERED = [
    *INTERPRETED[1:6],
    small("hnd-128", 32, 8, 128, 16, "bfloat16", seq_lens=(1700,), query_lens=(9,), alibi=True,
          block_sparse=Sparse(16, 8, 64, 1)),
    small("hnd-256", 16, 8, 256, 16, "bfloat16", seq_lens=(1700,), query_lens=(9,), block_sparse=Sparse(16, 8, 64)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("queries", "num_kv_heads", "sliding_step", "first"),
    [
        (700, 2, 0, "mosaic_gpu"),
        (1, 2, 0, "triton"),
        (1, 2, -1, "triton"),
        (1, 2, 1, "mosaic_gpu"),
        (1, 2, 6, "triton"),
        (1, 8, 1, "triton"),
    ],
)
def test_leads_but_for_few_queries_whose_group_has_one_pattern(queries, num_kv_heads, sliding_step, first):
    sparse = Sparse(1, 3, head_sliding_step=sliding_step)
    lens = {"seq_lens": (900, 700), "query_lens": (queries,) * 2}
    case = small("leads", 8, num_kv_heads, 64, 16, "bfloat16", **lens, padding=0, block_sparse=sparse)
    made = inputs.make(case)
    with mock.patch.object(jax, "local_devices"):
        assert _dispatch._on_cuda("ragged_paged_attention", operands_of(case, made))[0] == first
        assert _dispatch._on_cuda("prefix_attention", prefix_operands_of(case, made))[0] == first
        if queries == 1:
            assert _dispatch._on_cuda("paged_attention", decode_operands_of(case, made))[0] == first


def test_strides_beyond_32_bits_are_refused():
    sparse = Sparse(1, 1_000_000_007, 64, head_sliding_step=999_999_999)
    case = small("far", 8, 1, 64, 16, "bfloat16", seq_lens=(900,), query_lens=(1,), padding=0, block_sparse=sparse)
    with pytest.raises(Unsupported, match="lacks a vert_stride of 1000000007 for 8 heads, beyond 32 bits"):
        ragged.ragged_paged_attention(*operands_of(case, inputs.make(case)))


# Contexts so long that items are split, and batches of many items of both kinds.
ON_A_GPU = [
    *LOWERED,
    small("decodes", 32, 8, 128, 16, "bfloat16", seq_lens=(*range(1, 6000, 500),), query_lens=(1,) * 12,
          block_sparse=Sparse(16, 8, 64)),
    small("one-head", 8, 2, 64, 16, "float16", seq_lens=(3000, 700, 9, 900), query_lens=(1, 700, 9, 300), sinks=True,
          block_sparse=Sparse(2, 8, 64, -1)),
    small("each-head", 32, 8, 128, 16, "bfloat16", seq_lens=(5000, 3000), query_lens=(150, 2),
          block_sparse=Sparse(4, 8, 64, 1)),
    small("small-blocks", 8, 2, 128, 8, "bfloat16", seq_lens=(2000, 900), query_lens=(100, 3), alibi=True,
          sliding_window=1500, block_sparse=Sparse(3, 9, 8, 2)),
    small("large-blocks", 4, 1, 64, 256, "bfloat16", seq_lens=(6000, 900), query_lens=(40, 1),
          block_sparse=Sparse(1, 4, 256)),
    small("three-blocks", 8, 2, 128, 32, "bfloat16", "float8_e4m3fn", seq_lens=(4000, 50), query_lens=(200, 50),
          k_scale="head", v_scale="head", block_sparse=Sparse(2, 5, 96, 1)),
    small("scales", 4, 2, 128, 16, "bfloat16", "int8", seq_lens=(3000, 50), query_lens=(5, 50), k_scale="slot",
          v_scale="slot", block_sparse=Sparse(2, 8, 64, 1)),
]  # fmt: skip


NEW_TOKENS_ON_A_GPU = [*PREFIXES, *ON_A_GPU[len(LOWERED) : -1]]


@pytest.mark.parametrize(
    ("op", "case"),
    [("ragged", case) for case in ON_A_GPU if case.sliding_window]
    + [("prefix", case) for case in NEW_TOKENS_ON_A_GPU if case.sliding_window],
    ids=str,
)
def test_blocks_that_only_gpu_tests_poison(op, case):
    """Blocks before all windows have wild ids, and poison goes to blocks of the pool alone."""
    made = inputs.make(case)
    assert poison_unattended(case, made, getattr(made, op)).keys() == getattr(made, op).keys()


@pytest.mark.gpu
@pytest.mark.parametrize("tuning", [{}, TINY_TILES | {"num_programs": 4}], ids=["here", "small"])
@pytest.mark.parametrize("case", ON_A_GPU, ids=str)
def test_on_a_gpu(case, tuning, monkeypatch):
    """Results are right with the tunings of this GPU and of a smaller one that splits more, and equal in every run."""
    made, poisoned = inputs.make(case), inputs.make(case)
    poisoned.ragged = poison_unattended(case, made, made.ragged)
    check_on_a_gpu(case, made, operands_of(case, poisoned), tuning, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("case", NEW_TOKENS_ON_A_GPU, ids=str)
def test_new_tokens_on_a_gpu(case):
    made = inputs.make(case)
    poisoned = inputs.make(case)
    poisoned.prefix = poison_unattended(case, made, made.prefix)
    operands = jax.device_put(prefix_operands_of(case, poisoned), jax.devices("gpu")[0])
    check_prefix(made, jax.tree.map(np.asarray, jax.jit(ragged.prefix_attention)(*operands)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [DECODE, ON_A_GPU[len(LOWERED)]], ids=str)
def test_decode_on_a_gpu(case):
    made, poisoned = inputs.make(case), inputs.make(case)
    poisoned.decode = poison_unattended(case, made, made.decode)
    operands = jax.device_put(decode_operands_of(case, poisoned), jax.devices("gpu")[0])
    check_decode(made, jax.tree.map(np.asarray, jax.jit(mosaic_gpu.paged_attention)(*operands)))
