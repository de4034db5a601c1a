"""Tests speculative decoding: the same tokens in fewer steps, and no drafts where they would lose."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import PagedKVCache
from paged_jax.engine import Engine, EngineConfig, PromptLookup, SamplingParams
from paged_jax.engine.sampling import Kind
from paged_jax.engine.sequence import Sequence
from paged_jax.engine.speculation import Speculator
from tests import engine_model as model
from tests.conftest import QUICK_COMPILE
from tests.engine_checks import BLOCK_SIZE, CONFIG, NUM_BLOCKS, PROMPTS, Words, drain, tokens_of
from tests.engine_simulation import make_engine
from tests.simulated_tokens import VOCAB, expected_tokens

SPECULATING = dataclasses.replace(CONFIG, max_draft_tokens=3, verify_tokens=(16,))


class Scripted:
    """A proposer whose guesses the test chooses: `guess(tokens, most)`."""

    guess = staticmethod(lambda tokens, most: [])

    def propose(self, rows, /):
        """Guesses for each row."""
        return [list(self.guess(row.tokens, row.most)) for row in rows]

    def forget(self, key, /):
        """Keeps nothing."""


@pytest.fixture(scope="module")
def the_engine(weights):
    """An engine over the tests' model that speculates, and its proposer."""
    proposer, caches = Scripted(), model.make_caches(NUM_BLOCKS, BLOCK_SIZE)
    engine = Engine(
        model.step, weights, caches, SPECULATING, tokenizer=Words(), proposer=proposer, compiler_options=QUICK_COMPILE
    )
    return engine, proposer


@pytest.fixture
def engine(the_engine):
    """The same engine without requests; `proposer.guess` may be set."""
    engine, proposer = the_engine
    engine.reset(SPECULATING)
    proposer.guess = Scripted.guess
    engine.proposer = proposer
    return engine


def right(reference, wrong=lambda position: False):
    """Guesses the greedy tokens, except at some positions."""

    def guess(tokens, most):
        found = reference.greedy(tokens, most)
        return [(t + 1) % model.VOCAB if wrong(len(tokens) + i) else t for i, t in enumerate(found)]

    return guess


@pytest.mark.parametrize(
    ("wrong", "is_faster"),
    [(lambda p: False, True), (lambda p: p % 4 == 0, True), (lambda p: True, False)],
    ids=["never wrong", "sometimes wrong", "always wrong"],
)
def test_greedy_tokens_are_those_of_one_by_one_generation(engine, reference, wrong, is_faster):
    """The tokens are the same whatever is guessed; right guesses take fewer steps."""
    engine.proposer.guess = right(reference, wrong)
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=20)) for prompt in PROMPTS[:4]]
    found = tokens_of(drain(engine))
    assert [found[i, 0] for i in ids] == [reference.greedy(prompt, 20) for prompt in PROMPTS[:4]]
    stats = engine.stats()
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_output_tokens == 80
    if is_faster:
        assert stats.num_accepted_tokens > 20
        assert stats.num_steps < 17
    else:
        assert stats.num_draft_tokens == 0
        assert stats.num_steps == 21


def test_drawn_tokens_and_log_probabilities_do_not_depend_on_drafts(engine):
    """The prompts have several samples each, and top-k and top-p are on."""
    params = SamplingParams(max_tokens=14, n=2, temperature=0.8, top_k=20, top_p=0.9, seed=3, logprobs=2)
    plain = engine.generate(PROMPTS[2:4], params)
    assert engine.stats().num_draft_tokens == 0
    texts = {(*prompt, *one.token_ids) for prompt, some in zip(PROMPTS[2:4], plain, strict=True) for one in some}

    def guess(tokens, most):
        text = next((text for text in texts if text[: len(tokens)] == tuple(tokens)), ())
        return text[len(tokens) : len(tokens) + most]

    engine.reset()
    engine.proposer.guess = guess
    results = engine.generate(PROMPTS[2:4], params)
    assert engine.stats().num_accepted_tokens > 10
    for samples, others in zip(plain, results, strict=True):
        for one, other in zip(samples, others, strict=True):
            assert other.token_ids == one.token_ids
            assert other.text == one.text
            assert [item.logprob for item in other.logprobs] == pytest.approx(
                [item.logprob for item in one.logprobs], abs=1e-4
            )
            assert [[t for t, _ in item.top] for item in other.logprobs] == [
                [t for t, _ in item.top] for item in one.logprobs
            ]


