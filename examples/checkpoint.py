"""Loads a Hugging Face model folder (or hub id) into a `Decoder`, and saves a `Decoder`'s weights under the same names.

A folder holds config.json (config.py), tokenizer.json, model.safetensors or its shards with
model.safetensors.index.json, and perhaps generation_config.json. A folder is refused if it lacks a tensor, or has one
that the decoder has no place for; copies of tied embeddings and of RoPE's frequencies are left out. The decoder keeps
some matrices side by side in one (q, k and v; gate and up), which are separate tensors in a folder: `load_model` joins
them and `save_model` separates them again.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from examples.config import CheckpointError, DecoderConfig, load_config, read_json
from examples.decoder import Decoder
from examples.sharding import MeshError, sharding_of, split_config

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

# For each module of the decoder, the Hugging Face module that holds its weights, or several that lie side by side; * is
# the number of the layer.
MODULES: dict[str, dict[str, str | tuple[str, ...]]] = {
    "opt": {
        "embed_tokens": "model.decoder.embed_tokens",
        "embed_positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "layers.*.attention_norm": "model.decoder.layers.*.self_attn_layer_norm",
        "layers.*.attention.qkv_proj": (
            "model.decoder.layers.*.self_attn.q_proj",
            "model.decoder.layers.*.self_attn.k_proj",
            "model.decoder.layers.*.self_attn.v_proj",
        ),
        "layers.*.attention.o_proj": "model.decoder.layers.*.self_attn.out_proj",
        "layers.*.mlp_norm": "model.decoder.layers.*.final_layer_norm",
        "layers.*.mlp.up_proj": "model.decoder.layers.*.fc1",
        "layers.*.mlp.down_proj": "model.decoder.layers.*.fc2",
        "final_norm": "model.decoder.final_layer_norm",
        "lm_head": "lm_head",
    },
    "llama": {
        "embed_tokens": "model.embed_tokens",
        "layers.*.attention_norm": "model.layers.*.input_layernorm",
        "layers.*.attention.qkv_proj": (
            "model.layers.*.self_attn.q_proj",
            "model.layers.*.self_attn.k_proj",
            "model.layers.*.self_attn.v_proj",
        ),
        "layers.*.attention.o_proj": "model.layers.*.self_attn.o_proj",
        "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
        "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
        "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
        "layers.*.mlp.gate_up_proj": ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
        "layers.*.mlp.down_proj": "model.layers.*.mlp.down_proj",
        "final_norm": "model.norm",
        "lm_head": "lm_head",
    },
}
# The checkpoint's name for each Flax parameter. A kernel is [in, out] in Flax and [out, in] in the checkpoint.
PARAMETERS = {"embedding": "weight", "kernel": "weight", "scale": "weight", "bias": "bias"}
DTYPES = "F32", "F16", "BF16"  # safetensors' names
ADVICE = "save the model anew with transformers' save_pretrained"


def load_model(
    model: str | Path, dtype: DTypeLike, mesh: Mesh | None = None
) -> tuple[Decoder, DecoderConfig, Tokenizer, tuple[int, ...]]:
    """Loads a decoder, its tokenizer and the tokens that end a text, showing progress on stderr.

    Args:
        model: a folder, or the id of a model on the Hugging Face Hub, which is downloaded to its cache.
        dtype: the dtype to which the weights are cast.
        mesh: the devices that share the model (sharding.py); only the parts of a process's own devices are read.

    Returns:
        The decoder, its config, the tokenizer, and the end-of-text token ids, of which there may be none.

    Raises:
        CheckpointError: the folder lacks something, or holds something that the decoder cannot use.
        MeshError: the model cannot be split over the mesh.
    """
    folder = find_folder(model)
    config = load_config(folder)
    tokenizer = _load_tokenizer(folder)
    decoder = _load_weights(folder, config, dtype, mesh)
    return decoder, split_config(config, mesh), tokenizer, _load_eos_token_ids(folder)


def save_model(folder: str | Path, model: Decoder, config: DecoderConfig) -> None:
    """Writes a decoder's weights to `model.safetensors`, under Hugging Face's names and in their own dtype.

    Args:
        folder: where to write; it is made if it does not exist. The caller writes its config.json.
        model: the decoder.
        config: the decoder's config.
    """
    tensors = {}
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array = np.asarray(parameter[...])
        array = array.T if path[-1] == "kernel" else array
        sizes = _tensor_sizes(path, array.shape[0], config)
        for name, tensor in zip(sizes, np.split(array, np.cumsum([*sizes.values()])[:-1]), strict=True):
            tensors[name] = np.ascontiguousarray(tensor)
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def _tensor_sizes(path: Sequence[Any], size: int, config: DecoderConfig) -> dict[str, int]:
    """Names the checkpoint's tensors that make up one parameter, each with the length of its first axis.

    Args:
        path: the parameter's path, such as ("layers", 3, "attention", "qkv_proj", "kernel").
        size: length of the whole parameter's first axis, transposed as in the checkpoint.
        config: the decoder's config.
    """
    module = ".".join("*" if isinstance(part, int) else part for part in path[:-1])
    layer = next((str(part) for part in path if isinstance(part, int)), "")
    modules = MODULES[config.family][module]
    modules = (modules,) if isinstance(modules, str) else modules
    sizes = [size // len(modules)] * len(modules)
    if len(modules) == 3:  # query, key and value heads
        sizes = [num_heads * config.head_size for num_heads in (config.num_heads, *[config.num_kv_heads] * 2)]
    names = [f"{name.replace('*', layer)}.{PARAMETERS[str(path[-1])]}" for name in modules]
    return dict(zip(names, sizes, strict=True))


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


def _load_weights(folder: Path, stored: DecoderConfig, dtype: DTypeLike, mesh: Mesh | None) -> Decoder:
    config = split_config(stored, mesh)
    # eval_shape gives the parameters' shapes without making random weights.
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype)))
    parameters = []  # each with its path, whether the checkpoint has it transposed, and its tensors there
    for path, parameter in nnx.to_flat_state(state):
        sizes = _tensor_sizes(path, _stored_rows(path, parameter.shape, config, stored), stored)
        parameters.append((path, parameter, path[-1] == "kernel", sizes))
    wanted = {name for *_, sizes in parameters for name in sizes}
    tensors = _find_tensors(folder)
    if config.tie_embeddings:
        _drop_tied_head(tensors, next(iter(_tensor_sizes(("embed_tokens", "embedding"), 0, config))))
    if missing := wanted - tensors.keys():
        raise CheckpointError(f"{folder} lacks tensor {_some(missing)}")
    if unexpected := tensors.keys() - wanted:
        raise CheckpointError(f"{folder} has a tensor that its architecture has no place for: {_some(unexpected)}")

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for path, parameter, is_kernel, sizes in progress.track(parameters, description=f"Loading {folder.name}"):
            shape = parameter.shape[::-1] if is_kernel else parameter.shape
            for name, size in sizes.items():
                if (found := tensors[name].shape) != (expected := (size, *shape[1:])):
                    raise CheckpointError(f"tensor {name} has shape {found}; expected {expected}")
            rows = _Rows([tensors[name] for name in sizes], list(sizes.values()), config)

            def read(index, rows=rows, is_kernel=is_kernel, shape=shape, sizes=sizes):
                first, *others = index[::-1] if is_kernel else index
                array = rows.read(*first.indices(shape[0])[:2], *others)
                return _cast(array.T if is_kernel else array, dtype, sizes)

            sharding = sharding_of(path, parameter.shape, mesh)
            parameter.set_value(jax.make_array_from_callback(parameter.shape, sharding, read))
    return nnx.merge(graphdef, state)


def _cast(array: np.ndarray, dtype: DTypeLike, names: Iterable[str]) -> np.ndarray:
    """Casts a part of some tensors, and refuses finite values that would become infinite."""
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if jnp.finfo(cast.dtype).max < jnp.finfo(array.dtype).max:
        # NumPy does not know whether a bfloat16 is finite.
        is_lost = np.isinf(cast.astype(np.float32)) & np.isfinite(array.astype(np.float32))
        if is_lost.any():
            raise CheckpointError(f"{cast.dtype} cannot hold a value of {_some(names)}: choose another dtype")
    return cast


def _stored_rows(path: Sequence[Any], shape: tuple[int, ...], config: DecoderConfig, stored: DecoderConfig) -> int:
    """How many rows all of a parameter's tensors have in the checkpoint, which has no copies of kv heads."""
    size = shape[-1 if path[-1] == "kernel" else 0]
    is_qkv = len(path) > 1 and path[-2] == "qkv_proj"
    return size - 2 * (config.num_kv_heads - stored.num_kv_heads) * config.head_size if is_qkv else size


