"""Tests the device's part of penalties, biases, minimum lengths, min_p and masks: logits, counts, bits and draws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from paged_jax.engine import SamplingParams
from paged_jax.engine.adjust import Adjustments, adjust, num_words, unpack_bits
from paged_jax.engine.sampling import Kind, draw_program
from paged_jax.engine.sequence import Sequence
from tests.test_engine_adjust import adjusted_logits
from tests.test_engine_parts import draws

RNG = np.random.default_rng(3)
DRAW = jax.jit(draw_program(Kind.ADJUSTED, 0, 1))


def packed_bits(rows):
    """Packs bools [n, vocab] as masks are."""
    words = np.zeros((len(rows), num_words(rows.shape[1])), np.uint32)
    for row, token in zip(*rows.nonzero(), strict=True):
        words[row, token // 32] |= np.uint32(1 << token % 32)
    return words


def packed_draws(how):
    """Packs sampling parameters as the runner does, in the order of the fields."""
    return jnp.concatenate([jax.lax.bitcast_convert_type(x, jnp.int32) for x in jax.tree.leaves(how)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("vocab", [31, 64, 70])
def test_logits_are_changed_as_the_formulas_say(vocab):
    n, logits = 6, RNG.normal(size=(6, vocab)).astype(np.float32) * 4
    prompts, outputs = (
        [RNG.integers(0, vocab, length).tolist() for length in RNG.integers(1, 30, n)] for _ in range(2)
    )
    outputs[0] = []
    allowed = RNG.random((n, vocab)) < 0.7
    allowed[1] = True
    rows, params = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        biases = RNG.choice(vocab, 5, replace=False).tolist()
        params.append(
            SamplingParams(
                repetition_penalty=float(RNG.choice([1.0, 1.3, 0.5])),
                presence_penalty=float(RNG.choice([0.0, 1.5, -2.0])),
                frequency_penalty=float(RNG.choice([0.0, 0.25, -0.5])),
                logit_bias=dict(zip(biases, RNG.uniform(-9, 9, 5).tolist(), strict=True)),
                min_tokens=int(RNG.choice([0, len(output), len(output) + 1])),
                stop_token_ids=RNG.choice(vocab, 3, replace=False).tolist(),
            )
        )
        # The host knows all tokens except the last few when the sequence gets its seat; the device counts those few.
        known = [*prompt, *output[: len(output) // 2]]
        rows.append(Adjustments.of(Sequence(0, 0, params[-1], known, len(prompt), 99, 0), vocab))
    state = jax.tree.map(jnp.asarray, Adjustments.zeros(n + 1, vocab))
    seats = RNG.permutation(n + 1)[:n].astype(np.int32)
    for seat, row in zip(seats, rows, strict=True):
        state = state.set_row(jnp.int32(seat), row)
    for i in range(max(map(len, outputs))):
        tokens = [output[len(output) // 2 :][i : i + 1] for output in outputs]
        where = [seat if token else n + 1 for seat, token in zip(seats, tokens, strict=True)]
        state = state.count(jnp.asarray(where), jnp.array([(token or [0])[0] for token in tokens]))
    position = jnp.array(
        [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)], jnp.int32
    )
    found = adjust(jnp.asarray(logits), state.rows(jnp.asarray(seats)), position, jnp.asarray(packed_bits(allowed)))
    for i in range(n):
        wanted = adjusted_logits(logits[i], prompts[i], outputs[i], params[i], set(allowed[i].nonzero()[0].tolist()))
        np.testing.assert_allclose(np.asarray(found[i]), wanted, rtol=1e-5, atol=1e-5, err_msg=f"row {i}")


def test_a_mask_decides_where_a_minimum_length_leaves_nothing():
    params = SamplingParams(min_tokens=2, stop_token_ids=(1,), presence_penalty=1.0)
    row = Adjustments.of(Sequence(0, 0, params, [3], 1, 9, 0), 4)
    rows = jax.tree.map(lambda x: jnp.asarray(x)[None], row)
    logits, position = jnp.array([[0.0, 1.0, 2.0, 3.0]]), jnp.ones(1, jnp.int32)
    for mask, wanted in (([0, 1, 0, 0], [-np.inf, 1, -np.inf, -np.inf]), ([1, 1, 0, 0], [0] + [-np.inf] * 3)):
        words = jnp.asarray(packed_bits(np.array([mask], np.bool_)))
        assert adjust(logits, rows, position, words).tolist() == [wanted]


def test_counts_stop_before_they_overflow():
    state = jax.tree.map(jnp.asarray, Adjustments.zeros(1, 3))
    state = dataclasses.replace(state, counts=jnp.array([[2**15 - 2, 2**16 - 2, 0]], jnp.uint16))
    for _ in range(3):
        state = state.count(jnp.zeros(2, jnp.int32)[:1], jnp.array([0]))
        state = state.count(jnp.zeros(2, jnp.int32)[:1], jnp.array([1]))
    assert state.counts.tolist() == [[2**15 - 1, 2**16 - 1, 0]]


def test_bits_are_in_the_order_that_masks_are_told():
    rows = RNG.random((3, 70)) < 0.5
    assert (np.asarray(unpack_bits(jnp.asarray(packed_bits(rows)), 70)) == rows).all()


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.4, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_draws_with_min_p_follow_the_probabilities(min_p, temperature):
    """Tokens are left out by their probabilities at this temperature."""
    n, logits = 4000, np.array([-30.0, 1.0, 0.0, 2.0, -1.0], np.float32)
    params = SamplingParams(min_p=min_p, temperature=temperature)
    row = Adjustments.of(Sequence(0, 0, params, [0], 1, 9, 0), 5)
    state = jax.tree.map(lambda x: jnp.asarray(x)[None], row)
    how = draws(n, temperature=jnp.full(n, temperature, jnp.float32), seats=jnp.ones(n, jnp.int32))
    packed = packed_draws(how)
    masks = jnp.full((n, 1), 2**32 - 1, jnp.uint32)
    *_, drawn = DRAW(
        jnp.asarray(np.tile(logits, (n, 1))), packed, jnp.zeros(1, jnp.int32), state, jnp.zeros(n, jnp.int32), masks
    )
    counts = np.bincount(np.asarray(drawn.token_ids), minlength=5)
    p = np.asarray(jax.nn.softmax(logits / temperature))
    p = np.where(p >= min_p * p.max() * (1 - 1e-6), p, 0)
    p /= p.sum()
    assert np.abs(counts / n - p).max() < 4 * np.sqrt(0.25 / n)
    assert not counts[p == 0].any()


def test_rows_that_are_not_adjusted_do_not_see_what_a_seat_holds():
    """Such a row has no seat here, and the only seat's row leaves one token."""
    n, logits = 4000, np.array([-30.0, 1.0, 0.0, 2.0, -1.0], np.float32)  # the sizes of the test before
    params = SamplingParams(
        temperature=1.0, min_p=1.0, logit_bias={4: 100.0}, repetition_penalty=0.5, presence_penalty=-2.0
    )
    held, nothing = Adjustments.of(Sequence(0, 0, params, [0], 1, 9, 0), 5), Adjustments.zeros(1, 5)
    packed = packed_draws(draws(n, seats=jnp.ones(n, jnp.int32)))
    masks, seats = jnp.full((n, 1), 2**32 - 1, jnp.uint32), jnp.ones(n, jnp.int32).at[0].set(0)
    found, wanted = (
        DRAW(jnp.asarray(np.tile(logits, (n, 1))), packed, jnp.zeros(1, jnp.int32), state, seats, masks)[-1].token_ids
        for state in (jax.tree.map(lambda x: jnp.asarray(x)[None], held), jax.tree.map(jnp.asarray, nothing))
    )
    assert found[0] == 4
    assert found[1:].tolist() == wanted[1:].tolist()
    assert len(set(wanted[1:].tolist())) == 4


