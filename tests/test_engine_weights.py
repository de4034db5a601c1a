"""Tests `update_weights`: an engine goes on with other arrays, and uses nothing that the old ones computed."""

import concurrent.futures
import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from paged_jax.engine import Completion, EngineConfig, EngineFailed, ReplicaFailed, Replicas, SamplingParams
from paged_jax.engine.weights import check_weights
from tests import engine_model as model
from tests.engine_checks import PROMPTS, check_blocks, drain, tokens_of
from tests.engine_simulation import make_engine
from tests.simulated_tokens import VOCAB, expected_tokens
from tests.test_engine_failures import fail_at

SIMULATED = EngineConfig(max_model_len=32, max_num_seqs=4, max_tokens_per_step=8, num_host_blocks=8)


@pytest.fixture(scope="module")
def others():
    """Other weights."""
    return model.make_weights(seed=1)


@pytest.fixture(scope="module")
def other_reference(others):
    """The model with the other weights, without an engine."""
    return model.Reference(others)


@pytest.fixture
def engine(the_engine, config, weights):
    """The shared engine, which gets its weights back."""
    the_engine.reset(config)
    yield the_engine
    the_engine.reset(config)
    the_engine.update_weights(weights)


def logprob(reference, tokens):
    """The log-probability of the last token."""
    return float(jax.nn.log_softmax(reference.logits(tokens[:-1]))[tokens[-1]])


def test_running_requests_go_on_with_the_new_weights(engine, reference, others, other_reference):
    """The weights that drew a token give the same token and log-probability after the same tokens."""
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=9, logprobs=0)) for prompt in PROMPTS[:4]]
    deltas = [delta for _ in range(4) for delta in engine.step()]
    num_compiled = engine.stats().num_compiled
    num_old = {s.request_id: s.num_tokens - s.num_prompt for s in engine._scheduler.running}
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(others)]
    engine.update_weights(others)
    assert engine.stats().free_blocks == engine._blocks.num_blocks
    deltas += drain(engine)
    used = jax.tree.leaves(engine._runner._weights)
    assert all(a is b for a, b in zip(used, jax.tree.leaves(others), strict=True))
    assert [leaf.unsafe_buffer_pointer() for leaf in used] == pointers
    assert engine.stats().num_compiled == num_compiled
    assert not any(delta.is_restarted for delta in deltas)
    assert min(num_old.values()) > 0
    for request_id, prompt in zip(ids, PROMPTS[:4], strict=True):
        mine = [delta for delta in deltas if delta.request_id == request_id]
        tokens, count = [delta.token_ids[0] for delta in mine], num_old[request_id]
        assert tuple(tokens[:count]) == reference.greedy(prompt, count)
        assert tuple(tokens[count:]) == other_reference.greedy([*prompt, *tokens[:count]], 9 - count)
        for i, delta in enumerate(mine):
            by = reference if i < count else other_reference
            assert delta.logprobs[0].logprob == pytest.approx(logprob(by, [*prompt, *tokens[: i + 1]]), abs=1e-4)


def test_running_requests_begin_again(engine, reference, others, other_reference):
    """All samples of a request begin again, with their text and log-probabilities; a request that has ended is kept."""
    params = SamplingParams(max_tokens=8, n=2, logprobs=0, prompt_logprobs=0)
    short = engine.add_request(PROMPTS[6], SamplingParams(max_tokens=2))
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS[1:3]]
    deltas = []
    while not deltas or deltas[-1].request_id == short:
        deltas += engine.step()
    engine.update_weights(others, running="restart")
    deltas += drain(engine)
    found = tokens_of(deltas)
    assert found[short, 0] == reference.greedy(PROMPTS[6], 2)
    for request_id, prompt in zip(ids, PROMPTS[1:3], strict=True):
        for index in range(2):
            mine = [delta for delta in deltas if (delta.request_id, delta.index) == (request_id, index)]
            done = Completion.join(mine)
            assert done.token_ids == found[request_id, index] == other_reference.greedy(prompt, 8)
            assert done.text == "".join(f"{token:x}." for token in done.token_ids)
            assert len(done.logprobs) == 8
            scores = [item.logprob for item in done.prompt_logprobs]
            wanted = [logprob(other_reference, prompt[: i + 1]) for i in range(1, len(prompt))] if not index else []
            assert scores == pytest.approx(wanted, abs=1e-4)
    assert sum(delta.is_restarted for delta in deltas) > 0


