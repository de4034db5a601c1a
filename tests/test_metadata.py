"""Tests the metadata of a step: a golden of chunked prefill, padding to shared static shapes, and refusals."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import AttentionMetadata, allocator, build_metadata, check_metadata

GOLDEN_DIR = pathlib.Path(__file__).parent / "golden"
CHUNKED = json.loads((GOLDEN_DIR / "chunked_prefill_2x484.json").read_text())
FIVE = json.loads((GOLDEN_DIR / "slot_mapping_5x195.json").read_text())
STATICS = (
    "num_prefills",
    "num_prefill_tokens",
    "num_decode_tokens",
    "max_query_len",
    "max_prefill_seq_len",
    "max_decode_seq_len",
)


@pytest.mark.parametrize("step", range(3))
def test_golden_of_chunked_prefill(step):
    step = CHUNKED["steps"][step]
    query_lens = np.diff(step["query_start_loc"])
    order = np.argsort(query_lens <= 1, kind="stable")  # prefill rows first
    seq_lens, query_lens = np.array(step["seq_lens"])[order], query_lens[order]
    state, *_ = allocator.append_tokens(allocator.create(100, 16, 2, 31), seq_lens)
    metadata = build_metadata(state.block_tables, seq_lens, query_lens, 16)
    assert {name: getattr(metadata, name) for name in STATICS} == {name: step[name] for name in STATICS}

    # The starts depend on the order of the rows. So the test compares lengths, and the rule for starts.
    golden = zip(
        step["seq_lens"],
        np.diff(step["query_start_loc"]),
        np.diff(step["seq_start_loc"]),
        step["context_lens"],
        strict=True,
    )
    ours = zip(
        metadata.seq_lens,
        np.diff(metadata.query_start_loc),
        np.diff(metadata.seq_start_loc),
        metadata.context_lens,
        strict=True,
    )
    assert sorted(ours) == sorted(golden)
    assert metadata.query_start_loc[0] == metadata.seq_start_loc[0] == 0
    assert all(leaf.dtype == np.int32 and isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(metadata))
    # The new tokens' slots are those that the allocator gives, row by row.
    rows = np.repeat([0, 1], query_lens)
    positions = np.concatenate([np.arange(s - q, s) for s, q in zip(seq_lens, query_lens, strict=True)])
    np.testing.assert_array_equal(metadata.slot_mapping, allocator.slots(state, rows, positions))
    check_metadata(
        metadata.block_tables,
        metadata.seq_lens,
        100,
        16,
        query_start_loc=metadata.query_start_loc,
        slot_mapping=metadata.slot_mapping,
    )


def test_golden_of_five_prompts():
    tables, decode = FIVE["decode"]["block_tables"], FIVE["decode"]
    prefill = build_metadata(tables, FIVE["prefill"]["seq_lens"], [195] * 5, 16)
    step = build_metadata(tables, decode["seq_lens"], [1] * 5, 16)
    for metadata, golden in ((prefill, FIVE["prefill"]), (step, decode)):
        assert metadata.slot_mapping.tolist() == golden["slot_mapping"]
        for name in ("num_prefills", "num_prefill_tokens", "num_decode_tokens"):
            assert getattr(metadata, name) == golden[name]
    assert step.max_decode_seq_len == decode["max_decode_seq_len"]
    assert (prefill.max_query_len, step.max_query_len) == (195, 1)


def test_num_prefills_settles_what_a_row_of_one_token_is():
    tables, seq_lens, query_lens = [[1], [2], [3]], [1, 3, 4], [1, 3, 1]
    metadata = build_metadata(tables, seq_lens, query_lens, 4, num_prefills=2)
    assert (metadata.num_prefill_tokens, metadata.num_decode_tokens) == (4, 1)
    assert (metadata.max_query_len, metadata.max_prefill_seq_len, metadata.max_decode_seq_len) == (3, 3, 4)
    with pytest.raises(ValueError, match="row 1: query length 3 after 0 prefill rows"):
        build_metadata(tables, seq_lens, query_lens, 4)
    with pytest.raises(ValueError, match="row 1: query length 3 after 1 prefill rows"):
        build_metadata(tables, seq_lens, query_lens, 4, num_prefills=1)
    one = build_metadata([[1]], [1], [1], 4, num_prefills=1)
    assert (one.num_prefills, one.max_query_len, one.max_prefill_seq_len, one.max_decode_seq_len) == (1, 1, 1, 0)


def test_empty_rows_and_an_empty_batch():
    metadata = build_metadata(np.full((3, 2), -1), [0, 0, 0], [0, 0, 0], 4)
    assert metadata.slot_mapping.shape == (0,)
    assert metadata.query_start_loc.tolist() == [0, 0, 0, 0]
    assert (metadata.num_prefills, metadata.max_query_len, metadata.max_decode_seq_len) == (0, 1, 0)
    metadata = build_metadata(np.zeros((0, 2), np.int32), [], [], 4)
    assert metadata.block_tables.shape == (0, 2)
    assert metadata.query_start_loc.tolist() == [0]


def test_ragged_tables_are_padded():
    metadata = build_metadata([[5, 6, 7], [9]], [9, 2], [1, 1], 4, max_blocks_per_seq=4)
    assert metadata.block_tables.tolist() == [[5, 6, 7, -1], [9, -1, -1, -1]]
    assert metadata.slot_mapping.tolist() == [28, 37]


def test_given_bounds_round_up():
    metadata = build_metadata(
        np.array([[5, 6], [9, -1]]),
        [6, 3],
        [4, 3],
        4,
        num_prefill_tokens=16,
        max_query_len=8,
        max_prefill_seq_len=64,
        max_decode_seq_len=32,
    )
    assert metadata.slot_mapping.tolist() == [22, 23, 24, 25, 36, 37, 38] + [-1] * 9
    assert metadata.query_start_loc.tolist() == [0, 4, 7]
    assert [getattr(metadata, name) for name in STATICS] == [2, 16, 0, 8, 64, 32]
    metadata = build_metadata([[5, 6], [9]], [6, 3], [4, 1], 4, num_decode_tokens=8)
    assert metadata.slot_mapping.tolist() == [22, 23, 24, 25, 38] + [-1] * 7
    assert (metadata.num_prefill_tokens, metadata.num_decode_tokens) == (4, 8)


@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_steps_with_the_same_bounds_share_one_compilation(form):
    traces = []

    @jax.jit
    def step(metadata):
        traces.append(metadata.slot_mapping.shape)
        return jnp.sum(metadata.seq_lens) + metadata.max_prefill_seq_len

    tables = np.arange(12, dtype=np.int32).reshape(3, 4)
    for length in (2, 5, 9):
        seq_lens = np.array([length, 3, length + 4], np.int32)
        if form == "prefill":
            bounds = {"num_prefill_tokens": 32, "max_query_len": 16, "max_prefill_seq_len": 16}
            metadata = build_metadata(tables, seq_lens, seq_lens, 4, **bounds)
        else:
            metadata = build_metadata(tables, seq_lens, [1, 1, 1], 4, max_decode_seq_len=16)
        assert step(metadata) == 2 * length + 7 + metadata.max_prefill_seq_len
    assert len(traces) == 1
    step(dataclasses.replace(metadata, max_decode_seq_len=17))
    assert len(traces) == 2


def test_the_metadata_is_a_frozen_pytree():
    metadata = build_metadata([[1]], [3], [3], 4)
    assert isinstance(jax.tree.map(jnp.asarray, metadata), AttentionMetadata)
    assert len(jax.tree.leaves(metadata)) == 6
    with pytest.raises(dataclasses.FrozenInstanceError):
        metadata.num_prefills = 2


def test_the_metadata_does_not_alias_the_callers_arrays():
    tables, seq_lens, query_lens = np.array([[1]], np.int32), np.array([3], np.int32), np.array([3], np.int32)
    metadata = build_metadata(tables, seq_lens, query_lens, 4)
    expected = jax.tree.map(np.copy, metadata)
    tables += 1
    seq_lens += 1
    query_lens -= 1
    jax.tree.map(np.testing.assert_array_equal, metadata, expected)


GOOD = {"block_tables": [[5, 6], [9, -1]], "seq_lens": [6, 3], "query_lens": [4, 1], "block_size": 4}
BAD_BUILDS = {
    "rows differ": ({"seq_lens": [6, 3, 1]}, r"as many rows, got shapes \(2, 2\), \(3,\) and \(2,\)"),
    "fewer rows": ({"seq_lens": [6]}, r"as many rows, got shapes \(2, 2\), \(1,\) and \(2,\)"),
    "more queries": ({"query_lens": [4, 1, 0]}, r"as many rows, got shapes \(2, 2\), \(2,\) and \(3,\)"),
    "fewer tables": ({"block_tables": [[5, 6]]}, r"as many rows, got shapes \(1, 2\), \(2,\) and \(2,\)"),
    "more tables": ({"block_tables": [[5, 6]] * 3}, r"as many rows, got shapes \(3, 2\), \(2,\) and \(2,\)"),
    "flat list": ({"block_tables": [5, 6]}, r"must be \[num_seqs, max_blocks_per_seq\], got a row of shape \(\)"),
    "flat table": ({"block_tables": np.array([5, 6])}, r"must be \[num_seqs, max_blocks_per_seq\], got shape \(2,\)"),
    "negative seq_len": ({"seq_lens": [6, -3]}, "row 1: seq_len -3 is negative"),
    "past the table": ({"seq_lens": [9, 3]}, "row 0: seq_len 9 is past the table of 2 blocks of 4"),
    "negative query": ({"query_lens": [4, -1]}, "row 1: query length -1 must be in"),
    "query too long": ({"query_lens": [7, 1]}, "row 0: query length 7 must be in .0, seq_len = 6."),
    "decode first": ({"query_lens": [1, 3]}, "row 1: query length 3 after 0 prefill rows"),
    "two tokens after one": ({"query_lens": [1, 2]}, "row 1: query length 2 after 0 prefill rows"),
    "num_prefills": ({"num_prefills": 3}, r"num_prefills must be in \[0, 2\], got 3"),
    "num_prefills below 0": ({"num_prefills": -1}, r"num_prefills must be in \[0, 2\], got -1"),
    "no block": ({"block_tables": [[5, -1], [9, -1]]}, "row 0: no block for the new token at position 4"),
    "token bound": ({"num_prefill_tokens": 3}, "num_prefill_tokens must be at least the batch's own 4, got 3"),
    "hole": ({"num_prefill_tokens": 5}, "num_prefill_tokens 5 pads the prefill tokens, but decode tokens follow"),
    "decode bound": ({"num_decode_tokens": 0}, "num_decode_tokens must be at least the batch's own 1, got 0"),
    "query bound": ({"max_query_len": 2}, "max_query_len must be at least the batch's own 4, got 2"),
    "prefill bound": ({"max_prefill_seq_len": 5}, "max_prefill_seq_len must be at least the batch's own 6, got 5"),
    "decode len bound": ({"max_decode_seq_len": 2}, "max_decode_seq_len must be at least the batch's own 3, got 2"),
    "block size": ({"block_size": 0}, "block_size must be positive, got 0"),
    "columns": ({"max_blocks_per_seq": 1}, "max_blocks_per_seq must be at least the batch's own 2, got 1"),
}


@pytest.mark.parametrize("case", BAD_BUILDS)
def test_build_metadata_refuses(case):
    build_metadata(**GOOD)
    changes, message = BAD_BUILDS[case]
    with pytest.raises(ValueError, match=message):
        build_metadata(**(GOOD | changes))


@pytest.mark.parametrize("name", [*STATICS, "block_size", "max_blocks_per_seq"])
def test_sizes_are_integers(name):
    with pytest.raises(TypeError, match=f"{name} must be an int, got 8.0"):
        build_metadata(**GOOD | {name: 8.0})
    if name == "block_size":
        for size in ("num_blocks", "block_size"):
            with pytest.raises(TypeError, match=f"{size} must be an int, got 4.0"):
                check_metadata([[0]], [1], **{"num_blocks": 4, "block_size": 4, size: 4.0})


def test_sizes_become_ints_of_python():
    """`jax.export` cannot store NumPy's integers, and integers of few bits would wrap around."""
    bounds = dict.fromkeys(STATICS[3:], np.int64(9))
    metadata = build_metadata(**GOOD | {"block_size": np.int8(4)}, num_prefills=np.int64(1), **bounds)
    assert {type(getattr(metadata, name)) for name in STATICS} == {int}
    check_metadata([[0] * 20], [150], 4, np.int8(16))
    check_metadata([[0]], [1], np.int32(2**20), np.int32(2**12), slot_mapping=[5])


