"""What the engine's tests share: a small engine over engine_model.py's model, prompts, and checks of its blocks.

conftest.py loads this module as a plugin, which makes its fixtures known to all tests.
"""

import dataclasses

import numpy as np
import pytest

from paged_jax.engine import Engine, EngineConfig
from paged_jax.engine.groups import host_blocks
from tests import engine_model as model
from tests.conftest import QUICK_COMPILE

BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 4, 24, 16
CONFIG = EngineConfig(
    max_model_len=48,
    max_num_seqs=4,
    max_tokens_per_step=16,
    decode_rows=(4,),
    mixed_tokens=(16,),
    max_logprobs=3,
    num_host_blocks=NUM_HOST_BLOCKS,
    adjustments=False,
)
# The second configuration compiles several sizes of steps, allows few prompts a step, and has fewer blocks on the host
# than in the pool. Its layers with a window hold blocks for the window only.
SIZES = {"decode_rows": (2, 4), "mixed_tokens": (5, 16), "max_prompts_per_step": 2, "num_host_blocks": 5}
CONFIGS = {"one size": CONFIG, "several sizes": dataclasses.replace(CONFIG, **SIZES)}
WINDOWS_OF = {CONFIGS["several sizes"]: model.WINDOWS}
RNG = np.random.default_rng(5)
STEM, LONG = (RNG.integers(0, model.VOCAB, length).tolist() for length in (14, 20))
# Some prompts begin alike, with and without whole blocks in common. One is the beginning of another. The last one has
# the first block of one prompt, and the second and third block of another.
PROMPTS = [
    *(STEM[:length] for length in (1, 7, 8, 13)),
    *(STEM[:12] + RNG.integers(0, model.VOCAB, length).tolist() for length in (1, 5)),
    RNG.integers(0, model.VOCAB, 3).tolist(),
    LONG,
    [*STEM[:4], *LONG[4:13]],
]


class Words:
    """A tokenizer for which every token is a short word."""

    def decode(self, ids, /):
        return "".join(f"{i:x}." for i in ids)


@pytest.fixture(scope="session")
def weights():
    """The model's weights."""
    return model.make_weights()


@pytest.fixture(scope="session")
def reference(weights):
    """The model without an engine."""
    return model.Reference(weights)


@pytest.fixture(scope="session", params=CONFIGS.values(), ids=CONFIGS)
def config(request):
    """The configuration of `the_engine`: every test that takes an engine runs with each."""
    return request.param


@pytest.fixture(scope="session")
def the_engine(weights, config):
    """An engine for all tests of a configuration, since compiling takes most of their time; it is in any state."""
    caches = model.make_caches(NUM_BLOCKS, BLOCK_SIZE)
    options = {"tokenizer": Words(), "compiler_options": QUICK_COMPILE, "sliding_windows": WINDOWS_OF.get(config)}
    return Engine(model.step, weights, caches, config, **options)


@pytest.fixture
def engine(the_engine, config):
    """The same engine without any requests, with the policies of `config`."""
    the_engine.reset(config)
    return the_engine


def check_blocks(engine):
    """Checks that every block is free, cached or held, and that tables and prefix cache explain all references."""
    for group, blocks in enumerate(engine._blocks.managers):
        check_manager(blocks)
        swapped = [s.host_blocks[group] for s in engine._scheduler.waiting if s.host_blocks is not None]
        host = host_blocks(engine._groups[group], blocks.block_size, engine.config)
        assert sorted(sum(swapped, blocks.free_host_blocks)) == list(range(host))
    seats = [s.seat for s in engine._scheduler.running]
    seats += [child.seat for s in engine._scheduler.running for child in s.children]
    assert sorted(seats + engine._scheduler.seats.free) == list(range(engine.config.max_num_seqs))


def check_manager(blocks):
    """Checks the blocks of one group of layers, and that a sequence holds no more of them than it may."""
    counts = blocks.counts()
    assert sum(counts) == blocks.num_blocks
    if blocks.most_held is not None:
        assert (blocks.state.block_tables >= 0).sum(axis=1).max() <= blocks.most_held
    tables = blocks.state.block_tables
    references = np.bincount(tables[tables >= 0], minlength=blocks.num_blocks)
    for block in range(blocks.num_blocks):
        references[block] += blocks.prefix is not None and block in blocks.prefix
    assert references.tolist() == blocks.state.ref_counts.tolist()


def drain(engine, check=check_blocks):
    """Runs steps until no work is left, checks the blocks after each, and returns the deltas."""
    deltas = []
    while engine.has_work or engine._launched is not None:
        deltas += engine.step()
        check(engine)
    assert engine._blocks.counts().held == 0
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    return deltas


def without_void(deltas):
    """Drops the deltas of samples before their restart."""
    first = {(delta.request_id, delta.index): i for i, delta in enumerate(deltas) if delta.is_restarted}
    return [delta for i, delta in enumerate(deltas) if i >= first.get((delta.request_id, delta.index), 0)]


def tokens_of(deltas):
    """All tokens of each sample, by (request id, index)."""
    found = {}
    for delta in without_void(deltas):
        found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    return {key: tuple(tokens) for key, tokens in found.items()}
