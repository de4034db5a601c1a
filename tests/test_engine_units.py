"""Tests single decisions of the engine's parts: budgets, pools of windows, pauses of speculation, masks that raise."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from paged_jax.engine import EngineConfig, SamplingParams, pool_sizes
from paged_jax.engine.adjust import Adjustments
from paged_jax.engine.blocks import BlockManager, Counts
from paged_jax.engine.groups import Group, host_blocks
from paged_jax.engine.mask import MaskedSample
from paged_jax.engine.pools import Pools
from paged_jax.engine.results import equip, take
from paged_jax.engine.sampling import Drawn
from paged_jax.engine.sequence import Sequence
from paged_jax.engine.speculation import Speculator, _Guess
from tests.engine_checks import drain, tokens_of
from tests.engine_simulation import make_engine
from tests.simulated_tokens import VOCAB, expected_tokens

CONFIG = EngineConfig(max_model_len=64, max_num_seqs=4, max_tokens_per_step=8)
PROMPTS = [[(i * i + k) % VOCAB for i in range(9 + 7 * k)] for k in range(3)]


def test_a_bound_beside_decodes_makes_no_step_larger():
    engine = make_engine(40, 4, dataclasses.replace(CONFIG, max_tokens_beside_decodes=100))
    params = SamplingParams(max_tokens=12)
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
    found = tokens_of(drain(engine))
    assert [found[i, 0] for i in ids] == [expected_tokens(prompt, params, 0, 65) for prompt in PROMPTS]


def test_only_a_request_s_first_sample_tells_of_cached_tokens():
    """The others begin with its blocks. When they are preempted, they find their own blocks again."""
    engine = make_engine(11, 4, dataclasses.replace(CONFIG, preemption="recompute"))
    params = SamplingParams(max_tokens=24, n=3, temperature=1.0, seed=3)
    for prompt in PROMPTS[:2]:
        engine.add_request(prompt, params)
    deltas = drain(engine)
    assert engine.stats().num_recomputed > 0
    assert engine.stats().hit_rate > 0
    assert not any(delta.num_cached_tokens for delta in deltas if delta.index > 0)


def test_all_tokens_of_a_sequence_are_looked_up_when_it_begins_again():
    engine = make_engine(40, 4, CONFIG)
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=12))
    while engine.stats().num_output_tokens < 5:
        engine.step()
    assert engine.stats().num_looked_up_tokens == 9
    engine.update_weights({"salt": 1})
    drain(engine)
    assert engine.stats().num_looked_up_tokens == 9 + 9 + 6, "the launched step has drawn one more token"


def test_no_more_cached_blocks_are_evicted_than_are_missing():
    blocks = BlockManager(4, 4, 2, 4, 0, True)
    assert blocks.append({0: 8}) == []
    blocks.cache([(0, 0, b"first"), (0, 1, b"second")])
    blocks.release(0)
    assert blocks.counts() == Counts(free=2, cached=2, held=0)
    assert blocks.append({1: 12}) == []
    assert blocks.counts() == Counts(free=0, cached=1, held=3)
    assert blocks.prefix is not None
    assert blocks.prefix.count_cached([b"first", b"second"]) == 1, "the last block of a sequence goes first"


def test_blocks_of_layers_with_a_window():
    """A window of 5 tokens and the token after it touch at most three blocks of 4; steps have at most 9 new tokens."""
    config = EngineConfig(max_model_len=64, max_num_seqs=2, max_tokens_per_step=9, num_host_blocks=1000)
    assert pool_sizes([None, 5, 63, 64, 99], 90, 4, config) == (90, 2 * 3 + 3, 2 * 18 + 3, 90, 90)
    assert pool_sizes([5], 8, 4, config) == (8,)
    assert host_blocks(Group(5, (0,), 90, 1), 4, config) == 2 * 4
    assert host_blocks(Group(None, (0,), 90, 1), 4, config) == 1000


def test_every_row_of_a_verified_step_may_have_a_draft():
    config = dataclasses.replace(CONFIG, max_draft_tokens=3, verify_tokens=(3, 6, 8))
    shapes = [shape for shape in make_engine(40, 4, config)._runner._programs if getattr(shape, "is_verify", False)]
    assert [(shape.num_tokens, shape.num_prompts) for shape in shapes] == [(3, 1), (6, 3), (8, 4)]


def sequence(request_id, num_tokens=4):
    return Sequence(request_id, 0, SamplingParams(), [0] * num_tokens, num_tokens, 64, 0)


class Nothing:
    def propose(self, rows, /):
        return [[7] * row.most for row in rows]

    def forget(self, key, /):
        """Has nothing to forget."""


@pytest.mark.parametrize(("free", "is_drafted"), [(128, True), (1, False)])
def test_after_a_draft_that_does_not_pay_there_is_a_pause(free, is_drafted):
    """For four steps the device does not wait for the host; then it does again, as guesses are right."""
    config = dataclasses.replace(CONFIG, max_draft_tokens=3, free_tokens_per_step=free)
    speculator, one = Speculator(config, Nothing()), sequence(0)
    speculator._guesses[one] = _Guess(expected=1.0)
    assert bool(speculator.draft([one])) == is_drafted
    assert [speculator.is_promising([one]) for _ in range(6)] == [is_drafted] * 4 + [True] * 2


def test_a_sequence_gains_no_more_than_its_draft_has():
    """Of two sequences with good guesses, a step for one token more has room for one token of one draft."""
    config = dataclasses.replace(CONFIG, max_draft_tokens=3, decode_rows=(2, 4), verify_tokens=(3,))
    config = dataclasses.replace(config, free_tokens_per_step=2)
    speculator, both = Speculator(config, Nothing()), [sequence(0), sequence(1)]
    speculator._guesses = {one: _Guess(expected=3.0) for one in both}
    assert speculator.draft(both) == {}, "3 tokens in 1.25 * 1.5 of the time are fewer than 2 in 1"
    config = dataclasses.replace(config, free_tokens_per_step=3)
    speculator = Speculator(config, Nothing())
    speculator._guesses = {one: _Guess(expected=3.0) for one in both}
    assert speculator.draft(both) == {both[0]: [7]}, "3 tokens in 1.25 of the time are more than 2"


@pytest.mark.parametrize(("num_tokens", "most"), [(40, 3), (60, 3), (61, 2), (62, 1), (63, 0)])
def test_a_draft_leaves_a_place_for_the_token_after_it(num_tokens, most):
    """The sequence may have 64 tokens."""
    asked = []
    proposer = SimpleNamespace(propose=lambda rows: asked.extend(rows) or [[] for _ in rows])
    speculator, one = Speculator(dataclasses.replace(CONFIG, max_draft_tokens=3), proposer), sequence(0, num_tokens)
    speculator._guesses[one] = _Guess(expected=1.0)
    assert speculator.draft([one]) == {}
    assert [row.most for row in asked] == [most]
    assert speculator._guesses[one].expected == pytest.approx(0.7), "nothing was guessed, so nothing was right"


def test_adjusted_sequences_promise_no_drafts():
    engine = make_engine(40, 4, dataclasses.replace(CONFIG, max_draft_tokens=2))
    promised = []
    for penalty in (0.0, 1.0):
        engine.add_request(PROMPTS[0], SamplingParams(max_tokens=12, presence_penalty=penalty))
        for _ in range(4):
            engine.step()
        promised.append(engine._scheduler.may_draft)
    assert promised == [True, False]


def test_a_mask_that_raises_half_way_allows_nothing():
    class Broken:
        def start(self):
            return self

        def fill(self, allowed):
            allowed[:] = 1
            raise ValueError("half way")

        def advance(self, token_id):
            raise AssertionError("the sample has ended")

    sample = MaskedSample(Broken(), 40)
    np.testing.assert_array_equal(sample.allowed(), np.zeros(2, np.uint32))
    assert (sample.has_ended, sample.error) == (True, "ValueError: half way")


@pytest.mark.parametrize(("num_blocks", "has_room"), [(3, True), (2, False)])
def test_a_swapped_sequence_needs_its_blocks_once(num_blocks, has_room):
    """It has two full blocks on the host, and needs a third one for its next token."""
    pools = Pools([BlockManager(num_blocks, 4, 2, 4, 2, True)], [1])
    swapped = sequence(0, 9)
    swapped.num_computed, swapped.host_blocks = 8, [[0, 1]]
    assert pools.has_room(swapped, pools.no_hits, [0]) == has_room
    assert not pools.has_room(swapped, pools.no_hits, [1])


def test_blocks_that_cannot_be_shared_out_evenly_are_taken_in_order():
    """An engine may use fewer blocks than the pools have, which are split over devices."""
    for num_blocks, free in ((6, [0, 3, 1, 4, 2, 5]), (5, [0, 1, 2, 3, 4])):
        assert BlockManager(num_blocks, 4, 2, 4, 0, True, num_shards=2).state.free_blocks.tolist() == free


class Ends:
    """A tokenizer whose token 9 is a text and the first byte of a character."""

    def decode(self, ids, /):
        return "".join("END\N{REPLACEMENT CHARACTER}" if i == 9 else "-" for i in ids)


@pytest.mark.parametrize(
    ("stop", "text", "reason"), [("END", "", "stop"), ("no", "END\N{REPLACEMENT CHARACTER}", "length")]
)
def test_a_stop_text_before_half_a_character_ends_a_text_at_its_last_place(stop, text, reason):
    """The text was held back because the character might go on."""
    one = Sequence(0, 0, SamplingParams(stop=(stop,)), [0] * 4, 4, 5, 0)
    equip(one, Ends(), VOCAB)
    delta = take(one, 9, Drawn(np.zeros(1, np.int32)), 0)
    assert (delta.text, delta.finish_reason) == (text, reason)
    assert delta.stop_reason == (stop if reason == "stop" else None)


def test_a_pool_of_a_window_bounds_requests_only_if_it_is_too_small_for_one():
    for num_blocks, most_held, room in ((3, 4, 12), (4, 4, None), (9, None, 36)):
        assert BlockManager(num_blocks, 4, 2, 16, 0, True, sliding_window=5, most_held=most_held).room == room


def test_a_minimum_of_one_token_forbids_stop_tokens_at_the_first_place():
    for least, forbidden in ((0, []), (1, [(5, -np.inf, 4 + 1)]), (3, [(5, -np.inf, 4 + 3)])):
        params = SamplingParams(min_tokens=least, stop_token_ids=(5,))
        row = Adjustments.of(Sequence(0, 0, params, [0] * 4, 4, 64, 0), 40)
        found = zip(row.bias_ids.tolist(), row.biases.tolist(), row.until.tolist(), strict=True)
        assert [entry for entry in found if entry[0] < 40] == forbidden
