"""Tests the engine's parts one by one: plans, prefix cache, sampling."""

import dataclasses
import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import PagedKVCache, PagedLatentCache
from paged_jax.engine import EngineConfig, PoolStats, SamplingParams, Stats
from paged_jax.engine.arrays import SCALES, members, with_own_scales
from paged_jax.engine.batch import Draws, StepShape
from paged_jax.engine.blocks import BlockManager
from paged_jax.engine.compiling import options_of
from paged_jax.engine.groups import most_blocks
from paged_jax.engine.pools import Pools
from paged_jax.engine.prefix import PrefixCache, extend_hashes
from paged_jax.engine.sampling import Kind, draw, keep_top
from paged_jax.engine.scheduler import Scheduler
from paged_jax.engine.seats import Need, Seats
from paged_jax.engine.sequence import Sequence


def plans_digest():
    """Makes a digest of all plans of a schedule that is busy and preempts; no model runs."""
    sizes = {"max_num_seqs": 4, "max_tokens_per_step": 16, "max_prompts_per_step": 2}
    config = EngineConfig(max_model_len=48, **sizes, num_host_blocks=16)
    digest, rng = hashlib.sha256(), np.random.default_rng(3)
    # The second group's layers have a window of 9 tokens.
    groups = [BlockManager(20, 4, 4, 12, 16, True)]
    groups.append(BlockManager(20, 4, 4, 12, 16, True, sliding_window=9, most_held=most_blocks(9, 4, config)))
    scheduler = Scheduler(config, Pools(groups, [1, 5]))
    for i in range(60):
        prompt = [i % 3] * int(rng.integers(1, 20))
        scheduler.add(Sequence(i, 0, SamplingParams(), prompt, len(prompt), len(prompt) + 20, i))
    unread, most = None, []
    while (plan := scheduler.schedule()) is not None or unread is not None:
        if plan is not None:
            rows = [(c.sequence.arrival, c.start, c.num_tokens) for c in plan.chunks]
            most.append(sum(count > 1 for *_, count in rows))
            assert all(count > 1 for *_, count in rows[: most[-1]]), "pieces of prompts come first"
            digest.update(
                repr((rows, plan.swap_out, plan.swap_in, plan.copies, plan.entries, plan.row_blocks.tolist())).encode()
            )
        for sequence in unread.samples.sequences if unread is not None else ():
            sequence.tokens.append(len(sequence.tokens) % 5)
        unread = plan
    assert scheduler.counters.swapped
    assert max(most) == 2
    assert not scheduler.running and not scheduler.waiting  # noqa: PT018
    return digest.hexdigest()


@pytest.mark.parametrize(
    "cache",
    [
        PagedKVCache.create(2, 4, 1, 8, dtype=jnp.int8, k_scale=0.5, v_scale=0.25),
        PagedLatentCache.create(2, 4, 16, dtype=jnp.int8, latent_scale=0.5),
    ],
    ids=lambda cache: type(cache).__name__,
)
def test_an_engine_takes_no_scale_of_its_caller(cache):
    """A step that updates a cache in place deletes the cache's scales, too, which other layers may share."""
    scales = {f.name for f in dataclasses.fields(cache) if f.name.endswith("_scale")}
    assert scales <= set(SCALES)
    (own,) = with_own_scales([cache], [members(cache, SCALES)])
    for name in scales:
        value = float(getattr(own, name))
        getattr(own, name).delete()
        assert float(getattr(cache, name)) == value


def test_every_process_plans_alike():
    code = "from tests.test_engine_parts import plans_digest; print(plans_digest())"
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONHASHSEED": "12345", "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout.split()[-1] == plans_digest()


def make_scheduler(num_blocks, prefix_caching=False, **changes):
    """A scheduler over blocks of 4 tokens."""
    config = EngineConfig(max_model_len=48, max_num_seqs=8, max_tokens_per_step=32, **changes)
    blocks = BlockManager(num_blocks, 4, 8, 12, config.num_host_blocks, prefix_caching)
    return Scheduler(config, Pools([blocks], [1000]))


def add(scheduler, request_id, num_tokens, n=1):
    """Adds a request of this many tokens, all different from those of others, and returns its first sample."""
    tokens = [100 * request_id + i for i in range(num_tokens)]
    samples = [Sequence(request_id, i, SamplingParams(n=n), list(tokens), num_tokens, 48, 0) for i in range(n)]
    samples[0].children = samples[1:]
    scheduler.add(samples[0])
    return samples[0]


