"""Tests the parameters of requests: samples, seeds, log-probabilities, stops, streams, and which ones are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.engine import SamplingParams
from tests.engine_checks import BLOCK_SIZE, PROMPTS, Words, drain


def test_samples_share_their_prompt(engine):
    """The prompt of `n` samples is computed once, and only its last block, in which they differ, is copied."""
    prompt = PROMPTS[3]
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=8, n=4, temperature=1.0, seed=1))
    for _ in range(3):
        engine.step()
    assert engine.stats().num_prompt_tokens == len(prompt)
    shared, own = len(prompt) // BLOCK_SIZE, 1
    assert engine.stats().pools[0].held_blocks == shared + 4 * own
    deltas = drain(engine)
    samples = [tuple(t for d in deltas if d.index == i for t in d.token_ids) for i in range(4)]
    assert len(set(samples)) == 4
    assert {d.request_id for d in deltas} == {request_id}


def test_same_seed_same_tokens_in_any_batch(engine, config):
    params = SamplingParams(max_tokens=8, temperature=0.9, top_k=30, top_p=0.9, seed=2**63 + 5)
    ((alone,),) = engine.generate([PROMPTS[5]], params)
    engine.reset(config)
    together = engine.generate([PROMPTS[1], PROMPTS[5], PROMPTS[7], PROMPTS[2]], params)
    assert together[1][0].token_ids == alone.token_ids
    engine.reset(config)
    ((other,),) = engine.generate([PROMPTS[5]], dataclasses.replace(params, seed=5))
    assert other.token_ids != alone.token_ids


def test_every_parameter_reaches_the_draws(engine, reference):
    """The rows of a batch differ in one parameter each; three extreme values leave one token to draw."""
    prompt, base = PROMPTS[5], SamplingParams(max_tokens=9, temperature=1.5, seed=4)
    changes = [{}, {"seed": 5}, {"seed": 2**33 + 4}, {"temperature": 0.4}, {"top_k": 3}, {"top_p": 0.6}, {"n": 2}]
    greedy = [{"temperature": 1e-6}, {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 0.0}]
    wanted = [dataclasses.replace(base, **change) for change in changes + greedy]
    results = engine.generate([prompt] * len(wanted), wanted)
    drawn = [completion.token_ids for samples in results[: len(changes)] for completion in samples]
    assert drawn[-2] == drawn[0], "the first sample does not depend on how many there are"
    assert len(set(drawn)) == len(drawn) - 1, "each change gives other tokens"
    assert {samples[0].token_ids for samples in results[len(changes) :]} == {reference.greedy(prompt, 9)}
    alone = [engine.generate([prompt], params)[0] for params in wanted]
    assert alone == results


def test_log_probabilities_are_the_models(engine, reference):
    prompt = PROMPTS[4]
    for temperature in (0.0, 1.5):
        params = SamplingParams(max_tokens=5, temperature=temperature, logprobs=3)
        ((result,),) = engine.generate([prompt], params)
        tokens = list(prompt)
        for token_id, told in zip(result.token_ids, result.logprobs, strict=True):
            expected = np.asarray(jax.nn.log_softmax(jnp.asarray(reference.logits(tokens))))
            assert told.token_id == token_id
            np.testing.assert_allclose(told.logprob, expected[token_id], atol=1e-4)
            assert [i for i, _ in told.top] == np.argsort(-expected)[:3].tolist()
            np.testing.assert_allclose([p for _, p in told.top], np.sort(expected)[::-1][:3], atol=1e-4)
            tokens.append(token_id)
    ((alone,),) = engine.generate([prompt], dataclasses.replace(params, logprobs=0))
    assert [(told.token_id, told.top) for told in alone.logprobs] == [(token_id, ()) for token_id in alone.token_ids]


def check_prompt_logprobs(prompt, told, reference, num_top):
    """Compares the log-probabilities of all tokens of a prompt but its first with the model's."""
    assert [item.token_id for item in told] == prompt[1:]
    for position, item in enumerate(told, 1):
        expected = np.asarray(jax.nn.log_softmax(jnp.asarray(reference.logits(prompt[:position]))))
        np.testing.assert_allclose(item.logprob, expected[item.token_id], atol=1e-4)
        assert [i for i, _ in item.top] == np.argsort(-expected)[:num_top].tolist()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_log_probabilities_of_prompts(engine, config, reference, preemption):
    """They are right even if the prefix cache knows the prompt, other requests run, or the request is preempted."""
    engine.reset(dataclasses.replace(config, num_blocks=9, preemption=preemption))
    plain = [SamplingParams(max_tokens=6 + i, n=1 + i % 2) for i in range(len(PROMPTS))]
    alone = engine.generate(PROMPTS, plain)
    params = [dataclasses.replace(p, prompt_logprobs=2 if i % 3 else None) for i, p in enumerate(plain)]
    for prompt, wanted, results, others in zip(PROMPTS, params, engine.generate(PROMPTS, params), alone, strict=True):
        assert [r.token_ids for r in results] == [r.token_ids for r in others]
        assert not any(r.prompt_logprobs for r in others)
        assert not any(r.prompt_logprobs for r in results[1:])
        if wanted.prompt_logprobs is not None:
            check_prompt_logprobs(list(prompt), results[0].prompt_logprobs, reference, 2)
    assert engine.stats().num_swapped if preemption == "swap" else engine.stats().num_recomputed
    drain(engine)