def test_a_vocabulary_that_is_split_over_devices_changes_nothing():
    """Logits and counts lie where the parts of the vocabulary do; the engine places them so on a mesh."""
    vocab, n = 64, 4
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices("cpu")[:2])
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={40: 3.0}, min_p=0.1)
    state = Adjustments.zeros(n, vocab)
    for seat in range(n):
        row = Adjustments.of(Sequence(0, 0, params, RNG.integers(0, vocab, 20).tolist(), 5, 99, 0), vocab)
        for array, one in zip(jax.tree.leaves(state), jax.tree.leaves(row), strict=True):
            array[seat] = one
    how = draws(n, seats=jnp.arange(n, dtype=jnp.int32))
    packed = packed_draws(how)
    masks = packed_bits(RNG.random((n, vocab)) < 0.8)
    logits = RNG.normal(size=(n, vocab)).astype(np.float32) * 3
    program = draw_program(Kind.ADJUSTED, 0, n)
    inputs = logits, packed, np.zeros(n, np.int32), state, np.arange(n, dtype=np.int32), masks
    wanted = jax.jit(program)(*inputs)
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(None, "tp"))
    places = dataclasses.replace(jax.tree.map(lambda _: whole, state), counts=split)
    at = split, whole, whole, places, whole, whole
    found = jax.jit(program, in_shardings=at, out_shardings=(whole, places, whole))(*inputs)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert np.asarray(a).tolist() == np.asarray(b).tolist()
    assert int(np.asarray(found[1].counts, np.int64).sum()) == int(state.counts.astype(np.int64).sum()) + n