@pytest.mark.parametrize("num_tokens", [8, 7])
@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(5, False), (6, True)])
def test_blocks_are_kept_back_for_what_runs(num_blocks, is_admitted, num_tokens):
    """The first sequence has two blocks, and needs a third one now or after this step; one more is kept."""
    scheduler = make_scheduler(num_blocks)
    add(scheduler, 0, num_tokens)
    scheduler.schedule()
    second = add(scheduler, 1, 8)
    scheduler.schedule()
    assert (second in scheduler.running) == is_admitted


@pytest.mark.parametrize(("n", "num_blocks", "is_admitted"), [(1, 4, False), (1, 5, True), (3, 6, False), (3, 7, True)])
def test_blocks_are_kept_back_for_what_is_admitted_in_the_same_step(n, num_blocks, is_admitted):
    """One block is kept back for each sample."""
    scheduler = make_scheduler(num_blocks)
    add(scheduler, 0, 8, n)
    second = add(scheduler, 1, 8)
    scheduler.schedule()
    assert (second in scheduler.running) == is_admitted


def test_a_preempted_sequence_waits_at_its_old_place():
    scheduler = make_scheduler(6)
    first, second, third = (add(scheduler, i, 7) for i in range(3))
    while first.num_tokens < 17:
        plan = scheduler.schedule()
        for sequence in plan.samples.sequences:
            sequence.tokens.append(7)
    assert scheduler.counters.recomputed == 1, "the second one"
    assert scheduler.running == [first]
    assert scheduler.waiting == [second, third]


@pytest.mark.parametrize(("rate", "is_swapped"), [(1.9e3, False), (2.1e3, True)])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_swap_is_estimated_both_ways(rate, is_swapped, prefix_caching):
    """Four blocks of 1,000 bytes move out and in, 8,000 bytes, or 16 tokens are computed again in 4 seconds."""
    rates = {"recompute_tokens_per_second": 4.0, "swap_bytes_per_second": rate}
    scheduler = make_scheduler(12, prefix_caching, num_host_blocks=12, preemption="cheaper", **rates)
    sequence = add(scheduler, 0, 16)
    scheduler.schedule()
    assert scheduler._should_swap(sequence) == is_swapped


def test_a_swap_is_estimated_over_all_groups_of_layers():
    """Each group's blocks have their own size; the group that sees the most says what others hold, too."""
    wide, narrow = BlockManager(9, 4, 3, 9, 0, False), BlockManager(9, 4, 3, 9, 0, False, sliding_window=4)
    blocks = Pools([wide, narrow], [10, 1000])
    blocks.append({0: 12})
    blocks.fork(0, 1)
    narrow.release_behind(narrow.find_behind())
    assert (len(wide.table(0)), len(narrow.table(0))) == (3, 1)
    assert blocks.swapped_bytes(0) == 3 * 10 + 1000
    assert (blocks.count_shared(0), narrow.count_shared(0), blocks.count_shared(2)) == (3, 1, 0)


def test_cached_blocks_of_a_sequence_that_is_shortened_can_be_evicted():
    blocks = BlockManager(4, 4, 2, 4, 0, True)
    blocks.append({0: 13})
    blocks.cache([(0, column, bytes([column])) for column in range(3)])
    blocks.truncate({0: 5})
    assert blocks.counts() == (1, 1, 2)
    assert blocks.append({1: 8}) == []


def test_waste_counts_each_block_once():
    """Two samples share a block that is half full; a third sequence has three of four slots empty."""
    blocks = BlockManager(8, 4, 4, 4, 0, False)
    blocks.append({0: 6})
    blocks.fork(0, 1)
    blocks.append({2: 1})
    assert blocks.counts().held == 3
    assert blocks.waste() == pytest.approx((2 + 3) / 12)


def test_joined_statistics_weigh_what_each_engine_has():
    """The fractions are means over held blocks and over tokens that were looked up."""
    pools = PoolStats(None, 1, 4, 5, 6, 7), PoolStats(9, 5, 20, 8, 9, 1)
    zeros = Stats(**dict.fromkeys((field.name for field in dataclasses.fields(Stats)), 0) | {"pools": pools})
    first = dataclasses.replace(zeros, held_blocks=3, waste=0.5, num_looked_up_tokens=10, hit_rate=0.2, num_steps=4)
    second = dataclasses.replace(zeros, held_blocks=1, waste=0.1, num_looked_up_tokens=30, hit_rate=0.6, num_steps=5)
    joined = Stats.join([first, second])
    assert (joined.held_blocks, joined.num_steps) == (4, 9)
    assert joined.pools == (PoolStats(None, 1, 4, 10, 12, 14), PoolStats(9, 5, 20, 16, 18, 2))
    assert joined.waste == pytest.approx((3 * 0.5 + 0.1) / 4)
    assert joined.hit_rate == pytest.approx((10 * 0.2 + 30 * 0.6) / 40)


