"""Tests the benchmark of speculation on simulated engines: its rows are right, and it notices different tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import bench_speculation as bench
from benchmarks import model_steps, models
from paged_jax.engine import DraftRow, EngineConfig
from tests.engine_simulation import make_engine
from tests.simulated_tokens import VOCAB

CONFIG = EngineConfig(max_model_len=64, max_num_seqs=4, max_tokens_per_step=16, max_draft_tokens=4)
PROMPTS = [[(3 * i + k) % VOCAB for i in range(5)] for k in range(2)]


@pytest.mark.parametrize("text", bench.TEXTS)
def test_rows(text):
    """Told guesses save steps. Both ways draw with one seed, so their texts are equal."""
    proposer = bench.Told()
    row = bench.measure(make_engine(64, 4, CONFIG, proposer=proposer), proposer, text, PROMPTS, 40, 2)
    assert (row.text, row.num_seqs, row.num_tokens, row.plain_steps) == (text, 2, 80, 40)
    assert row.accepted <= row.drafted
    assert row.gain > 0
    if text == "told":
        assert row.drafted > row.accepted > 30
        assert row.speculating_steps < 25


def test_wrong_tokens_are_told(capsys):
    """The engine gets different weights as soon as it speculates here."""
    proposer = bench.Told()
    engine = make_engine(64, 4, CONFIG, proposer=proposer)
    reset = engine.reset

    def reset_and_update(config):
        reset(config)
        engine.update_weights({"salt": config.max_draft_tokens})

    engine.reset = reset_and_update
    bench.measure(engine, proposer, "greedy", PROMPTS, 40, 1)
    assert "of the tokens are alike" in capsys.readouterr().out


def test_every_seventh_guess_is_wrong():
    proposer = bench.Told()
    proposer.texts = [list(range(20))]
    assert proposer.propose([DraftRow((0, 0), list(range(5)), 4), DraftRow((1, 0), [9], 4)]) == [[5, 6, 6, 8], []]


def test_random_weights_repeat_their_prompts():
    """The likeliest token after a prompt's tokens is its next one, and after the last one the first."""
    config = dataclasses.replace(models._llama(2, (160, 64, 64), (2, 1), False), head_size=32)
    weights, step = models.make_model(config)
    weights = bench.repeat_prompts(weights)
    tables = models.make_tables(1, 64)
    batch = dataclasses.replace(model_steps.prompts(tables, 64), logit_rows=jnp.array([31, 63]))  # of tokens 0, 1, ...
    logits, _ = jax.jit(step)(weights, models.make_caches(config, tables.size), batch)
    np.testing.assert_array_equal(logits.argmax(axis=1), [32, 0])
    matrices = weights["embed_tokens"]["embedding"], weights["lm_head"]["kernel"]
    embedding, head = (np.asarray(matrix, np.float32) for matrix in matrices)
    np.testing.assert_array_equal((embedding @ head).argmax(axis=1)[128:], [*range(129, 160), 128])