@pytest.mark.parametrize("how", ["stop token", "stop text", "length"])
@pytest.mark.parametrize("length", range(5, 10))
def test_what_ends_inside_a_draft_ends_there(engine, reference, how, length):
    """No token behind the end is given out, and no block stays held."""
    tokens = reference.greedy(PROMPTS[6], 20)
    length = tokens.index(tokens[length - 1]) + 1
    params = {
        "stop token": SamplingParams(max_tokens=20, stop_token_ids=(tokens[length - 1],)),
        "stop text": SamplingParams(max_tokens=20, stop=(f"{tokens[length - 1]:x}.",)),
        "length": SamplingParams(max_tokens=length),
    }[how]
    engine.proposer.guess = right(reference)
    ((result,),) = engine.generate([PROMPTS[6]], params)
    count = next(i for i in range(1, 21) if how != "stop text" or Words().decode(tokens[:i]).find(params.stop[0]) >= 0)
    assert result.token_ids == tokens[: count if how == "stop text" else length]
    drain(engine)


def test_a_verified_text_is_found_in_the_prefix_cache(engine, reference):
    """The cache holds no token of a draft that was wrong."""
    engine.proposer.guess = right(reference, lambda position: position % 3 == 0)
    ((first,),) = engine.generate([PROMPTS[6]], SamplingParams(max_tokens=18))
    assert engine.stats().num_accepted_tokens > 0
    more = [*PROMPTS[6], *first.token_ids, 5]
    engine.proposer.guess = Scripted.guess
    ((second,),) = engine.generate([more], SamplingParams(max_tokens=4))
    assert second.token_ids == reference.greedy(more, 4)
    assert engine._scheduler.counters.hit_tokens == 20


def test_a_reset_switches_speculation_off_and_on(engine, reference):
    """The programs and the proposer stay; drafts have no more tokens than the present config says."""
    engine.proposer.guess = right(reference)
    accepted, compiled = {}, engine.stats().num_compiled
    for most in 3, 0, 1:
        engine.reset(dataclasses.replace(SPECULATING, max_draft_tokens=most))
        ((result,),) = engine.generate([PROMPTS[6]], SamplingParams(max_tokens=18))
        assert result.token_ids == reference.greedy(PROMPTS[6], 18)
        accepted[most] = engine.stats().num_accepted_tokens
        assert engine.stats().num_compiled == compiled
    assert accepted[3] > accepted[1] > accepted[0] == 0


def test_nothing_is_compiled_for_it_unless_it_is_wanted(engine, the_engine):
    assert engine.stats().num_compiled == 4 + 3 + 2 * 4, "moves and tables; decode, mixed and verify; ways to draw"
    with pytest.raises(ValueError, match="a proposer needs max_draft_tokens, got 0"):
        Engine(model.step, {}, (), CONFIG, proposer=PromptLookup())


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"max_draft_tokens": -1}, ValueError, "max_draft_tokens must not be negative, got -1"),
        ({"max_draft_tokens": 2.0}, TypeError, "max_draft_tokens must be an int"),
        ({"max_draft_tokens": 2, "verify_tokens": (4, 4)}, ValueError, r"must rise to 512 at most, got \(4, 4\)"),
        ({"max_draft_tokens": 2, "verify_tokens": (513,)}, ValueError, r"must rise to 512 at most, got \(513,\)"),
        ({"max_draft_tokens": 2, "verify_tokens": (4.0,)}, TypeError, "verify_tokens must hold ints"),
        ({"free_tokens_per_step": 0}, ValueError, "free_tokens_per_step must be positive, got 0"),
    ],
)
def test_configs_that_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        EngineConfig(max_model_len=32, **fields)


@pytest.mark.parametrize(
    ("num_seqs", "sizes"), [(1, (5,)), (4, (5, 20)), (16, (5, 20, 80)), (64, (16, 64, 256)), (512, (16, 64, 256))]
)
def test_the_sizes_that_are_chosen(num_seqs, sizes):
    config = EngineConfig(max_model_len=32, max_num_seqs=num_seqs, max_draft_tokens=4)
    assert config.verify_tokens == sizes


SIMULATED = EngineConfig(max_model_len=64, max_num_seqs=4, max_tokens_per_step=16, max_draft_tokens=3)


def test_drafts_cease_where_guesses_are_wrong():
    """A text repeats itself and then changes: from there on the engine again reads one step late."""
    engine = make_engine(64, 4, SIMULATED, proposer=Scripted())
    expected = expected_tokens([1, 2], SamplingParams(max_tokens=60), 0, 65)

    def guess(tokens, most):
        done = len(tokens) - 2
        return expected[done : done + most] if done < 20 else [(t + 1) % VOCAB for t in expected[done : done + most]]

    engine._speculator._proposer.guess = guess
    engine.add_request([1, 2], SamplingParams(max_tokens=60))
    steps: list[list[str]] = []
    engine._runner.interrupt = lambda name: steps[-1].append(name)
    while engine.has_work:
        steps.append([engine.stats().num_draft_tokens])
        engine.step()
    stats = engine.stats()
    assert stats.num_accepted_tokens >= 10
    assert stats.num_draft_tokens - stats.num_accepted_tokens < 25
    assert [step[1:] for step in steps[-25:-2]] == [["model", "draw", "read"]] * 23
    assert steps[-25][0] == stats.num_draft_tokens, "no draft in the last 25 steps"
    assert ["read", "model", "draw"] in [step[1:] for step in steps[:20]], "a step that verifies needs the last tokens"


