"""Tests layers with sliding windows in an engine: their groups, the memory that their pools save, and a model."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from examples import loop
from examples.checkpoint import load_model
from examples.step import make_step
from paged_jax.engine import Batch, Engine, EngineConfig, SamplingParams, pool_sizes
from paged_jax.engine.groups import blocks_used, make_groups
from paged_jax.engine.pools import make_pools
from paged_jax.engine.sampling import Kind
from paged_jax.engine.scheduler import Scheduler
from paged_jax.engine.seats import Seats
from paged_jax.engine.sequence import Sequence
from tests.engine_checks import drain
from tests.engine_model import drawing
from tests.model_folders import folder, reference

GEMMA = ([1024] * 5 + [None]) * 4 + [1024] * 2  # the layers of Gemma 3's smallest models


def caches_of(num_blocks, block_size=16):
    """Caches of one byte for each token."""
    return [SimpleNamespace(num_blocks=n, block_size=block_size, nbytes=n * block_size) for n in num_blocks]


def test_layers_are_grouped_by_their_windows():
    """A window that no sequence outgrows is none, and the widest comes first."""
    groups = make_groups(caches_of([5, 9, 5, 7, 9]), [3, 100, 3, 8, None], longest=100)
    assert groups == ((None, (1, 4), 9, 32), (8, (3,), 7, 16), (3, (0, 2), 5, 32))
    assert make_groups(caches_of([4, 4]), None, longest=100) == ((None, (0, 1), 4, 32),)


def test_one_number_of_blocks_is_for_the_largest_pools():
    """Smaller pools give all that they have."""
    groups = make_groups(caches_of([5, 9, 5, 7, 9]), [3, 100, 3, 8, None], longest=100)
    config = EngineConfig(100, max_num_seqs=1, max_tokens_per_step=16)
    given = {None: [9, 7, 5], 9: [9, 7, 5], 8: [8, 7, 5], 6: [6, 6, 5], (9, 1, 5): [9, 1, 5]}
    for num_blocks, wanted in given.items():
        assert blocks_used(dataclasses.replace(config, num_blocks=num_blocks), groups) == wanted
    for num_blocks in (10, (9, 8, 5), (9, 7)):
        with pytest.raises(ValueError, match="num_blocks must be at most the caches' "):
            blocks_used(dataclasses.replace(config, num_blocks=num_blocks), groups)


def test_a_pool_is_as_large_as_the_others_of_its_group():
    """A window that holds the longest sequence is none, also in the choice of sizes."""
    config = EngineConfig(64, max_num_seqs=1, max_tokens_per_step=16)
    windows = [None, 63, 64, 65, 16]
    sizes = pool_sizes(windows, 40, 4, config)
    assert sizes == (40, 22, 40, 40, 10)
    assert [group.layers for group in make_groups(caches_of(sizes, 4), windows, 64)] == [(0, 2, 3), (1,), (4,)]


@pytest.mark.parametrize(
    ("caches", "windows", "message"),
    [
        (caches_of([4, 4]), [None], "one entry for each of 2 caches, got 1"),
        (caches_of([4, 4]), [None, 0], "sliding_windows must be positive, layer 1 has 0"),
        (caches_of([4, 5]), [8, 8], "layer 1 has 5 of 16, layer 0 has 4 of 16; only layers with different"),
        (caches_of([4]) + caches_of([4], 8), [None, 8], "all blocks must be of one size: layer 1 has blocks of 8"),
        ([], None, "caches must hold a PagedKVCache a layer, got none"),
    ],
)
def test_groups_that_are_refused(caches, windows, message):
    with pytest.raises(ValueError, match=message):
        make_groups(caches, windows, 100)


def test_a_long_text_takes_a_quarter_of_the_memory():
    """A text of 131,072 tokens runs in a sixth of what one group of layers would need, from its prompt to its end."""
    longest, block_size, most = 131_072, 16, 512
    config = EngineConfig(longest, max_num_seqs=1, max_tokens_per_step=most)
    whole = longest // block_size
    sizes = pool_sizes(GEMMA, whole, block_size, config)
    caches = caches_of(sizes)
    groups = make_groups(caches, GEMMA, longest)
    pools = make_pools(groups, config, block_size, whole)
    scheduler = Scheduler(config, pools)
    prompt = np.random.default_rng(0).integers(0, 50_000, longest - 20).tolist()
    sequence = Sequence(0, 0, SamplingParams(), prompt, len(prompt), longest + 1, 0)
    scheduler.add(sequence)
    held, unread = 0, None
    while (plan := scheduler.schedule()) is not None or unread is not None:
        for each in unread.samples.sequences if unread is not None else ():
            each.tokens.append(7)
        unread = plan
        counts = [manager.counts().held for manager in pools.managers]
        assert counts[1] <= pools.managers[1].most_held <= sizes[0]
        held = max(held, sum(n * group.block_bytes for n, group in zip(counts, groups, strict=True)))
    assert len(sequence.tokens) == longest + 1
    assert scheduler.counters.recomputed == 0
    assert 4 * longest + 22 * 1024 < held <= sum(cache.nbytes for cache in caches) < 0.17 * len(GEMMA) * longest


def test_a_sequence_begins_where_all_groups_have_what_its_next_token_needs():
    """Blocks have 4 tokens; the second window is 6 tokens, so after 12 tokens its group needs tokens 7 and up."""
    config = EngineConfig(32, max_num_seqs=2, max_tokens_per_step=32)
    windows = [None, 6]
    pools = make_pools(make_groups(caches_of([8, 8], 4), windows, 32), config, 4, 8)
    first, again = (Sequence(i, 0, SamplingParams(), list(range(17)), 17, 33, 0) for i in range(2))
    seats = Seats(2)
    assert seats.give(first) == 0
    pools.append({0: 16})
    first.num_computed = 16
    everything, window = (manager.table(0) for manager in pools.managers)
    pools.release_behind(seats)  # they are in the prefix cache first
    assert pools.match(again) == (4, [everything, window[2:]])
    assert pools.managers[1].table(0) == window[2:]
    assert pools.managers[1].counts() == (4, 2, 2)
    prefix = pools.managers[1].prefix

    def forget(block):
        del prefix.block_of[prefix._name_of.pop(block)]

    forget(window[3])
    assert pools.match(again) == (3, [everything[:3], window[1:3]])
    forget(window[1])
    assert pools.match(again) == (1, [everything[:1], window[:1]])
    forget(window[0])
    assert pools.match(again) == (0, [[], []])


def test_a_batch_names_its_groups():
    i32 = {name: np.zeros(1, np.int32) for name in ("token_ids", "positions", "seq_lens")}
    batch = Batch(slot_mapping=("a", "b"), block_tables=("c", "d"), is_decode=True, windows=(None, 6), **i32)
    assert (batch.for_window(6).slot_mapping, batch.for_window(6).block_tables) == ("b", "d")
    assert batch.for_window(999).block_tables == batch.for_window(None).block_tables == "c"
    assert batch.for_window(6).for_window(3).block_tables == "d", "it has no groups any more"
    with pytest.raises(ValueError, match="take the batch that for_window gives"):
        batch.attention_metadata(4)
    with pytest.raises(ValueError, match=r"sliding_window must be one of the engine's \(8, 6\), got 7"):
        dataclasses.replace(batch, windows=(8, 6)).for_window(7)


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("name", ["gemma3"])
def test_tokens_are_those_of_transformers(name):
    """The pools have room for all requests, or one kind of layer has pools that are too small."""
    model, config, _, _ = load_model(folder(name), jnp.float32)
    weights, step = make_step(model)
    found = reference(name)
    sizes = EngineConfig(64, max_num_seqs=4, max_tokens_per_step=16, decode_rows=(4,), mixed_tokens=(16,))
    sizes = dataclasses.replace(sizes, num_host_blocks=16, adjustments=False)
    caches = loop.make_caches(config, pool_sizes(config.sliding_windows, 40, 4, sizes), 4, jnp.float32)
    options = {"sliding_windows": config.sliding_windows, "compiler_options": {"xla_backend_optimization_level": 0}}
    with drawing(Kind.GREEDY):
        engine = Engine(step, weights, caches, sizes, **options)
    most = [cache.num_blocks for cache in caches]
    assert min(most) < max(most)
    params = SamplingParams(max_tokens=len(found.tokens[0]))
    for num_blocks, preemption in ((None, "swap"), ((14, min(most)), "swap"), ((40, 8), "recompute")):
        engine.reset(dataclasses.replace(sizes, num_blocks=num_blocks, preemption=preemption))
        for _ in range(2):  # the second time, prompts are in the prefix cache
            completions = engine.generate(found.prompts, params)
            assert [list(each[0].token_ids) for each in completions] == found.tokens
        stats = engine.stats()
        assert stats.num_swapped + stats.num_recomputed > 0 or num_blocks is None
        assert stats.hit_rate > 0
        assert [pool.num_layers for pool in stats.pools] == [
            sum(window is None for window in config.sliding_windows),
            sum(window is not None for window in config.sliding_windows),
        ]
    drain(engine)