def test_requests_begin_again_twice():
    """Tokens before the last restart are void, and no request that has no token yet begins again."""
    engine, params = make_engine(16, 4, SIMULATED), SamplingParams(max_tokens=8)
    prompts = [[i % VOCAB, 3, 1] for i in range(3)]
    ids = [engine.add_request(prompt, params) for prompt in prompts[:2]]
    engine.update_weights({"salt": 1}, running="restart")
    deltas = []
    for salt in (2, 3):
        deltas += [delta for _ in range(4) for delta in engine.step()]
        engine.update_weights({"salt": salt}, running="restart")
    ids.append(engine.add_request(prompts[2], params))
    deltas += drain(engine)
    for request_id, prompt, count in zip(ids, prompts, (2, 2, 0), strict=True):
        mine = [delta for delta in deltas if delta.request_id == request_id]
        assert Completion.join(mine).token_ids == expected_tokens(prompt, params, 0, 33, salts=((0, 3),))
        assert sum(delta.is_restarted for delta in mine) == count


def test_a_restart_outlasts_an_update_with_which_requests_go_on():
    engine, params = make_engine(16, 4, SIMULATED), SamplingParams(max_tokens=8)
    engine.add_request([1, 3, 1], params)
    deltas = [delta for _ in range(4) for delta in engine.step()]
    engine.update_weights({"salt": 1}, running="restart")
    engine.update_weights({"salt": 2})
    deltas += drain(engine)
    assert Completion.join(deltas).token_ids == expected_tokens([1, 3, 1], params, 0, 33, salts=((0, 2),))
    assert [delta.is_restarted for delta in deltas].count(True) == 1


def test_what_is_told_of_the_prefix_cache_holds_for_the_new_weights():
    """A request that begins again, and finds nothing then, tells no number of cached tokens from before."""
    engine, params, prompt = make_engine(16, 4, SIMULATED), SamplingParams(max_tokens=6), [1, 2, 3, 4, 5, 6]
    engine.generate([prompt], params)
    engine.add_request(prompt, params)
    told = [delta.num_cached_tokens for _ in range(3) for delta in engine.step()]
    engine.update_weights({"salt": 1}, running="restart")
    assert (set(told), {delta.num_cached_tokens for delta in drain(engine)}) == ({4}, {0})


def test_no_block_of_the_old_weights_is_found(engine, others, other_reference):
    """This holds for blocks of the prefix cache and for blocks that a running request filled."""
    engine.generate(PROMPTS, SamplingParams(max_tokens=3))
    engine.add_request(PROMPTS[7], SamplingParams(max_tokens=3))
    engine.step()
    assert engine.stats().cached_blocks > 0
    engine.update_weights(others)
    assert engine.stats().cached_blocks == engine.stats().held_blocks == 0
    drain(engine)
    results = engine.generate(PROMPTS, SamplingParams(max_tokens=9))
    assert [result.token_ids for (result,) in results] == [other_reference.greedy(prompt, 9) for prompt in PROMPTS]


def test_what_is_swapped_out_is_computed_again(engine, config, others, other_reference):
    engine.reset(dataclasses.replace(config, num_blocks=9, preemption="swap", prefix_caching=False))
    ids = [engine.add_request(PROMPTS[i], SamplingParams(max_tokens=16)) for i in (7, 5, 3, 6)]
    deltas = []
    while not any(s.host_blocks for s in engine._scheduler.waiting):
        deltas += engine.step()
    tokens = {s.request_id: tuple(s.tokens) for s in engine._scheduler.waiting if s.host_blocks}
    engine.update_weights(others)
    check_blocks(engine)
    assert len(engine._blocks.managers[0].free_host_blocks) == config.num_host_blocks
    found = tokens_of(deltas + drain(engine))
    for request_id, i in zip(ids, (7, 5, 3, 6), strict=True):
        if request_id in tokens:
            old = tokens[request_id][len(PROMPTS[i]) :]
            assert found[request_id, 0] == old + other_reference.greedy(tokens[request_id], 16 - len(old))


def change(tree, path, value):
    """A copy of a tree with another value at a path; a path that ends in None is removed."""
    if len(path) > 1:
        value = change(tree[path[0]], path[1:], value)
    items = dict(enumerate(tree)) if isinstance(tree, list) else dict(tree)
    items = {key: item for key, item in items.items() if key != path[0]} if value is None else items | {path[0]: value}
    return list(items.values()) if isinstance(tree, list) else items


