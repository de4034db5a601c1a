"""Tests penalties, biases, minimum lengths, min_p and masks, which change logits before a token is drawn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from paged_jax.engine import Engine, SamplingParams
from paged_jax.engine.adjust import Adjustments, adjust, num_words, unpack_bits
from paged_jax.engine.request import MAX_BIASES
from paged_jax.engine.sampling import Kind, draw_program
from paged_jax.engine.sequence import Sequence
from tests import engine_model as model
from tests.conftest import QUICK_COMPILE
from tests.engine_checks import BLOCK_SIZE, CONFIGS, NUM_BLOCKS, PROMPTS, Words, check_blocks, drain, tokens_of
from tests.engine_simulation import make_engine
from tests.test_engine_parts import draws

RNG = np.random.default_rng(3)
DRAW = jax.jit(draw_program(Kind.ADJUSTED, 0, 1))
FIELDS = {
    "repetition_penalty": {"repetition_penalty": 3.0},
    "presence_penalty": {"presence_penalty": -2.0},
    "frequency_penalty": {"frequency_penalty": -2.0},
    "logit_bias": {"logit_bias": {7: 100.0, 8: 99.5}},
    "min_tokens": {"min_tokens": 6},
}


def adjusted_logits(logits, prompt, output, params, allowed=None):
    """The reference: adjusts one row's logits by vLLM's and OpenAI's definitions of these fields."""
    logits = np.asarray(logits, np.float64).copy()
    for token, bias in dict(params.logit_bias).items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -np.inf
    for token in range(len(logits)):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= params.frequency_penalty * output.count(token)
        logits[token] -= params.presence_penalty * (token in output)
    if allowed is not None:
        logits[[token for token in range(len(logits)) if token not in allowed]] = -np.inf
    return logits


class Multiples:
    """A mask: tokens whose sum with the last one is a multiple of 3, or stop tokens after `length` tokens."""

    def __init__(self, length=None):
        self.length = length

    def allowed_after(self, output):
        """The tokens that may come."""
        if len(output) == self.length:
            return []
        return [t for t in range(model.VOCAB) if (t + sum(output[-1:])) % 3 == 0]

    def start(self):
        """A sample's state."""
        return _MultiplesState(self)


