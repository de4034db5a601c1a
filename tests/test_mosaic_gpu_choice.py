"""Tests which tuning the decode kernel gets, and which calls Mosaic GPU refuses or is the first choice for."""

from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax
from paged_jax import _dispatch, _validate
from paged_jax.kernels.mosaic_gpu.decode import call as decode_call
from paged_jax.kernels.mosaic_gpu.decode import choose
from paged_jax.kernels.mosaic_gpu.decode.geometry import Geometry
from paged_jax.kernels.mosaic_gpu.decode.refs import shared_memory_bytes
from paged_jax.kernels.problem import Device, Problem, Unsupported
from tests import inputs, test_decode, test_write_and_attend
from tests.cases import Sparse
from tests.mosaic_interpreter import call
from tests.test_mosaic_gpu import BY_NAME, small

REFUSED = [
    (small("dtype", 4, 2, 64, 16, "float32"), "lacks queries of float32, takes float16 and bfloat16"),
    (small("cache", 4, 2, 64, 16, "bfloat16", "float16"), "lacks caches of float16 for queries of bfloat16"),
    (small("narrow", 4, 2, 96, 16, "bfloat16", "int8"), "lacks head_size 96 for caches of int8, takes multiples of 64"),
    (small("head", 4, 2, 32, 16, "bfloat16"), "lacks head_size 32, takes multiples of 16 from 64 to 256"),
    (small("odd-head", 4, 2, 120, 16, "bfloat16"), "lacks head_size 120"),
    (small("block", 4, 2, 64, 4, "bfloat16"), "lacks block_size 4, takes 8 and more"),
    (small("group", 130, 2, 64, 16, "bfloat16"), "lacks groups of 65 query heads, takes up to 64"),
    (small("sparse", 4, 2, 64, 16, "float16", layout="vllm", block_sparse=Sparse(1, 3)), "layout 'vllm' in ragged att"),
    (small("many", 4, 2, 24, 1, "float16", layout="vllm"), "lacks block_size 1.*; lacks head_size 24.*; lacks head_"),
    (small("vllm", 4, 2, 80, 128, "float16", layout="vllm"), "lacks head_size 80 in .*; lacks block_size 128 in .* 64"),
    (
        small("vllm-narrow", 4, 2, 96, 8, "float16", "int8", layout="vllm"),
        "lacks head_size 96 .*; lacks block_size 8 in layout 'vllm' for caches of int8, takes 16 and more",
    ),
]


@pytest.mark.parametrize(("case", "words"), REFUSED, ids=str)
def test_refusals_name_every_reason(case, words):
    made = inputs.make(case)
    options = made.arrays | test_decode.op_options(made.static)
    with pytest.raises(Unsupported, match=rf"^implementation 'mosaic_gpu' .*{words}"):
        paged_jax.paged_attention(*made.decode.values(), **options, implementation="mosaic_gpu")