def test_a_step_has_no_more_prompts_than_sequences():
    config = EngineConfig(max_model_len=48, max_num_seqs=4)
    assert (config.max_prompts_per_step, config.decode_rows) == (4, (4,))


def test_options_may_depend_on_a_step_s_tokens():
    step = StepShape(16, 4, 3, False, 2)

    def by_tokens(num_tokens):
        return {"tokens": num_tokens}

    assert options_of(step, by_tokens) == {"tokens": 16}
    assert options_of("copy", by_tokens) is None
    assert options_of("copy", {"all": 1}) == options_of(step, {"all": 1}) == {"all": 1}
    assert options_of(step, None) is None


def test_hashes_name_whole_beginnings():
    """A block's name depends on all tokens before it, and on nothing else."""
    names = []
    extend_hashes(names, list(range(10)), 4)
    assert len(names) == 2
    extend_hashes(names, list(range(13)), 4)
    again = []
    extend_hashes(again, list(range(13)), 4)
    assert names == again
    for first in (9, 2**8, 2**16, 2**30):  # all bits of a token count
        other = []
        extend_hashes(other, [first, *range(1, 13)], 4)
        assert not set(names) & set(other)


def test_the_least_recently_used_block_is_evicted_first_and_a_chain_from_its_end():
    cache, names = PrefixCache(), [bytes([i]) for i in range(4)]
    assert all(cache.insert(name, block) for block, name in enumerate(names))
    assert not cache.insert(names[0], 9), "the name is taken"
    assert 9 not in cache
    assert cache.evict(4) == [], "sequences hold all of them"
    cache.disuse([2, 1, 0])
    cache.disuse([7])  # was never in the cache
    assert cache.num_unused == cache.count_unused([0, 1, 2, 3]) == 3
    cache.use([cache.block_of[names[0]]])
    cache.disuse([0])
    assert cache.evict(2) == [2, 1]
    assert cache.count_cached(names) == 1
    assert cache.evict(9) == [0]
    assert len(cache) == 1


def test_a_sequence_s_last_blocks_are_evicted_first():
    """After blocks of a finished sequence were evicted, an equal sequence computes only these blocks again."""
    blocks = Pools([BlockManager(6, 4, 2, 6, 0, True)], [1])
    first, again = (Sequence(i, 0, SamplingParams(), list(range(20)), 20, 30, 0) for i in range(2))
    blocks.append({0: 20})
    seats = Seats(2)
    assert seats.give(first) == 0
    first.num_computed = 20
    blocks.cache_full_blocks(seats)
    held = blocks.managers[0].table(0)
    blocks.release(0)
    blocks.append({1: 11})  # one block is free, so that two are evicted
    assert blocks.match(again) == (3, [held[:3]])


def test_top_k_and_top_p_keep_what_sorting_would():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, 50)).astype(np.float32) * 3
    top_k = rng.integers(0, 60, 40).astype(np.int32)
    top_p = np.where(rng.random(40) < 0.3, 1.0, rng.uniform(0.05, 1.0, 40)).astype(np.float32)
    kept = np.asarray(keep_top(logits, top_k, top_p))
    for row in range(40):
        order = np.argsort(-logits[row])
        stays = order[: top_k[row] or 50]
        p = np.exp(logits[row, stays].astype(np.float64))
        before = np.cumsum(p / p.sum()) - p / p.sum()
        expected = set(stays[(before < top_p[row]) | (top_p[row] >= 1)].tolist())
        assert set(kept[row].nonzero()[0].tolist()) == expected
    ties = np.array([[1.0, 3.0, 3.0, 2.0, -np.inf]], np.float32)
    assert np.asarray(keep_top(ties, np.array([1]), np.ones(1, np.float32))).tolist() == [[0, 1, 1, 0, 0]]


def test_a_tiny_top_p_keeps_the_most_likely_token():
    """The smallest top_p here is 0 in float32."""
    logits = np.array([[1.0, 3.0, 2.0]] * 3, np.float32)
    top_p = np.array([1e-6, 1e-40, 1e-50], np.float32)
    assert np.asarray(keep_top(logits, np.zeros(3, np.int32), top_p)).tolist() == [[0, 1, 0]] * 3


def draws(num_rows, **changes):
    """Makes the rows' sampling parameters: temperature 1 without top-k or top-p, unless they are given."""
    fields = {name: jnp.zeros(num_rows, jnp.int32) for name in ("seats", "top_k", "seed_high", "seed_low", "index")}
    fields |= {name: jnp.ones(num_rows, jnp.float32) for name in ("temperature", "top_p")}
    fields |= {"position": jnp.arange(num_rows, dtype=jnp.int32), "scored": jnp.full(num_rows, -1, jnp.int32)}
    return Draws(**(fields | changes))


