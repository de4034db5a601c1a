"""Tests that a cache in host memory is bounded by the machine's free memory and by the length of texts."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from examples import serve
from examples.checkpoint import load_model
from examples.command_line import TINY, CommandError
from examples.families import load_config
from examples.server import memory
from paged_jax.engine.runner import Runner
from tests.model_folders import folder, short_tiny


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_available_memory(tmp_path):
    assert memory.available_memory(tmp_path) is None
    write(tmp_path, proc__meminfo="MemTotal:  9000 kB\nMemFree:  1 kB\nMemAvailable:    3000 kB\nBuffers: 5 kB\n")
    assert memory.available_memory(tmp_path) == 3000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000\n")
    (group / "memory.max").write_text("max\n")
    assert memory.available_memory(tmp_path) == 3000 * 1024
    (group / "memory.max").write_text("5000\n")
    assert memory.available_memory(tmp_path) == 4000
    (group / "memory.current").write_text("6000\n")
    assert memory.available_memory(tmp_path) == 0
    (group / "memory").mkdir()
    for name in ("max", "current"):
        (group / f"memory.{name}").unlink()
    (group / "memory/memory.limit_in_bytes").write_text("700")
    (group / "memory/memory.usage_in_bytes").write_text("100")
    assert memory.available_memory(tmp_path) == 600
    write(tmp_path, proc__meminfo="MemAvailable:\n")
    assert memory.available_memory(tmp_path) == 600


@pytest.fixture(scope="module")
def tiny():
    return load_model(TINY, jnp.float32)


def caches_of(tiny, *arguments):
    decoder, config, tokenizer, _ = tiny
    return serve.make_caches(serve.parse(arguments), decoder, config, tokenizer, "float32")


def test_the_cache_is_bounded_by_the_machine_s_memory(tiny, monkeypatch):
    whole = caches_of(tiny, "--max-num-seqs", "4")
    assert whole[0].num_blocks == 4 * 512 // 16
    size = sum(cache.nbytes for cache in whole)
    for share, num_blocks in ((1, 64), (4, 128), (3, 128)):
        monkeypatch.setattr(serve, "available_memory", lambda share=share: share * size)
        assert caches_of(tiny, "--max-num-seqs", "4")[0].num_blocks == num_blocks
    copies = caches_of(tiny, "--max-num-seqs", "4", "--mesh", "dp=2")
    assert copies[0].num_blocks == 96, "each copy of the model gets half of it"
    monkeypatch.setattr(serve, "available_memory", lambda: None)
    assert caches_of(tiny, "--max-num-seqs", "4")[0].num_blocks == 128
    monkeypatch.setattr(serve, "available_memory", lambda: 100)
    with pytest.raises(CommandError, match="leave no memory"):
        caches_of(tiny)
    assert caches_of(tiny, "--num-blocks", "7")[0].num_blocks == 7, "who asks for blocks gets them"


def test_the_cache_is_bounded_by_the_devices_memory(tiny, monkeypatch):
    """Devices that share out heads or blocks hold more of these together."""
    decoder, config, tokenizer, eos = tiny
    block = sum(cache.nbytes for cache in caches_of(tiny, "--num-blocks", "1"))
    in_use = 8 * block
    limit = (in_use + 10.5 * block) / serve.MEMORY_SHARE  # for ten blocks and a half
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": limit, "bytes_in_use": in_use})
    monkeypatch.setattr(serve.jax, "local_devices", lambda: [device])
    for parts, shards, num_blocks in ((1, 1, 10), (2, 1, 21), (1, 2, 22), (2, 2, 42), (16, 1, 128)):
        shared = dataclasses.replace(config, num_parts=parts, num_shards=shards)
        assert caches_of((decoder, shared, tokenizer, eos), "--max-num-seqs", "4")[0].num_blocks == num_blocks


def test_every_device_of_a_mesh_has_all_latents(tiny, monkeypatch):
    """Devices hold more of them together only where they share out the blocks."""
    config = load_config(folder("deepseek_v2_lite"))
    model = tiny[0], config, *tiny[2:]
    block = sum(cache.nbytes for cache in caches_of(model, "--num-blocks", "1"))
    memory = {"bytes_limit": 10.5 * block / serve.MEMORY_SHARE, "bytes_in_use": 0}
    monkeypatch.setattr(serve.jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: memory)])
    for parts, shards, num_blocks in ((1, 1, 10), (4, 1, 10), (4, 2, 22)):
        shared = dataclasses.replace(config, num_parts=parts, num_shards=shards)
        assert caches_of((tiny[0], shared, *tiny[2:]))[0].num_blocks == num_blocks


def test_scales_are_measured_on_as_many_tokens_as_the_model_has_positions(tiny, monkeypatch):
    measured = []
    monkeypatch.setattr(serve, "choose_scales", lambda *arguments: measured.append(arguments[4]))
    for positions, length in ((20, 20), (512, len(tiny[2].encode(serve.SAMPLE).ids))):
        config = dataclasses.replace(tiny[1], max_position_embeddings=positions)
        caches_of((tiny[0], config, *tiny[2:]), "--num-blocks", "2")
        assert measured[-1].prompt_lens.tolist() == [length]


def test_the_cache_is_bounded_by_the_longest_text(tiny):
    assert caches_of(tiny, "--max-num-seqs", "4", "--max-model-len", "33")[0].num_blocks == 4 * 3
    with pytest.raises(CommandError, match="--max-model-len must be at most the model's 512 positions, got 513"):
        caches_of(tiny, "--max-model-len", "513")


def test_layers_with_a_window_have_blocks_for_it(monkeypatch):
    """The text of 64 tokens needs 16 blocks. Where memory is short, the other layers get as many as then fit."""
    model = load_model(folder("gemma3"), jnp.float32)
    windows = model[1].sliding_windows
    arguments = ["--max-num-seqs", "1", "--max-tokens-per-step", "4", "--block-size", "4", "--max-model-len", "64"]
    whole = caches_of(model, *arguments)
    of_window = {window: cache.num_blocks for window, cache in zip(windows, whole, strict=True)}
    assert of_window == {None: 16, 6: 4}
    block = whole[0].nbytes // whole[0].num_blocks
    size = sum(cache.nbytes for cache in whole)
    monkeypatch.setattr(serve, "available_memory", lambda: 2 * (size - windows.count(None) * block) + 1)
    fewer = caches_of(model, *arguments)
    assert [cache.num_blocks for cache in fewer] == [15 if w is None else of_window[w] for w in windows]


def test_the_longest_text_bounds_requests(capsys, monkeypatch):
    """The server runs no program here, so that its engine compiles none."""
    for name, value in {"_compile": lambda *_: {}, "_warm_up": lambda _: None, "_adjustments": None}.items():
        monkeypatch.setattr(Runner, name, value, raising=False)
    options = ["--max-model-len", "40", "--num-blocks", "8", "--max-num-seqs", "1", "--max-tokens-per-step", "4"]
    options += ["--model", str(short_tiny()), "--served-model-name", "a", "b"]
    server = serve.make_server(serve.parse(options))
    assert server.name == "a"
    assert (server._model.names, server._model.max_model_len) == (("a", "b"), 40)
    assert server._bodies.most_bytes == (1 << 20) + 12 * 40 * len("<|endoftext|>")
    assert serve.main(["--port", "0", "--max-model-len", "513"]) == 2
    assert "--max-model-len must be at most" in capsys.readouterr().err


def test_a_model_knows_the_longest_text_when_its_step_is_made(tiny, monkeypatch):
    """The step has the frequencies of LongRoPE that the limit chooses."""
    _, config, tokenizer, _ = tiny
    called = []
    model = SimpleNamespace(limit=lambda longest: called.append(longest))
    monkeypatch.setattr(serve, "peer_sum", lambda *_: None)
    monkeypatch.setattr(serve, "make_step", lambda *_, **__: (None, called.append("step")))
    monkeypatch.setattr(serve, "make_caches", lambda *_: ())
    monkeypatch.setattr(serve.engine, "Engine", lambda *_, **__: "an engine")
    options = serve.parse(["--max-model-len", "100"])
    assert serve.make_engine(options, model, config, tokenizer, "float32", None) == "an engine"
    assert called == [100, "step"]
