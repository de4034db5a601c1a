"""Tests that the examples read and write Hugging Face model folders, and refuse bad ones in one clear line."""

import fnmatch
import json
import shutil
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import load_file, save_file

from examples.checkpoint import CheckpointError, find_folder, load_model, save_model
from examples.families import load_config
from examples.tensors import drop_tied_head
from tests import model_folders
from tests.model_folders import copy as copy
from tests.model_folders import edit, refuse

MODELS = model_folders.NAMES


def load_tensors(folder):
    return {name: array for path in folder.glob("*.safetensors") for name, array in load_file(path).items()}


def parameters(model):
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def same(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and (a[k] == b[k]).all() for k in a)


@pytest.mark.parametrize("name", MODELS)
def test_saved_tensors_are_those_that_transformers_saved(name, tmp_path):
    model, config, _, _ = load_model(model_folders.folder(name), jnp.float32)
    save_model(tmp_path, model, config)
    assert same(load_tensors(tmp_path), load_tensors(model_folders.folder(name)))


def test_shards_are_tested():
    assert len(list((model_folders.folder("llama")).glob("*.safetensors"))) > 1


@pytest.mark.parametrize("stored", [jnp.float16, jnp.bfloat16])
def test_half_precision(stored, copy, tmp_path):
    model, config, _, _ = load_model(model_folders.folder("mistral"), stored)
    folder = copy("mistral")
    save_model(folder, model, config)
    assert {array.dtype for array in load_tensors(folder).values()} == {jnp.dtype(stored)}
    loaded, *_ = load_model(folder, stored)
    assert same(parameters(loaded), parameters(model))
    widened, *_ = load_model(folder, jnp.float32)
    wide = jax.tree.map(lambda array: array.astype(np.float32), parameters(model))
    assert same(parameters(widened), wide)


def test_tokenizer_and_eos(copy):
    _, _, tokenizer, eos_token_ids = load_model(model_folders.folder("qwen3"), jnp.float32)
    assert tokenizer.decode(tokenizer.encode("def f(x):").ids) == "def f(x):"
    assert eos_token_ids == (0,)
    folder = copy("qwen3")
    edit(folder / "generation_config.json", {"eos_token_id": [3, 5]})
    assert load_model(folder, jnp.float32)[3] == (3, 5)
    for none in (-1, [-1], []):
        edit(folder / "generation_config.json", {"eos_token_id": none})
        assert load_model(folder, jnp.float32)[3] == ()
    (folder / "generation_config.json").unlink()
    assert load_model(folder, jnp.float32)[3] == (0,)
    edit(folder / "config.json", {"eos_token_id": None})
    assert load_model(folder, jnp.float32)[3] == ()


def test_truncation_and_padding_in_tokenizer_json_are_undone(copy):
    folder = copy("llama")
    tokenizer = load_model(folder, jnp.float32)[2]
    texts = "def f(x): return x", "x"
    expected = [tokenizer.encode(text).ids for text in texts]
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert [load_model(folder, jnp.float32)[2].encode(text).ids for text in texts] == expected


def test_progress_goes_to_stderr(capsys, monkeypatch):
    load_model(model_folders.folder("llama"), jnp.float32)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    load_model(model_folders.folder("llama"), jnp.float32)
    out, err = capsys.readouterr()
    assert not out
    assert "Loading llama" in err


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_hub_id(name, copy, monkeypatch, tmp_path):
    """All files that are read are downloaded, and no others; one model has several files of weights."""
    there, here = copy(name), tmp_path / "here"
    for file in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        (there / file).write_text("{}")
    wanted = {path.name for path in there.iterdir()}
    for file in ("README.md", "pytorch_model.bin", "consolidated.safetensors"):
        (there / file).write_text("no")
    here.mkdir()

    def snapshot_download(repo_id, *, allow_patterns):
        assert repo_id == f"someone/{name}"
        for path in there.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, here)
        return str(here)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    _, config, _, ends = load_model(f"someone/{name}", jnp.float32)
    assert (config, ends) == (load_config(there), (0,))
    assert {path.name for path in here.iterdir()} == wanted


