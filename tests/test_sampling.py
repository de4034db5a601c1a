"""Tests examples/sampling.py: greedy choices exactly, draws against the distribution that they must have."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples.sampling import _cut, _cut_all, cut_candidates, greedy, sample
from examples.sharding import make_mesh

NUM_DRAWS = 20_000
VOCAB_SIZE = 12


@pytest.fixture(scope="module")
def logits():
    """Makes one row whose probabilities all differ and are in no order."""
    return jax.random.permutation(jax.random.key(1), jnp.linspace(-2.0, 2.0, VOCAB_SIZE))


jitted = jax.jit(sample)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1.2e-38])
def test_cold_draws_take_the_likeliest_token(temperature):
    logits = jnp.array([[10.0, 20.0, 15.0]])
    assert jitted(logits, jax.random.key(0), temperature=temperature).tolist() == [1]
    assert jitted(logits, jax.random.key(0), temperature=temperature, top_k=2).tolist() == [1]


@pytest.mark.parametrize("temperature", [1e30, 1e38, 3e38, float(np.finfo(np.float32).max)])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.9}])
def test_hot_draws_take_no_forbidden_token(temperature, options):
    logits = jnp.tile(jnp.array([[-jnp.inf, 10.0, 20.0, -1e31]]), (64, 1))
    drawn = jitted(logits, jax.random.key(0), temperature=temperature, **options)
    assert set(drawn.tolist()) == {1, 2}


def draw(logits, seed=0, **options):
    """Makes NUM_DRAWS independent draws from one row."""
    rows = jnp.broadcast_to(logits[None, :], (NUM_DRAWS, logits.size))
    return np.asarray(jitted(rows, jax.random.key(seed), **options))


def expected(logits, temperature, top_k=0, top_p=1.0):
    """Computes the distribution by its definition, token by token in float64."""
    logits = np.asarray(logits, np.float64) / temperature
    likely = sorted(range(logits.size), key=lambda token: (-logits[token], token))
    likely = likely[: top_k or None]
    weights = np.exp(logits - logits.max())
    total, reached, kept = sum(weights[token] for token in likely), 0.0, []
    for token in likely:
        kept.append(token)
        reached += weights[token] / total
        if reached >= top_p:
            break
    result = np.zeros(logits.size)
    result[kept] = weights[kept] / weights[kept].sum()
    return result


def chi_square(draws, probabilities):
    """Pearson's statistic over the tokens that may occur, and its degrees of freedom."""
    counts = np.bincount(draws, minlength=probabilities.size)
    possible = probabilities > 0
    assert counts[~possible].sum() == 0, f"tokens {np.flatnonzero(counts * ~possible)} were cut and yet drawn"
    mean = draws.size * probabilities[possible]
    return ((counts[possible] - mean) ** 2 / mean).sum(), possible.sum() - 1


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_k": VOCAB_SIZE},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 2.0, "top_p": 0.35},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.75},
    ],
    ids=lambda options: "-".join(f"{name}{value}" for name, value in options.items()),
)
def test_draws_follow_the_distribution(logits, options):
    statistic, freedom = chi_square(draw(logits, **options), expected(logits, **options))
    # The mean is `freedom` and the variance 2 * freedom: the limit is five standard deviations.
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_top_p_is_of_the_top_k_renormalised(logits):
    """If top_p came before top_k, another set of tokens would be kept here."""
    options = {"temperature": 1.0, "top_k": 4, "top_p": 0.75}
    alone = expected(logits, 1.0, top_p=0.75)
    together = expected(logits, **options)
    assert (together > 0).sum() < min(4, (alone > 0).sum())
    assert set(draw(logits, **options)) == set(np.flatnonzero(together))


def test_greedy_takes_the_highest_and_the_lowest_id_among_equals():
    logits = jnp.array([[0.0, 3.0, 1.0, 3.0], [-1.0, -5.0, -2.0, -1.0], [2.0, 2.0, 2.0, 2.0]])
    assert jitted(logits, jax.random.key(0)).tolist() == [1, 0, 0]
    assert jitted(logits, jax.random.key(0), temperature=0.0, top_k=2, top_p=0.5).tolist() == [1, 0, 0]


def test_greedy_rows_draw_nothing():
    """A greedy row draws no random numbers, whatever its top_k and top_p are and whatever the other rows do."""
    logits = jax.random.normal(jax.random.key(2), (64, 40))
    temperature = (jnp.arange(64) % 2).astype(jnp.float32)
    sampled = jitted(logits, jax.random.key(0), temperature=temperature, top_k=3, top_p=0.5)
    expected = np.argmax(np.asarray(logits), axis=1)
    assert (np.asarray(greedy(logits)) == expected).all()
    assert (np.asarray(sampled)[::2] == expected[::2]).all()
    assert (np.asarray(sampled)[1::2] != expected[1::2]).any()


@pytest.mark.parametrize(("options", "kept"), [({"top_k": 2}, {0, 1}), ({"top_p": 0.5}, {0, 1})])
def test_ties_at_a_cut_go_to_the_lower_ids(options, kept):
    assert set(draw(jnp.zeros(4), temperature=1.0, **options)) == kept


def test_the_token_that_crosses_top_p_stays():
    logits = jnp.log(jnp.array([0.5, 0.25, 0.125, 0.125]))  # exact in binary
    assert set(draw(logits, temperature=1.0, top_p=0.5)) == {0}
    assert set(draw(logits, temperature=1.0, top_p=0.51)) == {0, 1}
    assert set(draw(logits, temperature=1.0, top_p=1e-6)) == {0}


