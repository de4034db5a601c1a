"""The benchmark of whole models, on tiny models without a GPU: bytes that a step must read, rows, refusals, peers."""

import dataclasses
import json
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import bench_model, model_clocks, model_steps, models, report, timing
from examples.families import parse_config
from examples.step import make_abstract_step
from tests.conftest import QUICK_COMPILE


def test_the_floor_of_a_step():
    """Llama-3-8B: 15 GB of weights are read, an embedding of 1 GB is not; a token of context takes 128 KiB."""
    config = models.MODELS["llama3-8b"]
    weights, _ = make_abstract_step(config, jnp.bfloat16)
    none, one = (models.floor_bytes(config, weights, 64, context) for context in (0, 1))
    assert none == 2 * (8_030_261_248 - 128256 * 4096)
    assert one - none == 64 * 2**17


@pytest.mark.slow_on_cpu
def test_the_floor_of_experts_windows_and_latents():
    """The bytes include used experts only, tokens inside a layer's window only, and one vector for each latent."""
    config = models.MODELS["qwen3-30b-a3b"]  # 48 layers of 128 experts with three matrices of 2048 x 768; 8 are drawn
    weights, _ = make_abstract_step(config, jnp.bfloat16)
    none, one, two = (models.floor_bytes(config, weights, num_seqs, 0) for num_seqs in (0, 1, 2))
    matrices = 2 * 48 * 3 * 2048 * 768
    assert one - none == 8 * matrices
    assert two - none == pytest.approx((8 + 8 * 120 / 128) * matrices, abs=1)
    for name, growth in {"gpt-oss-20b": 12, "gemma-3-12b": 8}.items():  # this many layers see all tokens
        config = models.MODELS[name]
        weights, _ = make_abstract_step(config, jnp.bfloat16)
        first, second = (models.floor_bytes(config, weights, 4, context) for context in (1024, 1025))
        assert second - first == 4 * growth * 2 * config.num_kv_heads * config.head_size * 2
    config = models.MODELS["deepseek-v2-lite"]
    weights, _ = make_abstract_step(config, jnp.bfloat16)
    first, second = (models.floor_bytes(config, weights, 4, context) for context in (1024, 1025))
    assert second - first == 4 * 27 * (512 + 64) * 2


def test_random_weights_have_no_mean():
    """Layer after layer would add it to every token; in bfloat16 JAX draws numbers whose mean is 0.01 deviations."""
    weights, _ = models.make_model(models._llama(1, (4096, 256, 256), (2, 1), False))
    for part in weights["embed_tokens"]["embedding"], weights["lm_head"]["kernel"]:
        numbers = np.asarray(part, np.float32)
        assert abs(numbers.mean()) < 0.004 * numbers.std(), "four deviations of a mean of a million numbers"


def test_rows_with_the_same_likeliest_token_go_on_with_different_ones():
    def step(weights, caches, batch):
        return jnp.zeros((3, 8)).at[:, 6].set(1), caches

    ids = jnp.zeros(3, jnp.int32)
    state = model_steps.advance(step, {}, model_steps.State(ids, ids, ()), jnp.arange(3, dtype=jnp.int32)[:, None])
    assert state.token_ids.tolist() == [6, 7, 0]


@pytest.fixture
def tiny_model(monkeypatch):
    monkeypatch.setattr(model_steps, "STEPS", 4)
    sizes = {"vocab_size": 96, "embedding_size": 64, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "layers": models.MODELS["llama3-8b"].layers[:2]}
    return dataclasses.replace(models.MODELS["llama3-8b"], **sizes)