def test_a_batch_does_not_wait_for_earlier_requests(engine):
    """Their tokens while it runs are lost, but not the later ones."""
    request_id = engine.add_request(PROMPTS[0], SamplingParams(max_tokens=20))
    ((result,),) = engine.generate([PROMPTS[1]], SamplingParams(max_tokens=3))
    assert len(result.token_ids) == 3
    assert engine.is_unfinished(request_id)
    deltas = [delta for _ in range(20) for delta in engine.step()]
    assert {delta.request_id for delta in deltas} == {request_id}
    assert deltas[-1].finish_reason == "length"
    drain(engine)


def test_prompts_are_scored_as_fast_as_free_seats_allow(engine):
    """A step computes no more logits than all seats could need."""
    prompt = (PROMPTS[7] * 2)[:21]
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    num_steps = 0
    while not engine.step():
        num_steps += 1
    assert num_steps == -(-len(prompt) // engine.max_num_seqs)
    assert not engine.is_unfinished(request_id)


def test_stop_tokens_and_texts(engine, reference):
    prompt = PROMPTS[7]
    tokens = reference.greedy(prompt, 12)
    # The text before the stop token may begin a stop text, and is held back until the end.
    params = SamplingParams(max_tokens=12, stop_token_ids=(tokens[5],), stop=(".never",))
    ((by_token,),) = engine.generate([prompt], params)
    cut = tokens.index(tokens[5]) + 1
    assert (by_token.token_ids, by_token.finish_reason) == (tokens[:cut], "stop")
    assert by_token.stop_reason == tokens[5]
    assert by_token.text == Words().decode(tokens[: cut - 1])

    text = Words().decode(tokens)
    stop = text[9:13]
    ((by_text,),) = engine.generate([prompt], SamplingParams(max_tokens=12, stop=(stop, "never")))
    assert (by_text.text, by_text.finish_reason, by_text.stop_reason) == (text[: text.index(stop)], "stop", stop)
    drain(engine)


def test_special_tokens_stop_and_what_stops_can_be_shown(engine, reference, monkeypatch):
    prompt, special = PROMPTS[7], reference.greedy(PROMPTS[7], 12)[5]

    class WithSpecial(Words):
        """A tokenizer with one special token, which is not shown."""

        def decode(self, ids, /, skip_special_tokens=True):
            return "".join("<end>" if i == special else Words.decode(self, [i]) for i in ids
                           if not (skip_special_tokens and i == special))  # fmt: skip

        def token_to_id(self, text):
            return special if text == "<end>" else None

    monkeypatch.setattr(engine, "tokenizer", WithSpecial())
    tokens = reference.greedy(prompt, 12)
    tokens = tokens[: tokens.index(special) + 1]
    for by in ({"stop": ("<end>",)}, {"stop_token_ids": (special,)}):
        for more, end in (({}, ""), ({"include_stop": True, "skip_special_tokens": False}, "<end>")):
            ((result,),) = engine.generate([prompt], SamplingParams(max_tokens=12, **by, **more))
            assert (result.token_ids, result.finish_reason) == (tokens, "stop")
            assert result.stop_reason == (special if "stop_token_ids" in by else "<end>")
            assert result.text == Words().decode(tokens[:-1]) + end
    drain(engine)


def test_streamed_text_never_shows_a_part_of_a_stop_text(engine, reference):
    prompt = PROMPTS[0]
    text = Words().decode(reference.greedy(prompt, 12))
    stop = text[-4:] + "!"  # the text has its beginning, but never all of it
    pieces = [delta.text for delta in engine.stream(prompt, SamplingParams(max_tokens=12, stop=(stop,)))]
    assert "".join(pieces) == text
    assert len("".join(pieces[:-1])) <= len(text) - 4, "what begins the stop text is held back to the end"


def test_deltas_tell_how_much_of_the_prompt_was_cached(engine):
    prompt, params = PROMPTS[7], SamplingParams(max_tokens=3, n=2)
    for expected in (0, (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE):
        engine.add_request(prompt, params)
        told = {delta.index: delta.num_cached_tokens for delta in drain(engine)}
        assert told == {0: expected, 1: 0}
    assert expected > 0


def test_leaving_a_stream_cancels_its_request(engine):
    for _ in engine.stream(PROMPTS[7], SamplingParams(max_tokens=20)):
        break
    assert not engine.has_work
    drain(engine)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "at least one token"),
        ([1] * 49, {}, "49 tokens; at most 48 fit"),
        ([1] * 40, {"max_tokens": 10}, "at most 9 new tokens"),
        ([1], {"n": 5}, "n must be at most max_num_seqs = 4, got 5"),
        ([1], {"prompt_logprobs": 4}, "prompt_logprobs must be at most max_logprobs = 3"),
        ([1], {"logprobs": 4}, "logprobs must be at most max_logprobs = 3, got 4"),
        ([3, -1], {}, r"token ids must be in \[0, 2147483647\], got -1"),
        ([2**31], {}, r"token ids must be in \[0, 2147483647\], got 2147483648"),
        ([10**30], {}, r"token ids must be in"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(engine, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, SamplingParams(**params))
    assert not engine.has_work


@pytest.mark.parametrize("prompt", ["text", [1.5], [[1]], [None]])
def test_prompts_that_are_no_token_ids_are_refused(engine, prompt):
    with pytest.raises(TypeError, match="a prompt must hold token ids"):
        engine.add_request(prompt)
    assert not engine.has_work


@pytest.mark.parametrize("prompt", [(3, 4, 5), range(3, 6), np.arange(3, 6), np.arange(3, 6, dtype=np.uint8)])
def test_prompts_may_be_any_integers(engine, reference, prompt):
    ((result,),) = engine.generate([prompt], SamplingParams(max_tokens=3))
    assert result.token_ids == reference.greedy([3, 4, 5], 3)


def test_samples_that_wait_are_all_counted(engine, config):
    for _ in range(2):
        engine.add_request(PROMPTS[0], SamplingParams(max_tokens=2, n=3))
    assert (engine.stats().num_waiting, engine.stats().num_running) == (6, 0)
    engine.step()
    assert (engine.stats().num_waiting, engine.stats().num_running) == (3, 3)
    engine.reset(config)
    engine.add_request(PROMPTS[7], SamplingParams(max_tokens=2, n=3))  # its prompt takes two steps
    engine.step()
    assert (engine.stats().num_waiting, engine.stats().num_running) == (2, 1)
    drain(engine)


def test_as_many_tokens_as_fit(engine, reference, config):
    """Without `max_tokens` a sequence ends at the model's last position; its last token is never fed back."""
    prompt = PROMPTS[6]
    ((result,),) = engine.generate([prompt])
    assert len(result.token_ids) == config.max_model_len - len(prompt) + 1
    assert result.token_ids == reference.greedy(prompt, len(result.token_ids))