@pytest.mark.slow_on_cpu
def test_top_p_one_cuts_nothing():
    """In float32 the sum of many small probabilities may reach 1 too early; no token may be lost by that."""
    logits = 4 * jax.random.normal(jax.random.key(0), (16, 50_000))
    top_p = jnp.ones(16).at[0].set(0.5)  # one row has a top_k, so that the other rows are sorted too
    kept = np.isfinite(jax.jit(_cut)(logits, jnp.zeros(16, jnp.int32), top_p)).sum(axis=1)
    assert 1 < kept[0] < 25_000
    assert (kept[1:] == 50_000).all()


def test_rows_have_their_own_options(logits):
    rows = jnp.broadcast_to(logits[None, :], (4000, VOCAB_SIZE))
    how = jnp.arange(4000) % 4
    drawn = jitted(
        rows,
        jax.random.key(0),
        temperature=jnp.array([0.0, 1.0, 1.0, 4.0])[how],
        top_k=jnp.array([0, 2, 0, 0])[how],
        top_p=jnp.array([1.0, 1.0, 0.4, 1.0])[how],
    )
    drawn = np.asarray(drawn).reshape(-1, 4)
    assert set(drawn[:, 0]) == {int(jnp.argmax(logits))}
    assert set(drawn[:, 1]) == set(np.flatnonzero(expected(logits, 1.0, top_k=2)))
    assert set(drawn[:, 2]) == set(np.flatnonzero(expected(logits, 1.0, top_p=0.4)))
    assert len(set(drawn[:, 3])) == VOCAB_SIZE


def test_a_row_does_not_change_with_what_others_ask_for(logits):
    rows, key = jnp.broadcast_to(logits[None, :], (8, VOCAB_SIZE)), jax.random.key(3)
    alone = jitted(rows, key, temperature=1.0)
    mixed = jitted(rows, key, temperature=1.0, top_k=jnp.array([0, 0, 0, 0, 0, 0, 0, 1]))
    assert alone[:-1].tolist() == mixed[:-1].tolist()


def test_seeds(logits):
    assert (draw(logits, 5, temperature=1.0) == draw(logits, 5, temperature=1.0)).all()
    assert (draw(logits, 5, temperature=1.0) != draw(logits, 6, temperature=1.0)).any()


@pytest.mark.parametrize("options", [{}, {"top_k": VOCAB_SIZE - 1}, {"top_p": 0.999999}])
def test_forbidden_tokens_are_never_drawn(logits, options):
    forbidden = int(jnp.argmax(logits))
    logits = logits.at[forbidden].set(-jnp.inf)
    assert forbidden not in draw(logits, temperature=1.0, **options)
    assert int(jitted(logits[None], jax.random.key(0))[0]) == int(jnp.argmax(logits))


def test_options_are_traced(logits):
    before = jitted._cache_size()
    for temperature, top_k, top_p in (0.5, 3, 0.9), (0.6, 4, 0.8), (0.0, 0, 1.0):
        jitted(logits[None], jax.random.key(0), temperature=temperature, top_k=top_k, top_p=top_p)
    assert jitted._cache_size() - before == 1


@pytest.mark.slow_on_cpu
def test_candidates_are_those_of_a_sort_of_all():
    """The rows are steep and flat, with many equal logits, and have all combinations of top_k and top_p."""
    normal = jax.random.normal(jax.random.key(0), (8, 4096))
    logits = jnp.round(4 * normal * jnp.array([3.0, 1, 0.5, 2, 4, 0.01, 2, 1])[:, None]) / 4
    logits = logits.at[6, ::2].set(-jnp.inf)
    top_k = jnp.array([20, 0, 100, 0, 0, 0, 3, 2000], jnp.int32)
    top_p = jnp.array([1.0, 0.3, 0.9, 0.7, 0.95, 0.9, 0.5, 1.0])
    kept, is_right = jax.jit(cut_candidates)(logits, top_k, top_p)
    wanted = jax.jit(_cut_all)(logits, top_k, top_p)
    np.testing.assert_array_equal(kept[is_right], wanted[is_right])
    assert is_right.tolist() == [True] * 5 + [False, True, False]  # even rows, and top_k 2000, keep too many
    np.testing.assert_array_equal(jax.jit(_cut)(logits, top_k, top_p), wanted)
    uncut, is_right = jax.jit(cut_candidates)(logits, jnp.zeros(8, jnp.int32), jnp.ones(8))
    np.testing.assert_array_equal(uncut, logits)
    assert is_right.all()


@pytest.mark.slow_on_cpu
def test_devices_exchange_candidates_alone():
    mesh = make_mesh({"dp": 1, "tp": 4}, jax.devices("cpu"))
    logits = jax.device_put(jax.random.normal(jax.random.key(0), (2, 8192)), NamedSharding(mesh, P(None, "tp")))
    arguments = logits, jnp.full(2, 9, jnp.int32), jnp.full(2, 0.9)
    compiled = jax.jit(cut_candidates, out_shardings=(logits.sharding, None)).lower(*arguments).compile()
    moved = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-\w+|collective-\w+|reduce-scatter)\(", str(compiled.as_text()))
    assert moved
    assert max(np.prod([int(size) for size in shape.split(",") if size]) for shape in moved) <= 2 * 8 * 128
    np.testing.assert_array_equal(compiled(*arguments)[0], jax.jit(_cut_all)(*arguments))