def test_starts_that_do_not_fit_are_refused():
    """If they wrapped around at 32 bits, the ninth row would start at a negative token."""
    length = 2**28
    rows = {"query_lens": [1] * 9, "block_size": length}
    fits = build_metadata([[0]] * 7, [length] * 7, [1] * 7, length).seq_start_loc
    assert (fits[-1], fits.dtype) == (7 * length, np.int32)
    with pytest.raises(ValueError, match=r"^row 7: seq_start_loc must fit in int32, got 2147483648$"):
        build_metadata([[0]] * 9, [length] * 9, **rows)


CHECKED = {
    "block_tables": [[5, 6, -1], [7, 99, -7], [2**31 - 1] * 3],
    "seq_lens": [6, 4, 0],
    "num_blocks": 10,
    "block_size": 4,
    "query_start_loc": [0, 3, 4, 4],
    "slot_mapping": [23, 24, 25, 31, -1, -1],
}
BAD_VALUES = {
    "tables of one dimension": ({"block_tables": [5, 6, 7]}, r"block_tables must be \[num_seqs"),
    "rows differ": ({"seq_lens": [6, 4]}, r"got shapes \(3, 3\) and \(2,\)"),
    "fewer tables": ({"seq_lens": [6, 4, 0, 0]}, r"got shapes \(3, 3\) and \(4,\)"),
    "id too high": ({"seq_lens": [6, 5, 0]}, r"row 1: block id 99 in column 1 must be in \[0, 10\)"),
    "id at the end": ({"num_blocks": 7}, r"row 1: block id 7 in column 0 must be in \[0, 7\)"),
    "negative id": ({"seq_lens": [9, 4, 0]}, r"row 0: block id -1 in column 2 must be in \[0, 10\)"),
    "negative length": ({"seq_lens": [6, -4, 0]}, "row 1: seq_len -4 is negative"),
    "length just below 0": ({"seq_lens": [6, -1, 0]}, "row 1: seq_len -1 is negative"),
    "most negative length": ({"seq_lens": [6, -(2**31), 0]}, "row 1: seq_len -2147483648 is negative"),
    "length below int32": ({"seq_lens": [6, -(2**31) - 1, 0]}, "row 1: seq_lens must fit in int32, got -2147483649"),
    "length above int32": ({"seq_lens": [6, 2**31, 0]}, "row 1: seq_lens must fit in int32, got 2147483648"),
    "length past the table": ({"seq_lens": [6, 4, 13]}, "row 2: seq_len 13 is past the table of 3 blocks of 4"),
    "starts' shape": ({"query_start_loc": [0, 3, 4]}, r"query_start_loc must have shape \(4,\), got \(3,\)"),
    "too many starts": ({"query_start_loc": [0, 3, 4, 4, 4]}, r"must have shape \(4,\), got \(5,\)"),
    "starts begin": ({"query_start_loc": [1, 3, 4, 4]}, "row 0: query_start_loc must begin at 0, got 1"),
    "starts fall": ({"query_start_loc": [0, 3, 2, 2]}, "row 1: query_start_loc falls from 3 to 2"),
    "query past the row": ({"query_start_loc": [0, 3, 4, 5]}, "row 2: query length 1 exceeds seq_len 0"),
    "starts past tokens": ({"slot_mapping": [23, 24, 25]}, "row 1: query_start_loc 4 is past the 3 tokens"),
    "slot too high": ({"slot_mapping": [23, 24, 25, 40]}, "row 1, token 3: slot 40 must be below 40"),
    "slots of two dimensions": (
        {"slot_mapping": [[23, 24], [25, 31]]},
        r"slot_mapping must be \[num_tokens\], got shape",
    ),
    "slots of no dimension": ({"slot_mapping": np.array(23)}, r"slot_mapping must be \[num_tokens\], got shape \(\)"),
    "slot twice": ({"slot_mapping": [23, 24, 25, 23]}, "row 1, token 3: slot 23 is written twice"),
    "slot 0 twice": ({"slot_mapping": [0, 24, 25, 0]}, "row 1, token 3: slot 0 is written twice"),
    "the last slot twice": ({"slot_mapping": [23, 39, 25, 39]}, "row 1, token 3: slot 39 is written twice"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_check_metadata_names_the_row_and_the_value(case):
    check_metadata(**as_arrays(CHECKED))
    changes, message = BAD_VALUES[case]
    with pytest.raises(ValueError, match=message):
        check_metadata(**as_arrays(CHECKED | changes))


def test_check_metadata_of_slots_alone_names_the_token():
    with pytest.raises(ValueError, match=r"^token 2: slot 5 is written twice"):
        check_metadata(np.zeros((1, 1), np.int32), np.zeros(1, np.int32), 10, 4, slot_mapping=np.array([5, 4, 5, 4]))
    with pytest.raises(ValueError, match=r"^token 1: slot 40 must be below 40"):
        check_metadata(np.zeros((1, 1), np.int32), np.zeros(1, np.int32), 10, 4, slot_mapping=jnp.array([-3, 40]))


def test_of_two_writes_to_a_slot_the_second_one_is_named():
    """However many tokens there are; a sort that is not stable changes places from the 17th on."""
    rng = np.random.default_rng(0)
    for slots in (rng.permutation(200) // 4 - 2 for _ in range(5)):
        second = next(i for i, slot in enumerate(slots) if slot >= 0 and slot in slots[:i])
        with pytest.raises(ValueError, match=f"^token {second}: slot {slots[second]} is written twice"):
            check_metadata([[0]], [0], 100, 1, slot_mapping=slots)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64])
def test_unsigned_starts_may_not_fall_either(dtype):
    with pytest.raises(ValueError, match="row 1: query_start_loc falls from 3 to 2"):
        check_metadata([[0]] * 3, [4, 4, 4], 1, 4, query_start_loc=np.array([0, 3, 2, 2], dtype))


def as_arrays(kwargs):
    return {name: np.array(value) if isinstance(value, list) else value for name, value in kwargs.items()}


def test_integers_that_do_not_fit_are_refused():
    """If they wrapped around at 32 bits, they would name other rows, tokens or blocks."""
    table = np.zeros((2, 8), np.int32)
    with pytest.raises(ValueError, match=r"^row 0: seq_lens must fit in int32, got 4294967301"):
        build_metadata(table, np.array([2**32 + 5, 3]), np.array([1, 1]), 4)
    with pytest.raises(TypeError, match="seq_lens must hold integers, got float64"):
        build_metadata(table, np.array([5.7, 3.0]), np.array([1, 1]), 4)
    for tables in ([[0, 0], [1, 2**31]], np.array([[0, 0], [1, 2**31]])):
        with pytest.raises(ValueError, match=r"^row 1.*: block_tables must fit in int32, got 2147483648"):
            build_metadata(tables, [5, 3], [1, 1], 4)
    with pytest.raises(ValueError, match=r"^token 0: slot_mapping must fit in int32, got 4294967"):
        build_metadata([[2**30, 2**30], [3]], np.array([5, 3]), np.array([5, 1]), 4)


def test_the_last_row_is_no_padding():
    call = {"seq_lens": np.array([2, 1]), "query_start_loc": np.array([0, 2, 3]), "slot_mapping": np.array([1, 2, 16])}
    with pytest.raises(ValueError, match="row 1, token 2: slot 16 must be below 16"):
        check_metadata(np.zeros((2, 2), np.int32), num_blocks=4, block_size=4, **call)


def test_a_batch_of_no_rows():
    metadata = build_metadata([], [], [], 4)
    assert metadata.block_tables.shape == (0, 0)
    assert metadata.query_start_loc.tolist() == [0]


def test_padding_tokens_are_called_padding():
    with pytest.raises(ValueError, match="padding, token 3: slot 3 is written twice"):
        check_metadata(
            np.zeros((2, 2), np.int32),
            np.array([2, 1]),
            4,
            4,
            query_start_loc=np.array([0, 2, 3]),
            slot_mapping=np.array([1, 2, 3, 3]),
        )


def test_entries_behind_a_window_are_not_checked():
    """The first of two queries is at position 6 and sees tokens from 4 on: block 1 of the row, but not block 0."""
    call = {"seq_lens": [8], "num_blocks": 4, "block_size": 4, "query_start_loc": [0, 2]}
    check_metadata([[-1, 3]], sliding_window=3, **call)
    with pytest.raises(ValueError, match=r"row 0: block id -1 in column 0 must be in \[0, 4\)"):
        check_metadata([[-1, 3]], sliding_window=4, **call)
    check_metadata([[-1, 3]], [8], 4, 4, sliding_window=4)
    with pytest.raises(ValueError, match=r"row 0: block id -1 in column 0 must be in \[0, 4\)"):
        check_metadata([[-1, 3]], [8], 4, 4, sliding_window=5)
    with pytest.raises(ValueError, match=r"^query_start_loc must have shape \(2,\), got \(4,\)$"):
        check_metadata([[0, 3]], sliding_window=3, **call | {"query_start_loc": [0, 1, 1, 2]})


WRONG_KINDS = {
    "block_tables": np.array([[0.0, 1.0]]),
    "block_tables of NaN": np.array([[np.nan, np.nan]], np.float32),
    "block_tables of bools": np.array([[True, False]]),
    "seq_lens": np.array([5.0]),
    "query_start_loc": np.array([0.0, 2.0]),
    "slot_mapping": np.array([3.0, 4.0]),
    "slot_mapping of NaN": np.array([np.nan, 4.0]),
}


@pytest.mark.parametrize("case", WRONG_KINDS)
def test_check_metadata_refuses_what_is_no_integer(case):
    call = {"block_tables": [[0, 1]], "seq_lens": [5], "query_start_loc": [0, 2], "slot_mapping": [3, 4]}
    check_metadata(**call, num_blocks=2, block_size=4)
    name = case.split()[0]
    with pytest.raises(TypeError, match=f"{name} must hold integers, got {WRONG_KINDS[case].dtype}"):
        check_metadata(**{**call, name: WRONG_KINDS[case]}, num_blocks=2, block_size=4)


@pytest.mark.parametrize("name", ["block_tables", "query_start_loc", "slot_mapping"])
def test_rows_of_unequal_length_are_refused_in_words(name):
    call = {"block_tables": [[0, 1]], "seq_lens": [5], name: [[0, 1], [0, 1], [2]]}
    with pytest.raises(ValueError, match=rf"^row 2: {name} must have the shape of the first, \(2,\), got \(1,\)$"):
        check_metadata(**call, num_blocks=2, block_size=4)
    with pytest.raises(ValueError, match=r"^row 1, column 1: block_tables must have the shape of the first, \(\), got"):
        build_metadata([[0], [1, [2, 3]]], [1, 1], [1, 1], 4)


@pytest.mark.parametrize("name", ["block_tables", "seq_lens", "query_lens"])
def test_metadata_under_jit_is_refused_in_words(name):
    call = {"block_tables": np.array([[0, 1]]), "seq_lens": np.array([5]), "query_lens": np.array([2])}
    with pytest.raises(TypeError, match=f"{name} must have values, got a traced array: metadata is built and checked"):
        jax.jit(lambda x: build_metadata(**{**call, name: x}, block_size=4))(call[name])
    if name != "query_lens":
        del call["query_lens"]
        with pytest.raises(TypeError, match=f"{name} must have values, got a traced array"):
            jax.jit(lambda x: check_metadata(**{**call, name: x}, num_blocks=2, block_size=4))(call[name])
    with pytest.raises(TypeError, match="seq_lens must have values, got a traced array"):
        jax.jit(lambda n: check_metadata([[0, 1]], [n], num_blocks=2, block_size=4))(5)
