"""Model folders of the tiny models in tests/data, as `save_pretrained` would write them."""

import dataclasses
import functools
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from examples.checkpoint import CheckpointError, load_model, save_model
from examples.command_line import TINY
from tests.model_weights import draw_tensors

DATA = Path(__file__).parent / "data"
NAMES = sorted(path.stem for path in DATA.glob("*.json"))
SHARDS = {"llama": 3}
_kept: list[tempfile.TemporaryDirectory] = []  # removed when the process ends


@functools.cache
def reference(name: str) -> SimpleNamespace:
    """Reads the file that tests/data/make_models.py wrote for a model."""
    return SimpleNamespace(**json.loads((DATA / f"{name}.json").read_text()))


def older(name: str) -> dict[str, Any]:
    """A model's config.json in the shape of older files."""
    found = reference(name)
    return {k: v for k, v in (found.config | found.older).items() if k not in found.older or v is not None}


def make_tokenizer() -> Tokenizer:
    """Makes a tokenizer with a token for each printable ASCII character; token 0 ends a text."""
    vocab = {"</s>": 0} | {chr(31 + i): i for i in range(1, 96)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@functools.cache
def folder(name: str) -> Path:
    """The folder of a model, written once in each process; tests that change one copy it first."""
    _kept.append(tempfile.TemporaryDirectory(prefix="model_"))
    path = Path(_kept[-1].name) / name
    path.mkdir()
    found = reference(name)
    (path / "config.json").write_text(json.dumps(found.config, indent=2))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    make_tokenizer().save(str(path / "tokenizer.json"))
    tensors = draw_tensors(found.tensors, found.seed)
    num_shards = SHARDS.get(name, 1)
    files = [f"model-{i:05}-of-{num_shards:05}.safetensors" for i in range(1, num_shards + 1)]
    files = files if num_shards > 1 else ["model.safetensors"]
    weight_map = {}
    for file, names in zip(files, np.array_split(sorted(tensors), num_shards), strict=True):
        save_file({str(n): tensors[str(n)] for n in names}, path / file, metadata={"format": "pt"})
        weight_map |= {str(n): file for n in names}
    if num_shards > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@functools.cache
def short_tiny() -> Path:
    """A folder `tiny` with the first of the tiny model's five layers, whose programs compile in a third of the time."""
    return _with_one_layer(TINY, "tiny")


@functools.cache
def short(name: str) -> Path:
    """A folder of a model in `data` with the first of its layers alone."""
    return _with_one_layer(folder(name), name)


def _with_one_layer(source: Path, name: str) -> Path:
    _kept.append(tempfile.TemporaryDirectory(prefix="model_"))
    path = Path(_kept[-1].name) / name
    path.mkdir()
    model, config, _, _ = load_model(source, jnp.float32)
    model.layers = nnx.List(list(model.layers)[:1])
    save_model(path, model, dataclasses.replace(config, layers=config.layers[:1]))
    for file in ("tokenizer.json", "config.json", "generation_config.json"):
        if (source / file).exists():
            (path / file).write_bytes((source / file).read_bytes())
    edit(path / "config.json", {"num_hidden_layers": 1})
    return path


@pytest.fixture
def copy(tmp_path):
    """`copy(name, **changes)` copies a model's folder, with keys of its config set or removed (`...`)."""

    def copy(name, **changes):
        copied = tmp_path / name
        shutil.copytree(folder(name), copied)
        edit(copied / "config.json", changes)
        return copied

    return copy


def edit(path, changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def refuse(folder, message):
    """Checks that loading raises a one-line error with these words."""
    with pytest.raises(CheckpointError, match=message) as raised:
        load_model(folder, jnp.float32)
    assert "\n" not in str(raised.value)
