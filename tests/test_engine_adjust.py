"""Tests penalties, biases, minimum lengths, min_p and masks, which change logits before a token is drawn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.engine import Engine, SamplingParams
from paged_jax.engine.request import MAX_BIASES
from paged_jax.engine.sampling import Kind, draw_program
from tests import engine_model as model
from tests.conftest import QUICK_COMPILE
from tests.engine_checks import BLOCK_SIZE, CONFIGS, NUM_BLOCKS, PROMPTS, Words, check_blocks, drain, tokens_of
from tests.engine_simulation import make_engine

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
    assert Kind.all_of(3, False) == [Kind.GREEDY, Kind.RANDOM, Kind.TOP, Kind.LOGPROBS]
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

    class BreaksLater(Multiples):
        def allowed_after(self, output):
            yield from super().allowed_after(output)
            if len(output) == 1:
                raise RuntimeError("no rule")

    masks = Broken(), BreaksLater(), Multiples(0), Multiples(2)
    params = [SamplingParams(max_tokens=5, mask=mask, n=2) for mask in masks]
    broken, later, empty, short = one.generate([PROMPTS[1]] * 4, params)
    assert [(s.token_ids, s.finish_reason, s.stop_reason) for s in broken] == [
        ((), "error", "RuntimeError: no grammar")
    ] * 2
    assert [(len(s.token_ids), s.finish_reason, s.stop_reason) for s in later] == [
        (1, "error", "RuntimeError: no rule")
    ] * 2
    assert [(s.token_ids, s.finish_reason, s.stop_reason) for s in empty] == [((), "stop", None)] * 2
    assert [(len(s.token_ids), s.finish_reason, s.text.count(".")) for s in short] == [(2, "stop", 2)] * 2


def test_text_that_may_begin_a_stop_text_is_given_where_a_mask_ends(one):
    ((free,),) = one.generate([PROMPTS[1]], SamplingParams(max_tokens=5, mask=Multiples(2)))
    params = SamplingParams(max_tokens=5, mask=Multiples(2), stop=(free.text[-2:] + "no such word",))
    assert one.generate([PROMPTS[1]], params) == [[free]]


@pytest.mark.parametrize("name", ["adjust", "draw"])
def test_a_reset_after_a_program_that_took_the_adjustments_and_failed(one, monkeypatch, name):
    """The program's inputs are donated, so a failed engine may hold deleted arrays."""
    params = everything(3)
    wanted = one.generate([PROMPTS[1]], params)

    def fail(started, *arguments):
        results = start(started, *arguments)
        if started == name or (name == "draw" and type(started) is tuple and started[1].is_adjusted):
            raise RuntimeError("lost")
        return results

    start = one._runner._start
    monkeypatch.setattr(one._runner, "_start", fail)
    with pytest.raises(RuntimeError, match="lost"):
        one.generate([PROMPTS[1]], params)
    monkeypatch.undo()
    one.reset()
    assert one.generate([PROMPTS[1]], params) == wanted


def test_a_stop_text_comes_only_after_the_least_tokens(one):
    ((free,),) = one.generate([PROMPTS[1]], SamplingParams(max_tokens=8))
    stop = free.text.split(".")[1] + "."
    ((early,),) = one.generate([PROMPTS[1]], SamplingParams(max_tokens=8, stop=(stop,)))
    ((late,),) = one.generate([PROMPTS[1]], SamplingParams(max_tokens=8, stop=(stop,), min_tokens=4))
    assert len(early.token_ids) <= 2
    assert len(late.token_ids) > 4
    assert late.token_ids == free.token_ids[: len(late.token_ids)]
