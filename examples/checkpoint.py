"""Loads a Hugging Face model folder (or hub id) into a `Decoder`, and saves a `Decoder`'s weights under the same names.

A folder holds config.json (families.py), tokenizer.json, model.safetensors or its shards with
model.safetensors.index.json, and perhaps generation_config.json. A folder is refused if it lacks a tensor, or has one
that the decoder has no place for; copies of tied embeddings and of RoPE's frequencies are left out. The decoder keeps
some matrices side by side in one (q, k and v; gate and up), which are separate tensors in a folder: `load_model` joins
them and `save_model` separates them again.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import Progress
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from examples.config import CheckpointError, DecoderConfig, Split, read_json
from examples.decoder import Decoder
from examples.families import load_config
from examples.names import Source, is_stack, shapes_of, sources_of
from examples.sharding import MeshError, sharding_of, split_config
from examples.tensors import ADVICE, AnyTensor, Rows, cast, check_names, drop_tied_head, find_tensors

__all__ = ["CheckpointError", "MeshError", "load_model", "save_model"]

HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
]


def load_model(
    model: str | Path, dtype: DTypeLike, mesh: Mesh | None = None, *, split_experts: Split = "columns"
) -> tuple[Decoder, DecoderConfig, Tokenizer, tuple[int, ...]]:
    """Loads a decoder, its tokenizer and the tokens that end a text, showing progress on stderr.

    Args:
        model: a folder, or the id of a model on the Hugging Face Hub, which is downloaded to its cache.
        dtype: the dtype to which the weights are cast.
        mesh: the devices that share the model (sharding.py); only the parts of a process's own devices are read.
        split_experts: how these devices split a mixture of experts: by the columns of every expert, or by experts.

    Returns:
        The decoder, its config, the tokenizer, and the end-of-text token ids, perhaps none.

    Raises:
        CheckpointError: the folder lacks something, or holds something that the decoder cannot use.
        MeshError: the model cannot be split over the mesh.
    """
    folder = find_folder(model)
    config = load_config(folder)
    if config.experts is not None:
        config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, split=split_experts))
    tokenizer = _load_tokenizer(folder)
    decoder = load_weights(folder, config, dtype, mesh)
    return decoder, split_config(config, mesh), tokenizer, _load_eos_token_ids(folder)


def save_model(folder: str | Path, model: Decoder, config: DecoderConfig) -> None:
    """Writes a decoder's weights to `model.safetensors`, under Hugging Face's names and in their own dtype.

    Args:
        folder: where to write; it is made if it does not exist. The caller writes its config.json.
        model: the decoder, on one device.
        config: the decoder's config.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array = np.asarray(parameter[...])
        stack = _as_stored(path, array)
        sources = sources_of(path, stack.shape[1], config)
        for name, shape in shapes_of(sources, stack.shape[2:]).items():
            tensors.setdefault(name, np.empty(shape, array.dtype))
        for matrix, pieces in zip(stack, sources, strict=True):
            row = 0
            for piece in pieces:
                rows, where = matrix[row : row + piece.size], slice(piece.start, None, piece.step)
                if piece.expert is None:
                    tensors[piece.name][where][: piece.size] = rows
                else:
                    tensors[piece.name][piece.expert, ..., where] = rows.T
                row += piece.size
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def named_shapes(path: Sequence[Any], shape: tuple[int, ...], config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Gives the names and shapes of the tensors in a folder that make up one parameter of a decoder on one device."""
    _, size, *others = _as_stored(path, shape)
    return shapes_of(sources_of(path, size, config), tuple(others))


def _as_stored(path: Sequence[Any], array: Any) -> Any:
    """Gives a parameter, or its shape, as in a folder: `[matrices, rows, ...]`, where rows are a kernel's columns."""
    if isinstance(array, tuple):
        array = array[::-1] if path[-1] == "kernel" else array
        return array if is_stack(path) else (1, *array)
    array = array.T if path[-1] == "kernel" else array
    return array if is_stack(path) else array[None]


def find_folder(model: str | Path) -> Path:
    """Finds the folder of a model: the given one, or one that is downloaded from the hub to its cache.

    Raises:
        CheckpointError: there is no such folder, or it cannot be downloaded.
    """
    if not str(model):
        raise CheckpointError("the model's name is empty")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(model)):
        raise CheckpointError(f"{model} is no folder, nor a hub id such as 'Qwen/Qwen3-0.6B'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(str(model), allow_patterns=HUB_FILES))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{model} is no folder, and cannot be downloaded: {reason}") from None


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{folder} has no tokenizer.json: {ADVICE}, the tokenizer too")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    # A file may ask for truncation and padding, which are for training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Reads the token ids at which transformers stops, from generation_config.json or else config.json.

    Some configs say -1, which is no token, where a model has none.
    """
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists() and (ids := read_json(folder / name).get("eos_token_id")) is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if any(type(token_id) is not int or abs(token_id) >= 2**31 for token_id in ids):
                raise CheckpointError(f"{name} has eos_token_id {ids}; expected token ids")
            return tuple(token_id for token_id in ids if token_id >= 0)
    return ()


def load_weights(folder: Path, stored: DecoderConfig, dtype: DTypeLike, mesh: Mesh | None) -> Decoder:
    """Loads the weights of a folder into a decoder; see `load_model`.

    Args:
        folder: the folder.
        stored: the config of the whole model.
        dtype: the dtype to which the weights are cast.
        mesh: the devices that share the model, None for one.
    """
    config = split_config(stored, mesh)
    # eval_shape gives the parameters' shapes without making random weights.
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype, mesh=mesh)))
    parameters = []  # each with its path, its sources in the folder, and the shapes of the tensors there
    for path, parameter in nnx.to_flat_state(state):
        _, size, *others = _as_stored(path, parameter.shape)
        if len(path) > 1 and path[-2] == "qkv_proj":  # the folder has no copies of kv heads
            size -= 2 * (config.num_kv_heads - stored.num_kv_heads) * stored.head_size
        sources = sources_of(path, size, stored)
        parameters.append((path, parameter, sources, shapes_of(sources, tuple(others))))
    tensors = find_tensors(folder)
    if config.tie_embeddings:
        drop_tied_head(tensors, sources_of(("embed_tokens", "embedding"), 0, config)[0][0].name)
    if config.family == "deepseek":  # V3's folders have a layer more, which guesses the token after the next
        later = re.compile(r"model\.layers\.(\d+)\.")
        tensors = {n: t for n, t in tensors.items() if not (m := later.match(n)) or int(m[1]) < config.num_layers}
    check_names(folder, [name for *_, shapes in parameters for name in shapes], tensors)

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for path, parameter, sources, shapes in progress.track(parameters, description=f"Loading {folder.name}"):
            for name, expected in shapes.items():
                if (found := tensors[name].shape) != expected:
                    raise CheckpointError(f"tensor {name} has shape {found}; expected {expected}")
            sharding = sharding_of(path, parameter.shape, mesh, config)
            read = _reader(path, parameter.shape, sources, tensors, config, parameter.dtype)
            parameter.set_value(jax.make_array_from_callback(parameter.shape, sharding, read))
    return nnx.merge(graphdef, state)


def _reader(
    path: Sequence[Any],
    shape: tuple[int, ...],
    sources: list[list[Source]],
    tensors: dict[str, AnyTensor],
    config: DecoderConfig,
    dtype: DTypeLike,
) -> Callable[[Any], np.ndarray]:
    """Makes the function that reads the part of a parameter that one device holds."""
    is_kernel, has_matrices = path[-1] == "kernel", is_stack(path)
    whole_experts = path[-2] == "experts" and config.experts is not None and config.experts.split == "experts"
    matrices = [Rows(tensors, pieces, config, 1 if whole_experts else config.num_parts) for pieces in sources]
    _, num_rows, *_ = _as_stored(path, shape)

    def read(index):
        index = index[::-1] if is_kernel else index
        which, (rows, *others) = (index[0], index[1:]) if has_matrices else (slice(None), index)
        arrays = [matrix.read(*rows.indices(num_rows)[:2], *others) for matrix in matrices[which]]
        array = np.stack(arrays) if has_matrices else arrays[0]
        return cast(array.T if is_kernel else array, dtype, {piece.name for pieces in sources for piece in pieces})

    return read