class _Rows:
    """The rows of several tensors as one array: first those of each tensor for the first device, then for the second.

    Args:
        tensors: the tensors, which are joined along their first axis.
        sizes: the length of each tensor's first axis.
        config: the decoder's config. Where the checkpoint has fewer kv heads, several devices get copies of one.
    """

    def __init__(self, tensors: list["_Tensor"], sizes: list[int], config: DecoderConfig):
        num_parts = config.num_parts if len(tensors) > 1 else 1
        self._pieces = []  # each is a tensor, the first row that the piece takes of it, and the number of rows
        for part in range(num_parts):
            for tensor, size in zip(tensors, sizes, strict=True):
                length = max(size // num_parts, config.head_size) if len(tensors) == 3 else size // num_parts
                self._pieces.append((tensor, part * size // num_parts // length * length, length))

    def read(self, start: int, stop: int, *others: slice) -> np.ndarray:
        """Reads the rows from `start` to `stop` of all pieces together, and of them the slices `others`."""
        arrays, before = [], 0
        for tensor, first, length in self._pieces:
            low, high = max(start - before, 0), min(stop - before, length)
            if low < high:
                arrays.append(tensor.read(slice(first + low, first + high), *others))
            before += length
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class _Tensor(NamedTuple):
    """A tensor in an open safetensors file."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self.file.get_slice(self.name).get_shape())

    def read(self, *index: slice) -> np.ndarray:
        """Reads only this part of the tensor from the file, or all of it without an index."""
        found = self.file.get_slice(self.name).get_dtype()
        if found not in DTYPES:
            raise CheckpointError(f"tensor {self.name} has dtype {found}; supported: {', '.join(DTYPES)}")
        return self.file.get_slice(self.name)[index] if index else self.file.get_tensor(self.name)


def _find_tensors(folder: Path) -> dict[str, _Tensor]:
    """Finds the tensors of the folder's file or of its shards, by their names in the whole model."""
    index = folder / "model.safetensors.index.json"
    paths = [folder / "model.safetensors"]
    if not paths[0].exists() and index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map of tensors to files")
        named = sorted(set(weight_map.values()))
        if outside := [name for name in named if Path(name).name != name or not name.endswith(".safetensors")]:
            raise CheckpointError(f"{index} names a file that is no *.safetensors of its folder: {_some(outside)}")
        paths = [folder / name for name in named]
    elif not paths[0].exists():
        hint = f", only *.bin: {ADVICE}" if any(folder.glob("*.bin")) else ""
        raise CheckpointError(f"{folder} has no model.safetensors{hint}")

    tensors: dict[str, _Tensor] = {}
    for path in paths:
        try:
            file = safe_open(path, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        for name in sorted(file.keys()):
            if name.endswith("rotary_emb.inv_freq"):
                continue  # old versions of transformers wrote this tensor, which follows from config.json
            # In a model that was saved without its head, names lack their first part.
            full_name = name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
            if full_name in tensors:
                raise CheckpointError(f"{folder} has tensor {name} more than once")
            tensors[full_name] = _Tensor(file, name)
    return tensors


def _drop_tied_head(tensors: dict[str, _Tensor], embedding: str) -> None:
    """Drops the output head, which must be a copy of the embedding."""
    head = tensors.pop("lm_head.weight", None)
    if head is not None and embedding in tensors and not np.array_equal(head.read(), tensors[embedding].read()):
        raise CheckpointError(f"tie_word_embeddings is true, yet lm_head.weight and {embedding} differ")


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} (and {len(others)} more)" if others else first