@pytest.mark.parametrize("op", [paged_jax.paged_attention_v1, paged_jax.paged_attention_v2])
def test_only_one_op_of_decode_has_patterns(op):
    made = inputs.make(small("sparse", 4, 2, 64, 16, "bfloat16", block_sparse=Sparse(1, 3)))
    with pytest.raises(Unsupported, match="lacks block_sparse"):
        op(*made.decode.values(), **test_decode.op_options(made.static), implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("group", "first", "first_to_write"),
    [
        (8, "mosaic_gpu", "mosaic_gpu"),
        (9, "mosaic_gpu", "triton"),
        (16, "mosaic_gpu", "mosaic_gpu"),
        (24, "mosaic_gpu", "triton"),
        (25, "triton", "triton"),
    ],
)
def test_leads_by_group(group, first, first_to_write):
    query, cache = (np.zeros(shape, jnp.bfloat16) for shape in ((1, 6 * group, 128), (1, 6, 16, 128)))
    rest = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    new, slots, starts = cache[:, :, 0], np.zeros(1, np.int32), np.zeros(2, np.int32)
    decode = _validate.decode_operands(query, cache, cache, *rest, {})
    writing = _validate.write_and_attend_operands(query, new, new, cache, cache, *rest, slots, {})
    ragged = _validate.ragged_operands(query, cache, cache, *rest, starts, True, {})
    with mock.patch.object(jax, "local_devices"):
        for op, operands in (
            ("paged_attention", decode),
            ("paged_attention_v1", decode),
            ("paged_attention_v2", decode),
            ("ragged_paged_attention", ragged),  # one query, so it is decode
        ):
            assert _dispatch._on_cuda(op, operands)[0] == first
        assert _dispatch._on_cuda("write_and_attend", writing)[0] == first_to_write
    if jax.devices()[0].platform != "gpu":
        assert _dispatch._on_cuda("paged_attention", decode) == ["triton"]


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "group", "head_size", "cache_dtype", "first"),
    [
        (6, 1, 4, 128, "bfloat16", "mosaic_gpu"),
        (5, 1, 4, 128, "bfloat16", "triton"),
        (1, 5, 4, 128, "bfloat16", "triton"),
        (1, 3, 4, 128, "float8_e4m3fn", "mosaic_gpu"),
        (1, 2, 4, 128, "float8_e4m3fn", "triton"),
        (8, 8, 1, 64, "bfloat16", "mosaic_gpu"),
        (8, 8, 2, 64, "bfloat16", "mosaic_gpu"),
        (8, 8, 2, 64, "float8_e4m3fn", "mosaic_gpu"),
        (8, 8, 3, 64, "float8_e4m3fn", "mosaic_gpu"),
        (8, 8, 12, 64, "float8_e4m3fn", "triton"),
        (8, 8, 16, 64, "float8_e4m3fn", "mosaic_gpu"),
        (8, 8, 3, 128, "float8_e4m3fn", "mosaic_gpu"),
        (8, 8, 1, 112, "bfloat16", "triton"),
        (8, 8, 2, 80, "bfloat16", "triton"),
        (8, 8, 4, 80, "bfloat16", "mosaic_gpu"),
        (8, 8, 16, 80, "bfloat16", "triton"),
        (8, 8, 3, 96, "bfloat16", "mosaic_gpu"),
        (8, 8, 16, 128, "bfloat16", "mosaic_gpu"),
        (8, 8, 4, 192, "bfloat16", "mosaic_gpu"),
    ],
)
def test_leads_by_sizes(num_seqs, num_kv_heads, group, head_size, cache_dtype, first):
    sizes = num_seqs, num_kv_heads, group, head_size, cache_dtype
    with mock.patch.object(jax, "local_devices"):
        assert _dispatch._on_cuda("paged_attention", sized(*sizes))[0] == first
        by_group = "triton" if group == 12 else "mosaic_gpu"
        assert _dispatch._on_cuda("write_and_attend", sized(*sizes, writes=True))[0] == by_group


def sized(num_seqs, num_kv_heads, group, head_size, cache_dtype, num_blocks=64, writes=False):
    """Decode operands of these sizes. Each row of the block tables has `num_blocks` blocks of 16 tokens."""
    cache = np.zeros((1, num_kv_heads, 16, head_size), cache_dtype)
    query = np.zeros((num_seqs, group * num_kv_heads, head_size), jnp.bfloat16)
    rest = np.zeros((num_seqs, num_blocks), np.int32), np.ones(num_seqs, np.int32)
    if not writes:
        return _validate.decode_operands(query, cache, cache, *rest, {})
    new, slots = np.zeros((num_seqs, num_kv_heads, head_size), jnp.bfloat16), np.zeros(num_seqs, np.int32)
    return _validate.write_and_attend_operands(query, new, new, cache, cache, *rest, slots, {})


