"""Tests the batches that the engine gives a model: what the device makes of a packed step."""

import jax
import numpy as np
import pytest
from jax import export

from paged_jax import build_metadata
from paged_jax.engine.batch import Batch, StepShape
from paged_jax.engine.pack import pack_made_up
from tests import engine_model as model


@pytest.mark.parametrize("query_lens", [(5, 3, 1, 1), (1, 1, 1, 1)])
def test_what_a_model_gets_is_what_build_metadata_says(query_lens):
    """The device computes positions, slots and lengths; padding is written nowhere."""
    is_decode, seq_lens = max(query_lens) == 1, np.array([9, 3, 7, 12], np.int32)
    tables = np.random.default_rng(0).permutation(16).reshape(4, 4).astype(np.int32)
    expected = build_metadata(tables, seq_lens, query_lens, 4)
    num_tokens, num_rows = (6, 6) if is_decode else (16, 6)
    shape = StepShape(num_tokens, num_rows, 4, is_decode, 0 if is_decode else 3)
    packed = np.zeros(shape.size, np.int32)
    parts = shape.split(packed)
    total = sum(query_lens)
    parts["token_ids"][:total] = np.arange(total) + 20
    parts["token_ids"][total - 1] = -1 - 2  # the last token of seat 2
    # Rows sit at other seats than their own numbers, and the blocks of their last tokens come with the step.
    seats, last = np.array([5, 0, 3, 2]), (seq_lens - 1) // 4
    parts["row_seats"][:4], parts["row_seats"][4:], parts["seq_lens"][:4] = seats, num_rows, seq_lens
    parts["row_blocks"][0, :4] = tables[np.arange(4), last]
    known = np.full((num_rows, 4), -7, np.int32)
    known[seats] = np.where(np.arange(4) < last[:, None], tables, -9)
    parts["query_start_loc"][:] = [*expected.query_start_loc, total, total]
    unpack = jax.jit(lambda packed, last, known: shape.unpack(packed, last, (known,), 4, (None,)))
    batch, _, (after,) = unpack(packed, np.array([7, 8, 99], np.int32), known)
    after = np.asarray(after)
    np.testing.assert_array_equal(after[seats, last], tables[np.arange(4), last])
    assert after[[1, 4]].tolist() == known[[1, 4]].tolist(), "seats without a row keep their tables"
    assert batch.token_ids[:total].tolist() == [*range(20, 20 + total - 1), 99]
    assert batch.slot_mapping.tolist() == [*expected.slot_mapping, *[-1] * (num_tokens - total)]
    positions = np.concatenate([np.arange(n - q, n) for n, q in zip(seq_lens, query_lens, strict=True)])
    assert batch.positions.tolist() == [*positions, *[0] * (num_tokens - total)]
    metadata = batch.attention_metadata(4)
    for name in ("seq_lens", "context_lens"):
        np.testing.assert_array_equal(getattr(metadata, name)[:4], getattr(expected, name))
    for row in range(4):
        assert metadata.block_tables[row, : last[row] + 1].tolist() == tables[row, : last[row] + 1].tolist()
    np.testing.assert_array_equal(metadata.seq_start_loc[:5], expected.seq_start_loc)
    assert (metadata.num_prefills == 0) == is_decode == (expected.num_prefills == 0)
    assert metadata.num_prefill_tokens + metadata.num_decode_tokens == num_tokens
    assert (metadata.max_prefill_seq_len, metadata.max_decode_seq_len) == ((0, 16) if is_decode else (16, 0))
    assert metadata.max_query_len >= max(query_lens)


@pytest.mark.parametrize(
    ("num_prompts", "context_len", "starts"),
    [(2, 3, [0, 3, 6, 6, 6]), (3, 5, [0, 5, 10, 12, 12]), (1, 20, [0] + [12] * 4)],
)
def test_a_measured_step_has_no_more_prompts_than_a_real_one(num_prompts, context_len, starts):
    shape = StepShape(12, 4, 5, False, num_prompts)
    parts = shape.split(pack_made_up(shape, context_len, [16], 4, 4))
    assert parts["query_start_loc"].tolist() == starts
    assert parts["seq_lens"].tolist() == np.diff(starts).tolist()
    assert parts["row_seats"].tolist() == [0, 1, 2, 3]
    assert (parts["seats"] == 4).all(), "no seat gets a token"


@pytest.mark.parametrize(("num_tokens", "starts"), [(5, [0, 3, 5, 5, 5]), (20, [0, 5, 10, 15, 20]), (1, [0] * 5)])
def test_a_measured_step_that_verifies_is_full_of_drafts(num_tokens, starts):
    """It draws a token after each of its tokens, so it may have more logits than rows."""
    shape = StepShape(num_tokens, 4, 5, False, min(4, num_tokens // 2), is_verify=True)
    parts = shape.split(pack_made_up(shape, 9, [16], 4, 4))
    assert parts["query_start_loc"].tolist() == starts
    assert parts["seq_lens"].tolist() == [9 if count else 0 for count in np.diff(starts)]
    assert parts["logit_rows"].tolist() == [0] * num_tokens


def test_a_decode_batch_needs_no_query_starts():
    """A loop without an engine leaves out the query starts; rows of padding come last and have no token."""
    arrays = [np.zeros(3, np.int32)] * 3 + [np.zeros((3, 2), np.int32), np.array([5, 3, 0], np.int32)]
    given = Batch(*arrays, np.array([0, 1, 2, 2], np.int32), is_decode=True).attention_metadata(4)
    jax.tree.map(np.testing.assert_array_equal, Batch(*arrays, is_decode=True).attention_metadata(4), given)
    assert given.context_lens.tolist() == [4, 2, 0]
    with pytest.raises(ValueError, match="must have query_start_loc unless is_decode"):
        Batch(*arrays).attention_metadata(4)


def test_a_step_can_be_exported():
    weights, caches = model.make_weights(), model.make_caches(4, 4)
    one, row = np.zeros(1, np.int32), np.ones(1, np.int32)
    batch = Batch(
        one + 7,
        one,
        one + 4,
        np.ones((1, 2), np.int32),
        row,
        np.array([0, 1], np.int32),
        one,
        is_decode=True,
        num_prompts=0,
    )
    step = jax.jit(model.step)
    written = export.export(step)(weights, caches, batch).serialize()
    logits, _ = export.deserialize(written).call(weights, caches, batch)
    np.testing.assert_array_equal(logits, step(weights, caches, batch)[0])