def test_models_that_cannot_be_downloaded(monkeypatch):

    def fail(*args, **kwargs):
        raise LocalEntryNotFoundError("Cannot reach the hub.\n\nCheck your connection.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    refuse("someone/llama", "someone/llama is no folder, and cannot be downloaded: Cannot reach the hub. Check")
    refuse("./someone/llama", "./someone/llama is no folder, nor a hub id")
    refuse(model_folders.folder("llama") / "config.json", "is no folder, nor a hub id")


# Files and tensors


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}, ...])
def test_refused_weight_maps(weight_map, copy):
    folder = copy("llama")
    edit(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    refuse(folder, "index.json has no weight_map of tensors to files")


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret.safetensors", "..", "a/b.safetensors", "x.bin", ""])
def test_an_index_names_files_of_its_folder_only(name, copy):
    folder = copy("llama")
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit(index, {"weight_map": weight_map | {"model.norm.weight": name}})
    refuse(folder, r"index.json names a file that is no \*.safetensors of its folder: " + name)


def test_shards_may_be_links(copy, tmp_path):
    """The hub's cache keeps files elsewhere and links to them."""
    folder = copy("llama")
    for i, shard in enumerate(sorted(folder.glob("*.safetensors"))):
        shard.symlink_to(shard.rename(tmp_path / f"blob{i}"))
    assert same(
        parameters(load_model(folder, jnp.float32)[0]),
        parameters(load_model(model_folders.folder("llama"), jnp.float32)[0]),
    )


@pytest.mark.parametrize(("stored", "value"), [(np.float32, 7e4), (jnp.bfloat16, -1e30)])
def test_weights_that_float16_cannot_hold(stored, value, copy):
    folder = copy("qwen3")
    tensors = {name: array.astype(stored) for name, array in load_tensors(folder).items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"float16 cannot hold a value of model.layers.1.mlp.gate_proj"):
        load_model(folder, jnp.float16)
    load_model(folder, jnp.bfloat16)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = np.inf  # which float16 holds
    save_file(tensors, folder / "model.safetensors")
    load_model(folder, jnp.float16)


def test_refused_files(copy):
    folder = copy("llama")
    index, shard = folder / "model.safetensors.index.json", sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(b"not a tensor")
    refuse(folder, f"{shard.name} cannot be read")
    shard.unlink()
    refuse(folder, f"{shard.name} cannot be read")
    index.unlink()
    refuse(folder, "has no model.safetensors$")
    (folder / "pytorch_model.bin").touch()
    refuse(folder, "only .*bin: save the model anew with transformers' save_pretrained")
    (folder / "tokenizer.json").write_text("{}")
    refuse(folder, "tokenizer.json cannot be read")
    (folder / "tokenizer.json").unlink()
    refuse(folder, "has no tokenizer.json: save the model anew")
    (folder / "config.json").write_text("{")
    refuse(folder, "config.json cannot be read")
    (folder / "config.json").write_text("[" * 100_000)
    refuse(folder, "config.json cannot be read")
    (folder / "config.json").write_text("[]")
    refuse(folder, "config.json holds no JSON object")
    (folder / "config.json").unlink()
    refuse(folder, "has no config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks tensor model.norm.weight$"),
        (lambda t: [t.pop(name) for name in list(t)[:3]], r"lacks tensor .* \(and 2 more\)"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.ones(1)}), "no place for: model.layers.2.mlp"),
        (lambda t: t.update({"model.norm.bias": np.ones(32)}), "no place for: model.norm.bias"),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": np.ones((32, 48), np.float32)}),
            r"model.layers.1.mlp.up_proj.weight has shape \(32, 48\); expected \(48, 32\)",
        ),
        (lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}), "dtype I8; supported: F32, F16, BF16"),
        (lambda t: t.update({"norm.weight": t["model.norm.weight"]}), "norm.weight more than once"),
        (lambda t: t.update({"lm_head.weight": np.ones(3, np.float32)}), "tie_word_embeddings is true, yet"),
    ],
)
def test_refused_tensors(change, message, copy):
    folder = copy("qwen3")
    tensors = load_tensors(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    refuse(folder, message)


def test_harmless_differences(copy):
    """Names may lack the head's prefix; a folder may hold a tied head, or the frequencies that old versions wrote."""
    folder = copy("qwen2")
    tensors = {name.removeprefix("model."): array for name, array in load_tensors(folder).items()}
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, folder / "model.safetensors")
    expected, *_ = load_model(model_folders.folder("qwen2"), jnp.float32)
    assert same(parameters(load_model(folder, jnp.float32)[0]), parameters(expected))


def test_the_layer_that_guesses_a_token_more_is_left_out(copy):
    """DeepSeek V3's folders have it behind the last of the config's layers."""
    folder = copy("deepseek_v3")
    tensors, num_layers = load_tensors(folder), load_config(folder).num_layers
    tensors |= {f"model.layers.{num_layers}.{name}": np.ones(3) for name in ("enorm.weight", "mlp.up_proj.weight")}
    save_file(tensors, folder / "model.safetensors")
    load_model(folder, jnp.float32)


def test_a_folder_of_the_user_s_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert find_folder("~/model") == find_folder(tmp_path / "model") == tmp_path / "model"


def test_a_head_without_an_embedding_is_dropped():
    """The embedding is then refused as missing."""
    found: dict[str, Any] = {"lm_head.weight": SimpleNamespace(read=lambda: np.ones(3)), "model.norm.weight": None}
    drop_tied_head(found, "model.embed_tokens.weight")
    assert found == {"model.norm.weight": None}
