"""Generation end to end: examples/loop.py and attend.py against the same model without any cache."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import generate, loop
from examples.attend import causal_attend
from examples.checkpoint import load_model
from examples.decoder import Decoder

# One shape for almost everything: three prompts of 64 tokens at most, 21 blocks of 8 slots.
PROMPTS = ["The assert statement ", "x", "In Python, a list is"]
BLOCK_SIZE, NUM_BLOCKS, MAX_NEW_TOKENS = 8, 21, 40


@pytest.fixture(scope="module")
def tiny():
    model, config, tokenizer, eos_token_ids = load_model(generate.TINY, jnp.float32)
    assert eos_token_ids == (256,)
    config = dataclasses.replace(config, layers=config.layers[:1])  # quick to compile
    model.layers, model.config = nnx.List(list(model.layers)[:1]), config
    return model, config, tokenizer


@pytest.fixture(scope="module")
def programs(tiny):
    return loop.make_programs(tiny[0])


@pytest.fixture(scope="module")
def no_cache(tiny):
    """Greedy generation by running the model over the whole text again for every token."""
    model, config, _ = tiny
    positions = jnp.arange(128, dtype=jnp.int32)

    @jax.jit
    def next_token(token_ids, num_tokens):
        hidden, _ = model(token_ids, positions, (None,) * config.num_layers, causal_attend())
        return jnp.argmax(model.logits(hidden[num_tokens - 1][None]))

    def continue_prompt(prompt_ids, num_new):
        ids = list(prompt_ids)
        for _ in range(num_new):
            padded = np.zeros(128, np.int32)
            padded[: len(ids)] = ids
            ids.append(int(next_token(padded, np.int32(len(ids)))))
        return ids[len(prompt_ids) :]

    return continue_prompt


@pytest.fixture(scope="module")
def expected(no_cache):
    """The tokens that follow PROMPTS without a cache."""
    return [no_cache(text.encode(), MAX_NEW_TOKENS) for text in PROMPTS]


def make_request(prompts, *, stop=300, **options):
    """A request of the one shape; 300 is no token of the vocabulary."""
    token_ids = [list(text.encode()) for text in prompts]
    options = {"max_position_embeddings": 512, "max_new_tokens": MAX_NEW_TOKENS} | options
    return loop.make_request(token_ids, stop_token_ids=[stop], **options)


def make_caches(config, num_blocks=NUM_BLOCKS):
    """Poisoned: whatever is read without having been written shows."""
    caches = loop.make_caches(config, num_blocks, BLOCK_SIZE, jnp.float32)
    return jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), caches)


def generation_of(tiny, programs, request):
    return programs.generate(programs.weights, make_caches(tiny[1]), request)


def test_paged_generation_equals_generation_without_a_cache(tiny, programs, expected):
    generation = generation_of(tiny, programs, make_request(PROMPTS))
    assert loop.outputs(generation) == [(ids, "length") for ids in expected]
    prompt_lens = np.array([len(text) for text in PROMPTS])
    seq_lens = prompt_lens + MAX_NEW_TOKENS - 1  # the last token never enters the cache
    assert generation.allocator.seq_lens.tolist() == seq_lens.tolist()
    assert int(generation.allocator.num_free) == NUM_BLOCKS - (-(-seq_lens // BLOCK_SIZE)).sum()
    assert not generation.allocator.bad_free


def test_each_prompt_alone_gives_the_same(tiny, expected):
    programs = loop.make_programs(tiny[0])
    for text, ids in zip(PROMPTS, expected, strict=True):
        assert loop.outputs(generation_of(tiny, programs, make_request([text]))) == [(ids, "length")]
    assert programs.generate._cache_size() == 1


def test_a_stop_token_ends_its_sequence_and_no_other(tiny, programs, expected):
    def cut(ids, stop):
        return (ids[: ids.index(stop) + 1], "stop") if stop in ids else (ids, "length")

    # A token that ends some sequences early and others later or never.
    lengths = {stop: [len(cut(ids, stop)[0]) for ids in expected] for ids in expected for stop in ids}
    stop = max(lengths, key=lambda token: np.ptp(lengths[token]))
    assert np.ptp(lengths[stop]) > 3
    generation = generation_of(tiny, programs, make_request(PROMPTS, stop=stop))
    assert loop.outputs(generation) == [cut(ids, stop) for ids in expected]
    cached = [len(text) + n - 1 for text, n in zip(PROMPTS, lengths[stop], strict=True)]
    assert generation.allocator.seq_lens.tolist() == cached  # finished sequences took no more slots


def test_running_out_of_blocks_ends_all_that_still_run(tiny, programs, no_cache):
    prompts = ["The try statement spec", "Class definitions are", "A mapping object maps"]
    lens = np.array([len(text) for text in prompts])
    num_cached = max(n for n in range(99) if (-(-(lens + n) // BLOCK_SIZE)).sum() <= NUM_BLOCKS)
    assert 0 < num_cached < MAX_NEW_TOKENS - 1
    generation = generation_of(tiny, programs, make_request(prompts))
    expected = [(no_cache(text.encode(), num_cached + 1), "blocks") for text in prompts]
    assert loop.outputs(generation) == expected
    assert (generation.allocator.seq_lens == lens + num_cached).all()


def test_no_room_is_made_for_tokens_past_the_last_position():
    request = make_request(PROMPTS, max_new_tokens=2**31 - 1)
    assert request.max_new_tokens == 512 - min(map(len, PROMPTS)) + 1 == request.max_output_lens.max()


def test_the_last_position_ends_a_sequence(tiny, programs, expected):
    request = make_request(PROMPTS)
    short = make_request(PROMPTS, max_position_embeddings=50)
    assert short.max_seq_len == 50
    request = dataclasses.replace(request, max_output_lens=short.max_output_lens)  # of the compiled shape
    cut = [(ids[: 50 - len(text) + 1], "length") for text, ids in zip(PROMPTS, expected, strict=True)]
    assert [len(ids) for ids, _ in cut] == [30, 40, 31]
    assert loop.outputs(generation_of(tiny, programs, request)) == cut


@pytest.mark.slow_on_cpu
def test_step_by_step_gives_the_same_tokens(tiny, programs):
    sampling = loop.Sampling(0.9, top_k=20, top_p=0.95)
    request = make_request(PROMPTS, sampling=sampling, seed=3, stop=ord("s"))
    at_once = loop.outputs(generation_of(tiny, programs, request))
    generation = programs.prefill(programs.weights, make_caches(tiny[1]), request)
    seen = [[] for _ in PROMPTS]
    while True:
        for tokens, (ids, _) in zip(seen, loop.outputs(generation), strict=True):
            assert len(ids) - len(tokens) in (0, 1)
            tokens += ids[len(tokens) :]
        if not loop.is_running(generation):
            break
        generation = programs.decode(programs.weights, generation, request)
    assert loop.outputs(generation) == at_once
    assert seen == [ids for ids, _ in at_once]


def test_a_greedy_program_draws_no_random_numbers(tiny, programs):
    def lowered(temperature):
        request = make_request(PROMPTS, sampling=loop.Sampling(temperature))
        return programs.generate.lower(programs.weights, make_caches(tiny[1]), request).as_text()

    assert "threefry" in lowered(1.0)
    assert "threefry" not in lowered(0.0)


def test_a_stop_token_at_the_last_place_is_a_stop():
    request = loop.make_request([[1], [1]], max_new_tokens=1, max_position_embeddings=64, stop_token_ids=(5,))
    zeros = jnp.zeros(2, jnp.int32)
    before = loop.Generation(None, (), zeros, zeros[:, None], zeros, jnp.full(2, loop.RUNNING), jnp.int32(0))
    after = loop._add_tokens(before, jax.nn.one_hot(jnp.array([5, 6]), 8), request)
    assert loop.outputs(after) == [([5], "stop"), ([6], "length")]


def test_every_step_and_every_seed_draws_anew(tiny, programs):
    def tokens(seed):
        sampling = loop.Sampling(temperature=1e6)  # all tokens alike, so that only the random numbers decide
        request = make_request(PROMPTS, sampling=sampling, seed=seed)
        return [ids for ids, _ in loop.outputs(generation_of(tiny, programs, request))]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert all(len(set(ids)) > 30 for ids in tokens(1))
    assert len(set(map(tuple, tokens(1)))) == len(PROMPTS)


def test_compiled_once_for_varying_lengths_and_options(tiny, programs):
    """Once for greedy requests, and once for all others."""
    generation_of(tiny, programs, make_request(PROMPTS))
    generation_of(tiny, programs, make_request(PROMPTS, sampling=loop.Sampling(1.0)))
    before = programs.generate._cache_size()
    for lens in (1, 1, 1), (7, 8, 9), (30, 2, 32), (2, 61, 1):
        sampling = loop.Sampling(0.5 * lens[0], lens[1], 0.9)
        request = make_request(["a" * n for n in lens], sampling=sampling, seed=lens[2], stop=lens[0])
        results = loop.outputs(generation_of(tiny, programs, request))
        assert all(ids for ids, _ in results)
    assert programs.generate._cache_size() == before == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["generate", "decode"])
def test_every_pool_is_aliased_and_none_copied(tiny, name):
    """A second copy of a pool would show as bytes that alias nothing, as temporaries, or as an instruction."""
    num_blocks = 4096
    config = tiny[1]
    programs = loop.make_programs(Decoder(config, rngs=nnx.Rngs(1)))
    request = make_request(PROMPTS)
    caches = jax.eval_shape(lambda: loop.make_caches(config, num_blocks, BLOCK_SIZE, jnp.float32))
    arguments = [programs.weights, caches, request]
    if name == "decode":
        arguments[1] = jax.eval_shape(programs.prefill, *arguments)
    compiled = getattr(programs, name).lower(*arguments).compile()

    pools = [pool for cache in caches for pool in (cache.key_cache, cache.value_cache)]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(pool.size * pool.dtype.itemsize for pool in pools)
    assert memory.temp_size_in_bytes < pools[0].size * pools[0].dtype.itemsize
    shape = re.escape(f"f32[{','.join(map(str, pools[0].shape))}]")
    hlo = compiled.as_text()
    assert re.search(rf"= {shape}\S* (fusion|scatter)\(", hlo), "the pools are not where this test looks for them"
    assert not re.search(rf"= {shape}\S* (copy|copy-start|transpose|concatenate)\(", hlo)


def test_scales_hold_the_prompts_keys_and_values(tiny, programs):
    """The scales leave some room above each head's largest value, whatever the blocks are."""
    _, config, _ = tiny
    request = make_request(PROMPTS)
    caches = programs.prefill(programs.weights, make_caches(config), request).caches
    num_slots = sum(map(len, PROMPTS))
    scales = loop.measure_scales(programs, config, request, 16, jnp.float32)
    for cache, pair in zip(caches, scales, strict=True):
        for pool, scale in zip((cache.key_cache, cache.value_cache), pair, strict=True):
            heads = np.moveaxis(np.asarray(pool), 1, 0).reshape(config.num_kv_heads, -1, config.head_size)
            written = np.isfinite(heads).all(axis=2)
            assert (written.sum(axis=1) == num_slots).all()
            largest = np.abs(np.where(written[..., None], heads, 0)).max(axis=(1, 2))
            np.testing.assert_allclose(127 * np.asarray(scale), 1.25 * largest, rtol=1e-6)


@pytest.mark.slow_on_cpu
def test_an_int8_cache_changes_little(tiny, programs, expected):
    """Most of the greedy tokens stay; a cache of zeros, or of scales that are far off, would leave none."""
    _, config, _ = tiny
    request = make_request(PROMPTS)
    scales = loop.measure_scales(programs, config, request, BLOCK_SIZE, jnp.float32)
    caches = loop.make_caches(config, NUM_BLOCKS, BLOCK_SIZE, jnp.int8, scales=scales)
    outputs = loop.outputs(programs.generate(programs.weights, caches, request))
    pairs = [zip(ids, exact, strict=True) for (ids, _), exact in zip(outputs, expected, strict=True)]
    same = [len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], tokens))) for tokens in pairs]
    assert sum(same) > len(PROMPTS) * MAX_NEW_TOKENS / 2, same
