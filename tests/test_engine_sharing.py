"""Tests shared prefixes: which rows are read together, and that tokens are the same however they are read."""

import dataclasses
import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import bench_shared_prefix
from benchmarks.flashinfer_cascade import Sizes, levels
from examples.attend import decode_attend
from paged_jax import PagedKVCache, allocator
from paged_jax.engine import Engine, EngineConfig, SamplingParams, SharedPrefixes
from paged_jax.engine.sharing import Sharing, find_groups
from tests import engine_model as model
from tests.conftest import QUICK_COMPILE
from tests.engine_checks import BLOCK_SIZE, CONFIG, LONG, NUM_BLOCKS, STEM, drain, tokens_of
from tests.engine_simulation import make_engine
from tests.simulated_tokens import VOCAB, expected_tokens

# Two prefixes of two rows each leave a seat for a row that shares nothing.
SHARING = dataclasses.replace(
    CONFIG, max_num_seqs=5, decode_rows=(5,), max_shared_prefixes=2, least_shared_tokens=1, max_logprobs=None
)


def spared(tables, num_full, rows):
    """How many blocks need not be read again if these rows are read together."""
    limit = min(num_full[row] for row in rows)
    same = [len({tables[row, column] for row in rows}) == 1 for column in range(limit)]
    return (len(rows) - 1) * next((i for i, is_same in enumerate(same) if not is_same), limit)


def partitions(rows):
    """All ways to split rows into groups."""
    if not rows:
        yield []
        return
    first, *others = rows
    for size in range(len(others) + 1):
        for chosen in itertools.combinations(others, size):
            left = [row for row in others if row not in chosen]
            yield from ([[first, *chosen], *rest] for rest in partitions(left))


@pytest.mark.parametrize("seed", range(60))
def test_the_groups_spare_the_most_reads(seed):
    """Compares the groups with all ways to group five rows, whose tables are paths of a random tree."""
    rng = np.random.default_rng(seed)
    tables = np.full((5, 6), -1)
    names = {}
    for row in range(5):
        path = ()
        for column in range(6):
            path = (*path, int(rng.integers(0, 2 if column % 2 else 1 + (seed % 3))))
            tables[row, column] = names.setdefault(path, len(names))
    num_full = rng.integers(0, 7, 5)
    groups = find_groups(tables, num_full)
    rows = [row for group in groups for row in group.rows]
    assert len(set(rows)) == len(rows)
    for group in groups:
        assert len(group.rows) > 1
        assert group.num_spared == spared(tables, num_full, group.rows) > 0
    best = max(sum(spared(tables, num_full, some) for some in split) for split in partitions(list(range(5))))
    assert sum(group.num_spared for group in groups) == best


def test_the_prefixes_that_save_the_most_are_chosen():
    """Of three prefixes, of 1, 3 and 2 blocks, a step has room for two, which save reads of five blocks together."""
    state = allocator.create(num_blocks=32, block_size=4, max_num_seqs=6, max_blocks_per_seq=4)
    state.block_tables[:] = [[row // 2, 8 + row // 2, 16 + row // 2, 24 + row] for row in range(6)]
    state.block_tables[:2, 1:3] = [[28, 29], [30, 31]]
    state.block_tables[4:, 2] = [14, 15]
    state.seq_lens[:] = 16
    blocks = SimpleNamespace(state=state, block_size=4)
    for least, chosen in (20, [([2, 3], 3), ([4, 5], 2)]), (21, []):
        config = dataclasses.replace(SHARING, max_num_seqs=6, decode_rows=(6,), least_shared_tokens=least)
        groups, order = Sharing(config, blocks).find(np.arange(6))
        assert groups == chosen
        assert order.tolist() == ([2, 3, 4, 5, 0, 1] if chosen else list(range(6)))


@pytest.fixture(scope="module")
def the_engine(weights):
    """An engine over the tests' model that reads shared prefixes once."""
    caches = model.make_caches(NUM_BLOCKS, BLOCK_SIZE)
    return Engine(model.step, weights, caches, SHARING, compiler_options=QUICK_COMPILE)


@pytest.mark.parametrize(
    ("prompts", "n", "is_shared"),
    [
        ([[*STEM[:12], i] for i in range(4)], 1, True),
        ([[*STEM[:8], 1], [*STEM[:8], 2], [*LONG[:12], 3], [*LONG[:12], 4, 5], [7]], 1, True),
        ([LONG[:9]], 4, True),
        ([[*STEM[:12], 1], LONG, [*STEM[:12], 2], [7]], 1, True),
        ([[i, *STEM[:9]] for i in range(4)], 1, False),
    ],
    ids=["one prefix", "two prefixes", "samples of one prompt", "beside others", "none"],
)
def test_greedy_tokens_are_those_of_one_by_one_generation(the_engine, reference, prompts, n, is_shared):
    the_engine.reset(SHARING)
    ids = [the_engine.add_request(prompt, SamplingParams(max_tokens=12, n=n)) for prompt in prompts]
    found = tokens_of(drain(the_engine))
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert [found[request_id, index] for index in range(n)] == [reference.greedy(prompt, 12)] * n
    assert (the_engine.stats().num_shared_tokens > 0) == is_shared


def test_few_reads_are_not_worth_it(the_engine):
    """Sharing saves reads of 36 tokens here: it pays if the policy asks for 36, and not if it asks for 37."""
    for least, is_shared in (36, True), (37, False):
        the_engine.reset(dataclasses.replace(SHARING, least_shared_tokens=least))
        prompts = [[*STEM[:12], i] for i in range(4)]
        the_engine.generate(prompts, SamplingParams(max_tokens=6))
        assert (the_engine.stats().num_shared_tokens > 0) == is_shared


def test_what_an_engine_compiles_for_it(the_engine):
    assert the_engine.stats().num_compiled == 4 + 3 + 3, "moves and tables; mixed, decode, sharing; ways to draw"
    none = Engine(
        lambda weights, caches, batch: (jnp.zeros((batch.logit_rows.size, 4)), caches),
        {},
        (PagedKVCache.create(num_blocks=8, block_size=4, num_kv_heads=1, head_size=8),),
        dataclasses.replace(SHARING, num_host_blocks=0),
        sliding_windows=[8],
    )
    assert none._scheduler.sharing is None, "a prefix may be behind the window"


def test_groups_follow_the_sequences():
    """Sequences come, go and get each other's seats: the simulation checks every prefix that is read."""
    config = EngineConfig(64, 4, 16, max_shared_prefixes=2, least_shared_tokens=1)
    engine = make_engine(40, 4, config)
    prompts = [
        [(stem * i) % VOCAB for i in range(16)] + [k % VOCAB] * (1 + k % 3) for k in range(12) for stem in (1, 2)
    ]
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=4 + i % 5)) for i, prompt in enumerate(prompts)]
    found = tokens_of(drain(engine))
    for i, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        assert found[request_id, 0] == expected_tokens(prompt, SamplingParams(max_tokens=4 + i % 5), 0, 65)
    assert engine.stats().num_shared_tokens > 100