QUERY = "layers", 1, "q"
HALF, FLAT, DELETED = jnp.zeros((32, 32), jnp.float16), jnp.zeros(1024), jnp.zeros((32, 32))
DELETED.delete()
ELSEWHERE = jax.device_put(np.zeros((32, 32), np.float32), jax.devices("cpu")[1])


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (QUERY, HALF, r"weights\['layers'\]\[1\]\['q'\] must be of dtype float32, as the engine's is, got float16"),
        (QUERY, FLAT, r"weights\['layers'\]\[1\]\['q'\] must be of shape \(32, 32\), as .*, got \(1024,\)"),
        (QUERY, np.zeros((32, 32), np.float32), r"\['layers'\]\[1\]\['q'\] must be a JAX array, got ndarray"),
        (QUERY, DELETED, r"\['layers'\]\[1\]\['q'\] has been deleted or donated"),
        (QUERY, ELSEWHERE, r"\['layers'\]\[1\]\['q'\] must lie where the engine's does: .*, got .*"),
        (QUERY, None, r"weights\['layers'\]\[1\]\['q'\] is missing"),
        (QUERY, (), r"weights\['layers'\]\[1\]\['q'\] must be of type ArrayImpl, got tuple"),
        (("layers", 0, "bias"), FLAT, r"weights\['layers'\]\[0\]\['bias'\] is not known"),
        (("layers",), (1, 2), r"weights\['layers'\] must be of type list, got tuple"),
    ],
)
def test_other_trees_and_arrays_are_refused(the_engine, weights, path, value, message):
    with pytest.raises(ValueError, match=message):
        the_engine.update_weights(change(weights, path, value))
    assert the_engine._runner._weights is weights
    assert not the_engine.has_failed


MESH, ONE = (jax.sharding.Mesh(jax.devices("cpu")[:n], "tp") for n in (2, 1))
AT = functools.partial(NamedSharding, MESH)


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        (AT(P("tp")), AT(P("tp", None)), True),
        (AT(P()), AT(P(None, None)), True),
        (SingleDeviceSharding(jax.devices("cpu")[0]), NamedSharding(ONE, P("tp")), True),
        (AT(P("tp")), AT(P(None, "tp")), False),
        (AT(P("tp")), AT(P()), False),
    ],
    ids=["None at the end", "None for all", "a mesh of one", "another axis", "all of it"],
)
def test_arrays_may_lie_where_the_old_ones_do_under_another_name(old, new, is_same):
    olds, news = ({"w": jax.device_put(np.zeros((2, 2), np.float32), at)} for at in (old, new))
    with contextlib.nullcontext() if is_same else pytest.raises(ValueError, match=r"\['w'\] must lie where"):
        check_weights(news, olds)


def test_other_ways_to_go_on_are_refused(the_engine, weights):
    with pytest.raises(ValueError, match=r'running must be "continue" or "restart", got .stop.'):
        the_engine.update_weights(weights, running="stop")


def test_an_engine_that_has_failed_takes_no_weights():
    engine = make_engine(16, 4, SIMULATED)
    fail_at(engine, "model", 1, RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate([[1]])
    with pytest.raises(EngineFailed, match=r"needs a reset\(\)"):
        engine.update_weights({"salt": 1})


@pytest.mark.parametrize("running", ["continue", "restart"])
def test_replicas_take_weights_for_each_engine(running):
    """An engine whose step failed takes them too; running steps end under the old weights."""
    replicas = Replicas([make_engine(16, 4, SIMULATED) for _ in range(3)])
    engines = [replica.engine for replica in replicas._replicas]
    prompts = [[i % VOCAB, 3, 1] for i in range(3)]
    ids = [replicas.add_request(prompt, SamplingParams(max_tokens=12)) for prompt in prompts]
    deltas = [delta for _ in range(6) for delta in replicas.step()]
    with pytest.raises(ValueError, match="a list of weights, one for each of its 3 engines"):
        replicas.update_weights({"salt": 5})
    with pytest.raises(ValueError, match=r"replica 1: weights\['salt'\] is missing"):
        replicas.update_weights([{"salt": 5}, {}, {"salt": 5}])
    concurrent.futures.wait([replicas._replicas[2].running] if replicas._replicas[2].running else [])
    replicas._replicas[2].running = failed = concurrent.futures.Future()
    failed.set_exception(RuntimeError("out of memory"))
    engines[2]._failure = "step raised RuntimeError: out of memory"
    replicas.update_weights([{"salt": 5}] * 3, running=running)
    assert [engine._runner._weights for engine in engines] == [{"salt": 5}] * 3
    counts = [sum(len(delta.token_ids) for delta in deltas if delta.request_id == i) for i in ids]
    while replicas.has_work:
        with contextlib.suppress(ReplicaFailed):
            deltas += replicas.step()
    assert not engines[2].has_failed
    found = tokens_of(deltas)
    for request_id, prompt in zip(ids[:2], prompts[:2], strict=True):
        wanted = [
            expected_tokens(prompt, SamplingParams(max_tokens=12), 0, 33, salts=((0, 0), (count, 5)))
            for count in range(counts[request_id], counts[request_id] + 3)
        ]
        if running == "restart":
            wanted = [expected_tokens(prompt, SamplingParams(max_tokens=12), 0, 33, salts=((0, 5),))]
        assert found[request_id, 0] in wanted