def test_a_step_verifies_no_more_than_pays():
    """If 4 rows fill a step, drafts of one row would double its time."""
    config = dataclasses.replace(SIMULATED, verify_tokens=(8, 16), free_tokens_per_step=4)
    engine = make_engine(64, 4, config, proposer=Scripted())
    prompts = [[i, 1, 2] for i in range(4)]
    params = SamplingParams(max_tokens=40)
    texts = [(*prompt, *expected_tokens(prompt, params, 0, 65)) for prompt in prompts]
    engine._speculator._proposer.guess = lambda tokens, most: (
        texts[0][len(tokens) : len(tokens) + most] * (tuple(tokens) == texts[0][: len(tokens)])
    )
    for prompt in prompts:
        engine.add_request(prompt, params)
    found = tokens_of(drain(engine))
    assert [found[i, 0] for i in range(4)] == [text[3:] for text in texts]
    assert engine.stats().num_draft_tokens == 0
    engine.add_request(prompts[0], params)
    drain(engine)
    assert engine.stats().num_accepted_tokens > 20, "alone it pays"


def test_tables_change_only_where_a_draft_reaches_another_block():
    """The last block of each row travels with the step itself, so most steps that verify need no program for tables."""
    engine, reached = make_engine(64, 16, dataclasses.replace(SIMULATED, verify_tokens=(4,)), proposer=Scripted()), []
    expected = expected_tokens([1, 2], SamplingParams(max_tokens=60), 0, 65)
    engine._speculator._proposer.guess = lambda tokens, most: expected[len(tokens) - 2 :][:most]
    launch = engine._runner.launch

    def launched(plan):
        if plan.has_drafts:
            ((start, end),) = zip(plan.rows.ends - plan.rows.counts, plan.rows.ends, strict=True)
            assert len(plan.entries) == ((end - 1) // 16 > start // 16)
            reached.append(len(plan.entries))
        return launch(plan)

    engine._runner.launch = launched
    engine.add_request([1, 2], SamplingParams(max_tokens=60))
    drain(engine)
    assert 0 < sum(reached) < len(reached) / 2


def test_the_best_guesses_are_drafted_first():
    """A step of 7 tokens has room for five drafted ones beside two rows; the second row's guesses are better."""
    config = dataclasses.replace(SIMULATED, max_num_seqs=2, decode_rows=(2,), verify_tokens=(7,))
    proposer = Scripted()
    proposer.guess = lambda tokens, most: [1, 2, 3][:most]
    speculator = Speculator(config, proposer)
    rows = [Sequence(i, 0, SamplingParams(), [0], 1, 65, 0) for i in range(2)]
    for sequence in rows:
        sequence.tokens.append(sequence.num_tokens)
        sequence.num_tokens += 1
    for num_right in (2, 3), (2, 3):
        speculator.guess(rows)
        for sequence, count in zip(rows, num_right, strict=True):
            for token in [1, 2, 3][:count] + [0] * (count < 3):
                speculator.see(sequence, token)
    assert speculator.draft(rows) == {rows[1]: [1, 2, 3], rows[0]: [1, 2]}


def test_prompts_are_never_held_up_by_drafts():
    """A step with a chunk of a prompt has no drafts."""
    engine = make_engine(64, 4, SIMULATED, proposer=Scripted())
    expected = expected_tokens([1, 2], SamplingParams(max_tokens=60), 0, 65)
    engine._speculator._proposer.guess = lambda tokens, most: expected[len(tokens) - 2 :][:most]
    launch, plans = engine._runner.launch, []
    engine._runner.launch = lambda plan: plans.append(plan) or launch(plan)
    engine.add_request([1, 2], SamplingParams(max_tokens=60))
    for _ in range(8):
        engine.step()
    assert plans[-1].has_drafts
    engine.add_request([3] * 40, SamplingParams(max_tokens=1))
    drain(engine)
    mixed = [plan for plan in plans if any(chunk.num_tokens > 1 + len(chunk.draft) for chunk in plan.chunks)]
    assert len(mixed) == 4
    assert not any(plan.has_drafts for plan in mixed)


def test_a_row_that_is_computed_anew_token_by_token_gets_no_draft():
    """Such a row has one token in a step, as one that decodes has, but its next tokens are known."""
    config = dataclasses.replace(SIMULATED, max_tokens_beside_decodes=2, max_prompts_per_step=1)
    engine = make_engine(64, 1, config, proposer=Scripted())
    prompts, params = [[1, 2], [2, 1]], SamplingParams(max_tokens=30)
    texts = [(*prompt, *expected_tokens(prompt, params, 0, 65)) for prompt in prompts]
    engine._speculator._proposer.guess = lambda tokens, most: next(
        text[len(tokens) : len(tokens) + most] for text in texts if text[: len(tokens)] == tuple(tokens)
    )
    for prompt in prompts:
        engine.add_request(prompt, params)
    deltas = [delta for _ in range(8) for delta in engine.step()]
    launch, parts = engine._runner.launch, []

    def look(plan):
        """Every draft follows its sequence's last known token; counts rows of one token that others follow."""
        last = [(chunk.start, len(chunk.sequence.tokens) - 1) for chunk in plan.chunks if chunk.num_tokens == 1]
        parts.extend(start for start, end in last if start < end)
        assert all(chunk.start == len(chunk.sequence.tokens) - 1 for chunk in plan.chunks if chunk.draft)
        return launch(plan)

    engine._runner.launch = look
    engine.update_weights({"salt": 0}, running="continue")  # the same weights: nothing but keys and values is lost
    found = tokens_of([*deltas, *drain(engine)])
    assert [found[i, 0] for i in range(2)] == [text[2:] for text in texts]
    assert len(parts) > 2


class Next:
    """A model whose next token depends on the last one alone: `logits = weights[token]`. It needs no cache."""

    def __init__(self, size, proposer, seed=0):
        caches = (PagedKVCache.create(num_blocks=64, block_size=16, num_kv_heads=1, head_size=8),)
        self.logits = np.random.default_rng(seed).normal(size=(size, size)).astype(np.float32)
        sizes = {"decode_rows": (8,), "mixed_tokens": (32,), "verify_tokens": (32,)}
        config = EngineConfig(64, 8, 32, **sizes, max_draft_tokens=3, adjustments=False)
        with model.drawing(Kind.GREEDY, Kind.RANDOM):
            self.engine = Engine(self.step, jnp.asarray(self.logits), caches, config, seed=1, proposer=proposer)

    @staticmethod
    def step(weights, caches, batch):
        """The engine's step."""
        return weights[batch.token_ids[batch.logit_rows]], caches


@pytest.mark.slow_on_cpu
def test_drawn_tokens_have_the_models_distribution():
    """Every guess is the most likely token, which a wrong rejection rule would favour."""
    proposer = Scripted()
    size = 6
    toy = Next(size, proposer)
    proposer.guess = lambda tokens, most: [int(toy.logits[tokens[-1]].argmax())] + [0] * (most - 1)
    engine = toy.engine
    results = engine.generate([[i % size] for i in range(96)], SamplingParams(max_tokens=48, temperature=0.6))
    stats = engine.stats()
    assert stats.num_draft_tokens > 1000
    assert stats.num_accepted_tokens > 300
    counts = np.zeros((size, size))
    for i, (result,) in enumerate(results):
        tokens = [i % size, *result.token_ids]
        for pair in itertools.pairwise(tokens):
            counts[pair] += 1
    shares = np.asarray(jax.nn.softmax(toy.logits / 0.6, axis=-1))
    wanted = counts.sum(axis=1, keepdims=True) * shares
    chi_squared = ((counts - wanted) ** 2 / wanted).sum()
    assert chi_squared < 60, "30 degrees of freedom: 1 in 1,000 is above 59.7"


def test_a_text_that_repeats_itself_takes_fewer_steps():
    """The engine has its default proposer."""
    toy = Next(11, None)
    params = SamplingParams(max_tokens=60)
    ((result,),) = toy.engine.generate([[3]], params)
    wanted = [3]
    for _ in range(60):
        wanted.append(int(toy.logits[wanted[-1]].argmax()))
    assert list(result.token_ids) == wanted[1:]
    assert toy.engine.stats().num_steps < 30


def test_samples_that_have_ended_are_forgotten():
    engine = make_engine(64, 4, SIMULATED)
    for i in range(9):
        engine.add_request([i % VOCAB] * 5, SamplingParams(max_tokens=9))
    assert len(tokens_of(drain(engine))) == 9
    assert not engine._speculator._guesses
    assert not engine._speculator._proposer._indices
    cancelled = engine.add_request([1, 2, 3], SamplingParams(max_tokens=9))
    for _ in range(5):
        engine.step()
    engine.cancel(cancelled)
    assert collections.Counter(tokens_of(drain(engine))) == {}
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=9))
    engine.step(), engine.step(), engine.reset()
    assert not engine._speculator._guesses