def test_draws_follow_the_probabilities():
    n, logits = 4000, np.array([2.0, 1.0, 0.0, -1.0, -30.0], np.float32)
    rows = jnp.asarray(np.tile(logits, (n, 1)))
    for temperature in (1.0, 0.5):
        how = draws(n, temperature=jnp.full(n, temperature, jnp.float32))
        counts = np.bincount(np.asarray(draw(rows, how, Kind.RANDOM, 0).token_ids), minlength=5)
        p = np.asarray(jax.nn.softmax(logits / temperature))
        assert np.abs(counts / n - p).max() < 4 * np.sqrt(0.25 / n)


@pytest.mark.parametrize("temperature", [1e-6, 2e-38, 1e-40, 1e-50])
def test_a_tiny_temperature_takes_the_most_likely_token(temperature):
    """Logits that overflow in the division stay distinct; -inf still forbids a token."""
    logits = jnp.asarray([[5.0, 20.0, 30.0, -jnp.inf]] * 8, jnp.float32)
    how = draws(8, temperature=jnp.full(8, temperature, jnp.float32))
    assert draw(logits, how, Kind.RANDOM, 0).token_ids.tolist() == [2] * 8


@pytest.mark.parametrize("temperature", [1e30, 3e38])
@pytest.mark.parametrize("limits", [{}, {"top_k": 2}, {"top_p": 0.9}])
def test_a_huge_temperature_draws_no_forbidden_token(temperature, limits):
    logits = jnp.asarray([[-jnp.inf, 10.0, 20.0, -1e31]] * 64, jnp.float32)
    given = {name: jnp.full(64, value, jnp.float32 if name == "top_p" else jnp.int32) for name, value in limits.items()}
    how = draws(64, temperature=jnp.full(64, temperature, jnp.float32), **given)
    assert set(draw(logits, how, Kind.TOP if limits else Kind.RANDOM, 0).token_ids.tolist()) == {1, 2}


def test_only_rows_with_limits_pay_for_them():
    """The search for thresholds is a loop. Without limits a row's token is the same in both programs."""
    logits = jax.random.normal(jax.random.key(0), (64, 1000))
    how = draws(64, temperature=jnp.full(64, 0.7, jnp.float32))
    ids = [np.asarray(draw(logits, how, kind, 0).token_ids) for kind in (Kind.RANDOM, Kind.TOP)]
    np.testing.assert_array_equal(*ids)
    for kind, has_loop in ((Kind.RANDOM, False), (Kind.TOP, True)):
        assert (
            " scan[" in str(jax.make_jaxpr(lambda x, how, kind=kind: draw(x, how, kind, 0))(logits, how))
        ) == has_loop
    needs = {}
    for name, params in {
        "drawn": {"temperature": 1.0},
        "greedy": {"top_k": 5},
        "top_k": {"temperature": 1.0, "top_k": 5},
        "top_p": {"temperature": 1.0, "top_p": 0.5},
    }.items():
        needs[name] = Kind.of(Need.of(Sequence(0, 0, SamplingParams(**params), [1], 1, 8, 0)))
    assert needs == {"drawn": Kind.RANDOM, "greedy": Kind.GREEDY, "top_k": Kind.TOP, "top_p": Kind.TOP}


@pytest.mark.parametrize("name", ["seed_high", "seed_low", "index", "position"])
def test_draws_depend_on_seed_index_and_position(name):
    logits = jnp.zeros((64, 1000), jnp.float32)
    same = draws(64, position=jnp.full(64, 7, jnp.int32))
    ids = np.asarray(draw(logits, same, Kind.RANDOM, 0).token_ids)
    assert len(set(ids.tolist())) == 1, "all rows ask alike"
    changed = draws(64, **({"position": jnp.full(64, 7, jnp.int32)} | {name: jnp.arange(64, dtype=jnp.int32)}))
    ids = np.asarray(draw(logits, changed, Kind.RANDOM, 0).token_ids)
    assert len(set(ids.tolist())) > 50


@pytest.mark.parametrize("names", list(itertools.combinations(["seed_high", "seed_low", "index", "position"], 2)))
def test_draws_depend_on_more_than_a_sum(names):
    """A sample's draws are not those of the next sample one token later, nor those of a neighbouring seed."""
    rising = jnp.arange(64, dtype=jnp.int32)
    how = draws(64, **({"position": jnp.zeros(64, jnp.int32)} | dict(zip(names, (rising, 63 - rising), strict=True))))
    ids = np.asarray(draw(jnp.zeros((64, 1000), jnp.float32), how, Kind.RANDOM, 0).token_ids)
    assert len(set(ids.tolist())) > 50