@pytest.mark.slow
def test_model_benchmark(tiny_model, tmp_path):
    def peers():
        return {("tiny", "decode", 3): {"us": 1e9}}

    file = tmp_path / "out" / "model.json"
    work = model_steps.Work([3], [2], 32)
    ceiling = lambda: timing.Ceiling("GB/s", 1000.0, {5: 1.0}, "made up")  # noqa: E731
    bench_model.run({"tiny": tiny_model}, work, peers=peers, options=QUICK_COMPILE, out=file, ceiling=ceiling)
    found = json.loads(file.read_text())
    rows = {(row["case"], row["contender"]): row for row in found["rows"]}
    assert {row.get("failed") for row in found["rows"]} == {None}
    decode = rows["tiny-decode-3x32", "looped"]
    assert decode["share"] == pytest.approx(decode["work"] / decode["us"] / 1e6)
    assert decode["ratios"] == {"torch": 1e9 / decode["us"]}
    assert rows["tiny-prefill-2x32", "torch"]["absent"] == "its process ended early"
    prefill = rows["tiny-prefill-2x32", "called"]
    assert prefill["tokens_per_s"] == pytest.approx(2 * 32 / prefill["us"] * 1e6)
    assert "share" not in prefill
    assert len(rows) == 4 + 3
    assert [row["contender"] for row in found["rows"]][-3:] == ["called", "torch", "torch"]
    assert "| tiny-decode-3x32 | " in report.markdown(found)


@pytest.mark.slow
def test_model_benchmark_of_experts_and_latents(monkeypatch):
    monkeypatch.setattr(model_steps, "STEPS", 4)
    fields = json.loads((Path(__file__).parent / "data" / "deepseek_v2_lite.json").read_text())["config"]
    ceiling = lambda: timing.Ceiling("GB/s", None, {}, "made up")  # noqa: E731
    work = model_steps.Work([3], [], 32)
    rows = bench_model.run({"tiny": parse_config(fields)}, work, options=QUICK_COMPILE, ceiling=ceiling)["rows"]
    assert [row.get("failed") for row in rows] == [None] * 3


def test_models_that_do_not_fit(tiny_model, monkeypatch):
    """Their rows say so, and nothing of them compiles."""
    monkeypatch.setattr(model_steps, "excess", lambda config, weights, case, context: f"{case.num_seqs} are too many")
    monkeypatch.setattr(jax.stages.Lowered, "compile", mock.Mock(side_effect=AssertionError))
    ceiling = lambda: timing.Ceiling("GB/s", None, {}, "made up")  # noqa: E731
    rows = bench_model.run({"tiny": tiny_model}, model_steps.Work([3], [2], 32), ceiling=ceiling)["rows"]
    assert [(row["num_seqs"], row["absent"]) for row in rows] == [
        (3, "3 are too many"),
        (2, "2 are too many"),
    ]


def test_what_does_not_fit(tiny_model, monkeypatch):
    weights, _ = make_abstract_step(tiny_model, jnp.bfloat16)
    case = model_steps.Case("decode", 5)
    needed = models.floor_bytes(tiny_model, weights, 5, 32 + model_steps.STEPS)
    told = {needed: None, needed - 1: "weights, keys and values take 0 GB of 0", None: None}
    for limit, expected in told.items():
        stats = {} if limit is None else {"bytes_limit": limit}
        monkeypatch.setattr(jax, "local_devices", lambda stats=stats: [mock.Mock(memory_stats=lambda: stats)])
        assert model_steps.excess(tiny_model, weights, case, 32) == expected


@pytest.mark.slow
def test_model_benchmark_refuses_steps_that_differ(tiny_model, monkeypatch):
    monkeypatch.setattr(model_clocks, "TOLERANCE", -1.0)
    ceiling = lambda: timing.Ceiling("GB/s", None, {}, "made up")  # noqa: E731
    work = model_steps.Work([1], [], 32)
    (row,) = bench_model.run({"tiny": tiny_model}, work, options=QUICK_COMPILE, ceiling=ceiling)["rows"]
    assert "differ" in row["failed"]


def test_the_models_peer(tiny_model):
    """PyTorch's process answers for each case, even if only that PyTorch is missing."""
    work = model_steps.Work([2], [1], 32)
    answers = bench_model.peer_answers({"tiny": tiny_model}, work, 120)
    assert set(answers) == {("tiny", "decode", 2), ("tiny", "prefill", 1)}
    for answer in answers.values():
        assert answer.get("us", 1) > 0
        assert "us" in answer or "torch" in answer["absent"]