@pytest.mark.parametrize(
    ("dtype", "layout", "first"),
    [
        ("float8_e4m3fn", "hnd", "mosaic_gpu"),
        ("bfloat16", "vllm", "mosaic_gpu"),
        ("float8_e4m3fn", "vllm", "mosaic_gpu"),
        ("int8", "vllm", "mosaic_gpu"),
    ],
)
def test_leads_by_layout(dtype, layout, first):
    shapes = inputs.cache_shapes(layout, 1, 8, 16, 64, jnp.dtype(dtype))
    caches, rest = [np.zeros(shape, dtype) for shape in shapes], (np.zeros((1, 1), np.int32), np.ones(1, np.int32))
    options = {"layout": layout} | ({"k_scale": 1.0, "v_scale": 1.0} if dtype == "int8" else {})
    operands = _validate.decode_operands(np.zeros((1, 8, 64), jnp.bfloat16), *caches, *rest, options)
    with mock.patch.object(jax, "local_devices"):
        assert _dispatch._on_cuda("paged_attention", operands)[0] == first


def test_writes_that_are_refused():
    made = test_write_and_attend.with_new_tokens(small("refused", 4, 2, 80, 16, "bfloat16", "int8"))
    new = {"key": made.key, "value": made.value, "slot_mapping": made.slots}
    words = r"lacks writes of bfloat16 into caches of int8; lacks writes of head_size 80, takes multiples of 64"
    with pytest.raises(Unsupported, match=words):
        paged_jax.write_and_attend(**made.decode, **new, **made.arrays, implementation="mosaic_gpu")
    made = test_write_and_attend.with_new_tokens(small("refused", 4, 2, 64, 16, "bfloat16", layout="vllm"))
    new = {"key": made.key, "value": made.value, "slot_mapping": made.slots, "layout": "vllm"}
    with pytest.raises(Unsupported, match="lacks writes into layout 'vllm'"):
        paged_jax.write_and_attend(**made.decode, **new, implementation="mosaic_gpu")
    made = test_write_and_attend.with_new_tokens(small("refused", 4, 2, 512, 16, "bfloat16"))
    new = {"key": made.key, "value": made.value, "slot_mapping": made.slots}
    with pytest.raises(Unsupported, match="lacks writes of head_size 512"):
        paged_jax.write_and_attend(**made.decode, **new, implementation="mosaic_gpu")
    for name in ("k_scale", "v_scale"):  # one of them is enough
        made = test_write_and_attend.with_new_tokens(small("slots", 4, 2, 64, 16, "bfloat16", **{name: "slot"}))
        new = {"key": made.key, "value": made.value, "slot_mapping": made.slots}
        with pytest.raises(Unsupported, match=r"'mosaic_gpu' lacks writes with scales for each slot$"):
            paged_jax.write_and_attend(**made.decode, **new, **made.arrays, implementation="mosaic_gpu")


def test_heads_of_512_in_layout_vllm_are_refused():
    made = inputs.make(small("refused", 4, 2, 512, 16, "bfloat16", layout="vllm"))
    with pytest.raises(Unsupported, match="lacks head_size 512 in layout 'vllm'"):
        call("v1", made.decode, {}, {"layout": "vllm"}, 0)


def test_other_gpus_are_refused():
    made = inputs.make(BY_NAME["llama-3-8b"])
    with pytest.raises(Unsupported, match=r"needs compute capability 9\.0, this GPU has 10\.0"):
        call("v1", made.decode, {}, {}, 0, Device(100, 148))