class _MultiplesState:
    def __init__(self, mask):
        self._mask, self._output = mask, []

    def fill(self, allowed):
        for token in self._mask.allowed_after(self._output):
            allowed[token // 32] |= np.uint32(1 << token % 32)

    def advance(self, token_id):
        self._output.append(token_id)


def greedy(reference, prompt, params):
    """The tokens that a request gets one at a time, without an engine."""
    output = []
    while len(output) < params.max_tokens:
        allowed = None if params.mask is None else params.mask.allowed_after(output)
        if allowed == []:
            break
        logits = reference.logits([*prompt, *output])
        output.append(int(adjusted_logits(logits, prompt, output, params, allowed).argmax()))
        if output[-1] in params.stop_token_ids:
            break
    return tuple(output)


def packed_bits(rows):
    """Packs bools [n, vocab] as masks are."""
    words = np.zeros((len(rows), num_words(rows.shape[1])), np.uint32)
    for row, token in zip(*rows.nonzero(), strict=True):
        words[row, token // 32] |= np.uint32(1 << token % 32)
    return words


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
    n, logits = 4000, np.array([2.0, 1.0, 0.0, -1.0, -30.0], np.float32)
    params = SamplingParams(min_p=min_p, temperature=temperature)
    row = Adjustments.of(Sequence(0, 0, params, [0], 1, 9, 0), 5)
    state = jax.tree.map(lambda x: jnp.asarray(x)[None], row)
    how = draws(n, temperature=jnp.full(n, temperature, jnp.float32), seats=jnp.ones(n, jnp.int32))
    packed = jnp.concatenate(
        [jax.lax.bitcast_convert_type(x, jnp.int32) for x in jax.tree.leaves(how)]
    )  # the order of the fields
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
    packed = jnp.concatenate([jax.lax.bitcast_convert_type(x, jnp.int32) for x in jax.tree.leaves(how)])
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


@pytest.fixture(scope="module")
def the_engine(weights):
    """An engine that adjusts logits, in any state."""
    config = dataclasses.replace(CONFIGS["several sizes"], adjustments=True)
    caches = model.make_caches(NUM_BLOCKS, BLOCK_SIZE)
    return Engine(model.step, weights, caches, config, tokenizer=Words(), compiler_options=QUICK_COMPILE)


@pytest.fixture
def one(the_engine):
    """The same engine without requests."""
    the_engine.reset(dataclasses.replace(the_engine.config, num_blocks=None, preemption="cheaper", prefix_caching=True))
    return the_engine


def test_greedy_tokens_are_those_of_the_formulas(one, reference):
    """Tests each field alone, and all together; each changes the tokens of some request."""
    wanted, requests = [], []
    base = {"max_tokens": 9, "stop_token_ids": tuple(range(0, model.VOCAB, 5))}
    for changes in [{}, *FIELDS.values(), {"mask": Multiples()}, {"mask": Multiples(4)}]:
        for prompt in (PROMPTS[1], PROMPTS[6]):
            params = SamplingParams(**(base | changes))
            requests.append((prompt, params))
            wanted.append(greedy(reference, prompt, params))
    everything = {name: value for changes in FIELDS.values() for name, value in changes.items()}
    for prompt in PROMPTS:
        params = SamplingParams(**base | everything | {"mask": Multiples()})
        requests.append((prompt, params))
        wanted.append(greedy(reference, prompt, params))
    found = one.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    assert [completion.token_ids for (completion,) in found] == wanted
    plain = wanted[:2]
    for i, name in enumerate([*FIELDS, "mask", "a short mask"], 1):
        assert wanted[2 * i : 2 * i + 2] != plain, f"{name} changes nothing here"
    ends = [completion.finish_reason for (completion,) in found]
    assert {"stop", "length"} == set(ends)


def everything(seed, n=1, **changes):
    """Parameters with all fields on."""
    fields = {
        "max_tokens": 12, "temperature": 1.5, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3,
        "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {3: 1.0, 9: -2.0}, "min_tokens": 3,
        "stop_token_ids": (5, 17), "seed": seed, "n": n,
    }  # fmt: skip
    return SamplingParams(**fields | changes)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_tokens_depend_on_the_request_alone(the_engine, data):
    """Requests run alone, in a batch, in chunks, with preemption, and after prefix hits."""
    requests = []
    for seed in range(data.draw(st.integers(2, 6))):
        prompt = data.draw(st.sampled_from(PROMPTS))
        mask = data.draw(st.sampled_from([None, None, Multiples(), Multiples(5)]))
        changes = data.draw(st.sampled_from([{}, {"temperature": 0.0}, {"min_p": 0.3}]))
        adjusted = everything(seed, data.draw(st.integers(1, 3)), mask=mask, **changes)
        plain = SamplingParams(max_tokens=12, temperature=0.8, seed=seed)
        requests.append((prompt, data.draw(st.sampled_from([adjusted, adjusted, plain]))))
    the_engine.reset(dataclasses.replace(the_engine.config, num_blocks=None, prefix_caching=False))
    alone = [the_engine.generate([prompt], params) for prompt, params in requests]
    policy = {"num_blocks": data.draw(st.sampled_from([12, 16, None])), "prefix_caching": data.draw(st.booleans())}
    the_engine.reset(dataclasses.replace(the_engine.config, **policy))
    ids, deltas = [], []
    for prompt, params in requests:
        ids.append(the_engine.add_request(prompt, params))
        for _ in range(data.draw(st.integers(0, 3))):
            deltas += the_engine.step()
    found = tokens_of([*deltas, *drain(the_engine, check_blocks)])
    for request_id, (_, params), (samples,) in zip(ids, requests, alone, strict=True):
        assert [found.get((request_id, i), ()) for i in range(params.n)] == [s.token_ids for s in samples]


def test_preempted_requests_get_the_tokens_that_they_get_alone(the_engine):
    """Preempted sequences, some with children, are computed again; their counts then start from all known tokens."""
    the_engine.reset(dataclasses.replace(the_engine.config, num_blocks=None))
    requests = [(prompt, everything(seed, 1 + seed % 2, max_tokens=20)) for seed, prompt in enumerate(PROMPTS[3:7])]
    alone = [the_engine.generate([prompt], params)[0] for prompt, params in requests]
    for policy in ("recompute", "swap"):
        the_engine.reset(dataclasses.replace(the_engine.config, num_blocks=11, preemption=policy))
        found = the_engine.generate([prompt for prompt, _ in requests], [params for _, params in requests])
        assert [[s.token_ids for s in samples] for samples in found] == [[s.token_ids for s in a] for a in alone]
        stats = the_engine.stats()
        assert stats.num_swapped if policy == "swap" else stats.num_recomputed


def test_log_probabilities_are_the_models_own(one, reference):
    params = everything(7, temperature=0.0, logprobs=2, mask=Multiples(), max_tokens=5)
    ((completion,),) = one.generate([PROMPTS[1]], params)
    tokens = list(PROMPTS[1])
    for item in completion.logprobs:
        logprobs = np.asarray(jax.nn.log_softmax(reference.logits(tokens)))
        assert item.logprob == pytest.approx(logprobs[item.token_id], abs=1e-4)
        assert [token for token, _ in item.top] == np.argsort(-logprobs)[:2].tolist()
        tokens.append(item.token_id)


def test_steps_without_adjusted_rows_run_the_programs_that_they_always_run(one, weights):
    """An engine that can adjust logits compiles the same programs for these steps, and a few more."""
    names, start = [], one._runner._start
    one._runner._start = lambda name, *arguments: names.append(name) or start(name, *arguments)
    try:
        plain = SamplingParams(max_tokens=4, temperature=0.7, seed=1)
        one.generate([PROMPTS[1]] * 2, [plain, SamplingParams(max_tokens=4, logprobs=1)])
        assert not any(name == "adjust" or (type(name) is tuple and name[1].is_adjusted) for name in names)
        del names[:]
        one.generate([PROMPTS[1]] * 2, [plain, everything(0)])
        assert "adjust" in names
        assert (one.config.decode_rows[0], Kind.ADJUSTED) in names
    finally:
        del one._runner._start
    rows = {shape.num_rows for shape in one._runner._shapes()}
    adjusted = [name for name in one._runner._programs if type(name) is tuple and name[1].is_adjusted]
    assert len(adjusted) == 2 * len(rows)
    assert Kind.all_of(3, False) == [Kind.GREEDY, Kind.RANDOM, Kind.LOGPROBS]
    logits, last = jnp.zeros((4, model.VOCAB)), jnp.zeros(4, jnp.int32)
    packed = jnp.zeros(4 * 9, jnp.int32)
    for kind in Kind.all_of(3, False):
        text = str(jax.make_jaxpr(draw_program(kind, 3, 4))(logits, packed, last))
        assert "scatter-add" not in text
        assert "u16" not in text


def test_an_engine_without_adjustments_refuses_them():
    engine = make_engine(8, 4, CONFIGS["one size"])
    with pytest.raises(ValueError, match="need an engine with adjustments=True"):
        engine.add_request([1], SamplingParams(presence_penalty=1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_p": 1.5}, "min_p must be in"),
        ({"min_p": "1"}, "min_p must be a number"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be in"),
        ({"presence_penalty": 2.5}, "presence_penalty must be in"),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be in"),
        ({"logit_bias": {-1: 1.0}}, "a token of logit_bias must be in"),
        ({"logit_bias": {1: 101.0}}, "logit_bias must be in"),
        ({"logit_bias": {1: "x"}}, "logit_bias of token 1 must be a number"),
        ({"logit_bias": [(1, 1.0), (1, 2.0)]}, "name each token once"),
        ({"logit_bias": [1, 2]}, "must give numbers by token ids"),
        ({"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)}, "at most 512"),
        ({"min_tokens": 2, "stop_token_ids": range(MAX_BIASES + 1)}, "at most 512"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens"),
        ({"min_tokens": -1}, "min_tokens must be in"),
        ({"mask": 5}, "mask must have a method start"),
    ],
)
def test_wrong_parameters_are_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**changes)


def test_a_bias_of_a_token_that_the_model_lacks_is_refused(one):
    with pytest.raises(ValueError, match="logit_bias names token 61; the model has 61"):
        one.add_request([1], SamplingParams(logit_bias={61: 1.0}))


def test_equal_biases_are_equal():
    assert SamplingParams(logit_bias={2: 1, 1: 0.5}) == SamplingParams(logit_bias=[[1, 0.5], [2, 1]])


def test_masks_end_and_fail(one):
    """Only the sample whose mask raises ends with an error; a mask without tokens gives an empty sample."""

    class Broken(Multiples):
        def start(self):
            raise RuntimeError("no grammar")

    params = [SamplingParams(max_tokens=5, mask=mask, n=2) for mask in (Broken(), Multiples(0), Multiples(2))]
    broken, empty, short = one.generate([PROMPTS[1]] * 3, params)
    assert [(s.token_ids, s.finish_reason, s.stop_reason) for s in broken] == [
        ((), "error", "RuntimeError: no grammar")
    ] * 2
    assert [(s.token_ids, s.finish_reason, s.stop_reason) for s in empty] == [((), "stop", None)] * 2
    assert [(len(s.token_ids), s.finish_reason, s.text.count(".")) for s in short] == [(2, "stop", 2)] * 2


def test_a_stop_text_comes_only_after_the_least_tokens(one):
    ((free,),) = one.generate([PROMPTS[1]], SamplingParams(max_tokens=8))
    stop = free.text.split(".")[1] + "."
    ((early,),) = one.generate([PROMPTS[1]], SamplingParams(max_tokens=8, stop=(stop,)))
    ((late,),) = one.generate([PROMPTS[1]], SamplingParams(max_tokens=8, stop=(stop,), min_tokens=4))
    assert len(early.token_ids) <= 2
    assert len(late.token_ids) > 4
    assert late.token_ids == free.token_ids[: len(late.token_ids)]