@pytest.mark.parametrize("length", [1, 2, 17])
def test_a_sequence_that_gets_another_one_s_seat_shares_nothing_with_its_rows(length):
    """One such sequence's prompt is computed in a step that reads no shared prefix."""
    config = EngineConfig(64, 2, 32, max_shared_prefixes=2, least_shared_tokens=1)
    engine = make_engine(40, 4, config)
    prompts = [[*range(5), *[1] * 12], [*range(5), *[1] * 12], [3] * length]
    counts = 30, 5, 20
    for prompt, count in zip(prompts, counts, strict=True):
        engine.add_request(prompt, SamplingParams(max_tokens=count))
    found = tokens_of(drain(engine))
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        assert found[i, 0] == expected_tokens(prompt, SamplingParams(max_tokens=count), 0, 65)
    assert engine.stats().num_shared_tokens > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"logits_soft_cap": 5.0}, {"sliding_window": 9}, {"alibi_slopes": jnp.ones(4)}, {"sinks": jnp.ones(4)}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_the_examples_attention(options):
    """Layers that look at positions, or have sinks, read each row's whole table."""
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.normal(size=(16, 2, 4, 16)), jnp.float32) for _ in range(2))
    cache = PagedKVCache(key, value)
    new = [jnp.asarray(rng.normal(size=(4, heads, 16)), jnp.float32) for heads in (4, 2, 2)]
    tables = jnp.array([[3, 4, 5], [3, 4, 6], [3, 4, 7], [9, 8, 2]], jnp.int32)
    lens, slots = jnp.array([10, 12, 9, 11], jnp.int32), jnp.array([21, 27, 28, 10], jnp.int32)
    prefixes = SharedPrefixes(
        tables=tables[:2],
        lens=jnp.array([8, 0], jnp.int32),
        start_loc=jnp.array([0, 3, 3], jnp.int32),
        own_tables=jnp.array([[5, 5, 5], [6, 6, 6], [7, 7, 7], [9, 8, 2]], jnp.int32),
        own_lens=jnp.array([2, 4, 1, 11], jnp.int32),
    )
    options |= {"scale": 0.25}
    out, written = decode_attend(tables, lens, slots, prefixes=prefixes)(*new, cache, **options)
    wanted, other = decode_attend(tables, lens, slots)(*new, cache, **options)
    assert (written.key_cache == other.key_cache).all()
    np.testing.assert_allclose(out, wanted, atol=1e-5)


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("num_prefixes", [1, 2])
def test_the_benchmark_checks_its_results(num_prefixes):
    query, cache, sets = bench_shared_prefix.make(Sizes(4, num_prefixes, 32, 20, (4, 2, 16), copies=2))
    for tables, prefixes in sets:
        bench_shared_prefix.check(query, cache, tables, prefixes)
        wrong = dataclasses.replace(prefixes, lens=prefixes.lens - 16)
        with pytest.raises(AssertionError):
            bench_shared_prefix.check(query, cache, tables, wrong)


def test_the_peer_of_the_benchmark_gets_the_same_blocks():
    sizes = Sizes(4, 2, 32, 20, (4, 2, 16), copies=2)
    _, _, sets = bench_shared_prefix.make(sizes)
    for (whole, _), tables in zip(sets, sizes.tables(), strict=True):
        starts, firsts, ids, last = levels(sizes, *tables)
        assert [list(each) for each in starts] == [[0, 2, 4], [0, 1, 2, 3, 4]]
        assert [list(each) for each in last] == [[16, 16], [4, 4, 4, 4]]  # 20 = 16 + 4
        for row in range(4):
            parts = [ids[level][firsts[level][i] : firsts[level][i + 1]] for level, i in ((0, row // 2), (1, row))]
            assert list(np.concatenate(parts)) == list(whole[row])


def test_a_peer_that_dies_leaves_a_reason(monkeypatch):
    monkeypatch.setattr(bench_shared_prefix.sys, "executable", "false")
    sizes = Sizes(4, 2, 32, 20, (4, 2, 16), copies=2)
    assert bench_shared_prefix.peer_answers([sizes, sizes]) == [{"absent": "its process ended early"}] * 2