@pytest.mark.parametrize(
    ("fold", "num_seqs", "num_heads", "cache", "options"),
    [
        (4, 32, 32, (1, 32, 16, 128), {}),
        (2, 32, 32, (1, 32, 16, 128), {"sliding_window": 512}),
        (2, 48, 32, (1, 32, 16, 128), {}),
        (2, 64, 32, (1, 8, 32, 128), {"k_scale": np.ones((), np.float32)}),
        (4, 64, 32, (1, 32, 16, 128), {}),
        (1, 64, 32, (1, 8, 16, 128), {}),
        (2, 128, 32, (1, 8, 16, 128), {}),
        (2, 64, 32, (1, 32, 32, 128), {"k_scale": np.ones((), np.float32)}),
        (4, 32, 32, (1, 32, 64, 128), {}),
        (1, 64, 32, (1, 32, 64, 128), {}),
        (1, 32, 64, (1, 8, 16, 128), {}),
        (1, 8, 32, (1, 8, 16, 128), {}),
        (4, 64, 32, (1, 32, 8, 128), {}),
        (1, 64, 32, (1, 32, 16, 80), {}),
        (1, 64, 33, (1, 33, 16, 128), {}),
        (4, 32, 32, (1, 16, 32, 128), {"layout": "nhd"}),
        (2, 64, 32, (1, 128, 8, 128), {"layout": "nhd"}),
        (1, 128, 32, (1, 128, 8, 128), {"layout": "nhd"}),
        (1, 32, 32, (1, 32, 32, 128), {"layout": "nhd", "sliding_window": 512}),
        (1, 64, 32, (1, 16, 32, 80), {"layout": "nhd"}),
        (1, 64, 32, (1, 32, 16, 128), {"v_scale": np.ones(32, np.float32)}),
    ],
)
def test_heads_are_folded(fold, num_seqs, num_heads, cache, options):
    query, caches = np.zeros((num_seqs, num_heads, cache[3]), np.float16), [np.zeros(cache, np.float16)] * 2
    tables, seq_lens = np.zeros((num_seqs, 128), np.int32), np.zeros(num_seqs, np.int32)
    options = _validate.decode_operands(query, *caches, tables, seq_lens, options).options
    problem = Problem.of_call(query, *caches, tables, options)
    chosen = choose.balanced(problem, Device())
    kv_heads = caches[0].shape[2 if options.layout == "nhd" else 1]
    assert (chosen.fold, Geometry(problem, chosen).items_per_seq) == (fold, kv_heads // fold)
    # v2 folds no heads, so that its results are the same in any batch.
    assert choose.in_partitions(replace(problem, partition_size=512), Device()).fold == 1


@pytest.mark.parametrize(("block_size", "fold"), [(32, 2), (64, 1)])
def test_pages_longer_than_a_run_are_not_folded(block_size, fold):
    """The tiles of layout "vllm" hold whole pages, and this batch would fill one wave with folded items."""
    shapes = inputs.cache_shapes("vllm", 1, 8, block_size, 128, jnp.dtype("float16"))
    query, caches = np.zeros((64, 32, 128), np.float16), [np.zeros(shape, np.float16) for shape in shapes]
    rest = np.zeros((64, 128), np.int32), np.zeros(64, np.int32)
    operands = _validate.decode_operands(query, *caches, *rest, {"layout": "vllm"})
    assert choose.balanced(Problem.of_call(*operands[:4], operands.options), Device()).fold == fold


def sized_problem(num_seqs, num_kv_heads, group, cache_dtype):
    operands = sized(num_seqs, num_kv_heads, group, 128, cache_dtype, num_blocks=2048)
    return Problem.of_call(*operands[:4], operands.options)


@pytest.mark.parametrize(("cache_dtype", "splits"), [("bfloat16", 16), ("float8_e4m3fn", 32)])
def test_8_bits_fill_each_multiprocessor_twice(cache_dtype, splits):
    """One program on each would read at the same rate, but it converts tiles of 8 bits too slowly."""
    assert choose.balanced(sized_problem(1, 8, 4, cache_dtype), Device()).splits == splits


@pytest.mark.parametrize(("num_seqs", "splits"), [(64, 1), (256, 0)])
def test_many_rows_of_wide_tables_have_one_wave_of_programs(num_seqs, splits):
    """The tables have 32768 columns of tokens, but rows may be short, and each further wave reads all lengths."""
    problem = sized_problem(num_seqs, 8, 4, "bfloat16")
    tuning = choose.balanced(problem, Device())
    assert tuning.splits == splits
    programs = Geometry(problem, tuning).num_programs
    assert programs == (tuning.queues if splits == 0 else num_seqs * 8 // tuning.fold)


@pytest.mark.parametrize(
    ("group", "columns", "copies", "heads"),
    [(1, 8, 1, 1), (7, 8, 1, 7), (8, 8, 1, 8), (9, 16, 2, 5), (12, 16, 2, 6), (16, 16, 1, 16), (20, 24, 3, 7)],
)
def test_query_tiles(group, columns, copies, heads):
    """A copy has up to 8 heads, or fills its rows."""
    problem = sized_problem(3, 3, group, "bfloat16")
    geometry = Geometry(problem, choose.unsplit(problem, Device()))
    assert (geometry.columns, geometry.query_copies, geometry.heads_per_copy) == (columns, copies, heads)
    runs = [(first, first + size, geometry.column(first)) for first, size in geometry.copied_heads]
    assert [column for *_, column in runs] == list(range(0, columns, columns // copies))
    assert [end for _, end, _ in runs] == [*(first for first, *_ in runs[1:]), group]


@pytest.mark.parametrize(("group", "pads"), [(1, False), (7, False), (9, True), (12, False), (24, False)])
def test_only_heads_that_copies_share_unevenly_are_padded(group, pads):
    """Padding takes a kernel."""
    problem = sized_problem(3, 3, group, "bfloat16")
    geometry = Geometry(problem, choose.unsplit(problem, Device()))
    query = jax.ShapeDtypeStruct((3, 3 * group, 128), jnp.bfloat16)
    made = jax.make_jaxpr(lambda query: decode_call.query_tiles(query, geometry))(query)
    assert ("pad" in str(made)) == pads


@pytest.mark.parametrize("tune", [choose.unsplit, choose.in_partitions, choose.balanced])
@pytest.mark.parametrize("group", [1, 4, 5, 8, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("head_size", [64, 80, 128, 192, 256, 512])
def test_tunings_fit(head_size, dtype, group, tune):
    """Tunings fit in shared memory for every block size, and have no more splits than a context may have tiles."""
    if dtype == "int8" and head_size % 64:
        return
    for block_size in (8, 16, 32, 64, 128, 256):
        query = np.zeros((4, 2 * group, head_size), jnp.bfloat16)
        cache = np.zeros((1, 2, block_size, head_size), dtype)
        tables, seq_lens = np.zeros((4, 2), np.int32), np.zeros(4, np.int32)
        scales = {"k_scale": np.ones((), np.float32), "v_scale": np.ones((), np.float32)} if dtype == "int8" else {}
        options = _validate.decode_operands(query, cache, cache, tables, seq_lens, scales).options
        size = 512 if tune is choose.in_partitions else None
        problem = Problem.of_call(query, cache, cache, tables, options, partition_size=size)
        if head_size == 512 and (dtype == "int8" or group > 8):
            what = "caches of int8" if dtype == "int8" else f"groups of {group}"
            with pytest.raises(Unsupported, match=f"lacks head_size 512 .*{what}"):
                tune(problem, Device())
            return
        chosen = tune(problem, Device())
        geometry = Geometry(problem, chosen)
        assert shared_memory_bytes(geometry) <= 227 * 1024
        # A multiprocessor has 228 KiB, and CUDA takes one KiB for each program.
        rooms = list(choose._tilings(problem, chosen, 2))
        assert all(tiled.programs * (room + 1024) <= 228 * 1024 for tiled, room in rooms)
        assert chosen.tile % 64 == chosen.tile % geometry.run_tokens == 0
        if tune is choose.balanced:
            assert 1 <= chosen.splits <= max(1, -(-2 * block_size // 64))
            assert (chosen.splits == 1) == (chosen.merge == "none")


@pytest.mark.parametrize("layout", ["hnd", "nhd", "vllm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("head_size", [64, 128, 192, 256])
def test_long_contexts_have_two_stages(head_size, dtype, layout):
    """While one tile is computed, another one is being copied."""
    caches = [np.zeros(shape, dtype) for shape in inputs.cache_shapes(layout, 1, 8, 16, head_size, jnp.dtype(dtype))]
    query, tables = np.zeros((32, 32, head_size), jnp.bfloat16), np.zeros((32, 256), np.int32)
    scales = {"k_scale": np.ones((), np.float32), "v_scale": np.ones((), np.float32)} if dtype == "int8" else {}
    operands = _validate.decode_operands(query, *caches, tables, np.ones(32, np.int32), {"layout": layout} | scales)
    problem = Problem.of_call(*operands[:4], operands.options)
    for tune in (choose.unsplit, choose.balanced):
        assert tune(problem, Device()).stages >= 2
