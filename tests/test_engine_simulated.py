"""Tests the engine over a simulated pool (engine_simulation.py), which notices each read of what is not written."""

import pytest

from paged_jax.engine import EngineConfig, SamplingParams
from tests.engine_checks import drain, tokens_of
from tests.engine_simulation import VOCAB, expected_tokens, make_engine


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 3, 4, 7, 8])
def test_a_row_never_reads_what_another_row_of_its_decode_step_writes(block_size, length):
    """Equal beginnings meet in one step: the later request finds the block whose last token this step computes."""
    for second in range(length, length + 3):
        for budget in range(2, length + 3):
            config = EngineConfig(max_model_len=32, max_num_seqs=2, max_tokens_per_step=budget)
            engine = make_engine(64 // block_size, block_size, config)
            prompts = [[i % VOCAB for i in range(n)] for n in (length, second)]
            params = SamplingParams(max_tokens=4)
            ids = [engine.add_request(prompt, params) for prompt in prompts]
            found = tokens_of(drain(engine))
            assert [found[i, 0] for i in ids] == [expected_tokens(prompt, params, 0, 33) for prompt in prompts]
